// Whole runs of ./train that stop, are stopped, killed or run out of disk, and continue: every tensor and every
// logged loss is bitwise what it would have been.
#include "base/file.h"
#include "base/system.h"
#include "base/text.h"
#include "model/checkpoint/checkpoint.h"
#include "tests/data_files.h"
#include "tests/process.h"

#include <cjson/cJSON.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Two micro-batches a step, a clipped gradient, a rate that moves, validation at times that no checkpoint
// shares.
#define STEPS 12
#define RUN                                                                                                  \
  "--device cpu --model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 1 "      \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 16 --batch 2 --total-batch 64 --steps 12 "      \
  "--warmup 3 "                                                                                              \
  "--grad-clip 0.5 --eval-every 5 --eval-batches 2 --sample-every 7 --sample-tokens 3 --data "               \
  "tests/trainer/test_resume.c "

static void succeeds(Output output) {
  if (output.status) fail_msg("exit status %d: %s", output.status, output.err);
  output_free(&output);
}

// --- comparing ---------------------------------------------------------------------------------------------

static void check_same_file(const char *a, const char *b) {
  size_t length_a, length_b;
  char *x = file_read(a, &length_a), *y = file_read(b, &length_b);
  assert_non_null(x);
  assert_non_null(y);
  if (length_a != length_b || memcmp(x, y, length_a)) fail_msg("%s and %s differ", a, b);
  free(x);
  free(y);
}

// All files of a checkpoint: weights, moments and state.
static void check_same_checkpoint(const char *a, const char *b) {
  static const char *const files[] = {"model.safetensors", "training_state.safetensors", "trainer_state.json",
                                      "config.json", "generation_config.json"};
  for (int i = 0; i < 5; i++) {
    char x[1024], y[1024];
    snprintf(x, sizeof x, "%s/%s", a, files[i]);
    snprintf(y, sizeof y, "%s/%s", b, files[i]);
    check_same_file(x, y);
  }
}

// losses[step] of the step lines and val_losses[step] of the validation lines of a log.
static void read_log(const char *path, double *losses, double *val_losses) {
  size_t length;
  char *text = file_read(path, &length), *rest = NULL;
  assert_non_null(text);
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    cJSON *json = cJSON_Parse(line);
    const cJSON *step = cJSON_GetObjectItem(json, "step"), *loss = cJSON_GetObjectItem(json, "loss");
    const cJSON *val_loss = cJSON_GetObjectItem(json, "val_loss");
    if (step && loss) losses[step->valueint] = loss->valuedouble;
    if (step && val_loss) val_losses[step->valueint] = val_loss->valuedouble;
    cJSON_Delete(json);
  }
  free(text);
}

static void check_same_losses(const char *straight, const char *resumed) {
  double losses[2][STEPS + 1] = {{0}}, val_losses[2][STEPS + 1] = {{0}};
  read_log(straight, losses[0], val_losses[0]);
  read_log(resumed, losses[1], val_losses[1]);
  for (int i = 1; i <= STEPS; i++) {
    assert_true(losses[0][i] > 0);
    assert_true(losses[0][i] == losses[1][i]);
    if (i % 5 == 0 || i == STEPS) assert_true(val_losses[0][i] > 0 && val_losses[0][i] == val_losses[1][i]);
  }
}

// --- the run that the others are compared with -------------------------------------------------------------

static int run_straight(void **state) {
  if (make_temp_dir(state)) return -1;
  succeeds(
      train(RUN "--save %s --save-every 6 --log %s", temp_path("straight"), temp_path("straight.jsonl")));
  return 0;
}

// --- the tests ---------------------------------------------------------------------------------------------

// With nothing but --resume: the settings, and the data, come from the checkpoint.
static void a_resumed_run_equals_an_unbroken_one(void **state) {
  (void)state;
  succeeds(train("--device cpu --resume %s --save %s --log %s --sample-tokens 3",
                 temp_path("straight/step-000006"), temp_path("half"), temp_path("half.jsonl")));
  check_same_checkpoint(temp_path("straight/step-000012"), temp_path("half/step-000012"));
  double losses[2][STEPS + 1] = {{0}}, val_losses[2][STEPS + 1] = {{0}};
  read_log(temp_path("straight.jsonl"), losses[0], val_losses[0]);
  read_log(temp_path("half.jsonl"), losses[1], val_losses[1]);
  for (int i = 7; i <= STEPS; i++) assert_true(losses[0][i] == losses[1][i] && losses[1][i] > 0);
  assert_true(losses[1][6] == 0);
  assert_true(val_losses[0][STEPS] == val_losses[1][STEPS] && val_losses[1][10] > 0);
}

