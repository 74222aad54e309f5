// Training: schedules, steps, masked and packed data, validation, samples. test_plan.c has the memory.
#include "kernels/base/random.h"
#include "tests/runs.h"

static void assert_rate(const Options *o, int64_t step, double want) {
  double got = schedule_rate(o, step);
  if (fabs(got - want) > 1e-12)
    fail_msg("kind %d, step %lld: the rate is %.15g, not %.15g", (int)o->schedule, (long long)step, got,
             want);
}

// Warm-up over 4 steps to 8: 2, 4, 6, 8; then 20 steps down to a quarter of 8.
TEST(test_schedules) {
  enum { COUNT = 12 };
  // Progress from step 4 on: 0, 1/4, 1/2, 3/4, 16/20, 18/20, 19/20, 1.
  static const int64_t steps[COUNT] = {0, 1, 3, 4, 9, 14, 19, 20, 22, 23, 24, 1000};
  const double pi = acos(-1), a = 3 * cos(pi / 4), b = 3 * cos(pi / 5), c = 3 * cos(pi / 10),
               d = 3 * cos(pi / 20);
  const struct {
    const char *name;
    double decay_share, rates[COUNT];
  } cases[] = {
      {"constant", 0, {2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}},
      {"linear", 0, {2, 4, 8, 8, 6.5, 5, 3.5, 3.2, 2.6, 2.3, 2, 2}}, // 8 - 6 progress
      {"wsd", 0.2, {2, 4, 8, 8, 8, 8, 8, 8, 5, 3.5, 2, 2}}, // 8 until 16/20, then 6 over the last four steps
      {"wsd", 0.5, {2, 4, 8, 8, 8, 8, 5, 4.4, 3.2, 2.6, 2, 2}},   // 8 until 10/20, then 6 over the last ten
      {"wsd", 1, {2, 4, 8, 8, 6.5, 5, 3.5, 3.2, 2.6, 2.3, 2, 2}}, // as linear
      {"wsd", 0, {2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}},           // as constant
      {"cosine", 0, {2, 4, 8, 8, 5 + a, 5, 5 - a, 5 - b, 5 - c, 5 - d, 2, 2}}}; // 5 + 3 cos(pi progress)
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Options o = {.lr = 8, .min_lr = 0.25, .warmup = 4, .steps = 24, .decay_share = cases[i].decay_share};
    Reason reason;
    assert_true(option_set(option_find(options_rows, "schedule"), &o, cases[i].name, &reason));
    for (int k = 0; k < COUNT; k++) assert_rate(&o, steps[k], cases[i].rates[k]);
  }
  // No warm-up: the first step has the whole rate. Only warm-up: then straight to the end.
  Options o = {.schedule = SCHEDULE_COSINE, .lr = 1, .steps = 1};
  assert_rate(&o, 0, 1);
  assert_rate(&o, 1, 0);
  o.warmup = 10;
  assert_rate(&o, 0, 0.1);
  assert_rate(&o, 9, 1);
  assert_rate(&o, 10, 0);
}

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 300 --hidden-size 24 --intermediate-size 40 --num-layers 2 "                   \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 --seq-len 17 --batch 3 "
#define GPT2                                                                                                 \
  "--model gpt2-tiny --vocab 300 --hidden-size 20 --num-layers 2 --num-attention-heads 2 --seq-len 17 "      \
  "--batch 3 --max-position-embeddings 19 "
static const char *const models[] = {LLAMA, GPT2};
enum { MODELS = 2 };

static Run *open(const char *model, const char *options) {
  return run_open("%s--data %s %s", model, temp_path("words.txt"), options);
}

static void write_letters(const char *name, int count, int first, int distinct) {
  char text[512];
  assert_in_range(count, 1, (int)sizeof text - 1);
  for (int i = 0; i < count; i++) text[i] = (char)(first + i * i * i % distinct);
  text[count] = 0;
  write_text(name, text);
}

static int make_data(void **state) {
  if (make_masked(state)) return -1;
  uint16_t tokens[60];
  for (int i = 0; i < 60; i++) tokens[i] = (uint16_t)(3 * i % 61);
  write_shard16("short.bin", tokens, 60);
  write_shard16("other.bin", tokens, 60);
  write_letters("held_back.txt", 150, 'a', 23);
  write_letters("few.txt", 69, 'a', 23);
  write_letters("ten_letters.txt", 400, 1, 10);
  return 0;
}

