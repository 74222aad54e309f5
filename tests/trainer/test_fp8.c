// --fp8 trains, near what it is without. test_same_bits.c, test_ranks.py and test_cli.py have the rest.
#include "tests/runs.h"

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 300 --hidden-size 32 --intermediate-size 80 --num-layers 3 --head-dim 16 "     \
  "--num-attention-heads 3 --num-key-value-heads 1 "
#define GPT2 "--model gpt2-tiny --vocab 300 --hidden-size 48 --num-layers 3 --num-attention-heads 3 "
#define QWEN                                                                                                 \
  "--model qwen3-0.6b --vocab 300 --hidden-size 32 --intermediate-size 48 --num-layers 3 --head-dim 16 "     \
  "--num-attention-heads 4 --num-key-value-heads 2 "
#define JOB "--batch 3 --seq-len 48 --lr 0.004 --warmup 2 --seed 4 --data Makefile "

static const char *const models[] = {LLAMA, GPT2, QWEN};
enum { MODELS = 3 };

static const char *backend;

static Run *open_run(const char *model, const char *options) {
  Run *run = run_open_on(backend, "%s " JOB "%s", model, options);
  if (!run || run->h->backend->no_fp8) skip();
  return run;
}

// The gradients of a first step.
static double *gradients(const char *model, const char *options, int64_t *count, double *loss) {
  Run *run = open_run(model, options);
  *loss = run_step(run, 0).loss;
  Tensor grad = run->trainer.model.parameters.grad[GROUP_MATRICES];
  *count = tensor_count(grad);
  double *values = malloc((size_t)*count * sizeof *values);
  assert_non_null(values);
  memcpy(values, values_of(run->h, grad), (size_t)*count * sizeof *values);
  run_close(run);
  return values;
}

TEST(test_gradients) {
  for (int m = 0; m < MODELS; m++) {
    int64_t count;
    double loss[2], apart = 0, size = 0;
    double *want = gradients(models[m], "", &count, &loss[0]);
    double *got = gradients(models[m], "--fp8", &count, &loss[1]);
    for (int64_t i = 0; i < count; i++) {
      apart += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    print_message("%s: gradients off by %.3f of their norm, the loss by %.1e\n", models[m],
                  sqrt(apart / size), fabs(loss[1] / loss[0] - 1));
    assert_true(sqrt(apart / size) < 0.25 && apart > 0);
    assert_true(fabs(loss[1] / loss[0] - 1) < 0.01);
    free(want);
    free(got);
  }
}

TEST(test_loss_falls) {
  for (int m = 0; m < MODELS; m++) {
    double last[2];
    for (int fp8 = 0; fp8 < 2; fp8++) {
      Run *run = open_run(models[m], fp8 ? "--steps 40 --fp8" : "--steps 40");
      double first = run_step(run, 0).loss;
      for (int64_t step = 1; step < 40; step++) run_step(run, step);
      last[fp8] = trainer_validate(&run->trainer, &run->data.loader, 8);
      assert_true(last[fp8] < first - 1);
      run_close(run);
    }
    print_message("%s: %.4f after 40 steps, %.4f in FP8\n", models[m], last[0], last[1]);
    assert_true(last[1] < 1.05 * last[0]);
  }
}

int main(void) {
  static const char *const backends[] = {"cpu", "cuda"};
  int failed = 0;
  for (int i = 0; i < 2; i++) failed += tests_run(backend = backends[i], NULL, NULL);
  return failed;
}
