#include "trainer/report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/profile.h"
#include "kernels/base/text.h"
#include "kernels/ranks/ranks.h"

// --- the log -----------------------------------------------------------------------------------------------

cJSON *log_object(const LogField *fields) {
  cJSON *object = cJSON_CreateObject();
  for (const LogField *f = fields; f->name; f++) {
    if (f->optional && !isfinite(f->number)) continue;
    cJSON *value = f->item ? f->item : f->text ? json_string(f->text) : cJSON_CreateNumber(f->number);
    cJSON_AddItemToObject(object, f->name, value);
  }
  return object;
}

bool log_line(FILE *log, const LogField *fields) {
  cJSON *line = log_object(fields);
  char *text = json_print(line, false);
  cJSON_Delete(line);
  bool written = !log || (fprintf(log, "%s\n", text) >= 0 && !fflush(log));
  free(text);
  return written;
}

bool report_log_lost(const Report *r) {
  return r->log && ferror(r->log);
}

// If this fails after the first step, the run stops and saves its weights: report_log_lost.
static void log_write(const Report *r, const LogField *fields) {
  bool lost = report_log_lost(r); // and said so
  if (!log_line(lost ? NULL : r->log, fields))
    (r->steps_done ? warn : fail)("cannot write the log %s: %s", r->options->log, strerror(errno));
}
#define LOG(...) log_write(r, LOG_EVENT(__VA_ARGS__))

static void print_saving(const Options *o) {
  printf(o->save ? "saves    %s\n" : "nothing is saved: no --save\n",
         o->save ? text_shell_word(o->save) : "");
}

// --- memory ------------------------------------------------------------------------------------------------

enum { MAX_COLUMNS = 3 };

// A row of bytes, or of seconds; left out where all are 0.
static void print_row(const char *where, const char *name, const double *cells, int count, bool seconds) {
  char text[MAX_COLUMNS * 32] = "";
  double sum = 0;
  for (int i = 0; i < count; i++) {
    Text cell = cells[i] > 0 ? text_bytes((uint64_t)cells[i]) : (Text){"-"};
    if (cells[i] > 0 && seconds) snprintf(cell.text, sizeof cell.text, "%.1f ms", 1e3 * cells[i]);
    snprintf(text + 25 * i, sizeof text - 25 * (size_t)i, " %24s", cell.text);
    sum += cells[i];
  }
  if (sum > 0) printf("  %s%-*s%s\n", where, 34 - (int)strlen(where), name, text);
}

void report_memory(const MemoryColumn *columns, int count, DeviceKind device) {
  double cells[MAX_COLUMNS];
#define ROW(where, name, cell, seconds)                                                                      \
  for (const MemoryColumn *c = columns; c < columns + count; c++) cells[c - columns] = (double)(cell);       \
  print_row(where, name, cells, count, seconds)
  printf("%-36s", "memory at the step's peak");
  for (int i = 0; i < count; i++) printf(" %24s", columns[i].title.text);
  putchar('\n');
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) {
    ROW("", memory_category_name((MemoryCategory)k), c->memory.at_peak[k], false);
  }
  ROW("", "all together (ledger)", c->memory.peak, false);
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) {
    ROW("on the host: ", memory_category_name((MemoryCategory)k), c->memory.host[k], false);
  }
  ROW("", "outside of it (libraries, context)", fmax((double)c->device_bytes - (double)c->memory.peak, 0),
      false);
  ROW("in use ", device == ON_CUDA ? "on the device" : "by the process (VmHWM)", c->device_bytes, false);
  ROW("", "LM head + loss alone, at its peak", c->memory.highest[MEMORY_HEAD], false);
  ROW("", "time of one forward and backward", c->pass_seconds, true);
#undef ROW
}

const char *sharding_name(const ParameterDtypes *dtypes) {
  static char text[96];
  if (!dtypes->zero) return "nothing is sharded over them";
  snprintf(text, sizeof text, "%smaster weights%s are sharded over them",
           dtypes->zero == 2 ? "gradients, " : "",
           dtypes->vocab_parallel ? ", moments and the head's rows" : " and moments");
  return text;
}

// --- before the first step ---------------------------------------------------------------------------------

