// lce.c: trains GPT-2 and Llama with a fused, chunked lm_head + cross-entropy.
//
//   options -> backend -> plan -> model -> loop -> summary
//
// Reading on from here: trainer/trainer.c (a step), model/transformer.c (forward and backward),
// kernels/linear_cross_entropy.c (the last layer), kernels/kernels.h (every operation).
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"
#include "data/corpus.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/checkpoint.h"
#include "trainer/evaluate.h"
#include "trainer/log.h"
#include "trainer/machine.h"
#include "trainer/prompt.h"
#include "trainer/report.h"
#include "trainer/resume.h"
#include "trainer/speed.h"

// --- stopping ----------------------------------------------------------------------------------------------

static volatile sig_atomic_t stop_asked;

static void ask_to_stop(int signal_number) {
  stop_asked = 1;
  signal(signal_number, SIG_DFL); // a second one ends the program at once
}

// --- machine -----------------------------------------------------------------------------------------------

// The device that a plan is for: the one asked for, or the one that is there.
static DeviceKind planned_device(Options *o, size_t *capacity) {
  if (o->device == DEVICE_AUTO || o->fit) {
    Backend *backend = machine_open(o);
    DeviceKind kind = backend->device;
    *capacity = machine_usable_bytes(backend);
    backend_destroy(backend);
    return kind;
  }
  options_resolve_dtypes(o, o->device == DEVICE_CUDA);
  return o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
}

// --- what is printed before anything runs ------------------------------------------------------------------

static const char *spread_name(const Options *o) {
  static const char *const names[] = {"nothing is spread over them",
                                      "master weights and moments are spread over them",
                                      "gradients, master weights and moments are spread over them"};
  static const char *const split[] = {
      "", "master weights, moments and the head's rows are spread over them",
      "gradients, master weights, moments and the head's rows are spread over them"};
  return o->dtypes.vocab_parallel ? split[o->dtypes.zero] : names[o->dtypes.zero];
}

static void describe(const Options *o, const Backend *backend, const char *data) {
  const ModelConfig *m = &o->model;
  printf("device   %s\n", backend->description);
  if (backend->ranks > 1)
    printf("ranks    %d, started by %s; %s\n", backend->ranks, ranks_self()->launcher, spread_name(o));
  printf("model    %s: %s parameters, V %s, H %lld, L %lld, heads %lld/%lld of %lld, %s head\n", m->name,
         text_count((double)model_parameter_count(m)).text, text_grouped(m->vocab_size).text,
         (long long)m->hidden_size, (long long)m->num_hidden_layers, (long long)m->num_attention_heads,
         (long long)m->num_key_value_heads, (long long)m->head_dim,
         m->tie_word_embeddings ? "tied" : "untied");
  if (!o->eval_only)
    printf("step     %s tokens: %lld micro-batches of %lld x %lld, %s learning rate to %.1e\n",
           text_grouped(o->total_batch).text, (long long)(o->micro_steps * o->ranks), (long long)o->batch,
           (long long)o->seq_len, schedule_name(o->schedule.kind), o->schedule.peak);
  if (o->mode == LCE_FUSED)
    printf("loss     fused linear_cross_entropy, %lld tokens at a time, recompute %s\n",
           (long long)o->lce_chunk, recompute_name(o->recompute));
  else
    printf("loss     materialized logits, recompute %s\n", recompute_name(o->recompute));
  printf("data     %s\n", data);
  if (o->resumed_from)
    printf("resumed  %s, after step %lld of %lld\n", o->origin, (long long)o->first_step,
           (long long)o->steps);
  else if (o->origin)
    printf("weights  %s\n", o->origin);
}

static int print_plan(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Backend *plan = plan_backend_create(device, o->dtype);
  options_resolve_chunk(o, plan);
  backend_destroy(plan);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[3] = {
      {.title = "fused, planned", .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = "materialized, planned", .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = "head split, planned", .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, spread_name(o));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         dtype_name(o->dtype), (long long)o->lce_chunk, recompute_name(o->recompute));
  report_memory(stdout, columns, o->dtypes.vocab_parallel && o->ranks > 1 ? 3 : 2, NULL);
  return 0;
}

