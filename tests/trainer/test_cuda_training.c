// Training on a GPU: steps against the CPU, bf16 against fp32, same bits, the ledger against the device.
#include "kernels/base/random.h"
#include "tests/runs.h"

// Random tokens, the same for every run.
static void load_batch(Run *run) {
  Trainer *t = &run->trainer;
  for (int64_t n = 0; n < run->options.batch * run->options.seq_len; n++) {
    t->host_tokens[n] = (int32_t)(random_bits(5, 1, (uint64_t)n) % (uint64_t)run->options.model.vocab_size);
    t->host_targets[n] = (int32_t)(random_bits(5, 2, (uint64_t)n) % (uint64_t)run->options.model.vocab_size);
  }
}

static const char *const step_lines[] = {
    "--model llama-tiny --vocab 1003 --num-layers 2 --batch 3 --seq-len 37 --lce-chunk 29",
    "--model llama-tiny --vocab 512 --num-layers 2 --batch 2 --seq-len 64 --untie-word-embeddings "
    "--recompute layer",
    "--model llama-tiny --vocab 777 --hidden-size 256 --num-attention-heads 4 --num-key-value-heads 1 "
    "--num-layers 2 --batch 2 --seq-len 129 --materialized-logits --recompute elementwise",
    "--model gpt2-tiny --vocab 1003 --num-layers 2 --batch 3 --seq-len 37 --lce-chunk 64",
    "--model gpt2-tiny --vocab 517 --hidden-size 192 --num-attention-heads 3 --num-layers 2 --batch 2 "
    "--seq-len 65 --materialized-logits --recompute mlp",
};

// Per-tensor bounds. fp32: sums in another order, about 1e-5. bf16: about twenty roundings of 2^-9 lie on the
// way to a gradient; as a random walk they add up to 1e-2, and three times that is allowed.
TEST(test_steps) {
  for (size_t k = 0; k < 2 * sizeof step_lines / sizeof *step_lines; k++) {
    bool bf16 = k % 2;
    const char *line = step_lines[k / 2], *backend = bf16 ? "cuda" : "cuda-fp32";
    Run *cuda = run_open_on(backend, "%s --grad-dtype fp32", line), *cpu = run_open("%s", line);
    const ParameterSet *a = &cuda->trainer.model.parameters, *b = &cpu->trainer.model.parameters;
    for (int g = 0; g < GROUP_COUNT; g++) { // as the GPU's GEMMs read them
      int64_t count = tensor_count(a->value[g]);
      if (!count) continue;
      const double *values = values_of(cuda->h, a->value[g]);
      float *weights = malloc((size_t)count * sizeof *weights);
      for (int64_t i = 0; i < count; i++) weights[i] = (float)values[i];
      backend_to_device(cpu->h->backend, b->value[g], weights);
      free(weights);
    }
    load_batch(cuda);
    load_batch(cpu);
    trainer_gradient_pass(&cuda->trainer);
    trainer_gradient_pass(&cpu->trainer);
    double error = relative_distance(values_of(cuda->h, cuda->trainer.loss),
                                     values_of(cpu->h, cpu->trainer.loss), tensor_count(cuda->trainer.loss));
    if (!(error < (bf16 ? 1e-2 : 1e-5))) fail_msg("%s, %s: loss is off by %g", backend, line, error);
    for (int64_t i = 0; i < a->count; i++) {
      error = relative_distance(values_of(cuda->h, a->items[i].grad), values_of(cpu->h, b->items[i].grad),
                                tensor_count(a->items[i].grad));
      if (!(error < (bf16 ? 3e-2 : 3e-5)))
        fail_msg("%s, %s: the gradient of %s is off by %g", backend, line, a->items[i].name, error);
    }
    run_close(cuda);
    run_close(cpu);
  }
}

enum { STEPS = 50 };

// Letters drawn one by one, some more often than others: no rare passage in which a small difference matters.
static int make_letters(void **state) {
  enum { LETTERS = 200000 };
  static char text[LETTERS + 1];
  if (make_temp_dir(state)) return -1;
  for (uint64_t i = 0; i < LETTERS; i++) {
    double u = random_uniform(1, 0, i);
    text[i] = (char)('0' + (int)(64 * u * u));
  }
  write_text("letters.txt", text);
  return 0;
}

