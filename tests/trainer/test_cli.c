// The command line as a user sees it: every message for a wrong option, the help, the plans, a short run with
// its log and its files, and Ctrl-C.
#include "base/fail.h"
#include "data/source.h"
#include "model/checkpoint/weights.h"
#include "tests/process.h"
#include "tests/runs.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

// A model that trains in no time.
#define TINY                                                                                                 \
  "--device cpu --model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 2 "      \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 16 --batch 3 "

// --- what goes wrong ---------------------------------------------------------------------------------------

// The program fails with one sentence on stderr that holds `part`.
static void assert_refused(const char *arguments, const char *part) {
  Output o = train("%s", arguments);
  size_t length = strlen(o.err);
  bool one_line = length > 1 && strchr(o.err, '\n') == o.err + length - 1;
  if (o.status != 1 || !one_line || strncmp(o.err, "lce: ", 5) != 0 || !strstr(o.err, part))
    fail_msg("train %s: should exit 1 with one sentence that holds \"%s\", not %d with: %s", arguments, part,
             o.status, o.err);
  output_free(&o);
}

typedef struct {
  const char *arguments, *part;
} Refusal;

static void each_refused(const Refusal *refusals, size_t count) {
  for (size_t i = 0; i < count; i++) assert_refused(refusals[i].arguments, refusals[i].part);
}
#define EACH_REFUSED(list) each_refused(list, sizeof list / sizeof *list)

// 0 is refused wherever it makes no sense.
static void test_zeros(void **state) {
  (void)state;
  static const char *const options[] = {"batch",
                                        "seq-len",
                                        "total-batch",
                                        "vocab",
                                        "hidden-size",
                                        "num-layers",
                                        "lce-chunk",
                                        "intermediate-size",
                                        "head-dim",
                                        "lce-memory",
                                        "num-attention-heads",
                                        "sample-tokens",
                                        "num-key-value-heads",
                                        "max-position-embeddings"};
  for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
    char arguments[96], part[96];
    snprintf(arguments, sizeof arguments, "--%s 0", options[i]);
    snprintf(part, sizeof part, "--%s 0: give a whole number from 1 to ", options[i]);
    assert_refused(arguments, part);
  }
}

static void test_wrong_numbers(void **state) {
  (void)state;
  static const Refusal refusals[] = {
      {"--batch four", "--batch four: give a whole number from 1 to 2147483647"},
      {"--batch 4x", "--batch 4x: give a whole number"},
      {"--batch 1.5", "--batch 1.5: give a whole number"},
      {"--batch -1", "--batch -1: give a whole number"},
      {"--batch ''", "--batch : give a whole number"},
      {"--batch 99999999999999999999", "--batch 99999999999999999999: give a whole number"},
      {"--batch 2147483648", "--batch 2147483648: give a whole number"},
      {"--num-layers 10001", "--num-layers 10001: give a whole number from 1 to 10000"},
      {"--seed -1", "--seed -1: give a whole number from 0 to "},
      {"--warmup -1", "--warmup -1: give a whole number from 0 to "},
      {"--eval-every -1", "--eval-every -1: give a whole number from 0 to "},
      {"--eval-batches -1", "--eval-batches -1: give a whole number from 0 to "},
      {"--sample-every -1", "--sample-every -1: give a whole number from 0 to "},
      {"--lr fast", "--lr fast: give a number from 0 to 100"},
      {"--lr -1", "--lr -1: give a number from 0 to 100"},
      {"--lr nan", "--lr nan: give a number"},
      {"--lr inf", "--lr inf: give a number"},
      {"--lr 1e-3x", "--lr 1e-3x: give a number"},
      {"--min-lr 1.1", "--min-lr 1.1: give a number from 0 to 1"},
      {"--beta1 1", "--beta1 1: give a number from 0 to 0.999999"},
      {"--beta2 1", "--beta2 1: give a number from 0 to 0.999999"},
      {"--epsilon 0", "--epsilon 0: give a number from 1e-30 to 1"},
      {"--weight-decay -0.1", "--weight-decay -0.1: give a number from 0 to 100"},
      {"--grad-clip -1", "--grad-clip -1: give a number from 0 to "},
      {"--val-fraction 1", "--val-fraction 1: give a number from 0 to 0.999"},
      {"--temperature -1", "--temperature -1: give a number from 0 to 100"},
      {"--lce-sample -0.1", "--lce-sample -0.1: give a number from 0 to 1e+06"},
      {"--lce-sample 1000001", "--lce-sample 1000001: give a number from 0 to 1e+06"},
      {"--lce-sample nan", "--lce-sample nan: give a number from 0 to 1e+06"},
      {"--rope-theta 0", "--rope-theta 0: give a number from 1 to "},
  };
  EACH_REFUSED(refusals);
}

static void test_wrong_words(void **state) {
  (void)state;
  static const Refusal refusals[] = {
      {"--model gpt5", "no model preset is called 'gpt5'; there are gpt2-tiny, gpt2-124m"},
      {"--schedule step", "--schedule step: give cosine, linear, constant or wsd"},
      {"--device tpu", "--device tpu: give auto, cpu or cuda"},
      {"--dtype fp16", "--dtype fp16: give fp32 or bf16"},
      {"--grad-dtype int8", "--grad-dtype int8: give fp32 or bf16"},
      {"--moment-dtype fp8", "--moment-dtype fp8: give fp32 or bf16"},
      {"--recompute all", "--recompute all: give none, elementwise, mlp or layer"},
      {"--offload weights,moments",
       "give one or more of weights, gradients, optimizer, activations and head"},
      {"--offload weights,", "--offload weights,: give one or more of "},
      {"--prompt ''", "--prompt: give at least one character"},
      {"corpus.txt", "'corpus.txt' is not an option; paths are given with --data PATH"},
      {"--steps 5 7", "'7' is not an option"},
  };
  EACH_REFUSED(refusals);
}