static int print_fit(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Backend *plan = plan_backend_create(device, o->dtype);
  options_resolve_chunk(o, plan);
  backend_destroy(plan);
  if (!capacity)
    fail("--fit: the memory of the device is not known; use --plan with a --batch of your choice");
  int64_t fused = plan_largest_batch(o, device, LCE_FUSED, capacity);
  int64_t materialized = plan_largest_batch(o, device, LCE_MATERIALIZED, capacity);
  if (!fused)
    fail("--fit: not even one sequence of %lld tokens fits in %s; shorten --seq-len, or give --recompute "
         "layer",
         (long long)o->seq_len, text_bytes(capacity).text);
  printf("%s at --seq-len %lld in %s: --batch %lld fits with the fused loss, ", o->model.name,
         (long long)o->seq_len, text_bytes(capacity).text, (long long)fused);
  if (materialized)
    printf("--batch %lld with materialized logits\n", (long long)materialized);
  else
    printf("not even --batch 1 with materialized logits\n");
  return 0;
}

// --- the run -----------------------------------------------------------------------------------------------

typedef struct {
  const Options *options;
  Backend *backend;
  Trainer *trainer;
  const Source *source;
  const Loader *loader;
  const Prompt *prompt;
  const Choices *choices; // of --hellaswag
  Log *log;
  CheckpointStore *store; // NULL without --save, and on other ranks than 0
  bool saves;             // with --save, on all ranks
  int64_t saved_step;     // of the last checkpoint; -1 before there is one
  const char *data;       // what the loader reads, in words
  Progress progress;
  bool stop;   // some rank was asked to stop, as all ranks know after the same step
  double pace; // seconds a step takes, on which the ranks agree
  double first_loss, last_loss, val_loss; // NAN before there is one
  int64_t steps_done, steps_timed;
  double wire_bytes;    // that this rank sent in the last step
  double seconds_timed; // of the steps after the first ones, without validation and samples
} Run;

// A rank alone stops when it is asked to. Several stop together, where the results of a step say so to all.
static bool stopping(const Run *run) {
  return run->options->ranks == 1 ? stop_asked : run->stop;
}

static size_t system_bytes(const Backend *backend) {
  return backend->ops->device_bytes_now((Backend *)backend);
}

static void add_told(cJSON *line, const char *name, double value) {
  if (isfinite(value)) cJSON_AddNumberToObject(line, name, value);
}

static void stop_diverged(Run *run, const StepResult *r) {
  progress_break(&run->progress);
  char where[128] = "";
  int64_t lost = trainer_first_lost_token(run->trainer), seq_len = run->options->seq_len;
  if (lost >= 0)
    snprintf(where, sizeof where, " (first at token %lld of sequence %lld of the last micro-batch)",
             (long long)(lost % seq_len), (long long)(lost / seq_len));
  fail("step %lld: the loss is %g%s and the gradient norm %g; the training has diverged, try a lower --lr or "
       "a longer "
       "--warmup",
       (long long)(r->step + 1), r->loss, where, r->grad_norm);
}

// Fetches the results of the steps since `since`, when nothing was under way.
static void collect(Run *run, double since) {
  StepResult results[TRAINER_PENDING];
  int count = trainer_collect(run->trainer, results);
  if (!count) return;
  double seconds = now_seconds() - since; // only now has the device done them all
  double rate = (double)run->options->total_batch * count / seconds;
  for (int i = 0; i < count; i++) {
    const StepResult *r = &results[i];
    run->stop |= r->stop;
    run->pace = r->agreed_seconds;
    if (isnan(run->first_loss)) run->first_loss = r->loss;
    run->last_loss = r->loss;
    cJSON *line = cJSON_CreateObject();
    cJSON_AddNumberToObject(line, "step", (double)(r->step + 1));
    cJSON_AddNumberToObject(line, "loss", r->loss);
    add_told(line, "z_loss", r->z_loss);
    add_told(line, "accuracy", r->accuracy);
    add_told(line, "entropy", r->entropy);
    add_told(line, "max_logit", r->max_logit);
    add_told(line, "filtered_tiles", r->filtered_tiles);
    add_told(line, "filtered_mass", r->filtered_mass);
    cJSON_AddNumberToObject(line, "learning_rate", r->learning_rate);
    cJSON_AddNumberToObject(line, "grad_norm", r->grad_norm);
    cJSON_AddNumberToObject(line, "tokens", (double)r->counted);
    cJSON_AddNumberToObject(line, "tokens_per_second", rate);
    log_write(run->log, "step", line);
    if (!isfinite(r->loss) || !isfinite(r->grad_norm)) stop_diverged(run, r);
  }
  if (run->steps_done > 0) {
    run->steps_timed += count;
    run->seconds_timed += seconds;
  }
  run->steps_done += count;
  progress_update(&run->progress, &results[count - 1], count, seconds, run->options->total_batch,
                  system_bytes(run->backend));
}

