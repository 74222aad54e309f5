#include "trainer/plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/system.h"
#include "kernels/base/text.h"
#include "kernels/ranks/ranks.h"
#include "trainer/report.h"

enum { TIMELINE_STEPS = 3 };

static TrainStep *step_to_plan;

void plan_set_step(TrainStep *step) {
  step_to_plan = step;
}

// A trainer that allocates nothing. Two micro-batches a step need as much memory as more.
static void open_planned(Trainer *t, Options *options, DeviceKind device) {
  options->micro_steps = min_i64(options->micro_steps, 2);
  Backend *backend = plan_backend_create(device, options->dtype);
  plan_join_ranks(backend, options->ranks);
  backend->no_sampling = options->no_sampling;
  trainer_create(t, options, backend);
}

Ledger plan_run(const Options *given, DeviceKind device, LceMode mode) {
  Options o = *given;
  if (mode == LCE_MATERIALIZED) o.dtypes.vocab_parallel = false; // which that mode does not have
  if (mode == LCE_FUSED && o.model.final_logit_softcapping > 0) o.pass.terms.label_smoothing = 0; // likewise
  o.pass.mode = mode;
  Trainer trainer;
  open_planned(&trainer, &o, device);
  if (o.trains) {
    int64_t count;
    step_to_plan(&trainer, NULL, 0);
    if (o.sample_every) trainer_sample(&trainer, NULL, 1, 0, &count);
  }
  if (!o.trains || o.val_data || o.val_fraction > 0) trainer_validate(&trainer, NULL, 1);
  if (o.save && o.trains) // as a rank that writes no files
    weights_store(&trainer.model, trainer.backend, &(Folder){0}, o.save_dtype, SIZE_MAX);
  Ledger plan = trainer.backend->memory.ledger;
  trainer_destroy(&trainer);
  backend_destroy(trainer.backend);
  return plan;
}

void plan_set_mode(Trainer *t, LceMode mode) {
  t->transformer.mode = mode;
  if (t->backend->memory.planning) return;
  Ledger plan = plan_run(t->options, t->backend->device, mode);
  backend_synchronize(t->backend);
  memory_set_stack(&t->backend->memory, plan.stack_peak);
}

typedef struct {
  const Options *options;
  DeviceKind device;
  LceMode mode;
  size_t bytes; // that the head, or the whole run, may hold
} Budget;

typedef bool Fits(const Budget *budget, int64_t count);

// The largest count from 1 to `max` that fits, where all below one that fits do; 0: none. Searches in halves.
static int64_t largest_that_fits(Fits *fits, const Budget *budget, int64_t max) {
  int64_t known = 0, above = 1;
  for (; above <= max && fits(budget, above); above *= 2) known = above;
  above = min_i64(above, max + 1);
  while (above - known > 1) {
    int64_t middle = known + (above - known) / 2;
    *(fits(budget, middle) ? &known : &above) = middle;
  }
  return known;
}

static size_t head_bytes(const Options *options, DeviceKind device, int64_t chunk) {
  Options o = *options;
  o.pass.chunk = chunk;
  return plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
}

static bool chunk_fits(const Budget *b, int64_t chunk) {
  return head_bytes(b->options, b->device, chunk) <= b->bytes;
}

void plan_resolve_chunk(Options *o, DeviceKind device) {
  const Budget budget = {.options = o, .device = device, .bytes = (size_t)o->lce_memory << 20};
  int64_t tokens = o->batch * o->seq_len;
  if (o->lce_memory) o->pass.chunk = largest_that_fits(chunk_fits, &budget, tokens);
  if (o->lce_memory && !o->pass.chunk)
    fail("--lce-memory %lld: even a chunk of one token needs %zu MiB at this vocabulary; give at least that",
         (long long)o->lce_memory, (head_bytes(o, device, 1) + (1 << 20) - 1) >> 20);
  if (!o->pass.chunk) o->pass.chunk = lce_default_chunk(device, tokens);
}