// No model of these families has a soft-cap in transformers, whose config.json may still have the number.
static void warn_of_softcap(const Options *o) {
  double softcap = o->model.final_logit_softcapping;
  const char *family = model_families[o->model.family].model_type;
  if (softcap > 0 && options_given(o, "logit-softcap"))
    warn("--logit-softcap %g is part of this %s model here alone: transformers and other programs ignore it, "
         "and "
         "compute other losses from what --save writes",
         softcap, family);
  else if (softcap > 0)
    warn("%s/config.json has final_logit_softcapping %g, which this program computes and transformers "
         "ignores in a "
         "%s model; --logit-softcap 0 leaves it out",
         o->origin, softcap, family);
}

static void warn_of_vocabulary(const Options *o) {
  if (o->data_vocab_size && o->model.vocab_size / 2 > o->data_vocab_size)
    warn("--vocab %lld: the data's tokenizer has %lld tokens, and no text has the others; leave it out",
         (long long)o->model.vocab_size, (long long)o->data_vocab_size);
}

void report_settings(const Options *o, const Backend *backend, const RunData *data) {
  warn_of_softcap(o);
  warn_of_vocabulary(o);
  const ModelConfig *m = &o->model;
  printf("device   %s\n", backend->description);
  if (backend->ranks > 1)
    printf("ranks    %d, started by %s; %s\n", backend->ranks, ranks_self()->launcher,
           sharding_name(&o->dtypes));
  printf("model    %s: %s parameters, V %s, H %lld, L %lld, heads %lld/%lld of %lld, %s head\n", m->name,
         text_count((double)model_parameter_count(m)).text, text_grouped(m->vocab_size).text,
         (long long)m->hidden_size, (long long)m->num_hidden_layers, (long long)m->num_attention_heads,
         (long long)m->num_key_value_heads, (long long)m->head_dim,
         m->tie_word_embeddings ? "tied" : "untied");
  if (o->trains)
    printf("step     %s tokens: %lld micro-batch%s of %lld x %lld, %s learning rate to %.1e\n",
           text_grouped(o->total_batch).text, (long long)(o->micro_steps * o->ranks),
           o->micro_steps * o->ranks == 1 ? "" : "es", (long long)o->batch, (long long)o->seq_len,
           options_words(o, "schedule").text, o->lr);
  char loss[80] = "materialized logits";
  if (o->pass.mode == LCE_FUSED)
    snprintf(loss, sizeof loss, "fused linear_cross_entropy, %lld tokens at a time",
             (long long)options_used_chunk(o));
  printf("loss     %s, recompute %s\n", loss, options_recompute(o).text);
  Fp8Use fp8 = options_used_dtypes(o).fp8;
  const char *logits = fp8 == FP8_ALL         ? " and the loss's logits"
                       : fp8 != o->dtypes.fp8 ? "; the loss's logits stay exact"
                                              : "";
  if (fp8)
    printf("fp8      the layers' GEMMs%s%s\n", logits,
           backend->device == ON_CPU ? ", emulated: slower than fp32" : "");
  if (o->dtypes.offload)
    printf("offload  %s%s\n", options_words(o, "offload").text,
           backend->device == ON_CPU ? ", which saves nothing on the CPU, whose memory is the host's" : "");
  printf("data     %s\n", data->text);
  const Source *const sources[] = {data->source, data->val_source};
  for (int i = 0; i < 2 && sources[i]; i++) {
    char left[256];
    source_describe_left(sources[i], left, sizeof left);
    if (*left) printf("         %s\n", left);
  }
  if (data->val_source) printf("         validation data: %s\n", data->val_source->name);
  if (o->resumed_from)
    printf("resumed  %s, after step %lld of %lld and %s tokens of pass %lld over the data\n", o->origin,
           (long long)o->first_step, (long long)o->steps, text_grouped(data->loader.start.tokens).text,
           (long long)data->loader.start.pass + 1);
  else if (o->origin)
    printf("weights  %s\n", o->origin);
  if (*o->changes) printf("         with %s\n", o->changes);
  if (o->trains) print_saving(o);
}