// The reference's mean loss over the micro-batches of a step, or (step -1) the first validation batches.
static double reference_mean(Run *run, int64_t step, int64_t batches, int64_t *counted) {
  const Options *o = &run->options;
  const Loader *loader = &run->data.loader;
  int64_t rows = o->batch * o->seq_len;
  int32_t *tokens = random_ids(run->h, rows, 1), *targets = random_ids(run->h, rows, 1),
          *documents = o->pack ? random_ids(run->h, 2 * rows, 1) : NULL;
  double sum = 0;
  *counted = 0;
  for (int64_t b = 0; b < batches; b++) {
    *counted += step < 0 ? loader_validation_batch(loader, b, batches, tokens, targets, documents)
                         : loader_train_batch(loader, step, b, batches, tokens, targets, documents);
    for (int64_t n = 0, length; n < rows; n += length) {
      length = documents ? documents[rows + n] + 1 : o->seq_len;
      if (documents) assert_int_equal(documents[n], 0);
      const double *loss = model_losses(run->h, &run->trainer.model, tokens + n, targets + n, 1, length);
      for (int64_t i = 0; i < length; i++) sum += loss[i];
    }
  }
  return sum / (double)*counted;
}

// Gradient accumulation against float64: everything counts, some of the targets, or packed documents.
TEST(test_loss_is_the_mean_of_what_counts) {
  static const struct {
    const char *file, *options;
  } cases[] = {{"masked.bin", "--fused-lce --lce-chunk 5"},
               {"masked.bin", "--fused-lce"},
               {"masked.bin", "--materialized-logits"},
               {"packed.bin", "--pack documents"},
               {"words.txt", "--lce-chunk 20"},
               {"nothing.bin", "--lce-chunk 20"},
               {"nothing.bin", "--materialized-logits --val-fraction 0"}};
  for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
    Run *run = run_open("%s--data %s --batch 2 --total-batch 102 --lr 0.01 --warmup 5 %s", models[i % 2],
                        temp_path(cases[i / 2].file), cases[i / 2].options);
    bool all = !strcmp(cases[i / 2].file, "words.txt"), none = !strcmp(cases[i / 2].file, "nothing.bin");
    assert_int_equal(run->options.masked, !all);
    for (int64_t step = 0; step < 4; step++) {
      int64_t counted;
      double want = reference_mean(run, step, 3, &counted);
      StepResult got = run_step(run, step);
      assert_in_range(counted, none ? 0 : 1, all ? 102 : none ? 0 : 101);
      assert_int_equal(got.counted, counted);
      if (none) want = 0;
      if (none) assert_true(got.grad_norm == 0 && trainer_validate(&run->trainer, &run->data.loader, 0) == 0);
      if (fabs(got.loss - want) > 1e-5)
        fail_msg("step %d: loss %.9g, should be %.9g", (int)step, got.loss, want);
    }
    run_close(run);
  }
}

// So are the gradients: those of the same batch, each target's over the number that counts.
TEST(test_gradients_are_of_the_mean) {
  Run *run = run_open(LLAMA "--data %s --lr 0", temp_path("masked.bin"));
  Trainer *t = &run->trainer;
  StepResult r = run_step(run, 0);
  Batch batch = trainer_copy_batch(t, 0, true);
  transformer_train(t->backend, &t->model, &batch, &t->transformer, 1 / (float)r.counted, false, t->loss);
  double squares = 0;
  for (int g = 0; g < GROUP_COUNT; g++) {
    Tensor grad = t->model.parameters.grad[g];
    if (!tensor_exists(grad)) continue;
    const double *values = values_of(run->h, grad);
    squares += reference_dot(values, values, tensor_count(grad));
  }
  assert_true(fabs(sqrt(squares) / r.grad_norm - 1) < 1e-5);
  run_close(run);
}