// The windows come from the data and the seed, as whole as before.
static void packed_documents_resume(void **state) {
  (void)state;
  succeeds(train(RUN "--pack documents --end-of-text 10 --save %s --save-every 6", temp_path("packed")));
  succeeds(train("--device cpu --resume %s --save %s --sample-tokens 3", temp_path("packed/step-000006"),
                 temp_path("packed-half")));
  check_same_checkpoint(temp_path("packed/step-000012"), temp_path("packed-half/step-000012"));
}

// Paths are bytes, and JSON is UTF-8: both stay what they are.
static void any_path_resumes(void **state) {
  (void)state;
  char more[512], command[1200];
  snprintf(more, sizeof more, "%s", temp_path("gr\xFC\xDF\x1B.txt"));
  snprintf(command, sizeof command, "cp tests/runs.c '%s'", more);
  assert_int_equal(system(command), 0);
  succeeds(train(RUN "--steps 2 --warmup 1 --save %s --log %s --data '%s'", temp_path("paths"),
                 temp_path("paths.jsonl"), more));
  static const char *const files[] = {"paths/step-000002/trainer_state.json", "paths.jsonl"};
  for (int i = 0; i < 2; i++) {
    char *text = read_text(temp_path(files[i]));
    assert_true(utf8_valid(text));
    free(text);
  }
  Output output = train("--device cpu --resume %s --steps 3", temp_path("paths"));
  assert_int_equal(output.status, 0);
  assert_null(strstr(output.err, "the data were"));
  output_free(&output);
  remove(more);
  output = train("--device cpu --resume %s --steps 3", temp_path("paths"));
  assert_int_equal(output.status, 1);
  assert_says(output.err, "gr\\xFC\\xDF\\x1B.txt: No such file");
  output_free(&output);
}

// The weights rounded on disk: the master weights, stored as well, keep the bits.
static void rounded_weights_resume_too(void **state) {
  (void)state;
  succeeds(train(RUN "--save %s --save-every 6 --save-dtype bf16", temp_path("rounded")));
  succeeds(train("--device cpu --resume %s --save %s", temp_path("rounded/step-000006"), temp_path("again")));
  check_same_file(temp_path("straight/step-000012/model.safetensors"),
                  temp_path("again/step-000012/model.safetensors"));
  succeeds(train("--device cpu --init %s --data tests/trainer/test_resume.c --steps 0 --save %s",
                 temp_path("rounded"), temp_path("widened")));
}

static void differences_are_printed(void **state) {
  (void)state;
  Output output =
      train("--device cpu --resume %s --lr 0.5 --seed 3 --data Makefile --data tests/data/test_data.c",
            temp_path("straight/step-000006"));
  assert_int_equal(output.status, 0);
  assert_non_null(strstr(output.err, "--lr was 0.002 when "));
  assert_non_null(strstr(output.err, "and is 0.5 now"));
  assert_non_null(strstr(output.err, "--seed was 1 when"));
  assert_non_null(strstr(output.err, "the data were \"byte-level text, 1 file"));
  output_free(&output);
  output = train("--device cpu --resume %s --vocab 301", temp_path("straight"));
  assert_int_equal(output.status, 1);
  assert_non_null(strstr(output.err, "--vocab is 301"));
  output_free(&output);
  output = train("--device cpu --resume %s", "tests/golden/llama");
  assert_int_equal(output.status, 1);
  assert_non_null(strstr(output.err, "trainer_state.json does not exist"));
  output_free(&output);
}

// A resumed run restores the sampling; an option given now overrides it, and the difference is printed. Draws go on
// where they were.
static void a_resumed_run_restores_sampling(void **state) {
  (void)state;
  static const struct {
    const char *options, *said;
    bool samples;
  } turns[] = {{"", NULL, true},
               {"--lce-sample 25", "--lce-sample was 50 when ", true},
               {"--lce-sample 0", "--lce-sample was 50 when ", false},
               {"--materialized-logits", "--lce-sample was 50 when ", false},
               {"--metrics", "--lce-sample was 50 when ", false}};
  char saved[512];
  succeeds(train(RUN "--lce-sample 50 --save-every 5 --save %s --log %s", temp_path("sampled"),
                 temp_path("sampled.jsonl")));
  snprintf(saved, sizeof saved, "%s", temp_path("sampled/step-000005"));
  for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
    char folder[64], log[80];
    snprintf(folder, sizeof folder, "resampled-%zu", i);
    snprintf(log, sizeof log, "%s.jsonl", folder);
    Output o = train("--device cpu --resume %s %s --eval-every 5 --eval-batches 2 --save %s --log %s", saved,
                     turns[i].options, temp_path(folder), temp_path(log));
    if (o.status) fail_msg("%s", o.err);
    assert_true(turns[i].said ? strstr(o.err, turns[i].said) != NULL : !strcmp(o.err, ""));
    assert_int_equal(strstr(o.out, "  dropped ") != NULL, turns[i].samples);
    output_free(&o);
    double losses[2][STEPS + 1] = {{0}}, val_losses[2][STEPS + 1] = {{0}};
    read_log(temp_path("sampled.jsonl"), losses[0], val_losses[0]);
    read_log(temp_path(log), losses[1], val_losses[1]);
    bool same = true;
    for (int step = 6; step <= STEPS; step++) same &= losses[0][step] == losses[1][step];
    assert_int_equal(same, i == 0);
    if (i == 0) check_same_checkpoint(temp_path("sampled/step-000012"), temp_path("resampled-0/step-000012"));
  }
}

