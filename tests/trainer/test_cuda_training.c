// Training on the CUDA backend: whole steps of both families against the CPU backend, bf16 against fp32 over
// 50 steps, the same bits twice, and the ledger against the device's own figure. Skipped where there is no
// GPU.
#include "tests/data_files.h"

#include "kernels/random.h"
#include "tests/harness.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/setup.h"
#include "trainer/trainer.h"

// --- a trainer from a command line -------------------------------------------------------------------------

typedef struct {
  Options options;
  Backend *backend;
  Trainer trainer;
} Rig;

enum { MAX_ARGUMENTS = 48 };

static void rig_open(Rig *rig, const char *device, const char *line) {
  static char text[1024];
  char *argv[MAX_ARGUMENTS + 1] = {"train", "--device", (char *)device};
  int argc = 3;
  snprintf(text, sizeof text, "%s", line);
  for (char *word = strtok(text, " "); word && argc < MAX_ARGUMENTS; word = strtok(NULL, " "))
    argv[argc++] = word;
  setup_options(&rig->options, argc, argv);
  rig->backend = machine_open(&rig->options);
  plan_resolve_chunk(&rig->options, rig->backend->device);
  trainer_create(&rig->trainer, &rig->options, rig->backend);
  plan_set_mode(&rig->trainer, rig->options.mode);
}

static void rig_close(Rig *rig) {
  trainer_destroy(&rig->trainer);
  backend_destroy(rig->backend);
  options_free(&rig->options);
}

static float *download(Backend *backend, Tensor t) {
  size_t count = (size_t)tensor_count(t);
  float *values = malloc(count * sizeof *values);
  assert_non_null(values);
  if (t.dtype == DTYPE_F32) {
    backend_to_host(backend, values, tensor_flat(t));
    return values;
  }
  uint16_t *bits = malloc(count * sizeof *bits);
  assert_non_null(bits);
  backend_to_host(backend, bits, tensor_flat(t));
  for (size_t i = 0; i < count; i++) values[i] = bf16_to_f32(bits[i]);
  free(bits);
  return values;
}

// Puts a trainer's weights, as its GEMMs read them, into an fp32 trainer of the same model.
static void copy_weights(Rig *to, Rig *from) {
  for (int g = 0; g < GROUP_COUNT; g++) {
    float *values = download(from->backend, trainer_model(&from->trainer)->parameters.value[g]);
    backend_to_device(to->backend, trainer_model(&to->trainer)->parameters.value[g], values);
    free(values);
  }
}

// Random tokens, a few targets ignored, the same on every rig.
static void load_batch(Rig *rig) {
  Trainer *t = &rig->trainer;
  int64_t tokens = rig->options.batch * rig->options.seq_len, vocab = rig->options.model.vocab_size;
  for (int64_t n = 0; n < tokens; n++) {
    t->host_tokens[n] = (int32_t)(random_bits(5, 1, (uint64_t)n) % (uint64_t)vocab);
    t->host_targets[n] = (int32_t)(random_bits(5, 2, (uint64_t)n) % (uint64_t)vocab);
  }
  backend_to_device(t->backend, t->tokens, t->host_tokens);
  backend_to_device(t->backend, t->targets, t->host_targets);
}

// |a - b| / |b| over all elements.
static double relative_error(const float *a, const float *b, int64_t count) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    size += (double)b[i] * (double)b[i];
  }
  return sqrt(difference / (size + 1e-30));
}

// --- a whole step against the CPU --------------------------------------------------------------------------

// Per-tensor bounds. fp32: GEMMs of up to a few hundred terms in another order, through two layers, about
// 1e-5. bf16: every stored activation and gradient is rounded to 2^-9 relative; some twenty roundings lie on
// the way to a gradient, which add up like a random walk to 2^-9 sqrt(20), about 1e-2; three times that is
// allowed.
static void step_agrees(const char *line, bool bf16) {
  char cuda_line[1024];
  snprintf(cuda_line, sizeof cuda_line, "%s --dtype %s --grad-dtype fp32", line, bf16 ? "bf16" : "fp32");
  Rig cuda, cpu;
  rig_open(&cuda, "cuda", cuda_line);
  rig_open(&cpu, "cpu", line);
  copy_weights(&cpu, &cuda);
  cuda.backend->memory.poison = cpu.backend->memory.poison = true;
  load_batch(&cuda);
  load_batch(&cpu);
  trainer_gradient_pass(&cuda.trainer);
  trainer_gradient_pass(&cpu.trainer);

  double bound = bf16 ? 3e-2 : 3e-5;
  int64_t tokens = tensor_count(cuda.trainer.loss);
  float *loss = download(cuda.backend, cuda.trainer.loss), *want = download(cpu.backend, cpu.trainer.loss);
  double error = relative_error(loss, want, tokens);
  if (!(error < (bf16 ? 1e-2 : 1e-5))) fail_msg("%s: loss is off by %g", cuda_line, error);
  free(loss);
  free(want);
  const Parameters *a = &trainer_model(&cuda.trainer)->parameters,
                   *b = &trainer_model(&cpu.trainer)->parameters;
  for (int64_t i = 0; i < a->count; i++) {
    float *got = download(cuda.backend, a->items[i].grad), *ref = download(cpu.backend, b->items[i].grad);
    error = relative_error(got, ref, tensor_count(a->items[i].grad));
    if (!(error < bound)) fail_msg("%s: the gradient of %s is off by %g", cuda_line, a->items[i].name, error);
    free(got);
    free(ref);
  }
  rig_close(&cuda);
  rig_close(&cpu);
}

