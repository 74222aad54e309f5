// lce.c: trains GPT-2, Llama, Mistral and Qwen with a fused, chunked lm_head + cross-entropy.
//
//   options -> backend -> data -> plan -> model -> loop -> summary
//
// Reading on from here: trainer/step.c (a step), model/transformer.c (forward and backward),
// kernels/linear_cross_entropy.c (LM head + loss), kernels/kernels.h (every operation).
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file.h"
#include "kernels/fail.h"
#include "kernels/profile.h"
#include "kernels/ranks/ranks.h"
#include "kernels/system.h"
#include "model/checkpoint/checkpoint.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/prompt.h"
#include "trainer/report.h"
#include "trainer/resume.h"
#include "trainer/setup.h"

typedef struct {
  const Options *options;
  Backend *backend;
  RunData data;
  Prompt prompt;
  Trainer trainer;
  Report report;
  CheckpointStore store; // of rank 0, with --save
  bool saves;            // with --save, on all ranks
  int64_t saved_step;    // of the last checkpoint; -1 before there is one
  RunState state;        // the losses so far
  bool stop;             // some rank got a signal to stop; all ranks have it after the same step
  double pace;           // seconds a step takes, on which the ranks agree
} Run;

// --- stopping ----------------------------------------------------------------------------------------------

static volatile sig_atomic_t stop_requested;

static void request_stop(int signal_number) {
  stop_requested = 1;
  // A second one ends the program at once; but a closed terminal sends several, and a CPU limit one a second.
  if (signal_number != SIGHUP && signal_number != SIGXCPU) signal(signal_number, SIG_DFL);
}

// A run whose terminal or pipe is closed still saves its weights.
static void handle_signals(void) {
  signal(SIGINT, request_stop);
  signal(SIGTERM, request_stop);
  signal(SIGXCPU, request_stop);
  if (signal(SIGHUP, request_stop) == SIG_IGN) signal(SIGHUP, SIG_IGN); // nohup
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); // a file that may not grow then fails with a sentence, like a full disk
}

// A single rank stops at the signal. Several stop together, when the results of a step show the signal to all.
static bool stopping(const Run *run) {
  return run->options->ranks == 1 ? stop_requested : run->stop;
}

// --- the run -----------------------------------------------------------------------------------------------

// Fetches the results of the steps since `since`, when nothing was under way.
static void collect(Run *run, double since) {
  StepResult results[TRAINER_PENDING];
  int count = trainer_collect(&run->trainer, results);
  if (!count) return;
  double seconds = now_seconds() - since; // only now has the device done them all
  for (int i = 0; i < count; i++) run->stop |= results[i].stop;
  run->pace = results[count - 1].agreed_seconds;
  if (isnan(run->state.first_loss)) run->state.first_loss = results[0].loss;
  run->state.last_loss = results[count - 1].loss;
  report_steps(&run->report, &run->trainer, results, count, seconds);
}

