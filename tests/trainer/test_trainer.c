// Training: the learning rate's schedule, steps, validation and samples. tests/trainer/test_plan.c has the memory of
// the same runs.
#include "kernels/fail.h"
#include "kernels/random.h"
#include "tests/harness.h"
#include "tests/reference.h"
#include "tests/reference_model.h"
#include "tests/runs.h"

// --- the learning rate -------------------------------------------------------------------------------------

static void check_rates(const Schedule *schedule, const int64_t *steps, const double *want, int count) {
  for (int i = 0; i < count; i++) {
    double got = schedule_rate(schedule, steps[i]);
    if (fabs(got - want[i]) > 1e-12)
      fail_msg("kind %d: the rate of step %lld is %.15g, should be %.15g", (int)schedule->kind,
               (long long)steps[i], got, want[i]);
  }
}

// Warm-up over 4 steps to 8: 2, 4, 6, 8; then 20 steps down to a quarter of 8.
TEST(test_schedules) {
  static const int64_t steps[] = {0, 1, 3, 4, 9, 14, 19, 20, 22, 23, 24, 1000};
  enum { COUNT = sizeof steps / sizeof *steps };
  // Progress at 4, 9, 14, 19, 20, 22, 23, 24: 0, 1/4, 1/2, 3/4, 16/20, 18/20, 19/20, 1.
  Schedule s = {.peak = 8, .floor = 0.25, .warmup_steps = 4, .total_steps = 24};
  s.kind = SCHEDULE_CONSTANT;
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}, COUNT);
  s.kind = SCHEDULE_LINEAR; // 8 - 6 progress
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 6.5, 5, 3.5, 3.2, 2.6, 2.3, 2, 2}, COUNT);
  s.kind = SCHEDULE_WSD; // 8 until 16/20, then 6 over the last four steps
  s.decay_share = 0.2;
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 8, 8, 8, 8, 5, 3.5, 2, 2}, COUNT);
  s.decay_share = 0.5; // 8 until 10/20, then 6 over the last ten steps
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 8, 8, 5, 4.4, 3.2, 2.6, 2, 2}, COUNT);
  s.decay_share = 1; // as linear
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 6.5, 5, 3.5, 3.2, 2.6, 2.3, 2, 2}, COUNT);
  s.decay_share = 0; // as constant
  check_rates(&s, steps, (const double[]){2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}, COUNT);
  s.kind = SCHEDULE_COSINE; // 5 + 3 cos(pi progress): cos(pi / 4) is half the root of 2
  const int64_t some[] = {0, 3, 4, 9, 14, 19, 24, 25};
  double root = sqrt(0.5);
  check_rates(&s, some, (const double[]){2, 8, 8, 5 + 3 * root, 5, 5 - 3 * root, 2, 2}, 8);
}

TEST(test_schedule_edges) {
  // No warm-up: the first step has the whole rate. Only warm-up: then straight to the end.
  Schedule s = {.kind = SCHEDULE_COSINE, .peak = 1, .floor = 0, .warmup_steps = 0, .total_steps = 1};
  assert_true(schedule_rate(&s, 0) == 1);
  assert_true(schedule_rate(&s, 1) == 0);
  s.warmup_steps = 10;
  assert_true(schedule_rate(&s, 0) == 0.1);
  assert_true(schedule_rate(&s, 9) == 1);
  assert_true(schedule_rate(&s, 10) == 0);
  static const char *const names[] = {"cosine", "linear", "constant", "wsd"};
  const Option *row = &options_rows[option_row(options_rows, "schedule")];
  for (int k = 0; k < SCHEDULE_COUNT; k++) {
    Options o;
    option_set(row, &o, names[k]);
    assert_int_equal(o.schedule.kind, k);
  }
}

// --- steps -------------------------------------------------------------------------------------------------

enum { SMALL_LLAMA, SMALL_GPT2, SMALL_MODELS };
static char small_models[SMALL_MODELS][512]; // their options

