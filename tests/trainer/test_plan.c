// What the plan says is what a run takes, to the byte, whatever the model, the mode and the shapes; and what
// is derived from it: the chunk within a budget, the largest batch, the sentence when memory does not
// suffice.
#include "kernels/fail.h"
#include "kernels/text.h"
#include "tests/runs.h"
#include "trainer/machine.h"

#include <time.h>

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 301 --hidden-size 24 --intermediate-size 40 --num-layers 3 "                   \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 "
#define GPT2                                                                                                 \
  "--model gpt2-tiny --vocab 257 --hidden-size 20 --num-layers 3 --num-attention-heads 2 "                   \
  "--max-position-embeddings 50 "

#define QWEN                                                                                                 \
  "--model qwen3-0.6b --vocab 301 --hidden-size 24 --intermediate-size 40 --num-layers 3 "                   \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 12 "

// --- the plan and the run ----------------------------------------------------------------------------------

// A measured step, sample and validation, in the plan's order; then the ledger against the plan. Chunks
// that do not divide, that exceed the batch, gradient accumulation, padded validation batches.
static void check_plan(const char *model, const char *job, LceMode mode, Recompute recompute) {
  Run *run = run_open("%s %s %s --recompute %s --sample-tokens 3", model, job,
                      mode == LCE_FUSED ? "--fused-lce" : "--materialized-logits", recompute_name(recompute));
  static const int32_t prompt[] = {10};
  int64_t count;
  run_step(run, 0);
  free(trainer_sample(&run->trainer, prompt, 1, 1, &count));
  trainer_validate(&run->trainer, &run->data.loader, 2);
  assert_planned(run);
  const Ledger *ledger = &run->h->backend->memory.ledger;
  size_t sum = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) sum += ledger->at_peak[c];
  assert_int_equal(sum, ledger->peak);
  run_close(run);
}

TEST(test_plan_equals_run) {
  static const char *const models[] = {LLAMA, LLAMA "--untie-word-embeddings", GPT2, QWEN};
  static const char *const jobs[] = {"--batch 3 --seq-len 17",
                                     "--batch 1 --seq-len 1",
                                     "--batch 5 --seq-len 49 --total-batch 490",
                                     "--batch 3 --seq-len 17 --pack documents --end-of-text 10",
                                     "--batch 3 --seq-len 17 --label-smoothing 0.1 --z-loss 0.001",
                                     "--batch 3 --seq-len 17 --logit-softcap 5 --metrics"};
  for (size_t m = 0; m < sizeof models / sizeof *models; m++)
    for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++)
      for (int recompute = 0; recompute < RECOMPUTE_COUNT; recompute++)
        for (int mode = 0; mode < 2; mode++)
          check_plan(models[m], jobs[j], (LceMode)mode, (Recompute)recompute);
  check_plan(LLAMA, "--batch 5 --seq-len 49 --mlp-chunk 60", LCE_FUSED, RECOMPUTE_LAYER);
  check_plan(GPT2, "--batch 5 --seq-len 49 --mlp-chunk 7 --total-batch 490", LCE_MATERIALIZED,
             RECOMPUTE_LAYER);
}

TEST(test_ragged_chunks) {
  static const int chunks[] = {1, 7, 50, 51, 52, 128, 1000};
  for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
    char job[96];
    snprintf(job, sizeof job, "--batch 3 --seq-len 17 --lce-chunk %d", chunks[k]);
    check_plan(LLAMA, job, LCE_FUSED, RECOMPUTE_MLP);
    check_plan(GPT2, job, LCE_FUSED, RECOMPUTE_NONE);
  }
}

