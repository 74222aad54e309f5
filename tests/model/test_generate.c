// Generation: cached logits, texts against the plain loop, draws against their distributions, memory.
#include "kernels/base/random.h"
#include "model/generate.h"
#include "model/transformer.h"
#include "tests/runs.h"

typedef struct {
  Harness *h;
  Model model;
} Case;

// Longer than two pieces of a prompt, and not a multiple of one.
enum { WINDOW = 150, VOCAB = 29 };

static const char *const models[] = {"--model llama-tiny --num-attention-heads 4 --num-key-value-heads 2",
                                     "--model gpt2-tiny --num-attention-heads 2",
                                     "--model qwen3-0.6b --num-attention-heads 4 --num-key-value-heads 2",
                                     "--model olmo2-1b --num-attention-heads 4 --num-key-value-heads 2"};
enum { MODELS = sizeof models / sizeof *models };

static ModelConfig small_model(const char *model) {
  const char *sizes = "--vocab 29 --hidden-size 12 --intermediate-size 20 --num-layers 3 --head-dim 6";
  return options_on(ON_CPU, "%s %s --max-position-embeddings 150 --seq-len 5", model, sizes).model;
}

static Case case_open(const char *backend, const char *model) {
  Case c = {.h = harness_open(backend)};
  if (!c.h) return c;
  ModelConfig config = small_model(model);
  Dtype dtype = c.h->dtype;
  ParameterDtypes dtypes = {.weight = dtype, .grad = dtype, .moment = DTYPE_F32};
  model_create(&c.model, &config, c.h->backend, dtypes, WINDOW);
  parameters_initialize(&c.model.parameters, c.h->backend, 3);
  return c;
}

static void case_close(Case *c) {
  model_destroy(&c->model);
  harness_close(c->h);
}

// Logits of `length` tokens after `past` in a cache.
static Tensor logits_of(Case *c, const int32_t *tokens, int64_t length, const KeyValueCache *cache,
                        int64_t past) {
  int32_t positions[2 * WINDOW];
  for (int64_t i = 0; i < length; i++) positions[i] = (int32_t)i;
  Tensor logits = poisoned(c->h, DTYPE_F32, length, VOCAB);
  Batch batch = {.batch = 1, .seq_len = length, .tokens = ids_from(c->h, tokens, length)};
  transformer_logits(c->h->backend, &c->model, &batch, cache, past, ids_from(c->h, positions, length),
                     logits);
  return logits;
}

TEST(test_cached_logits_equal_uncached) {
  enum { LENGTH = 40 };
  static const int64_t pieces[] = {1, 13, 1, 1, 24};
  for (volatile int p = 0; p < MODELS; p++) {
    Case c = case_open("cpu", models[p]);
    draw_weights(c.h, &c.model);
    int32_t *tokens = random_ids(c.h, LENGTH, VOCAB);
    double *want = model_logits(c.h, &c.model, tokens, 1, LENGTH);
    KeyValueCache cache = key_value_cache_push(c.h->backend, &c.model.config, 1, LENGTH + 2);
    for (int64_t i = 0, past = 0; i < 5; past += pieces[i++])
      check_values(c.h, "cached logits", logits_of(&c, tokens + past, pieces[i], &cache, past),
                   want + past * VOCAB, within(64, 20));
    assert_fails(c.h, "3 tokens after 40 do not fit into keys", logits_of(&c, tokens, 3, &cache, 40));
    case_close(&c);
  }
}

TEST(test_texts_equal_the_plain_loop) {
  static const int64_t prompts[] = {1, 63, 64, 130, 170};
  for (int p = 0; p < MODELS; p++) {
    Case c = case_open("cpu", models[p]);
    draw_weights(c.h, &c.model);
    double cap = c.model.config.final_logit_softcapping = 2 * p; // none for the first
    for (int k = 0; k < 5; k++) {
      enum { MAX_NEW_TOKENS = 30 };
      int64_t count, end = prompts[k] + MAX_NEW_TOKENS;
      int32_t *prompt = random_ids(c.h, end, VOCAB);
      Generation g = {.prompt = prompt,
                      .prompt_count = prompts[k],
                      .max_new_tokens = MAX_NEW_TOKENS,
                      .window = WINDOW,
                      .sampling = {.temperature = 1},
                      .seed = 11};
      int32_t *text = generate_tokens(c.h->backend, &c.model, &g, &count);
      assert_int_equal(count, end);
      assert_memory_equal(text, prompt, (size_t)prompts[k] * sizeof *text);
      for (int64_t i = prompts[k]; i < end; i++) {
        int64_t start = i > WINDOW ? i - WINDOW : 0;
        const double *z = model_logits(c.h, &c.model, text + start, 1, i - start) + (i - start - 1) * VOCAB;
        float row[VOCAB];
        for (int64_t v = 0; v < VOCAB; v++) row[v] = (float)(cap > 0 ? cap * tanh(z[v] / cap) : z[v]);
        assert_int_equal(text[i], sampling_draw(&g.sampling, row, VOCAB, random_uniform(11, 7, (uint64_t)i)));
      }
      free(text);
    }
    case_close(&c);
  }
}

