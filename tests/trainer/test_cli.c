// What ./train and the benchmarks refuse, in one sentence that says what would do, and the help.
#include "tests/cli.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// --- what goes wrong ---------------------------------------------------------------------------------------

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
      {"--batch 3 --seq-len 64 --total-batch 500", "--total-batch 500 is not a multiple of the 192 tokens of "
                                                   "a micro-batch (--batch x --seq-len); change "},
      {"--plan --ranks 2 --dump x", "one micro-batch on one rank, and this one has 2: start one rank alone"},
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
  write_shard16("large_id.bin", (const uint16_t[]){1, 2, 299, 300, 5, 311}, 6);
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
  assert_refused_data(
      data, "token 3 (byte 1030) has id 300 and the vocabulary has 300: raise --vocab to at least 312");
  snprintf(data, sizeof data, "--data %s", temp_path("truncated.bin"));
  assert_refused_data(data, "is truncated");
  snprintf(data, sizeof data, "--data %s --vocab 98 --prompt 'aab'", temp_path("letters.txt"));
  assert_refused_data(data, "--prompt: byte 2 is 98 and the vocabulary has 98");
  assert_refused(TINY "--log /nowhere/log.json", "cannot write the log /nowhere/log.json: No such file");
  assert_refused(TINY "--log /dev/full", "cannot write the log /dev/full: No space left on device");
  assert_refused(TINY "--steps 1 --dump /dev/full", "--dump /dev/full: cannot make the folder /dev/full");
  assert_refused("--resume /nowhere",
                 "checksums.json does not exist; name another checkpoint, or a directory");
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
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
