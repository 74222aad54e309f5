// Evaluation: --eval-only, which holds nothing but the weights.
#include "tests/process.h"
#include "tests/runs.h"
#include "trainer/machine.h"

#define LLAMA                                                                                                \
  "--model llama-tiny --vocab 61 --hidden-size 24 --intermediate-size 40 --num-layers 2 --seq-len 17 "       \
  "--num-attention-heads 3 --num-key-value-heads 1 --head-dim 8 "

static const char *training_shard(void) {
  uint16_t tokens[700];
  for (int i = 0; i < 700; i++) tokens[i] = (uint16_t)((3 * i + i / 9) % 61);
  write_shard16("training.bin", tokens, 700);
  return temp_path("training.bin");
}

TEST(test_eval_only_holds_the_weights_alone) {
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

TEST(test_eval_only_from_the_command_line) {
  const char *shard = training_shard();
  Output o = train("--device cpu " LLAMA "--steps 1 --lr 0 --data %s --save %s", shard, temp_path("model"));
  assert_int_equal(o.status, 0);
  output_free(&o);
  o = train("--device cpu --eval-only --init %s --val-data %s --log %s", temp_path("model"), shard,
            temp_path("eval.jsonl"));
  assert_int_equal(o.status, 0);
  assert_string_equal(o.err, "");
  assert_says(o.out, "validation loss 4.1");
  assert_null(strstr(o.out, "learning rate"));
  output_free(&o);
  FILE *log = fopen(temp_path("eval.jsonl"), "r");
  char text[8192] = "";
  assert_non_null(log);
  size_t length = fread(text, 1, sizeof text - 1, log);
  fclose(log);
  assert_true(length > 0);
  assert_says(text, "\"perplexity\":");
  assert_null(strstr(text, "\"grad_norm\""));
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
TEST(test_eval_only_refuses_wrong_use) {
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
            1, "--eval-only: there is nothing to evaluate; name --val-data or raise --val-fraction");
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

// A model of NaN is not evaluated with a figure and status 0: not by the loss or by a sample.
TEST(test_weights_that_are_nan) {
  const char *shard = training_shard();
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
  says_once(run_tool("generate", "--device cpu --init %s", model), 1,
            "is nan; there is NaN or infinity among the weights");
}

int main(void) {
  return tests_run("eval", make_temp_dir, remove_temp_dir);
}