// Losses may part by 1e-5, norms by 1e-3. At high rates training is chaotic, and any rounding grows.
TEST(test_one_curve) {
  enum { STEPS = 20 };
  static const struct {
    const char *file, *variants[5];
  } jobs[] = {
      {"words.txt", {"--materialized-logits", "--lce-chunk 7 --recompute layer"}},
      {"words.txt", {"--batch 4", "--batch 1 --total-batch 68"}},
#define TERMS "--label-smoothing 0.1 --z-loss 0.001 "
      {"words.txt", {"--materialized-logits " TERMS, "--lce-chunk 7 " TERMS}},
      {"words.txt",
       {"--materialized-logits --logit-softcap 4 --metrics", "--lce-chunk 7 --logit-softcap 4 --metrics"}},
      {"words.txt",
       {"--materialized-logits --logit-softcap 4 --z-loss 0.001",
        "--lce-chunk 7 --logit-softcap 4 --z-loss 0.001"}},
      {"words.txt",
       {"--materialized-logits --batch 4 --logit-softcap 4 " TERMS,
        "--materialized-logits --batch 1 --total-batch 68 --logit-softcap 4 " TERMS}},
#undef TERMS
      {"masked.bin",
       {"--batch 4 --materialized-logits", "--batch 4 --lce-chunk 3",
        "--batch 1 --total-batch 68 --lce-chunk 6",
        "--batch 2 --total-batch 68 --materialized-logits --recompute layer"}}};
  double losses[STEPS] = {0}, norms[STEPS] = {0};
  for (size_t j = 0; j < 2 * sizeof jobs / sizeof *jobs; j++)
    for (int v = 0; v < 5 && jobs[j / 2].variants[v]; v++) {
      const char *options = jobs[j / 2].variants[v];
      Run *run = run_open("%s--data %s --lr 0.003 --warmup 0 %s", models[j % 2], temp_path(jobs[j / 2].file),
                          options);
      for (int64_t step = 0; step < STEPS; step++) {
        StepResult r = run_step(run, step);
        if (v == 0) losses[step] = r.loss, norms[step] = r.grad_norm;
        if (fabs(r.loss - losses[step]) > 1e-5 || fabs(r.grad_norm / norms[step] - 1) > 1e-3)
          fail_msg("%s: step %d: loss %.9g and %.9g, norm %.9g and %.9g", options, (int)step, losses[step],
                   r.loss, norms[step], r.grad_norm);
      }
      assert_true(losses[STEPS - 1] < losses[0] - 0.3); // something was learned on the way
      run_close(run);
    }
}

// At first a token's probability is about 1 / 300. 12 tiles: six of 192 vocabulary entries and six of 108.
#define SAMPLING "--total-batch 102 --lce-chunk 20 "

// True if some number of wide tiles and of narrow ones, `dropped` together, have this share of the mass.
static bool adds_up(int dropped, double mass) {
  for (int wide = 0; wide <= 6; wide++) {
    int narrow = dropped - wide;
    if (narrow >= 0 && narrow <= 6 && fabs((wide * 192 + narrow * 108) / 1800.0 - mass) < 0.01) return true;
  }
  return false;
}

// A step's statistics cover all its micro-batches, and its loss is what it is without sampling.
TEST(test_sampling_statistics) {
  static const char *const samplings[] = {SAMPLING, SAMPLING "--lce-sample 1e-30", SAMPLING "--lce-sample 40",
                                          SAMPLING "--lce-sample 1e6", SAMPLING "--lce-sample 1e-60"};
  double loss = 0, norm = 0;
  for (int i = 0; i < 5; i++) {
    Run *run = open(LLAMA, samplings[i]);
    StepResult r = run_step(run, 0);
    if (i == 0) loss = r.loss, norm = r.grad_norm;
    assert_true(r.loss == loss);
    if (i == 0 || i == 4) // what fp32 rounds to 0 samples nothing
      assert_true(isnan(r.dropped_tiles) && isnan(r.dropped_mass));
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
    if (i == 2 || i == 3) assert_true(fabs(r.grad_norm - norm) > 1e-3 * norm);
    run_close(run);
  }
}

