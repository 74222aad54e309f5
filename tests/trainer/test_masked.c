// Training on masked data and on packed documents: a step's loss against float64, the same steps in both modes of linear_cross_entropy and
// however they are cut into micro-batches, a step that counts nothing, and the plan of such a run.
#include "kernels/random.h"
#include "tests/process.h"
#include "tests/reference_model.h"
#include "tests/runs.h"
#include "trainer/machine.h"

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 61 --hidden-size 24 --intermediate-size 40 --num-layers 2 --seq-len 17 "       \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 --lr 0.01 --warmup 5 --epsilon 1e-5 "

#define GPT2                                                                                                 \
  "--model gpt2-tiny --vocab 61 --hidden-size 24 --num-layers 2 --seq-len 17 --num-attention-heads 3 "       \
  "--lr 0.01 --warmup 5 --epsilon 1e-5 "

enum { TOKENS = 3000 };

// A shard of a language with something to learn, of which runs of tokens count and runs do not: prompts and
// answers of uneven lengths.
static const char *masked_shard(const char *name) {
  uint16_t tokens[TOKENS];
  uint8_t mask[(TOKENS + 7) / 8] = {0};
  char file[64];
  bool counts = false;
  for (int i = 0, left = 0; i < TOKENS; i++, left--) {
    if (left <= 0) {
      counts = !counts;
      left = 1 + (int)(random_bits(5, 1, (uint64_t)i) % (counts ? 20 : 60));
    }
    tokens[i] = (uint16_t)(i % 7 == 0 ? random_bits(5, 2, (uint64_t)i) % 61 : (uint64_t)(3 * i % 61));
    mask[i / 8] |= (uint8_t)(counts << i % 8);
  }
  snprintf(file, sizeof file, "%s.bin", name);
  write_shard16(file, tokens, TOKENS);
  snprintf(file, sizeof file, "%s.mask", name);
  write_shard(file, 20261120, 1, TOKENS, mask, sizeof mask);
  snprintf(file, sizeof file, "%s.bin", name);
  return temp_path(file);
}

// The mean over the counted targets of one step, in float64, from the weights before it.
static double reference_step(Run *run, int64_t step, int64_t *counted) {
  const Options *o = &run->options;
  int64_t rows = o->batch * o->seq_len;
  int32_t *tokens = calloc((size_t)rows, sizeof *tokens), *targets = calloc((size_t)rows, sizeof *targets);
  double *loss = host_values(run->h, rows), sum = 0;
  *counted = 0;
  ReferenceModel reference = reference_model_read(trainer_model(&run->trainer), run->h->backend);
  for (int64_t m = 0; m < o->micro_steps; m++) {
    LoaderPlace place = {.step = step, .micro_step = m, .micro_steps = o->micro_steps, .ranks = 1};
    *counted += loader_train_batch(&run->data.loader, place, tokens, targets, NULL);
    reference_model_losses(&reference, tokens, targets, o->batch, o->seq_len, loss);
    for (int64_t n = 0; n < rows; n++) sum += loss[n];
  }
  reference_model_free(&reference);
  free(tokens);
  free(targets);
  return sum / (double)*counted;
}

TEST(test_loss_is_the_mean_of_what_counts) {
  static const char *const modes[] = {"--fused-lce --lce-chunk 5", "--fused-lce", "--materialized-logits"};
  for (int m = 0; m < 3; m++) {
    Run *run = run_open(LLAMA "--batch 2 --total-batch 102 --data %s %s", masked_shard("mean"), modes[m]);
    assert_true(run->options.masked);
    for (int64_t step = 0; step < 4; step++) {
      int64_t counted;
      double want = reference_step(run, step, &counted);
      StepResult got = run_step(run, step);
      assert_in_range(counted, 1, 101);
      assert_int_equal(got.counted, counted);
      if (fabs(got.loss - want) > 1e-5)
        fail_msg("step %d: loss %.9g, should be %.9g", (int)step, got.loss, want);
    }
    run_close(run);
  }
}

// Packed batches, in float64 document by document.
typedef struct {
  Run *run;
  ReferenceModel reference;
  int32_t tokens[2 * 17], targets[2 * 17], documents[4 * 17];
  double sum;
  int64_t counted;
} Packed;

