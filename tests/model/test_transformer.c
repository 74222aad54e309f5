// The whole transformer's losses, and what changes neither them nor gradients, which test_golden.c checks.
#include "kernels/base/alloc.h"
#include "model/transformer.h"
#include "tests/runs.h"

enum { GPT2, LLAMA, LLAMA_UNTIED, QWEN, OLMO, FAMILIES };

// Odd on purpose: nothing divides anything else.
static const char *const families[FAMILIES] = {
    [GPT2] = "--model gpt2-tiny --vocab 13 --hidden-size 10 --intermediate-size 23 --num-attention-heads 2 "
             "--max-position-embeddings 7",
    // The heads together are wider than the stream, and every two of them share a key/value head.
    [LLAMA] = "--model llama-tiny --vocab 13 --hidden-size 11 --intermediate-size 17 --num-attention-heads 4 "
              "--num-key-value-heads 2 --head-dim 6 --tie-word-embeddings",
    [LLAMA_UNTIED] = "--model llama-tiny --vocab 17 --hidden-size 11 --intermediate-size 17 "
                     "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 --untie-word-embeddings",
    [QWEN] = "--model qwen3-0.6b --vocab 13 --hidden-size 11 --intermediate-size 17 --num-attention-heads 4 "
             "--num-key-value-heads 2 --head-dim 6 --tie-word-embeddings --logit-softcap 2",
    [OLMO] = "--model olmo2-1b --vocab 13 --hidden-size 11 --intermediate-size 17 --num-attention-heads 4 "
             "--num-key-value-heads 2 --head-dim 6"};

static ModelConfig tiny(int family) {
  ModelConfig c = options_on(ON_CPU, "%s --num-layers 2 --batch 1 --seq-len 5", families[family]).model;
  c.rope_theta = 100;
  // One of the four rotary frequencies stays, one is blended and two are stretched.
  if (family == LLAMA_UNTIED) c.rope_scaling = (RopeScaling){8, 1, 4, 40};
  // With all that the later families have: biases, heads normalised, positions scaled, logits capped.
  if (family == QWEN) c.qkv_bias = true, c.rope_scaling.factor = 3;
  if (family == OLMO) c.qkv_bias = c.out_bias = true;
  return c;
}

typedef struct {
  Harness *h;
  Model model;
  int64_t batch, seq_len, rows, counted;
  int32_t *tokens, *targets;
  Batch on_device;
  Tensor loss;
} Case;

// Every gradient NaN: a pass that does not accumulate must write them all.
static void poison_gradients(Case *c) {
  for (int g = 0; g < GROUP_COUNT; g++)
    if (tensor_exists(c->model.parameters.grad[g]))
      memset(c->model.parameters.grad[g].data, 0xFF, tensor_bytes(c->model.parameters.grad[g]));
}

// Puts the batch on the device, and the counted positions where some are ignored.
static void upload_batch(Case *c) {
  Harness *h = c->h;
  int32_t *positions = random_ids(h, c->rows, 1);
  c->counted = 0;
  for (int64_t n = 0; n < c->rows; n++)
    if (c->targets[n] != IGNORE_INDEX) positions[c->counted++] = (int32_t)n;
  c->on_device = (Batch){.batch = c->batch,
                         .seq_len = c->seq_len,
                         .tokens = ids_from(h, c->tokens, c->rows),
                         .targets = ids_from(h, c->targets, c->rows),
                         .counted = c->counted};
  if (c->counted < c->rows) c->on_device.indices = ids_from(h, positions, c->rows);
  c->loss = poisoned_vector(h, DTYPE_F32, c->rows);
}

// ignore_every 0: all targets count; 1: none does.
static Case *case_open(ModelConfig config, int64_t batch, int64_t seq_len, int ignore_every) {
  Harness *h = harness_open("cpu");
  Case *c = host_alloc(1, sizeof *c, "a test");
  *c = (Case){.h = h, .batch = batch, .seq_len = seq_len, .rows = batch * seq_len};
  model_create(&c->model, &config, h->backend,
               (ParameterDtypes){.weight = h->dtype, .grad = h->dtype, .moment = DTYPE_F32}, seq_len);
  draw_weights(h, &c->model);
  c->tokens = random_ids(h, c->rows, config.vocab_size);
  c->targets = random_ids(h, c->rows, config.vocab_size);
  for (int64_t n = 0; n < c->rows; n++)
    if (ignore_every && n % ignore_every == 0) c->targets[n] = IGNORE_INDEX;
  upload_batch(c);
  return c;
}