// Draws follow from seed, step and micro-batch: two that are alike would drop an even number of tiles.
TEST(test_draws_differ) {
  StepResult first[2];
  for (uint64_t k = 0; k < 2; k++) {
    Run *run = open(LLAMA, SAMPLING "--lce-sample 40 --lr 0");
    run->options.seed = 1 + k; // the first weights and the data are those of seed 1 already
    int least = 12, most = 0, odd = 0;
    for (int step = 0; step < 8; step++) {
      StepResult r = run_step(run, step);
      int dropped = (int)lround(12 * r.dropped_tiles);
      if (step == 0) first[k] = r;
      least = dropped < least ? dropped : least, most = dropped > most ? dropped : most;
      odd += dropped % 2;
    }
    assert_true(least < most && odd > 0);
    run_close(run);
  }
  assert_true(first[0].loss == first[1].loss && first[0].grad_norm != first[1].grad_norm);
  // A step of two micro-batches draws what two steps of one do: no two draw alike.
  Run *run = open(LLAMA, SAMPLING "--lce-sample 40 --lr 0"),
      *single = open(LLAMA, SAMPLING "--lce-sample 40 --lr 0 --total-batch 51");
  for (int step = 0; step < 8; step++) {
    int dropped = (int)lround(12 * run_step(run, step).dropped_tiles);
    for (int m = 0; m < 2; m++) dropped -= (int)lround(6 * run_step(single, 2 * step + m).dropped_tiles);
    assert_int_equal(dropped, 0);
  }
  run_close(single);
  run_close(run);
}

// At the start every token is as likely as any other; statistics that were not requested are absent.
TEST(test_step_statistics) {
  Run *run = open(LLAMA, "--lr 0.003 --warmup 0 --z-loss 0.01 --metrics --total-batch 102");
  StepResult first = run_step(run, 0), later = first;
  assert_float_equal(first.entropy, log(300), 0.02);
  assert_float_equal(first.z_loss, 0.01 * log(300) * log(300), 0.02);
  assert_true(first.accuracy >= 0 && first.accuracy < 0.2);
  assert_true(first.max_logit > 0 && first.max_logit < 1);
  for (int step = 1; step < 30; step++) later = run_step(run, step);
  assert_true(later.accuracy > first.accuracy + 0.1 && later.entropy < first.entropy - 1);
  assert_true(later.max_logit > first.max_logit + 1);
  run_close(run);
  run = open(LLAMA, "");
  first = run_step(run, 0);
  assert_true(isnan(first.z_loss) && isnan(first.accuracy));
  assert_true(isnan(first.entropy) && isnan(first.max_logit));
  run_close(run);
}

// Results wait on the device: collected together, they are those collected one by one.
TEST(test_pending) {
  enum { STEPS = 5 };
  Run *run = open(LLAMA, ""), *other = open(LLAMA, "");
  StepResult results[TRAINER_PENDING];
  assert_int_equal(trainer_collect(&run->trainer, results), 0);
  for (int step = 0; step < STEPS; step++) train_step(&run->trainer, &run->data.loader, step);
  assert_int_equal(trainer_collect(&run->trainer, results), STEPS);
  assert_int_equal(trainer_collect(&run->trainer, results), 0);
  for (int step = 0; step < STEPS; step++) {
    StepResult one = run_step(other, step);
    assert_int_equal(results[step].step, step);
    assert_int_equal(results[step].counted, 3 * 17);
    assert_true(results[step].loss == one.loss && results[step].grad_norm == one.grad_norm);
    assert_true(results[step].learning_rate == schedule_rate(&run->options, step));
  }
  // One step too many.
  run->trainer.pending_count = TRAINER_PENDING;
  assert_fails(run->h, "the results of 64 steps were not collected",
               train_step(&run->trainer, &run->data.loader, STEPS));
  run_close(other);
  run_close(run);
}

typedef struct {
  double *weight, *m, *v;
} ReferenceMoments;

// A step in float64: Muon for the matrices of layers, each block of columns, and else AdamW.
static void reference_update(const Options *o, const Parameter *t, const ReferenceMoments *r,
                             const double *grad, double scale, double rate, int64_t step) {
  double decay = t->rank == 2 ? o->update.weight_decay : 0;
  if (!o->dtypes.optimizer || t->group != GROUP_MATRICES) {
    reference_adamw(r->weight, r->m, r->v, grad, tensor_count(t->value), scale, rate, o->update.beta1,
                    o->update.beta2, o->update.epsilon, decay, step);
    return;
  }
  int64_t blocks = strstr(t->name, "c_attn") ? 3 : 1, columns = t->shape[1] / blocks;
  for (int64_t at = 0; at < t->shape[1]; at += columns)
    reference_muon(r->weight + at, r->m + at, grad + at, t->shape[0], columns, t->shape[1], scale, rate,
                   o->update.momentum, decay);
}

