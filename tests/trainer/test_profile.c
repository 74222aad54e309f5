// --profile and MFU: what is counted where, with and without streams. test_profile.py has whole runs.
#include "data/json.h"
#include "kernels/base/profile.h"
#include "tests/process.h"
#include "tests/runs.h"
#include "trainer/report.h"

#define JOB                                                                                                  \
  "--model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 3 "                   \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 16 --batch 2 "

enum { LAYERS = 3 };

static double now[STREAMS]; // when each stream has done what it holds
static int64_t events_alive, events_created;
static char ranges[512];

static bool fake_record(Backend *backend, void **event, StreamKind stream) {
  (void)backend;
  if (stream == STREAM_COLLECTIVES) return false;
  if (!*event) {
    *event = calloc(1, sizeof(double));
    events_alive++, events_created++;
  }
  *(double *)*event = now[stream];
  return true;
}

static double fake_seconds(void *from, void *to) {
  return *(double *)to - *(double *)from;
}

static void fake_destroy(void *event) {
  events_alive--;
  free(event);
}

static void fake_range(const char *name) {
  size_t length = strlen(ranges);
  snprintf(ranges + length, sizeof ranges - length, name ? "%s(" : ")", name);
}

static void take(StreamKind stream, double seconds) {
  now[stream] = fmax(now[stream], now[STREAM_COMPUTE]) + seconds;
}

#define FAKE(fake, Arguments, stream, seconds)                                                               \
  static void fake(Backend *backend, const Arguments *a) {                                                   \
    (void)backend, (void)a;                                                                                  \
    take(stream, seconds);                                                                                   \
  }
FAKE(fake_linear_forward, LinearForward, STREAM_COMPUTE, 3)
FAKE(fake_all_reduce, Collective, STREAM_COMPUTE, 6) // of one rank, on the compute stream
FAKE(fake_copy_in, Copy, STREAM_COPY_IN, 5)
FAKE(fake_copy_out, Copy, STREAM_COPY_OUT, 1)

static void fake_adamw(Backend *backend, const Update *a) {
  (void)backend;
  if (a->after_copies) now[STREAM_COPY_OUT] = fmax(now[STREAM_COPY_OUT], now[STREAM_COPY_IN]);
  take(a->after_copies ? STREAM_COPY_OUT : STREAM_COMPUTE, 4);
}

static void fake_copies_join(Backend *backend, int64_t in, int64_t out) {
  (void)backend, (void)in, (void)out;
  now[STREAM_COMPUTE] = fmax(now[STREAM_COMPUTE], now[STREAM_COPY_IN]);
}

static void assert_group(const ProfileTotals *t, ProfileGroup group, int64_t calls, double seconds,
                         double own) {
  if (t->groups[group].calls != calls || t->groups[group].seconds != seconds ||
      t->groups[group].own_seconds != own)
    fail_msg("%s: %lld calls, %g s and %g s on its own stream, not %lld, %g and %g", t->groups[group].name,
             (long long)t->groups[group].calls, t->groups[group].seconds, t->groups[group].own_seconds,
             (long long)calls, seconds, own);
}

static void one_fake_step(Backend *backend, Tensor m, Tensor v, Tensor one) {
  profile_phase(backend, PHASE_STEP);
  profile_phase(backend, PHASE_FORWARD);
  copy_in(backend, (Copy){.out = v, .x = v});                              // from 0 to 5
  copy_in(backend, (Copy){.out = v, .x = v});                              // behind it, to 10
  linear_forward(backend, (LinearForward){.out = m, .x = m, .weight = m}); // meanwhile to 3
  copy_out(backend, (Copy){.out = v, .x = v});                             // from 3 to 4
  copies_join(backend, 0, 0);                                              // waits from 3 to 10
  all_reduce(backend, (Collective){.out = v, .x = v});                     // to 16
  Update update = {.weight = v, .m = v, .v = v, .grad = v, .grad_scale = one, .step = 1};
  adamw(backend, update);                     // to 20
  copy_in(backend, (Copy){.out = v, .x = v}); // from 20 to 25
  update.after_copies = true;
  adamw(backend, update); // behind it, to 29
  profile_phase(backend, PHASE_LOSS);
  linear_forward(backend, (LinearForward){.out = m, .x = m, .weight = m}); // meanwhile to 23
  now[STREAM_COMPUTE] += 6;                                                // the host is late
  profile_phase(backend, PHASE_NONE);
}