// Adds the batch that was loaded, of which `counted` targets count.
static void add_documents(Packed *p, int64_t counted) {
  const int64_t rows = 2 * 17;
  double *loss = host_values(p->run->h, rows);
  p->counted += counted;
  for (int64_t n = 0, length; n < rows; n += length) {
    length = p->documents[rows + n] + 1;
    assert_int_equal(p->documents[n], 0);
    reference_model_losses(&p->reference, p->tokens + n, p->targets + n, 1, length, loss);
    for (int64_t i = 0; i < length; i++) p->sum += loss[i];
  }
}

// The mean of the step, or of the validation (-1), with the weights that the run has now.
static double packed_mean(Run *run, int64_t step, int64_t *counted) {
  Packed p = {run, reference_model_read(trainer_model(&run->trainer), run->h->backend), .sum = 0};
  const Loader *loader = &run->data.loader;
  for (int64_t b = 0; b < (step < 0 ? loader->validation_batches : 3); b++) {
    LoaderPlace place = {.step = step, .micro_step = b, .micro_steps = 3, .ranks = 1};
    add_documents(&p, step < 0 ? loader_validation_batch(loader, b, p.tokens, p.targets, p.documents)
                               : loader_train_batch(loader, place, p.tokens, p.targets, p.documents));
  }
  reference_model_free(&p.reference);
  *counted = p.counted;
  return p.sum / (double)p.counted;
}

// Documents of up to 40 tokens, some of which count, in windows of 17.
TEST(test_packed_documents_alone) {
  const char *shard = masked_shard("packed");
  uint8_t ends[(TOKENS + 7) / 8] = {0};
  for (int i = 0; i < TOKENS; i += 1 + (int)(random_bits(6, 1, (uint64_t)i) % 40))
    ends[i / 8] |= (uint8_t)(1 << i % 8);
  write_shard("packed.ends", 20261121, 1, TOKENS, ends, sizeof ends);
  static const char *const models[] = {LLAMA, GPT2};
  for (int m = 0; m < 2; m++) {
    Run *run = run_open("%s --batch 2 --total-batch 102 --pack documents --data %s", models[m], shard);
    int64_t counted;
    for (int64_t step = 0; step < 4; step++) {
      double want = packed_mean(run, step, &counted);
      StepResult got = run_step(run, step);
      assert_int_equal(got.counted, counted);
      if (fabs(got.loss - want) > 1e-5)
        fail_msg("step %d: loss %.9g, should be %.9g", (int)step, got.loss, want);
    }
    double want = packed_mean(run, -1, &counted);
    assert_true(fabs(trainer_validate(&run->trainer, &run->data.loader, 0) - want) < 1e-5);
    run_close(run);
  }
}

// Losses and gradient norms stay together over steps of AdamW, so the gradients are the same.
TEST(test_same_curve_in_all_modes) {
  enum { STEPS = 20 };
  static const char *const variants[] = {
      "--batch 4 --materialized-logits",
      "--batch 4 --fused-lce",
      "--batch 4 --fused-lce --lce-chunk 3",
      "--batch 1 --total-batch 68 --fused-lce --lce-chunk 6",
      "--batch 2 --total-batch 68 --lce-chunk 6 --lce-sample 1e-30",
      "--batch 2 --total-batch 68 --materialized-logits --recompute layer"};
  double losses[STEPS] = {0}, norms[STEPS] = {0};
  for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
    Run *run = run_open(LLAMA "--data %s %s", masked_shard("curve"), variants[v]);
    for (int64_t step = 0; step < STEPS; step++) {
      StepResult r = run_step(run, step);
      if (v == 0) losses[step] = r.loss, norms[step] = r.grad_norm;
      if (fabs(r.loss - losses[step]) > 1e-5 || fabs(r.grad_norm / norms[step] - 1) > 1e-3)
        fail_msg("%s: step %d: loss %.9g and %.9g, norm %.9g and %.9g", variants[v], (int)step, losses[step],
                 r.loss, norms[step], r.grad_norm);
    }
    assert_true(losses[STEPS - 1] < losses[0] - 0.3);
    run_close(run);
  }
}