// Three steps in float64 with the trainer's gradients: norm, clipping, decay, moments, schedule.
static void check_update(Run *run, bool clips) {
  enum { STEPS = 3 };
  Harness *h = run->h;
  const Options *o = &run->options;
  const ParameterSet *p = &run->trainer.model.parameters;
  ReferenceMoments *reference = calloc((size_t)p->count, sizeof *reference);
  for (int64_t i = 0; i < p->count; i++) {
    int64_t count = tensor_count(p->items[i].value);
    reference[i] = (ReferenceMoments){
        .weight = values_of(h, p->items[i].value), .m = host_values(h, count), .v = host_values(h, count)};
  }
  for (int step = 0; step < STEPS; step++) {
    StepResult result = run_step(run, step);
    p = &run->trainer.model.parameters;
    double squares = 0;
    for (int64_t i = 0; i < p->count; i++) {
      double *grad = values_of(h, p->items[i].grad);
      squares += reference_dot(grad, grad, tensor_count(p->items[i].grad));
    }
    assert_true(fabs(result.grad_norm / sqrt(squares) - 1) < 1e-5);
    double scale = o->max_grad_norm > 0 ? fmin(1, o->max_grad_norm / sqrt(squares)) : 1;
    assert_true((scale < 1) == clips);
    double rate = schedule_rate(o, step);
    assert_true(rate > 0);
    for (int64_t i = 0; i < p->count; i++) {
      const Parameter *t = &p->items[i];
      ReferenceMoments *r = &reference[i];
      reference_update(o, t, r, values_of(h, t->grad), scale, rate, step + 1);
      check_values(h, t->name, t->value, r->weight, within(16 * (step + 1), 1));
      Tensor m = tensor_rows(p->state[0][t->group], t->offset, parameter_elements(t));
      check_values(h, t->name, m, r->m, within(16 * (step + 1), 1));
      assert_true(tensor_exists(p->state[1][t->group]) ==
                  !(o->dtypes.optimizer && t->group == GROUP_MATRICES));
      if (!tensor_exists(p->state[1][t->group])) continue;
      Tensor v = tensor_rows(p->state[1][t->group], t->offset, parameter_elements(t));
      check_values(h, t->name, v, r->v, within(16 * (step + 1), 1));
    }
  }
  free(reference);
  run_close(run);
}

TEST(test_update) {
  check_update(open(LLAMA, "--optimizer muon --lr 0.01 --warmup 2 --grad-clip 0.1 --untie-word-embeddings"),
               true);
  check_update(open(GPT2,
                    "--optimizer muon --lr 0.01 --weight-decay 3 --momentum 0.8 --beta1 0.8 --beta2 0.7 "
                    "--grad-clip 0"),
               false);
}

static void copy_groups(const Tensor *to, const Tensor *from) {
  for (int g = 0; g < GROUP_COUNT; g++)
    if (tensor_exists(from[g])) memcpy(to[g].data, from[g].data, tensor_bytes(from[g]));
}

// Phi-3 packs q, k and v, and gate and up, in a tensor each: the same matrices, and the same updates.
TEST(test_packed_matrices_are_updated_as_if_apart) {
  Run *run = open(LLAMA, "--optimizer muon --lr 0.01 --warmup 0");
  const Options *o = &run->options;
  Backend *backend = run->h->backend;
  ModelConfig config = o->model;
  config.family = FAMILY_PHI3;
  Model packed;
  model_create(&packed, &config, backend, o->dtypes, o->seq_len);
  ParameterSet *p = &packed.parameters, *apart = &run->trainer.model.parameters;
  assert_true(p->count < apart->count);
  copy_groups(p->value, apart->value);
  run_step(run, 0);
  copy_groups(p->grad, apart->grad);
  Update update = o->update;
  update.grad_scale = run->trainer.scale;
  update.lr = (float)schedule_rate(o, 0);
  update.step = 1;
  update.seed = o->seed;
  parameters_update(backend, p, update);
  for (int g = 0; g < GROUP_COUNT; g++)
    if (tensor_exists(p->value[g]))
      check_bitwise_equal(run->h, "weights of Phi-3", p->value[g], apart->value[g]);
  model_destroy(&packed);
  run_close(run);
}

