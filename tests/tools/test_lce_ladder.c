// Every rung of the ladder against float64, on shapes and chunks that nothing divides; on a GPU in bf16.
#include "tests/loss_problem.h"
#include "tools/ladder/ladder.h"

// Every rung on the problem; `size` is that of the logits, whose fp32 error the loss inherits.
static void check_rungs(Harness *h, ReferenceLoss *r, int64_t chunk, double size) {
  r->scale = 1.0 / (double)r->rows;
  reference_gradients(h, r);
  for (int rung = 1; rung <= RUNGS; rung++) {
    if (!ladder_has(h->backend, rung) || (rung == 6 && r->hidden % 8)) continue; // test_refusals
    MemoryMark mark = memory_mark(&h->backend->memory);
    LinearCrossEntropy call = loss_call(h, r, LCE_FUSED, chunk);
    reference_loss(r); // of the values as the tensors have them
    MemoryMark tensors = memory_mark(&h->backend->memory);
    ladder_run(h->backend, rung, call);
    assert_int_equal(memory_mark(&h->backend->memory), tensors);
    const char *name = ladder_names[rung - 1];
    double terms = (double)(r->hidden + r->vocab), summed = (double)(r->hidden + r->rows);
    check_values(h, name, call.loss, r->loss, with_size(within(8, terms), size));
    check_values(h, name, call.dx, r->dx, with_size(within_stored(h, 8, terms), r->scale));
    check_values(h, name, call.dweight, r->dweight, with_size(within_stored(h, 8, summed), r->scale));
    memory_pop_to(&h->backend->memory, mark);
  }
}

HARNESS_TEST(test_shapes) {
  const int64_t shapes[][4] = {{1, 1, 1, 1},        {7, 13, 1, 3},       {5, 3, 1031, 2},
                               {130, 7, 33, 64},    {131, 40, 29, 99},   {33, 8, 4100, 1},
                               {3, 72, 2053, 4096}, {127, 64, 1283, 50}, {300, 200, 500, 300}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    ReferenceLoss p = loss_problem(h, shapes[i][0], shapes[i][1], shapes[i][2], 2);
    check_rungs(h, &p, shapes[i][3], 2);
  }
}

// Rung 0: Z = X W^T, dX = Z W, dW = Z^T X.
HARNESS_TEST(test_matmuls) {
  ReferenceLoss p = loss_problem(h, 37, 24, 301, 2);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 9);
  ladder_run(h->backend, 0, call);
  double *z = host_values(h, p.rows * p.vocab), *dx = host_values(h, p.rows * p.hidden),
         *dweight = host_values(h, p.vocab * p.hidden);
  reference_linear(z, p.x, p.weight, false, NULL, NULL, p.rows, p.hidden, p.vocab);
  reference_linear(dx, z, p.weight, true, NULL, NULL, p.rows, p.vocab, p.hidden);
  for (int64_t n = 0; n < p.rows; n++)
    for (int64_t k = 0; k < p.vocab * p.hidden; k++)
      dweight[k] += z[n * p.vocab + k / p.hidden] * p.x[n * p.hidden + k % p.hidden];
  check_values(h, "dx", call.dx, dx, with_size(within_stored(h, 8, 301), 30));
  check_values(h, "dweight", call.dweight, dweight, with_size(within_stored(h, 8, 37), 30));
}

HARNESS_TEST(test_ignored) {
  ReferenceLoss p = loss_problem(h, 37, 24, 301, 2);
  for (int64_t n = 0; n < p.rows; n++)
    if (n % 3 == 0 || n >= 27) p.targets[n] = IGNORE_INDEX; // the last chunks have no other
  check_rungs(h, &p, 9, 2);
}

// Logits that beat the target's by 20, 88.5 (fp32's largest exponential), hundreds; a target that beats all.
HARNESS_TEST(test_leads) {
  const double leads[] = {20, 88.5, 300, 1000, 0, 0};
  ReferenceLoss p = loss_problem(h, 6, 16, 515, 0.1);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)(100 * n + 3);
    loss_problem_lead(&p, n, 514 - n, leads[n]);
  }
  p.weight[p.targets[5] * p.hidden + 5] += 30;
  check_rungs(h, &p, 4, 1);
}

static void sampled_rung(Backend *backend, LinearCrossEntropy call) {
  ladder_run(backend, 4, call);
}

// Rung 4 with tiles of E dropped: its gradients are right on average, and its losses to the bit.
HARNESS_TEST(test_sampling) {
  if (h->backend->device != ON_CPU) return;
  ReferenceLoss p = loss_problem(h, 140, 6, 1000, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy exact = loss_call(h, &p, LCE_FUSED, 70), sampled = loss_call(h, &p, LCE_FUSED, 70);
  sampled_rung(h->backend, exact);
  sampled.sampling.full_mass = 30;
  check_unbiased(h, sampled_rung, sampled, &exact, 256);
}

HARNESS_TEST(test_refusals) {
  ReferenceLoss p = loss_problem(h, 3, 12, 5, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 2);
  if (h->backend->device == ON_CUDA)
    assert_fails(h, "rung 5 is for the CPU alone", ladder_run(h->backend, 5, call));
  if (ladder_has(h->backend, 6))
    assert_fails(h, "a hidden size of 12 is no multiple", ladder_run(h->backend, 6, call));
  else
    assert_fails(h, "rung 6 is for Hopper GPUs alone", ladder_run(h->backend, 6, call));
}

// Rung 6 takes bf16 alone.
TEST_MAIN(run_on_backend("cpu") + run_on_backend("cpu-plain") + run_on_backend("cuda"))