static const char *const step_lines[] = {
    "--model llama-tiny --vocab 1003 --num-layers 2 --batch 3 --seq-len 37 --lce-chunk 29",
    "--model llama-tiny --vocab 512 --num-layers 2 --batch 2 --seq-len 64 --untie-word-embeddings "
    "--recompute layer",
    "--model llama-tiny --vocab 777 --hidden-size 256 --num-attention-heads 4 --num-key-value-heads 1 "
    "--num-layers 2 "
    "--batch 2 --seq-len 129 --materialized-logits --recompute elementwise",
    "--model gpt2-tiny --vocab 1003 --num-layers 2 --batch 3 --seq-len 37 --lce-chunk 64",
    "--model gpt2-tiny --vocab 517 --hidden-size 192 --num-attention-heads 3 --num-layers 2 --batch 2 "
    "--seq-len 65 "
    "--materialized-logits --recompute mlp",
};

TEST(test_step_fp32) {
  for (size_t i = 0; i < sizeof step_lines / sizeof *step_lines; i++) step_agrees(step_lines[i], false);
}

TEST(test_step_bf16) {
  for (size_t i = 0; i < sizeof step_lines / sizeof *step_lines; i++) step_agrees(step_lines[i], true);
}

// --- runs --------------------------------------------------------------------------------------------------

enum { STEPS = 50 };

// Letters drawn one by one, some more often than others: data that is the same in every version of this program and has
// no rare passage, in which a small difference of the weights would change the loss a lot.
static void write_letters(void) {
  enum { LETTERS = 200000 };
  char *text = malloc(LETTERS + 1);
  assert_non_null(text);
  for (uint64_t i = 0; i < LETTERS; i++) {
    double u = random_uniform(1, 0, i);
    text[i] = (char)('0' + (int)(64 * u * u));
  }
  text[LETTERS] = 0;
  write_text("letters.txt", text);
  free(text);
}

static void run(const char *line, double losses[STEPS], float **weights) {
  Rig rig;
  rig_open(&rig, "cuda", line);
  write_letters();
  Source *source = open_one("letters.txt", rig.options.model.vocab_size);
  Loader loader = loader_create((LoaderOptions){.source = source,
                                                .batch = rig.options.batch,
                                                .seq_len = rig.options.seq_len,
                                                .seed = rig.options.seed});
  StepResult results[TRAINER_PENDING];
  for (int64_t step = 0; step < STEPS; step++) trainer_step(&rig.trainer, &loader, step);
  assert_int_equal(trainer_collect(&rig.trainer, results), STEPS);
  for (int i = 0; i < STEPS; i++) losses[i] = results[i].loss;
  if (weights) *weights = download(rig.backend, trainer_model(&rig.trainer)->parameters.value[GROUP_HEAD]);
  source_close(source);
  rig_close(&rig);
}

static const char run_line[] = "--model llama-tiny --vocab 4096 --batch 8 --seq-len 128 --steps 50";

// The losses of the two dtypes may drift apart as the weights do; over 50 steps by no more than a few bf16
// roundings of the loss itself.
TEST(test_bf16_follows_fp32) {
  char line[256];
  double fp32[STEPS], bf16[STEPS], lean[STEPS];
  snprintf(line, sizeof line, "%s --dtype fp32", run_line);
  run(line, fp32, NULL);
  run(run_line, bf16, NULL);
  snprintf(line, sizeof line, "%s --no-master-weights --moment-dtype bf16", run_line);
  run(line, lean, NULL);
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
  static const char *const lines[] = {
      "--model llama-tiny --vocab 4096 --batch 8 --seq-len 128 --steps 50",
      "--model gpt2-tiny --vocab 4099 --batch 4 --seq-len 100 --steps 50 --no-master-weights --moment-dtype "
      "bf16",
      "--model llama-tiny --vocab 4096 --batch 8 --seq-len 128 --steps 50 --materialized-logits --recompute "
      "layer",
  };
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    double first[STEPS], second[STEPS];
    float *w1, *w2;
    run(lines[i], first, &w1);
    run(lines[i], second, &w2);
    assert_memory_equal(first, second, sizeof first);
    assert_memory_equal(w1, w2, 4096 * 128 * sizeof *w1);
    free(w1);
    free(w2);
  }
}

// The device hands out memory in pages of 2 MiB; every reservation may round up by one.
TEST(test_ledger_agrees_with_the_device) {
  for (int mode = 0; mode < 2; mode++) {
    Rig rig;
    rig_open(&rig, "cuda",
             mode ? "--model llama-tiny --batch 16 --seq-len 512 --materialized-logits"
                  : "--model llama-tiny --batch 16 --seq-len 512");
    load_batch(&rig);
    trainer_gradient_pass(&rig.trainer);
    backend_synchronize(rig.backend);
    const Memory *memory = &rig.backend->memory;
    Ledger plan = plan_run(&rig.options, ON_CUDA, rig.options.mode);
    assert_true(plan.stack_peak == memory->stack_capacity);
    double ledger = (double)(memory->ledger.total + memory->stack_capacity);
    double device =
        (double)rig.backend->ops->device_bytes_now(rig.backend) - (double)rig.backend->device_overhead;
    double pages = (double)((memory->reserved_count + 2) * (2 << 20));
    if (!(device >= ledger - pages && device <= ledger + pages))
      fail_msg("the device says %.0f bytes beyond its overhead, the ledger %.0f", device, ledger);
    rig_close(&rig);
  }
}

int main(void) {
  const char *reason = NULL;
  Backend *backend = cuda_backend_create(0, DTYPE_BF16, &reason);
  if (!backend) return skip_all("cuda training", "training on CUDA", reason);
  backend_destroy(backend);
  return tests_run("cuda training", make_temp_dir, remove_temp_dir);
}
