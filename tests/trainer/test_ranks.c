// Training with several ranks: whole runs of ./train under mpirun (or, with LCE_GPU_RANKS=N, under
// tools/launch on N GPUs) do what one rank does with the same tokens, the same way every time; and what
// launchers say is understood.
#include "base/random.h"
#include "base/system.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/weights.h"
#include "tests/data_files.h"
#include "tests/process.h"
#include "tests/runs.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// 24 micro-batches a step: 24, 12, 8, 6 or 3 for 1, 2, 3, 4 or 8 ranks.
#define STEPS 6
#define JOB                                                                                                  \
  "--dtype fp32 --num-layers 2 --seq-len 16 --batch 2 --total-batch 768 --steps 6 --lr 0.01 --warmup 2 "     \
  "--epsilon 1e-5 --eval-every 3 --eval-batches 5 --sample-every 4 --sample-tokens 3 "
#define ANY_LLAMA                                                                                            \
  JOB "--model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-attention-heads 2 "      \
      "--num-key-value-heads 1 "
#define LLAMA ANY_LLAMA "--untie-word-embeddings "
#define TIED  ANY_LLAMA "--tie-word-embeddings "
#define GPT2  JOB "--model gpt2-tiny --vocab 300 --hidden-size 24 --num-attention-heads 2 "
#define QWEN                                                                                                 \
  JOB "--model qwen3-0.6b --vocab 300 --hidden-size 16 --intermediate-size 24 --num-attention-heads 4 "      \
      "--num-key-value-heads 2 --head-dim 6 "
#define TEXT "--data tests/trainer/test_resume.c "

static const char *device(void) {
  return getenv("LCE_GPU_RANKS") ? "--device cuda" : "--device cpu";
}

static int max_ranks(void) {
  const char *gpus = getenv("LCE_GPU_RANKS");
  return gpus ? atoi(gpus) : 4;
}

// GPUs take seconds to start: two of them, and all.
static bool worthwhile(int ranks) {
  if (24 % ranks) return false;
  return !getenv("LCE_GPU_RANKS") || ranks == 2 || ranks == max_ranks();
}

// For values that differ by rounding alone; GPUs sum in an order of their own.
static double tolerance(void) {
  return getenv("LCE_GPU_RANKS") ? 2e-4 : 2e-5;
}

#define NEEDS_LAUNCHER()                                                                                     \
  do {                                                                                                       \
    if (!can_launch()) skip();                                                                               \
  } while (0)

static void succeeds(Output output) {
  if (output.status) fail_msg("exit status %d: %s%s", output.status, output.out, output.err);
  assert_null(strchr(output.out, '\033')); // standard output is no terminal
  output_free(&output);
}

// A run of `ranks` ranks with its checkpoint in the folder `name` and its log in name.jsonl; 0: without a
// launcher.
static void run_job(int ranks, const char *name, const char *options) {
  char log[64];
  snprintf(log, sizeof log, "%s.jsonl", name);
  if (ranks)
    succeeds(
        train_ranks(ranks, "%s %s --save %s --log %s", device(), options, temp_path(name), temp_path(log)));
  else
    succeeds(train("%s %s --save %s --log %s", device(), options, temp_path(name), temp_path(log)));
}

// --- comparing ---------------------------------------------------------------------------------------------

static const char *checkpoint_of(const char *name, int step) {
  static char path[2][1024];
  static int turn;
  turn = !turn;
  snprintf(path[turn], sizeof path[turn], "%s/step-%06d", temp_path(name), step);
  return path[turn];
}

// The largest difference between two sets of tensors, over the largest number in each.
static double difference(const char *a, const char *b, const char *stem) {
  TensorSet x = tensor_set_open(a, stem), y = tensor_set_open(b, stem);
  double worst = 0;
  assert_true(x.count == 1 && y.count == 1 && x.files[0].header.count > 0);
  assert_int_equal(x.files[0].header.count, y.files[0].header.count);
  for (int64_t i = 0; i < x.files[0].header.count; i++) {
    const SafetensorsEntry *e = &x.files[0].header.entries[i];
    const TensorFile *file;
    const SafetensorsEntry *f = tensor_set_find(&y, e->name, &file);
    assert_non_null(f);
    assert_string_equal(e->dtype, "F32");
    assert_int_equal(e->bytes, f->bytes);
    size_t count = e->bytes / sizeof(float);
    float *p = malloc(e->bytes), *q = malloc(e->bytes), largest = 0, apart = 0;
    memcpy(p, x.files[0].mapping.bytes + e->offset, e->bytes);
    memcpy(q, file->mapping.bytes + f->offset, f->bytes);
    for (size_t k = 0; k < count; k++) {
      largest = fmaxf(largest, fabsf(p[k]));
      apart = fmaxf(apart, fabsf(p[k] - q[k]));
    }
    if (apart > 0) worst = fmax(worst, (double)apart / (double)largest);
    free(p);
    free(q);
  }
  tensor_set_close(&x);
  tensor_set_close(&y);
  return worst;
}