static void validate(Run *run, int64_t step) {
  if (!run->loader->validation_batches) return;
  run->val_loss = trainer_validate(run->trainer, run->loader, run->options->eval_batches);
  progress_break(&run->progress);
  printf("step %lld  validation loss %.4f (perplexity %.1f)\n", (long long)step, run->val_loss,
         exp(run->val_loss));
  cJSON *line = cJSON_CreateObject();
  cJSON_AddNumberToObject(line, "step", (double)step);
  cJSON_AddNumberToObject(line, "val_loss", run->val_loss);
  log_write(run->log, "validation", line);
}

static void choose(Run *run) {
  const Options *o = run->options;
  if (!o->hellaswag || stopping(run)) return;
  ChoiceScore score = trainer_choose(run->trainer, run->choices, o->hellaswag_examples);
  double examples = (double)score.examples;
  progress_break(&run->progress);
  printf("%s: %s of %s right (%.2f%%), %.2f%% by the loss that is not divided by the length\n", o->hellaswag,
         text_grouped(score.correct_normalized).text, text_grouped(score.examples).text,
         100 * (double)score.correct_normalized / examples, 100 * (double)score.correct / examples);
  if (score.shortened)
    printf("%s of its contexts lost their beginning: they are longer than --seq-len %lld\n",
           text_grouped(score.shortened).text, (long long)o->seq_len);
  cJSON *line = cJSON_CreateObject();
  cJSON_AddStringToObject(line, "file", o->hellaswag);
  cJSON_AddNumberToObject(line, "examples", examples);
  cJSON_AddNumberToObject(line, "acc_norm", (double)score.correct_normalized / examples);
  cJSON_AddNumberToObject(line, "acc", (double)score.correct / examples);
  log_write(run->log, "choices", line);
}

// Shown as text where something says what the tokens mean.
static void sample(Run *run, int64_t step) {
  const Options *o = run->options;
  const Prompt *p = run->prompt;
  int64_t count;
  int32_t *tokens = trainer_sample(run->trainer, p->tokens, p->count, o->seed + (uint64_t)step, &count);
  if (o->rank) return;
  progress_break(&run->progress);
  printf("step %lld  sample:", (long long)step);
  cJSON *line = cJSON_CreateObject();
  cJSON_AddNumberToObject(line, "step", (double)step);
  char *shown = prompt_show(p, tokens, count);
  if (shown) {
    printf(" %s\n", shown);
    cJSON_AddStringToObject(line, "text", shown);
  } else {
    for (int64_t i = 0; i < count; i++) printf(" %d", tokens[i]);
    putchar('\n');
    cJSON_AddItemToObject(line, "tokens", cJSON_CreateIntArray(tokens, (int)count));
  }
  log_write(run->log, "sample", line);
  free(shown);
  free(tokens);
}

// Rank 0's part of saving: whether it went well.
static bool save_files(Run *run, int64_t step, const cJSON *state) {
  Reason reason;
  double start = now_seconds();
  if (!checkpoint_save(run->store, &run->trainer->model, run->backend, step, state, &reason)) {
    warn("no checkpoint after step %lld: %s", (long long)step, reason.text);
    return false;
  }
  printf("step %lld  saved in %s (%.1fs)\n", (long long)step, run->options->save, now_seconds() - start);
  cJSON *line = cJSON_CreateObject();
  cJSON_AddNumberToObject(line, "step", (double)step);
  cJSON_AddNumberToObject(line, "seconds", now_seconds() - start);
  log_write(run->log, "checkpoint", line);
  return true;
}

