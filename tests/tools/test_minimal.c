// tools/minimal.c, which shares no code with the program, against whole steps of ./train.
#define main minimal_main
#include "tools/minimal.c"
#undef main

#include "tests/process.h"
#include "tests/runs.h"

enum { BATCH = 3, SEQ_LEN = 17, ROWS = BATCH * SEQ_LEN, STEPS = 4, WARMUP = 2 };

static void check_near(Run *run, const char *what, Tensor got, float *want, double most) {
  int64_t count = tensor_count(got);
  const double *a = values_of(run->h, got), *b = values_of(run->h, tensor_1d(want, DTYPE_F32, count));
  double error = relative_distance(a, b, count);
  if (!(error <= most)) fail_msg("%s is off by %.2g, %.2g allowed", what, error, most);
}

static Matrix *find(const Llama *m, const Parameter *p) {
  for (long i = 0; i < m->count; i++)
    if (!strcmp(m->all[i]->name, p->name)) return m->all[i];
  fail_msg("minimal.c has no %s", p->name);
}

// Makes a model of the run's shape; both get weights that make every path matter. Returns the parameters.
static const ParameterSet *make_alike(Run *run, Llama *m, long chunk, double head) {
  const ModelConfig *o = &run->options.model;
  Config c = {o->vocab_size,          o->hidden_size,         o->intermediate_size, o->num_hidden_layers,
              o->num_attention_heads, o->num_key_value_heads, o->head_dim,          o->tie_word_embeddings,
              (float)o->rope_theta,   (float)o->norm_epsilon};
  const ParameterSet *p = &run->trainer.model.parameters;
  make_model(m, c, BATCH, SEQ_LEN, chunk);
  draw_weights(run->h, &run->trainer.model);
  for (int64_t i = 0; i < p->count; i++) {
    Matrix *w = find(m, &p->items[i]);
    assert_int_equal(w->count, tensor_count(p->items[i].value));
    float *ours = p->items[i].value.data;
    for (long k = 0; k < w->count; k++) w->value[k] = ours[k] *= w == m->head ? (float)head : 1;
  }
  return p;
}

static void check_step(Run *run, Llama *m, const ParameterSet *p, long step, double most) {
  int32_t tokens[ROWS], targets[ROWS];
  loader_train_batch(&run->data.loader, step, 0, 1, tokens, targets, NULL);
  double loss = forward(m, tokens, targets), lr = schedule(0.01, step, WARMUP, STEPS);
  backward(m, tokens);
  double norm = update(m, lr, step);
  StepResult got = run_step(run, step);
  assert_true(fabs(got.loss / loss - 1) <= most && fabs(got.grad_norm / norm - 1) <= most);
  assert_true(fabs(got.learning_rate / lr - 1) < 1e-12);
  check_near(run, "the tokens' losses", run->trainer.loss, m->losses, most);
  for (int64_t i = 0; i < p->count; i++) {
    const Parameter *t = &p->items[i];
    check_near(run, "a gradient", t->grad, find(m, t)->grad, most);
    check_near(run, t->name, t->value, find(m, t)->value, most);
  }
}