// 40 KB of words: unlike the source tree, never changed, so that what is compared closely does not change.
static int make_words(void **state) {
  static const char *const words[] = {"return ", "tensor", " = ",    "0",     ";\n", "for (", "int ", "i",
                                      "++",      ") ",     "float ", "x[i] ", "+ ",  "{\n",   "}\n",  "sum "};
  if (make_temp_dir(state)) return -1;
  char text[40000] = "";
  size_t length = 0;
  for (uint64_t i = 0; length < sizeof text - 16; i++) {
    const char *word = words[random_bits(1, 1, i) % 16];
    memcpy(text + length, word, strlen(word));
    length += strlen(word);
  }
  write_bytes("words.txt", text, length);
  snprintf(small_models[SMALL_LLAMA], sizeof small_models[0],
           "--model llama-tiny --vocab 300 --hidden-size 24 --intermediate-size 40 --num-layers 2 "
           "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 --seq-len 17 --batch 3 --data %s",
           temp_path("words.txt"));
  snprintf(
      small_models[SMALL_GPT2], sizeof small_models[0],
      "--model gpt2-tiny --vocab 300 --hidden-size 20 --num-layers 2 --num-attention-heads 2 --seq-len 17 "
      "--batch 3 --max-position-embeddings 19 --data %s",
      temp_path("words.txt"));
  return 0;
}

static double *all_weights(Harness *h, Trainer *t, int64_t *count) {
  *count = 0;
  for (int g = 0; g < GROUP_COUNT; g++) *count += trainer_model(t)->parameters.group_elements[g];
  double *weights = host_values(h, *count), *at = weights;
  for (int g = 0; g < GROUP_COUNT; g++) {
    int64_t elements = trainer_model(t)->parameters.group_elements[g];
    memcpy(at, values_of(h, trainer_model(t)->parameters.value[g]), (size_t)elements * sizeof *at);
    at += elements;
  }
  return weights;
}

// The losses of `steps` steps, and the gradients' norms.
static void train_steps(Run *run, int steps, double *losses, double *norms) {
  for (int step = 0; step < steps; step++) {
    StepResult result = run_step(run, step);
    losses[step] = result.loss;
    norms[step] = result.grad_norm;
  }
}

// What a run's first steps leave behind; the caller frees the weights.
typedef struct {
  double losses[6], norms[6], *weights;
  int64_t count;
} Bits;

static Bits bits_of(Run *run) {
  Bits b = {.count = 0};
  train_steps(run, 6, b.losses, b.norms);
  double *weights = all_weights(run->h, &run->trainer, &b.count);
  b.weights = malloc((size_t)b.count * sizeof *weights);
  assert_non_null(b.weights);
  memcpy(b.weights, weights, (size_t)b.count * sizeof *weights);
  run_close(run);
  return b;
}

static void check_bits(Bits a, Bits b, bool same) {
  assert_int_equal(a.count, b.count);
  assert_int_equal(!memcmp(a.losses, b.losses, sizeof a.losses), same);
  assert_int_equal(!memcmp(a.norms, b.norms, sizeof a.norms), same);
  assert_int_equal(!memcmp(a.weights, b.weights, (size_t)a.count * sizeof *a.weights), same);
  free(b.weights);
}

TEST(test_one_seed_one_result) {
  for (int m = 0; m < SMALL_MODELS; m++) {
    Bits first = bits_of(run_open("%s --lce-chunk 7 --seed 1", small_models[m]));
    check_bits(first, bits_of(run_open("%s --lce-chunk 7 --seed 1", small_models[m])), true);
    check_bits(first, bits_of(run_open("%s --lce-chunk 7 --seed 2", small_models[m])), false);
    free(first.weights);
  }
}

// Two variants of a model, 20 steps each: the losses may part by 1e-5 of a nat, about a hundred roundings of
// fp32, the norms by a thousandth. (At high learning rates training is chaotic and any rounding grows without
// bound.)
static void check_same_curve(const char *model, const char *left, const char *right) {
  enum { STEPS = 20 };
  double losses[2][STEPS], norms[2][STEPS];
  for (int k = 0; k < 2; k++) {
    Run *run = run_open("%s --lr 0.003 --warmup 0 %s", model, k == 0 ? left : right);
    train_steps(run, STEPS, losses[k], norms[k]);
    run_close(run);
  }
  assert_true(losses[0][STEPS - 1] < losses[0][0] - 0.5); // something was learned on the way
  for (int step = 0; step < STEPS; step++) {
    if (fabs(losses[0][step] - losses[1][step]) > 1e-5)
      fail_msg("step %d: loss %.9g and %.9g", step, losses[0][step], losses[1][step]);
    if (fabs(norms[0][step] / norms[1][step] - 1) > 1e-3)
      fail_msg("step %d: norm %.9g and %.9g", step, norms[0][step], norms[1][step]);
  }
}