// The checkpoint after `step` steps. One that cannot be written does not stop the run: the disk may have room
// again when the next one is due.
static void save(Run *run, int64_t step) {
  RunState state = {.step = step,
                    .first_loss = run->first_loss,
                    .last_loss = run->last_loss,
                    .val_loss = run->val_loss,
                    .data = run->data};
  cJSON *json = resume_write(run->options, &state);
  progress_break(&run->progress);
  int32_t saved = run->store && save_files(run, step, json);
  if (!run->store) checkpoint_help_save(&run->trainer->model, run->backend, run->options->save_dtype);
  machine_broadcast(run->backend, &saved, sizeof saved);
  if (saved) run->saved_step = step;
  cJSON_Delete(json);
}

static bool every(int64_t period, int64_t done) {
  return period && done % period == 0;
}

static void train(Run *run) {
  const Options *o = run->options;
  Ledger *ledger = &run->backend->memory.ledger;
  int64_t collect_every = 1;
  double since = now_seconds();
  for (int64_t step = o->first_step; step < o->steps && !stopping(run); step++) {
    if (o->timeline && step < o->first_step + 3) ledger_record(ledger, true);
    ledger_step(ledger, (int)step);
    run->trainer->stop_asked = stop_asked;
    run->trainer->step_seconds = run->progress.smoothed_seconds;
    double sent = run->backend->wire_bytes;
    trainer_step(run->trainer, run->loader, step);
    run->wire_bytes = run->backend->wire_bytes - sent;
    ledger_record(ledger, false);
    int64_t done = step + 1;
    bool look = every(o->eval_every, done) || every(o->sample_every, done) || every(o->save_every, done) ||
                done == o->steps;
    if (run->trainer->pending_count < collect_every && !look) continue;

    collect(run, since);
    // The host looks at the device about twice a second, so that it does not stand in its way; all ranks at
    // once.
    double pace = o->ranks == 1 ? run->progress.smoothed_seconds : run->pace;
    collect_every = pace > 0 ? (int64_t)fmin(0.5 / pace, TRAINER_PENDING) : 1;
    if (collect_every < 1) collect_every = 1;
    if (every(o->eval_every, done) && done < o->steps) validate(run, done);
    if (every(o->sample_every, done)) sample(run, done);
    if (run->saves && every(o->save_every, done)) save(run, done);
    since = now_seconds();
  }
  collect(run, since);
  progress_break(&run->progress);
  int64_t done = o->first_step + run->steps_done;
  if (stopping(run)) printf("stopped after step %lld, as asked\n", (long long)done);
  // Before the last validation: who stops a run wants its weights, and may not want to wait.
  if (run->saves && run->saved_step != done) save(run, done);
  validate(run, done);
  choose(run);
}

// --- afterwards --------------------------------------------------------------------------------------------

// A few forward and backward passes in `mode`, with everything measured afresh.
static MemoryColumn measure_mode(Trainer *trainer, LceMode mode, const char *title) {
  enum { PASSES = 3 };
  Backend *backend = trainer->backend;
  trainer_set_mode(trainer, LCE_FUSED); // give a larger stack back before looking
  memory_set_stack(&backend->memory, 0);
  ledger_reset_peak(&backend->memory.ledger);
  backend->ops->device_peak_reset(backend);
  trainer_set_mode(trainer, mode);
  double best = INFINITY;
  for (int i = 0; i < PASSES; i++) {
    backend_synchronize(backend);
    double start = now_seconds();
    trainer_gradient_pass(trainer);
    backend_synchronize(backend);
    best = fmin(best, now_seconds() - start);
  }
  return (MemoryColumn){.title = title,
                        .memory = plan_from_ledger(&backend->memory.ledger),
                        .device_bytes = backend->ops->device_bytes_peak(backend),
                        .pass_seconds = best};
}

static const char *system_row(const Backend *backend) {
  return backend->device == ON_CUDA ? "the device's own figure" : "the process's own figure (VmHWM)";
}

