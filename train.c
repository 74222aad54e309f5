// lce.c: trains GPT-2, Llama and later families with a fused, chunked lm_head + cross-entropy.
//
//   options -> backend -> data -> plan -> model -> THE STEP, and what happens now and then -> summary
//
// Reading on from here: trainer/step.c (many ranks, the update), model/transformer.c (forward and backward),
// kernels/lce/linear_cross_entropy.c (LM head + loss), kernels/kernels.h (every operation).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// defines: folder_require_new
#include "data/file.h"
// defines: stdout_ok
#include "kernels/base/fail.h"
// defines: backend_join_ranks, clip_scale, ClipScale, Update
#include "kernels/kernels.h"
// defines: profile_begin
#include "kernels/base/profile.h"
// defines: ranks_begin
#include "kernels/ranks/ranks.h"
// defines: now_seconds
#include "kernels/base/system.h"
// defines: transformer_train, TransformerOptions, Batch
#include "model/transformer.h"
// defines: run_data_open, prompt_open, prompt_token_bytes
#include "trainer/data.h"
// defines: plan_set_step, plan_print, plan_require, plan_set_mode, plan_compare_modes, ...
#include "trainer/plan.h"
// defines: report_open, report_due, report_collect, report_validation, report_sample, report_summary, ...
#include "trainer/report.h"
// defines: resume_find, resume_require_same, resume_open, resume_save
#include "trainer/resume.h"
// defines: machine_open, stop_on_signals, trainer_create, trainer_load, trainer_verify, skip_empty_step, ...
#include "trainer/trainer.h"

typedef struct {
  const Options *options;
  Backend *backend;
  RunData data;
  Prompt prompt;
  Checkpoints checkpoints;
  Report report;
  Trainer trainer; // model, optimizer, batch
} Run;

// --- options, backend, data, model -------------------------------------------------------------------------

static void create_model(Run *run) {
  const Options *o = run->options;
  double start = now_seconds();
  trainer_create(&run->trainer, o, run->backend);
  run->trainer.skipped = run->checkpoints.state.skipped;
  run->trainer.token_bytes = prompt_token_bytes(&run->prompt, &run->data, o->model.vocab_size);
  if (o->origin) printf("loaded   in %.1fs\n", now_seconds() - start);
  plan_set_mode(&run->trainer, o->pass.mode);
  run->backend->ops->device_peak_reset(run->backend);
}

// Check everything, then allocate, then write.
static void open_run(Run *run, Options *o) {
  *run = (Run){.options = o, .backend = machine_open(o)};
  backend_join_ranks(run->backend);
  plan_resolve(o, run->backend->device, machine_agreed_bytes(run->backend, o));
  run->data = run_data_open(o);
  run->prompt = prompt_open(o, &run->data);
  loader_require_targets(&run->data.loader, o->steps > o->first_step, o->eval_batches);
  resume_require_same(o, run->backend, run->data.text);
  report_settings(o, run->backend, &run->data);
  plan_require(o, run->backend->device, machine_usable_bytes(run->backend));
  run->checkpoints = resume_open(o, run->backend, &run->data);
  run->report = report_open(o, run->backend);
  create_model(run);
  if (o->dump) folder_require_new("dump", o->dump, "first-step");
  plan_write_recorded(o, run->backend, BACK_UP); // what cannot be written fails before the run, not after it
  stop_on_signals();
  run->trainer.stop = &stop_requested;
  report_start(&run->report, run->backend, run->data.source->name);
}

// --- THE STEP ----------------------------------------------------------------------------------------------

// After the warm-up: half a cosine down to the floor (Loshchilov, Hutter 2017), a straight line down to it, no
// change, or stable and then a straight line down at the end (WSD, Hu et al. 2024).
double schedule_rate(const Options *o, int64_t step) {
  const double pi = 3.14159265358979323846;
  if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
  int64_t span = o->steps - o->warmup;
  double progress = span > 0 ? (double)(step - o->warmup) / (double)span : 1;
  if (progress > 1) progress = 1;
  double stable = 1 - o->decay_share;
  if (o->schedule == SCHEDULE_CONSTANT) return o->lr;
  if (o->schedule == SCHEDULE_COSINE) progress = 0.5 * (1 - cos(pi * progress));
  if (o->schedule == SCHEDULE_WSD) progress = progress > stable ? (progress - stable) / o->decay_share : 0;
  return o->lr * (1 - (1 - o->min_lr) * progress);
}

// Asynchronous: the results stay on the device until report_collect reads those of several steps.
void train_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  double rate = schedule_rate(o, step);
  trainer_begin_step(t);

  // Load all micro-batches: the loss is the mean over the targets that count in the whole step.
  int64_t counted = trainer_load(t, loader, step);
  if (skip_empty_step(t, step, counted)) return;
  float scale = (float)(1.0 / (double)counted);

  // Forward and backward of each. Gradients add up, and the last pass sums them over the ranks.
  for (int64_t m = 0; m < o->micro_steps; m++) {
    Batch batch = trainer_micro_batch(t, m);
    TransformerOptions pass = pass_options(t, step, m);
    transformer_train(t->backend, &t->model, &batch, &pass, scale, m > 0, t->loss);
    if (m == 0) trainer_verify(t, step, &batch, &pass, scale); // --verify-every: the same again
    trainer_add_statistics(t, m > 0);                          // the loss among them
  }
  trainer_share_results(t);

  // The gradients' norm, and the factor that clips it.
  parameters_sum_squares(t->backend, &t->model.parameters);
  clip_scale(t->backend, (ClipScale){.norm = trainer_result(t, RESULT_NORM),
                                     .scale = t->scale,
                                     .sum_of_squares = t->squares,
                                     .max_norm = (float)o->max_grad_norm});

  // Update the weights.
  Update update = o->update;
  update.grad_scale = t->scale;
  update.lr = (float)rate;
  update.step = step + 1 - t->skipped;
  update.seed = o->seed;
  parameters_update(t->backend, &t->model.parameters, update);
  trainer_end_step(t, (StepResult){.step = step, .learning_rate = rate, .counted = counted});
}

