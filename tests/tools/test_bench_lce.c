// tools/bench_lce at a trained state: the loss there is the one that ./train evaluates, tiles are dropped as M0
// says, and what cannot be read or timed is refused in one sentence.
#include "tests/data_files.h"
#include "tests/process.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const models[] = {"gpt2-tiny", "llama-tiny --untie-word-embeddings"};

static void succeeds(const Output *o) {
  if (o->status) fail_msg("exit status %d: %s%s", o->status, o->out, o->err);
}

// Two checkpoints, model-0 and model-1, and text.
static int set_up(void **state) {
  make_temp_dir(state);
  char corpus[3400] = "";
  while (strlen(corpus) + 32 < sizeof corpus) strcat(corpus, "abc of a corpus, ");
  write_text("corpus", corpus);
  write_text("sequence", "sixteen and one, "); // 16 targets
  for (int i = 0; i < 2; i++) {
    char name[] = {'m', 'o', 'd', 'e', 'l', '-', (char)('0' + i), 0};
    Output o =
        train("--device cpu --model %s --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 2 "
              "--num-attention-heads 2 --max-position-embeddings 64 --seq-len 16 --batch 2 --steps 20 "
              "--sample-every 0 --data %s --save %s",
              models[i], temp_path("corpus"), temp_path(name));
    succeeds(&o);
    output_free(&o);
  }
  return 0;
}

static double loss_after(const char *text, const char *label) {
  const char *at = strstr(text, label);
  if (!at) fail_msg("there is no \"%s\" in: %s", label, text);
  return strtod(at + strlen(label), NULL);
}

static void loss_of_the_model(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    const char *model = temp_path(i ? "model-1" : "model-0"), *text = temp_path("sequence");
    Output o = train("--device cpu --eval-only --init %s --seq-len 16 --data %s --val-data %s", model,
                     temp_path("corpus"), text);
    succeeds(&o);
    double evaluated = loss_after(o.out, "validation loss ");
    output_free(&o);
    o = run_tool("bench_lce", "--checkpoint %s --data %s --seq-len 16 --tokens 16 --chunk 5 --repeat 1",
                 model, text);
    succeeds(&o);
    assert_says(o.out, ": N 16, H 16, V 300\n");
    assert_says(o.out, " over 16 targets\n");
    double loss = loss_after(o.out, "  loss ");
    if (!(fabs(loss - evaluated) < 2e-4)) fail_msg("loss %g, and ./train has %g", loss, evaluated);
    output_free(&o);
  }
}

// A row of the table, which says `part` after the name.
static void assert_row(const char *out, const char *name, const char *part) {
  const char *row = strstr(out, name), *end = row ? strchr(row, '\n') : NULL,
             *at = row ? strstr(row, part) : NULL;
  if (!at || !end || at > end) fail_msg("there is no row \"%s ... %s\" in: %s", name, part, out);
}

// N that no sequence divides, both lists, and the terms.
static void samples_tiles(void **state) {
  (void)state;
  Output o =
      run_tool("bench_lce",
               "--checkpoint %s --data %s --seq-len 16 --tokens 37 --chunk 37,8 --sample 1e-30,1e6 --terms "
               "--repeat 1",
               temp_path("model-0"), temp_path("corpus"));
  succeeds(&o);
  assert_says(o.out, " over 37 targets\n");
  assert_row(o.out, "M0 1e-30, chunk 37 ", "drops 0.0% of the tiles, a mass of 0 per token");
  assert_row(o.out, "M0 1e-30, chunk 8 ", "drops 0.0% of the tiles, a mass of 0 per token");
  assert_row(o.out, "M0 1e+06, chunk 37 ", "drops 100.0% of the tiles, a mass of ");
  assert_row(o.out, "M0 1e+06, chunk 8 ", "drops 100.0% of the tiles, a mass of ");
  assert_row(o.out, "+ sampling, all kept ", "drops 0.0% of the tiles, a mass of 0 per token");
  assert_row(o.out, "+ sampling ", "% of the tiles");
  output_free(&o);
}

