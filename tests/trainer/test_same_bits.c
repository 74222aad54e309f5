// Options that change no bit of a run, on any backend; with the plan's bytes each time. test_ranks.py has
// ranks.
#include "tests/runs.h"

static const char *backend;

typedef struct {
  double numbers[7]; // losses, norms, the validation's loss
  char *bytes;       // tokens, weights, master weights and moments
  size_t size;
} Outcome;

static void *grow(Outcome *out, size_t bytes) {
  out->bytes = realloc(out->bytes, out->size + bytes);
  assert_non_null(out->bytes);
  out->size += bytes;
  return out->bytes + out->size - bytes;
}

static Outcome outcome_of(Run *run) {
  Outcome out = {.size = 0};
  Backend *b = run->h->backend;
  const Options *o = &run->options;
  for (int step = 0; step < 3; step++) {
    StepResult r = run_step(run, step);
    assert_true(isfinite(r.loss) && isfinite(r.grad_norm));
    out.numbers[2 * step] = r.loss, out.numbers[2 * step + 1] = r.grad_norm;
  }
  out.numbers[6] = trainer_validate(&run->trainer, &run->data.loader, 2);
  int64_t count;
  int32_t *tokens = trainer_sample(&run->trainer, (int32_t[]){1, 2, 3}, 3, 9, &count);
  memcpy(grow(&out, (size_t)count * sizeof *tokens), tokens, (size_t)count * sizeof *tokens);
  free(tokens);
  ParameterSet *p = &run->trainer.model.parameters;
  run_step(run, 3);
  parameters_finish_update(b, p);
  const Tensor *const roles[] = {p->value, p->master, p->state[0], p->state[1]};
  for (int g = 0; g < 4 * GROUP_COUNT; g++) {
    Tensor t = roles[g / GROUP_COUNT][g % GROUP_COUNT];
    if (tensor_exists(t) && tensor_count(t)) backend_to_host(b, grow(&out, tensor_bytes(t)), t);
  }
  assert_planned(run);
  // The input of a single layer stays on the device.
  int64_t recomputed = o->pass.recompute_layers ? o->pass.recompute_layers : o->model.num_hidden_layers;
  bool offloads = o->dtypes.offload & OFFLOAD_PARAMETERS || (o->dtypes.offload && recomputed > 1);
  assert_true((ledger_host_bytes(&b->memory.ledger) > 0) == offloads);
  run_close(run);
  return out;
}

#define JOB   "--batch 2 --lr 0.01 --warmup 1 --steps 3 --seed 4 --sample-tokens 20 --data Makefile "
#define TINY  "--vocab 300 --hidden-size 24 --num-attention-heads 3 --seq-len 17 "
#define LLAMA JOB "--model llama-tiny " TINY "--intermediate-size 40 --head-dim 8 --num-key-value-heads 1 "
#define GPT2  JOB "--model gpt2-tiny " TINY
#define OLMO  JOB "--model olmo2-1b " TINY "--intermediate-size 40 --head-dim 8 --num-key-value-heads 1 "
#define PARAMETERS                                                                                           \
  "", "--offload weights", "--offload gradients", "--offload optimizer", "--offload weights,gradients",      \
      "--offload gradients,optimizer", "--offload weights,gradients,optimizer"
#define ALL PARAMETERS, "--offload activations", "--offload activations,weights,gradients,optimizer"
#define FP8                                                                                                  \
  JOB "--fp8 --vocab 300 --head-dim 16 --batch 3 --seq-len 48 --total-batch 288 --num-layers 3 "             \
      "--num-attention-heads "
#define FP8_LLAMA FP8 "3 --model llama-tiny --hidden-size 32 --intermediate-size 80 --num-key-value-heads 1 "
#define RECOMPUTED                                                                                           \
  "--recompute elementwise", "--recompute mlp", "--recompute layer",                                         \
      "--recompute layer --recompute-layers 1", "--offload optimizer",                                       \
      "--recompute layer --offload weights,gradients,optimizer,activations"