// In one micro-batch a step, with the chunk that belongs to it.
static bool batch_fits(const Budget *b, int64_t batch) {
  Options o = *b->options;
  o.batch = batch;
  o.total_batch = batch * o.seq_len * o.ranks;
  o.micro_steps = 1;
  if (!options_given(&o, "lce-chunk")) o.pass.chunk = 0;
  plan_resolve_chunk(&o, b->device);
  return plan_run(&o, b->device, b->mode).peak <= b->bytes;
}

// --- a run that does not fit -------------------------------------------------------------------------------

// The end of a refusal: up to three changes of the command line that lower any model's peak.
static const char *remedies(const Options *o, DeviceKind device, char text[160]) {
  int64_t tokens = o->batch * o->seq_len;
  bool trains = o->trains, chunks = lce_default_chunk(device, tokens) < tokens;
  const struct {
    bool possible;
    const char *change;
  } all[] = {{o->batch > 1, "a smaller --batch (--fit finds the largest)"},
             {trains && o->pass.recompute != RECOMPUTE_LAYER, "--recompute layer"},
             {o->pass.mode == LCE_MATERIALIZED && chunks, "--fused-lce"},
             {trains && device == ON_CUDA && !o->dtypes.offload, "--offload optimizer"},
             {o->seq_len > (o->dtypes.fp8 ? 16 : 1), "a smaller --seq-len"}};
  static const char *const forms[] = {"take a smaller model, or a device with more memory", "try %s",
                                      "try %s or %s", "try %s, %s or %s"};
  const char *found[3] = {0};
  int count = 0;
  for (size_t i = 0; i < sizeof all / sizeof *all && count < 3; i++)
    if (all[i].possible) found[count++] = all[i].change;
  snprintf(text, 160, forms[count], found[0], found[1], found[2]);
  return text;
}

// Every rank of this machine offloads as much.
static void require_host(const Ledger *plan) {
  char holders[512];
  int ranks = ranks_self()->local_ranks > 1 ? ranks_self()->local_ranks : 1;
  size_t needed = ledger_host_bytes(plan) * (size_t)ranks, left = host_memory_left();
  if (!needed || !left || needed <= left) return;
  fail("--offload needs %s of this machine's memory and %s are left (%s%s); offload less, or add "
       "--moment-dtype bf16 or --no-master-weights",
       text_bytes(needed).text, text_bytes(left).text, ranks > 1 ? "of each rank " : "",
       memory_holders(plan->host, 1, holders));
}

void plan_require(const Options *options, DeviceKind device, size_t usable) {
  char holders[512], text[160];
  Ledger plan = plan_run(options, device, options->pass.mode);
  require_host(&plan);
  if (!usable || plan.peak <= usable) return;
  fail("this run needs %s and the device has %s to give (%s); %s", text_bytes(plan.peak).text,
       text_bytes(usable).text, memory_holders(plan.at_peak, plan.peak / 100, holders),
       remedies(options, device, text));
}

// --- --timeline --------------------------------------------------------------------------------------------

// The bytes in use after each event, by category. `at`: seconds; of a plan, bytes pushed and popped so far.
static void write_timeline(const char *path, const Ledger *ledger, EarlierOutput earlier) {
  static const char columns[] = "event,step,at,block,total";
  FILE *out = file_create("the timeline", path, columns, earlier);
  fputs(columns, out);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    fprintf(out, ",\"%s\"", memory_category_name((MemoryCategory)c));
  fputc('\n', out);
  size_t before = 0;
  double moved = 0;
  for (int64_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *e = &ledger->events[i];
    size_t total = 0;
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += e->bytes[c];
    if (i) moved += fabs((double)total - (double)before);
    before = total;
    double at = ledger->clock ? e->seconds - ledger->events[0].seconds : moved;
    fprintf(out, "%lld,%d,%.15g,\"%s\",%zu", (long long)i, e->step, at, e->name, total);
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) fprintf(out, ",%zu", e->bytes[c]);
    fputc('\n', out);
  }
  if (fclose(out)) fail("cannot write the timeline %s: %s", path, strerror(errno));
}