static void test_impossible_combinations(void **state) {
  (void)state;
  static const Refusal refusals[] = {
      {"--recompute-layers 1", "says in how many layers to recompute, and not what: add --recompute"},
      {"--recompute layer --recompute-layers 99",
       "--recompute-layers 99: the model has 4 layers; leave it out, or give 0, for all of them"},
      {"--mlp-chunk 8 --recompute mlp",
       "--mlp-chunk drops a chunk's activations before the next one: add --recompute layer"},
      {"--fp8 --seq-len 100", "--fp8 takes multiples of 16, and --seq-len is 100"},
      {"--fp8 --mlp-chunk 30 --recompute layer", "--fp8 takes multiples of 16, and --mlp-chunk is 30"},
      {"--fp8 --head-dim 20", "--fp8 takes multiples of 16, and key/value heads x head size is 40"},
      {"--fp8 --device cuda --dtype fp32 --plan", "--fp8 reads and writes bf16 on cuda, and not fp32"},
      {"--fp8 --plan --model llama-8b --total-batch 8192 --device cuda --device-memory 5",
       "--seq-len 16 needs "},
      {"--offload activations", "from which all else is computed again: add --recompute layer"},
      {"--offload optimizer --num-layers 10000 --hidden-size 65536", "of this machine's memory and "},
      {"--pack windows", "--pack windows: give none or documents"},
      {"--pack documents --data-order sequential", "fits documents into windows: leave out one of them"},
      {"--pack documents --dump x", "--pack and --dump exclude each other"},
      {"--pack documents --end-of-text 60000 --vocab 60000", "--end-of-text 60000: the vocabulary has 60000"},
      {"--end-of-text 5", "--end-of-text says where documents end, which only --pack documents asks for"},
      {"--fused-lce --materialized-logits", "--fused-lce and --materialized-logits exclude each other"},
      {"--materialized-logits --fused-lce", "--fused-lce and --materialized-logits exclude each other"},
      {"--lce-chunk 64 --lce-memory 64",
       "--lce-chunk and --lce-memory exclude each other: both choose the chunk; give one of them"},
      {"--materialized-logits --lce-chunk 64",
       "--materialized-logits and --lce-chunk exclude each other: chunks and sampling belong to --fused-lce"},
      {"--materialized-logits --lce-memory 64", "--materialized-logits and --lce-memory exclude each other"},
      {"--materialized-logits --lce-sample 1", "--materialized-logits and --lce-sample exclude each other"},
      {"--metrics --lce-sample 1",
       "exclude each other: sampling acts on exponentials, and metrics need logits"},
      {"--tie-word-embeddings --untie-word-embeddings",
       "--tie-word-embeddings and --untie-word-embeddings exclude each other; give one of them"},
      {"--master-weights --no-master-weights", "--master-weights and --no-master-weights exclude each other"},
      {"--fp8 --no-fp8", "--fp8 and --no-fp8 exclude each other; give one of them"},
      {"--plan --fit", "--plan and --fit exclude each other"},
      {"--val-data a --val-fraction 0.1", "--val-data and --val-fraction exclude each other"},
      {"--init a --model gpt2-tiny", "--model and --init exclude each other: both say what the model is"},
      {"--init a --resume b", "--init begins with the model in a and --resume with the checkpoint in b"},
      {"--steps 10 --warmup 11", "--warmup 11 is longer than --steps 10; shorten it or raise --steps"},
      {"--model gpt2-tiny --rope-theta 10000",
       "--rope-theta: gpt2-tiny is a GPT-2, which has no rotary embedding; leave it out"},
      {"--logit-softcap 30 --lce-sample 1", "and a soft-cap of 30 on logits; leave out --lce-sample, or"},
      {TINY "--vocab 100000000 --lce-memory 1", "--lce-memory 1: even a chunk of one token needs 3"},
      {"--batch 3 --seq-len 64 --total-batch 500", "--total-batch 500 is not a multiple of the 192 tokens"},
      {"--batch 3 --seq-len 64 --total-batch 1", "--total-batch 1 is not a multiple of the 192 tokens"},
      {"--model gpt2-124m --seq-len 1025", "--seq-len 1025 is longer than the 1024 positions of gpt2-124m"},
      {"--model llama-8b --batch 1000000 --seq-len 131072",
       "is more than 2147483647 tokens in a micro-batch"},
      {"--hidden-size 130", "a hidden size of 130 does not divide into 4 heads"},
      {"--num-key-value-heads 3", "4 attention heads cannot share 3 key/value heads evenly"},
      {"--model gpt2-tiny --num-key-value-heads 2", "GPT-2 has as many key/value heads as attention heads"},
      {"--model gpt2-tiny --head-dim 16", "GPT-2's 4 heads of 16 do not make up a hidden size of 128"},
      {"--head-dim 31", "head_dim cannot be 31; choose an even --head-dim"},
      {"--hidden-size 2147483644 --num-attention-heads 2 --intermediate-size 2147483647",
       "weights is beyond anything this program counts"},
      {"--plan --batch 1000000 --seq-len 2000 --num-layers 10000 --intermediate-size 8388608",
       "out of memory"},
      {"--device cpu --dtype bf16", "the CPU computes in fp32 only"},
      {"--device cpu --grad-dtype bf16", "the CPU computes in fp32 only"},
      {"--device cpu --plan --moment-dtype bf16", "the CPU computes in fp32 only"},
      {"--device cuda", "--device cuda: "},
      {"--device cuda --fit", "--device cuda: "},
  };
  EACH_REFUSED(refusals);
}

// What would exclude each other does not where one of the two is 0, "none".
static void test_possible_combinations(void **state) {
  (void)state;
  static const char *const combinations[] = {
      "--metrics --lce-sample 0", "--materialized-logits --lce-sample 0", "--steps 10 --warmup 10",
      "--tie-word-embeddings --tie-word-embeddings", "--model gpt2-tiny --num-key-value-heads 4"};
  for (size_t i = 0; i < sizeof combinations / sizeof *combinations; i++) {
    Output o = train("--device cpu --plan %s", combinations[i]);
    if (o.status) fail_msg("%s: %s", combinations[i], o.err);
    output_free(&o);
  }
}

// What argp itself refuses: an exit status of its own, and where to read on.
static void test_unknown_options(void **state) {
  (void)state;
  static const Refusal refusals[] = {{"--vocabulary 7", "unrecognized option '--vocabulary'"},
                                     {"-x", "invalid option -- 'x'"},
                                     {"--batch", "option '--batch' requires an argument"},
                                     {"--plan=7", "option '--plan' doesn't allow an argument"},
                                     {"--e", "option '--e' is ambiguous"}};
  for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
    Output o = train("%s", refusals[i].arguments);
    assert_int_equal(o.status, 64);
    assert_says(o.err, refusals[i].part);
    assert_says(o.err, "--help");
    output_free(&o);
  }
}

static void assert_refused_data(const char *data, const char *part) {
  char arguments[1024];
  snprintf(arguments, sizeof arguments, TINY "%s", data);
  assert_refused(arguments, part);
}

