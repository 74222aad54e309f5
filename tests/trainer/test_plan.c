// A plan equals a run's memory byte for byte; also the default chunk and a step's time, which plans decide.
#include "kernels/cost.h"
#include "tests/process.h"
#include "tests/runs.h"

#include <time.h>

#define SIZES                                                                                                \
  "--vocab 301 --hidden-size 24 --intermediate-size 40 --num-layers 3 --num-attention-heads 3 "              \
  "--num-key-value-heads 1 "
#define LLAMA "--model llama-tiny " SIZES "--head-dim 8 "
#define QWEN  "--model qwen3-0.6b " SIZES "--head-dim 12 "
#define OLMO  "--model olmo2-1b " SIZES "--head-dim 12 "
#define GPT2                                                                                                 \
  "--model gpt2-tiny --vocab 257 --hidden-size 20 --num-layers 3 --num-attention-heads 2 "                   \
  "--max-position-embeddings 50 "

static void check_plan(const char *model, const char *job, const char *more) {
  Run *run = run_open("%s --data %s %s %s --sample-tokens 3", model,
                      strstr(more, "masked") ? temp_path("masked.bin") : "Makefile", job,
                      strstr(more, "masked") ? "" : more);
  static const int32_t prompt[] = {10};
  int64_t count;
  for (int step = 0; step < (run->options.masked ? 10 : 1); step++) run_step(run, step);
  free(trainer_sample(&run->trainer, prompt, 1, 1, &count));
  trainer_validate(&run->trainer, &run->data.loader, run->options.masked ? 0 : 2);
  trainer_gradient_pass(&run->trainer); // what --compare-modes measures, after a padded batch
  assert_planned(run);
  const Ledger *ledger = &run->h->backend->memory.ledger;
  size_t sum = 0, head = ledger->highest[MEMORY_HEAD];
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) sum += ledger->at_peak[c];
  assert_int_equal(sum, ledger->peak);
  // A run of the same shape that counts every target does not need more.
  run->options.masked = false;
  assert_in_range(plan_run(&run->options, ON_CPU, run->options.pass.mode).highest[MEMORY_HEAD], 1, head);
  run_close(run);
}

TEST(test_plan_equals_run) {
  static const char *const models[] = {LLAMA, LLAMA "--untie-word-embeddings", GPT2, QWEN, OLMO};
  static const char *const jobs[] = {"--batch 3 --seq-len 17",
                                     "--batch 1 --seq-len 1",
                                     "--batch 5 --seq-len 29 --total-batch 290",
                                     "--batch 3 --seq-len 17 --pack documents --end-of-text 10",
                                     "--batch 3 --seq-len 17 --label-smoothing 0.1 --z-loss 0.001",
                                     "--batch 3 --seq-len 17 --logit-softcap 5 --metrics"};
  static const char *const recomputed[RECOMPUTE_COUNT] = {"none", "elementwise", "mlp", "layer"};
  for (size_t m = 0; m < sizeof models / sizeof *models; m++)
    for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++)
      for (int way = 0; way < 2 * RECOMPUTE_COUNT; way++) {
        char more[64];
        snprintf(more, sizeof more, "--recompute %s %s", recomputed[way / 2],
                 way % 2 ? "--fused-lce" : "--materialized-logits");
        check_plan(models[m], jobs[j], more);
      }
}