Report report_open(const Options *o, const Backend *backend) {
  Report r = {
      .options = o, .terminal = isatty(STDOUT_FILENO) && !ranks_self()->forwarded, .last_printed = -INFINITY};
  if (o->log && !ranks_self()->rank)
    r.log = file_create("the log", o->log, "{\"event\":\"start\",", o->resumed_from ? APPEND : BACK_UP);
  r.flops_per_step = model_flops_per_token(&o->model, o->seq_len) * (double)o->total_batch;
  r.peak = o->dtypes.weight == DTYPE_BF16 ? o->ranks * gpu_peak_flops(backend->description) : NAN;
  return r;
}

void report_close(Report *r) {
  bool lost = report_log_lost(r); // and said so
  if (r->log && fclose(r->log) && !lost)
    warn("the log %s may be incomplete: %s", r->options->log, strerror(errno));
}

void report_start(Report *r, const Backend *backend, const char *data) {
  const Options *o = r->options;
  Fp8Use fp8 = options_used_dtypes(o).fp8;
  LOG("start", STR("device", backend->description), LOG_RUN(o, o->pass.mode),
      NUM("parameters", model_parameter_count(&o->model)),
      NUM("num_hidden_layers", o->model.num_hidden_layers), NUM("total_batch", o->total_batch),
      NUM("ranks", o->ranks), NUM("steps", o->steps), NUM("seed", o->seed),
      OPTIONAL("rope_theta", o->model.learned_positions ? NAN : o->model.rope_theta),
      {"fp8", .item = cJSON_CreateBool(fp8 != FP8_NONE)},
      {"fp8_logits", .item = cJSON_CreateBool(fp8 == FP8_ALL)}, STR("data", data),
      OPTIONAL("peak_flops_per_second", r->peak));
  putchar('\n');
  fflush(stdout); // the first step, or all of an evaluation, may take long
}

// --- steps -------------------------------------------------------------------------------------------------

void report_break(Report *r) {
  if (r->drawn) putchar('\n');
  r->drawn = false;
}

static double mfu(const Report *r, double seconds_per_step) {
  return r->flops_per_step / r->peak / seconds_per_step;
}

// The reason why a loss is not finite; `updated`: the weights are no longer those that the run began with.
static Reason why_lost(const Options *o, bool updated) {
  Reason why;
  refuse(&why,
         updated     ? "the training has diverged, try a lower --lr or a longer --warmup"
         : o->origin ? "there is NaN or infinity among the weights in %s"
                     : "the weights drawn are too large for the model",
         o->origin);
  return why;
}

static void fail_diverged(Report *r, const Trainer *t, const StepResult *s) {
  char where[128] = "";
  int64_t seq_len = r->options->seq_len, tokens = tensor_count(t->loss);
  float *losses = host_alloc(tokens, sizeof *losses, "the losses of a batch");
  backend_to_host(t->backend, losses, t->loss);
  report_break(r);
  for (int64_t n = tokens; n-- > 0;)
    if (!isfinite(losses[n]))
      snprintf(where, sizeof where, " (first at token %lld of sequence %lld of the last micro-batch)",
               (long long)(n % seq_len), (long long)(n / seq_len));
  free(losses);
  fail("step %lld: the loss is %g%s and the gradient norm %g; %s", (long long)(s->step + 1), s->loss, where,
       s->grad_norm, why_lost(r->options, s->step > r->options->first_step || isfinite(s->loss)).text);
}

// Begins a progress line if one is due, ...
static bool begin_progress(Report *r, bool last) {
  double now = now_seconds();
  if (!last && now - r->last_printed < (r->terminal ? 0.1 : 5)) return false;
  r->last_printed = now;
  printf("%s", r->terminal ? "\r\033[K" : "");
  return true;
}

// ... and ends it.
static void end_progress(Report *r, double seconds_left) {
  printf("  %s left%s", text_duration(seconds_left).text, r->terminal ? "" : "\n");
  stdout_ok();
  r->drawn = r->terminal;
}

static void print_progress(Report *r, const StepResult *s, size_t bytes) {
  double each = r->smoothed_seconds;
  int64_t done = s->step + 1, steps = r->options->steps;
  if (!begin_progress(r, done == steps)) return;
  char dropped[64] = "", utilization[32] = "";
  if (isfinite(r->peak)) snprintf(utilization, sizeof utilization, "  %.1f%% MFU", 100 * mfu(r, each));
  if (!isnan(s->dropped_tiles))
    snprintf(dropped, sizeof dropped, "  dropped %.1f%% of tiles, %.1f%% of mass", 100 * s->dropped_tiles,
             100 * s->dropped_mass);
  printf("step %lld/%lld  loss %.4f  lr %.2e  norm %.2f%s  %s tok/s%s  %s", (long long)done, (long long)steps,
         s->loss, s->learning_rate, s->grad_norm, dropped,
         text_count((double)r->options->total_batch / each).text, utilization, text_bytes(bytes).text);
  end_progress(r, (double)(steps - done) * each);
}