TEST(test_streams) {
  Harness *h = harness_open("cpu");
  Backend *backend = h->backend;
  const BackendOps *cpu = backend->ops;
  BackendOps fake = *cpu;
  fake.event_record = fake_record, fake.event_seconds = fake_seconds, fake.event_destroy = fake_destroy;
  fake.range = fake_range, fake.linear_forward = fake_linear_forward, fake.all_reduce = fake_all_reduce;
  fake.copy_in = fake_copy_in, fake.copy_out = fake_copy_out, fake.adamw = fake_adamw;
  fake.copies_join = fake_copies_join;
  backend->ops = &fake;
  Tensor m = poisoned(h, DTYPE_F32, 4, 4), v = poisoned_vector(h, DTYPE_F32, 4),
         one = poisoned_vector(h, DTYPE_F32, 1);
  profile_phase(backend, PHASE_STEP); // nothing without profile_begin
  assert_null(profile_collect(backend));
  assert_string_equal(ranges, "");

  profile_begin(backend);
  linear_forward(backend, (LinearForward){.out = m, .x = m, .weight = m}); // outside of a step: not counted
  assert_string_equal(ranges, "linear_forward()");
  ranges[0] = 0;
  memset(now, 0, sizeof now);
  int64_t created = 0;
  for (int step = 1; step <= 3; step++) {
    one_fake_step(backend, m, v, one);
    if (step == 1) created = events_created;
    if (step == 1)
      assert_string_equal(ranges, "step(forward(copy_in()copy_in()linear_forward()copy_out()copies_join()"
                                  "all_reduce()adamw()copy_in()adamw())loss(linear_forward()))");
    const ProfileTotals *t = profile_collect(backend);
    assert_int_equal(t->steps, step);
    assert_true(t->step_seconds == 29 * step);
    assert_group(t, PROFILE_GEMMS, step, 3 * step, 0);
    assert_group(t, PROFILE_HEAD_LOSS, step, 3 * step, 0);
    assert_group(t, PROFILE_COMMUNICATION, step, 6 * step, 0);
    assert_group(t, PROFILE_COPIES, 4 * step, 7 * step, 16 * step);
    assert_group(t, PROFILE_OPTIMIZER, 2 * step, 4 * step, 4 * step);
    assert_group(t, PROFILE_IDLE, 0, 6 * step, 0);
    assert_true(t->groups[PROFILE_GEMMS].flops == 128 * step && t->groups[PROFILE_GEMMS].bytes == 192 * step);
    assert_true(t->groups[PROFILE_COPIES].bytes == 4 * 16 * step);
    assert_true(t->groups[PROFILE_OPTIMIZER].bytes == 2 * (16 + 2 * 3 * 16) * step); // no master weights
  }
  assert_int_equal(events_created, created); // they are used again

  ranges[0] = 0;
  profile_phase(backend, PHASE_EVAL);
  profile_phase(backend, PHASE_FORWARD); // of no step
  linear_forward(backend, (LinearForward){.out = m, .x = m, .weight = m});
  profile_phase(backend, PHASE_NONE);
  assert_string_equal(ranges, "validation(linear_forward())");
  assert_int_equal(profile_collect(backend)->steps, 3);

  profile_end(backend);
  assert_ptr_equal(backend->ops, &fake);
  assert_int_equal(events_alive, 0);
  backend->ops = cpu;
  harness_close(h);
}

static void check_steps(const char *backend, const char *options, bool copies) {
  enum { STEPS = 3, MICRO_STEPS = 2 };
  Run *plain = run_open_on(backend, JOB "--total-batch 64 %s", options);
  if (!plain) return;
  Run *run = run_open_on(backend, JOB "--total-batch 64 %s", options);
  profile_begin(run->h->backend);
  for (int step = 0; step < STEPS; step++) {
    StepResult want = run_step(plain, step), got = run_step(run, step);
    assert_true(want.loss == got.loss && want.grad_norm == got.grad_norm);
  }
  trainer_validate(&run->trainer, &run->data.loader, 1); // no step's
  const ProfileTotals *t = profile_collect(run->h->backend);
  assert_int_equal(t->steps, STEPS);
  // The head's GEMMs are not among them.
  assert_int_equal(t->groups[PROFILE_GEMMS].calls, STEPS * MICRO_STEPS * LAYERS * 12);
  assert_int_equal(t->groups[PROFILE_ATTENTION_FORWARD].calls, STEPS * MICRO_STEPS * LAYERS);
  assert_int_equal(t->groups[PROFILE_ATTENTION_BACKWARD].calls, STEPS * MICRO_STEPS * LAYERS);
  assert_int_equal(t->groups[PROFILE_EMBEDDING].calls, STEPS * MICRO_STEPS * 2);
  // 6 flops per weight and token, again for what is recomputed; attention: 2 heads of 8, 2 x 16 tokens.
  double weights = LAYERS * (16 * 32 + 16 * 16 + 3 * 16 * 24), tokens = STEPS * 64;
  assert_true(t->groups[PROFILE_GEMMS].flops >= 6 * weights * tokens);
  assert_true(t->groups[PROFILE_HEAD_LOSS].flops == 6 * 300 * 16 * tokens);
  assert_true(t->groups[PROFILE_ATTENTION_FORWARD].flops ==
              2.0 * STEPS * MICRO_STEPS * LAYERS * 2 * 2 * 16 * 16 * 8);
  assert_true(t->groups[PROFILE_ATTENTION_BACKWARD].flops ==
              2.5 * t->groups[PROFILE_ATTENTION_FORWARD].flops);
  double sum = 0;
  for (int g = 0; g < PROFILE_GROUP_COUNT; g++) {
    assert_true(t->groups[g].seconds >= 0);
    sum += t->groups[g].seconds;
    if (g < PROFILE_COMMUNICATION || (g == PROFILE_COPIES && copies))
      assert_true(t->groups[g].calls > 0 && t->groups[g].seconds > 0);
  }
  assert_true(fabs(sum / t->step_seconds - 1) < 1e-9);
  bool concurrent = run->h->backend->device == ON_CUDA && copies;
  assert_true((t->groups[PROFILE_COPIES].own_seconds > 0) == concurrent);
  run_close(plain);
  run_close(run);
}