static void check_same_weights(const char *a, const char *b, int step, double most) {
  double apart = difference(checkpoint_of(a, step), checkpoint_of(b, step), "model");
  if (!(apart <= most)) fail_msg("the weights of %s and %s differ by %g", a, b, apart);
}

static void check_same_bits(const char *a, const char *b, int step) {
  assert_true(difference(checkpoint_of(a, step), checkpoint_of(b, step), "model") == 0);
  assert_true(difference(checkpoint_of(a, step), checkpoint_of(b, step), "training_state") == 0);
}

// The values of `field` in a log's lines of one kind (NULL: any but the summary), in their order;
// returns how many.
static int read_log(const char *name, const char *event, const char *field, double *values, int max) {
  char file[64], *rest = NULL;
  snprintf(file, sizeof file, "%s.jsonl", name);
  char *text = read_text(temp_path(file));
  int count = 0;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    cJSON *json = cJSON_Parse(line);
    const cJSON *value = cJSON_GetObjectItem(json, field);
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItem(json, "event"));
    bool wanted = event ? !strcmp(kind, event) : strcmp(kind, "summary") != 0;
    if (value && wanted && count < max) values[count++] = value->valuedouble;
    cJSON_Delete(json);
  }
  free(text);
  return count;
}

static void check_same_log(const char *a, const char *b, const char *field, double tolerated) {
  enum { MAX = 64 };
  double x[MAX], y[MAX];
  int count = read_log(a, NULL, field, x, MAX);
  assert_true(count > 0);
  assert_int_equal(read_log(b, NULL, field, y, MAX), count);
  for (int i = 0; i < count; i++)
    if (!(fabs(x[i] - y[i]) <= tolerated * fabs(x[i])))
      fail_msg("%s number %d is %.9g in %s and %.9g in %s", field, i, x[i], a, y[i], b);
}

// Everything that a run of one rank and one of several must share.
static void check_same_training(const char *one, const char *several) {
  check_same_weights(one, several, STEPS,
                     30 * tolerance()); // Adam divides small differences by small moments
  check_same_log(one, several, "loss", tolerance());
  check_same_log(one, several, "grad_norm", 10 * tolerance());
  check_same_log(one, several, "val_loss", tolerance());
  check_same_log(one, several, "tokens", 0);
}

// --- data parallel -----------------------------------------------------------------------------------------

static void any_number_of_ranks_trains_the_same(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const jobs[][2] = {{"llama", LLAMA TEXT},
                                        {"tied", TIED TEXT},
                                        {"packed", GPT2 TEXT "--pack documents --end-of-text 10"},
                                        {"gpt2", GPT2 TEXT "--recompute layer --metrics --z-loss 0.001"}};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    char one[32], several[32];
    snprintf(one, sizeof one, "%s-1", jobs[j][0]);
    run_job(0, one, jobs[j][1]);
    for (int ranks = 1; ranks <= max_ranks(); ranks++) {
      if (!worthwhile(ranks) || (j > 0 && ranks % 2)) continue; // one model with every number will do
      snprintf(several, sizeof several, "%s-of-%d", jobs[j][0], ranks);
      run_job(ranks, several, jobs[j][1]);
      check_same_training(one, several);
      if (ranks == 1) check_same_bits(one, several, STEPS);
      if (!strstr(jobs[j][1], "--metrics")) continue;
      static const char *const metrics[] = {"accuracy", "z_loss", "entropy", "max_logit"};
      for (int i = getenv("LCE_GPU_RANKS") ? 1 : 0; i < 4; i++)
        check_same_log(one, several, metrics[i], i ? 10 * tolerance() : 0);
    }
  }
}

static void the_same_number_of_ranks_repeats_bitwise(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  int ranks = max_ranks() >= 3 && !getenv("LCE_GPU_RANKS") ? 3 : 2;
  run_job(ranks, "first", LLAMA TEXT);
  run_job(ranks, "second", LLAMA TEXT);
  check_same_bits("first", "second", STEPS);
  check_same_log("first", "second", "loss", 0);
}

// Half the windows count nothing at all, so that now and then a rank's whole micro-batch does not.
static void write_masked(const char *name) {
  enum { TOKENS = 3400 };
  static uint16_t tokens[TOKENS];
  static uint8_t mask[(TOKENS + 7) / 8];
  char file[64];
  memset(mask, 0, sizeof mask);
  for (int i = 0; i < TOKENS; i++) {
    tokens[i] = (uint16_t)(i % 5 ? 3 * i % 61 : (int)(random_bits(5, 2, (uint64_t)i) % 61));
    bool counts = i / 17 % 4 == 3 && i % 3; // windows are 17 tokens long
    mask[i / 8] |= (uint8_t)(counts << i % 8);
  }
  snprintf(file, sizeof file, "%s.bin", name);
  write_shard16(file, tokens, TOKENS);
  snprintf(file, sizeof file, "%s.mask", name);
  write_shard(file, 20261120, 1, TOKENS, mask, sizeof mask);
}

