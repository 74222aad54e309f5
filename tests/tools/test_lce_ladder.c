// Every rung of the ladder against float64, on shapes that nothing divides, with ignored targets, chunks that
// do not divide the tokens, outputs and buffers full of NaN, and rows whose target is hopeless or nearly
// certain. On the GPU with bf16 operands, where there is one.

#include "tests/harness.h"
#include "tests/reference.h"
#include "tools/ladder/ladder.h"

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  double *x, *weight;
  int32_t *targets;
  double scale;
} Problem;

static Problem make_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, int64_t chunk,
                            double size) {
  return (Problem){.rows = rows,
                   .hidden = hidden,
                   .vocab = vocab,
                   .chunk = chunk,
                   .x = random_values(h, rows * hidden, 1),
                   .weight = random_values(h, vocab * hidden, size / sqrt((double)hidden)),
                   .targets = random_ids(h, rows, vocab),
                   .scale = 1.0 / (double)rows};
}

// The tensors of a problem; outputs are full of NaN.
static LinearCrossEntropy call_of(Harness *h, Problem *p) {
  return (LinearCrossEntropy){.x = tensor_from(h, h->dtype, p->x, p->rows, p->hidden),
                              .weight = tensor_from(h, h->dtype, p->weight, p->vocab, p->hidden),
                              .targets = ids_from(h, p->targets, p->rows),
                              .loss = poisoned_vector(h, DTYPE_F32, p->rows),
                              .dx = poisoned(h, h->dtype, p->rows, p->hidden),
                              .dweight = poisoned(h, DTYPE_F32, p->vocab, p->hidden),
                              .chunk = p->chunk,
                              .scale = (float)p->scale};
}

// Every rung on the problem; `size` is that of the logits, whose fp32 error the loss inherits.
static void check_rungs(Harness *h, Problem p, double size) {
  bool cuda = h->dtype == DTYPE_BF16;
  for (int rung = 1; rung <= RUNGS; rung++) {
    if (cuda && rung == 5 && p.hidden % 8) continue; // test_refusals
    MemoryMark mark = memory_mark(&h->backend->memory);
    LinearCrossEntropy call = call_of(h, &p);
    ReferenceLoss r = {.rows = p.rows,
                       .hidden = p.hidden,
                       .vocab = p.vocab,
                       .x = p.x,
                       .weight = p.weight,
                       .targets = p.targets,
                       .scale = p.scale,
                       .loss = host_values(h, p.rows),
                       .dx = host_values(h, p.rows * p.hidden),
                       .dweight = host_values(h, p.vocab * p.hidden)};
    reference_loss(&r); // of the values as the tensors have them
    MemoryMark tensors = memory_mark(&h->backend->memory);
    ladder_run(h->backend, rung, call);
    assert_int_equal(memory_mark(&h->backend->memory), tensors);
    const char *name = ladder_names[rung - 1];
    double terms = (double)(p.hidden + p.vocab);
    check_values(h, name, call.loss, r.loss, of_size(within(8, terms), size));
    check_values(h, name, call.dx, r.dx, of_size(within_stored(h, 8, terms), p.scale));
    check_values(h, name, call.dweight, r.dweight,
                 of_size(within_stored(h, 8, (double)(p.hidden + p.rows)), p.scale));
    memory_pop_to(&h->backend->memory, mark);
  }
}

TEST(test_shapes) {
  Harness *h = *state;
  const int64_t shapes[][4] = {{1, 1, 1, 1},        {7, 13, 1, 3},      {5, 3, 1031, 2},
                               {130, 7, 33, 64},    {131, 40, 29, 99},  {257, 8, 4100, 1},
                               {3, 72, 2053, 4096}, {127, 64, 1283, 50}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    check_rungs(h, make_problem(h, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 2), 2);
}

TEST(test_ignored) {
  Harness *h = *state;
  Problem p = make_problem(h, 37, 24, 301, 9, 2);
  for (int64_t n = 0; n < p.rows; n++)
    if (n % 3 == 0 || n >= 27) p.targets[n] = IGNORE_INDEX; // the last chunks have no other
  check_rungs(h, p, 2);
}

// Logits that beat the target's by 20, by 88.5 (the largest exponential fp32 has), by hundreds; and a target
// that beats all others by 30.
TEST(test_leads) {
  Harness *h = *state;
  Problem p = make_problem(h, 6, 16, 515, 4, 0.1);
  const double leads[] = {20, 88.5, 300, 1000, -30};
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)(100 * n + 3);
    for (int64_t i = 0; i < p.rows; i++) p.x[n * p.hidden + i] = 0; // every token has an axis of its own
  }
  for (int64_t n = 0; n < 5; n++) {
    int64_t row = leads[n] > 0 ? 514 - n : p.targets[n];
    p.x[n * p.hidden + n] = 16;
    p.weight[row * p.hidden + n] = fabs(leads[n]) / 16;
  }
  check_rungs(h, p, 1);
}

TEST(test_refusals) {
  Harness *h = *state;
  if (h->dtype != DTYPE_BF16) return; // the CPU takes everything
  Problem p = make_problem(h, 3, 12, 5, 2, 1);
  assert_fails(h, "a hidden size of 12 is no multiple", ladder_run(h->backend, 5, call_of(h, &p)));
}

int main(void) {
  const char *const backends[] = {"cpu", "cpu-plain", "cuda"}; // the CUDA kernels take bf16 alone
  int failures = 0;
  for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) failures += run_on_backend(backends[i]);
  return failures;
}