// Without a checkpoint.
static void random_state(void **state) {
  (void)state;
  Output o =
      run_tool("bench_lce", "--tokens 20 --hidden-size 8 --vocab 500 --chunk 20 --sample 1e6 --repeat 1");
  succeeds(&o);
  assert_says(o.out, ": N 20, H 8, V 500\n");
  assert_row(o.out, "M0 1e+06, chunk 20 ", "drops 100.0% of the tiles");
  assert_null(strstr(o.out, "loss "));
  output_free(&o);
}

static void refuses(const char *part, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void refuses(const char *part, const char *format, ...) {
  char line[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  Output o = run_tool("bench_lce", "%s", line);
  if (o.status != 1 || !strstr(o.err, part) || strchr(o.err, '\n') != o.err + strlen(o.err) - 1 || *o.out)
    fail_msg("%s: should say \"%s\", not (status %d): %s%s", line, part, o.status, o.out, o.err);
  output_free(&o);
}

static void refusals(void **state) {
  (void)state;
  const char *model = temp_path("model-0"), *corpus = temp_path("corpus");
  refuses("leave out --vocab\n", "--checkpoint %s --data %s --vocab 300", model, corpus);
  refuses("leave out --hidden-size\n", "--checkpoint %s --data %s --hidden-size 16", model, corpus);
  refuses("name the text or shards to read with --data PATH\n", "--checkpoint %s", model);
  refuses("--data is what a model reads: name the model with --checkpoint DIR\n", "--data %s", corpus);
  refuses("--seq-len is what a model reads", "--seq-len 16");
  refuses("missing/config.json does not exist; name a directory", "--checkpoint %s --data %s",
          temp_path("missing"), corpus);
  refuses("cannot read ", "--checkpoint %s --data %s", model, temp_path("missing"));
  refuses("--seq-len 65 is longer than the 64 positions of ", "--checkpoint %s --data %s --seq-len 65", model,
          corpus);
  refuses("sequence has 1 sequences of 16 tokens, and 17 tokens need 2: lower --tokens or name more --data\n",
          "--checkpoint %s --data %s --seq-len 16 --tokens 17", model, temp_path("sequence"));
  Output o =
      train("--device cpu --model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 "
            "--num-layers 1 --num-attention-heads 2 --seq-len 16 --logit-softcap 30 --steps 1 --data %s "
            "--sample-every 0 --save %s",
            corpus, temp_path("capped"));
  succeeds(&o);
  output_free(&o);
  refuses("capped has a logit soft-cap, which is timed only as one of --terms", "--checkpoint %s --data %s",
          temp_path("capped"), corpus);
  refuses("--sample 0: give a number from 1e-30", "--sample 1,0");
  refuses("--sample one: give a number", "--sample one");
  refuses("--sample: give at most 8\n", "--sample 1,2,3,4,5,6,7,8,9");
  refuses("--chunk 0: give a whole number", "--chunk 8,0");
}

static void tokenizers_that_differ(void **state) {
  (void)state;
  const uint16_t tokens[40] = {[17] = 5000};
  write_shard16("other.bin", tokens, 40);
  refuses("has id 5000 and the vocabulary has 300", "--checkpoint %s --data %s", temp_path("model-0"),
          temp_path("other.bin"));
  write_text("model-1/tokenizer.json", "{}"); // its tokens are not bytes
  Output o = run_tool("bench_lce", "--checkpoint %s --data %s --seq-len 16 --tokens 16 --chunk 8 --repeat 1",
                      temp_path("model-1"), temp_path("corpus"));
  succeeds(&o);
  assert_says(o.err, "corpus is read byte by byte, though ");
  assert_says(o.err, "has a tokenizer; tools/prepare_data.py makes its text into tokens\n");
  output_free(&o);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(loss_of_the_model), cmocka_unit_test(samples_tiles),
                                     cmocka_unit_test(random_state), cmocka_unit_test(refusals),
                                     cmocka_unit_test(tokenizers_that_differ)};
  return cmocka_run_group_tests_name("bench_lce", tests, set_up, remove_temp_dir);
}