// Sampling pushes the tiles and their sums, and on a GPU lists of steps.
TEST(test_sampling) {
  static const char *const jobs[] = {"--batch 3 --seq-len 17 --lce-sample 40",
                                     "--batch 6 --seq-len 49 --lce-chunk 140 --lce-sample 100 --z-loss 0.1",
                                     "--batch 6 --seq-len 49 --total-batch 588 --lce-chunk 7 --lce-sample 8",
                                     "--batch 6 --seq-len 49 --lce-memory 1 --lce-sample 1e-30"};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    check_plan(LLAMA, jobs[j], LCE_FUSED, RECOMPUTE_LAYER);
    check_plan(GPT2, jobs[j], LCE_FUSED, RECOMPUTE_NONE);
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

// --- large models ------------------------------------------------------------------------------------------

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A model of 8 billion weights at 32,768 tokens is planned at once, on a machine that could never hold it.
// Its weights, gradients and moments are what the published count says; its materialized logits are N x V.
TEST(test_large_plan) {
  const size_t parameters = 8030261248, head = (size_t)128256 * 4096;
  double start = seconds();
  Options o = options_on(ON_CUDA, "--model llama-8b --seq-len 32768 --batch 1 --recompute layer");
  Ledger fused = plan_run(&o, ON_CUDA, LCE_FUSED), materialized = plan_run(&o, ON_CUDA, LCE_MATERIALIZED);
  double spent = seconds() - start;
  if (spent > 0.5) fail_msg("planning took %.3f s", spent);
  const size_t padding = 1 << 20; // of tensors to their alignment
  const size_t *at_peak = fused.at_peak;
  assert_in_range(at_peak[MEMORY_WEIGHTS], 2 * parameters, 2 * parameters + padding);
  assert_in_range(at_peak[MEMORY_MASTER_WEIGHTS], 4 * parameters, 4 * parameters + padding);
  assert_in_range(at_peak[MEMORY_MOMENTS], 8 * parameters, 8 * parameters + padding);
  assert_in_range(at_peak[MEMORY_GRADIENTS], 2 * parameters + 2 * head, 2 * parameters + 2 * head + padding);
  size_t logits = (size_t)32768 * 128256 * 2;
  assert_in_range(materialized.highest[MEMORY_HEAD], logits, logits + logits / 100);
  assert_true(fused.highest[MEMORY_HEAD] <
              materialized.highest[MEMORY_HEAD] / 7); // chunks of an eighth, 4096
  assert_true(fused.peak < materialized.peak);
  options_free(&o);
}

// --- what follows from plans -------------------------------------------------------------------------------

TEST(test_default_chunk) {
  assert_int_equal(lce_default_chunk(ON_CPU, 1), 128);
  assert_int_equal(lce_default_chunk(ON_CPU, 1025), 129);
  assert_int_equal(lce_default_chunk(ON_CPU, 32768), 4096);
  assert_int_equal(lce_default_chunk(ON_CPU, 1 << 20), 4096);
  assert_int_equal(lce_default_chunk(ON_CUDA, 1025), 1024);
}

// An eighth of the tokens; on a GPU never less than 1024, unless it is named.
TEST(test_chunk_option) {
  static const struct {
    DeviceKind device;
    const char *job;
    int64_t min, max;
  } cases[] = {{ON_CPU, "--vocab 5003 --batch 8 --seq-len 128 --lce-memory 3", 2, 1023},
               {ON_CPU, "--lce-chunk 77", 77, 77},
               {ON_CPU, "--batch 16 --seq-len 128", 256, 256},
               {ON_CUDA, "--batch 16 --seq-len 128", 1024, 1024},
               {ON_CUDA, "--batch 128 --seq-len 128", 2048, 2048},
               {ON_CUDA, "--batch 16 --seq-len 128 --lce-chunk 77", 77, 77}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Options o = options_on(cases[i].device, LLAMA "%s", cases[i].job);
    assert_in_range(o.lce_chunk, cases[i].min, cases[i].max);
    options_free(&o);
  }
}

// The budget holds for all that a run does, validation too, and with one token more in a chunk it would not.
static void check_budget(DeviceKind device, const char *job, bool masked, int mebibytes) {
  Options o = options_on(device, "%s --lce-memory %d", job, mebibytes);
  if (masked) { // as data with a mask would have it
    o.masked = true;
    plan_resolve_chunk(&o, device);
  }
  size_t budget = (size_t)mebibytes << 20, held = plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
  if (held > budget)
    fail_msg("%s %s: chunks of %lld hold %zu bytes, which is more than %d MiB", device_name(device), job,
             (long long)o.lce_chunk, held, mebibytes);
  if (o.lce_chunk++ < o.batch * o.seq_len) {
    held = plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
    if (held <= budget)
      fail_msg("%s %s: chunks of %lld would hold %zu bytes, which is no more than %d MiB",
               device_name(device), job, (long long)o.lce_chunk, held, mebibytes);
  }
  options_free(&o);
}

TEST(test_budget) {
  static const char *const models[] = {
      LLAMA "--vocab 5003 --batch 8 --seq-len 128",
      LLAMA "--vocab 50257 --untie-word-embeddings --batch 16 --seq-len 128",
      GPT2 "--vocab 1031 --hidden-size 512 --num-attention-heads 8 --batch 64 --seq-len 50"};
  enum { SPLIT = 4 }; // the first of these are known to a split head too
  static const char *const layers[] = {"",
                                       "--label-smoothing 0.1",
                                       "--z-loss 0.001",
                                       "--lce-sample 1 --z-loss 0.1",
                                       "--eval-only",
                                       "--metrics --z-loss 0.1",
                                       "--logit-softcap 30"};
  for (size_t m = 0; m < sizeof models / sizeof *models; m++)
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
      for (int ranks = 1; ranks <= (i < SPLIT ? 5 : 1); ranks++) {
        char job[1024];
        snprintf(job, sizeof job, "%s %s --plan --ranks %d%s", models[m], layers[i], ranks,
                 ranks > 1 ? " --zero 2 --vocab-parallel" : "");
        for (int mebibytes = 4; mebibytes <= 64; mebibytes *= 2)
          for (int kind = 0; kind < 4; kind++)
            check_budget(kind & 1 ? ON_CUDA : ON_CPU, job, kind & 2, mebibytes);
      }
}

static size_t peak_with_batch(const char *line, LceMode mode, int64_t batch) {
  Options o = options_on(ON_CPU, "%s --batch %lld", line, (long long)batch);
  size_t bytes = plan_run(&o, ON_CPU, mode).peak;
  options_free(&o);
  return bytes;
}

// The batch that is named fits when it is asked for, and one more does not: the default chunk and
// --lce-memory follow the batch, a chunk that was given stays.
TEST(test_largest_batch) {
  static const char *const lines[] = {LLAMA "--seq-len 128", LLAMA "--seq-len 128 --lce-chunk 100",
                                      LLAMA "--seq-len 128 --lce-memory 1"};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
    for (int mode = 0; mode < 2; mode++) {
      Options o = options_on(ON_CPU, "%s --total-batch 2048", lines[i]); // this job's; must not matter
      size_t one = peak_with_batch(lines[i], (LceMode)mode, 1);
      assert_int_equal(plan_largest_batch(&o, ON_CPU, (LceMode)mode, one - 1), 0);
      assert_int_equal(plan_largest_batch(&o, ON_CPU, (LceMode)mode, one), 1);
      for (size_t bytes = (size_t)3 << 20; bytes < (size_t)200 << 20; bytes = bytes * 5 / 2) {
        int64_t batch = plan_largest_batch(&o, ON_CPU, (LceMode)mode, bytes);
        assert_true(batch >= 1);
        assert_true(peak_with_batch(lines[i], (LceMode)mode, batch) <= bytes);
        assert_true(peak_with_batch(lines[i], (LceMode)mode, batch + 1) > bytes);
      }
      options_free(&o);
    }
}

// --- what offloading costs ---------------------------------------------------------------------------------

// Worked out by hand: L 4, H 64, I 128, V 512, N 64 on a GPU in bf16 with fp32 master weights and moments.
TEST(test_host_traffic) {
#define JOB                                                                                                  \
  "--model llama-tiny --untie-word-embeddings --vocab 512 --hidden-size 64 --intermediate-size 128 "         \
  "--num-layers 4 --num-attention-heads 2 --num-key-value-heads 2 --head-dim 32 --batch 2 --seq-len 32 "     \
  "--recompute layer "
  const size_t layer = 4 * 64 * 64 + 3 * 64 * 128, embedding = 512 * 64, inputs = 3 * 64 * 64;
  const size_t matrices = 4 * layer + embedding, all = matrices + embedding + 9 * 128; // norms, padded to 128
  const size_t shards = matrices + 9 * 256; // of both ranks, whose norms are padded to 256
  const struct {
    const char *options;
    HostTraffic bytes;
  } cases[] = {
      {"", {{0, 0}, {0, 0}}},
      // A layer's weights twice, but for the last two, which stay for the backward pass; a row a token.
      {"--offload weights", {{2 * (6 * layer + 64 * 64), 0}, {0, 2 * matrices}}},
      // Every gradient leaves once, and AdamW reads it; the norm reads the embedding's.
      {"--offload gradients", {{0, 2 * matrices}, {2 * (matrices + embedding), 0}}},
      {"--offload optimizer", {{0, 0}, {12 * all, 12 * all}}},
      {"--offload activations", {{2 * inputs, 2 * inputs}, {0, 0}}},
      {"--offload weights,gradients,optimizer,activations",
       {{2 * (6 * layer + 64 * 64 + inputs), 2 * (matrices + inputs)},
        {2 * (matrices + embedding) + 12 * all, 2 * matrices + 12 * all}}},
      // AdamW reads the weights themselves.
      {"--offload weights --no-master-weights",
       {{2 * (6 * layer + 64 * 64), 0}, {2 * matrices, 2 * matrices}}},
      // Two ranks sum their gradients into a shard each, in the host's memory: half of them leave.
      {"--offload gradients --zero 2 --ranks 2 --plan", {{0, shards}, {2 * shards, 0}}}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Options o = options_on(ON_CUDA, JOB "%s", cases[i].options);
    HostTraffic got = plan_host_traffic(&o, ON_CUDA);
    assert_memory_equal(&got, &cases[i].bytes, sizeof got);
    options_free(&o);
  }
#undef JOB
}

// --- when memory does not suffice --------------------------------------------------------------------------

// What plan_require says about `usable` bytes; "" when it allows the run.
static const char *requirement_on(DeviceKind device, const Options *o, size_t usable) {
  CATCH(plan_require(o, device, usable));
  return caught_sentence;
}

static const char *requirement(const Options *o, size_t usable) {
  return requirement_on(ON_CPU, o, usable);
}

static void assert_says(const char *text, const char *part) {
  if (!strstr(text, part)) fail_msg("\"%s\" should say \"%s\"", text, part);
}

// "FLAG needs 12.3 MiB", as a planned run with that flag needs.
static void assert_offers(const char *text, const Options *o, const char *flag, LceMode mode,
                          Recompute recompute) {
  Options other = *o;
  other.recompute = recompute;
  char offer[128];
  snprintf(offer, sizeof offer, "%s needs %s", flag, text_bytes(plan_run(&other, ON_CPU, mode).peak).text);
  assert_says(text, offer);
}

TEST(test_requirement) {
  Options o = options_on(ON_CPU, LLAMA "--seq-len 128 --batch 64 --materialized-logits");
  size_t need = plan_run(&o, ON_CPU, LCE_MATERIALIZED).peak;
  assert_string_equal(requirement(&o, need), "");
  assert_string_equal(requirement(&o, 0), ""); // unknown
  const char *text = requirement(&o, need - 1);
  char start[128], batch[64];
  snprintf(start, sizeof start, "this run needs %s and the device has %s to give (", text_bytes(need).text,
           text_bytes(need - 1).text);
  assert_int_equal(strncmp(text, start, strlen(start)), 0);
  assert_says(text, "activations ");
  assert_says(text, "lm_head, loss ");
  assert_offers(text, &o, "--fused-lce", LCE_FUSED, RECOMPUTE_NONE);
  assert_offers(text, &o, "--recompute elementwise", LCE_MATERIALIZED, RECOMPUTE_ELEMENTWISE);
  assert_says(text, "--batch 63 fits");
  assert_null(strstr(text, "\n"));

  // So little that only the strongest recomputation, or a few sequences, would do.
  o.recompute = RECOMPUTE_LAYER;
  size_t least = plan_run(&o, ON_CPU, LCE_MATERIALIZED).peak;
  o.recompute = RECOMPUTE_NONE;
  text = requirement(&o, least);
  assert_offers(text, &o, "--recompute layer", LCE_MATERIALIZED, RECOMPUTE_LAYER);
  assert_null(strstr(text, "--recompute mlp"));
  snprintf(batch, sizeof batch, "--batch %lld fits",
           (long long)plan_largest_batch(&o, ON_CPU, LCE_MATERIALIZED, least));
  assert_says(text, batch);

  assert_says(requirement(&o, 1 << 16), "no smaller batch fits");
  options_free(&o);
}

// The peak of a job with `change` added to its command line, which must be accepted.
static size_t peak_with(const char *job, const char *change, DeviceKind device) {
  char kept[1024];
  snprintf(kept, sizeof kept, "%s", job);
  char *materialized = strstr(kept, "--materialized-logits");
  if (strstr(change, "--fused-lce") && materialized)
    memset(materialized, ' ', strlen("--materialized-logits"));
  Options o = options_on(device, "%s %s", kept, change);
  size_t peak = plan_run(&o, device, o.mode).peak;
  options_free(&o);
  return peak;
}

// Everything that the sentence offers is a command line that is accepted and fits. Returns how many changes it offers.
static int follow_advice(const char *job, DeviceKind device, size_t usable) {
  char advice[1024];
  Options o = options_on(device, "%s", job);
  const char *text = requirement_on(device, &o, usable);
  options_free(&o);
  snprintf(advice, sizeof advice, "%s", strstr(text, "); ") + 3);
  char *last = strstr(advice, "no smaller batch fits, and ");
  if (last) { // then it offers nothing, and says what the least is
    assert_says(text, ": take a smaller model, or a device with more memory");
    char *needs = strstr(advice, " needs "), *flags = strstr(advice, "--");
    *needs = 0;
    size_t peak = peak_with(job, flags && flags < needs ? flags : "", device);
    Text bytes = text_bytes(peak);
    assert_true(peak > usable);
    assert_int_equal(strncmp(needs + strlen(" needs "), bytes.text, strlen(bytes.text)), 0);
    return 0;
  }
  int count = 0;
  for (char *change = advice, *next; change; change = next, count++) {
    next = strstr(change, ", "); // a list of --offload has commas of its own
    if (next) *next = 0, next += 2;
    char *end = strstr(change, " needs "), *fits = strstr(change, " fits");
    assert_true(end || fits);
    *(end ? end : fits) = 0;
    size_t peak = peak_with(job, change, device);
    if (peak > usable) fail_msg("%s: \"%s\" needs %zu bytes of %zu", job, change, peak, usable);
  }
  return count;
}

TEST(test_advice) {
  static const char *const jobs[] = {LLAMA "--batch 64 --seq-len 128",
                                     LLAMA "--batch 64 --seq-len 128 --materialized-logits",
                                     LLAMA "--batch 60 --seq-len 128 --total-batch 92160",
                                     LLAMA "--batch 1 --seq-len 1 --recompute layer",
                                     LLAMA "--batch 8 --seq-len 128 --recompute layer --materialized-logits",
                                     GPT2 "--batch 32 --seq-len 50 --lce-chunk 1000"};
  int offers = 0;
  for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
    for (int device = 0; device < 2; device++) {
      DeviceKind on = device ? ON_CUDA : ON_CPU;
      size_t need = peak_with(jobs[i], "", on);
      for (size_t usable = need - 1; usable > 1000; usable = usable * 3 / 4) {
        offers += follow_advice(jobs[i], on, usable);
        assert_int_equal(strstr(caught_sentence, "--moment-dtype") && on == ON_CPU, 0);
      }
    }
  assert_true(offers > 100);
  Options o = options_on(ON_CPU, LLAMA "--batch 1 --seq-len 1 --recompute layer");
  const char *text = requirement(&o, 1000); // nothing is left to change
  assert_null(strstr(text, "--seq-len"));
  assert_null(strstr(text, "--recompute"));
  options_free(&o);
}

int main(void) {
  return tests_run("plan", NULL, NULL);
}
