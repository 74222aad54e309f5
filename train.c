// lce.c: trains GPT-2, Llama, Mistral and Qwen with a fused, chunked lm_head + cross-entropy.
//
//   options -> backend -> data -> plan -> model -> THE STEP, and what happens now and then -> summary
//
// Reading on from here: trainer/step.c (many ranks, the update), model/transformer.c (forward and backward),
// kernels/lce/linear_cross_entropy.c (LM head + loss), kernels/kernels.h (every operation).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/file.h"           // folder_require_new, output_taken
#include "kernels/fail.h"        // fail
#include "kernels/integers.h"    // max_i64
#include "kernels/profile.h"     // profile_begin, profile_phase
#include "kernels/ranks/ranks.h" // ranks_begin
#include "kernels/system.h"      // now_seconds
#include "trainer/data.h"        // run_data_open, prompt_open, prompt_token_bytes
#include "trainer/plan.h"        // plan_print, plan_require, plan_set_mode, plan_record, plan_compare_modes
#include "trainer/report.h"      // report_open, report_collect, report_validation, report_summary, ...
#include "trainer/resume.h"      // resume_require_same, resume_open, resume_save
#include "trainer/stop.h"        // stop_requested, stop_on_signals
#include "trainer/trainer.h" // machine_open, trainer_create, trainer_pass, trainer_update, trainer_validate, ...

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

static void open_data(Run *run) {
  const Options *o = run->options;
  run->data = run_data_open(o);
  run->prompt = prompt_open(o, run->data.source);
  if (o->eval_only && !o->origin)
    fail("--eval-only: there is no model to evaluate; name its folder with --init or --resume");
  if (o->eval_only && !run->data.loader.validation_batches)
    fail("--eval-only: there is nothing to evaluate; name --val-data or raise --val-fraction");
  loader_require_targets(&run->data.loader, o->steps > o->first_step && !o->eval_only, o->eval_batches);
}

static void create_model(Run *run) {
  const Options *o = run->options;
  double start = now_seconds();
  trainer_create(&run->trainer, o, run->backend);
  const Source *validated = run->data.val_source ? run->data.val_source : run->data.source;
  run->trainer.token_bytes = prompt_token_bytes(&run->prompt, validated, o->model.vocab_size);
  if (o->origin) printf("loaded   in %.1fs\n", now_seconds() - start);
  plan_set_mode(&run->trainer, o->pass.mode);
  run->backend->ops->device_peak_reset(run->backend);
}

// Checks before it reserves, and reserves before it writes.
static void open_run(Run *run, Options *o) {
  *run = (Run){.options = o, .backend = machine_open(o)};
  machine_join_ranks(run->backend);
  plan_resolve_chunk(o, run->backend->device);
  open_data(run);
  resume_require_same(o, run->backend, run->data.text);
  report_settings(o, run->backend, run->data.text, run->data.source, run->data.val_source);
  plan_require(o, run->backend->device, machine_usable_bytes(run->backend));
  run->checkpoints = resume_open(o, run->data.text);
  run->report = report_open(o, run->backend);
  create_model(run);
  if (o->dump) folder_require_new("dump", o->dump, "first-step");
  plan_write_recorded(
      o, run->backend); // so that a path that cannot be written fails before the run, not after it
  stop_on_signals();
  run->trainer.stop = &stop_requested;
  report_start(&run->report, run->backend, run->data.source->name);
}

// --- THE STEP ----------------------------------------------------------------------------------------------

double schedule_rate(const Schedule *s, int64_t step) {
  const double pi = 3.14159265358979323846;
  if (step < s->warmup_steps) return s->peak * (double)(step + 1) / (double)s->warmup_steps;
  int64_t span = s->total_steps - s->warmup_steps;
  double progress = span > 0 ? (double)(step - s->warmup_steps) / (double)span : 1;
  if (progress > 1) progress = 1;
  double stable = 1 - s->decay_share;
  if (s->kind == SCHEDULE_CONSTANT) return s->peak;
  if (s->kind == SCHEDULE_COSINE) progress = 0.5 * (1 - cos(pi * progress));
  if (s->kind == SCHEDULE_WSD) progress = progress > stable ? (progress - stable) / s->decay_share : 0;
  return s->peak * (1 - (1 - s->floor) * progress);
}