// Nothing counts: no loss, no gradient, and only the decay of the weights.
TEST(test_a_step_without_targets) {
  uint16_t tokens[400] = {1};
  uint8_t mask[50] = {0};
  write_shard16("nothing.bin", tokens, 400);
  write_shard("nothing.mask", 20261120, 1, 400, mask, sizeof mask);
  static const char *const modes[] = {"--materialized-logits", "--fused-lce", "--lce-sample 1"};
  for (int m = 0; m < 3; m++) {
    Run *run = run_open(LLAMA "--batch 2 --total-batch 68 --data %s %s", temp_path("nothing.bin"), modes[m]);
    StepResult r = run_step(run, 0);
    assert_int_equal(r.counted, 0);
    assert_true(r.loss == 0 && r.grad_norm == 0);
    if (m == 2) assert_true(r.dropped_tiles == 0 && r.dropped_mass == 0);
    assert_true(trainer_validate(&run->trainer, &run->data.loader, 0) == 0);
    run_close(run);
  }
}

// A whole run of such steps, or a validation of nothing, is refused; one target that counts is enough.
TEST(test_data_without_targets) {
  uint16_t tokens[400] = {1};
  uint8_t mask[50] = {0};
  write_shard16("bare.bin", tokens, 400);
  write_shard("bare.mask", 20261120, 1, 400, mask, sizeof mask);
  write_shard16("full.bin", tokens, 400);
  static const char *const sentences[] = {"no target of the training windows counts",
                                          "no target of the validation batches counts"};
  for (int i = 0; i < 2; i++) {
    Output o = train("--device cpu " LLAMA "--steps 5 --batch 2 --data %s --val-data %s",
                     temp_path(i ? "full.bin" : "bare.bin"), temp_path(i ? "bare.bin" : "full.bin"));
    assert_int_equal(o.status, 1);
    assert_says(o.err, "bare.bin");
    assert_says(o.err, sentences[i]);
    output_free(&o);
  }
  mask[25] = 1;
  write_shard("bare.mask", 20261120, 1, 400, mask, sizeof mask);
  Output o = train("--device cpu " LLAMA "--steps 5 --batch 2 --data %s --val-data %s", temp_path("bare.bin"),
                   temp_path("full.bin"));
  if (o.status) fail_msg("%s", o.err);
  output_free(&o);
}

TEST(test_plan_equals_masked_run) {
  static const char *const jobs[] = {"--fused-lce --lce-chunk 7",
                                     "--fused-lce --recompute layer",
                                     "--fused-lce --lce-chunk 51",
                                     "--materialized-logits",
                                     "--lce-sample 10",
                                     "--lce-sample 4 --lce-chunk 7"};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    Run *run = run_open(LLAMA "--batch 3 --data %s %s", masked_shard("plan"), jobs[j]);
    Ledger plan = plan_run(&run->options, run->h->backend->device, run->options.mode);
    for (int64_t step = 0; step < 10; step++) run_step(run, step);
    trainer_validate(&run->trainer, &run->data.loader, 0);
    trainer_gradient_pass(&run->trainer); // what --compare-modes measures, after a padded batch
    assert_planned(run);
    // A run of the same shape that counts every target does not need more.
    run->options.masked = false;
    Ledger unmasked = plan_run(&run->options, run->h->backend->device, run->options.mode);
    assert_in_range(unmasked.highest[MEMORY_HEAD], 1, plan.highest[MEMORY_HEAD]);
    run_close(run);
  }
}

// The pass that --compare-modes measures counts every target, whatever batch was there before it.
TEST(test_gradient_pass_after_a_padded_batch) {
  uint16_t tokens[60];
  for (int i = 0; i < 60; i++) tokens[i] = (uint16_t)(i % 61);
  write_shard16("short.bin", tokens, 60);
  Run *run =
      run_open(LLAMA "--batch 3 --data %s --val-data %s", temp_path("short.bin"), temp_path("short.bin"));
  assert_false(run->options.masked);
  run_step(run, 0);
  trainer_validate(&run->trainer, &run->data.loader, 0);
  trainer_gradient_pass(&run->trainer);
  Tensor loss = run->trainer.loss;
  float *values = malloc(tensor_bytes(loss));
  backend_to_host(run->h->backend, values, loss);
  for (int64_t n = 0; n < tensor_count(loss); n++) assert_true(isfinite(values[n]) && values[n] > 0);
  free(values);
  run_close(run);
}

int main(void) {
  return tests_run("masked", make_temp_dir, remove_temp_dir);
}
