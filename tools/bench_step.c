// The time of a training step, and what share GEMMs take.
//
// Takes ./train's options. Runs a few steps and times them; then records the GEMMs of one forward and backward
// pass (the calls of linear_* and the two of the loss) and runs them alone, back to back, on the same tensors:
// the step's plain GEMMs. Their time over the step's is its share of the speed of light. On the CPU the same
// step is timed once more with GEMMs by plain loops. --compare-modes also times the step with materialized
// logits, alternating with the fused one.
//
//   tools/bench_step --model gpt2-124m --batch 4 --seq-len 64 --device cpu
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "tools/curves/point.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/speed.h"
#include "trainer/trainer.h"

// --- recording the GEMMs of a pass ----------------------------------------------------------------------

typedef struct {
  enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT } kind;
  union {
    LinearForward forward;
    LinearBackwardInput input;
    LinearBackwardWeight weight;
  } call;
} Gemm;

static struct {
  const BackendOps *wrapped;
  Gemm *gemms;
  int64_t count, capacity;
  double flops;
} record;

static void append(Gemm gemm, Tensor rows, Tensor weight) {
  record.gemms = host_grow(record.gemms, record.count, &record.capacity, sizeof gemm, "the list of GEMMs");
  record.gemms[record.count++] = gemm;
  record.flops += 2.0 * (double)rows.shape[0] * (double)tensor_count(weight);
}

static void record_forward(Backend *backend, const LinearForward *a) {
  append((Gemm){.kind = FORWARD, .call.forward = *a}, a->x, a->weight);
  record.wrapped->linear_forward(backend, a);
}

static void record_backward_input(Backend *backend, const LinearBackwardInput *a) {
  append((Gemm){.kind = BACKWARD_INPUT, .call.input = *a}, a->dout, a->weight);
  record.wrapped->linear_backward_input(backend, a);
}

static void record_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  append((Gemm){.kind = BACKWARD_WEIGHT, .call.weight = *a}, a->dout, a->dweight);
  record.wrapped->linear_backward_weight(backend, a);
}

// Its two GEMMs: the logits, and dx from their gradient.
static void record_logits_exp(Backend *backend, const LceLogitsExp *a) {
  LinearForward logits = {.out = a->exps, .x = a->x, .weight = a->weight};
  LinearBackwardInput dx = {.dx = a->dx_raw, .dout = a->exps, .weight = a->weight};
  append((Gemm){.kind = FORWARD, .call.forward = logits}, a->x, a->weight);
  if (tensor_exists(a->dx_raw)) append((Gemm){.kind = BACKWARD_INPUT, .call.input = dx}, a->x, a->weight);
  record.wrapped->lce_logits_exp(backend, a);
}

// The GEMMs that it would be without a filter.
static void record_filtered(Backend *backend, const LceFilteredGemms *a) {
  LinearBackwardInput dx = {.dx = a->dx_raw, .dout = a->exps, .weight = a->weight};
  LinearBackwardWeight dweight = {.dweight = a->dweight,
                                  .dout = a->exps,
                                  .x = a->scaled_x,
                                  .alpha = a->alpha,
                                  .accumulate = a->accumulate};
  append((Gemm){.kind = BACKWARD_INPUT, .call.input = dx}, a->exps, a->weight);
  append((Gemm){.kind = BACKWARD_WEIGHT, .call.weight = dweight}, a->exps, a->dweight);
  record.wrapped->lce_filtered_gemms(backend, a);
}

static void record_pass(Trainer *trainer) {
  Backend *backend = trainer->backend;
  static BackendOps recording;
  record.wrapped = backend->ops;
  recording = *backend->ops;
  recording.linear_forward = record_forward;
  recording.linear_backward_input = record_backward_input;
  recording.linear_backward_weight = record_backward_weight;
  recording.lce_logits_exp = record_logits_exp;
  recording.lce_filtered_gemms = record_filtered;
  backend->ops = &recording;
  trainer_gradient_pass(trainer);
  backend->ops = record.wrapped;
  backend_synchronize(backend);
}

// The recorded tensors' places on the stack are free by now, but the bytes are still there.
static void replay(Backend *backend) {
  for (int64_t i = 0; i < record.count; i++) {
    const Gemm *p = &record.gemms[i];
    switch (p->kind) {
    case FORWARD:
      backend->ops->linear_forward(backend, &p->call.forward);
      break;
    case BACKWARD_INPUT:
      backend->ops->linear_backward_input(backend, &p->call.input);
      break;
    case BACKWARD_WEIGHT:
      backend->ops->linear_backward_weight(backend, &p->call.weight);
      break;
    }
  }
}

// --- timing ------------------------------------------------------------------------------------------------

enum { WARM_UP = 3, ROUNDS = 5 };

typedef struct {
  Trainer *trainer;
  const Loader *loader;
  int64_t step;
} Steps;

static void one_step(Steps *s) {
  StepResult results[TRAINER_PENDING];
  trainer_step(s->trainer, s->loader, s->step++);
  trainer_collect(s->trainer, results);
}

// Seconds of one step of the same shapes with GEMMs by plain loops, on another backend.
static double plain_step_seconds(const Options *options, const Loader *loader) {
  Backend *backend = cpu_backend_create(true);
  Trainer trainer;
  trainer_create(&trainer, options, backend);
  trainer_set_mode(&trainer, options->mode);
  Steps steps = {&trainer, loader, 0};
  double start = now_seconds();
  one_step(&steps);
  double seconds = now_seconds() - start;
  trainer_destroy(&trainer);
  backend_destroy(backend);
  return seconds;
}

