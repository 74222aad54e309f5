// --fp8 trains, near what it is without. test_same_bits.c, test_ranks.py and test_cli.py have the rest.
#include "tests/runs.h"

#define JOB "--batch 3 --seq-len 48 --lr 0.004 --warmup 2 --seed 4 --vocab 300 --num-layers 3 --head-dim 16 "
static const char *const models[] = {
    JOB "--model llama-tiny --hidden-size 32 --intermediate-size 80 --num-attention-heads 3 "
        "--num-key-value-heads 1",
    JOB "--model gpt2-tiny --hidden-size 48 --num-attention-heads 3",
    JOB "--model qwen3-0.6b --hidden-size 32 --intermediate-size 48 --num-attention-heads 4 "
        "--num-key-value-heads 2",
    JOB "--model olmo2-1b --hidden-size 32 --intermediate-size 48 --num-attention-heads 4 "
        "--num-key-value-heads 2"};
enum { MODELS = sizeof models / sizeof *models };

static const char *backend;

static Run *open_run(const char *model, const char *options) {
  Run *run = run_open_on(backend, "%s --data %s %s", model, temp_path("words.txt"), options);
  if (!run || run->h->backend->no_fp8) skip();
  return run;
}

// Every tensor's gradient is near that of the same step without FP8, in one micro-batch and in two.
TEST(test_gradients) {
  static const char *const options[] = {"--fp8 --batch 6", "--fp8 --total-batch 288"};
  for (int m = 0; m < MODELS; m++) {
    Run *plain = open_run(models[m], "--batch 6");
    double want_loss = run_step(plain, 0).loss;
    const ParameterSet *parameters = &plain->trainer.model.parameters;
    for (int i = 0; i < 2; i++) {
      Run *fp8 = open_run(models[m], options[i]);
      assert_true(fabs(run_step(fp8, 0).loss / want_loss - 1) < 0.01);
      for (int64_t k = 0; k < parameters->count; k++) {
        const Parameter *p = &parameters->items[k];
        Tensor grad = fp8->trainer.model.parameters.items[k].grad;
        double apart =
            relative_distance(values_of(fp8->h, grad), values_of(plain->h, p->grad), tensor_count(grad));
        if (!(apart > 0 && apart < 0.4))
          fail_msg("%s %s: the gradient of %s is off by %.3g", models[m], options[i], p->name, apart);
      }
      run_close(fp8);
    }
    run_close(plain);
  }
}

// --fp8 layers leaves the loss exact, and so does the materialized mode, which holds no codes of the head.
TEST(test_logits) {
  for (int m = 0; m < MODELS; m++) {
    static const char *const options[] = {"--fp8",
                                          "--fp8 all",
                                          "--fp8 layers",
                                          "--fp8 --lce-chunk 50 --lce-sample 1",
                                          "--fp8 --materialized-logits",
                                          "--fp8 layers --materialized-logits"};
    double losses[6], norms[6];
    size_t weights[6];
    for (int i = 0; i < 6; i++) {
      Run *run = open_run(models[m], options[i]);
      StepResult r = run_step(run, 0);
      losses[i] = r.loss, norms[i] = r.grad_norm;
      weights[i] = run->h->backend->memory.ledger.highest[MEMORY_WEIGHTS];
      run_close(run);
    }
    assert_true(losses[0] == losses[1] && norms[0] == norms[1] && weights[0] == weights[1]);
    assert_true(losses[4] == losses[5] && norms[4] == norms[5] && weights[4] == weights[5]);
    assert_true(losses[2] != losses[0] && losses[3] == losses[0]);
    assert_true(fabs(losses[0] / losses[2] - 1) < 0.001 && fabs(norms[0] / norms[2] - 1) < 0.02);
    assert_int_equal(weights[2], weights[4]);
    assert_true(weights[0] > weights[2] + 300 * 32);
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
    assert_true(last[1] < 1.05 * last[0]);
  }
}

int main(void) {
  static const char *const backends[] = {"cpu", "cuda"};
  int failed = 0;
  for (int i = 0; i < 2; i++) failed += tests_run(backend = backends[i], make_words, remove_temp_dir);
  return failed;
}