void report_validating(void *report, int64_t done, int64_t batches, double loss) {
  Report *r = report;
  if (done == batches || !begin_progress(r, false)) return;
  double each = (now_seconds() - r->since) / (double)done;
  printf("batch %s/%s  loss %.4f  %s tok/s", text_grouped(done).text, text_grouped(batches).text, loss,
         text_count((double)(r->options->batch * r->options->seq_len) / each).text);
  end_progress(r, (double)(batches - done) * each);
}

void report_steps(Report *r, Trainer *trainer, RunState *state, const StepResult *results, int count,
                  double seconds) {
  const StepResult *last = NULL; // that has a loss
  int made = 0;
  for (const StepResult *s = results; s < results + count; s++)
    if (s->counted) made++, last = s;
  double rate = (double)r->options->total_batch * made / seconds, each = seconds / made;
  for (const StepResult *s = results; s < results + count; s++) {
    if (!s->counted) {
      LOG("step", NUM("step", s->step + 1), NUM("tokens", 0));
      continue;
    }
#define MEAN(name, ...) OPTIONAL(#name, s->name),
    LOG("step", NUM("step", s->step + 1), NUM("loss", s->loss),
        LOGGED_OUTPUTS(MEAN) OPTIONAL("dropped_tiles", s->dropped_tiles),
        OPTIONAL("dropped_mass", s->dropped_mass), NUM("learning_rate", s->learning_rate),
        NUM("grad_norm", s->grad_norm), NUM("tokens", s->counted), NUM("tokens_per_second", rate),
        OPTIONAL("mfu", mfu(r, each)));
#undef MEAN
    if (isnan(state->first_loss)) state->first_loss = s->loss;
    state->last_loss = s->loss;
    r->dropped_tiles += s->dropped_tiles;
    r->dropped_mass += s->dropped_mass;
    if (!isfinite(s->loss) || !isfinite(s->grad_norm)) fail_diverged(r, trainer, s);
  }
  if (r->steps_done > r->steps_skipped) {
    r->steps_timed += made;
    r->seconds_timed += seconds;
  }
  r->steps_done += count;
  r->steps_skipped += count - made;
  if (!made) return;
  // An exponential moving average, since the first steps are slower.
  r->smoothed_seconds = r->smoothed_seconds > 0 ? 0.8 * r->smoothed_seconds + 0.2 * each : each;
  Backend *backend = trainer->backend;
  print_progress(r, last, backend->ops->device_bytes_now(backend));
}

bool report_due(const Report *r, const Trainer *t) {
  double pace = t->backend->ranks == 1 ? r->smoothed_seconds : t->agreed_seconds;
  return t->pending_count >= (pace > 0 ? (int64_t)fmax(fmin(0.5 / pace, TRAINER_PENDING), 1) : 1);
}

void report_collect(Report *r, Trainer *t, RunState *state) {
  StepResult results[TRAINER_PENDING];
  int count = trainer_collect(t, results);
  state->skipped = t->skipped;
  if (!count) return;
  double seconds = now_seconds() - r->since; // only now has the device done them all
  report_steps(r, t, state, results, count, seconds);
  t->step_seconds = r->smoothed_seconds;
}

void report_validation(Report *r, int64_t step, double loss, double bits_per_byte, const Loader *loader) {
  char bits[48] = "", part[64] = "";
  int64_t batches = r->options->eval_batches, all = loader->validation_batches;
  if (batches && batches < all)
    snprintf(part, sizeof part, ", %lld of %lld batches", (long long)batches, (long long)all);
  if (!isnan(bits_per_byte)) snprintf(bits, sizeof bits, ", %.4f bits per byte", bits_per_byte);
  report_break(r);
  printf("step %lld  validation loss %.4f (perplexity %.1f%s)%s\n", (long long)step, loss, exp(loss), bits,
         part);
  if (!isfinite(loss))
    fail("step %lld: the validation loss is %g; %s", (long long)step, loss,
         why_lost(r->options, step > r->options->first_step).text);
  LOG("validation", NUM("step", step), NUM("val_loss", loss), OPTIONAL("bits_per_byte", bits_per_byte));
}