TEST(test_modes_give_one_curve) {
  for (int m = 0; m < SMALL_MODELS; m++)
    check_same_curve(small_models[m], "--lce-chunk 7 --recompute layer", "--materialized-logits");
}

TEST(test_terms_give_one_curve) {
  static const char *const terms[] = {"--label-smoothing 0.1 --z-loss 0.001", "--logit-softcap 4 --metrics",
                                      "--label-smoothing 0.1 --z-loss 0.001 --logit-softcap 4"};
  for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
    char left[160], right[160];
    snprintf(left, sizeof left, "--lce-chunk 7 %s", terms[i]);
    snprintf(right, sizeof right, "--materialized-logits %s", terms[i]);
    check_same_curve(small_models[SMALL_LLAMA], left, right);
  }
}

// At the start a token's probabilities are about 1 / 300. Two micro-batches of three chunks of 17 tokens have 12 tiles:
// six of 192 vocabulary entries and six of 108.
#define SAMPLING_JOB "%s --total-batch 102 --lce-chunk 20 "

// Whether some number of wide tiles and of narrow ones, `dropped` together, have this share of the mass.
static bool adds_up(int dropped, double mass) {
  for (int wide = 0; wide <= 6; wide++) {
    int narrow = dropped - wide;
    if (narrow >= 0 && narrow <= 6 && fabs((wide * 192 + narrow * 108) / 1800.0 - mass) < 0.01) return true;
  }
  return false;
}

// A step's statistics cover all its micro-batches, and its loss is what it is without sampling.
TEST(test_sampling_statistics) {
  static const char *const samplings[] = {"", "--lce-sample 1e-30", "--lce-sample 40", "--lce-sample 1e6"};
  double loss = 0, norm = 0;
  for (int i = 0; i < 4; i++) {
    Run *run = run_open(SAMPLING_JOB "%s", small_models[SMALL_LLAMA], samplings[i]);
    StepResult r = run_step(run, 0);
    if (i == 0) loss = r.loss, norm = r.grad_norm;
    assert_true(r.loss == loss);
    if (i == 0) assert_true(isnan(r.dropped_tiles) && isnan(r.dropped_mass));
    if (i == 1) assert_true(r.dropped_tiles == 0 && r.dropped_mass == 0 && r.grad_norm == norm);
    if (i == 2) {
      double dropped = 12 * r.dropped_tiles;
      assert_true(dropped > 0 && dropped < 12);
      assert_float_equal(dropped, round(dropped), 1e-9);
      assert_true(adds_up((int)round(dropped), r.dropped_mass));
    }
    if (i == 3) {
      assert_true(r.dropped_tiles == 1);
      assert_float_equal(r.dropped_mass, 299.0 / 300, 1e-3);
    }
    if (i > 1) assert_true(fabs(r.grad_norm - norm) > 1e-3 * norm);
    run_close(run);
  }
}

// With every tile kept a run has the bits that it has without sampling.
TEST(test_sampling_that_keeps_all) {
  for (int m = 0; m < SMALL_MODELS; m++) {
    Bits exact = bits_of(run_open(SAMPLING_JOB "--z-loss 0.01 --lr 0.01 --warmup 0", small_models[m]));
    check_bits(exact,
               bits_of(run_open(SAMPLING_JOB "--z-loss 0.01 --lr 0.01 --warmup 0 --lce-sample 1e-30",
                                small_models[m])),
               true);
    free(exact.weights);
  }
}

// The draws follow from the seed, and change with it alone: same weights and data, same loss, another gradient.
// Recomputation changes nothing.
TEST(test_sampling_seeds) {
  enum { STEPS = 6, RUNS = 4 };
  static const struct {
    uint64_t seed;
    const char *recompute;
  } runs[RUNS] = {{1, "none"}, {1, "none"}, {1, "layer"}, {2, "none"}};
  double losses[RUNS][STEPS], norms[RUNS][STEPS];
  for (int k = 0; k < RUNS; k++) {
    Run *run =
        run_open(SAMPLING_JOB "--lce-sample 40 --recompute %s", small_models[SMALL_LLAMA], runs[k].recompute);
    run->options.seed = runs[k].seed; // the first weights and the data are those of seed 1 already
    train_steps(run, STEPS, losses[k], norms[k]);
    run_close(run);
  }
  for (int k = 1; k < 3; k++) {
    assert_memory_equal(losses[0], losses[k], sizeof losses[0]);
    assert_memory_equal(norms[0], norms[k], sizeof norms[0]);
  }
  assert_true(losses[0][0] == losses[3][0] && norms[0][0] != norms[3][0]);
  assert_true(losses[0][STEPS - 1] != losses[3][STEPS - 1]);
}