static void test_wrong_files(void **state) {
  (void)state;
  char data[512];
  write_text("empty.txt", "");
  write_text("short.txt", "too little");
  write_text(
      "letters.txt",
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
  write_shard16("large_id.bin", (const uint16_t[]){1, 2, 299, 300, 5}, 5);
  write_shard("truncated.bin", 20240520, 1, 100, "ab", 2);
  assert_refused_data("--data /nowhere/at/all.txt", "/nowhere/at/all.txt");
  assert_refused_data("--val-data /nowhere/at/all.txt", "/nowhere/at/all.txt");
  snprintf(data, sizeof data, "--data '%s'", temp_path("*.md"));
  assert_refused_data(data, "no file matches ");
  snprintf(data, sizeof data, "--data %s", temp_path("empty.txt"));
  assert_refused_data(data, "is empty");
  snprintf(data, sizeof data, "--data %s", temp_path("short.txt"));
  assert_refused_data(data, "holds 10 tokens");
  snprintf(data, sizeof data, "--data %s --vocab 97", temp_path("letters.txt"));
  assert_refused_data(data, "has id 97 and the vocabulary has 97: raise --vocab to at least 98");
  snprintf(data, sizeof data, "--data %s", temp_path("large_id.bin"));
  assert_refused_data(data, "token 3 (byte 1030) has id 300 and the vocabulary has 300");
  snprintf(data, sizeof data, "--data %s", temp_path("truncated.bin"));
  assert_refused_data(data, "is truncated");
  snprintf(data, sizeof data, "--data %s --vocab 98 --prompt 'aab'", temp_path("letters.txt"));
  assert_refused_data(data, "--prompt: byte 2 is 98 and the vocabulary has 98");
  assert_refused(TINY "--log /nowhere/log.json", "cannot write the log /nowhere/log.json: No such file");
  assert_refused(TINY "--log /dev/full", "cannot write the log /dev/full: No space left on device");
  assert_refused(TINY "--steps 1 --timeline /nowhere/t.csv", "cannot write the timeline /nowhere/t.csv");
}

// A pipe or a device might never end: it is no input, under whatever option.
static void test_pipes_and_devices(void **state) {
  (void)state;
  static const Refusal refusals[] = {{"--data", "neither a file nor a directory"},
                                     {"--val-data", "neither a file nor a directory"},
                                     {"--hellaswag", "is not a regular file"},
                                     {"--tokenizer", "is not a regular file"}};
  char arguments[1024], pipe[512];
  make_directory("pipes");
  snprintf(pipe, sizeof pipe, "%s", temp_path("pipes/config.json"));
  assert_int_equal(mkfifo(pipe, 0600), 0);
  for (size_t i = 0; i < 2 * sizeof refusals / sizeof *refusals; i++) {
    const Refusal *r = &refusals[i / 2];
    snprintf(arguments, sizeof arguments, TINY "%s %s", r->arguments, i % 2 ? "/dev/zero" : pipe);
    assert_refused(arguments, r->part);
  }
  snprintf(arguments, sizeof arguments, "--init %s", temp_path("pipes"));
  assert_refused(arguments, "pipes/config.json: it is not a regular file");
}

// Training needs no tokenizer: one that comes with a model and cannot be used, or cannot encode, ends no run.
static void test_a_models_tokenizer_that_cannot_be_used(void **state) {
  (void)state;
  char copy[600], line[1024];
  snprintf(copy, sizeof copy, "cp -r tests/golden/mistral %s", temp_path("mistral"));
  assert_int_equal(system(copy), 0);
  snprintf(line, sizeof line,
           "--device cpu --init %s --data tests/golden/mistral/tokens.bin --val-fraction 0 --batch 1 "
           "--seq-len 8 --steps 1",
           temp_path("mistral"));
  static const char *const files[][3] = {
      {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"byte_fallback\":true}}", "is not used", NULL},
      {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}", "samples begin with the data's first token",
       "not encode"}};
  for (int i = 0; i < 2; i++) {
    write_text("mistral/tokenizer.json", files[i][0]);
    Output o = train("%s", line);
    assert_int_equal(o.status, 0);
    assert_says(o.err, files[i][1]);
    output_free(&o);
    if (!files[i][2]) continue;
    o = train("%s --prompt a", line);
    assert_int_equal(o.status, 1);
    assert_says(o.err, files[i][2]);
    output_free(&o);
  }
}

// What is there already stays, unless it is an earlier output of the same kind.
static void test_outputs_replace_only_outputs(void **state) {
  (void)state;
  char data[512], log[512], timeline[512], arguments[2048];
  snprintf(data, sizeof data, "%s", temp_path("mine.txt"));
  snprintf(log, sizeof log, "%s", temp_path("log.jsonl"));
  snprintf(timeline, sizeof timeline, "%s", temp_path("steps.csv"));
  char text[400];
  memset(text, 'x', sizeof text - 1);
  text[sizeof text - 1] = 0;
  write_text("mine.txt", text);
  const char *run = TINY "--steps 1 --sample-every 0";
  for (int again = 0; again < 2; again++) { // over its own outputs
    Output o = train("%s --log %s --timeline %s", run, log, timeline);
    if (o.status) fail_msg("%s", o.err);
    output_free(&o);
  }
  const struct {
    const char *option, *path, *part;
    bool also_data;
  } refused[] = {{"--log", data, "the log", false},
                 {"--log", data, "the log", true},
                 {"--timeline", data, "the timeline", true},
                 {"--timeline", log, "is not from this program", false},
                 {"--log", timeline, "is not from this program", false},
                 {"--log", log, "this run reads that file", true}};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    const char *path = refused[i].path;
    char *before = read_text(path);
    snprintf(arguments, sizeof arguments, "%s %s %s %s%s", run, refused[i].option, path,
             refused[i].also_data ? "--data " : "", refused[i].also_data ? path : "");
    assert_refused(arguments, refused[i].part);
    char *after = read_text(path);
    assert_string_equal(before, after);
    free(before);
    free(after);
  }
  snprintf(arguments, sizeof arguments, "%s --log %s --timeline %s", run, temp_path("one"), temp_path("one"));
  assert_refused(arguments, "the log is written there");
}

// Data that shrinks or changes under a run ends it with a sentence.
static void test_data_that_changes(void **state) {
  (void)state;
  enum { COUNT = 1 << 20 };
  for (int shrinks = 0; shrinks < 2; shrinks++) {
    write_sparse_shard16("live.bin", COUNT);
    char path[512];
    snprintf(path, sizeof path, "%s", temp_path("live.bin"));
    Process p = train_start(TINY "--steps 1000000 --sample-every 0 --eval-every 0 --data %s", path);
    process_wait_for(&p, "step 1/1000000");
    uint16_t *ids = malloc(COUNT * sizeof *ids);
    memset(ids, 0xff, COUNT * sizeof *ids);
    if (shrinks)
      assert_int_equal(truncate(path, 4096), 0);
    else
      write_shard16("live.bin", ids, COUNT); // first empties the file
    free(ids);
    Output o = process_finish(&p);
    assert_int_equal(o.status, 1);
    if (!strstr(o.err, "live.bin was shortened")) assert_says(o.err, "has id 65535");
    if (shrinks) assert_says(o.err, "live.bin was shortened");
    output_free(&o);
  }
}

// More than any machine has: said before anything is allocated, with a batch that would do.
static void test_out_of_memory(void **state) {
  (void)state;
  Output o = train(TINY "--seq-len 2000 --batch 1000000 --recompute none");
  assert_int_equal(o.status, 1);
  assert_says(o.err, "lce: this run needs ");
  assert_says(o.err, " and the device has ");
  assert_says(o.err, "activations ");
  const char *fits = strstr(o.err, "--batch ");
  assert_non_null(fits);
  assert_in_range(strtoll(fits + 8, NULL, 10), 1, 999999);
  assert_says(fits, " fits\n");
  output_free(&o);
}

static void test_divergence(void **state) {
  (void)state;
  assert_refused(TINY "--lr 100 --warmup 0 --grad-clip 0 --weight-decay 100 --steps 200 --sample-every 0",
                 "the training has diverged, try a lower --lr");
}

