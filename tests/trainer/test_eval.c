// Evaluation: llm.c's multiple-choice files and what is refused of them, a model's choices against float64,
// and
// --eval-only, which holds nothing but the weights.
#include "base/random.h"
#include "data/choices.h"
#include "tests/process.h"
#include "tests/reference_model.h"
#include "tests/runs.h"
#include "trainer/evaluate.h"
#include "trainer/machine.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 61 --hidden-size 24 --intermediate-size 40 --num-layers 2 --seq-len 17 "       \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 "

// --- files of choices --------------------------------------------------------------------------------------

// A stream of values, written as uint16 (version 1) or uint32 (version 2).
typedef struct {
  uint32_t values[4096];
  int count, examples;
  bool wide;
} Stream;

static void put(Stream *s, uint32_t value) {
  assert_in_range(s->count, 0, 4095);
  s->values[s->count++] = value;
}

// Tokens are drawn; lengths: context, then completions, 0 ends them.
static void put_example(Stream *s, int label, const int *lengths) {
  int start = s->count, completions = 0;
  while (lengths[1 + completions]) completions++;
  put(s, s->wide ? UINT32_MAX : UINT16_MAX);
  put(s, 0);
  put(s, (uint32_t)s->examples++);
  put(s, (uint32_t)label);
  put(s, (uint32_t)completions);
  for (int i = 0; i <= completions; i++) {
    put(s, (uint32_t)lengths[i]);
    for (int k = 0; k < lengths[i]; k++) put(s, (uint32_t)(random_bits(3, 4, (uint64_t)s->count) % 61));
  }
  s->values[start + 1] = (uint32_t)((s->count - start) * (s->wide ? 4 : 2));
}

static const char *write_stream(const Stream *s, const char *name) {
  int32_t header[256] = {20240522, s->wide ? 2 : 1, s->examples};
  size_t bytes = (size_t)s->count * (s->wide ? 4 : 2);
  char *all = malloc(sizeof header + bytes);
  memcpy(all, header, sizeof header);
  for (int i = 0; i < s->count; i++) {
    uint16_t narrow = (uint16_t)s->values[i];
    if (s->wide)
      memcpy(all + sizeof header + 4 * i, &s->values[i], 4);
    else
      memcpy(all + sizeof header + 2 * i, &narrow, 2);
  }
  write_bytes(name, all, sizeof header + bytes);
  free(all);
  return temp_path(name);
}

static Stream three_examples(bool wide) {
  static Stream s;
  s = (Stream){.wide = wide};
  put_example(&s, 2, (const int[]){5, 3, 4, 2, 6, 0});
  put_example(&s, 0, (const int[]){1, 1, 0});
  put_example(&s, 1, (const int[]){9, 12, 7, 7, 0});
  return s;
}

static void test_choices_are_read(void **state) {
  (void)state;
  for (int wide = 0; wide < 2; wide++) {
    Stream s = three_examples(wide);
    Choices c = choices_open(write_stream(&s, "three.bin"), 61);
    assert_int_equal(c.count, 3);
    assert_int_equal(c.longest, 21);
    static const int labels[] = {2, 0, 1}, completions[] = {4, 1, 3}, contexts[] = {5, 1, 9},
                     last[] = {6, 1, 7};
    const uint32_t *at = s.values;
    for (int i = 0; i < 3; i++) {
      Choice choice = choices_get(&c, i);
      assert_int_equal(choice.label, labels[i]);
      assert_int_equal(choice.completion_count, completions[i]);
      assert_int_equal(choice.context_length, contexts[i]);
      for (int k = 0; k < contexts[i]; k++) assert_int_equal(choice.context[k], at[6 + k]);
      int64_t length;
      const int32_t *tokens = choice_completion(&choice, completions[i] - 1, &length);
      at += at[1] / (wide ? 4 : 2);
      assert_int_equal(length, last[i]);
      for (int k = 0; k < length; k++) assert_int_equal(tokens[k], at[k - length]);
    }
    choices_close(&c);
  }
}

static void assert_damaged(const Stream *s, const char *part) {
  const char *path = write_stream(s, "damaged.bin");
  ASSERT_FAILS(choices_open(path, 61), "damaged.bin", part);
}