// Three planned steps in the mode of the options.
static void plan_timeline(const Options *given, DeviceKind device) {
  Options o = *given;
  Trainer trainer;
  open_planned(&trainer, &o, device);
  Ledger *ledger = &trainer.backend->memory.ledger;
  ledger->recording = true;
  for (ledger->step = 1; ledger->step <= TIMELINE_STEPS; ledger->step++)
    step_to_plan(&trainer, NULL, ledger->step - 1);
  write_timeline(o.timeline, ledger, KEEP);
  trainer_destroy(&trainer);
  backend_destroy(trainer.backend);
}

void plan_record(Ledger *ledger, const Options *o, int64_t step) {
  // Not of the first step, which also chooses algorithms.
  ledger->recording = o->timeline && step > o->first_step && step <= o->first_step + TIMELINE_STEPS;
  ledger->step = (int)step;
}

static double device_seconds(void *backend) {
  backend_synchronize(backend);
  return now_seconds();
}

void plan_write_recorded(const Options *o, Backend *backend, EarlierOutput earlier) {
  Ledger *ledger = &backend->memory.ledger;
  ledger->clock = device_seconds;
  ledger->clock_context = backend;
  if (o->timeline && o->rank == 0) write_timeline(o->timeline, ledger, earlier);
}

// --- --plan and --fit --------------------------------------------------------------------------------------

// The device that a plan is for. Only --fit without --device-memory, and --device auto, look for one.
static DeviceKind planned_device(Options *o, size_t *capacity) {
  DeviceKind device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
  size_t given = bytes_from_gib(o->device_memory);
  if (o->device == DEVICE_AUTO || (o->fit && !given)) {
    Backend *backend = machine_open(o);
    device = backend->device;
    *capacity = machine_usable_bytes(backend);
    backend_destroy(backend);
  } else {
    options_resolve_dtypes(o, device == ON_CUDA);
  }
  if (given) *capacity = given;
  plan_resolve_chunk(o, device);
  return device;
}

// A plan in one mode as a line of the log; its bytes have the names that they have in a run's summary.
static bool log_plan(FILE *log, const Options *o, DeviceKind device, LceMode mode, const Ledger *plan,
                     size_t capacity) {
  const ModelConfig *m = &o->model;
  LogField at_peak[MEMORY_CATEGORY_COUNT + 1] = {{0}};
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    at_peak[c] = (LogField){memory_category_name((MemoryCategory)c), .number = (double)plan->at_peak[c]};
  return log_line(log, LOG_EVENT("plan", LOG_RUN(o, mode), STR("device", device_name(device)),
                                 NUM("intermediate_size", m->intermediate_size), NUM("head_dim", m->head_dim),
                                 NUM("max_seq_len", model_max_seq_len(m)), NUM("peak_bytes", plan->peak),
                                 NUM("head_peak_bytes", plan->highest[MEMORY_HEAD]),
                                 NUM("host_bytes", ledger_host_bytes(plan)),
                                 NUM("usable_bytes", capacity), // 0: unknown
                                 {"at_peak", .item = log_object(at_peak)}));
}

void plan_print(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[] = {
      {.title = {"fused, planned"}, .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = {"materialized, planned"}, .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = {"head split, planned"}, .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, sharding_name(&o->dtypes));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s%s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         dtype_name(o->dtype), o->dtypes.fp8 ? " and FP8" : "", (long long)options_used_chunk(o),
         options_recompute(o).text);
  report_memory(columns, o->dtypes.vocab_parallel && o->ranks > 1 ? 3 : 2, device);
  if (o->log) {
    FILE *log = file_create("the log", o->log, "{\"event\":\"plan\",", REPLACE);
    bool written = log_plan(log, o, device, LCE_FUSED, &columns[2].memory, capacity) &&
                   log_plan(log, o, device, LCE_MATERIALIZED, &columns[1].memory, capacity);
    if (!written || fclose(log)) fail("cannot write the log %s: %s", o->log, strerror(errno));
  }
  if (o->timeline) plan_timeline(o, device);
  if (o->device_memory > 0) plan_require(o, device, capacity);
}