static double seconds_in(LceMode mode, Steps *s, Backend *backend) {
  enum { TIMED = 2 };
  trainer_set_mode(s->trainer, mode);
  one_step(s); // on a stack that is new
  backend_synchronize(backend);
  double start = now_seconds();
  for (int i = 0; i < TIMED; i++) one_step(s);
  backend_synchronize(backend);
  return (now_seconds() - start) / TIMED;
}

static void compare_modes(Steps *steps, Backend *backend) {
  double fused[ROUNDS], materialized[ROUNDS], ratios[ROUNDS];
  seconds_in(LCE_MATERIALIZED, steps, backend); // chooses its GEMM algorithms
  for (int i = 0; i < ROUNDS; i++) {
    fused[i] = seconds_in(LCE_FUSED, steps, backend);
    materialized[i] = seconds_in(LCE_MATERIALIZED, steps, backend);
    ratios[i] = materialized[i] / fused[i];
  }
  printf("  the modes      %9.2f ms   fused, %.2f ms materialized: %.3f times\n", 1e3 * median(fused, ROUNDS),
         1e3 * median(materialized, ROUNDS), median(ratios, ROUNDS));
}

// What ./train does and this program would not.
static void refuse_other_work(const Options *o) {
  static const char *const unsupported[] = {"plan", "fit",    "eval-only", "hellaswag",     "save",
                                            "log",  "resume", "timeline",  "vocab-parallel"};
  const char *refused = o->dtypes.zero ? "zero" : NULL;
  for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported && !refused; i++)
    if (options_given(o, unsupported[i])) refused = unsupported[i];
  if (refused)
    fail("bench_step times training steps of one process and does nothing else: leave out --%s", refused);
}

static void parse(Options *options, int argc, char **argv) {
  bool compare_modes = false;
  static const Option rows[] = {
      {OPTION_FLAG, "compare-modes", .size = sizeof(bool), .min = true,
       HELP("Also time the step with materialized logits, alternating with the fused mode")},
      {.type = OPTION_END}};
  static const OptionTable table = {
      rows,
      "The time of a training step on this machine, and that of its GEMMs alone: medians of 5, after 3 steps "
      "of warm-up; and what the step, and LM head + loss in it, hold. On the CPU also the same step with "
      "GEMMs by plain loops.\n"
      "Takes ./train's options for what a step is (./train --help): --model and the sizes, --batch, "
      "--seq-len, --total-batch, --data, --init, those of LM head + loss, --device, the dtypes, "
      "--recompute, --attention.\v"
      "One process on one device; tools/bench_scaling times several, tools/bench_lce LM head + loss "
      "alone.\n\n"
      "  tools/bench_step --model gpt2-124m --batch 4 --seq-len 64 --device cpu\n",
      NULL};
  options_parse(options, option_table_take(&table, &compare_modes, NULL, argc, argv), argv);
  options->compare_modes = compare_modes;
  refuse_other_work(options);
}

int main(int argc, char **argv) {
  Options options;
  parse(&options, argc, argv);
  Backend *backend = machine_open(&options);
  options_resolve_chunk(&options, backend->device);
  Source *source;
  Loader loader = point_loader(&options, &source);
  plan_require(&options, backend->device, machine_usable_bytes(backend));
  Trainer trainer;
  trainer_create(&trainer, &options, backend);
  trainer_set_mode(&trainer, options.mode);

  Steps steps = {&trainer, &loader, 0};
  for (int i = 0; i < WARM_UP; i++) one_step(&steps);
  record_pass(&trainer);
  replay(backend);
  double step[ROUNDS], gemms[ROUNDS];
  for (int i = 0; i < ROUNDS; i++) { // alternately: a card's speed changes with its heat
    backend_synchronize(backend);
    double start = now_seconds();
    one_step(&steps);
    backend_synchronize(backend);
    double middle = now_seconds();
    for (int64_t m = 0; m < options.micro_steps; m++) replay(backend);
    backend_synchronize(backend);
    step[i] = middle - start;
    gemms[i] = now_seconds() - middle;
  }
  double step_seconds = median(step, ROUNDS), gemm_seconds = median(gemms, ROUNDS);
  double flops = record.flops * (double)options.micro_steps;
  const Ledger *ledger = &backend->memory.ledger;
  printf("%s, %s: batch %lld x %lld, V %s, %s loss, z-loss %g, recompute %s\n", backend->description,
         options.model.name, (long long)options.batch, (long long)options.seq_len,
         text_grouped(options.model.vocab_size).text, lce_mode_name(options.mode), options.z_loss,
         recompute_name(options.recompute));
  printf("  step           %9.2f ms   %s tokens/s\n", 1e3 * step_seconds,
         text_grouped((int64_t)((double)options.total_batch / step_seconds)).text);
  printf("  plain GEMMs    %9.2f ms   %.1f TFLOP/s, %.0f%% of the step\n", 1e3 * gemm_seconds,
         1e-12 * flops / gemm_seconds, 100 * gemm_seconds / step_seconds);
  printf("  memory         %9s      at the peak (ledger), %s for LM head + loss\n",
         text_bytes(ledger->peak).text, text_bytes(ledger->highest[MEMORY_HEAD]).text);
  printf("  the device     %9s      at the peak, as the system counts\n",
         text_bytes(backend->ops->device_bytes_peak(backend)).text);
  if (options.compare_modes) compare_modes(&steps, backend);
  trainer_destroy(&trainer);
  if (backend->device == ON_CPU) {
    double plain = plain_step_seconds(&options, &loader);
    printf("  plain loops    %9.2f ms   %.1f times the step\n", 1e3 * plain, plain / step_seconds);
  }
  free(record.gemms);
  source_close(source);
  backend_destroy(backend);
  options_free(&options);
  return 0;
}