// FP8 is restored, unless it is declined; an evaluation does not need its sizes.
static void fp8_is_resumed_or_declined(void **state) {
  (void)state;
  static const char *const options[] = {"", "--no-fp8", "--eval-only --seq-len 24"};
  char saved[512];
  succeeds(train(RUN "--num-key-value-heads 2 --intermediate-size 32 --fp8 --save-every 6 --save %s",
                 temp_path("fp8")));
  snprintf(saved, sizeof saved, "%s", temp_path("fp8/step-000006"));
  for (int i = 0; i < 3; i++) {
    Output o = train("--device cpu --resume %s %s", saved, options[i]);
    if (o.status) fail_msg("%s: %s", options[i], o.err);
    assert_int_equal(strstr(o.out, "fp8      the layers' GEMMs") != NULL, i == 0);
    assert_int_equal(strstr(o.err, "--fp8 was set when ") != NULL, i == 1);
    output_free(&o);
  }
}

static void damaged_checkpoints_are_skipped(void **state) {
  (void)state;
  char command[2048], damaged[512];
  snprintf(damaged, sizeof damaged, "%s", temp_path("damaged"));
  snprintf(command, sizeof command, "cp -a %s %s && truncate -s -1 %s/step-000012/training_state.safetensors",
           temp_path("straight"), damaged, damaged);
  assert_int_equal(system(command), 0);
  Output output = train("--device cpu --resume %s/step-000012", damaged);
  assert_int_equal(output.status, 1);
  assert_non_null(strstr(output.err, "it is cut short; name another checkpoint"));
  output_free(&output);
  output = train(RUN "--resume auto --save %s", damaged);
  assert_int_equal(output.status, 0);
  assert_non_null(strstr(output.err, "it is cut short"));
  assert_non_null(strstr(output.err, "step-000012 is passed over"));
  assert_non_null(strstr(output.out, "after step 6 of 12"));
  output_free(&output);
  check_same_checkpoint(temp_path("straight/step-000012"), temp_path("damaged/step-000012"));
  snprintf(command, sizeof command, "for f in %s/step-*/model.safetensors; do printf x >$f; done", damaged);
  assert_int_equal(system(command), 0);
  output = train(RUN "--resume auto --save %s", damaged);
  assert_int_equal(output.status, 1);
  assert_non_null(strstr(output.err, "no checkpoint in"));
  output_free(&output);
}

// A signal ends the run after its step, with a checkpoint. The wish may come at any step.
static void stopped_runs_save(void **state) {
  (void)state;
  Process p =
      train_start(RUN "--save %s --save-every 6 --log %s", temp_path("stopped"), temp_path("stopped.jsonl"));
  process_wait_for(&p, "step 1/");
  kill(p.pid, SIGINT);
  Output output = process_finish(&p);
  assert_int_equal(output.status, 0);
  assert_non_null(strstr(output.out, "saved in"));
  output_free(&output);
  succeeds(train(RUN "--resume auto --save %s --log %s", temp_path("stopped"), temp_path("stopped.jsonl")));
  check_same_checkpoint(temp_path("straight/step-000012"), temp_path("stopped/step-000012"));
  check_same_losses(temp_path("straight.jsonl"), temp_path("stopped.jsonl"));
  // Done: nothing is left to do, and nothing changes.
  output = train(RUN "--resume auto --save %s", temp_path("stopped"));
  assert_int_equal(output.status, 0);
  assert_non_null(strstr(output.out, "after step 12 of 12"));
  output_free(&output);
  check_same_checkpoint(temp_path("straight/step-000012"), temp_path("stopped/step-000012"));
}