static void compare_modes(Run *run) {
  const Options *o = run->options;
  MemoryColumn columns[2];
  static const char *const measured[2] = {"fused, measured", "materialized, measured"};
  static const char *const planned[2] = {"fused, planned", "materialized, planned"};
  for (int i = 0; i < 2; i++) {
    LceMode mode = i == 0 ? LCE_FUSED : LCE_MATERIALIZED;
    Plan plan = plan_run(o, run->backend->device, mode);
    size_t usable = machine_usable_bytes(run->backend);
    bool fits = !usable || plan.peak_bytes <= usable;
    columns[i] = fits ? measure_mode(run->trainer, mode, measured[i])
                      : (MemoryColumn){.title = planned[i], .memory = plan};
    if (!fits) printf("the %s mode does not fit here: it is planned, not measured\n", lce_mode_name(mode));
  }
  putchar('\n');
  report_memory(stdout, columns, 2, system_row(run->backend));
  printf("\nat %s tokens and V %s the last layer holds %.1f times less when it is fused\n",
         text_grouped(o->batch * o->seq_len).text, text_grouped(o->model.vocab_size).text,
         (double)columns[1].memory.head_peak_bytes / (double)columns[0].memory.head_peak_bytes);
}

static void add_number(cJSON *line, const char *name, double value) {
  cJSON_AddItemToObject(line, name, isfinite(value) ? cJSON_CreateNumber(value) : cJSON_CreateNull());
}

// The peak of this rank, or of the rank that holds the most.
typedef struct {
  Plan memory;
  uint64_t device_peak;
} Peak;

static Peak largest_peak(Run *run) {
  Backend *backend = run->backend;
  Peak peak = {.memory = plan_from_ledger(&backend->memory.ledger),
               .device_peak = backend->ops->device_bytes_peak(backend)};
  if (backend->ranks == 1) return peak;
  Peak *all = calloc((size_t)backend->ranks, sizeof *all);
  if (!all) fail("out of host memory for the figures of %d ranks", backend->ranks);
  trainer_gather(run->trainer, &peak, all, sizeof peak);
  peak = all[0];
  for (int r = 1; r < backend->ranks; r++) {
    uint64_t device_peak = peak.device_peak > all[r].device_peak ? peak.device_peak : all[r].device_peak;
    if (all[r].memory.peak_bytes > peak.memory.peak_bytes) peak = all[r];
    peak.device_peak = device_peak;
  }
  free(all);
  return peak;
}

static void summarize(Run *run) {
  const Options *o = run->options;
  Backend *backend = run->backend;
  Peak peak = largest_peak(run);
  Plan memory = peak.memory;
  size_t device_peak = peak.device_peak;
  double per_step = run->steps_timed ? run->seconds_timed / (double)run->steps_timed : NAN;
  double rate = (double)o->total_batch / per_step;
  double entropy = corpus_entropy(run->source);

  printf("\nloss     ");
  if (isfinite(run->first_loss)) printf("%.4f at first, %.4f at last; ", run->first_loss, run->last_loss);
  if (isfinite(run->val_loss)) printf("%.4f on validation data; ", run->val_loss);
  printf("%.4f is what token frequencies alone give\n", entropy);
  if (run->steps_timed)
    printf("speed    %s tokens/s, %.1f ms a step, %.0f%% of the time of its bare products\n",
           text_count(rate).text, 1e3 * per_step, 100 * progress_share(&run->progress, per_step));
  if (o->ranks > 1)
    printf("wire     %s sent by each rank in a step\n", text_bytes((uint64_t)run->wire_bytes).text);
  MemoryColumn column = {
      .title = lce_mode_name(run->trainer->transformer.mode), .memory = memory, .device_bytes = device_peak};
  if (!o->compare_modes) {
    putchar('\n');
    report_memory(stdout, &column, 1, system_row(backend));
  }

  cJSON *line = cJSON_CreateObject();
  cJSON_AddStringToObject(line, "loss_mode", lce_mode_name(run->trainer->transformer.mode));
  cJSON_AddNumberToObject(line, "steps", (double)run->steps_done);
  cJSON_AddBoolToObject(line, "stopped", stopping(run));
  add_number(line, "first_loss", run->first_loss);
  add_number(line, "last_loss", run->last_loss);
  add_number(line, "val_loss", run->val_loss);
  add_number(line, "unigram_entropy", entropy);
  add_number(line, "tokens_per_second", rate);
  add_number(line, "seconds_per_step", per_step);
  add_number(line, "share_of_gemms", progress_share(&run->progress, per_step));
  add_number(line, "gemm_flops_per_second", run->progress.gemm_rate);
  add_number(line, "ranks", o->ranks);
  add_number(line, "wire_bytes_per_step", run->wire_bytes);
  add_number(line, "peak_bytes", (double)memory.peak_bytes);
  add_number(line, "head_peak_bytes", (double)memory.head_peak_bytes);
  add_number(line, "device_peak_bytes", (double)device_peak);
  add_number(line, "device_overhead_bytes", (double)backend->device_overhead);
  log_write(run->log, "summary", line);
}