static void masked_ranks_neither_hang_nor_skew(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  write_masked("masked");
  char job[1024];
  snprintf(job, sizeof job, LLAMA "--data %s", temp_path("masked.bin"));
  run_job(0, "masked-1", job);
  for (int ranks = 2; ranks <= max_ranks(); ranks++) {
    if (!worthwhile(ranks)) continue;
    char name[32];
    snprintf(name, sizeof name, "masked-of-%d", ranks);
    run_job(ranks, name, job);
    check_same_training("masked-1", name);
  }
}

// --- what is spread over the ranks -------------------------------------------------------------------------

static void zero_levels_train_the_same(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  // Enough layers that they take turns in the buffer for gradients.
  static const char *const jobs[][2] = {{"llama", LLAMA TEXT "--num-layers 5"},
                                        {"tied", TIED TEXT},
                                        {"gpt2", GPT2 TEXT "--num-layers 3"},
                                        {"qwen", QWEN TEXT}};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    char one[32], name[48], options[1024];
    snprintf(one, sizeof one, "%s-whole", jobs[j][0]);
    run_job(0, one, jobs[j][1]);
    for (int ranks = 2; ranks <= max_ranks(); ranks++)
      for (int zero = 1; zero <= 2; zero++) {
        if (!worthwhile(ranks) || (j > 0 && ranks != 2)) continue;
        snprintf(name, sizeof name, "%s-%d-zero-%d", jobs[j][0], ranks, zero);
        snprintf(options, sizeof options, "%s --zero %d", jobs[j][1], zero);
        run_job(ranks, name, options);
        check_same_training(one, name);
      }
  }
}

// The same bits with what is offloaded, and from one of its checkpoints.
static void offloading_changes_no_bit(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const struct {
    int ranks;
    const char *spread, *then;
  } ways[] = {{0, "", "optimizer"},
              {2, "", "gradients,weights"},
              {2, "--zero 1", "optimizer"},
              {2, "--zero 2", "head"},
              {2, "--zero 1 --vocab-parallel", "gradients,weights"}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    char plain[32], moved[32], resumed[32], job[512], options[1024];
    snprintf(plain, sizeof plain, "plain-%zu", i);
    snprintf(moved, sizeof moved, "moved-%zu", i);
    snprintf(resumed, sizeof resumed, "resumed-%zu", i);
    snprintf(job, sizeof job, LLAMA TEXT "--num-layers 5 --recompute layer --save-every 2 %s",
             ways[i].spread);
    run_job(ways[i].ranks, plain, job);
    snprintf(options, sizeof options, "%s --offload weights,gradients,optimizer,activations,head", job);
    run_job(ways[i].ranks, moved, options);
    check_same_bits(plain, moved, 2);
    check_same_bits(plain, moved, STEPS);
    snprintf(options, sizeof options, "--resume %s %s --recompute layer --offload %s",
             checkpoint_of(moved, 2), ways[i].spread, ways[i].then);
    run_job(ways[i].ranks, resumed, options);
    check_same_bits(plain, resumed, STEPS);
  }
}

// The same bits again, and from a checkpoint, which says that the run is in FP8.
static void fp8_repeats_bitwise(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  char job[1024], options[1200];
  snprintf(job, sizeof job,
           JOB TEXT "--model llama-tiny --vocab 300 --hidden-size 32 --intermediate-size 48 --head-dim 16 "
                    "--num-attention-heads 2 --num-key-value-heads 1 --fp8 --save-every 2 --save-dtype fp32 "
                    "--dtype %s",
           getenv("LCE_GPU_RANKS") ? "bf16" : "fp32");
  for (int ranks = 0; ranks <= 2; ranks += 2) {
    const char *zero = ranks ? "--zero 2" : "";
    char whole[32], half[32];
    snprintf(whole, sizeof whole, "fp8-whole-%d", ranks);
    snprintf(half, sizeof half, "fp8-half-%d", ranks);
    snprintf(options, sizeof options, "%s %s", job, zero);
    run_job(ranks, whole, options);
    snprintf(options, sizeof options, "--resume %s --save-dtype fp32 %s", checkpoint_of(whole, 2), zero);
    run_job(ranks, half, options);
    check_same_bits(whole, half, STEPS);
  }
}