// The step's micro-batches of this rank, and how many targets count in those of all ranks. Where some are masked every
// rank reads the other ranks' batches, too, and counts: that costs less than communication.
static int64_t load_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  const Backend *b = t->backend;
  int64_t tokens = o->batch * o->seq_len, counted = 0;
  for (int64_t m = 0; m < o->micro_steps; m++) {
    int32_t *to = t->host_tokens + m * tokens, *targets = t->host_targets + m * tokens;
    int32_t *documents = o->pack ? t->host_documents + 2 * m * tokens : NULL;
    LoaderPlace place = {.step = step, .micro_step = m, .micro_steps = o->micro_steps, .ranks = b->ranks};
    int64_t max = 0;
    for (int i = o->masked ? 1 : b->ranks; i <= b->ranks; i++) { // this rank's batch comes last, and stays
      place.rank = (b->rank + i) % b->ranks;
      int64_t here = loader_train_batch(loader, place, to, targets, documents);
      counted += here * (o->masked ? 1 : b->ranks);
      max = max_i64(max, here);
    }
    t->host_max_counted[m] = max;
  }
  return counted;
}

// The place of a pending step's result on the device.
static Tensor result(const Trainer *t, int slot, int which) {
  return tensor_rows(t->results, RESULTS * slot + which, 1);
}

// Sums over all ranks, with what the ranks share.
static void share_results(Trainer *t, int slot) {
  Tensor shared = tensor_rows(t->results, RESULTS * slot + RESULT_STOP, 2);
  Tensor summed = tensor_rows(t->results, RESULTS * slot, RESULT_NORM);
  const float values[2] = {t->stop && *t->stop, (float)t->step_seconds};
  backend_to_device(t->backend, shared, values);
  all_reduce(t->backend, (Collective){.out = summed, .x = summed, .async = true});
  collectives_join(t->backend, 0);
}

// A plan (trainer/plan.c) takes this step, too, on a backend that counts bytes and computes nothing.
void trainer_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  Backend *backend = t->backend;
  bool planning = backend->memory.planning;
  double sent = backend->wire_bytes, rate = schedule_rate(&o->schedule, step);
  int slot = t->pending_count++; // of the results, which stay on the device until they are collected
  if (slot == TRAINER_PENDING) fail("internal: the results of %d steps were not collected", TRAINER_PENDING);

  profile_phase(backend, PHASE_STEP);
  // All micro-batches first: the mean's normaliser is the number of targets counted in the whole step.
  int64_t counted = planning ? 0 : load_step(t, loader, step);
  float scale = counted ? (float)(1.0 / (double)counted) : 0;
  for (int64_t m = 0; m < o->micro_steps; m++) {
    Batch batch = trainer_loaded_batch(t, m, o->masked);
    // Ranks that share the head's rows compute as many tokens as the rank with the most counted ones.
    if (o->masked && t->model.shard.vocab_size && !planning) batch.counted = t->host_max_counted[m];
    TransformerOptions pass = trainer_pass(t, step, m); // the last one sums gradients over the ranks
    transformer_train(backend, &t->model, &batch, &pass, scale, m > 0, t->loss);
    for (int i = 0; i < RESULT_STATISTICS; i++)
      if (tensor_exists(t->statistics[i]))
        reduce(backend, (Reduce){.sum = result(t, slot, i), .x = t->statistics[i], .accumulate = m > 0});
    if (planning && m == 1) break; // the rest need the same memory, and send as much
  }
  if (backend->ranks > 1) share_results(t, slot);

  profile_phase(backend, PHASE_UPDATE);
  trainer_sum_squares(t); // of all gradients, to t->squares
  clip_scale(backend, (ClipScale){.norm = result(t, slot, RESULT_NORM),
                                  .scale = t->scale,
                                  .sum_of_squares = t->squares,
                                  .max_norm = o->max_grad_norm});
  Update update = o->update;
  update.grad_scale = t->scale;
  update.lr = (float)rate;
  update.step = step + 1;
  update.seed = o->seed;
  trainer_update(t, update);
  profile_phase(backend, PHASE_NONE);
  t->wire_bytes = backend->wire_bytes - sent;
  t->pending[slot] = (StepResult){.step = step, .learning_rate = rate, .counted = counted};
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