static void record(void *context, int32_t token) {
  int32_t **next = context;
  *(*next)++ = token;
}

static void check_seeds_stops_and_callbacks(const char *backend) {
  Case c = case_open(backend, models[0]);
  if (!c.h) return;
  static const int32_t prompt[] = {4, 2};
  Generation g = {.prompt = prompt,
                  .prompt_count = 2,
                  .max_new_tokens = 50,
                  .window = WINDOW,
                  .sampling = {1, 0, 1},
                  .seed = 5};
  int64_t count, again_count;
  int32_t *text = generate_tokens(c.h->backend, &c.model, &g, &count);
  int32_t *again = generate_tokens(c.h->backend, &c.model, &g, &again_count);
  assert_int_equal(count, 52);
  assert_memory_equal(text, again, 52 * sizeof *text);
  free(again);
  g.seed = 6;
  again = generate_tokens(c.h->backend, &c.model, &g, &again_count);
  assert_memory_not_equal(text, again, 52 * sizeof *text);
  free(again);
  // Ends at the first of two stop ids, whose tokens the callback has seen as they came.
  int32_t seen[64], *next = seen, stops[] = {text[20], text[9]};
  int64_t first = 2;
  while (text[first] != stops[0] && text[first] != stops[1]) first++;
  g.seed = 5;
  g.stop = stops;
  g.stop_count = 2;
  g.on_token = record;
  g.context = &next;
  again = generate_tokens(c.h->backend, &c.model, &g, &again_count);
  assert_int_equal(again_count, first + 1);
  assert_memory_equal(text, again, (size_t)again_count * sizeof *text);
  assert_int_equal(next - seen, again_count - 2);
  assert_memory_equal(seen, text + 2, (size_t)(next - seen) * sizeof *seen);
  free(again);
  free(text);
  g.prompt_count = 0;
  assert_fails(c.h, "at least one token", generate_tokens(c.h->backend, &c.model, &g, &count));
  case_close(&c);
}

TEST(test_seeds_stops_and_callbacks) {
  check_seeds_stops_and_callbacks("cpu");
  check_seeds_stops_and_callbacks("cuda");
}

TEST(test_memory_does_not_depend_on_the_prompt) {
  Backend *plan = plan_backend_create(ON_CPU, DTYPE_F32);
  ModelConfig config = small_model(models[0]);
  Model model;
  ParameterDtypes dtypes = {.weight = DTYPE_F32, .grad = DTYPE_F32, .moment = DTYPE_F32};
  model_create(&model, &config, plan, dtypes, WINDOW);
  Generation g = {.max_new_tokens = 7, .window = WINDOW, .sampling = {.temperature = 1}};
  int64_t count;
  assert_null(generate_tokens(plan, &model, &g, &count));
  size_t planned = plan->memory.ledger.stack_peak;
  model_destroy(&model);
  backend_destroy(plan);
  static const int64_t prompts[] = {1, 2, 65, 150, 300};
  for (int k = 0; k < 5; k++) {
    Case c = case_open("cpu", models[0]);
    g.prompt = random_ids(c.h, prompts[k], config.vocab_size);
    g.prompt_count = prompts[k];
    size_t before = c.h->backend->memory.ledger.stack;
    ledger_reset_peak(&c.h->backend->memory.ledger);
    free(generate_tokens(c.h->backend, &c.model, &g, &count));
    assert_int_equal(c.h->backend->memory.ledger.stack_peak - before, planned);
    case_close(&c);
  }
}