// Prints text if something says what the tokens mean.
void report_sample(Report *r, int64_t step, const Prompt *prompt, const int32_t *tokens, int64_t count) {
  char *text = prompt->tokenizer ? tokenizer_show(prompt->tokenizer, tokens, count) : NULL;
  report_break(r);
  printf("step %lld  sample:", (long long)step);
  if (text) printf(" %s", text);
  for (int64_t i = 0; i < count && !text; i++) printf(" %d", tokens[i]);
  putchar('\n');
  LOG("sample", NUM("step", step),
      {text ? "text" : "tokens", .text = text,
       .item = text ? NULL : cJSON_CreateIntArray(tokens, (int)count)});
  free(text);
}

void report_checkpoint(Report *r, int64_t step, double seconds) {
  printf("step %lld  saved in %s (%.1fs)\n", (long long)step, text_shell_word(r->options->save), seconds);
  stdout_ok(); // a validation may follow
  LOG("checkpoint", NUM("step", step), NUM("seconds", seconds));
}

// --- at the end --------------------------------------------------------------------------------------------

// The peak of this rank, or of the rank that holds the most.
static MemoryColumn largest_peak(Trainer *trainer) {
  enum { WORDS = sizeof(MemoryColumn) / 4 };
  Backend *b = trainer->backend;
  MemoryColumn peak = {.memory = b->memory.ledger, .device_bytes = b->ops->device_bytes_peak(b)};
  snprintf(peak.title.text, sizeof peak.title.text, "%s", lce_mode_name(trainer->transformer.mode));
  if (b->ranks == 1) return peak;
  MemoryColumn *all = host_alloc(b->ranks, sizeof *all, "the peaks of all ranks");
  MemoryMark mark = memory_mark(&b->memory);
  Tensor gathered = memory_push_1d(&b->memory, "peaks", MEMORY_WORKSPACE, DTYPE_I32, b->ranks * WORDS);
  Tensor local = tensor_rows(gathered, b->rank * WORDS, WORDS);
  backend_to_device(b, local, &peak);
  all_gather(b, (Collective){.out = gathered, .x = local});
  backend_to_host(b, all, gathered);
  memory_pop_to(&b->memory, mark);
  for (int i = 0; i < b->ranks; i++) {
    if (all[i].memory.peak > peak.memory.peak) peak.memory = all[i].memory;
    if (all[i].device_bytes > peak.device_bytes) peak.device_bytes = all[i].device_bytes;
  }
  free(all);
  return peak;
}

// A group's rate in TFLOP/s or GB/s; "" if neither is counted.
static Text rate_text(double flops, double bytes, double seconds) {
  double rate = (flops > 0 ? 1e-12 * flops : 1e-9 * bytes) / seconds;
  if (!(rate > 0 && isfinite(rate))) return (Text){""};
  return text_of(rate < 100 ? "%.3g %s" : "%.0f %s", rate, flops > 0 ? "TFLOP/s" : "GB/s");
}

// A table, and for the log an object of each group, all of a step; NULL without --profile.
static cJSON *report_profile(const Options *o, const ProfileTotals *t) {
  if (o->profile && !t) printf("\nprofile  none: it begins after %d steps\n", PROFILE_WARM_UP);
  if (!t) return NULL;
  cJSON *groups = cJSON_CreateObject();
  double n = (double)t->steps, all_flops = 0;
  char title[64];
  snprintf(title, sizeof title, "a step's time%s, mean of %.0f", o->ranks > 1 ? " (rank 0)" : "", n);
  printf("\n%-30s %8s %10s %7s %16s %15s\n", title, "calls", "ms", "share", "rate", "own stream, ms");
  for (int g = 0; g < PROFILE_GROUP_COUNT; g++) {
    const char *name = t->groups[g].name;
    double calls = (double)t->groups[g].calls / n, seconds = t->groups[g].seconds / n,
           own = t->groups[g].own_seconds / n, flops = t->groups[g].flops / n, bytes = t->groups[g].bytes / n;
    if (calls > 0 || g == PROFILE_IDLE)
      printf("  %-28s %8.6g %10.2f %6.1f%% %16s %15.2f\n", name, calls, 1e3 * seconds,
             100 * seconds * n / t->step_seconds, rate_text(flops, bytes, fmax(seconds, own)).text,
             1e3 * own);
    all_flops += flops;
    const LogField fields[] = {NUM("calls", calls), NUM("seconds", seconds), NUM("own_seconds", own),
                               NUM("flops", flops), NUM("bytes", bytes),     {0}};
    cJSON_AddItemToObject(groups, name, log_object(fields));
  }
  double step = t->step_seconds / n;
  printf("  %-28s %8s %10.2f %7s %16s\n", "all together", "", 1e3 * step, "",
         rate_text(all_flops, 0, step).text);
  return groups;
}