// What says when to validate, sample and save is resumed as well; a change of it is no warning.
static void the_rhythm_is_resumed(void **state) {
  (void)state;
  succeeds(train(RUN "--save %s --save-every 4", temp_path("rhythm")));
  Output output = train("--device cpu --resume %s --save %s --log %s", temp_path("rhythm/step-000004"),
                        temp_path("resumed"), temp_path("resumed.jsonl"));
  assert_string_equal(output.err, "");
  assert_non_null(strstr(output.out, "step 7  sample"));
  output_free(&output);
  assert_true(path_exists(temp_path("resumed/step-000008")));
  double losses[STEPS + 1] = {0}, val_losses[STEPS + 1] = {0};
  read_log(temp_path("resumed.jsonl"), losses, val_losses);
  assert_true(val_losses[5] > 0 && val_losses[10] > 0 && val_losses[8] == 0);
  output = train("--device cpu --resume %s --save-every 3 --eval-every 2 --save %s",
                 temp_path("rhythm/step-000004"), temp_path("faster"));
  assert_string_equal(output.err, "");
  output_free(&output);
  assert_true(path_exists(temp_path("faster/step-000009")));
}

// A checkpoint has the loss of the newest validation and the step it is of: the last one that of its own weights.
static void a_checkpoint_has_the_last_validation(void **state) {
  (void)state;
  static const struct {
    const char *folder;
    int step;
  } saved[] = {{"straight/step-000006", 5}, {"straight/step-000012", STEPS}};
  double losses[STEPS + 1] = {0}, val_losses[STEPS + 1] = {0};
  read_log(temp_path("straight.jsonl"), losses, val_losses);
  for (int i = 0; i < 2; i++) {
    cJSON *json = checkpoint_trainer_state(temp_path(saved[i].folder));
    assert_true(cJSON_GetObjectItem(json, "val_loss")->valuedouble == val_losses[saved[i].step]);
    assert_int_equal(cJSON_GetObjectItem(json, "val_step")->valueint, saved[i].step);
    cJSON_Delete(json);
  }
}

// Numbers have no more digits than they need.
static void numbers_are_short(void **state) {
  (void)state;
  char *text = read_text(temp_path("straight/step-000012/trainer_state.json")), *log, *end;
  assert_says(text, "\"beta1\":\t\"0.9\"");
  free(text);
  int numbers = 0;
  log = read_text(temp_path("straight.jsonl"));
  for (char *at = log; (at = strstr(at, "\":")); at = end) {
    double value = strtod(at + 2, &end);
    if (end == at + 2) continue;
    for (int digits = 15; digits < 17; digits++) { // no shorter form reads back as the same number
      char shorter[40];
      int length = snprintf(shorter, sizeof shorter, "%.*g", digits, value);
      assert_true(strtod(shorter, NULL) != value || end - (at + 2) <= length);
    }
    numbers++;
  }
  assert_true(numbers > 50);
  free(log);
}

// Other data of the same size are noticed.
static void changed_data_are_noticed(void **state) {
  (void)state;
  size_t length;
  char *text = file_read("tests/trainer/test_resume.c", &length);
  assert_non_null(text);
  write_bytes("data.txt", text, length);
  succeeds(train(RUN "--steps 3 --data %s --save %s", temp_path("data.txt"), temp_path("learned")));
  for (int changed = 0; changed < 2; changed++) {
    text[length / 2] ^= (char)changed;
    write_bytes("data.txt", text, length);
    Output output = train("--device cpu --resume %s --steps 3", temp_path("learned"));
    assert_int_equal(output.status, 0);
    assert_int_equal(strstr(output.err, "the data were \"byte-level text") != NULL, changed);
    output_free(&output);
  }
  free(text);
}