// The head's rows on several ranks: its loss is that of the whole head.
static void a_split_head_trains_the_same(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  write_masked("split-masked");
  char masked[1024];
  snprintf(masked, sizeof masked, LLAMA "--z-loss 0.001 --data %s", temp_path("split-masked.bin"));
  const char *const jobs[][2] = {{"llama", LLAMA TEXT "--vocab 301"}, // which nothing divides
                                 {"tied", TIED TEXT "--label-smoothing 0.1 --lce-chunk 5"},
                                 {"gpt2", GPT2 TEXT "--num-layers 3"},
                                 {"packed", TIED TEXT "--pack documents --end-of-text 10"},
                                 {"masked", masked}};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    char one[32], name[48], options[1200];
    snprintf(one, sizeof one, "%s-unsplit", jobs[j][0]);
    run_job(0, one, jobs[j][1]);
    for (int ranks = 2; ranks <= max_ranks(); ranks++) {
      if (!worthwhile(ranks) || (j == 2 && ranks != 2)) continue;
      snprintf(name, sizeof name, "%s-split-%d", jobs[j][0], ranks);
      snprintf(options, sizeof options, "%s --vocab-parallel --zero %d", jobs[j][1], ranks % 2 ? 2 : 1);
      run_job(ranks, name, options);
      check_same_training(one, name);
      if (j != 1 || ranks != 2) continue;
      run_job(ranks, "split-again", options);
      check_same_bits(name, "split-again", STEPS);
    }
  }
  // What a split head leaves is taken up by a whole one, and the other way around.
  run_job(0, "split-all", TIED TEXT "--save-every 2");
  run_job(2, "split-first", TIED TEXT "--save-every 2 --zero 1 --vocab-parallel");
  check_same_weights("split-all", "split-first", 2, 30 * tolerance());
  char options[1024];
  snprintf(options, sizeof options, "--resume %s --zero 2 --save-every 4", checkpoint_of("split-first", 2));
  run_job(2, "split-then", options);
  snprintf(options, sizeof options, "--resume %s --zero 2 --vocab-parallel", checkpoint_of("split-then", 4));
  run_job(max_ranks() >= 4 ? 4 : 2, "split-last", options);
  check_same_weights("split-all", "split-last", 6, 30 * tolerance());
}

// A split head resumes any run; the settings of linear_cross_entropy that it does not support are dropped, with a
// warning.
static void a_split_head_resumes_any_run(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const struct {
    const char *was, *says;
  } runs[] = {{"--metrics", "--metrics was set when "},
              {"--materialized-logits", "--materialized-logits was set when "}};
  run_job(0, "taken-all", LLAMA TEXT);
  for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
    char name[32], then[32], options[1024];
    snprintf(name, sizeof name, "left-%zu", i);
    snprintf(then, sizeof then, "taken-%zu", i);
    snprintf(options, sizeof options, LLAMA TEXT "--save-every 2 %s", runs[i].was);
    run_job(0, name, options);
    Output output = train_ranks(2, "%s --resume %s --zero 1 --vocab-parallel --save %s", device(),
                                checkpoint_of(name, 2), temp_path(then));
    if (output.status) fail_msg("%s: exit status %d: %s", runs[i].was, output.status, output.err);
    assert_says(output.err, runs[i].says);
    output_free(&output);
    check_same_weights("taken-all", then, STEPS, 30 * tolerance());
    // Options given now are handled differently.
    output = train_ranks(2, "%s --resume %s --zero 1 --vocab-parallel %s", device(), checkpoint_of(name, 2),
                         runs[i].was);
    assert_int_equal(output.status, 1);
    assert_says(output.err, " and --vocab-parallel exclude each other: ");
    output_free(&output);
  }
}

// The shares of so many tiles dropped in a log's steps are shares, and not all the same; nor are they always an even
// number, as with two ranks that draw alike.
static void check_dropped(const char *name, int steps, int tiles_of_step) {
  double tiles[STEPS], mass[STEPS], least = 1, most = 0;
  long odd = 0;
  assert_int_equal(read_log(name, "step", "dropped_tiles", tiles, STEPS), steps);
  assert_int_equal(read_log(name, "step", "dropped_mass", mass, STEPS), steps);
  for (int i = 0; i < steps; i++) {
    assert_true(tiles[i] > 0 && tiles[i] < 1 && mass[i] > 0 && mass[i] < 1);
    least = fmin(least, tiles[i]), most = fmax(most, tiles[i]);
    odd += lround(tiles_of_step * tiles[i]) % 2;
  }
  assert_true(least < most && odd > 0);
}

// With every tile kept, ranks train as one rank does without sampling. With some dropped the loss of the first step is
// the same still, ZeRO changes nothing, and nor does a repetition.
static void sampled_ranks_train(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const ways[] = {"--zero 0", "--zero 1", "--zero 2", "--zero 1 --vocab-parallel",
                                     "--zero 2 --vocab-parallel --recompute layer"};
  char name[48], options[1024];
  double loss[2];
  run_job(0, "unsampled", LLAMA TEXT);
  assert_int_equal(read_log("unsampled", "step", "loss", &loss[0], 1), 1);
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    snprintf(name, sizeof name, "all-kept-%zu", i);
    snprintf(options, sizeof options, LLAMA TEXT "%s --lce-sample 1e-30", ways[i]);
    run_job(2, name, options);
    check_same_training("unsampled", name);
    snprintf(name, sizeof name, "sampled-%zu", i);
    snprintf(options, sizeof options, LLAMA TEXT "%s --lce-sample 50", ways[i]);
    run_job(2, name, options);
    check_dropped(name, STEPS, i < 3 ? 48 : 24);
    assert_int_equal(read_log(name, "step", "loss", &loss[1], 1), 1);
    assert_true(fabs(loss[0] - loss[1]) <= tolerance() * loss[0]);
    if (i == 1 || i == 2) check_same_training("sampled-0", name);
    if (i == 4) check_same_training("sampled-3", name);
    if (i % 3) continue;
    char again[48];
    snprintf(again, sizeof again, "sampled-again-%zu", i);
    run_job(2, again, options);
    check_same_bits(name, again, STEPS);
  }
  // A run of one rank goes on with a split head, and with its sampling.
  run_job(0, "sampled-alone", LLAMA TEXT "--lce-sample 50 --save-every 2");
  snprintf(options, sizeof options, "--resume %s --zero 1 --vocab-parallel",
           checkpoint_of("sampled-alone", 2));
  run_job(2, "sampled-then", options);
  check_dropped("sampled-then", STEPS - 2, 24);
}