static BackendOps right;
static int weights_until_flip;
static uint32_t *flipped; // or NULL: the gradient that was just computed

static void flip_a_bit(Backend *backend, const LinearBackwardWeight *a) {
  right.linear_backward_weight(backend, a);
  if (weights_until_flip-- == 0) *(flipped ? flipped : (uint32_t *)a->dweight.data) ^= 1;
}

static void check_flip_is_found(Run *run, int flip, const char *named) {
  weights_until_flip = flip;
  run_step(run, 2);
  weights_until_flip = flip;
  assert_fails(run->h, named, train_step(&run->trainer, &run->data.loader, 3));
}

// A pass computes `head` and eight gradients of weights so, the layers' from the last one on.
static void check_verified(const char *options, int head) {
  Run *run = open(LLAMA, options), *plain = open(LLAMA, options);
  run->options.verify_every = 2;
  for (int step = 0; step < 2; step++) { // the second is verified, and goes on as if it were not
    StepResult a = run_step(run, step), b = run_step(plain, step);
    assert_memory_equal(&a, &b, sizeof a);
  }
  BackendOps ops = right = *run->h->backend->ops;
  ops.linear_backward_weight = flip_a_bit;
  run->h->backend->ops = &ops;
  static const char gradient[] =
      "in step 4 rank 0 computed the gradients of model.layers.1.mlp.down_proj.weight twice";
  flipped = NULL;
  check_flip_is_found(run, head, gradient);            // in the first pass
  check_flip_is_found(run, head + 8 + head, gradient); // in the second
  flipped = run->trainer.loss.data;
  check_flip_is_found(run, head, "in step 4 rank 0 computed the losses twice");
  run_close(plain);
  run_close(run);
}

TEST(test_a_device_that_computes_wrongly_is_found) {
  check_verified("--total-batch 102", 1);
  check_verified("--lce-sample 50", 0);
  check_verified("--offload weights,gradients,optimizer --total-batch 102", 1);
}

TEST(test_a_large_gradient_is_verified_in_pieces) {
  Run *run = open(LLAMA, "--vocab 180000 --verify-every 1");
  BackendOps ops = right = *run->h->backend->ops;
  ops.linear_backward_weight = flip_a_bit;
  run->h->backend->ops = &ops;
  flipped = NULL, weights_until_flip = 0; // the first element of the head's
  assert_fails(run->h, "in step 1 rank 0 computed the gradients of model.embed_tokens.weight twice",
               train_step(&run->trainer, &run->data.loader, 0));
  run_close(run);
}

static Update updates[64];
static int update_count;

static void record_update(Backend *backend, const Update *a) {
  assert_in_range(update_count, 0, 63);
  updates[update_count++] = *a;
}

// No two elements of a step share a seed and an index, from which the bits of random rounding follow.
static void check_seeds(const char *options) {
  Run *run = open(LLAMA, options);
  BackendOps ops = *run->h->backend->ops;
  ops.adamw = ops.sgd = record_update;
  run->h->backend->ops = &ops;
  update_count = 0;
  for (int step = 0; step < 2; step++) run_step(run, step);
  assert_true(update_count >= 6); // three groups, twice
  for (Update *a = updates; a < updates + update_count; a++)
    for (Update *b = updates; b < a; b++)
      if (a->seed == b->seed && a->step == b->step)
        assert_true(a->first >= b->first + tensor_count(b->weight) ||
                    b->first >= a->first + tensor_count(a->weight));
  run_close(run);
}

TEST(test_seeds_of_updates) {
  check_seeds("--untie-word-embeddings");
  check_seeds("--untie-word-embeddings --optimizer muon");
}