// Killed at random moments and resumed, over and over, offloaded or not, until $LCE_KILLS runs (or 5) were killed before their
// end.
static void killed_runs_lose_nothing(void **state) {
  (void)state;
  const char *asked = getenv("LCE_KILLS");
  int kills = asked ? atoi(asked) : 5, killed = 0, survived = 0;
  char command[2048], directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("killed"));
  double start = now_seconds();
  succeeds(train(RUN "--save %s --save-every 1",
                 temp_path("unbroken"))); // a checkpoint says how often it is saved
  double longest = now_seconds() - start;
  unsigned seed = (unsigned)time(NULL);
  print_message("seed %u\n", seed);
  srand(seed);
  while (killed < kills && survived < 10 * kills) {
    const char *offload = killed % 2 ? "--offload weights,gradients,optimizer" : "";
    Process p = train_start(RUN "--resume auto --save %s --save-every 1 --keep 2 --log %s %s", directory,
                            temp_path("killed.jsonl"), offload);
    double seconds = longest * rand() / RAND_MAX;
    nanosleep(&(struct timespec){.tv_sec = (time_t)seconds,
                                 .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))},
              NULL);
    kill(p.pid, SIGKILL);
    Output output = process_finish(&p);
    bool finished = output.status == 0;
    if (!finished && output.status != 128 + SIGKILL) fail_msg("it ended by itself: %s", output.err);
    output_free(&output);
    killed += !finished, survived += finished;
    if (!finished) continue;
    // It was through before it was killed. Once more from the beginning.
    check_same_checkpoint(temp_path("unbroken/step-000012"), temp_path("killed/step-000012"));
    snprintf(command, sizeof command, "rm -rf %s %s", directory, temp_path("killed.jsonl"));
    assert_int_equal(system(command), 0);
  }
  bool any;
  char *newest = checkpoint_newest(directory, &any);
  int reached = newest ? atoi(strstr(newest, "/step-") + 6) : 0;
  free(newest);
  print_message("killed %d times, %d runs came through, the last reached step %d\n", killed, survived,
                reached);
  assert_int_equal(killed, kills);
  Output output = train(RUN "--resume auto --save %s --save-every 1 --keep 2 --log %s", directory,
                        temp_path("killed.jsonl"));
  if (output.status) fail_msg("after %d kills: %s", kills, output.err);
  output_free(&output);
  check_same_checkpoint(temp_path("unbroken/step-000012"), temp_path("killed/step-000012"));
  check_same_losses(temp_path("straight.jsonl"), temp_path("killed.jsonl"));
  snprintf(command, sizeof command, "test $(ls -d %s/step-* | wc -l) = 2 && ! ls -d %s/.[sr]*", directory,
           directory);
  assert_int_equal(system(command), 0);
}

static void a_full_disk_leaves_the_last_good_checkpoint(void **state) {
  (void)state;
  char command[1200];
  snprintf(command, sizeof command, "cp -a %s %s && rm -r %s/step-000012", temp_path("straight"),
           temp_path("full"), temp_path("full"));
  assert_int_equal(system(command), 0);
  struct rlimit before, limit;
  getrlimit(RLIMIT_FSIZE, &before);
  limit = (struct rlimit){.rlim_cur = 20000, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  Process p = train_start(RUN "--resume auto --save %s --save-every 1 --keep 1", temp_path("full"));
  setrlimit(RLIMIT_FSIZE, &before);
  Output output = process_finish(&p);
  assert_int_equal(output.status, 1);
  assert_non_null(strstr(output.err, "no checkpoint after step 7: cannot write"));
  assert_non_null(strstr(output.err, "File too large; the last good checkpoint is that of step 6"));
  assert_non_null(strstr(output.err, "no checkpoint after step 12"));
  output_free(&output);
  assert_false(path_exists(temp_path("full/step-000012")));
  assert_false(path_exists(temp_path("full/.saving-step-000012")));
  bool any;
  char *newest = checkpoint_newest(temp_path("full"), &any);
  assert_non_null(strstr(newest, "step-000006"));
  free(newest);
  succeeds(train(RUN "--resume auto --save %s --keep 1", temp_path("full")));
  check_same_checkpoint(temp_path("straight/step-000012"), temp_path("full/step-000012"));
  check_same_file(temp_path("full/model.safetensors"),
                  temp_path("straight/model.safetensors")); // by the links
  assert_false(path_exists(temp_path("full/step-000006")));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_resumed_run_equals_an_unbroken_one),
      cmocka_unit_test(packed_documents_resume),
      cmocka_unit_test(any_path_resumes),
      cmocka_unit_test(rounded_weights_resume_too),
      cmocka_unit_test(differences_are_printed),
      cmocka_unit_test(a_resumed_run_restores_sampling),
      cmocka_unit_test(fp8_is_resumed_or_declined),
      cmocka_unit_test(damaged_checkpoints_are_skipped),
      cmocka_unit_test(stopped_runs_save),
      cmocka_unit_test(the_rhythm_is_resumed),
      cmocka_unit_test(a_checkpoint_has_the_last_validation),
      cmocka_unit_test(numbers_are_short),
      cmocka_unit_test(changed_data_are_noticed),
      cmocka_unit_test(killed_runs_lose_nothing),
      cmocka_unit_test(a_full_disk_leaves_the_last_good_checkpoint),
  };
  return cmocka_run_group_tests(tests, run_straight, remove_temp_dir);
}