TEST(test_steps) {
  static const char *const backends[] = {"cpu", "cuda"};
  for (int i = 0; i < 2; i++) {
    check_steps(backends[i], "", false);
    check_steps(backends[i], "--materialized-logits", false);
    check_steps(backends[i], "--recompute elementwise --offload weights,gradients,optimizer", true);
  }
}

TEST(test_peaks) {
  assert_true(gpu_peak_flops("NVIDIA H200, CUDA 13.0") == 989e12);
  assert_true(gpu_peak_flops("NVIDIA H100 PCIe") == 756e12);
  assert_true(gpu_peak_flops("NVIDIA H200 NVL") == 835e12);
  assert_true(gpu_peak_flops("NVIDIA A100 80GB PCIe") == 312e12);
  assert_true(gpu_peak_flops("NVIDIA GB200") == 2500e12);
  assert_true(gpu_peak_flops("NVIDIA GeForce RTX 4090, CUDA 13.0") == 165e12);
  const char *const unknown[] = {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "NVIDIA A10",
                                 "NVIDIA GeForce RTX 4090 Laptop GPU", "CPU, 2 threads, OpenBLAS for Zen"};
  for (int i = 0; i < 5; i++) assert_true(isnan(gpu_peak_flops(unknown[i])));
  assert_non_null(card_of("NVIDIA H100 80GB HBM3, CUDA 13.0"));
  assert_non_null(card_of("NVIDIA H200, CUDA 13.0"));
  const char *const other_forms[] = {"NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"};
  for (int i = 0; i < 3; i++) assert_null(card_of(other_forms[i]));
}

// The number of that name in a log's record of the event; NaN where there is none.
static double logged(const char *log, const char *event, const char *name) {
  char *text = read_text(log), start[64];
  snprintf(start, sizeof start, "{\"event\":\"%s\"", event);
  const char *line = strstr(text, start);
  assert_non_null(line);
  cJSON *record = cJSON_Parse(line); // ignores the lines after it
  double number = cJSON_GetNumberValue(json_member(record, name));
  cJSON_Delete(record);
  free(text);
  return number;
}

// Checks the log of a GPU's run: here the report is given an H200's name.
static void check_report(Dtype dtype, const char *device, double peak) {
  enum { RANKS = 2 };
  const double seconds = 0.25;
  const char *log = temp_path("mfu.jsonl");
  Run *run = run_open(JOB);
  Backend *backend = run->h->backend;
  snprintf(backend->description, sizeof backend->description, "%s", device);
  Options o = run->options;
  o.dtypes.weight = dtype, o.ranks = RANKS, o.log = log;
  Report r = report_open(&o, backend);
  report_start(&r, backend, "data");
  StepResult result = run_step(run, 0);
  report_steps(&r, &run->trainer, &(RunState){.first_loss = NAN}, &result, 1, seconds);
  report_close(&r);
  double flops = model_flops_per_token(&o.model, 16) * 32, mfu = logged(log, "step", "mfu");
  double logged_peak = logged(log, "start", "peak_flops_per_second");
  if (isnan(peak))
    assert_true(isnan(logged_peak) && isnan(mfu));
  else
    assert_true(logged_peak == RANKS * peak && fabs(mfu / (flops / (RANKS * peak) / seconds) - 1) < 1e-12);
  run_close(run);
}

TEST(test_mfu) {
  check_report(DTYPE_BF16, "NVIDIA H200, CUDA 13.0", 989e12);
  check_report(DTYPE_F32, "NVIDIA H200, CUDA 13.0", NAN); // another peak
  check_report(DTYPE_BF16, "NVIDIA Unheard Of, CUDA 13.0", NAN);
}

TEST_MAIN(tests_run("profile", make_temp_dir, remove_temp_dir))