// --- help --------------------------------------------------------------------------------------------------

static void test_help(void **state) {
  (void)state;
  static const char *const parts[] = {"Model (",
                                      "Job",
                                      "Optimizer (AdamW)",
                                      "LM head + loss",
                                      "Data",
                                      "Machine and memory",
                                      "Output",
                                      "--model=PRESET",
                                      "--vocab=V",
                                      "--batch=B",
                                      "--seq-len=T",
                                      "--total-batch=TOKENS",
                                      "--steps=N",
                                      "--lr=RATE",
                                      "--data=PATH",
                                      "--val-data=PATH",
                                      "--device=DEVICE",
                                      "--seed=SEED",
                                      "--plan",
                                      "--log=FILE",
                                      "--fused-lce",
                                      "--materialized-logits",
                                      "--lce-chunk=TOKENS",
                                      "on cuda 1024",
                                      "--lce-memory=MIB",
                                      "--lce-sample=M0",
                                      "--recompute=WHAT",
                                      "--compare-modes",
                                      "--timeline=FILE",
                                      "--schedule=KIND",
                                      "(default 4)",
                                      "(default 200)",
                                      "Examples:"};
  Output o = train("--help");
  assert_int_equal(o.status, 0);
  assert_string_equal(o.err, "");
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_says(o.out, parts[i]);
  output_free(&o);
  o = train("--version");
  assert_int_equal(o.status, 0);
  assert_int_equal(strncmp(o.out, "lce.c ", 6), 0);
  output_free(&o);
}

// --- the benchmarks ----------------------------------------------------------------------------------------

static void assert_tool_refuses(const char *name, const char *arguments, int status, const char *part) {
  Output o = run_tool(name, "%s", arguments);
  if (o.status != status || !strstr(o.err, part) || *o.out)
    fail_msg("%s %s: should exit %d and say \"%s\", not %d with: %s%s", name, arguments, status, part,
             o.status, o.out, o.err);
  if (status == 1) assert_int_equal(strchr(o.err, '\n') - o.err, strlen(o.err) - 1);
  output_free(&o);
}

// They refuse a wrong option as ./train does, once, and options for work that they do not do.
static void test_benchmarks(void **state) {
  (void)state;
  static const char *const names[] = {"bench_step", "bench_scaling"};
  for (int i = 0; i < 2; i++) {
    char own[64];
    Output o = run_tool(names[i], "--batch 2 --help");
    assert_int_equal(o.status, 0);
    assert_string_equal(o.err, "");
    snprintf(own, sizeof own, "Usage: %s [", names[i]);
    assert_says(o.out, own);
    assert_says(o.out, i ? "--ranks=N" : "--compare-modes");
    assert_says(o.out, "./train --help");
    output_free(&o);
    assert_tool_refuses(names[i], "--device cpu --batch four", 1, "lce: --batch four: give a whole number");
    assert_tool_refuses(names[i], "--device cpu --nothing", 64, "unrecognized option '--nothing'");
    assert_tool_refuses(names[i], TINY "--plan", 1, "does nothing else: leave out --plan\n");
    assert_tool_refuses(names[i], TINY "--eval-only", 1, "does nothing else: leave out --eval-only\n");
    assert_tool_refuses(names[i], TINY "--save nowhere", 1, "does nothing else: leave out --save\n");
  }
  assert_tool_refuses("plot_run", "/dev/zero", 1, "it is not a regular file");
  assert_tool_refuses("bench_step", TINY "--zero 1 --vocab-parallel", 1, "leave out --zero\n");
  assert_tool_refuses("bench_scaling", "--ranks two", 1,
                      "lce: --ranks two: give a whole number from 1 to 4096\n");
  assert_tool_refuses("bench_scaling", "--ranks=2x", 1, "lce: --ranks 2x: give a whole number");
  assert_tool_refuses("bench_scaling", "--ranks 0", 1, "lce: --ranks 0: give a whole number");
  assert_tool_refuses("bench_scaling", "--batch 4 --ranks", 1, "lce: --ranks : give a whole number");
  assert_tool_refuses("bench_scaling", TINY "--steps 1 --ranks 1", 1, "with 1 rank was too short");
  Output o = run_tool("bench_step", TINY);
  if (o.status) fail_msg("%s", o.err);
  assert_says(o.out, "plain GEMMs");
  assert_says(o.out, "plain loops");
  output_free(&o);
  int ranks = can_launch() ? 3 : 1, rows = 0;
  o = run_tool("bench_scaling", TINY "--steps 20 --ranks %d", ranks);
  if (o.status) fail_msg("%s", o.err);
  for (const char *at = o.out; (at = strchr(at, '\n')); at++) rows++;
  assert_int_equal(rows, 1 + ranks); // 1, 2 and 3 of them, below what they are called
  assert_says(o.out, "ranks     tokens/s");
  assert_says(o.out, "\n    1 ");
  output_free(&o);
}

// --- plans -------------------------------------------------------------------------------------------------

// The two columns of a row of the memory table, in bytes.
static void table_row(const char *table, const char *name, double columns[2]) {
  const char *row = strstr(table, name);
  if (!row) fail_msg("there is no row \"%s\" in: %s", name, table);
  row += strlen(name);
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  for (int i = 0; i < 2; i++) {
    char unit[8];
    int used = 0;
    assert_int_equal(sscanf(row, " %lf %7s%n", &columns[i], unit, &used), 2);
    int power = 0;
    while (power < 5 && strcmp(unit, units[power])) power++;
    assert_in_range(power, 0, 4);
    columns[i] *= pow(1024, power);
    row += used;
  }
}

static void assert_two_columns(const char *table) {
  double all[2], head[2];
  table_row(table, "all together (ledger)", all);
  table_row(table, "LM head + loss alone, at its peak", head);
  assert_true(head[0] < all[0] && head[1] < all[1]);
  assert_true(head[0] < head[1]);
  assert_true(all[0] < all[1]);
}

static void test_plans(void **state) {
  (void)state;
  char names[256];
  strcpy(names, model_preset_names());
  for (char *name = strtok(names, ", "); name; name = strtok(NULL, ", "))
    for (int device = 0; device < 2; device++) {
      Output o = train("--model %s --plan --batch 16 --device %s", name, device ? "cuda" : "cpu");
      if (o.status) fail_msg("--plan of %s: %s", name, o.err);
      assert_string_equal(o.err, "");
      assert_says(o.out, name);
      assert_says(o.out, "fused, planned");
      assert_says(o.out, "materialized, planned");
      assert_says(o.out, device ? "bf16" : "fp32");
      assert_two_columns(o.out);
      output_free(&o);
    }
}

// 32,768 tokens of 128,256 logits in bf16 are 7.83 GiB (and a little more for aligned rows).
static void test_plan_of_long_sequences(void **state) {
  (void)state;
  double head[2];
  Output o = train("--model llama-8b --seq-len 32768 --batch 1 --plan --device cuda --recompute layer");
  assert_int_equal(o.status, 0);
  assert_says(o.out, "llama-8b (8.03B parameters) on cuda: batch 1 x 32768, V 128,256, bf16, chunks of 4096");
  table_row(o.out, "LM head + loss alone, at its peak", head);
  assert_true(fabs(head[1] / (32768.0 * 128256 * 2) - 1) < 0.01);
  assert_true(head[0] < head[1] / 7);
  output_free(&o);
}