#define SHORT "--model llama-tiny --vocab 4096 --batch 8 --seq-len 128 --steps 50 "

static void train(const char *backend, const char *options, double losses[STEPS], void *weights) {
  Run *run = run_open_on(backend, "%s --val-fraction 0 --data %s", options, temp_path("letters.txt"));
  StepResult results[TRAINER_PENDING];
  for (int64_t step = 0; step < STEPS; step++) train_step(&run->trainer, &run->data.loader, step);
  assert_int_equal(trainer_collect(&run->trainer, results), STEPS);
  for (int i = 0; i < STEPS; i++) losses[i] = results[i].loss;
  if (weights) backend_to_host(run->h->backend, weights, run->trainer.model.parameters.value[GROUP_HEAD]);
  run_close(run);
}

// The losses of the two dtypes may drift apart as the weights do, by a few bf16 roundings of the loss.
TEST(test_bf16_follows_fp32) {
  double fp32[STEPS], bf16[STEPS], lean[STEPS];
  train("cuda-fp32", SHORT, fp32, NULL);
  train("cuda", SHORT, bf16, NULL);
  train("cuda", SHORT "--no-master-weights --moment-dtype bf16", lean, NULL);
  assert_true(fp32[STEPS - 1] < fp32[0] - 2);
  for (int i = 0; i < STEPS; i++) {
    if (!(fabs(bf16[i] - fp32[i]) < 0.02 * fp32[i]))
      fail_msg("step %d: bf16 %g, fp32 %g", i, bf16[i], fp32[i]);
    // Without a master copy the weights carry bf16's own noise.
    if (!(fabs(lean[i] - fp32[i]) < 0.06 * fp32[i]))
      fail_msg("step %d: lean %g, fp32 %g", i, lean[i], fp32[i]);
  }
}

TEST(test_same_seed_same_bits) {
  static const char *const lines[] = {SHORT,
                                      "--model gpt2-tiny --vocab 4099 --batch 4 --seq-len 100 --steps 50 "
                                      "--no-master-weights --moment-dtype bf16",
                                      SHORT "--materialized-logits --recompute layer"};
  static double losses[2][STEPS];
  static uint16_t weights[2][1 << 20]; // more than a head has
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    for (int turn = 0; turn < 2; turn++) train("cuda", lines[i], losses[turn], weights[turn]);
    assert_memory_equal(losses[0], losses[1], sizeof *losses);
    assert_memory_equal(weights[0], weights[1], sizeof *weights);
  }
}

// The device hands out memory in pages of 2 MiB; every reservation may round up by one.
TEST(test_ledger_agrees_with_the_device) {
  for (int mode = 0; mode < 2; mode++) {
    Run *run = run_open_on("cuda", "--model llama-tiny --batch 16 --seq-len 512 %s",
                           mode ? "--materialized-logits" : "--fused-lce");
    Backend *backend = run->h->backend;
    load_batch(run);
    trainer_gradient_pass(&run->trainer);
    backend_synchronize(backend);
    const Memory *memory = &backend->memory;
    assert_true(plan_run(&run->options, ON_CUDA, run->options.pass.mode).stack_peak ==
                memory->stack_capacity);
    double ledger = (double)(memory->ledger.total + memory->stack_capacity);
    double device = (double)backend->ops->device_bytes_now(backend) - (double)backend->device_overhead;
    double pages = (double)((memory->reserved_count + 2) * (2 << 20));
    if (!(device >= ledger - pages && device <= ledger + pages))
      fail_msg("the device says %.0f bytes beyond its overhead, the ledger %.0f", device, ledger);
    run_close(run);
  }
}

int main(void) {
  const char *reason = NULL;
  Backend *backend = cuda_backend_create(0, DTYPE_BF16, &reason);
  if (!backend) return skip_all("cuda training", "training on CUDA", reason);
  backend_destroy(backend);
  return tests_run("cuda training", make_letters, remove_temp_dir);
}