// Over N evenly spread uniforms every token comes N times its share, but for the rounding of two borders.
static void check_draws(const Sampling *sampling, const float *logits, int count, const double *shares) {
  enum { N = 20000 };
  int drawn[16] = {0};
  double all = 0;
  for (int v = 0; v < count; v++) all += shares[v];
  for (int i = 0; i < N; i++) {
    int32_t token = sampling_draw(sampling, logits, count, (i + 0.5) / N);
    assert_in_range(token, 0, count - 1);
    drawn[token]++;
  }
  for (int v = 0; v < count; v++)
    if (fabs(drawn[v] - N * shares[v] / all) > 1.001)
      fail_msg("token %d was drawn %d times of %d, should be %g", v, drawn[v], N, N * shares[v] / all);
}

TEST(test_draws_follow_their_distribution) {
  // Probabilities 0.05, 0.4, 0.1, 0.25, 0.2.
  const float z[] = {logf(0.05f), logf(0.4f), logf(0.1f), logf(0.25f), logf(0.2f)};
  static const struct {
    Sampling sampling;
    double shares[5]; // of the draws
  } cases[] = {{{1, 0, 1}, {0.05, 0.4, 0.1, 0.25, 0.2}},
               {{1, 0, 0}, {0.05, 0.4, 0.1, 0.25, 0.2}},
               {{1, 5, 1}, {0.05, 0.4, 0.1, 0.25, 0.2}},
               {{1, 99, 1}, {0.05, 0.4, 0.1, 0.25, 0.2}},
               {{0, 0, 1}, {0, 1, 0, 0, 0}},
               {{1, 1, 1}, {0, 1, 0, 0, 0}},
               {{1, 3, 1}, {0, 0.4, 0, 0.25, 0.2}},
               {{1, 0, 0.64}, {0, 0.4, 0, 0.25, 0}},
               {{1, 0, 0.66}, {0, 0.4, 0, 0.25, 0.2}},
               {{1, 0, 1e-9}, {0, 1, 0, 0, 0}},
               // top_p is a share of what top_k left: of 0.4 and 0.25 the first alone has 0.615.
               {{1, 2, 0.6}, {0, 1, 0, 0, 0}},
               {{1, 2, 0.63}, {0, 0.4, 0, 0.25, 0}},
               // Temperature first: at 1/2 the probabilities are squared.
               {{0.5, 0, 1}, {0.0025, 0.16, 0.01, 0.0625, 0.04}},
               {{0.5, 2, 1}, {0, 0.16, 0, 0.0625, 0}}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    check_draws(&cases[i].sampling, z, 5, cases[i].shares);
  // Equal logits rank by id.
  const float equal[] = {1, 2, 2, 2};
  check_draws(&(Sampling){1, 2, 1}, equal, 4, (const double[]){0, 0.5, 0.5, 0});
  check_draws(&(Sampling){0, 0, 1}, equal, 4, (const double[]){0, 1, 0, 0});
  // top_p is reached exactly.
  check_draws(&(Sampling){1, 0, 0.5}, (const float[]){3, 3, 3, 3}, 4, (const double[]){0.5, 0.5, 0, 0});
  // However large they are.
  const float large[] = {-1e4f, 1e4f, -INFINITY, 1e4f};
  check_draws(&(Sampling){1, 0, 1}, large, 4, (const double[]){0, 0.5, 0, 0.5});
}

static void check_refused(float logit, const char *sentence) {
  const float z[] = {1, logit, 2};
  CATCH(sampling_draw(&(Sampling){1, 0, 1}, z, 3, 0.5));
  assert_non_null(strstr(caught_sentence, sentence));
}

TEST(test_a_logit_that_is_no_number_ends_the_text) {
  check_refused(NAN, "the logit of token 1 is");
  check_refused(INFINITY, "the logit of token 1 is inf");
}

// The same choice as sorting would make, on many tokens with many ties.
TEST(test_the_likeliest_of_many) {
  enum { V = 1000, K = 137 };
  float z[V];
  for (int v = 0; v < V; v++) z[v] = (float)(random_bits(1, 2, (uint64_t)v) % 200) / 50;
  bool drawn[V] = {false};
  for (int i = 0; i < 60000; i++) drawn[sampling_draw(&(Sampling){1, K, 1}, z, V, (i + 0.5) / 60000)] = true;
  int kept = 0;
  for (int v = 0; v < V; v++) {
    int before = 0;
    for (int u = 0; u < V; u++) before += u < v ? z[u] >= z[v] : z[u] > z[v];
    assert_int_equal(drawn[v], before < K);
    kept += drawn[v];
  }
  assert_int_equal(kept, K);
}

TEST_MAIN(tests_run("generate", NULL, NULL))