// The chunk that is printed is the one that is used: no more than the tokens there are, in chunks of nearly equal size.
static void test_chunk_is_the_used_one(void **state) {
  (void)state;
  static const struct {
    const char *options;
    int chunk;
  } chunks[] = {
      {"--lce-chunk 100000", 48}, {"--lce-chunk 47", 24}, {"--lce-chunk 20", 16}, {"--lce-memory 64", 48}};
  for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
    char said[64], planned[64], logged[64];
    snprintf(said, sizeof said, "linear_cross_entropy, %d tokens at a time", chunks[i].chunk);
    snprintf(planned, sizeof planned, "fp32, chunks of %d, ", chunks[i].chunk);
    snprintf(logged, sizeof logged, "\"lce_chunk\":%d,", chunks[i].chunk);
    Output o = train(TINY "--steps 1 %s --log %s", chunks[i].options, temp_path("chunk.jsonl"));
    assert_says(o.out, said);
    output_free(&o);
    char *log = read_text(temp_path("chunk.jsonl"));
    assert_says(log, logged);
    free(log);
    o = train(TINY "--plan %s", chunks[i].options);
    assert_says(o.out, planned);
    output_free(&o);
  }
}

// What --fit names does fit, as --plan has it.
static void test_fit(void **state) {
  (void)state;
  long long fused = 0, materialized = 0;
  Output o = train("--device cpu --model gpt2-124m --fit");
  assert_int_equal(o.status, 0);
  assert_says(o.out, "the largest --batch of gpt2-124m at --seq-len 1024 in ");
  const char *line = strstr(o.out, "\nnothing ");
  assert_non_null(line);
  assert_int_equal(sscanf(line, " nothing %lld %lld", &fused, &materialized), 2);
  assert_true(fused >= materialized && materialized >= 0);
  assert_null(strstr(o.out, "host")); // a CPU's own memory
  output_free(&o);
}

// Every choice of --offload, its largest batches as --plan has them, and what it costs: weights, gradients and moments of
// llama-8b are known.
static void test_fit_offload(void **state) {
  (void)state;
#define JOB "--device cuda --device-memory 24 --model llama-8b --seq-len 8192 "
  static const char *const rows[] = {"nothing", "optimizer", "weights,gradients,optimizer",
                                     "weights,gradients,optimizer,activations"};
  long long batch[4][2] = {{0}};
  Output o = train(JOB "--recompute layer --fit");
  assert_int_equal(o.status, 0);
  for (int i = 0; i < 4; i++) {
    char row[64];
    snprintf(row, sizeof row, "\n%s ", rows[i]);
    const char *at = strstr(o.out, row);
    if (!at) fail_msg("no row%s in %s", row, o.out);
    int numbers = sscanf(at + strlen(row), "%lld %lld", &batch[i][0], &batch[i][1]);
    assert_int_equal(numbers == 2, i > 1);
    if (i < 2) assert_true(strncmp(at + strlen(row) + strspn(at + strlen(row), " "), "none", 4) == 0);
  }
  assert_true(batch[3][0] > batch[2][0] && batch[3][0] > batch[3][1]);
  // AdamW on 8,030,261,248 weights: fp32 master weights and moments are read and written, 89.75 GiB; 13.98 GiB are the
  // bf16 gradients, all but the head's, of which the norm reads the embedding's 0.98 too; 13.98 GiB of weights are written.
  assert_says(o.out, " 104.70 GiB / 103.72 GiB   2.25 s\n");
  assert_says(o.out, "at 50 GB/s a direction (PCIe 5 x16)");
  output_free(&o);
  // The inputs of layers can leave under --recompute layer alone; --offload asks for one choice.
  o = train(JOB "--fit");
  assert_null(strstr(o.out, "activations"));
  output_free(&o);
  o = train(JOB "--fit --recompute layer --offload optimizer,gradients,weights");
  assert_int_equal(o.status, 0);
  assert_null(strstr(o.out, "nothing"));
  char row[80];
  snprintf(row, sizeof row, "\noptimizer,gradients,weights %*s%7lld %13lld ", 13, "", batch[2][0],
           batch[2][1]);
  assert_says(o.out, row);
  output_free(&o);
#undef JOB
  // What is said to fit does, and no more. (Of a model that a small host can hold.)
#define JOB                                                                                                  \
  "--device cuda --device-memory 2 --model llama-8b --hidden-size 256 --intermediate-size 512 "              \
  "--num-layers 4 --num-attention-heads 4 --num-key-value-heads 4 --head-dim 64 --vocab 8192 "               \
  "--seq-len 512 --recompute layer "
  for (int i = 1; i < 4; i++) {
    long long fused = 0;
    o = train(JOB "--fit --offload %s", rows[i]);
    snprintf(row, sizeof row, "\n%s ", rows[i]);
    assert_int_equal(sscanf(strstr(o.out, row) + strlen(row), "%lld", &fused), 1);
    output_free(&o);
    for (int more = 0; more < 2; more++) {
      o = train(JOB "--plan --offload %s --batch %lld", rows[i], fused + more);
      assert_int_equal(o.status, more);
      output_free(&o);
    }
  }
#undef JOB
}

// Why there is no GPU interests only who asked for one.
static void test_no_gpu(void **state) {
  (void)state;
  for (int asked = 0; asked < 2; asked++) {
    Output o = train("--plan --model gpt2-tiny %s", asked ? "--device auto" : "");
    assert_int_equal(o.status, 0);
    assert_int_equal(strstr(o.out, "no GPU is used: ") != NULL, asked);
    output_free(&o);
  }
}

// A GPU that is not there: --fit and --plan agree about what fits into its memory.
static void test_device_memory(void **state) {
  (void)state;
#define ABSENT "--device cuda --device-memory 80 --model llama-1b "
  Output o = train(ABSENT "--fit");
  assert_int_equal(o.status, 0);
  assert_says(o.out, " in 80.00 GiB\n");
  const char *said = strstr(o.out, "\nnothing ");
  assert_non_null(said);
  int batch = atoi(said + strlen("\nnothing "));
  assert_true(batch > 1);
  output_free(&o);
  for (int more = 0; more < 2; more++) {
    o = train(ABSENT "--plan --batch %d", batch + more);
    assert_int_equal(o.status, more);
    assert_says(o.out, " on cuda: ");
    assert_int_equal(strstr(o.err, "and the device has 80.00 GiB to give") != NULL, more);
    output_free(&o);
  }
  // A run as on a smaller device: what is said to fit does, and nothing larger.
#define SMALL "--device-memory 0.02 " TINY "--steps 1 --sample-every 0 "
  o = train(SMALL "--batch 1000 --seq-len 64");
  assert_int_equal(o.status, 1);
  assert_says(o.err, "the device has 20.5 MiB to give");
  said = strstr(o.err, "--batch ");
  assert_non_null(said);
  batch = atoi(said + strlen("--batch "));
  output_free(&o);
  for (int more = 0; more < 2; more++) {
    o = train(SMALL "--batch %d --seq-len 64", batch + more);
    assert_int_equal(o.status, more);
    output_free(&o);
  }
  assert_refused("--device cuda --fit", "give --device-memory GIB");
}