// Every step draws anew, and every micro-batch: a learning rate of 0 leaves weights and masses as they are, and two
// micro-batches that draw alike would always drop an even number of tiles.
TEST(test_draws_differ) {
  Run *run = run_open(SAMPLING_JOB "--lce-sample 40 --lr 0", small_models[SMALL_LLAMA]);
  int least = 12, most = 0, odd = 0;
  for (int step = 0; step < 8; step++) {
    int dropped = (int)lround(12 * run_step(run, step).dropped_tiles);
    least = dropped < least ? dropped : least, most = dropped > most ? dropped : most;
    odd += dropped % 2;
  }
  assert_true(least < most && odd > 0);
  run_close(run);
}

// What fp32 rounds to 0 samples nothing.
TEST(test_no_mass) {
  Run *run = run_open(SAMPLING_JOB "--lce-sample 1e-60", small_models[SMALL_LLAMA]);
  assert_true(isnan(run_step(run, 0).dropped_tiles));
  run_close(run);
}

// At the start every token is as likely as any other; statistics that were not requested are absent.
TEST(test_step_statistics) {
  for (int requested = 0; requested < 2; requested++) {
    Run *run = run_open("%s --lr 0.003 --warmup 0 %s", small_models[SMALL_LLAMA],
                        requested ? "--z-loss 0.01 --metrics --total-batch 102" : "");
    StepResult first = run_step(run, 0), later = first;
    if (requested) {
      assert_float_equal(first.entropy, log(300), 0.02);
      assert_float_equal(first.z_loss, 0.01 * log(300) * log(300), 0.02);
      assert_true(first.accuracy >= 0 && first.accuracy < 0.2);
      assert_true(first.max_logit > 0 && first.max_logit < 1);
      for (int step = 1; step < 30; step++) later = run_step(run, step);
      assert_true(later.accuracy > first.accuracy + 0.1 && later.entropy < first.entropy - 1);
      assert_true(later.max_logit > first.max_logit + 1);
    } else {
      assert_true(isnan(first.z_loss) && isnan(first.accuracy) && isnan(first.entropy) &&
                  isnan(first.max_logit));
    }
    run_close(run);
  }
}

// 4 micro-batches of 1 sequence are 1 micro-batch of 4: the same windows, the same normaliser.
TEST(test_accumulation) {
  for (int m = 0; m < SMALL_MODELS; m++)
    check_same_curve(small_models[m], "--batch 1 --total-batch 68", "--batch 4");
}

// Results wait on the device: collected together, they are those collected one by one.
TEST(test_pending) {
  enum { STEPS = 5 };
  double one_by_one[STEPS], norms[STEPS];
  Run *run = run_open("%s", small_models[SMALL_LLAMA]);
  train_steps(run, STEPS, one_by_one, norms);
  run_close(run);
  run = run_open("%s", small_models[SMALL_LLAMA]);
  StepResult results[TRAINER_PENDING];
  assert_int_equal(trainer_collect(&run->trainer, results), 0);
  for (int step = 0; step < STEPS; step++) trainer_step(&run->trainer, &run->data.loader, step);
  assert_int_equal(trainer_collect(&run->trainer, results), STEPS);
  assert_int_equal(trainer_collect(&run->trainer, results), 0);
  for (int step = 0; step < STEPS; step++) {
    assert_int_equal(results[step].step, step);
    assert_int_equal(results[step].counted, 3 * 17);
    assert_true(results[step].loss == one_by_one[step] && results[step].grad_norm == norms[step]);
    assert_true(results[step].learning_rate == schedule_rate(&run->options.schedule, step));
  }
  // One step too many.
  run->trainer.pending_count = TRAINER_PENDING;
  assert_fails(run->h, "the results of 64 steps were not collected",
               trainer_step(&run->trainer, &run->data.loader, STEPS));
  run_close(run);
}

// --- the update against float64 ----------------------------------------------------------------------------