void report_summary(Report *r, Trainer *trainer, const RunState *state, double entropy, bool stopped) {
  const Options *o = r->options;
  const Backend *backend = trainer->backend;
  MemoryColumn peak = largest_peak(trainer);
  double per_step = r->steps_timed ? r->seconds_timed / (double)r->steps_timed : NAN;
  double rate = (double)o->total_batch / per_step;
  double made = (double)(r->steps_done - r->steps_skipped);
  double dropped_tiles = r->dropped_tiles / made, dropped_mass = r->dropped_mass / made;

  if (state->skipped)
    warn("%lld of %lld steps had no target that counts: they have no loss and updated nothing; a larger "
         "--total-batch leaves fewer such steps",
         (long long)state->skipped, (long long)(o->first_step + r->steps_done));
  printf("\nloss     ");
  if (isfinite(state->first_loss))
    printf("%.4f at first, %.4f at last; ", state->first_loss, state->last_loss);
  if (isfinite(state->val_loss)) printf("%.4f on validation data; ", state->val_loss);
  printf("%.4f is what token frequencies alone give\n", entropy);
  if (r->steps_timed) printf("speed    %s tokens/s, %.1f ms a step\n", text_count(rate).text, 1e3 * per_step);
  if (isfinite(mfu(r, per_step)))
    printf("MFU      %.1f%%: the model's flops over %.0f TFLOP/s, the dense bf16 peak of the data sheet\n",
           100 * mfu(r, per_step), 1e-12 * r->peak);
  if (isfinite(dropped_tiles))
    printf("sampling dropped %.1f%% of tiles, %.1f%% of mass, mean of all steps\n", 100 * dropped_tiles,
           100 * dropped_mass);
  if (o->ranks > 1)
    printf("wire     %s sent by each rank in a step\n", text_bytes((uint64_t)trainer->wire_bytes).text);
  cJSON *groups = report_profile(o, profile_collect(trainer->backend));
  putchar('\n');
  report_memory(&peak, 1, backend->device);
  LOG("summary", STR("loss_mode", peak.title.text), NUM("steps", r->steps_done),
      {"stopped", .item = cJSON_CreateBool(stopped)}, NUM("first_loss", state->first_loss),
      NUM("last_loss", state->last_loss), NUM("val_loss", state->val_loss), NUM("unigram_entropy", entropy),
      NUM("tokens_per_second", rate), NUM("seconds_per_step", per_step), OPTIONAL("mfu", mfu(r, per_step)),
      OPTIONAL("dropped_tiles", dropped_tiles), OPTIONAL("dropped_mass", dropped_mass),
      NUM("ranks", o->ranks), NUM("wire_bytes_per_step", trainer->wire_bytes),
      NUM("peak_bytes", peak.memory.peak), NUM("host_bytes", ledger_host_bytes(&peak.memory)),
      NUM("head_peak_bytes", peak.memory.highest[MEMORY_HEAD]), NUM("device_peak_bytes", peak.device_bytes),
      NUM("device_overhead_bytes", backend->device_overhead),
      {"profile", .number = groups ? 0 : NAN, .optional = true, .item = groups});
}

void report_resuming(const Report *r, bool stopped) {
  if (stopped && r->options->save)
    printf("\nto go on: %s --resume %s\n", program_invocation_name, text_shell_word(r->options->save));
  else if (!r->options->save)
    print_saving(r->options);
}