void plan_print_fit(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  if (!capacity) fail("--fit: the memory of the device is not known; give it by --device-memory GIB");
  printf("the largest --batch of %s at --seq-len %lld in %s\n", o->model.name, (long long)o->seq_len,
         text_bytes(capacity).text);
  printf("%-40s %7s %13s\n", "--offload", "fused", "materialized");
  // With --offload that one alone. Offloading from a CPU to its own memory saves nothing.
  const unsigned offloads[] = {o->dtypes.offload, OFFLOAD_OPTIMIZER, OFFLOAD_PARAMETERS,
                               OFFLOAD_PARAMETERS | OFFLOAD_ACTIVATIONS};
  int count = o->pass.recompute == RECOMPUTE_LAYER ? 4 : 3;
  if (o->dtypes.offload || device == ON_CPU || !o->trains) count = 1;
  int64_t most = 0, batches[2];
  for (int i = 0; i < count; i++) {
    char words[64];
    Options with = *o;
    with.dtypes.offload = offloads[i];
    for (int m = 0; m < 2; m++) {
      const Budget budget = {&with, device, (LceMode)m, capacity};
      batches[m] = largest_that_fits(batch_fits, &budget, INT32_MAX / o->seq_len);
      most = max_i64(most, batches[m]);
    }
    printf("%-40s %7lld %13lld\n", offloads[i] ? options_words(&with, "offload", words) : "nothing",
           (long long)batches[LCE_FUSED], (long long)batches[LCE_MATERIALIZED]);
  }
  if (most) return;
  char text[160];
  o->batch = 1;
  o->pass.mode = LCE_FUSED;
  o->dtypes.offload = offloads[count - 1]; // the table has tried it
  fail("--fit: not even one sequence of %lld tokens fits in %s; %s", (long long)o->seq_len,
       text_bytes(capacity).text, remedies(o, device, text));
}

// --- --compare-modes ---------------------------------------------------------------------------------------

// A few forward and backward passes in `mode`, and the ledger's peaks in them.
static MemoryColumn measure_mode(Trainer *trainer, LceMode mode) {
  enum { PASSES = 3 };
  Backend *backend = trainer->backend;
  plan_set_mode(trainer, mode);
  ledger_reset_peak(&backend->memory.ledger);
  double best = INFINITY;
  for (int i = 0; i < PASSES; i++) {
    backend_synchronize(backend);
    double start = now_seconds();
    trainer_gradient_pass(trainer);
    backend_synchronize(backend);
    best = fmin(best, now_seconds() - start);
  }
  return (MemoryColumn){.memory = backend->memory.ledger, .pass_seconds = best};
}

void plan_compare_modes(Trainer *trainer) {
  const Options *o = trainer->options;
  DeviceKind device = trainer->backend->device;
  size_t usable = machine_usable_bytes(trainer->backend);
  MemoryColumn columns[2];
  for (int i = 0; i < 2; i++) {
    LceMode mode = (LceMode)i;
    Ledger plan = plan_run(o, device, mode);
    bool fits = !usable || plan.peak <= usable;
    columns[i] = fits ? measure_mode(trainer, mode) : (MemoryColumn){.memory = plan};
    columns[i].title = text_of("%s, %s", lce_mode_name(mode), fits ? "measured" : "planned");
    if (!fits) printf("the %s mode does not fit here: it is planned, not measured\n", lce_mode_name(mode));
  }
  putchar('\n');
  report_memory(columns, 2, device);
  double less =
      (double)columns[1].memory.highest[MEMORY_HEAD] / (double)columns[0].memory.highest[MEMORY_HEAD];
  printf("\nat %s tokens and V %s LM head + loss hold %.1f times %s when fused\n",
         text_grouped(o->batch * o->seq_len).text, text_grouped(o->model.vocab_size).text,
         less < 1 ? 1 / less : less, less < 1 ? "more" : "less");
}