typedef struct {
  double *weight, *m, *v;
} ReferenceMoments;

// Three steps of AdamW in float64 from the first weights on, with the gradients that the trainer computed:
// the norm over all of them, the clipping, the decay of matrices alone, the corrections of the moments, the
// schedule.
static void check_update(Run *run, bool clips) {
  enum { STEPS = 3 };
  Harness *h = run->h;
  const Options *o = &run->options;
  const Parameters *p = &trainer_model(&run->trainer)->parameters;
  ReferenceMoments *reference = calloc((size_t)p->count, sizeof *reference);
  for (int64_t i = 0; i < p->count; i++) {
    int64_t count = tensor_count(p->items[i].value);
    reference[i] = (ReferenceMoments){
        .weight = values_of(h, p->items[i].value), .m = host_values(h, count), .v = host_values(h, count)};
  }
  for (int step = 0; step < STEPS; step++) {
    StepResult result = run_step(run, step);
    p = &trainer_model(&run->trainer)->parameters;
    double squares = 0;
    for (int64_t i = 0; i < p->count; i++) {
      double *grad = values_of(h, p->items[i].grad);
      squares += reference_dot(grad, grad, tensor_count(p->items[i].grad));
    }
    assert_true(fabs(result.grad_norm / sqrt(squares) - 1) < 1e-5);
    double scale = o->max_grad_norm > 0 ? fmin(1, o->max_grad_norm / sqrt(squares)) : 1;
    assert_true((scale < 1) == clips);
    double rate = schedule_rate(&o->schedule, step);
    assert_true(rate > 0);
    for (int64_t i = 0; i < p->count; i++) {
      const Parameter *t = &p->items[i];
      ReferenceMoments *r = &reference[i];
      reference_adamw(r->weight, r->m, r->v, values_of(h, t->grad), tensor_count(t->value), scale, rate,
                      o->beta1, o->beta2, o->epsilon, t->rank == 2 ? o->weight_decay : 0, step + 1);
      check_values(h, t->name, t->value, r->weight, within(16 * (step + 1), 1));
      Tensor m = tensor_rows(p->state[0][t->group], t->offset, parameter_elements(t));
      Tensor v = tensor_rows(p->state[1][t->group], t->offset, parameter_elements(t));
      check_values(h, t->name, m, r->m, within(16 * (step + 1), 1));
      check_values(h, t->name, v, r->v, within(16 * (step + 1), 1));
    }
  }
  free(reference);
  run_close(run);
}

TEST(test_update) {
  check_update(
      run_open("%s --lr 0.01 --weight-decay 3 --warmup 2 --grad-clip 0.1", small_models[SMALL_LLAMA]), true);
  check_update(run_open("%s --lr 0.01 --weight-decay 3 --warmup 0 --grad-clip 0 --beta1 0.8 --beta2 0.7",
                        small_models[SMALL_GPT2]),
               false);
  check_update(run_open("%s --lr 0.01 --weight-decay 0 --grad-clip 1000 --untie-word-embeddings",
                        small_models[SMALL_LLAMA]),
               false);
}

// --- learning ----------------------------------------------------------------------------------------------

// Token frequencies alone predict the source tree to its unigram entropy, about 3.5 nats. Whoever is a tenth
// of a nat below it, on text held back from training, uses context.
TEST(test_learns) {
#if defined(__SANITIZE_ADDRESS__)
  skip(); // many times slower, and nothing here that the other tests do not run
#endif
  enum { MAX_STEPS = 400, BATCHES = 20 };
  Run *run = run_open("--model llama-tiny --vocab 512 --hidden-size 32 --intermediate-size 64 --num-layers 1 "
                      "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 32 --batch 16 --lr 0.02 "
                      "--steps 400 --lce-chunk 200");
  double entropy = source_entropy(run->data.source),
         loss = trainer_validate(&run->trainer, &run->data.loader, BATCHES);
  assert_true(entropy > 2.5 && entropy < 4.5);
  assert_true(fabs(loss - log(512)) < 0.1); // untrained
  int step = 0;
  while (step < MAX_STEPS && loss > entropy - 0.1) {
    run_step(run, step++);
    if (step % 50 == 0) loss = trainer_validate(&run->trainer, &run->data.loader, BATCHES);
  }
  if (loss > entropy - 0.1)
    fail_msg("after %d steps the validation loss is %.4f, the entropy %.4f", step, loss, entropy);
  run_close(run);
}