// Chunks of every size; sampling, which pushes the tiles and their sums; targets that do not count.
TEST(test_plan_equals_other_runs) {
  static const struct {
    const char *job, *more;
  } cases[] = {
      {"--batch 5 --seq-len 49 --mlp-chunk 60", "--recompute layer"},
      {"--batch 5 --seq-len 49 --mlp-chunk 7 --total-batch 490", "--recompute layer --materialized-logits"},
      {"--batch 3 --seq-len 17 --logit-softcap 5 --label-smoothing 0.1", "--materialized-logits"},
      {"--batch 3 --seq-len 17", "--lce-chunk 1 --recompute mlp"},
      {"--batch 3 --seq-len 17", "--lce-chunk 7 --recompute mlp"},
      {"--batch 3 --seq-len 17", "--lce-chunk 50"},
      {"--batch 3 --seq-len 17", "--lce-chunk 51"},
      {"--batch 3 --seq-len 17", "--lce-chunk 52"},
      {"--batch 3 --seq-len 17", "--lce-chunk 128"},
      {"--batch 3 --seq-len 17", "--lce-chunk 1000"},
      {"--batch 6 --seq-len 49 --total-batch 588 --lce-chunk 7 --lce-sample 8", ""},
      {"--batch 3 --seq-len 17 --lce-chunk 7", "masked"},
      {"--batch 3 --seq-len 17 --recompute layer", "masked"},
      {"--batch 3 --seq-len 17 --lce-chunk 51", "masked"},
      {"--batch 3 --seq-len 17 --materialized-logits", "masked"},
      {"--batch 3 --seq-len 17 --lce-sample 4 --lce-chunk 7", "masked"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    check_plan(LLAMA, cases[i].job, cases[i].more);
    check_plan(GPT2, cases[i].job, cases[i].more);
  }
}

// One trainer alternates between both modes: each has the stack that its plan says.
TEST(test_switching_modes) {
  Run *run = run_open(LLAMA "--batch 3 --seq-len 17 --lce-chunk 5");
  Memory *memory = &run->h->backend->memory;
  for (int i = 0; i < 4; i++) {
    LceMode mode = i % 2 ? LCE_FUSED : LCE_MATERIALIZED;
    plan_set_mode(&run->trainer, mode);
    ledger_reset_peak(&memory->ledger);
    trainer_gradient_pass(&run->trainer);
    Ledger plan = plan_run(&run->options, ON_CPU, mode);
    assert_int_equal(memory->stack_capacity, plan.stack_peak);
    assert_int_equal(memory->ledger.peak, plan.peak);
  }
  run_close(run);
}

// In a step's last pass alone every rank gathers the gradients of all ranks' embeddings, [R N, H].
TEST(test_last_micro_batch_of_many_ranks) {
  size_t peaks[2];
  for (int micro_batches = 2; micro_batches < 4; micro_batches++) {
    Options o =
        options_on(ON_CPU,
                   "--model llama-tiny --tie-word-embeddings --num-layers 1 --vocab 300 --lce-chunk 16 "
                   "--batch 4 --seq-len 64 --plan --ranks 64 --total-batch %d",
                   micro_batches * 64 * 4 * 64);
    peaks[micro_batches - 2] = plan_run(&o, ON_CPU, LCE_FUSED).peak;
    options_free(&o);
  }
  assert_int_equal(peaks[0], peaks[1]);
}

// 8 billion weights at 32,768 tokens: the published count of weights. test_cli.py has its logits.
TEST(test_large_plan) {
  const size_t parameters = 8030261248, head = (size_t)128256 * 4096;
  clock_t start = clock();
  Options o = options_on(ON_CUDA, "--model llama-8b --seq-len 32768 --batch 1 --recompute layer");
  Ledger fused = plan_run(&o, ON_CUDA, LCE_FUSED);
  double spent = (double)(clock() - start) / CLOCKS_PER_SEC;
  if (spent > 0.5) fail_msg("planning took %.3f s", spent);
  const size_t padding = 1 << 20; // of tensors to their alignment
  const size_t *at_peak = fused.at_peak;
  assert_in_range(at_peak[MEMORY_WEIGHTS], 2 * parameters, 2 * parameters + padding);
  assert_in_range(at_peak[MEMORY_MASTER_WEIGHTS], 4 * parameters, 4 * parameters + padding);
  assert_in_range(at_peak[MEMORY_MOMENTS], 8 * parameters, 8 * parameters + padding);
  assert_in_range(at_peak[MEMORY_GRADIENTS], 2 * parameters + 2 * head, 2 * parameters + 2 * head + padding);
  options_free(&o);
}

// A ninth of the tokens within 112 and 4096; on a GPU an eighth, and never less than 1024 unless named.
TEST(test_chunk_option) {
  static const struct {
    DeviceKind device;
    const char *job;
    int64_t min, max;
  } cases[] = {{ON_CPU, "--lce-chunk 77", 77, 77},
               {ON_CPU, "--batch 1 --seq-len 1", 112, 112},
               {ON_CPU, "--batch 1 --seq-len 1025", 114, 114},
               {ON_CPU, "--batch 16 --seq-len 128", 228, 228},
               {ON_CPU, "--batch 1024 --seq-len 1024", 4096, 4096},
               {ON_CUDA, "--batch 1 --seq-len 1025", 1024, 1024},
               {ON_CUDA, "--batch 128 --seq-len 128", 2048, 2048},
               {ON_CUDA, "--batch 16 --seq-len 128 --lce-chunk 77", 77, 77}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Options o = options_on(cases[i].device, LLAMA "%s", cases[i].job);
    assert_in_range(o.pass.chunk, cases[i].min, cases[i].max);
    options_free(&o);
  }
}

// A sample's cache has places for the sample, not for the longest sequence.
TEST(test_samples_of_long_sequences) {
  size_t peaks[2];
  for (int with = 0; with < 2; with++) {
    Options o =
        options_on(ON_CUDA,
                   "--model llama-8b --seq-len 131072 --batch 1 --recompute layer --mlp-chunk 4096 --plan "
                   "--val-fraction 0 --offload weights,gradients,optimizer,activations --sample-every %d",
                   with);
    peaks[with] = plan_run(&o, ON_CUDA, LCE_FUSED).peak;
    options_free(&o);
  }
  assert_int_equal(peaks[0], peaks[1]);
}

// --save gathers a split head, which is one bucket, in pieces no larger than other buckets.
TEST(test_saving_a_split_head) {
  Options o = options_on(ON_CPU, LLAMA "--vocab 40000 --hidden-size 1024 --untie-word-embeddings --batch 1 "
                                       "--seq-len 16 --sample-every 0 --val-fraction 0 --save none --plan "
                                       "--ranks 3 --zero 1 --vocab-parallel");
  assert_in_range(plan_run(&o, ON_CPU, LCE_FUSED).highest[MEMORY_WORKSPACE], BUCKET_BYTES - 4096,
                  BUCKET_BYTES);
  o.save = NULL;
  assert_true(plan_run(&o, ON_CPU, LCE_FUSED).highest[MEMORY_WORKSPACE] < BUCKET_BYTES / 4);
  options_free(&o);
}

// Measured on one H100 (tools/BENCHMARKS.md). Predictions choose settings, so their order matters most: in
// each group a later row is faster by at least 1%.
#define LEAN "--seq-len 1024 --total-batch 131072 --moment-dtype bf16 --no-master-weights "
TEST(test_predicted_speed) {
  static const struct {
    int group;
    const char *job;
    double measured; // tokens a second
  } rows[] = {
      {1, "--model llama-1b --seq-len 4096 --materialized-logits", 68100},
      {1, "--model llama-1b --seq-len 4096", 68000},
      {2, "--model llama-1b --seq-len 4096 --fp8", 84600},
      {3, "--model gpt2-124m --batch 64 --vocab 128256", 453800},
      {3, "--model gpt2-124m --batch 64 --vocab 128256 --fp8", 497800},
      {3, "--model gpt2-124m --batch 64", 596500},
      {4, "--model gpt2-1558m --batch 16", 51800},
      {5, "--model llama-8b --batch 8 --recompute layer " LEAN, 11500},
      {5, "--model llama-8b --batch 8 --recompute mlp " LEAN, 12200},
      {5, "--model llama-8b --recompute elementwise --recompute-layers 3 --lce-chunk 4096 " LEAN, 13600},
      {5, "--model llama-8b --fp8 --lce-chunk 4096 " LEAN, 18800},
      {6, "--model llama-1b --seq-len 4096 --batch 1", 57100},
      {7, "--model llama-1b --seq-len 4096 --batch 8 --lce-chunk 4096", 71200}};
  double before = 0;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    Options o = options_on(ON_CUDA, "%s --sample-every 0 --val-fraction 0 --plan", rows[i].job);
    double rate = (double)o.total_batch / plan_run_timed(&o, ON_CUDA, o.pass.mode).seconds;
    if (fabs(rate / rows[i].measured - 1) > 0.04)
      fail_msg("%s: predicted %.0f, measured %.0f tokens/s", rows[i].job, rate, rows[i].measured);
    if (i && rows[i].group == rows[i - 1].group && rate < before)
      fail_msg("%s: predicted to be slower than the row above", rows[i].job);
    before = rate;
    options_free(&o);
  }
}

