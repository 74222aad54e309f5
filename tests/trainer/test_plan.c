// A plan is what a run takes, to the byte; and what follows from plans: the chunk, the largest batch.
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
  } cases[] = {{ON_CPU, "--vocab 5003 --batch 8 --seq-len 128 --lce-memory 3", 2, 1023},
               {ON_CPU, "--lce-chunk 77", 77, 77},
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

// The budget holds for all that a run does, validation too, and with one token more in a chunk it would not.
static void check_budget(DeviceKind device, const char *job, bool masked, bool trains, int mebibytes) {
  Options o = options_on(device, "%s --lce-memory %d", job, mebibytes);
  o.masked = masked; // as data with a mask would have it
  if (!trains) o.trains = false, o.dtypes = (ParameterDtypes){.weight = o.dtype, .weights_only = true};
  plan_resolve_chunk(&o, device);
  size_t budget = (size_t)mebibytes << 20, held = plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
  if (held > budget)
    fail_msg("%s %s: chunks of %lld hold %zu bytes, which is more than %d MiB", device_name(device), job,
             (long long)o.pass.chunk, held, mebibytes);
  if (o.pass.chunk++ < o.batch * o.seq_len) {
    held = plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
    if (held <= budget)
      fail_msg("%s %s: chunks of %lld would hold %zu bytes, which is no more than %d MiB",
               device_name(device), job, (long long)o.pass.chunk, held, mebibytes);
  }
  options_free(&o);
}

TEST(test_budget) {
  static const char *const models[] = {
      LLAMA "--vocab 5003 --batch 8 --seq-len 128",
      LLAMA "--vocab 50257 --untie-word-embeddings --batch 16 --seq-len 128",
      GPT2 "--vocab 1031 --hidden-size 512 --num-attention-heads 8 --batch 64 --seq-len 50"};
  static const char *const layers[] = {"",
                                       "--label-smoothing 0.1",
                                       "--z-loss 0.001",
                                       "--lce-sample 1 --z-loss 0.1",
                                       "--metrics --z-loss 0.1",
                                       "--logit-softcap 30"};
  for (size_t m = 0; m < sizeof models / sizeof *models; m++)
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
      for (int ranks = 1; ranks <= 5; ranks++) {
        char job[1024];
        snprintf(job, sizeof job, "%s %s --plan --ranks %d%s", models[m], layers[i], ranks,
                 ranks > 1 ? " --zero 2 --vocab-parallel" : "");
        for (int mebibytes = 4; mebibytes <= 64; mebibytes *= 4)
          for (int kind = 0; kind < (i ? 4 : 8); kind++)
            check_budget(kind & 1 ? ON_CUDA : ON_CPU, job, kind & 2, !(kind & 4), mebibytes);
      }
}

TEST_MAIN(tests_run("plan", make_masked, remove_temp_dir))
