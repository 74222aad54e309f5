// Offloading, and updates during the forward pass: the same bits with and without, for every list, on every backend; the
// host's bytes in plan and ledger. Ranks and checkpoints are in test_ranks.py, refusals in test_cli.py.
#include "tests/runs.h"

#define JOB "--batch 2 --lr 0.01 --warmup 1 --steps 3 --seed 4 "

enum { STEPS = 3 };

static const char *backend;

// What a run leaves behind.
typedef struct {
  StepResult steps[STEPS];
  double validation;
  int64_t count, sampled;
  void *bytes; // weights, master weights, moments
  size_t size;
  int32_t *tokens;
} Outcome;

static void keep(Outcome *out, Backend *b, const Tensor *role) {
  for (int g = 0; g < GROUP_COUNT; g++) {
    if (!tensor_exists(role[g]) || !tensor_count(role[g])) continue;
    size_t bytes = tensor_bytes(role[g]);
    out->bytes = realloc(out->bytes, out->size + bytes);
    assert_non_null(out->bytes);
    backend_to_host(b, (char *)out->bytes + out->size, role[g]);
    out->size += bytes;
  }
}

// Without a list nothing is offloaded, and every update is finished at once.
static bool run_all(Outcome *out, const char *model, const char *list) {
  *out = (Outcome){0};
  bool at_once = !list;
  if (at_once) list = "";
  Run *run = run_open_on(backend, "%s " JOB "%s %s", model, *list ? "--offload" : "", list);
  if (!run) return false;
  const Parameters *p = &trainer_model(&run->trainer)->parameters;
  for (int64_t step = 0; step < STEPS; step++) {
    out->steps[step] = run_step(run, step);
    if (at_once) trainer_model(&run->trainer);
  }
  out->validation = trainer_validate(&run->trainer, &run->data.loader, 2);
  out->tokens = trainer_sample(&run->trainer, (int32_t[]){1, 2, 3}, 3, 9, &out->sampled);
  keep(out, run->h->backend, p->value);
  keep(out, run->h->backend, p->master);
  keep(out, run->h->backend, p->state[0]);
  keep(out, run->h->backend, p->state[1]);
  const Ledger *ledger = &run->h->backend->memory.ledger;
  assert_planned(run);
  // Of one layer the input stays on the device.
  const Options *o = &run->options;
  int64_t recomputed = o->recompute_layers ? o->recompute_layers : o->model.num_hidden_layers;
  bool nothing = !*list || (!strcmp(list, "activations") && recomputed == 1);
  assert_true((ledger_host_bytes(ledger) == 0) == nothing);
  run_close(run);
  return true;
}

static void outcome_free(Outcome *out) {
  free(out->bytes);
  free(out->tokens);
}

static void check_model(const char *model, bool activations) {
  static const char *const lists[] = {"",
                                      "weights",
                                      "gradients",
                                      "optimizer",
                                      "weights,gradients",
                                      "weights,gradients,optimizer",
                                      "activations",
                                      "activations,weights,gradients,optimizer"};
  Outcome base, got;
  if (!run_all(&base, model, NULL)) return;
  for (size_t i = 0; i < sizeof lists / sizeof *lists - (activations ? 0 : 2); i++) {
    assert_true(run_all(&got, model, lists[i]));
    for (int s = 0; s < STEPS; s++)
      if (got.steps[s].loss != base.steps[s].loss || got.steps[s].grad_norm != base.steps[s].grad_norm)
        fail_msg("%s, --offload %s: step %d has loss %.9g and norm %.9g, not %.9g and %.9g", model, lists[i],
                 s, got.steps[s].loss, got.steps[s].grad_norm, base.steps[s].loss, base.steps[s].grad_norm);
    assert_true(got.validation == base.validation);
    assert_int_equal(got.sampled, base.sampled);
    assert_memory_equal(got.tokens, base.tokens, (size_t)base.sampled * sizeof *base.tokens);
    assert_int_equal(got.size, base.size);
    assert_memory_equal(got.bytes, base.bytes, base.size);
    outcome_free(&got);
  }
  outcome_free(&base);
}

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 300 --hidden-size 24 --intermediate-size 40 --seq-len 17 --head-dim 8 "        \
  "--num-attention-heads 3 --num-key-value-heads 1 "
#define GPT2 "--model gpt2-tiny --vocab 300 --hidden-size 24 --num-attention-heads 3 --seq-len 17 "

TEST(test_same_bits) {
  check_model(LLAMA "--num-layers 5 --lce-chunk 16 --total-batch 102 --recompute layer", true);
  check_model(LLAMA "--num-layers 4 --tie-word-embeddings --materialized-logits", false);
  check_model(GPT2 "--num-layers 3 --total-batch 68 --recompute layer --mlp-chunk 15", true);
  check_model(GPT2 "--num-layers 2 --recompute mlp --total-batch 102 --lce-sample 0.5", false);
  check_model(LLAMA "--num-layers 5 --total-batch 68 --recompute layer --recompute-layers 3", true);
  check_model(GPT2 "--num-layers 3 --recompute layer --recompute-layers 1", true);
  check_model(LLAMA "--num-layers 1 --total-batch 68 --recompute layer --pack documents --end-of-text 10",
              true);
}

// The sizes of a GPU's defaults, where the optimizer's state has two dtypes; and layers that take as long as their copies
// and updates, so that one that is not waited for changes bits.
TEST(test_same_bits_at_sizes_of_a_gpu) {
  if (strcmp(backend, "cuda")) skip();
  check_model(
      "--model llama-tiny --vocab 4099 --seq-len 200 --num-layers 4 --total-batch 1200 --recompute layer "
      "--moment-dtype bf16 --no-master-weights",
      true);
  check_model("--model llama-tiny --vocab 512 --hidden-size 1024 --intermediate-size 4096 --head-dim 64 "
              "--num-attention-heads 16 --num-key-value-heads 4 --num-layers 4 --seq-len 1024",
              false);
}

int main(void) {
  static const char *const backends[] = {"cpu", "cuda-fp32", "cuda"};
  int failed = 0;
  for (int i = 0; i < 3; i++) failed += tests_run(backend = backends[i], NULL, NULL);
  return failed;
}