// --- a run -------------------------------------------------------------------------------------------------

enum { MAX_LINES = 256 };

// The log's lines, each one JSON object. Returns how many.
static int read_log(const char *path, cJSON *lines[MAX_LINES]) {
  char *text = read_text(path), *rest = NULL;
  int count = 0;
  assert_true(*text && text[strlen(text) - 1] == '\n');
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    assert_true(count < MAX_LINES);
    lines[count] = cJSON_Parse(line);
    if (!lines[count]) fail_msg("this is no JSON: %s", line);
    count++;
  }
  free(text);
  return count;
}

static void free_log(cJSON **lines, int count) {
  for (int i = 0; i < count; i++) cJSON_Delete(lines[i]);
}

static double number_in(const cJSON *line, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
  if (!cJSON_IsNumber(item)) fail_msg("%s is no number in the log", name);
  return item->valuedouble;
}

static const char *text_in(const cJSON *line, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
  if (!cJSON_IsString(item)) fail_msg("%s is no text in the log", name);
  return item->valuestring;
}

static int count_events(cJSON **lines, int count, const char *event) {
  int found = 0;
  for (int i = 0; i < count; i++) found += strcmp(text_in(lines[i], "event"), event) == 0;
  return found;
}

// The log of 7 steps of TINY: a start, steps in order, validations, samples, and a summary that agrees with
// them and with the plan.
static void check_log(cJSON **lines, int count, const char *mode, const Ledger *plan) {
  const cJSON *first = lines[0], *last = lines[count - 1];
  assert_string_equal(text_in(first, "event"), "start");
  assert_string_equal(text_in(first, "loss_mode"), mode);
  assert_int_equal(number_in(first, "vocab_size"), 300);
  assert_int_equal(number_in(first, "steps"), 7);
  assert_string_equal(text_in(first, "model"), "llama-tiny");
  int step = 0;
  double first_loss = NAN, last_loss = NAN, val_loss = NAN;
  for (int i = 1; i < count - 1; i++) {
    const char *event = text_in(lines[i], "event");
    if (strcmp(event, "step") == 0) {
      assert_int_equal(number_in(lines[i], "step"), ++step);
      last_loss = number_in(lines[i], "loss");
      if (step == 1) first_loss = last_loss;
      assert_true(number_in(lines[i], "learning_rate") > 0 && number_in(lines[i], "grad_norm") > 0);
      assert_int_equal(number_in(lines[i], "tokens"), 2 * 48);
      assert_true(number_in(lines[i], "tokens_per_second") > 0);
    } else if (strcmp(event, "validation") == 0) {
      val_loss = number_in(lines[i], "val_loss");
      double bits =
          number_in(lines[i], "bits_per_byte") * log(2); // a byte is a token, and files end in one more
      assert_true(bits > val_loss * (1 - 1e-12) && bits < 1.02 * val_loss);
    } else {
      assert_string_equal(event, "sample");
      assert_int_equal(strncmp(text_in(lines[i], "text"), "if (", 4), 0);
    }
  }
  assert_int_equal(step, 7);
  assert_int_equal(count_events(lines, count, "validation"), 3); // after 3, 6 and 7 steps
  assert_int_equal(count_events(lines, count, "sample"), 1);     // after 5
  assert_string_equal(text_in(last, "event"), "summary");
  assert_string_equal(text_in(last, "loss_mode"), mode);
  assert_true(number_in(last, "first_loss") == first_loss);
  assert_true(number_in(last, "last_loss") == last_loss);
  assert_true(number_in(last, "val_loss") == val_loss);
  assert_true(fabs(first_loss - log(300)) < 0.2);
  assert_int_equal(number_in(last, "steps"), 7);
  assert_true(cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(last, "stopped")));
  assert_true(number_in(last, "tokens_per_second") > 0);
  assert_true(number_in(last, "unigram_entropy") > 2);
  assert_null(cJSON_GetObjectItemCaseSensitive(last, "dropped_tiles"));
  assert_int_equal(number_in(last, "peak_bytes"), plan->peak);
  assert_int_equal(number_in(last, "head_peak_bytes"), plan->highest[MEMORY_HEAD]);
  assert_true(number_in(last, "device_peak_bytes") > number_in(last, "peak_bytes"));
}

static void test_run(void **state) {
  (void)state;
  static const char *const job =
      TINY "--steps 7 --total-batch 96 --eval-every 3 --eval-batches 2 --sample-every 5 --prompt 'if (' "
           "--sample-tokens 9";
  for (int mode = 0; mode < 2; mode++) {
    const char *flag = mode == LCE_FUSED ? "--lce-chunk 20" : "--materialized-logits";
    const char *name = mode == LCE_FUSED ? "fused" : "materialized";
    char line[1024];
    snprintf(line, sizeof line, TINY "--total-batch 96 %s", flag);
    Options options = options_on(false, line);
    Ledger plan = plan_run(&options, ON_CPU, options.mode);
    options_free(&options);
    Output o = train("%s %s --log %s", job, flag, temp_path("run.json"));
    if (o.status) fail_msg("%s", o.err);
    assert_string_equal(o.err, "");
    assert_null(strchr(o.out, '\r')); // no terminal: plain lines
    assert_null(strchr(o.out, '\033'));
    assert_says(o.out, "device   CPU, ");
    assert_says(o.out, "model    llama-tiny: ");
    assert_says(o.out, "step     96 tokens: 2 micro-batches of 3 x 16");
    assert_says(o.out, "step 1/7  loss 5.");
    assert_says(o.out, "step 7/7  loss ");
    assert_says(o.out, "step 3  validation loss ");
    assert_says(o.out, "step 5  sample: if (");
    assert_says(o.out, "is what token frequencies alone give");
    assert_says(o.out, "all together (ledger)");
    assert_says(o.out, "(VmHWM)");
    output_free(&o);
    cJSON *lines[MAX_LINES];
    int count = read_log(temp_path("run.json"), lines);
    check_log(lines, count, name, &plan);
    free_log(lines, count);
  }
}