// Half of a run with some ranks and the other half with others: nothing in a checkpoint depends on them.
static void checkpoints_do_not_depend_on_ranks(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  run_job(0, "all", QWEN TEXT "--save-every 2");
  int many = max_ranks() >= 4 ? 4 : 2;
  run_job(many, "many", QWEN TEXT "--save-every 2 --zero 2");
  check_same_weights("all", "many", 2, 30 * tolerance());
  char options[1024];
  snprintf(options, sizeof options, "--resume %s --zero 1 --save-every 4", checkpoint_of("many", 2));
  run_job(2, "two", options);
  check_same_weights("all", "two", 4, 30 * tolerance());
  snprintf(options, sizeof options, "--resume %s", checkpoint_of("two", 4));
  run_job(0, "one", options);
  check_same_weights("all", "one", 6, 30 * tolerance());
  assert_true(difference(checkpoint_of("all", 6), checkpoint_of("one", 6), "training_state") <
              100 * tolerance());
  // With the same ranks it continues bitwise identically.
  snprintf(options, sizeof options, "--resume %s --zero 1", checkpoint_of("two", 4));
  run_job(2, "again", options);
  check_same_bits("two", "again", 6);
}

// The ledger of a run is the plan's to the byte, and what is spread takes less.
static void plans_depend_on_ranks(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  enum { WAYS = 9 };
  static const char *const ways[WAYS] = {
      TIED "--zero 0",
      TIED "--zero 1",
      TIED "--zero 2",
      TIED "--zero 1 --vocab-parallel",
      LLAMA "--zero 2",
      LLAMA "--zero 2 --vocab-parallel",
      TIED "--zero 1 --vocab-parallel --label-smoothing 0.1 --batch 24 --lce-memory 1",
      TIED "--zero 1 --vocab-parallel --lce-sample 50",
      LLAMA "--zero 2 --lce-sample 50 --lce-chunk 9"};
  size_t planned[WAYS];
  bool cuda = getenv("LCE_GPU_RANKS") != NULL;
  for (int way = 0; way < WAYS; way++) {
    char line[1200], options[1024], name[32];
    double measured = 0;
    snprintf(name, sizeof name, "planned-%d", way);
    snprintf(options, sizeof options, TEXT "%s --num-layers 12 --hidden-size 64 --vocab 2000", ways[way]);
    run_job(2, name, options);
    assert_int_equal(read_log(name, "summary", "peak_bytes", &measured, 1), 1);
    snprintf(line, sizeof line, "%s --save somewhere --plan --ranks 2", options);
    Options o = options_on(cuda, line);
    planned[way] = plan_run(&o, cuda ? ON_CUDA : ON_CPU, LCE_FUSED).peak;
    options_free(&o);
    if ((size_t)measured != planned[way])
      fail_msg("%s: planned %zu, measured %.0f", ways[way], planned[way], measured);
  }
  // A budget of 1 MiB, as one of them has it.
  double held = 0;
  assert_int_equal(read_log("planned-6", "summary", "head_peak_bytes", &held, 1), 1);
  assert_true(held > 1 << 19 && held <= 1 << 20); // chunks come in steps
  assert_true(planned[2] < planned[1] && planned[1] < planned[0]);
  assert_true(planned[3] < planned[1] && planned[5] < planned[4]);
}

// --- what is said ------------------------------------------------------------------------------------------

static int times(const char *text, const char *part) {
  int count = 0;
  for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) count++;
  return count;
}

// What a plan says that a rank sends is what a run counts, micro-batches and chunks of the head included.
static void plans_know_what_ranks_send(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const jobs[] = {LLAMA TEXT,
                                     TIED TEXT "--zero 1",
                                     TIED TEXT "--zero 2 --total-batch 64",
                                     GPT2 TEXT "--zero 2",
                                     TIED TEXT
                                     "--zero 1 --vocab-parallel --lce-chunk 10 --label-smoothing 0.1",
                                     LLAMA TEXT "--zero 2 --vocab-parallel --lce-chunk 10 --z-loss 0.1"};
  for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
    char name[32], line[1024];
    double sent = 0;
    snprintf(name, sizeof name, "sent-%zu", j);
    run_job(2, name, jobs[j]);
    assert_int_equal(read_log(name, "summary", "wire_bytes_per_step", &sent, 1), 1);
    snprintf(line, sizeof line, "%s --plan --ranks 2 --hosts 2", jobs[j]);
    bool cuda = getenv("LCE_GPU_RANKS") != NULL;
    Options o = options_on(cuda, line);
    double planned = plan_wire_bytes(&o, cuda ? ON_CUDA : ON_CPU);
    options_free(&o);
    if (!(sent > 0) || planned != sent) fail_msg("%s: %.0f bytes planned, %.0f sent", jobs[j], planned, sent);
  }
}

