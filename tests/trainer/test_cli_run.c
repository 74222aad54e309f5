// Short runs of ./train as a user sees them: the output, the log and other files, Ctrl-C and dead outputs.
#include "model/checkpoint/weights.h"
#include "tests/cli.h"
#include "tests/runs.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINES = 4096 };

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

// One line for each event: number, step, time, name, total, and the categories, which add up to the total.
static void test_timeline(void **state) {
  (void)state;
  Output o = train(TINY "--steps 5 --sample-every 0 --timeline %s", temp_path("timeline.csv"));
  if (o.status) fail_msg("%s", o.err);
  output_free(&o);
  char *text = read_text(temp_path("timeline.csv")), *rest = NULL;
  char *header = strtok_r(text, "\n", &rest);
  assert_int_equal(strncmp(header, "event,step,at,block,total,\"weights\",", 35), 0);
  long events = 0, steps[3] = {0};
  double before = 0;
  unsigned long long highest = 0, last = 0;
  for (char *line = strtok_r(NULL, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), events++) {
    long event, step;
    double at;
    int used = 0;
    assert_int_equal(sscanf(line, "%ld,%ld,%lf,\"%*[^\"]\",%llu%n", &event, &step, &at, &last, &used), 4);
    assert_int_equal(event, events);
    assert_in_range(step, 1, 3);
    steps[step - 1]++;
    assert_true(events ? at >= before : at == 0);
    before = at;
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

// So does a log that cannot grow, and the run that resumes continues after its last whole line.
static void test_full_log(void **state) {
  (void)state;
  char command[4096], directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("."));
  snprintf(command, sizeof command,
           "ulimit -f 200; %s %s --steps 1000000 --warmup 0 --sample-every 0 --eval-every 0 --save %s/full "
           "--log %s/full.jsonl >%s/out 2>%s/err",
           train_program(), TINY, directory, directory, directory, directory);
  assert_int_equal(WEXITSTATUS(system(command)), 1);
  char *out = read_text(temp_path("out")), *err = read_text(temp_path("err"));
  assert_says(err, "full.jsonl: File too large\n");
  assert_string_equal(strchr(err, '\n'), "\n");
  assert_says(out, "saved in ");
  assert_says(strstr(out, "stopped after step "), "\nstep ");
  assert_null(strstr(out, "on a signal"));
  free(out);
  free(err);
  Output o = train("--device cpu --resume %s --steps 1 --log %s/full.jsonl", temp_path("full"), directory);
  if (o.status) fail_msg("%s", o.err);
  output_free(&o);
  cJSON *lines[MAX_LINES];
  int count = read_log(temp_path("full.jsonl"), lines);
  assert_true(count > 100);
  free_log(lines, count);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_run),      cmocka_unit_test(test_sampling), cmocka_unit_test(test_no_steps),
      cmocka_unit_test(test_terminal), cmocka_unit_test(test_shards),   cmocka_unit_test(test_dump),
      cmocka_unit_test(test_timeline), cmocka_unit_test(test_stopping), cmocka_unit_test(test_dead_output),
      cmocka_unit_test(test_full_log),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