static void evaluate(Run *run) {
  validate(run, run->options->first_step);
  choose(run);
  cJSON *line = cJSON_CreateObject();
  add_number(line, "val_loss", run->val_loss);
  add_number(line, "perplexity", exp(run->val_loss));
  log_write(run->log, "summary", line);
}

// Before anything is loaded, or a log begun.
static void require_something_to_evaluate(const Options *o, const Loader *loader) {
  if (!o->origin) fail("--eval-only: there is no model to evaluate; name its folder with --init or --resume");
  if (!loader->validation_batches && !o->hellaswag)
    fail(
        "--eval-only: there is nothing to evaluate; name --val-data or --hellaswag, or raise --val-fraction");
}

static void log_start(Run *run) {
  const Options *o = run->options;
  const ModelConfig *m = &o->model;
  cJSON *line = cJSON_CreateObject();
  cJSON_AddStringToObject(line, "device", run->backend->description);
  cJSON_AddStringToObject(line, "model", m->name);
  cJSON_AddNumberToObject(line, "parameters", (double)model_parameter_count(m));
  cJSON_AddNumberToObject(line, "vocab_size", (double)m->vocab_size);
  cJSON_AddNumberToObject(line, "hidden_size", (double)m->hidden_size);
  cJSON_AddNumberToObject(line, "num_hidden_layers", (double)m->num_hidden_layers);
  cJSON_AddNumberToObject(line, "batch", (double)o->batch);
  cJSON_AddNumberToObject(line, "seq_len", (double)o->seq_len);
  cJSON_AddNumberToObject(line, "total_batch", (double)o->total_batch);
  cJSON_AddNumberToObject(line, "ranks", (double)o->ranks);
  cJSON_AddNumberToObject(line, "steps", (double)o->steps);
  cJSON_AddNumberToObject(line, "seed", (double)o->seed);
  cJSON_AddStringToObject(line, "loss_mode", lce_mode_name(o->mode));
  cJSON_AddNumberToObject(line, "lce_chunk", o->mode == LCE_FUSED ? (double)o->lce_chunk : 0);
  cJSON_AddStringToObject(line, "recompute", recompute_name(o->recompute));
  cJSON_AddStringToObject(line, "dtype", dtype_name(o->dtype));
  cJSON_AddStringToObject(line, "data", run->source->name);
  log_write(run->log, "start", line);
}

// Where two lists of settings begin to differ: the start of that setting.
static size_t first_difference(const char *a, const char *b) {
  size_t at = 0, setting = 0;
  for (; a[at] && a[at] == b[at]; at++)
    if (!strncmp(a + at, ",\"", 2)) setting = at + 1;
  return setting;
}

static int setting_length(const char *setting) {
  const char *next = strstr(setting, ",\"");
  return (int)(next ? next - setting : (ptrdiff_t)strlen(setting));
}

// Ranks that were not asked for the same cannot work together.
static void require_same_everywhere(const Options *o, Backend *backend, const char *data) {
  cJSON *json = resume_settings(o);
  cJSON_AddStringToObject(json, "model", o->model.name);
  cJSON_AddNumberToObject(json, "vocab_size", (double)o->model.vocab_size);
  cJSON_AddNumberToObject(json, "parameters", (double)model_parameter_count(&o->model));
  cJSON_AddNumberToObject(json, "first step", (double)o->first_step);
  cJSON_AddStringToObject(json, "dtype", dtype_name(o->dtype));
  cJSON_AddNumberToObject(json, "zero", o->dtypes.zero);
  cJSON_AddBoolToObject(json, "vocab_parallel", o->dtypes.vocab_parallel);
  cJSON_AddStringToObject(json, "data", data);
  char *mine = cJSON_PrintUnformatted(json), theirs[4096] = "";
  if (!mine) fail("out of host memory for the settings");
  snprintf(theirs, sizeof theirs, "%s", mine);
  machine_broadcast(backend, theirs, sizeof theirs);
  if (strncmp(mine, theirs, sizeof theirs - 1)) {
    size_t at = first_difference(mine, theirs);
    fail("all ranks must see the same options, checkpoints and data, and this one has %.*s where rank 0 has "
         "%.*s",
         setting_length(mine + at), mine + at, setting_length(theirs + at), theirs + at);
  }
  free(mine);
  cJSON_Delete(json);
}