// --- what happens now and then -----------------------------------------------------------------------------

static void validate(Run *run, int64_t step) {
  if (!run->data.loader.validation_batches) return;
  RunState *state = &run->checkpoints.state;
  double loss = trainer_validate(&run->trainer, &run->data.loader, run->options->eval_batches);
  if (run->trainer.cut_short) return; // by a signal
  state->val_loss = loss;
  state->val_step = step;
  report_validation(&run->report, step, loss, run->trainer.bits_per_byte, &run->data.loader);
}

static void sample(Run *run, int64_t step) {
  const Prompt *p = &run->prompt;
  int64_t count;
  uint64_t seed = run->options->seed + (uint64_t)step;
  int32_t *tokens = trainer_sample(&run->trainer, p->tokens, p->count, seed, &count);
  if (tokens) report_sample(&run->report, step, p, tokens, count);
  free(tokens);
}

// If a checkpoint cannot be written, the run goes on: there may be space for the next one.
static void save(Run *run, int64_t step) {
  double start = now_seconds();
  report_break(&run->report);
  parameters_finish_update(run->backend, &run->trainer.model.parameters);
  if (resume_save(&run->checkpoints, run->options, &run->trainer.model, run->backend, step, &run->data))
    report_checkpoint(&run->report, step, now_seconds() - start);
}

// --profile and --timeline watch some steps, and --dump writes what the first one computed.
static void before_step(Run *run, int64_t step) {
  const Options *o = run->options;
  if (o->profile && step == o->first_step + PROFILE_WARM_UP) profile_begin(run->backend);
  plan_record(&run->backend->memory.ledger, o, step);
}

static void after_step(Run *run, int64_t step) {
  run->backend->memory.ledger.recording = false;
  if (run->options->dump && step == run->options->first_step) trainer_dump(&run->trainer);
}

// A single rank stops at the signal. Several stop together, when a step's results show the signal to all.
static bool stopping(const Run *run) {
  return run->options->ranks == 1 ? stop_requested : run->trainer.stopping;
}

// --- the run -----------------------------------------------------------------------------------------------

static bool every(int64_t period, int64_t done) {
  return period && done % period == 0;
}

// The last checkpoint has the last validation's loss. A run that was told to stop may soon be killed, so it
// saves first, and does not begin to validate on all data.
static void finish(Run *run, int64_t done) {
  Report *report = &run->report;
  Checkpoints *c = &run->checkpoints;
  report_collect(report, &run->trainer, &c->state);
  if (!stopping(run)) validate(run, done);
  run->trainer.stop = NULL; // what follows is for a stopped run, too
  report_break(report);
  bool stopped = stopping(run), validated = c->state.val_step == done;
  if (stopped)
    printf("stopped after step %lld%s\n", (long long)done, report_log_lost(report) ? "" : " on a signal");
  if (run->options->save && c->saved_step != done) save(run, done);
  if (!validated && !(stopped && run->options->eval_batches == 0)) validate(run, done);
  report_summary(report, &run->trainer, &c->state, source_entropy(run->data.source), stopped);
  report_resuming(report, stopped && c->saved_step >= 0);
}

static void train(Run *run) {
  const Options *o = run->options;
  Report *report = &run->report;
  int64_t done = o->first_step;
  report->since = now_seconds();
  while (done < o->steps && !stopping(run)) {
    before_step(run, done);
    train_step(&run->trainer, &run->data.loader, done);
    after_step(run, done++);

    bool last = done == o->steps, now_sample = every(o->sample_every, done);
    bool now_validate = !last && every(o->eval_every, done), now_save = !last && every(o->save_every, done);
    if (!report_due(report, &run->trainer) && !now_validate && !now_sample && !now_save && !last) continue;
    report_collect(report, &run->trainer, &run->checkpoints.state);
    if (!stdout_ok() || report_log_lost(report)) stop_requested = 1;
    if (now_validate) validate(run, done);
    if (now_sample) sample(run, done);
    if (now_save && o->save) save(run, done);
    report->since = now_seconds();
  }
  finish(run, done);
}

// Returns 1 if the log or the last weights could not be written.
static int close_run(Run *run) {
  const Options *o = run->options;
  const Checkpoints *c = &run->checkpoints;
  bool lost = report_log_lost(&run->report);
  bool unsaved = o->save && c->saved_step != o->first_step + run->report.steps_done;
  report_close(&run->report);
  checkpoint_store_close(&run->checkpoints.store);
  trainer_destroy(&run->trainer);
  prompt_close(&run->prompt);
  run_data_close(&run->data);
  backend_destroy(run->backend);
  return unsaved || lost;
}

int main(int argc, char **argv) {
  Options options;
  Run run;
  int status = 0;
  ranks_begin();
  options_read(&options, &options_table, argc, argv);
  resume_find(&options);
  options_resolve(&options);
  plan_set_step(train_step); // a plan is this step on a backend that counts bytes and computes nothing
  if (options.plan) {
    plan_print(&options);
  } else {
    open_run(&run, &options);
    train(&run);
    plan_write_recorded(&options, run.backend, OVERWRITE);
    if (options.compare_modes && !stopping(&run)) plan_compare_modes(&run.trainer);
    status = close_run(&run);
  }
  options_free(&options);
  if (!status && stdout_ok()) end_by_signal();
  return status;
}
