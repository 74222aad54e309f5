// tools/minimal.c, which shares no code with the program, against ./train: the same weights and batches give the same losses,
// gradients and updates, step after step. It is the tests' independent account of a whole step of a Llama.
#define main minimal_main
#include "tools/minimal.c"
#undef main

#include "tests/process.h"
#include "tests/runs.h"

enum { BATCH = 3, SEQ_LEN = 17, ROWS = BATCH * SEQ_LEN, STEPS = 4, WARMUP = 2 };
// Odd on purpose: nothing divides anything else. Every three query heads share a key/value head.
static const Config shape = {.vocab_size = 259,
                             .hidden_size = 22,
                             .intermediate_size = 37,
                             .num_hidden_layers = 2,
                             .num_attention_heads = 6,
                             .num_key_value_heads = 2,
                             .head_dim = 10,
                             .rope_theta = 100,
                             .rms_norm_eps = 1e-5f};

static Run *open_trainer(bool tied, const char *mode) {
  const Config *c = &shape;
  return run_open("--model llama-tiny --vocab %ld --hidden-size %ld --intermediate-size %ld --num-layers %ld "
                  "--num-attention-heads %ld --num-key-value-heads %ld --head-dim %ld --rope-theta 100 %s "
                  "--batch %d --seq-len %d --steps %d --warmup %d --lr 0.01 --data LICENSE %s",
                  c->vocab_size, c->hidden_size, c->intermediate_size, c->num_hidden_layers,
                  c->num_attention_heads, c->num_key_value_heads, c->head_dim,
                  tied ? "--tie-word-embeddings" : "--untie-word-embeddings", BATCH, SEQ_LEN, STEPS, WARMUP,
                  mode);
}

static Matrix *find(const Llama *m, const Parameter *p) {
  for (long i = 0; i < m->count; i++)
    if (!strcmp(m->all[i]->name, p->name)) {
      assert_int_equal(m->all[i]->count, tensor_count(p->value));
      return m->all[i];
    }
  fail_msg("minimal.c has no %s", p->name);
}

// Weights that make every path matter, the same in both.
static void draw_weights(Run *run, Llama *m, double head) {
  const ParameterSet *p = &trainer_model(&run->trainer)->parameters;
  assert_int_equal(p->count, 9 * shape.num_hidden_layers + 2 + (m->head == &m->lm_head));
  for (int64_t i = 0; i < p->count; i++) {
    Matrix *w = find(m, &p->items[i]);
    double *values = random_values(run->h, w->count, w->rows == 1 ? 0.3 : 1.2 / sqrt((double)w->columns));
    for (long k = 0; k < w->count; k++)
      w->value[k] = (float)((values[k] + (w->rows == 1)) * (w == m->head ? head : 1));
    backend_to_device(run->h->backend, p->items[i].value, w->value);
  }
}

// |got - want| / |want| over all elements.
static void assert_near(const char *what, const double *got, const float *want, int64_t count, double most) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    error += (got[i] - (double)want[i]) * (got[i] - (double)want[i]);
    size += (double)want[i] * (double)want[i];
  }
  if (!(sqrt(error / size) <= most))
    fail_msg("%s: off by %.2g, %.2g allowed", what, sqrt(error / size), most);
}

static void check_tensors(Run *run, const Llama *m, bool gradients, double most) {
  const ParameterSet *p = &trainer_model(&run->trainer)->parameters;
  for (int64_t i = 0; i < p->count; i++) {
    const Matrix *w = find(m, &p->items[i]);
    Tensor t = gradients ? p->items[i].grad : p->items[i].value;
    assert_near(p->items[i].name, values_of(run->h, t), gradients ? w->grad : w->value, w->count, most);
  }
}

static void check_step(Run *run, Llama *m, long step, double most) {
  int32_t tokens[ROWS], targets[ROWS];
  LoaderPlace place = {.step = step, .micro_steps = 1, .ranks = 1};
  loader_train_batch(&run->data.loader, place, tokens, targets, NULL);
  double loss = forward(m, tokens, targets);
  backward(m, tokens);
  StepResult got = run_step(run, step);
  assert_true(fabs(got.loss / loss - 1) <= most);
  assert_near("losses", values_of(run->h, run->trainer.loss), m->losses, ROWS, most);
  check_tensors(run, m, true, most);
  double lr = schedule(0.01, step, WARMUP, STEPS);
  assert_true(fabs(got.learning_rate / lr - 1) < 1e-12);
  assert_true(fabs(got.grad_norm / update(m, lr, step) - 1) <= most);
  check_tensors(run, m, false, most);
}

// The last ones have logits so large that the fused mode computes rows again with their maximum as the anchor.
TEST(test_steps_agree_with_the_trainer) {
  static const struct {
    bool tied;
    const char *mode;
    long chunk; // in minimal.c
    double head, most;
  } cases[] = {
      {true, "--fused-lce --lce-chunk 20", 16, 1, 1e-5},   {false, "--fused-lce --lce-chunk 13", 51, 1, 1e-5},
      {true, "--materialized-logits", 0, 1, 1e-5},         {false, "--materialized-logits", 0, 1, 1e-5},
      {false, "--fused-lce --lce-chunk 20", 16, 60, 1e-4}, {false, "--materialized-logits", 0, 60, 1e-4}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Run *run = open_trainer(cases[i].tied, cases[i].mode);
    Config c = shape;
    c.tie_word_embeddings = cases[i].tied;
    Llama m;
    make_model(&m, c, BATCH, SEQ_LEN, cases[i].chunk);
    draw_weights(run, &m, cases[i].head);
    double largest = 0;
    for (long step = 0; step < STEPS; step++) check_step(run, &m, step, cases[i].most);
    for (int n = 0; n < ROWS; n++) largest = fmax(largest, (double)m.losses[n]);
    assert_true((largest > 96 * log(2)) == (cases[i].head > 1));
    run_close(run);
  }
}

// Compiled alone, with the usual warnings, it trains on text, and says what it needs.
TEST(test_alone) {
  char command[512], program[128];
  strcpy(program, temp_path("minimal"));
  snprintf(command, sizeof command,
           "cc -O3 -fopenmp -Wall -Wextra -Werror tools/minimal.c -o %s -lm && "
           "OMP_WAIT_POLICY=passive %s LICENSE README.md steps=20 >%s",
           program, program, temp_path("output"));
  assert_int_equal(system(command), 0);
  char *output = read_text(temp_path("output"));
  float first, second;
  const char *format = "step 10 loss %f norm %*f %*d s step 20 loss %f";
  assert_int_equal(sscanf(strstr(output, "step 10"), format, &first, &second), 2);
  assert_true(first < 5.5f && second < first - 0.5f); // from ln 256 = 5.55 on
  free(output);
  snprintf(command, sizeof command, "%s chunk=5 2>%s", program, temp_path("output"));
  assert_int_not_equal(system(command), 0);
  output = read_text(temp_path("output"));
  assert_non_null(strstr(output, "usage: FILE"));
  free(output);
}

int main(void) {
  return tests_run("minimal", make_temp_dir, remove_temp_dir);
}