int main(int argc, char **argv) {
  Options options;
  ranks_begin();
  options_parse(&options, argc, argv);
  if (options.plan || options.fit) {
    int status = options.plan ? print_plan(&options) : print_fit(&options);
    options_free(&options);
    return status;
  }

  Backend *backend = machine_open(&options);
  machine_join_ranks(backend);
  options_resolve_chunk(&options, backend);
  Source *source = trainer_open_source(&options);
  Prompt prompt = prompt_open(&options, source);
  Choices choices = {0};
  if (options.hellaswag) choices = choices_open(options.hellaswag, options.model.vocab_size);
  const TextList *val_data = &options.val_data;
  Source *val_source =
      val_data->count ? source_open(val_data->items, val_data->count, options.model.vocab_size) : NULL;
  Loader loader = loader_create((LoaderOptions){.source = source,
                                                .validation_source = val_source,
                                                .validation_fraction = options.val_fraction,
                                                .batch = options.batch,
                                                .seq_len = options.seq_len,
                                                .seed = options.seed});
  if (options.eval_only) require_something_to_evaluate(&options, &loader);
  char data[256];
  loader_describe(&loader, data, sizeof data);
  require_same_everywhere(&options, backend, data);
  describe(&options, backend, data);
  plan_require(&options, backend->device, machine_usable_bytes(backend));

  RunState state = {.first_loss = NAN, .last_loss = NAN, .val_loss = NAN};
  if (options.resumed_from) state = resume_read(&options, data);
  bool automatic = options.resumed_from && strcmp(options.resume, "auto") == 0;
  int64_t first = options.resumed_from ? options.first_step : -1;
  CheckpointStore store = {0};
  bool saves = options.save && !options.eval_only;
  if (saves && options.rank == 0)
    store = checkpoint_store_open(options.save, options.origin, options.tokenizer, first, automatic);
  store.keep = options.keep;
  store.dtype = options.save_dtype;

  Log *log = log_open(options.rank ? NULL : options.log, options.resumed_from != NULL);
  double gemm_rate = options.eval_only ? NAN : options.ranks * measure_gemm_rate(backend);
  Trainer trainer;
  double start = now_seconds();
  trainer_create(&trainer, &options, backend);
  if (options.origin) printf("loaded   in %.1fs\n", now_seconds() - start);
  trainer_set_mode(&trainer, options.mode);
  backend->ops->device_peak_reset(backend);
  double flops = model_flops_per_token(&options.model, options.seq_len) * (double)options.total_batch;
  Run run = {.options = &options,
             .backend = backend,
             .trainer = &trainer,
             .source = source,
             .loader = &loader,
             .prompt = &prompt,
             .choices = &choices,
             .log = log,
             .store = store.directory ? &store : NULL,
             .saves = saves,
             .saved_step = first,
             .data = data,
             .progress = progress_begin(options.steps, flops, gemm_rate),
             .first_loss = state.first_loss,
             .last_loss = state.last_loss,
             .val_loss = state.val_loss};
  run.progress.first_step = options.first_step;
  // A place that cannot be written is better known now than after the run.
  if (options.timeline && options.rank == 0) report_timeline(options.timeline, &backend->memory.ledger);
  signal(SIGINT, ask_to_stop);
  signal(SIGTERM, ask_to_stop);
  signal(SIGXFSZ, SIG_IGN); // a file that may not grow is then said in a sentence, like a full disk
  log_start(&run);
  putchar('\n');
  if (options.eval_only) {
    evaluate(&run);
  } else {
    train(&run);
    summarize(&run);
  }
  if (options.timeline && options.rank == 0) report_timeline(options.timeline, &backend->memory.ledger);
  if (options.compare_modes && !stopping(&run)) compare_modes(&run);

  log_close(log);
  bool unsaved = run.saves && run.saved_step != options.first_step + run.steps_done;
  checkpoint_store_close(&store);
  trainer_destroy(&trainer);
  choices_close(&choices);
  prompt_close(&prompt);
  source_close(val_source);
  source_close(source);
  backend_destroy(backend);
  options_free(&options);
  return unsaved;
}