static void case_close(Case *c) {
  model_destroy(&c->model);
  harness_close(c->h);
  free(c);
}

static TransformerOptions options_of(LceMode mode, int64_t chunk, Recompute recompute) {
  return (TransformerOptions){.mode = mode, .chunk = chunk, .recompute = recompute};
}

static double **gradients_of(Case *c) {
  const ParameterSet *p = &c->model.parameters;
  double **all = (double **)host_values(c->h, p->count);
  for (int64_t i = 0; i < p->count; i++) all[i] = values_of(c->h, p->items[i].grad);
  return all;
}

typedef struct {
  double *loss, **gradients;
} Result;

static Result train_once(Case *c, TransformerOptions options, float scale) {
  poison_gradients(c);
  c->loss = poisoned_vector(c->h, DTYPE_F32, c->rows);
  MemoryMark before = memory_mark(&c->h->backend->memory);
  transformer_train(c->h->backend, &c->model, &c->on_device, &options, scale, false, c->loss);
  assert_int_equal(memory_mark(&c->h->backend->memory), before);
  return (Result){values_of(c->h, c->loss), gradients_of(c)};
}

static double *evaluate(Case *c, TransformerOptions options) {
  c->loss = poisoned_vector(c->h, DTYPE_F32, c->rows);
  transformer_evaluate(c->h->backend, &c->model, &c->on_device, &options, c->loss);
  return values_of(c->h, c->loss);
}

// Gradients that are 0 but for rounding carry that of all others: the error follows from the whole gradient.
static void check_gradients_agree(Case *c, double **want) {
  enum { UNITS = 64 };
  const ParameterSet *p = &c->model.parameters;
  double squares = 0, total = 0;
  for (int64_t i = 0; i < p->count; i++) {
    int64_t count = tensor_count(p->items[i].grad);
    squares += reference_dot(want[i], want[i], count);
    total += (double)count;
  }
  Tolerance tolerance = with_size(within(UNITS, 1), sqrt(squares / total));
  for (int64_t i = 0; i < p->count; i++)
    check_values(c->h, p->items[i].name, p->items[i].grad, want[i], tolerance);
}

static void check_agreement(Case *c, TransformerOptions options, float scale, Result want) {
  train_once(c, options, scale);
  check_values(c->h, "loss", c->loss, want.loss, within(32, 1));
  check_gradients_agree(c, want.gradients);
}

// Each level holds less than the one before, and in some layers alone it holds something between.
TEST(test_recompute_saves) {
  for (int f = 0; f < FAMILIES; f++) {
    size_t before = SIZE_MAX;
    for (int i = 1; i < 2 * RECOMPUTE_COUNT; i++) { // none, elementwise in 2 layers, in all, mlp in 2, ...
      ModelConfig config = tiny(f);
      config.num_hidden_layers = 5;
      Case *c = case_open(config, 3, 7, 0);
      Ledger *ledger = &c->h->backend->memory.ledger;
      ledger_reset_peak(ledger);
      TransformerOptions options = options_of(LCE_FUSED, 8, (Recompute)(i / 2));
      options.recompute_layers = i % 2 ? 0 : 2;
      train_once(c, options, 1);
      assert_true(ledger->highest[MEMORY_ACTIVATIONS] < before);
      before = ledger->highest[MEMORY_ACTIVATIONS];
      case_close(c);
    }
  }
}

// The MLP in chunks, which need not divide the tokens: the same sums in another order, in less memory.
TEST(test_mlp_chunks) {
  for (int f = 0; f < FAMILIES; f++)
    for (int64_t chunk = 1; chunk <= 21; chunk += 4) {
      Case *c = case_open(tiny(f), 3, 7, 5);
      Ledger *ledger = &c->h->backend->memory.ledger;
      TransformerOptions options = options_of(LCE_FUSED, 8, RECOMPUTE_LAYER);
      ledger_reset_peak(ledger);
      Result want = train_once(c, options, 0.25f);
      size_t whole = ledger->highest[MEMORY_ACTIVATIONS];
      options.mlp_chunk = chunk;
      ledger_reset_peak(ledger);
      check_agreement(c, options, 0.25f, want);
      assert_true(chunk > 13 || ledger->highest[MEMORY_ACTIVATIONS] < whole);
      case_close(c);
    }
}

