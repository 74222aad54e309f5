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

enum { TIMELINE_STEPS = 3, MOST_GPUS = 8 }; // of a host, where --ranks plans for more than there are

static TrainStep *step_to_plan;

void plan_set_step(TrainStep *step) {
  step_to_plan = step;
}

// A trainer that allocates nothing. Two micro-batches per step need as much memory as more.
static void open_planned(Trainer *t, Options *options, DeviceKind device) {
  options->micro_steps = min_i64(options->micro_steps, 2);
  Backend *backend = plan_backend_create(device, options->dtypes.weight);
  plan_set_card(backend, options->card);
  plan_join_ranks(backend, options->ranks);
  backend->no_sampling = options->no_sampling;
  trainer_create(t, options, backend);
}

// All micro-batches after the first take as long as the second.
static double time_step(Trainer *t, Options *o, int64_t micro_steps) {
  if (updates_deferred(&t->model.parameters, t->backend)) step_to_plan(t, NULL, 0); // its update is timed
  double begin = plan_seconds(t->backend);
  step_to_plan(t, NULL, 0);
  double whole = plan_seconds(t->backend) - begin;
  if (o->micro_steps == micro_steps) return whole;
  o->micro_steps = 1;
  step_to_plan(t, NULL, 0);
  double first = plan_seconds(t->backend) - begin - whole;
  return first + (double)(micro_steps - 1) * (whole - first);
}

static TimedPlan run_plan(const Options *given, DeviceKind device, LceMode mode, bool timed) {
  Options o = *given;
  if (mode == LCE_MATERIALIZED) o.dtypes.vocab_parallel = false; // that mode does not have it
  if (lce_excludes_smoothing(mode, o.model.final_logit_softcapping)) o.pass.terms.label_smoothing = 0;
  o.pass.mode = mode;
  TimedPlan plan = {0};
  Trainer trainer;
  open_planned(&trainer, &o, device);
  if (o.trains) {
    int64_t count;
    if (timed)
      plan.seconds = time_step(&trainer, &o, given->micro_steps);
    else
      step_to_plan(&trainer, NULL, 0);
    if (o.sample_every) trainer_sample(&trainer, NULL, 1, 0, &count);
  }
  if (!o.trains || o.val_data || o.val_fraction > 0) trainer_validate(&trainer, NULL, 1);
  if (!o.trains) plan.seconds = plan_seconds(trainer.backend);
  if (o.save && o.trains) // as a rank that writes no files
    weights_store(&trainer.model, trainer.backend, &(Folder){0}, o.save_dtype, SIZE_MAX);
  plan.ledger = trainer.backend->memory.ledger;
  trainer_destroy(&trainer);
  backend_destroy(trainer.backend);
  return plan;
}

TimedPlan plan_run_timed(const Options *options, DeviceKind device, LceMode mode) {
  return run_plan(options, device, mode, true);
}

Ledger plan_run(const Options *options, DeviceKind device, LceMode mode) {
  return run_plan(options, device, mode, false).ledger;
}

void plan_set_mode(Trainer *t, LceMode mode) {
  t->transformer.mode = mode;
  if (t->backend->memory.planning) return;
  Ledger plan = plan_run(t->options, t->backend->device, mode);
  backend_synchronize(t->backend);
  memory_set_stack(&t->backend->memory, plan.stack_peak);
}

int plan_host_ranks(const Options *o) {
  const Launch *launch = ranks_self();
  return (int)(o->ranks > launch->ranks ? min_i64(o->ranks, MOST_GPUS) : max_i64(launch->local_ranks, 1));
}

size_t plan_host_bytes(const Ledger *plan, const Options *o, DeviceKind device) {
  size_t offloaded = ledger_host_bytes(plan);
  if (offloaded && device == ON_CPU) offloaded += plan->peak;
  return offloaded * (size_t)plan_host_ranks(o);
}

size_t plan_host_left(const Options *o) {
  return o->host_bytes ? o->host_bytes : host_memory_left();
}

bool plan_fits_host(const Ledger *plan, const Options *o, DeviceKind device) {
  bool elsewhere = o->plan && o->device_memory > 0; // on a machine with a host of its own
  size_t needed = plan_host_bytes(plan, o, device), left = plan_host_left(o);
  return elsewhere || !needed || !left || needed <= left;
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
void plan_write_timeline(const Options *given, DeviceKind device) {
  Options o = *given;
  Trainer trainer;
  open_planned(&trainer, &o, device);
  Ledger *ledger = &trainer.backend->memory.ledger;
  ledger->recording = true;
  for (ledger->step = 1; ledger->step <= TIMELINE_STEPS; ledger->step++)
    step_to_plan(&trainer, NULL, ledger->step - 1);
  write_timeline(o.timeline, ledger, BACK_UP);
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
  if (o->timeline && ranks_self()->rank == 0) write_timeline(o->timeline, ledger, earlier);
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