static void test_damaged_choices_are_refused(void **state) {
  (void)state;
  ASSERT_FAILS(choices_open(temp_path("nowhere.bin"), 61), "cannot open", "nowhere.bin");
  write_text("short.bin", "short");
  ASSERT_FAILS(choices_open(temp_path("short.bin"), 61), "short.bin is no evaluation file", "20240522");
  write_shard("version.bin", 20240522, 3, 1, "abcd", 4);
  ASSERT_FAILS(choices_open(temp_path("version.bin"), 61), "version.bin is no evaluation file",
               "version 1 or 2");
  write_shard("many.bin", 20240522, 1, 1 << 30, "abcd", 4);
  ASSERT_FAILS(choices_open(temp_path("many.bin"), 61), "says that it holds 1073741824 examples");
  for (int wide = 0; wide < 2; wide++) {
    Stream s = three_examples(wide);
    s.examples = 2;
    assert_damaged(&s, "something follows its 2 examples");
    s.examples = 4;
    assert_damaged(&s, "example 3 does not begin where the one before it ends");
    s = three_examples(wide);
    s.values[0] = 7;
    assert_damaged(&s, "example 0 does not begin");
    s = three_examples(wide);
    s.values[1]--;
    assert_damaged(&s, "example 0 says that it has");
    s = three_examples(wide);
    s.values[1] = 60000;
    assert_damaged(&s, "example 0 says that it has 60000 bytes");
    s = three_examples(wide);
    s.values[1] += wide ? 4 : 2;
    assert_damaged(&s, "ends 1 values before its bytes do");
    s = three_examples(wide);
    s.values[3] = 4;
    assert_damaged(&s, "4 is right of 4 completions");
    s = three_examples(wide);
    s.values[5] = 0;
    assert_damaged(&s, "of 0 tokens");
    s = three_examples(wide);
    s.values[5] = 65000;
    assert_damaged(&s, "of 65000 tokens");
    s = three_examples(wide);
    s.values[7] = 61;
    assert_damaged(&s, "has the token 61 in example 0 and the vocabulary has 61");
    s = three_examples(wide);
    s.count -= 3;
    assert_damaged(&s, "example 2 says that it has");
    s.count = 2;
    assert_damaged(&s, "says that it holds 3 examples");
  }
  Stream s = three_examples(true);
  s.values[11] = INT32_MAX; // a length that would wrap around when added to
  assert_damaged(&s, "of 2147483647 tokens");
  s = three_examples(true);
  s.values[4] = UINT32_MAX;
  assert_damaged(&s, "completions");
}

// --- a model's choices -------------------------------------------------------------------------------------

// The mean (or summed) loss of a completion, in float64, after at most 18 tokens in all.
static double reference_loss(const ReferenceModel *model, const Choice *choice, int64_t completion,
                             bool mean) {
  enum { LONGEST = 18 };
  int64_t length, all, skipped, counted = 0;
  const int32_t *tail = choice_completion(choice, completion, &length);
  int32_t row[64], targets[64];
  double loss[64], sum = 0;
  memcpy(row, choice->context, (size_t)choice->context_length * sizeof *row);
  memcpy(row + choice->context_length, tail, (size_t)length * sizeof *row);
  all = choice->context_length + length;
  skipped = all > LONGEST ? all - LONGEST : 0;
  for (int64_t i = skipped; i + 1 < all; i++) {
    targets[i] = i + 1 >= choice->context_length ? row[i + 1] : IGNORE_INDEX;
    counted += targets[i] != IGNORE_INDEX;
  }
  reference_model_losses(model, row + skipped, targets + skipped, 1, all - 1 - skipped, loss);
  for (int64_t i = 0; i < all - 1 - skipped; i++) sum += loss[i];
  return mean ? sum / (double)counted : sum;
}

static const char *training_shard(void) {
  uint16_t tokens[700];
  for (int i = 0; i < 700; i++) tokens[i] = (uint16_t)((3 * i + i / 9) % 61);
  write_shard16("training.bin", tokens, 700);
  return temp_path("training.bin");
}

// 25 examples in batches of three rows and a bit: one is too long for the model, some rows are left over.
static void test_the_model_chooses_as_in_float64(void **state) {
  (void)state;
  enum { EXAMPLES = 25 };
  static const char *const modes[] = {"--fused-lce --lce-chunk 8", "--materialized-logits"};
  Stream s = {.wide = false};
  for (int i = 0; i < EXAMPLES; i++) {
    int lengths[6] = {1 + i % 7, 1 + i % 5, 2 + i % 3, 1 + i % 4, 1 + i % 6, 0};
    if (i == 11) lengths[0] = 16, lengths[2] = 5;
    put_example(&s, i % 4, lengths);
  }
  const char *path = write_stream(&s, "choices.bin");
  for (int m = 0; m < 2; m++) {
    Run *run = run_open(LLAMA "--batch 3 --lr 0.02 --warmup 0 --data %s %s", training_shard(), modes[m]);
    for (int step = 0; step < 10; step++) run_step(run, step);
    Choices choices = choices_open(path, 61);
    ChoiceScore score = trainer_score_choices(&run->trainer, &choices, 0);
    ReferenceModel reference = reference_model_read(trainer_model(&run->trainer), run->h->backend);
    ChoiceScore want = {.examples = EXAMPLES};
    for (int i = 0; i < EXAMPLES; i++) {
      Choice choice = choices_get(&choices, i);
      for (int mean = 0; mean < 2; mean++) {
        int64_t best = 0;
        double lowest = INFINITY;
        for (int64_t k = 0; k < choice.completion_count; k++) {
          double loss = reference_loss(&reference, &choice, k, mean);
          if (loss < lowest) lowest = loss, best = k;
        }
        *(mean ? &want.correct_normalized : &want.correct) += best == choice.label;
      }
    }
    assert_int_equal(score.examples, EXAMPLES);
    assert_int_equal(score.correct, want.correct);
    assert_int_equal(score.correct_normalized, want.correct_normalized);
    assert_in_range(want.correct_normalized, 1, EXAMPLES - 1);
    assert_int_equal(score.shortened, 3);
    assert_int_equal(trainer_score_choices(&run->trainer, &choices, 4).examples, 4);
    reference_model_free(&reference);
    choices_close(&choices);
    run_close(run);
  }
}

