// Models of transformers, computed there (tests/golden/make_golden.py) and here: logits, loss, every
// gradient, ten steps of AdamW, and the round trip of loading and saving.
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "tests/runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 3, SEQ = 16, ROWS = BATCH * SEQ, STEPS = 10 };

// The relative error allowed. In bf16 every stored activation and gradient is rounded to 2^-9; some twenty
// roundings lie on the way to a gradient and add up like a random walk to 1e-2, of which three times as much
// is allowed. A GPU's fp32 has exponentials of its own.
static const struct {
  const char *backend;
  double most;
  bool steps; // AdamW's first steps are +-lr whatever the gradient's size: bf16 flips some of them
} ways_to_run[] = {{"cpu", 2e-5, true}, {"cuda-fp32", 1e-4, true}, {"cuda", 3e-2, false}};

static double most; // of the way that is checked

// --- what is expected --------------------------------------------------------------------------------------

static const float *numbers(const TensorSet *set, int64_t count, const char *format, const char *name) {
  char full[256];
  snprintf(full, sizeof full, format, name);
  const TensorFile *file;
  const SafetensorsEntry *e = tensor_set_find(set, full, &file);
  if (!e) fail_msg("%s lacks %s", set->path, full);
  assert_int_equal(e->bytes, (size_t)count * sizeof(float));
  return (const void *)(file->mapping.bytes + e->offset);
}

// |got - want| over |want|, of all numbers together and of the worst against the largest.
static void check_close(const char *what, const float *got, const float *want, int64_t count) {
  double error = 0, size = 0, worst = 0, largest = 0;
  for (int64_t i = 0; i < count; i++) {
    double difference = (double)got[i] - (double)want[i];
    error += difference * difference;
    size += (double)want[i] * (double)want[i];
    worst = fmax(worst, fabs(difference));
    largest = fmax(largest, fabs((double)want[i]));
  }
  if (!(sqrt(error) <= most * sqrt(size)) || !(worst <= most * largest))
    fail_msg("%s is off by %.1e, at worst %.1e", what, sqrt(error / size), worst / largest);
}

static float *on_host(Run *run, Tensor t) {
  int64_t count = tensor_count(t);
  float *host = malloc((size_t)count * sizeof *host);
  uint16_t *bits = malloc((size_t)count * sizeof *bits);
  assert_true(host && bits);
  bool rounded = t.dtype == DTYPE_BF16;
  backend_to_host(run->h->backend, rounded ? (void *)bits : host, t);
  for (int64_t i = 0; rounded && i < count; i++) host[i] = bf16_to_f32(bits[i]);
  free(bits);
  return host;
}

static void check_tensors(Run *run, const TensorSet *expected, const char *format, bool gradients) {
  const Parameters *p = &run->trainer.model.parameters;
  for (int64_t i = 0; i < p->count; i++) {
    const char *name = p->items[i].name;
    Tensor t = gradients ? p->items[i].grad : p->items[i].value;
    float *got = on_host(run, t);
    check_close(name, got, numbers(expected, tensor_count(t), format, name), tensor_count(t));
    free(got);
  }
}

static Run *open_golden(const char *backend, const char *name, const char *more) {
  Run *run = run_open_on(
      backend,
      "--init tests/golden/%s --data tests/golden/%s/tokens.bin --val-fraction 0 --batch 3 --seq-len 16 "
      "--steps 10 --schedule constant --warmup 0 --lr 1e-2 --epsilon 1e-4 --weight-decay 0.1 %s",
      name, name, more);
  if (!run) return NULL;
  // Logits of all rows are more than a step's plan has room for.
  Memory *memory = &run->h->backend->memory;
  memory_set_stack(memory, memory->stack_capacity + ((size_t)64 << 20));
  return run;
}

// Loss, logits and gradients of the tokens in the file's order, which is the order of the expected logits.
static void check_pass(Run *run, const TensorSet *expected) {
  Trainer *t = &run->trainer;
  int32_t stream[ROWS + BATCH], tokens[ROWS], targets[ROWS], rows[ROWS];
  source_read(run->source, 0, ROWS + BATCH, stream);
  for (int n = 0; n < ROWS; n++) {
    tokens[n] = stream[n / SEQ * (SEQ + 1) + n % SEQ];
    targets[n] = stream[n / SEQ * (SEQ + 1) + n % SEQ + 1];
    rows[n] = n;
  }
  backend_to_device(t->backend, t->tokens, tokens);
  backend_to_device(t->backend, t->targets, targets);
  backend_to_device(t->backend, t->rows, rows);
  Batch batch = {.batch = BATCH, .seq_len = SEQ, .tokens = t->tokens, .targets = t->targets};
  int64_t vocab_size = t->model.config.vocab_size;
  MemoryMark mark = memory_mark(&t->backend->memory);
  Tensor logits =
      memory_push_2d(&t->backend->memory, "logits", MEMORY_WORKSPACE, DTYPE_F32, ROWS, vocab_size);
  transformer_logits(t->backend, &t->model, &batch, t->rows, logits);
  float *got = on_host(run, logits);
  check_close("logits", got, numbers(expected, ROWS * vocab_size, "%s", "logits"), ROWS * vocab_size);
  free(got);
  memory_pop_to(&t->backend->memory, mark);

  transformer_train(t->backend, &t->model, &batch, &t->transformer, 1.f / ROWS, false, t->loss);
  float *losses = on_host(run, t->loss);
  double sum = 0;
  for (int n = 0; n < ROWS; n++) sum += (double)losses[n];
  free(losses);
  float loss = (float)(sum / ROWS);
  check_close("the loss", &loss, numbers(expected, 1, "%s", "loss"), 1);
  check_tensors(run, expected, "grad.%s", true);
}