// A document alone has the losses that its logits say; windows of documents and padding have the documents'
// losses and gradients, in either mode, with whatever is recomputed.
TEST(test_documents) {
  enum { BATCH = 2, SEQ_LEN = 70, ROWS = BATCH * SEQ_LEN };
  static const int64_t lengths[] = {3, 1, 60, 6, 66, 2, 1, 1}; // the last two are padding
  enum { DOCUMENTS = sizeof lengths / sizeof *lengths };
  for (int f = 0; f < FAMILIES; f++) {
    ModelConfig config = tiny(f);
    config.max_position_embeddings = SEQ_LEN;
    Case *c = case_open(config, BATCH, SEQ_LEN, 0);
    TransformerOptions options = options_of(LCE_FUSED, 9, RECOMPUTE_NONE);
    int32_t *documents = random_ids(c->h, 2 * ROWS, 1);
    c->targets[ROWS - 2] = c->targets[ROWS - 1] = IGNORE_INDEX;
    poison_gradients(c);
    Result want = {.loss = host_values(c->h, ROWS)};
    for (int64_t d = 0, first = 0; d < DOCUMENTS; first += lengths[d++]) {
      Case one = *c;
      one.batch = 1, one.seq_len = one.rows = lengths[d];
      one.tokens += first, one.targets += first;
      upload_batch(&one);
      transformer_train(c->h->backend, &c->model, &one.on_device, &options, 1.f / ROWS, d > 0, one.loss);
      check_values(c->h, "loss of a document", one.loss,
                   model_losses(c->h, &c->model, one.tokens, one.targets, 1, one.seq_len), within(64, 1));
      memcpy(want.loss + first, values_of(c->h, one.loss), (size_t)one.rows * sizeof *want.loss);
      for (int64_t i = 0; i < one.rows; i++) {
        documents[first + i] = (int32_t)i;
        documents[ROWS + first + i] = (int32_t)(one.rows - 1 - i);
      }
    }
    want.gradients = gradients_of(c);
    upload_batch(c);
    c->on_device.documents = tensor_reshape_2d(ids_from(c->h, documents, 2 * ROWS), 2, ROWS);
    for (int recompute = 0; recompute < RECOMPUTE_COUNT; recompute++) {
      options = options_of((LceMode)(recompute % 2), 9, (Recompute)recompute);
      options.mlp_chunk = recompute == RECOMPUTE_LAYER ? 33 : 0;
      check_agreement(c, options, 1.f / ROWS, want);
    }
    for (int mode = 0; mode < 2; mode++) {
      options = options_of((LceMode)mode, 9, RECOMPUTE_NONE);
      evaluate(c, options);
      check_values(c->h, "evaluated loss of packed documents", c->loss, want.loss, within(32, 1));
    }
    c->on_device.documents = (Tensor){0}; // what the test would not see otherwise
    assert_true(fabs(evaluate(c, options)[SEQ_LEN - 1] - want.loss[SEQ_LEN - 1]) > 1e-3);
    case_close(c);
  }
}

TEST(test_refusals) {
  static const struct {
    int64_t batch, seq_len, chunk;
    const char *why;
  } cases[] = {{1, 10, 4, "a batch of sequences of 10 for a model made for 5"},
               {1, 5, 4, "where [10, 11] is needed"},
               {2, 5, 0, "a chunk of 0 tokens"}};
  Case *c = case_open(tiny(LLAMA), 2, 5, 0);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    c->on_device.batch = cases[i].batch;
    c->on_device.seq_len = cases[i].seq_len;
    assert_fails(c->h, cases[i].why, evaluate(c, options_of(LCE_FUSED, cases[i].chunk, RECOMPUTE_NONE)));
  }
  case_close(c);
}

TEST_MAIN(tests_run("transformer", NULL, NULL))
