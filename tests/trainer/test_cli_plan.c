// What ./train prints about memory: --plan, --fit, --device-memory and --compare-modes.
#include "model/config.h"
#include "tests/cli.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
  // What fits may be less than the GEMM whose rate is measured first.
  o = train("--device-memory 0.004 " TINY "--steps 1 --sample-every 0");
  assert_int_equal(o.status, 0);
  output_free(&o);
  assert_refused("--device cuda --fit", "give --device-memory GIB");
  assert_refused("--device cuda", "; leave it out to compute on the CPU");
  assert_refused(TINY "--device-memory 0.0001", "has 104.9 KiB to give (weights ");
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
  Output o = train(TINY "--steps 0 --compare-modes"); // one chunk holds more than all of the few logits
  assert_says(o.out, "LM head + loss hold 1.1 times more when fused\n");
  output_free(&o);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plans),
      cmocka_unit_test(test_plan_of_long_sequences),
      cmocka_unit_test(test_chunk_is_the_used_one),
      cmocka_unit_test(test_fit),
      cmocka_unit_test(test_fit_offload),
      cmocka_unit_test(test_no_gpu),
      cmocka_unit_test(test_device_memory),
      cmocka_unit_test(test_compare_modes),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