// 149 targets: two full batches, then rows of 17, 17 and 13. 68: one full batch, a row of 17, two of padding.
TEST(test_validation) {
  static const struct {
    const char *file, *options, *held_back; // NULL: a part of the file
    int64_t batches;
  } cases[] = {{"words.txt", "--lce-chunk 7 --val-data", "held_back.txt", 3},
               {"words.txt", "--materialized-logits --val-data", "held_back.txt", 3},
               {"words.txt", "--fused-lce --val-data", "few.txt", 2},
               {"words.txt", "--materialized-logits --val-data", "few.txt", 2},
               {"words.txt", "--lce-chunk 20 --val-fraction 0.005", NULL, 4},
               {"packed.bin", "--batch 2 --pack documents", NULL, 0}};
  for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
    Run *run =
        run_open("%s--data %s %s %s", models[i % 2], temp_path(cases[i / 2].file), cases[i / 2].options,
                 cases[i / 2].held_back ? temp_path(cases[i / 2].held_back) : "");
    Trainer *t = &run->trainer;
    int64_t counted, batches = run->data.loader.validation_batches,
                     vocab_size = run->options.model.vocab_size;
    if (cases[i / 2].batches) assert_int_equal(batches, cases[i / 2].batches);
    run_step(run, 0); // the weights are not the first ones
    double all = trainer_validate(t, &run->data.loader, 0);
    assert_true(trainer_validate(t, &run->data.loader, batches) == all);
    assert_true(trainer_validate(t, &run->data.loader, batches + 5) == all);
    assert_true(isnan(t->bits_per_byte));
    t->token_bytes = calloc((size_t)vocab_size, sizeof *t->token_bytes); // the trainer's from here on
    for (int64_t id = 0; id < vocab_size; id++) t->token_bytes[id] = 3;
    assert_true(trainer_validate(t, &run->data.loader, 0) == all);
    assert_true(fabs(t->bits_per_byte * 3 * log(2) / all - 1) < 1e-12);
    assert_true(fabs(all - reference_mean(run, -1, batches, &counted)) < 1e-5);
    double two = trainer_validate(t, &run->data.loader, 2);
    assert_true(fabs(two - reference_mean(run, -1, 2, &counted)) < 1e-5);
    assert_true(trainer_validate(t, &run->data.loader, 0) == all); // no weight has changed
    run_close(run);
  }
}

// The pass that --compare-modes measures counts every target, whatever batch was there before it.
TEST(test_gradient_pass_after_a_padded_batch) {
  Run *run = run_open(LLAMA "--data %s --val-data %s", temp_path("short.bin"), temp_path("other.bin"));
  assert_false(run->options.masked);
  run_step(run, 0);
  trainer_validate(&run->trainer, &run->data.loader, 0);
  trainer_gradient_pass(&run->trainer);
  Tensor loss = run->trainer.loss;
  const double *values = values_of(run->h, loss);
  for (int64_t n = 0; n < tensor_count(loss); n++) assert_true(isfinite(values[n]) && values[n] > 0);
  run_close(run);
}

// A sample's token is drawn by its seed, at the temperature, from the logits of the last seq_len tokens.
TEST(test_samples) {
  enum { DRAWS = 300, VOCAB = 11, SEQ_LEN = 5, PROMPT = 7, SAMPLE_STREAM = 7 };
  Run *run = run_open("--model llama-tiny --vocab 11 --hidden-size 8 --intermediate-size 8 --num-layers 1 "
                      "--num-attention-heads 1 --num-key-value-heads 1 --seq-len 5 --sample-tokens 1 "
                      "--temperature 0.2 --lr 0.1 --prompt \1\1\1\1 --data %s",
                      temp_path("ten_letters.txt"));
  draw_weights(run->h, &run->trainer.model);
  static const int32_t prompt[PROMPT] = {2, 7, 1, 8, 3, 1, 4};
  const double *z = model_logits(run->h, &run->trainer.model, prompt + PROMPT - SEQ_LEN, 1, SEQ_LEN);
  float logits[VOCAB];
  for (int v = 0; v < VOCAB; v++) logits[v] = (float)z[(SEQ_LEN - 1) * VOCAB + v];
  for (uint64_t seed = 0; seed < DRAWS; seed++) {
    int64_t count;
    int32_t *tokens = trainer_sample(&run->trainer, prompt, PROMPT, seed, &count);
    assert_int_equal(count, PROMPT + 1);
    assert_memory_equal(tokens, prompt, sizeof prompt);
    double uniform = random_uniform(seed, SAMPLE_STREAM, PROMPT);
    assert_int_equal(tokens[PROMPT], sampling_draw(&(Sampling){.temperature = 0.2}, logits, VOCAB, uniform));
    free(tokens);
  }
  run_close(run);
}

TEST_MAIN(tests_run("trainer", make_data, remove_temp_dir))