static void check_steps(Run *run, const TensorSet *expected) {
  float losses[STEPS], norms[STEPS];
  for (int step = 0; step < STEPS; step++) {
    StepResult result = run_step(run, step);
    losses[step] = (float)result.loss;
    norms[step] = (float)result.grad_norm;
  }
  check_close("the losses", losses, numbers(expected, STEPS, "%s", "losses"), STEPS);
  check_close("the gradient norms", norms, numbers(expected, STEPS, "%s", "norms"), STEPS);
  check_tensors(run, expected, "after.%s", false);
}

static void check_model(const char *name) {
  char folder[256];
  snprintf(folder, sizeof folder, "tests/golden/%s", name);
  TensorSet expected = tensor_set_open(folder, "expected");
  assert_int_equal(expected.count, 1);
  static const char *const ways[] = {"", "--materialized-logits", "--lce-chunk 7 --recompute layer"};
  for (size_t w = 0; w < sizeof ways_to_run / sizeof *ways_to_run; w++)
    for (int i = 0; i < 3; i++) {
      Run *run = open_golden(ways_to_run[w].backend, name, ways[i]);
      if (!run) continue; // no such device here
      most = ways_to_run[w].most;
      check_pass(run, &expected);
      if (ways_to_run[w].steps) check_steps(run, &expected);
      run_close(run);
    }
  tensor_set_close(&expected);
}

static void llama_is_as_in_transformers(void **state) {
  (void)state;
  check_model("llama");
}

static void tied_scaled_biased_llama_is_as_in_transformers(void **state) {
  (void)state;
  check_model("llama-tied");
}

static void gpt2_is_as_in_transformers(void **state) {
  (void)state;
  check_model("gpt2");
}

static void untied_gpt2_without_prefix_is_as_in_transformers(void **state) {
  (void)state;
  check_model("gpt2-bare");
}

// --- the round trip ----------------------------------------------------------------------------------------

// Every tensor of `before` that is one of the model stands in `after` with the same dtype and bits.
static void check_same_bits(const Run *run, const char *before, const char *after) {
  TensorSet a = tensor_set_open(before, "model"), b = tensor_set_open(after, "model");
  Parameters parameters = run->trainer.model.parameters;
  int64_t same = 0;
  for (int f = 0; f < a.count; f++)
    for (int64_t i = 0; i < a.files[f].header.count; i++) {
      const SafetensorsEntry *x = &a.files[f].header.entries[i], *y;
      const TensorFile *file;
      if (!parameters_find(&parameters, x->name)) continue;
      y = tensor_set_find(&b, x->name, &file);
      assert_non_null(y);
      assert_string_equal(x->dtype, y->dtype);
      assert_int_equal(x->bytes, y->bytes);
      assert_memory_equal(a.files[f].mapping.bytes + x->offset, file->mapping.bytes + y->offset, x->bytes);
      same++;
    }
  assert_int_equal(same, parameters.count);
  tensor_set_close(&a);
  tensor_set_close(&b);
}

static void check_round_trip(const char *name, Dtype dtype, size_t shard_bytes, int files) {
  Run *run = open_golden("cpu", name, "");
  char before[256], saved[256];
  snprintf(before, sizeof before, "tests/golden/%s", name);
  snprintf(saved, sizeof saved, "%s", in_room(name));
  CheckpointStore store = checkpoint_store_open(saved, before, NULL, -1, false);
  store.dtype = dtype;
  store.shard_bytes = shard_bytes;
  cJSON *nothing = cJSON_CreateObject();
  Reason reason;
  assert_true(checkpoint_save(&store, &run->trainer.model, run->h->backend, 0, nothing, &reason));
  cJSON_Delete(nothing);
  checkpoint_store_close(&store);
  TensorSet set = tensor_set_open(saved, "model"); // through the links
  assert_int_equal(set.count, files);
  for (int i = 0; i < files; i++) assert_in_range(set.files[i].mapping.size, 1, shard_bytes + 4096);
  tensor_set_close(&set);
  check_same_bits(run, before, saved);
  run_close(run);
}

static void loading_and_saving_keeps_every_bit(void **state) {
  (void)state;
  check_round_trip("llama", DTYPE_F32, CHECKPOINT_SHARD_BYTES, 1);
  check_round_trip("gpt2", DTYPE_F32, 20000, 3);
  check_round_trip("llama-tied", DTYPE_BF16, CHECKPOINT_SHARD_BYTES, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(llama_is_as_in_transformers),
      cmocka_unit_test(tied_scaled_biased_llama_is_as_in_transformers),
      cmocka_unit_test(gpt2_is_as_in_transformers),
      cmocka_unit_test(untied_gpt2_without_prefix_is_as_in_transformers),
      cmocka_unit_test(loading_and_saving_keeps_every_bit),
  };
  return cmocka_run_group_tests(tests, make_room, clear_room);
}