// The ladder that --fit climbs down: from rung to rung less memory and more time.
TEST(test_recomputation_ladder) {
  static const char *const levels[] = {"elementwise", "mlp", "layer"};
  TimedPlan above = {0};
  for (int rung = 0; rung <= 12; rung++) {
    Options o = options_on(ON_CUDA, "--model llama-1b --num-layers 4 --seq-len 2048 --sample-every 0 --plan");
    if (rung) {
      o.pass.recompute = (Recompute)((rung + 3) / 4);
      o.pass.recompute_layers = rung % 4;
      assert_string_equal(levels[o.pass.recompute - 1], options_words(&o, "recompute").text);
    }
    TimedPlan plan = plan_run_timed(&o, ON_CUDA, LCE_FUSED);
    size_t most = above.ledger.peak + (rung == 12 ? 64 << 20 : 0); // the last frees nothing at the peak
    if (rung && !(plan.seconds > above.seconds && plan.ledger.peak < most))
      fail_msg("rung %d: %g s in %zu bytes after %g s in %zu", rung, plan.seconds, plan.ledger.peak,
               above.seconds, above.ledger.peak);
    above = plan;
    options_free(&o);
  }
}

// FP8 without recomputation keeps codes in place of what the matmuls read: a seventh less in all.
TEST(test_fp8_keeps_codes) {
  double bytes[2];
  for (int fp8 = 0; fp8 < 2; fp8++) {
    Options o = options_on(ON_CUDA, "--model gpt2-124m --batch 8 --sample-every 0 --val-fraction 0 --plan %s",
                           fp8 ? "--fp8 layers" : "");
    bytes[fp8] = (double)plan_run(&o, ON_CUDA, LCE_FUSED).highest[MEMORY_ACTIVATIONS];
    options_free(&o);
  }
  assert_true(bytes[1] < 0.87 * bytes[0]);
}