static const struct Case {
  const char *run, *variants[9];
} cases[] = {
    {LLAMA "--num-layers 5 --lce-chunk 16 --total-batch 102 --recompute layer", {ALL}},
    {LLAMA "--num-layers 4 --tie-word-embeddings --materialized-logits", {PARAMETERS}},
    {GPT2 "--num-layers 3 --total-batch 68 --recompute layer --mlp-chunk 15", {ALL}},
    {GPT2 "--num-layers 2 --recompute mlp --total-batch 102", {PARAMETERS, "--recompute layer"}},
    {LLAMA "--num-layers 5 --total-batch 68 --recompute layer --recompute-layers 3", {ALL}},
    {GPT2 "--num-layers 3 --recompute layer --recompute-layers 1", {ALL}},
    {LLAMA "--num-layers 5 --total-batch 68 --recompute layer --optimizer muon", {ALL}},
    {GPT2 "--num-layers 3 --optimizer muon", {PARAMETERS}},
    {LLAMA "--num-layers 1 --total-batch 68 --recompute layer --pack documents --end-of-text 10", {ALL}},
    {LLAMA "--num-layers 2 --total-batch 102 --lce-chunk 20 --z-loss 0.01", {"", "--lce-sample 1e-30"}},
    {LLAMA "--num-layers 2 --total-batch 68", {RECOMPUTED}},
    {FP8_LLAMA, {RECOMPUTED}},
    {FP8_LLAMA "--recompute layer --mlp-chunk 64", {""}}, // chunks of the MLP have factors of their own
    {FP8_LLAMA "--tie-word-embeddings --lce-chunk 50 --lce-sample 2", {"--offload weights", "--fp8 all"}},
    {FP8_LLAMA "--fp8 layers", {"--recompute mlp", "--offload weights"}},
    {FP8 "3 --model gpt2-tiny --hidden-size 48", {RECOMPUTED}},
    {FP8 "4 --model qwen3-0.6b --hidden-size 32 --intermediate-size 48 --num-key-value-heads 2",
     {RECOMPUTED}},
    {FP8 "4 --model olmo2-1b --hidden-size 32 --intermediate-size 48 --num-key-value-heads 2", {RECOMPUTED}},
    {OLMO "--num-layers 2 --total-batch 68", {RECOMPUTED}},
    {OLMO "--num-layers 5 --total-batch 68 --recompute layer", {ALL}}};

// A GPU's default dtypes, and layers that take as long as their copies, so that a missing wait changes bits.
static const struct Case gpu_cases[] = {
    {JOB "--model llama-tiny --vocab 4099 --seq-len 200 --num-layers 4 --total-batch 1200 --recompute layer "
         "--moment-dtype bf16 --no-master-weights",
     {ALL}},
    {JOB
     "--model gpt2-tiny --vocab 4099 --num-layers 4 --moment-dtype bf16 --no-master-weights --optimizer muon",
     {PARAMETERS}},
    {JOB "--model llama-tiny --vocab 512 --hidden-size 1024 --intermediate-size 4096 --head-dim 64 "
         "--num-attention-heads 16 --num-key-value-heads 4 --num-layers 4 --seq-len 1024",
     {PARAMETERS}}};

// Not in bf16, which rounds the argument of GELU before it is computed again, and not the first time.
static const struct Case gelu = {GPT2 "--num-layers 2 --total-batch 68", {RECOMPUTED}};

// The CPU's copies wait for their join, the latest that they may. These in run at once, the soonest.
static void copy_in_at_once(Backend *b, const Copy *a) {
  b->ops->copies_join(b, 0, a->after_out ? a->behind : ASYNC_EVENTS - 1);
  memcpy(a->out.data, a->x.data, tensor_bytes(a->x));
}

static void check_variant(const struct Case *c, const char *variant, const Outcome *want, bool at_once) {
  Run *run = run_open_on(backend, "%s %s", c->run, variant);
  BackendOps ops = *run->h->backend->ops;
  ops.copy_in = copy_in_at_once;
  if (at_once) run->h->backend->ops = &ops;
  Outcome got = outcome_of(run);
  if (memcmp(got.numbers, want->numbers, sizeof want->numbers))
    fail_msg("%s: other losses or norms with \"%s\"", c->run, variant);
  assert_int_equal(got.size, want->size);
  if (memcmp(got.bytes, want->bytes, want->size)) fail_msg("%s: other bits with \"%s\"", c->run, variant);
  free(got.bytes);
}

static void check(const struct Case *c) {
  if (strstr(c->run, "--fp8") && !strcmp(backend, "cuda-fp32")) return;
  Run *run = run_open_on(backend, "%s", c->run);
  if (!run) skip();
  if (run->options.dtypes.fp8 && run->h->backend->no_fp8) {
    run_close(run);
    return;
  }
  Outcome want = outcome_of(run);
  for (int v = 0; v < 9 && c->variants[v]; v++) {
    check_variant(c, c->variants[v], &want, false);
    if (!strcmp(backend, "cpu") && strstr(c->variants[v], "offload"))
      check_variant(c, c->variants[v], &want, true);
  }
  free(want.bytes);
}

TEST(test_same_bits) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check(&cases[i]);
  if (strcmp(backend, "cuda")) check(&gelu);
}

TEST(test_same_bits_at_sizes_of_a_gpu) {
  if (strcmp(backend, "cuda")) skip();
  for (size_t i = 0; i < sizeof gpu_cases / sizeof *gpu_cases; i++) check(&gpu_cases[i]);
}

TEST(test_another_seed_is_another_run) {
  Run *runs[] = {run_open_on(backend, LLAMA), run_open_on(backend, LLAMA "--seed 5")};
  if (!runs[0]) skip();
  Outcome one = outcome_of(runs[0]), other = outcome_of(runs[1]);
  for (int i = 0; i < 7; i++) assert_true(one.numbers[i] != other.numbers[i]);
  assert_memory_not_equal(one.bytes, other.bytes, one.size);
  free(one.bytes);
  free(other.bytes);
}

int main(void) {
  static const char *const backends[] = {"cpu", "cuda-fp32", "cuda"};
  int failed = 0;
  for (int i = 0; i < 3; i++) failed += tests_run(backend = backends[i], NULL, NULL);
  return failed;
}