static void one_rank_prints(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  Output output = train_ranks(2, "%s " LLAMA TEXT "--save %s", device(), temp_path("spoken"));
  assert_int_equal(output.status, 0);
  assert_int_equal(times(output.out, "step 3  validation loss"), 1);
  assert_int_equal(times(output.out, "step 4  sample:"), 1);
  assert_int_equal(times(output.out, "all together (ledger)"), 1);
  assert_says(output.out, "ranks    2, started by ");
  assert_int_equal(times(output.err, "lce:"), 0);
  output_free(&output);
  output = train_ranks(2, "%s --eval-only --resume %s --steps 2", device(), temp_path("spoken"));
  assert_int_equal(output.status, 0);
  assert_int_equal(times(output.err, "lce:"), 1);
  assert_int_equal(times(output.out, "validation loss"), 1);
  output_free(&output);
}

// One sentence, once, and no rank stays behind.
static void impossible_options_are_refused_once(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const wrong[][2] = {
      {LLAMA TEXT "--total-batch 96",
       "--total-batch 96 is not a multiple of the 64 tokens of a micro-batch (ranks x --batch"},
      {LLAMA TEXT "--ranks 3", "--ranks 3: a launcher starts ranks"},
      {LLAMA TEXT "--hosts 2", "--hosts 2: a launcher starts ranks on hosts"},
      {LLAMA TEXT "--plan --hosts 3", "--hosts 3: 2 ranks cannot be spread evenly"},
      {LLAMA TEXT "--rank-tokens-per-second 9", "add --plan --ranks N --hosts M"},
      {LLAMA "--data nowhere", "nowhere"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    Output output = train_ranks(2, "%s %s", device(), wrong[i][0]);
    assert_int_equal(output.status, 1);
    assert_says(output.err, wrong[i][1]);
    assert_int_equal(times(output.err, "lce:"), 1);
    output_free(&output);
  }
}

// --- ends --------------------------------------------------------------------------------------------------

// An endless run, once it has saved something.
static Process endless(const char *name) {
  Process p =
      train_ranks_start(2,
                        "%s " LLAMA TEXT "--steps 100000000 --eval-every 0 --sample-every 0 --save %s "
                        "--save-every 20 --keep 2 --timeout 4",
                        device(), temp_path(name));
  process_wait_for(&p, "saved in");
  return p;
}

static void check_usable(const char *name) {
  bool any;
  char *newest = checkpoint_newest(temp_path(name), CHECK_ALL, &any);
  assert_non_null(newest);
  free(newest);
}

// No process is left: the launcher may end just before the last of them.
static void check_gone(pid_t pid) {
  char program[64];
  snprintf(program, sizeof program, "/proc/%d/exe", (int)pid);
  for (double before = now_seconds(); readlink(program, (char[1]){0}, 1) == 1;)
    if (now_seconds() - before > 2) fail_msg("process %d is left behind", (int)pid);
}

// Whatever happens to a rank: all end soon, one rank prints why, and the last checkpoint is whole. A rank that
// is killed is named by the launcher, and maybe by what NCCL reports to the others.
static void a_rank_that_is_gone_ends_the_job(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const struct {
    int rank, signal;
    double seconds;
    const char *says;
    int sentences;
  } ends[] = {{1, SIGKILL, 5, "rank 1 ", 0},
              {0, SIGKILL, 5, "rank 0 ", 0},
              {1, SIGSTOP, 25, "lce: no progress for ", 1},
              {0, SIGSTOP, 25, "lce: rank 1: no progress for ", 1}};
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    char name[32];
    snprintf(name, sizeof name, "ended-%zu", i);
    Process p = endless(name);
    double before = now_seconds();
    pid_t other = process_of_rank(&p, !ends[i].rank);
    kill(process_of_rank(&p, ends[i].rank), ends[i].signal);
    Output output = process_finish(&p);
    assert_int_not_equal(output.status, 0);
    assert_says(output.err, ends[i].says);
    if (ends[i].signal == SIGSTOP) assert_says(output.err, "another rank has not reached it, or has ended");
    if (ends[i].signal == SIGKILL) assert_says(output.err, "signal 9 (Killed)");
    assert_in_range(times(output.err, "lce:"), ends[i].sentences, 1);
    if (now_seconds() - before > ends[i].seconds)
      fail_msg("it took %.1f s to end: %s", now_seconds() - before, output.err);
    check_gone(other);
    output_free(&output);
    check_usable(name);
  }
}

