#include "trainer/memory_table.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/fail.h"
#include "base/system.h"
#include "base/text.h"
#include "trainer/machine.h"

// --- the table ---------------------------------------------------------------------------------------------

enum { MAX_COLUMNS = 3 };

static void print_row(const char *name, const size_t *bytes, int count) {
  printf("  %-34s", name);
  for (int i = 0; i < count; i++) printf(" %24s", bytes[i] ? text_bytes(bytes[i]).text : "-");
  putchar('\n');
}

void memory_table_print(const MemoryColumn *columns, int count, DeviceKind device) {
  size_t category[MEMORY_CATEGORY_COUNT][MAX_COLUMNS], peak[MAX_COLUMNS], outside[MAX_COLUMNS],
      system[MAX_COLUMNS], head[MAX_COLUMNS], in_use[MEMORY_CATEGORY_COUNT] = {0}, measured = 0;
  bool timed = false;
  printf("%-36s", "memory at the step's peak");
  for (int i = 0; i < count; i++) {
    const MemoryColumn *c = &columns[i];
    printf(" %24s", c->title);
    for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) in_use[k] |= category[k][i] = c->memory.at_peak[k];
    peak[i] = c->memory.peak_bytes;
    head[i] = c->memory.head_peak_bytes;
    measured |= system[i] = c->device_bytes;
    outside[i] = system[i] > peak[i] ? system[i] - peak[i] : 0;
    timed |= c->pass_seconds > 0;
  }
  putchar('\n');
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++)
    if (in_use[k]) print_row(memory_category_name((MemoryCategory)k), category[k], count);
  print_row("all together (ledger)", peak, count);
  if (measured) print_row("outside of it (libraries, context)", outside, count);
  if (measured)
    print_row(device == ON_CUDA ? "in use on the device" : "in use by the process (VmHWM)", system, count);
  print_row("LM head + loss alone, at its peak", head, count);
  if (!timed) return;
  printf("  %-34s", "time of one forward and backward");
  for (int i = 0; i < count; i++) {
    char text[32] = "-";
    if (columns[i].pass_seconds > 0) snprintf(text, sizeof text, "%.1f ms", 1e3 * columns[i].pass_seconds);
    printf(" %24s", text);
  }
  putchar('\n');
}

const char *spread_name(const ParameterDtypes *dtypes) {
  static const char *const names[2][3] = {
      {"nothing is spread over them", "master weights and moments are spread over them",
       "gradients, master weights and moments are spread over them"},
      {"", "master weights, moments and the head's rows are spread over them",
       "gradients, master weights, moments and the head's rows are spread over them"}};
  return names[dtypes->vocab_parallel][dtypes->zero];
}

// --- --plan and --fit --------------------------------------------------------------------------------------

// The device that a plan is for, the one asked for or the one that is there, with the options finished for it.
static DeviceKind planned_device(Options *o, size_t *capacity) {
  DeviceKind device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
  if (o->device == DEVICE_AUTO || o->fit) {
    Backend *backend = machine_open(o);
    device = backend->device;
    *capacity = machine_usable_bytes(backend);
    backend_destroy(backend);
  } else {
    options_resolve_dtypes(o, device == ON_CUDA);
  }
  Backend *plan = plan_backend_create(device, o->dtype);
  options_resolve_chunk(o, plan);
  backend_destroy(plan);
  return device;
}

void memory_print_plan(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[MAX_COLUMNS] = {
      {.title = "fused, planned", .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = "materialized, planned", .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = "head split, planned", .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, spread_name(&o->dtypes));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         dtype_name(o->dtype), (long long)o->lce_chunk, recompute_name(o->recompute));
  memory_table_print(columns, o->dtypes.vocab_parallel && o->ranks > 1 ? 3 : 2, device);
}

void memory_print_fit(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
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
}

// --- --compare-modes ---------------------------------------------------------------------------------------

// A few forward and backward passes in `mode`, with all peaks measured anew.
static MemoryColumn measure_mode(Trainer *trainer, LceMode mode, const char *title) {
  enum { PASSES = 3 };
  Backend *backend = trainer->backend;
  trainer_set_mode(trainer, LCE_FUSED); // releases a larger stack before measuring
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

void memory_compare_modes(Trainer *trainer) {
  static const char *const measured[2] = {"fused, measured", "materialized, measured"};
  static const char *const planned[2] = {"fused, planned", "materialized, planned"};
  const Options *o = trainer->options;
  DeviceKind device = trainer->backend->device;
  size_t usable = machine_usable_bytes(trainer->backend);
  MemoryColumn columns[2];
  for (int i = 0; i < 2; i++) {
    LceMode mode = i == 0 ? LCE_FUSED : LCE_MATERIALIZED;
    Plan plan = plan_run(o, device, mode);
    bool fits = !usable || plan.peak_bytes <= usable;
    columns[i] =
        fits ? measure_mode(trainer, mode, measured[i]) : (MemoryColumn){.title = planned[i], .memory = plan};
    if (!fits) printf("the %s mode does not fit here: it is planned, not measured\n", lce_mode_name(mode));
  }
  putchar('\n');
  memory_table_print(columns, 2, device);
  printf("\nat %s tokens and V %s LM head + loss hold %.1f times less when fused\n",
         text_grouped(o->batch * o->seq_len).text, text_grouped(o->model.vocab_size).text,
         (double)columns[1].memory.head_peak_bytes / (double)columns[0].memory.head_peak_bytes);
}

// --- --timeline --------------------------------------------------------------------------------------------

void memory_write_timeline(const char *path, const Ledger *ledger) {
  FILE *out = fopen(path, "w");
  if (!out) fail("cannot write the timeline %s: %s", path, strerror(errno));
  fputs("event,step,block,total", out);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    fprintf(out, ",\"%s\"", memory_category_name((MemoryCategory)c));
  fputc('\n', out);
  for (size_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *e = &ledger->events[i];
    size_t total = 0;
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += e->bytes[c];
    fprintf(out, "%zu,%d,\"%s\",%zu", i, e->step, e->name, total);
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) fprintf(out, ",%zu", e->bytes[c]);
    fputc('\n', out);
  }
  if (fclose(out)) fail("cannot write the timeline %s: %s", path, strerror(errno));
}