// A copy that nothing waits for costs nothing; one that is longer than what it overlaps costs the rest.
TEST(test_overlap) {
  Options o = options_on(
      ON_CUDA, "--model llama-1b --recompute layer --seq-len 4096 --batch 16 --sample-every 0 --plan");
  double alone = plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds;
  o.dtypes.offload = OFFLOAD_ACTIVATIONS;
  assert_true(plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds < 1.02 * alone);
  o.dtypes.offload = OFFLOAD_OPTIMIZER;
  double update_alone = plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds;
  o.dtypes.offload |= OFFLOAD_GRADIENTS; // beside the next forward pass
  assert_true(plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds < 0.95 * update_alone);
  options_free(&o);
  o = options_on(ON_CUDA,
                 "--model llama-1b --recompute layer --seq-len 64 --batch 1 --sample-every 0 --plan");
  alone = plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds;
  o.dtypes.offload = OFFLOAD_WEIGHTS | OFFLOAD_GRADIENTS;
  assert_true(plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds > 2 * alone);
  o.dtypes.offload = OFFLOAD_OPTIMIZER;
  update_alone = plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds;
  o.dtypes.offload |= OFFLOAD_GRADIENTS; // the forward pass hides next to nothing of it
  assert_true(plan_run_timed(&o, ON_CUDA, LCE_FUSED).seconds > 1.2 * update_alone);
  options_free(&o);
}

static void assert_seconds(const char *what, double got, double want) {
  if (!(fabs(got / want - 1) < 1e-6)) fail_msg("%s takes %g s, not %g", what, got, want);
}

// The seconds of an operation, on a card of round numbers that starts at once, by 4 ranks.
TEST(test_seconds_of_operations) {
  const Card card = {.bf16 = 1e12, .codes = 2e12, .memory = 1e9, .host = 1e8, .links = 1e7};
  Backend *b = plan_backend_create(ON_CUDA, DTYPE_BF16);
  plan_join_ranks(b, 4);
  Tensor x = memory_reserve_1d(&b->memory, "x", MEMORY_TABLES, DTYPE_F32, 250000), there = x; // 1e6 bytes
  there.data = memory_reserve_host(&b->memory, "y", MEMORY_TABLES, 1000000);
  const Collective sum = {.out = x, .x = x};
  const Update here = {.grad = x, .weight = x, .m = x}, away = {.grad = x, .weight = x, .m = there};
  const LceSampledGradients sampled = {.exps = tensor_2d(x.data, DTYPE_BF16, 10, 1000),
                                       .weight = tensor_2d(x.data, DTYPE_BF16, 1000, 100)};
  AttentionForward attend = {.shape = {.batch = 1, .seq_len = 1000, .num_heads = 1, .head_dim = 64}};
#define SECONDS(op, arguments) cost_seconds(&card, b, OP_##op, &(arguments))
  assert_seconds("all_reduce", SECONDS(all_reduce, sum), 2 * 0.75 * 0.1);
  assert_seconds("reduce_scatter", SECONDS(reduce_scatter, sum), 0.75 * 0.1);
  assert_seconds("adamw", SECONDS(adamw, here), 5e-3); // it reads all three and writes two
  assert_seconds("adamw on the host", SECONDS(adamw, away), 1e-2);
  assert_seconds("lce_sampled_gradients", SECONDS(lce_sampled_gradients, sampled), 0.12 * 2e6 / 1e12);
  double narrow = SECONDS(attention_forward, attend);
  attend.shape.head_dim = 128; // twice the flops; its higher rate needs longer sequences
  assert_in_range((int64_t)(100 * SECONDS(attention_forward, attend) / narrow), 201, 250);
#undef SECONDS
  backend_destroy(b);
}