// Two ranks, of which one makes no progress while the other waits for it: the first one reports.
static _Noreturn void hang(int rank) {
  const Launch *l = ranks_begin();
  ranks_set_timeout(2);
  if (l->rank != rank) ranks_enter("all_reduce");
  for (;;) pause();
}

static void a_hanging_rank_is_reported(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const says[2] = {
      "lce: no progress for 2 s, between collectives: this rank holds up the others",
      "lce: rank 1: no progress for 2 s, between collectives"};
  for (int rank = 0; rank < 2; rank++) {
    Output output = launch_self(2, "hang %d", rank);
    assert_int_not_equal(output.status, 0);
    assert_says(output.err, says[rank]);
    assert_int_equal(times(output.err, "lce:"), 1);
    output_free(&output);
  }
}

// Every rank with a value of its own for one setting.
static void ranks_must_have_equal_options(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  static const char *const differing[][2] = {
      {TEXT "--lr 0.0$((1 + RANK))", "has \"lr\":\"0.02\" where rank 0 has \"lr\":\"0.01\""},
      {TEXT "--vocab $((300 + RANK))", "has \"vocab_size\":301 where rank 0 has \"vocab_size\":300"},
      {"--data tests/trainer/test_r$(test $RANK = 0 && echo esume || echo anks).c", "has \"data\":"}};
  for (size_t i = 0; i < sizeof differing / sizeof *differing; i++) {
    Output output = shell_ranks(2, "%s %s " LLAMA "%s", train_program(), device(), differing[i][0]);
    assert_int_not_equal(output.status, 0);
    assert_says(output.err,
                "lce: rank 1: all ranks must see the same options, checkpoints and data, and this one ");
    assert_says(output.err, differing[i][1]);
    assert_int_equal(times(output.err, "lce:"), 1);
    output_free(&output);
  }
  // A command line that one rank alone cannot read.
  Output output =
      shell_ranks(2, "%s %s " LLAMA TEXT "$(test $RANK = 0 || echo --nonsense)", train_program(), device());
  assert_int_not_equal(output.status, 0);
  assert_says(output.err, "lce: rank 1: exits with status 64");
  assert_int_equal(times(output.err, "lce:"), 1);
  output_free(&output);
}

// Any rank may get the signal; all stop after the same step and save.
static void a_signal_stops_all_ranks(void **state) {
  (void)state;
  NEEDS_LAUNCHER();
  for (int rank = 0; rank < 2; rank++) {
    char name[32], options[1024];
    snprintf(name, sizeof name, "signal-%d", rank);
    Process p = endless(name);
    kill(process_of_rank(&p, rank), SIGINT);
    Output output = process_finish(&p);
    assert_int_equal(output.status, 0);
    assert_says(output.out, "stopped after step ");
    assert_int_equal(times(output.err, "lce:"), 0);
    long long stopped = atoll(strstr(output.out, "stopped after step ") + strlen("stopped after step "));
    output_free(&output);
    assert_true(path_exists(checkpoint_of(name, (int)stopped)));
    // It continues from there.
    snprintf(options, sizeof options, "--resume auto --steps %lld", stopped + 2);
    run_job(2, name, options);
    assert_true(path_exists(checkpoint_of(name, (int)stopped + 2)));
  }
}

// --- launchers ---------------------------------------------------------------------------------------------

static void set(const char *const *pairs) {
  static const char *const known[] = {"RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "TORCHELASTIC_RUN_ID",
                                      "OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE",
                                      "SLURM_STEP_ID",
                                      "SLURM_JOB_ID",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_LOCALID",
                                      "SLURM_STEP_NODELIST",
                                      "PMIX_RANK",
                                      "PMI_RANK",
                                      "PMI_SIZE"};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) unsetenv(known[i]);
  for (; *pairs; pairs += 2) setenv(pairs[0], pairs[1], 1);
}

#define LAUNCHED(...) (set((const char *const[]){__VA_ARGS__, NULL}), launch_read())