// --- validation --------------------------------------------------------------------------------------------

// The mean over the first `batches` validation batches, in float64.
static double reference_validation(Run *run, int64_t batches) {
  const Options *o = &run->options;
  int64_t rows = o->batch * o->seq_len, counted = 0;
  int32_t *tokens = calloc((size_t)rows, sizeof *tokens), *targets = calloc((size_t)rows, sizeof *targets);
  double *loss = host_values(run->h, rows), sum = 0;
  ReferenceModel reference = reference_model_read(trainer_model(&run->trainer), run->h->backend);
  for (int64_t b = 0; b < batches; b++) {
    counted += loader_validation_batch(&run->data.loader, b, tokens, targets, NULL);
    reference_model_losses(&reference, tokens, targets, o->batch, o->seq_len, loss);
    for (int64_t n = 0; n < rows; n++) sum += loss[n];
  }
  reference_model_free(&reference);
  free(tokens);
  free(targets);
  return sum / (double)counted;
}

static void check_validation(Run *run) {
  Trainer *t = &run->trainer;
  int64_t count, batches = run->data.loader.validation_batches;
  assert_true(batches >= 3);
  run_step(run, 0); // the weights are not the first ones
  double *before = all_weights(run->h, t, &count);
  double all = trainer_validate(t, &run->data.loader, 0), two = trainer_validate(t, &run->data.loader, 2);
  assert_true(trainer_validate(t, &run->data.loader, 0) == all);
  assert_true(trainer_validate(t, &run->data.loader, batches) == all);
  assert_true(trainer_validate(t, &run->data.loader, batches + 5) == all);
  assert_true(isnan(t->bits_per_byte));
  int64_t vocab_size = trainer_model(t)->config.vocab_size;
  t->token_bytes = calloc((size_t)vocab_size, sizeof *t->token_bytes); // the trainer's from here on
  for (int64_t id = 0; id < vocab_size; id++) t->token_bytes[id] = 3;
  assert_true(trainer_validate(t, &run->data.loader, 0) == all);
  assert_true(fabs(t->bits_per_byte * 3 * log(2) / all - 1) < 1e-12);
  assert_true(fabs(all - reference_validation(run, batches)) < 1e-5);
  assert_true(fabs(two - reference_validation(run, 2)) < 1e-5);
  assert_memory_equal(before, all_weights(run->h, t, &count), (size_t)count * sizeof *before);
  run_close(run);
}

static void write_letters(const char *name, int count, int first, int distinct) {
  char text[512];
  assert_in_range(count, 1, (int)sizeof text - 1);
  for (int i = 0; i < count; i++) text[i] = (char)(first + i * i * i % distinct);
  text[count] = 0;
  write_text(name, text);
}

TEST(test_validation) {
  // 149 targets in batches of 3 rows of 17: two full batches, then rows of 17, 17 and 13.
  write_letters("held_back.txt", 150, 'a', 23);
  for (int m = 0; m < SMALL_MODELS; m++) {
    check_validation(run_open("%s --lce-chunk 7 --val-data %s", small_models[m], temp_path("held_back.txt")));
    check_validation(
        run_open("%s --materialized-logits --val-data %s", small_models[m], temp_path("held_back.txt")));
    check_validation(run_open("%s --lce-chunk 20 --val-fraction 0.005", small_models[m])); // 11 windows
  }
}

// 68 targets: one full batch, then a row of 17 and two rows of nothing but padding. None at all: 0.
TEST(test_validation_padding) {
  write_letters("held_back.txt", 69, 'a', 23);
  for (int mode = 0; mode < 2; mode++) {
    Run *run = run_open("%s --val-data %s %s", small_models[SMALL_LLAMA], temp_path("held_back.txt"),
                        mode == LCE_FUSED ? "--fused-lce" : "--materialized-logits");
    assert_int_equal(run->data.loader.validation_batches, 2);
    assert_true(fabs(trainer_validate(&run->trainer, &run->data.loader, 0) - reference_validation(run, 2)) <
                1e-5);
    run_close(run);
  }
  Run *run = run_open("%s --val-fraction 0", small_models[SMALL_LLAMA]);
  assert_true(trainer_validate(&run->trainer, &run->data.loader, 0) == 0);
  run_close(run);
}

// --- samples -----------------------------------------------------------------------------------------------