static void validate(Run *run, int64_t step) {
  if (!run->data.loader.validation_batches) return;
  const Options *o = run->options;
  double loss = trainer_validate(&run->trainer, &run->data.loader, o->eval_batches);
  run->stop |= run->trainer.cut_short;
  if (run->trainer.cut_short) return;
  run->state.val_loss = loss;
  run->state.val_step = step;
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

// The checkpoint after `step` steps. Where it cannot be written the run continues: the next one may find space.
static void save(Run *run, int64_t step) {
  cJSON *json = resume_write(run->options, &run->state, step, run->data.text);
  Reason reason;
  double start = now_seconds();
  report_break(&run->report);
  Model *model = trainer_model(&run->trainer);
  int32_t saved = checkpoint_save(&run->store, model, run->backend, step, json, &reason);
  if (saved)
    report_checkpoint(&run->report, step, now_seconds() - start);
  else
    warn("no checkpoint after step %lld: %s", (long long)step, reason.text);
  machine_broadcast(run->backend, &saved, sizeof saved); // rank 0's counts
  if (saved) run->saved_step = step;
  cJSON_Delete(json);
}

static void dump(const Run *run) {
  Reason reason;
  Folder folder = folder_begin(run->options->dump, "first-step", NULL);
  trainer_store_step(&run->trainer, &folder);
  if (!folder_finish(&folder, &reason)) fail("--dump: %s", reason.text);
}

static bool every(int64_t period, int64_t done) {
  return period && done % period == 0;
}

static void train(Run *run) {
  const Options *o = run->options;
  Ledger *ledger = &run->backend->memory.ledger;
  int64_t collect_every = 1, done = o->first_step;
  run->trainer.stop = &stop_requested;
  double since = now_seconds();
  while (done < o->steps && !stopping(run)) {
    // Not of the first step, which also chooses algorithms.
    ledger->recording = o->timeline && done > o->first_step && done <= o->first_step + TIMELINE_STEPS;
    ledger->step = (int)done;
    run->trainer.step_seconds = run->report.smoothed_seconds;
    if (o->profile && done == o->first_step + PROFILE_WARM_UP) profile_begin(run->backend);
    trainer_step(&run->trainer, &run->data.loader, done++);
    ledger->recording = false;
    if (o->dump && done == o->first_step + 1) dump(run);
    bool look = every(o->eval_every, done) || every(o->sample_every, done) || every(o->save_every, done) ||
                done == o->steps;
    if (run->trainer.pending_count < collect_every && !look) continue;

    collect(run, since);
    if (!output_taken() || report_log_lost(&run->report)) stop_requested = 1;
    // The host waits for the device about twice a second, which costs nothing; all ranks after the same step.
    double pace = o->ranks == 1 ? run->report.smoothed_seconds : run->pace;
    collect_every = pace > 0 ? (int64_t)fmax(fmin(0.5 / pace, TRAINER_PENDING), 1) : 1;
    if (every(o->eval_every, done) && done < o->steps) validate(run, done);
    if (every(o->sample_every, done)) sample(run, done);
    if (run->saves && every(o->save_every, done) && done < o->steps) save(run, done);
    since = now_seconds();
  }
  collect(run, since);
  // The last checkpoint has the last validation's loss. A run that is stopped may soon be killed: it saves first.
  if (!stopping(run)) validate(run, done);
  run->trainer.stop = NULL; // what follows is for a stopped run, too
  report_break(&run->report);
  const char *why = report_log_lost(&run->report) ? "" : " on a signal";
  if (stopping(run)) printf("stopped after step %lld%s\n", (long long)done, why);
  bool validated = run->state.val_step == done;
  if (run->saves && run->saved_step != done) save(run, done);
  if (!validated) validate(run, done);
}

static void evaluate(Run *run) {
  run->trainer.stop = &stop_requested;
  validate(run, run->options->first_step);
  if (isnan(run->state.val_loss)) fail("stopped on a signal: not all is evaluated");
  report_evaluation(&run->report, run->state.val_loss);
}

// --- setup -------------------------------------------------------------------------------------------------

// Before anything is loaded, or a log begun.
static void require_something_to_evaluate(const Options *o, const Loader *loader) {
  if (!o->origin) fail("--eval-only: there is no model to evaluate; name its folder with --init or --resume");
  if (!loader->validation_batches)
    fail("--eval-only: there is nothing to evaluate; name --val-data or raise --val-fraction");
}

// An earlier log may be written over, but not while it is read as text.
static void keep_inputs(const Options *o) {
  const TextList tokenizer = {.items = (const char **)&o->tokenizer, .count = o->tokenizer != NULL};
  const TextList *const inputs[] = {&o->data, &o->val_data, &tokenizer};
  const char *const outputs[][2] = {{"log", o->log}, {"timeline", o->timeline}};
  struct stat out;
  for (int k = 0; k < 2; k++)
    for (int l = 0; l < 3; l++)
      for (int i = 0; i < inputs[l]->count; i++)
        if (outputs[k][1] && !stat(outputs[k][1], &out) && S_ISREG(out.st_mode) &&
            path_is_same(outputs[k][1], inputs[l]->items[i]))
          fail("cannot write the %s %s: this run reads it; name another file", outputs[k][0], outputs[k][1]);
}

static void open_data(Run *run) {
  const Options *o = run->options;
  run->data = setup_data(o);
  run->prompt = prompt_open(o, run->data.source);
  if (o->eval_only) require_something_to_evaluate(o, &run->data.loader);
  loader_require_targets(&run->data.loader, o->steps > o->first_step && !o->eval_only, o->eval_batches);
}

// The state of the run that is resumed, and where checkpoints go.
static void open_checkpoints(Run *run) {
  const Options *o = run->options;
  run->state = (RunState){.first_loss = NAN, .last_loss = NAN, .val_loss = NAN, .val_step = -1};
  run->saved_step = -1;
  if (o->resumed_from) {
    run->state = resume_read(o, run->data.text);
    run->saved_step = o->first_step;
  }
  run->saves = o->save && !o->eval_only;
  if (run->saves && o->rank == 0) {
    // From the newest whole checkpoint there: those after it are damaged.
    bool newest = o->resumed_from && (!strcmp(o->resume, "auto") || !strcmp(o->resume, o->save));
    run->store = checkpoint_store_open(o->save, o->origin, o->tokenizer, run->saved_step, newest);
  }
  run->store.keep = o->keep;
  run->store.dtype = o->save_dtype;
}

static void create_model(Run *run) {
  const Options *o = run->options;
  double start = now_seconds();
  trainer_create(&run->trainer, o, run->backend);
  const Source *validated = run->data.val_source ? run->data.val_source : run->data.source;
  run->trainer.token_bytes = prompt_token_bytes(&run->prompt, validated, o->model.vocab_size);
  if (o->origin) printf("loaded   in %.1fs\n", now_seconds() - start);
  plan_set_mode(&run->trainer, o->mode);
  run->backend->ops->device_peak_reset(run->backend);
}

static double device_seconds(void *backend) {
  backend_synchronize(backend);
  return now_seconds();
}

static void write_timeline(const Run *run) {
  const Options *o = run->options;
  Ledger *ledger = &run->backend->memory.ledger;
  ledger->clock = device_seconds;
  ledger->clock_context = run->backend;
  if (o->timeline && o->rank == 0) plan_write_timeline(o->timeline, ledger);
}

static void close_run(Run *run) {
  report_close(&run->report);
  checkpoint_store_close(&run->store);
  trainer_destroy(&run->trainer);
  prompt_close(&run->prompt);
  setup_data_close(&run->data);
  backend_destroy(run->backend);
}

int main(int argc, char **argv) {
  Options options;
  ranks_begin();
  setup_options(&options, argc, argv);
  keep_inputs(&options);
  if (options.plan || options.fit) {
    (options.plan ? plan_print : plan_print_fit)(&options);
    options_free(&options);
    return 0;
  }

  Run run = {.options = &options, .backend = machine_open(&options)};
  machine_join_ranks(run.backend);
  plan_resolve_chunk(&options, run.backend->device);
  open_data(&run);
  resume_require_same(&options, run.backend, run.data.text);
  report_settings(&options, run.backend, run.data.text, run.data.source, run.data.val_source);
  plan_require(&options, run.backend->device, machine_usable_bytes(run.backend));

  open_checkpoints(&run);
  run.report = report_open(&options, run.backend);
  create_model(&run);
  if (options.dump) folder_require_new("dump", options.dump, "first-step");
  write_timeline(&run); // so that a path that cannot be written fails before the run, not after it
  handle_signals();
  report_start(&run.report, run.backend, run.data.source->name);
  if (options.eval_only) {
    evaluate(&run);
  } else {
    train(&run);
    report_summary(&run.report, &run.trainer, &run.state, source_entropy(run.data.source), stopping(&run));
  }
  if (!options.eval_only) report_resuming(&run.report, stopping(&run) && run.saved_step >= 0);
  write_timeline(&run);
  if (options.compare_modes && !stopping(&run)) plan_compare_modes(&run.trainer);

  bool lost = report_log_lost(&run.report);
  bool unsaved = run.saves && run.saved_step != options.first_step + run.report.steps_done;
  close_run(&run);
  options_free(&options);
  return unsaved || lost;
}