// The right completion is the one that the language of the training data allows: learned, it is chosen.
static void test_what_was_learned_is_chosen(void **state) {
  (void)state;
  Stream s = {.wide = true};
  for (int i = 0; i < 20; i++) {
    int start = s.count;
    put_example(&s, i % 3, (const int[]){6, 4, 4, 4, 0});
    for (int k = 0; k < 6; k++) s.values[start + 6 + k] = (uint32_t)(3 * (i + k) % 61);
    for (int c = 0; c < 3; c++)
      for (int k = 0; k < 4; k++)
        s.values[start + 13 + 5 * c + k] = (uint32_t)((3 * (i + 6 + k) + (c == i % 3 ? 0 : 7 + c)) % 61);
  }
  Run *run = run_open(LLAMA "--batch 4 --lr 0.01 --warmup 0 --schedule constant --data %s", training_shard());
  Choices choices = choices_open(write_stream(&s, "learned.bin"), 61);
  assert_in_range(trainer_score_choices(&run->trainer, &choices, 0).correct_normalized, 0, 15);
  for (int step = 0; step < 60; step++) run_step(run, step);
  assert_int_equal(trainer_score_choices(&run->trainer, &choices, 0).correct_normalized, 20);
  choices_close(&choices);
  run_close(run);
}

// --- --eval-only -------------------------------------------------------------------------------------------

static void test_eval_only_holds_the_weights_alone(void **state) {
  (void)state;
  const char *shard = training_shard();
  Run *whole = run_open(LLAMA "--batch 3 --data %s --val-data %s", shard, shard);
  Run *run = run_open(LLAMA "--batch 3 --data %s --val-data %s --eval-only", shard, shard);
  assert_true(trainer_validate(&run->trainer, &run->loader, 0) ==
              trainer_validate(&whole->trainer, &whole->loader, 0));
  const Ledger *ledger = &run->h->backend->memory.ledger;
  assert_int_equal(ledger->highest[MEMORY_GRADIENTS] + ledger->highest[MEMORY_MOMENTS], 0);
  Ledger plan = plan_run(&run->options, run->h->backend->device, run->options.mode);
  Ledger measured = *ledger;
  assert_int_equal(measured.peak, plan.peak);
  assert_int_equal(measured.stack_peak, plan.stack_peak);
  run_close(run);
  run_close(whole);
}

static void test_eval_only_from_the_command_line(void **state) {
  (void)state;
  Stream s = {.wide = false};
  for (int i = 0; i < 8; i++) put_example(&s, i % 4, (const int[]){3, 2, 2, 2, 2, 0});
  const char *choices = write_stream(&s, "eight.bin"), *shard = training_shard();
  Output o = train("--device cpu " LLAMA "--steps 1 --lr 0 --data %s --save %s", shard, temp_path("model"));
  assert_int_equal(o.status, 0);
  output_free(&o);
  o = train("--device cpu --eval-only --init %s --val-data %s --hellaswag %s --log %s", temp_path("model"),
            shard, choices, temp_path("eval.jsonl"));
  assert_int_equal(o.status, 0);
  assert_string_equal(o.err, "");
  assert_says(o.out, "validation loss 4.1");
  assert_says(o.out, "of 8 right");
  assert_null(strstr(o.out, "learning rate"));
  output_free(&o);
  FILE *log = fopen(temp_path("eval.jsonl"), "r");
  char text[8192] = "";
  assert_non_null(log);
  size_t length = fread(text, 1, sizeof text - 1, log);
  fclose(log);
  assert_true(length > 0);
  assert_says(text, "\"acc_norm\":");
  assert_says(text, "\"perplexity\":");
  assert_null(strstr(text, "\"grad_norm\""));
  o = train("--device cpu " LLAMA "--steps 1 --data %s --hellaswag %s", shard, shard);
  assert_int_equal(o.status, 1);
  assert_says(o.err, "is no evaluation file of llm.c");
  output_free(&o);
}