// Each step's shares of tiles and of mass dropped, and their means over the steps in the summary.
static void test_sampling(void **state) {
  (void)state;
  Output o = train(TINY "--steps 5 --lce-sample 100 --log %s", temp_path("run.json"));
  if (o.status) fail_msg("%s", o.err);
  assert_says(o.out, "  dropped ");
  assert_says(o.out, "% of mass  ");
  assert_says(o.out, "\nsampling dropped ");
  assert_says(o.out, "% of mass, mean of all steps\n");
  output_free(&o);
  cJSON *lines[MAX_LINES];
  int count = read_log(temp_path("run.json"), lines), steps = 0;
  double tiles = 0, mass = 0;
  for (int i = 0; i < count; i++) {
    if (strcmp(text_in(lines[i], "event"), "step") != 0) continue;
    double step_tiles = number_in(lines[i], "dropped_tiles"), step_mass = number_in(lines[i], "dropped_mass");
    assert_true(step_tiles >= 0 && step_tiles <= 1 && step_mass >= 0 && step_mass < 1);
    assert_true((step_tiles > 0) == (step_mass > 0));
    steps++, tiles += step_tiles, mass += step_mass;
  }
  assert_int_equal(steps, 5);
  assert_true(tiles > 0 && mass > 0);
  assert_float_equal(number_in(lines[count - 1], "dropped_tiles"), tiles / 5, 1e-12);
  assert_float_equal(number_in(lines[count - 1], "dropped_mass"), mass / 5, 1e-12);
  free_log(lines, count);
}

// No step at all: the model as it is, validated.
static void test_no_steps(void **state) {
  (void)state;
  Output o = train(TINY "--steps 0 --log %s", temp_path("run.json"));
  if (o.status) fail_msg("%s", o.err);
  assert_null(strstr(o.out, "nan"));
  output_free(&o);
  cJSON *lines[MAX_LINES];
  int count = read_log(temp_path("run.json"), lines);
  const cJSON *last = lines[count - 1];
  assert_int_equal(count_events(lines, count, "step"), 0);
  assert_true(fabs(number_in(last, "val_loss") - log(300)) < 0.2);
  assert_int_equal(number_in(last, "steps"), 0);
  assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(last, "first_loss")));
  free_log(lines, count);
}

static void test_terminal(void **state) {
  (void)state;
  Output o = train_in_terminal(TINY "--steps 3 --sample-every 0 --eval-every 0");
  assert_int_equal(o.status, 0);
  assert_says(o.out, "\r\033[Kstep 1/3");
  assert_says(o.out, "\r\033[Kstep 3/3");
  assert_says(o.out, "left\r\n"); // the line is left standing
  output_free(&o);
}

// Token shards, with validation shards of their own; nothing held back; a sample as token ids.
static void test_shards(void **state) {
  (void)state;
  uint16_t tokens[600];
  for (int i = 0; i < 600; i++) tokens[i] = (uint16_t)(i * i % 300);
  write_shard16("train_1.bin", tokens, 600);
  write_shard16("train_2.bin", tokens, 500);
  write_shard16("val.bin", tokens, 100);
  Output o = train(TINY "--steps 2 --sample-every 2 --sample-tokens 5 --data '%s' --val-data %s --log %s",
                   temp_path("train_*.bin"), temp_path("val.bin"), temp_path("run.json"));
  if (o.status) fail_msg("%s", o.err);
  assert_says(o.out, "llm.c shards, uint16, 2 files, 1,100 tokens");
  output_free(&o);
  cJSON *lines[MAX_LINES];
  int count = read_log(temp_path("run.json"), lines), samples = 0;
  for (int i = 0; i < count; i++) {
    const cJSON *sample = cJSON_GetObjectItemCaseSensitive(lines[i], "tokens");
    if (strcmp(text_in(lines[i], "event"), "sample")) continue;
    assert_int_equal(cJSON_GetArraySize(sample), 1 + 5);
    samples++;
  }
  assert_int_equal(samples, 1);
  assert_true(number_in(lines[count - 1], "val_loss") > 0);
  free_log(lines, count);

  o = train(TINY "--steps 1 --sample-every 0 --data %s --val-fraction 0 --log %s", temp_path("train_1.bin"),
            temp_path("run.json"));
  assert_int_equal(o.status, 0);
  assert_null(strstr(o.out, "validation loss"));
  output_free(&o);
  count = read_log(temp_path("run.json"), lines);
  assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(lines[count - 1], "val_loss")));
  free_log(lines, count);
}

// What --dump writes is what the log says of the first step: the mean of the losses, the norm of all gradients.
static void test_dump(void **state) {
  (void)state;
  char folder[600];
  Output o = train(
      TINY "--steps 2 --sample-every 0 --data %s --val-fraction 0 --data-order sequential --dump %s --log %s",
      temp_path("train_1.bin"), temp_path("compared"), temp_path("run.json"));
  if (o.status) fail_msg("--dump: %s", o.err);
  output_free(&o);
  snprintf(folder, sizeof folder, "%s", temp_path("compared/first-step"));
  TensorSet set = tensor_set_open(folder, "first_step");
  const TensorFile *file = set.files;
  double losses = 0, squares = 0;
  for (int64_t i = 0; i < file->header.count; i++) {
    const SafetensorsEntry *e = &file->header.entries[i];
    const float *values = (const void *)(file->mapping.bytes + e->offset);
    for (size_t k = 0; k < e->bytes / sizeof *values; k++) {
      if (!strcmp(e->name, "loss")) losses += (double)values[k];
      if (!strncmp(e->name, "grad.", 5)) squares += (double)values[k] * (double)values[k];
    }
  }
  const SafetensorsEntry *tokens = tensor_set_find(&set, "tokens", &file);
  assert_true(tokens && tokens->rank == 2 && tokens->shape[0] == 3 && tokens->shape[1] == 16);
  cJSON *lines[MAX_LINES];
  int count = read_log(temp_path("run.json"), lines);
  assert_true(fabs(losses / 48 / number_in(lines[1], "loss") - 1) < 1e-5);
  assert_true(fabs(sqrt(squares) / number_in(lines[1], "grad_norm") - 1) < 1e-5);
  free_log(lines, count);
  tensor_set_close(&set);
  assert_refused(TINY "--dump x --total-batch 96",
                 "--dump is of a step of one micro-batch on one rank, and this one has 2");
  assert_refused(TINY "--dump /dev/null/x", "--dump /dev/null/x");
}

// Both modes beside each other, and the same memory whichever of them the run itself had.
static void test_compare_modes(void **state) {
  (void)state;
  double head[2];
  char *memory[2];
  for (int mode = 0; mode < 2; mode++) {
    Output o = train(TINY "--vocab 3000 --batch 16 --steps 2 --sample-every 0 --compare-modes %s",
                     mode ? "--materialized-logits" : "--fused-lce");
    if (o.status) fail_msg("%s", o.err);
    assert_string_equal(o.err, "");
    assert_says(o.out, "(VmHWM)"); // of the run
    const char *title = "memory at the step's peak", *table = strstr(strstr(o.out, title) + 1, title);
    assert_non_null(table);
    assert_says(table, "fused, measured");
    assert_says(table, "materialized, measured");
    assert_two_columns(table);
    table_row(table, "LM head + loss alone, at its peak", head);
    const char *times = strstr(table, "LM head + loss hold "),
               *end = strstr(table, "time of one forward and");
    assert_true(times && end);
    assert_true(fabs(strtod(times + 20, NULL) - head[1] / head[0]) < 0.2);
    memory[mode] = strndup(table, (size_t)(end - table));
    output_free(&o);
  }
  assert_string_equal(memory[0], memory[1]);
  free(memory[0]);
  free(memory[1]);
}