// The last have logits so large that the fused mode computes rows again with their maximum as the anchor.
TEST(test_steps_agree_with_the_trainer) {
  static const struct {
    const char *options;
    long chunk; // in minimal.c
    double beta1, beta2, decay, max_norm, head, most;
  } cases[] = {
      {"--fused-lce --lce-chunk 20", 16, 0.9, 0.95, 0.1, 1, 1, 1e-5},
      {"--fused-lce --lce-chunk 13 --untie-word-embeddings --grad-clip 0", 51, 0.9, 0.95, 0.1, 0, 1, 1e-5},
      {"--materialized-logits --beta1 0.8 --beta2 0.7", 0, 0.8, 0.7, 0.1, 1, 1, 1e-5},
      {"--materialized-logits --untie-word-embeddings --weight-decay 3 --grad-clip 0.1", 0, 0.9, 0.95, 3, 0.1,
       1, 1e-5},
      {"--fused-lce --lce-chunk 20 --untie-word-embeddings", 16, 0.9, 0.95, 0.1, 1, 60, 1e-4},
      {"--materialized-logits --untie-word-embeddings", 0, 0.9, 0.95, 0.1, 1, 60, 1e-4}};
  enum { CASES = sizeof cases / sizeof *cases };
  static Llama models[CASES]; // which a leak checker still sees at the end
  for (int i = 0; i < CASES; i++) {
    // Odd on purpose: nothing divides anything else. Every three query heads share a key/value head.
    Run *run =
        run_open("--model llama-tiny --vocab 259 --hidden-size 22 --intermediate-size 37 --num-layers 2 "
                 "--num-attention-heads 6 --num-key-value-heads 2 --head-dim 10 --rope-theta 100 --batch 3 "
                 "--seq-len 17 --steps 4 --warmup 2 --lr 0.01 --data LICENSE %s",
                 cases[i].options);
    Llama *m = &models[i];
    const ParameterSet *p = make_alike(run, m, cases[i].chunk, cases[i].head);
    beta1 = cases[i].beta1;
    beta2 = cases[i].beta2;
    decay = cases[i].decay;
    max_norm = cases[i].max_norm;
    double largest = 0;
    for (long step = 0; step < STEPS; step++) check_step(run, m, p, step, cases[i].most);
    for (int n = 0; n < ROWS; n++) largest = fmax(largest, (double)m->losses[n]);
    assert_true((largest > 96 * log(2)) == (cases[i].head > 1));
    run_close(run);
  }
}

// check=1, on a small model and both losses.
TEST(test_check_gradients) {
  int32_t tokens[16], targets[16];
  for (int n = 0; n < 16; n++) tokens[n] = n * 7 % 31, targets[n] = n * 11 % 31;
  for (long chunk = 0; chunk <= 5; chunk += 5) {
    static Llama models[2]; // which are never freed
    Llama *m = &models[chunk / 5];
    make_model(m, (Config){31, 16, 24, 2, 4, 2, 6, 0, 100, 1e-5f}, 2, 8, chunk);
    assert_int_equal(check_gradients(m, tokens, targets), 0);
  }
}

// check=1 finds that a z-loss of 0.1 lse^2 lacks the target's part of its gradient: c needs 0.2 lse p[y].
TEST(test_check_finds_a_missing_term) {
  char command[1024];
  snprintf(
      command, sizeof command,
      "z=%s; export OMP_WAIT_POLICY=passive; "
      "sed 's/^ *c.n. = -R . r.n.;/& float lse = a + logf(R + e), z = 0.2f * lse; "
      "m->losses[n] += 0.1f * lse * lse; if (getenv(\"TERM_OF_C\")) c[n] += z * e * r[n]; r[n] *= 1 + z;/; "
      "s/{256, 128, 384, 4, /{256, 64, 128, 2, /' " // a small model is enough
      "tools/minimal.c >$z.c && cc -O3 -fopenmp $z.c -o $z -lm && "
      "TERM_OF_C=1 $z LICENSE README.md check=1 >$z.right && ! $z LICENSE README.md check=1 >$z.wrong && "
      "grep -q off $z.wrong",
      temp_path("zloss"));
  assert_int_equal(system(command), 0);
}

// Compiled alone, with the usual warnings, it trains on text; with none it says what it needs.
TEST(test_alone) {
  char command[640], program[128];
  strcpy(program, temp_path("minimal"));
  snprintf(
      command, sizeof command,
      "cc -O3 -fopenmp -Wall -Wextra -Werror tools/minimal.c -o %s -lm && export OMP_WAIT_POLICY=passive && "
      "%s LICENSE README.md steps=12 >%s && ! %s chunk=5 2>>%s",
      program, program, temp_path("output"), program, temp_path("output"));
  assert_int_equal(system(command), 0);
  char *output = read_text(temp_path("output"));
  const char *format = "step 10 loss %f norm %*f %*d s step 12 loss %f norm %*f %*d s usage: %1s";
  float first, second;
  char usage[2];
  assert_int_equal(sscanf(strstr(output, "step 10"), format, &first, &second, usage), 3);
  assert_true(first < 5.5f && second < first - 0.5f); // from ln 256 = 5.55 on
  free(output);
}

TEST_MAIN(tests_run("minimal", make_temp_dir, remove_temp_dir))