// Where it cannot be written the run continues: the next one may find space.
static void save(Run *run, int64_t step) {
  double start = now_seconds();
  report_break(&run->report);
  if (resume_save(&run->checkpoints, run->options, &run->trainer.model, run->backend, step, run->data.text))
    report_checkpoint(&run->report, step, now_seconds() - start);
}

static bool every(int64_t period, int64_t done) {
  return period && done % period == 0;
}

// A single rank stops at the signal. Several stop together, when the results of a step show the signal to all.
static bool stopping(const Run *run) {
  return run->options->ranks == 1 ? stop_requested : run->trainer.stopping;
}

// --- the run -----------------------------------------------------------------------------------------------

static void train(Run *run) {
  const Options *o = run->options;
  Trainer *t = &run->trainer;
  Report *report = &run->report;
  Checkpoints *c = &run->checkpoints;
  Ledger *ledger = &run->backend->memory.ledger;
  int64_t done = o->first_step;
  report->since = now_seconds();
  while (done < o->steps && !stopping(run)) {
    if (o->profile && done == o->first_step + PROFILE_WARM_UP) profile_begin(run->backend);
    plan_record(ledger, o, done); // --timeline
    trainer_step(t, &run->data.loader, done++);
    ledger->recording = false;
    if (o->dump && done == o->first_step + 1) trainer_dump(t);

    bool last = done == o->steps, now_sample = every(o->sample_every, done);
    bool now_validate = every(o->eval_every, done), now_save = every(o->save_every, done);
    if (!report_due(report, t) && !now_validate && !now_sample && !now_save && !last) continue;
    report_collect(report, t, &c->state);
    if (!output_taken() || report_log_lost(report)) stop_requested = 1;
    if (now_validate && !last) validate(run, done);
    if (now_sample) sample(run, done);
    if (now_save && !last && c->saves) save(run, done);
    report->since = now_seconds();
  }
  report_collect(report, t, &c->state);
  // The last checkpoint has the last validation's loss. A run that is stopped may soon be killed: it saves first.
  if (!stopping(run)) validate(run, done);
  t->stop = NULL; // what follows is for a stopped run, too
  report_break(report);
  if (stopping(run))
    printf("stopped after step %lld%s\n", (long long)done, report_log_lost(report) ? "" : " on a signal");
  bool validated = c->state.val_step == done;
  if (c->saves && c->saved_step != done) save(run, done);
  if (!validated) validate(run, done);
  report_summary(report, t, &c->state, source_entropy(run->data.source), stopping(run));
  report_resuming(report, stopping(run) && c->saved_step >= 0);
}

static void evaluate(Run *run) {
  validate(run, run->options->first_step);
  if (isnan(run->checkpoints.state.val_loss)) fail("stopped on a signal: not all is evaluated");
  report_evaluation(&run->report, run->checkpoints.state.val_loss);
}

// 1 where the log or the last weights could not be written.
static int close_run(Run *run) {
  const Checkpoints *c = &run->checkpoints;
  bool lost = report_log_lost(&run->report);
  bool unsaved = c->saves && c->saved_step != run->options->first_step + run->report.steps_done;
  report_close(&run->report);
  checkpoint_store_close(&run->checkpoints.store);
  trainer_destroy(&run->trainer);
  prompt_close(&run->prompt);
  run_data_close(&run->data);
  backend_destroy(run->backend);
  return unsaved || lost;
}

// Weak: tests and tools, which have a main of their own, link this file for its step.
__attribute__((weak)) int main(int argc, char **argv) {
  Options options;
  Run run;
  int status = 0;
  ranks_begin();
  options_read(&options, argc, argv);
  if (options.plan || options.fit) {
    (options.plan ? plan_print : plan_print_fit)(&options);
  } else {
    open_run(&run, &options);
    (options.eval_only ? evaluate : train)(&run);
    plan_write_recorded(&options, run.backend);
    if (options.compare_modes && !stopping(&run)) plan_compare_modes(&run.trainer);
    status = close_run(&run);
  }
  options_free(&options);
  return status;
}
