// The time of a training step, and what share GEMMs take.
//
// Takes ./train's options. Runs a few steps and times them; then records the GEMMs of one forward and backward
// pass (the calls of linear_* and matmul_fp8, and the two of the loss) and runs them alone, back to back, on the
// same tensors: the step's plain GEMMs. Their time over the step's is its share of the speed of light.
//
//   tools/bench_step --model gpt2-124m --batch 4 --seq-len 64 --device cpu
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "tools/curves/point.h"
#include "tools/measure.h"
#include "trainer/machine.h"
#include "trainer/plan.h"

// --- recording the GEMMs of a pass ----------------------------------------------------------------------

// One of the four: the one that has an output.
typedef struct {
  LinearForward forward;
  LinearBackwardInput input;
  LinearBackwardWeight weight;
  MatmulFp8 fp8;
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

// A plain GEMM has no SwiGLU: it writes pre_activation or dactivation.
static void record_forward(Backend *backend, const LinearForward *a) {
  LinearForward plain = *a;
  if (a->activation == ACTIVATION_SWIGLU) {
    plain.out = a->pre_activation;
    plain.pre_activation = (Tensor){0}, plain.activation = ACTIVATION_NONE;
  }
  append((Gemm){.forward = plain}, a->x, a->weight);
  record.wrapped->linear_forward(backend, a);
}

static void record_backward_input(Backend *backend, const LinearBackwardInput *a) {
  LinearBackwardInput plain = *a;
  if (tensor_exists(a->dactivation)) {
    plain.dx = a->dactivation;
    plain.pre_activation = plain.dactivation = (Tensor){0}, plain.activation = ACTIVATION_NONE;
  }
  append((Gemm){.input = plain}, a->dout, a->weight);
  record.wrapped->linear_backward_input(backend, a);
}

static void record_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  append((Gemm){.weight = *a}, a->dout, a->dweight);
  record.wrapped->linear_backward_weight(backend, a);
}

static void record_fp8(Backend *backend, const MatmulFp8 *a) {
  append((Gemm){.fp8 = *a}, a->a.codes, a->b.codes);
  record.wrapped->matmul_fp8(backend, a);
}

// Its two GEMMs: the logits, and dx from their gradient.
static void record_logits_exp(Backend *backend, const LceLogitsExp *a) {
  LinearForward logits = {.out = a->exps, .x = a->x, .weight = a->weight};
  LinearBackwardInput dx = {.dx = a->dx_raw, .dout = a->exps, .weight = a->weight};
  append((Gemm){.forward = logits}, a->x, a->weight);
  if (tensor_exists(a->dx_raw)) append((Gemm){.input = dx}, a->x, a->weight);
  record.wrapped->lce_logits_exp(backend, a);
}

// The GEMMs that they would be without sampling.
static void record_sampled_gradients(Backend *backend, const LceSampledGradients *a) {
  append((Gemm){.input = {.dx = a->dx_raw, .dout = a->exps, .weight = a->weight}}, a->exps, a->weight);
  if (tensor_exists(a->dweight))
    append((Gemm){.weight = {.dweight = a->dweight,
                             .dout = a->exps,
                             .x = a->scaled_x,
                             .alpha = a->alpha,
                             .accumulate = a->accumulate || !a->first}},
           a->exps, a->dweight);
  record.wrapped->lce_sampled_gradients(backend, a);
}

static void record_pass(Trainer *trainer) {
  Backend *backend = trainer->backend;
  static BackendOps recording;
  record.wrapped = backend->ops;
  recording = *backend->ops;
  recording.linear_forward = record_forward;
  recording.linear_backward_input = record_backward_input;
  recording.linear_backward_weight = record_backward_weight;
  recording.matmul_fp8 = record_fp8;
  recording.lce_logits_exp = record_logits_exp;
  recording.lce_sampled_gradients = record_sampled_gradients;
  backend->ops = &recording;
  trainer_gradient_pass(trainer);
  backend->ops = record.wrapped;
  backend_synchronize(backend);
}

// The recorded tensors' places on the stack are free by now, but the bytes are still there.
static void replay(Backend *backend) {
  const BackendOps *ops = backend->ops;
  for (const Gemm *g = record.gemms; g < record.gemms + record.count; g++) {
    if (tensor_exists(g->forward.out)) ops->linear_forward(backend, &g->forward);
    if (tensor_exists(g->input.dx)) ops->linear_backward_input(backend, &g->input);
    if (tensor_exists(g->fp8.out)) ops->matmul_fp8(backend, &g->fp8);
    if (tensor_exists(g->weight.dweight)) ops->linear_backward_weight(backend, &g->weight);
  }
}