// Copies of one direction follow each other; computing waits for those that it joins.
TEST(test_streams_of_a_plan) {
  const Card card = {.bf16 = 1e12, .codes = 2e12, .memory = 1e9, .host = 1e8, .links = 1e7};
  Backend *b = plan_backend_create(ON_CUDA, DTYPE_BF16);
  plan_join_ranks(b, 4);
  plan_set_card(b, &card);
  Tensor x = memory_reserve_1d(&b->memory, "x", MEMORY_TABLES, DTYPE_F32, 250000),
         there = x; // a copy: 0.01 s
  there.data = memory_reserve_host(&b->memory, "y", MEMORY_TABLES, 1000000);
  Copy in = {.out = x, .x = there};
  const Copy out = {.out = there, .x = x};
  copy_in(b, in);
  copies_join(b, 1, 0);
  assert_true(plan_seconds(b) == 0); // the last copy may be under way
  copy_in(b, in);
  copies_join(b, 1, 0);
  assert_seconds("the first of two copies", plan_seconds(b), 0.01);
  copies_join(b, 0, 0);
  copy_out(b, out);
  copy_in(b, in);
  copies_join(b, 0, ASYNC_EVENTS - 1);
  assert_seconds("a copy beside another", plan_seconds(b), 0.03);
  copy_out(b, out);
  in.after_out = true;
  copy_in(b, in);
  copies_join(b, 0, ASYNC_EVENTS - 1);
  assert_seconds("a copy after another", plan_seconds(b), 0.05);
  Collective sum = {.out = x, .x = x, .async = true}; // 0.15 s
  all_reduce(b, sum);
  assert_seconds("a collective to be joined", plan_seconds(b), 0.05);
  collectives_join(b, 0);
  sum.async = false;
  all_reduce(b, sum);
  assert_seconds("two collectives", plan_seconds(b), 0.35);
  copy_out(b, out);
  copy_out(b, out);
  in.behind = 1;
  copy_in(b, in);
  copies_join(b, 0, ASYNC_EVENTS - 1);
  assert_seconds("a copy after the first of two", plan_seconds(b), 0.37);
  copy_in(b, in);
  Update update = {.weight = x, .m = x, .v = x, .grad = x, .grad_scale = tensor_rows(x, 0, 1), .step = 1};
  update.after_copies = true; // 0.007 s
  adamw(b, update);
  assert_seconds("an update to be joined", plan_seconds(b), 0.37);
  copies_join(b, 0, 0);
  assert_seconds("an update after a copy in", plan_seconds(b), 0.387);
  backend_destroy(b);
}

// A plan of several ranks needs a host for all of them, 8 at most; a CPU's tensors are there, too.
TEST(test_host_of_planned_ranks) {
  static const int ranks[][2] = {{1, 1}, {3, 3}, {64, 8}};
  for (int i = 0; i < 3; i++) {
    Options o = options_on(ON_CUDA, "--plan --device cuda --offload optimizer --ranks %d", ranks[i][0]);
    Ledger plan = plan_run(&o, ON_CUDA, LCE_FUSED);
    size_t one = ledger_host_bytes(&plan);
    assert_true(one && plan_host_bytes(&plan, &o, ON_CUDA) == (size_t)ranks[i][1] * one);
    assert_true(plan_host_bytes(&plan, &o, ON_CPU) == (size_t)ranks[i][1] * (one + plan.peak));
    options_free(&o);
  }
}

// --fit must choose alike on all ranks: for rank 0's card, and without what one of them lacks.
static void agree(Harness *h) {
  Backend *b = h->backend;
  const char *name = b->rank ? "NVIDIA H100 80GB HBM3" : "NVIDIA H200";
  snprintf(b->description, sizeof b->description, "%s", name);
  Options o = {.card = card_of(name), .no_codes = b->rank == 1};
  machine_agreed_bytes(b, &o);
  if (o.card != card_of("NVIDIA H200") || o.no_codes != (b->ranks > 1) || o.no_sampling)
    fail("rank %d of %d does not choose as the others do", b->rank, b->ranks);
}

TEST(test_ranks_agree_on_a_card) {
  check_on_ranks();
}

int main(int argc, char **argv) {
  return ran_as_rank(argc, argv, agree) ? 0 : tests_run("plan", make_masked, remove_temp_dir);
}