// One line for each event: number, step, name, total, and the categories, which add up to the total.
static void test_timeline(void **state) {
  (void)state;
  Output o = train(TINY "--steps 5 --sample-every 0 --timeline %s", temp_path("timeline.csv"));
  if (o.status) fail_msg("%s", o.err);
  output_free(&o);
  char *text = read_text(temp_path("timeline.csv")), *rest = NULL;
  char *header = strtok_r(text, "\n", &rest);
  assert_int_equal(strncmp(header, "event,step,block,total,\"weights\",", 32), 0);
  long events = 0, steps[3] = {0};
  unsigned long long highest = 0, last = 0;
  for (char *line = strtok_r(NULL, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), events++) {
    long event, step;
    int used = 0;
    assert_int_equal(sscanf(line, "%ld,%ld,\"%*[^\"]\",%llu%n", &event, &step, &last, &used), 3);
    assert_int_equal(event, events);
    assert_in_range(step, 0, 2);
    steps[step]++;
    unsigned long long sum = 0;
    int columns = 0;
    for (char *at = line + used; *at == ','; columns++) sum += strtoull(at + 1, &at, 10);
    assert_int_equal(columns, MEMORY_CATEGORY_COUNT);
    assert_int_equal(sum, last);
    highest = last > highest ? last : highest;
  }
  free(text);
  assert_true(steps[0] > 20 && steps[1] == steps[0] && steps[2] == steps[0]);
  char line[512];
  snprintf(line, sizeof line, "%s", TINY);
  Options options = options_on(false, line);
  assert_int_equal(highest, plan_run(&options, ON_CPU, LCE_FUSED).peak);
  options_free(&options);
}

// Ctrl-C (or a polite kill) while a long run is under way: it ends after the running step, with the summary.
static void test_stopping(void **state) {
  (void)state;
  static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
  for (int i = 0; i < 3; i++) {
    Process p =
        train_start(TINY "--steps 1000000 --sample-every 0 --eval-every 0 --log %s", temp_path("run.json"));
    process_wait_for(&p, "step 1/1000000");
    char *so_far = read_text(temp_path("run.json")); // a log is complete at any time
    assert_says(so_far, "{\"event\":\"step\",\"step\":1,");
    assert_int_equal(so_far[strlen(so_far) - 1], '\n');
    free(so_far);
    for (int times = signals[i] == SIGHUP ? 2 : 1; times; times--) // a closed terminal sends several
      assert_int_equal(kill(p.pid, signals[i]), 0);
    Output o = process_finish(&p);
    assert_int_equal(o.status, 0);
    assert_string_equal(o.err, "");
    assert_says(o.out, "stopped after step ");
    assert_says(o.out, "all together (ledger)");
    // The log may be long: its last line counts.
    char *text = read_text(temp_path("run.json"));
    text[strlen(text) - 1] = 0;
    const char *line = strrchr(text, '\n') + 1;
    cJSON *last = cJSON_Parse(line);
    assert_non_null(last);
    assert_string_equal(text_in(last, "event"), "summary");
    assert_true(cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(last, "stopped")));
    long long said = strtoll(strstr(o.out, "stopped after step ") + 19, NULL, 10);
    assert_int_equal(number_in(last, "steps"), said);
    assert_in_range(said, 1, 999999);
    assert_true(number_in(last, "val_loss") > 0);
    cJSON_Delete(last);
    free(text);
    output_free(&o);
  }
}

// A reader that goes away, or a full disk, ends the run like a signal: it saves, and says what it could not write.
static void test_dead_output(void **state) {
  (void)state;
  static const char *const outputs[] = {"| head -n 1 >/dev/null", ">/dev/full"};
  char command[2048], directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("."));
  for (int i = 0; i < 2; i++) {
    snprintf(command, sizeof command,
             "{ %s %s --steps 1000000 --sample-every 0 --eval-every 0 --save %s/dead-%d 2>%s/err; echo $? "
             ">%s/status; } %s",
             train_program(), TINY, directory, i, directory, directory, outputs[i]);
    assert_int_equal(system(command), 0);
    char *err = read_text(temp_path("err")), *status = read_text(temp_path("status"));
    assert_string_equal(status, "1\n");
    assert_says(err,
                i ? "cannot write to standard output: No space left" : "cannot write to standard output");
    free(err);
    free(status);
    snprintf(command, sizeof command, "test -e %s/dead-%d/model.safetensors", directory, i);
    assert_int_equal(system(command), 0);
  }
  static const char *const short_ones[] = {"--help", "--plan", "--steps 0"};
  for (int i = 0; i < 3; i++) {
    snprintf(command, sizeof command, "%s %s %s >/dev/full 2>%s/err", train_program(), TINY, short_ones[i],
             directory);
    assert_int_not_equal(system(command), 0);
    char *err = read_text(temp_path("err"));
    assert_says(err, "cannot write to standard output: No space left");
    free(err);
  }
  // What nohup ignores stays ignored.
  snprintf(
      command, sizeof command,
      "trap '' HUP; %s %s --steps 100000000 --sample-every 0 >/dev/null & p=$!; sleep 0.3; kill -HUP $p; "
      "sleep 0.5; kill -0 $p || exit 1; kill $p; wait $p; true",
      train_program(), TINY);
  assert_int_equal(system(command), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_zeros),
      cmocka_unit_test(test_wrong_numbers),
      cmocka_unit_test(test_wrong_words),
      cmocka_unit_test(test_impossible_combinations),
      cmocka_unit_test(test_possible_combinations),
      cmocka_unit_test(test_unknown_options),
      cmocka_unit_test(test_wrong_files),
      cmocka_unit_test(test_pipes_and_devices),
      cmocka_unit_test(test_a_models_tokenizer_that_cannot_be_used),
      cmocka_unit_test(test_outputs_replace_only_outputs),
      cmocka_unit_test(test_data_that_changes),
      cmocka_unit_test(test_out_of_memory),
      cmocka_unit_test(test_divergence),
      cmocka_unit_test(test_help),
      cmocka_unit_test(test_benchmarks),
      cmocka_unit_test(test_plans),
      cmocka_unit_test(test_plan_of_long_sequences),
      cmocka_unit_test(test_chunk_is_the_used_one),
      cmocka_unit_test(test_fit),
      cmocka_unit_test(test_fit_offload),
      cmocka_unit_test(test_device_memory),
      cmocka_unit_test(test_no_gpu),
      cmocka_unit_test(test_run),
      cmocka_unit_test(test_sampling),
      cmocka_unit_test(test_no_steps),
      cmocka_unit_test(test_terminal),
      cmocka_unit_test(test_shards),
      cmocka_unit_test(test_dump),
      cmocka_unit_test(test_compare_modes),
      cmocka_unit_test(test_timeline),
      cmocka_unit_test(test_stopping),
      cmocka_unit_test(test_dead_output),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