// --- timing ------------------------------------------------------------------------------------------------

enum { WARM_UP = 3, ROUNDS = 5 };

enum { STEP, GEMMS }; // a whole step, and its GEMMs alone

static double seconds(void *steps, int which) {
  Steps *s = steps;
  Backend *backend = s->trainer.backend;
  // A timed step makes one whole update: what the step before left to it, and its own but for what it leaves. A replay
  // overwrites gradients, so nothing is left to it.
  if (which == GEMMS)
    trainer_model(&s->trainer);
  else if (!s->trainer.update_deferred)
    steps_run(s);
  double start = device_seconds(backend);
  if (which == STEP) steps_run(s);
  for (int64_t i = 0; which == GEMMS && i < s->trainer.options->micro_steps; i++) replay(backend);
  return device_seconds(backend) - start;
}

// What ./train does and this program would not.
static void refuse_other_work(const Options *o) {
  static const char *const unsupported[] = {"plan",           "fit",     "eval-only",    "hellaswag",
                                            "save",           "log",     "resume",       "timeline",
                                            "vocab-parallel", "profile", "compare-modes"};
  const char *refused = o->dtypes.zero ? "zero" : NULL;
  for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported && !refused; i++)
    if (options_given(o, unsupported[i])) refused = unsupported[i];
  if (refused)
    fail("bench_step times training steps of one process and does nothing else: leave out --%s", refused);
}

static void parse(Options *options, int argc, char **argv) {
  static const Option none[] = {{.type = OPTION_END}};
  static const OptionTable table = {
      none,
      "The time of a training step on this machine, and that of its GEMMs alone: medians of 5, after 3 steps "
      "of warm-up; and what the step, and LM head + loss in it, hold.\n"
      "Takes ./train's options for what a step is (./train --help): --model and the sizes, --batch, "
      "--seq-len, --total-batch, --data, --init, those of LM head + loss, --device, the dtypes, "
      "--recompute.\v"
      "One process on one device; tools/bench_scaling times several, tools/bench_lce LM head + loss "
      "alone.\n\n"
      "  tools/bench_step --model gpt2-124m --batch 4 --seq-len 64 --device cpu\n",
      NULL};
  options_parse(options, option_table_take(&table, NULL, argc, argv), argv);
  refuse_other_work(options);
}

int main(int argc, char **argv) {
  Options options;
  parse(&options, argc, argv);
  Backend *backend = machine_open(&options);
  options_resolve_chunk(&options, backend->device);
  plan_require(&options, backend->device, machine_usable_bytes(backend));
  Steps steps;
  steps_begin(&steps, &options, backend, options.mode);
  for (int i = 0; i < WARM_UP; i++) steps_run(&steps);
  record_pass(&steps.trainer);
  replay(backend);
  Medians m = measure(seconds, &steps, STEP, GEMMS, 0, ROUNDS);
  double flops = record.flops * (double)options.micro_steps;
  const Ledger *ledger = &backend->memory.ledger;
  printf("%s, %s: batch %lld x %lld, V %s, %s loss, z-loss %g, recompute %s\n", backend->description,
         options.model.name, (long long)options.batch, (long long)options.seq_len,
         text_grouped(options.model.vocab_size).text, lce_mode_name(options.mode), options.z_loss,
         options_recompute(&options).text);
  printf("  step           %9.2f ms   %s tokens/s\n", 1e3 * m.base,
         text_grouped((int64_t)((double)options.total_batch / m.base)).text);
  printf("  plain GEMMs    %9.2f ms   %.1f TFLOP/s, %.0f%% of the step\n", 1e3 * m.work,
         1e-12 * flops / m.work, 100 * m.work / m.base);
  printf("  memory         %9s      at the peak (ledger), %s for LM head + loss\n",
         text_bytes(ledger->peak).text, text_bytes(ledger->highest[MEMORY_HEAD]).text);
  printf("  the device     %9s      at the peak, as the system counts\n",
         text_bytes(backend->ops->device_bytes_peak(backend)).text);
  steps_end(&steps);
  free(record.gemms);
  backend_destroy(backend);
  options_free(&options);
  return 0;
}