// The program ends with `status`, and what it says on stderr is one sentence that holds `part`.
static void says_once(Output o, int status, const char *part) {
  size_t length = strlen(o.err);
  if (o.status != status || !strstr(o.err, part) || strchr(o.err, '\n') != o.err + length - 1)
    fail_msg("should exit %d with one sentence that holds \"%s\", not %d with: %s", status, part, o.status,
             o.err);
  output_free(&o);
}

// Every wrong use is one sentence, before anything is loaded or written.
static void test_eval_only_refuses_wrong_use(void **state) {
  (void)state;
  const char *shard = training_shard();
  Output o = train("--device cpu " LLAMA "--batch 2 --total-batch 68 --steps 1 --data %s --save %s", shard,
                   temp_path("run"));
  assert_int_equal(o.status, 0);
  output_free(&o);
  write_text("log.jsonl", "of another run\n");
  says_once(train("--device cpu " LLAMA "--eval-only --val-data %s --log %s", shard, temp_path("log.jsonl")),
            1, "--eval-only: there is no model to evaluate; name its folder with --init or --resume");
  says_once(train("--device cpu --seq-len 17 --eval-only --init %s --val-fraction 0 --data %s --log %s",
                  temp_path("run"), shard, temp_path("log.jsonl")),
            1, "--eval-only: there is nothing to evaluate; name --val-data or --hellaswag");
  static const char *const refused[][2] = {
      {"--save nowhere", "leave out --save\n"},
      {"--save-every 2", "leave out --save-every\n"},
      {"--keep 1 --timeline nowhere --compare-modes", "leave out --keep, --compare-modes and --timeline\n"},
      {"--resume auto", "name the folder, --resume DIR\n"},
      {"--resume auto --save nowhere", "name the folder, --resume DIR\n"}};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    says_once(train("--device cpu " LLAMA "--eval-only --log %s %s", temp_path("log.jsonl"), refused[i][0]),
              1, refused[i][1]);
  char *log = read_text(temp_path("log.jsonl"));
  assert_string_equal(log, "of another run\n");
  free(log);
  // Training options have no effect, with a warning; those that the checkpoint records do not matter.
  says_once(
      train("--device cpu --eval-only --resume %s --lr 1 --steps 4 --eval-batches 1 --vocab-parallel",
            temp_path("run")),
      0, "--eval-only trains nothing: --steps, --lr, --eval-batches and --vocab-parallel have no effect\n");
  o = train("--device cpu --eval-only --resume %s --batch 3 --val-data %s", temp_path("run"),
            training_shard());
  if (o.status) fail_msg("%s", o.err);
  assert_string_equal(o.err, "");
  output_free(&o);
}

// A model of NaN is not evaluated with a figure and status 0: not by the loss, by choices or by a sample.
static void test_weights_that_are_nan(void **state) {
  (void)state;
  Stream s = {.wide = false};
  for (int i = 0; i < 8; i++) put_example(&s, i % 4, (const int[]){3, 2, 2, 2, 2, 0});
  const char *choices = write_stream(&s, "eight.bin"), *shard = training_shard();
  Output o = train("--device cpu " LLAMA "--steps 1 --data %s --save %s", shard, temp_path("sick"));
  assert_int_equal(o.status, 0);
  output_free(&o);
  const char *model = temp_path("sick/latest");
  FILE *file = fopen(temp_path("sick/latest/model.safetensors"), "r+");
  assert_non_null(file);
  const float nan = NAN;
  fseek(file, -(long)sizeof nan, SEEK_END);
  fwrite(&nan, sizeof nan, 1, file);
  fclose(file);
  says_once(train("--device cpu --eval-only --init %s --val-data %s", model, shard), 1,
            "there is NaN or infinity among the weights in ");
  says_once(train("--device cpu --eval-only --init %s --data %s --val-fraction 0 --hellaswag %s", model,
                  shard, choices),
            1, "eight.bin: the loss of a completion is nan; there is NaN or infinity among the weights");
  says_once(run_tool("generate", "--device cpu --init %s", model), 1,
            "is nan; there is NaN or infinity among the weights");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_choices_are_read),
      cmocka_unit_test(test_damaged_choices_are_refused),
      cmocka_unit_test(test_the_model_chooses_as_in_float64),
      cmocka_unit_test(test_what_was_learned_is_chosen),
      cmocka_unit_test(test_eval_only_holds_the_weights_alone),
      cmocka_unit_test(test_eval_only_from_the_command_line),
      cmocka_unit_test(test_eval_only_refuses_wrong_use),
      cmocka_unit_test(test_weights_that_are_nan),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