static void variables_of_launchers_are_read(void **state) {
  (void)state;
  set((const char *const[]){NULL});
  Launch l = launch_read();
  assert_null(l.launcher);
  assert_int_equal(l.ranks, 1);
  l = LAUNCHED("RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2", "MASTER_ADDR",
               "a.b", "MASTER_PORT", "29500");
  assert_string_equal(l.launcher, "torchrun");
  assert_true(l.rank == 3 && l.ranks == 8 && l.local_rank == 1 && l.local_ranks == 2 && l.port == 29500 &&
              !l.mpi);
  assert_string_equal(l.address, "a.b");
  l = LAUNCHED("RANK", "3", "WORLD_SIZE", "8", "MASTER_ADDR", "a.b", "MASTER_PORT", "29500",
               "TORCHELASTIC_RUN_ID", "x");
  assert_int_equal(l.port, 29501); // torchrun's own store listens at the other
  l = LAUNCHED("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_RANK", "0",
               "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  assert_string_equal(l.launcher, "mpirun");
  assert_true(l.rank == 2 && l.ranks == 4 && l.local_rank == 0 && l.local_ranks == 2 && l.mpi);
  l = LAUNCHED("SLURM_STEP_ID", "0", "SLURM_JOB_ID", "77", "SLURM_PROCID", "5", "SLURM_NTASKS", "16",
               "SLURM_LOCALID", "1", "SLURM_STEP_NODELIST", "gpu[03-06,9],x7");
  assert_string_equal(l.launcher, "srun");
  assert_true(l.rank == 5 && l.ranks == 16 && l.local_rank == 1 && l.port >= 20000 && !l.mpi);
  assert_string_equal(l.address, "gpu03");
  int port = l.port; // of job 77; that of job 277 is another
  l = LAUNCHED("SLURM_STEP_ID", "0", "SLURM_JOB_ID", "277", "SLURM_PROCID", "5", "SLURM_NTASKS", "16",
               "SLURM_STEP_NODELIST", "gpu03");
  assert_int_not_equal(l.port, port);
  // A batch script of Slurm is no step; a job of one process needs no others.
  l = LAUNCHED("SLURM_PROCID", "0", "SLURM_NTASKS", "16");
  assert_int_equal(l.ranks, 1);
  l = LAUNCHED("OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "1");
  assert_null(l.launcher);
  ASSERT_FAILS(LAUNCHED("RANK", "8", "WORLD_SIZE", "8"), "RANK=8", "WORLD_SIZE=8");
  ASSERT_FAILS(LAUNCHED("RANK", "x", "WORLD_SIZE", "8"), "RANK=x");
  ASSERT_FAILS(LAUNCHED("RANK", "1", "WORLD_SIZE", "8", "MASTER_ADDR", "a"), "MASTER_PORT");
  set((const char *const[]){NULL});
}

// The launcher in the tree, with programs of any kind and with ranks that cannot compute.
static void tools_launch_starts_and_ends_ranks(void **state) {
  (void)state;
  Output output = launch(3, "sh -c 'echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE'");
  assert_int_equal(output.status, 0);
  assert_int_equal(times(output.out, "rank "), 3);
  assert_says(output.out, "rank 2 of 3, 2 of 3");
  output_free(&output);
  double before = now_seconds();
  output = launch(3, "sh -c 'test $RANK = 1 && exit 7; exec sleep 100'");
  assert_int_equal(output.status, 7);
  assert_says(output.err, "tools/launch: rank 1 (process ");
  assert_says(output.err, "exited with status 7; the other ranks are ended");
  assert_true(now_seconds() - before < 10);
  output_free(&output);
  if (getenv("LCE_GPU_RANKS")) return;
  output = launch(3, "%s --device cpu --model llama-tiny --vocab 300 " TEXT, train_program());
  assert_int_equal(output.status, 1);
  assert_says(output.err, "3 ranks on the CPU need MPI");
  assert_says(output.err, "mpirun -n 3 ./train");
  assert_int_equal(times(output.err, "lce:"), 1);
  output_free(&output);
}

static void the_first_host_of_a_list(void **state) {
  (void)state;
  static const char *const lists[][2] = {{"node", "node"},         {"a1,b2", "a1"},    {"gpu-[1-3]", "gpu-1"},
                                         {"n[007,9]-x,m", "n007"}, {"c[12],d", "c12"}, {"", ""}};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    char host[64];
    launch_first_host(lists[i][0], host, sizeof host);
    assert_string_equal(host, lists[i][1]);
  }
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "hang")) hang(atoi(argv[2]));
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(any_number_of_ranks_trains_the_same),
      cmocka_unit_test(the_same_number_of_ranks_repeats_bitwise),
      cmocka_unit_test(masked_ranks_neither_hang_nor_skew),
      cmocka_unit_test(offloading_changes_no_bit),
      cmocka_unit_test(fp8_repeats_bitwise),
      cmocka_unit_test(zero_levels_train_the_same),
      cmocka_unit_test(a_split_head_trains_the_same),
      cmocka_unit_test(a_split_head_resumes_any_run),
      cmocka_unit_test(sampled_ranks_train),
      cmocka_unit_test(checkpoints_do_not_depend_on_ranks),
      cmocka_unit_test(plans_depend_on_ranks),
      cmocka_unit_test(plans_know_what_ranks_send),
      cmocka_unit_test(one_rank_prints),
      cmocka_unit_test(impossible_options_are_refused_once),
      cmocka_unit_test(a_rank_that_is_gone_ends_the_job),
      cmocka_unit_test(a_hanging_rank_is_reported),
      cmocka_unit_test(ranks_must_have_equal_options),
      cmocka_unit_test(a_signal_stops_all_ranks),
      cmocka_unit_test(tools_launch_starts_and_ends_ranks),
      cmocka_unit_test(variables_of_launchers_are_read),
      cmocka_unit_test(the_first_host_of_a_list),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