static int32_t *sample(Run *run, uint64_t seed, int64_t *count) {
  static const int32_t prompt[] = {'i', 'n', 't', ' '};
  int32_t *tokens = trainer_sample(&run->trainer, prompt, 4, seed, count);
  assert_int_equal(*count, 4 + run->options.sample_tokens);
  assert_memory_equal(tokens, prompt, sizeof prompt);
  for (int64_t i = 0; i < *count; i++) assert_in_range(tokens[i], 0, run->options.model.vocab_size - 1);
  return tokens;
}

TEST(test_samples_are_repeatable) {
  for (int m = 0; m < SMALL_MODELS; m++) {
    Run *run = run_open("%s --sample-tokens 30 --temperature 1", small_models[m]);
    int64_t count;
    int32_t *a = sample(run, 5, &count), *b = sample(run, 5, &count), *c = sample(run, 6, &count);
    assert_memory_equal(a, b, (size_t)count * sizeof *a);
    assert_memory_not_equal(a, c, (size_t)count * sizeof *a);
    free(a);
    free(b);
    free(c);
    run_close(run);
  }
}

// At temperature 0 each token is the likeliest one after the last seq_len tokens, also when the text has grown
// beyond them.
TEST(test_likeliest_samples) {
  for (int m = 0; m < SMALL_MODELS; m++) {
    Run *run = run_open("%s --sample-tokens 30 --temperature 0 --lr 0.02 --warmup 0", small_models[m]);
    for (int step = 0; step < 10; step++) run_step(run, step);
    int64_t count, window = run->options.seq_len, vocab = run->options.model.vocab_size;
    int32_t *tokens = sample(run, 5, &count), *again = sample(run, 6, &count);
    assert_memory_equal(tokens, again, (size_t)count * sizeof *tokens);
    ReferenceModel reference = reference_model_read(trainer_model(&run->trainer), run->h->backend);
    double *logits = host_values(run->h, window * vocab);
    for (int64_t i = 4; i < count; i++) {
      int64_t start = i > window ? i - window : 0, length = i - start;
      reference_model_logits(&reference, tokens + start, 1, length, logits);
      const double *last = logits + (length - 1) * vocab;
      for (int64_t v = 0; v < vocab; v++) assert_true(last[v] <= last[tokens[i]] + 1e-5);
    }
    reference_model_free(&reference);
    free(tokens);
    free(again);
    run_close(run);
  }
}

// Over many seeds each token comes as often as softmax(logits / temperature) says, within 5 standard errors.
TEST(test_sample_frequencies) {
  enum { DRAWS = 3000, VOCAB = 11 };
  const double temperature = 0.7;
  write_letters("ten_letters.txt", 400, 1, 10);
  Run *run = run_open("--model llama-tiny --vocab 11 --hidden-size 8 --intermediate-size 8 --num-layers 1 "
                      "--num-attention-heads 1 --num-key-value-heads 1 --seq-len 5 --sample-tokens 1 "
                      "--temperature 0.7 --lr 0.1 --prompt \1 --data %s",
                      temp_path("ten_letters.txt"));
  for (int step = 0; step < 3; step++) run_step(run, step);
  static const int32_t prompt[] = {3, 1, 4};
  double counts[VOCAB] = {0}, logits[3 * VOCAB], p[VOCAB], sum = 0;
  for (uint64_t seed = 0; seed < DRAWS; seed++) {
    int64_t count;
    int32_t *tokens = trainer_sample(&run->trainer, prompt, 3, seed, &count);
    counts[tokens[3]]++;
    free(tokens);
  }
  ReferenceModel reference = reference_model_read(trainer_model(&run->trainer), run->h->backend);
  reference_model_logits(&reference, prompt, 1, 3, logits);
  reference_model_free(&reference);
  for (int v = 0; v < VOCAB; v++) sum += p[v] = exp(logits[2 * VOCAB + v] / temperature);
  for (int v = 0; v < VOCAB; v++) {
    double share = p[v] / sum, error = 5 * sqrt(share * (1 - share) / DRAWS);
    if (fabs(counts[v] / DRAWS - share) > error)
      fail_msg("token %d comes with frequency %.4f, should be %.4f", v, counts[v] / DRAWS, share);
  }
  run_close(run);
}

int main(void) {
  return tests_run("trainer", make_words, remove_temp_dir);
}
