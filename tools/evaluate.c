// The loss of a model, a Hugging Face directory or a checkpoint of ./train, over all validation data.
//
//   tools/evaluate --init runs/llama --val-data val.bin
//   mpirun -n 8 tools/evaluate --init runs/llama --val-data val.bin --log evaluated.jsonl
//
// It has the options of ./train that say what is evaluated, and where. tools/evaluate.md tells more.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "kernels/base/fail.h"
#include "kernels/base/system.h"
#include "kernels/ranks/ranks.h"
#include "trainer/data.h"
#include "trainer/plan.h"
#include "trainer/report.h"
#include "trainer/resume.h"
#include "trainer/trainer.h"

static const char *const names[] = {
    "init",      "tokenizer",           "data",          "val-data", "val-fraction", "data-order",
    "pack",      "end-of-text",         "seed",          "batch",    "seq-len",      "logit-softcap",
    "fused-lce", "materialized-logits", "lce-chunk",     "log",      "plan",         "fit",
    "device",    "other-tokenizer",     "device-memory", "dtype",    "ranks",        "timeout"};
enum { NAMES = sizeof names / sizeof *names };

static void read_options(Options *o, int argc, char **argv) {
  static Option rows[NAMES + 1]; // of OPTION_END the last
  for (int i = 0; i < NAMES; i++) rows[i] = *option_find(options_rows, names[i]);
  rows[0].help = "Evaluate the model in DIR (config.json and safetensors of Hugging Face: " FAMILY_NAMES ")";
  const OptionTable table = {
      .rows = rows,
      .doc = "Evaluates --init: the loss over all of --val-data, or over the held-out part of --data.",
      .stray = "the model is named with --init DIR, and data with --val-data PATH"};
  options_read(o, &table, argc, argv);
  if (!o->init) fail("there is no model to evaluate; name its folder with --init DIR");
  if (!o->data) // nothing is trained on
    for (int64_t i = 0; i < arrlen(o->val_data); i++) arrput(o->data, o->val_data[i]);
  resume_find(o);
  options_resolve(o);
}

// Fails if a signal ends it, or if the loss is not a number.
static void evaluate(const Options *o, Backend *backend, const RunData *data) {
  Prompt prompt = prompt_open(o, data);
  Report report = report_open(o, backend);
  Trainer trainer;
  double start = now_seconds();
  trainer_create(&trainer, o, backend);
  trainer.token_bytes = prompt_token_bytes(&prompt, data, o->model.vocab_size);
  printf("loaded   in %.1fs\n", now_seconds() - start);
  plan_set_mode(&trainer, o->pass.mode);
  stop_on_signals();
  trainer.stop = &stop_requested;
  trainer.on_validated = report_validating;
  trainer.observer = &report;
  report_start(&report, backend, data->source->name);
  report.since = report.last_printed = now_seconds();
  double loss = trainer_validate(&trainer, &data->loader, 0);
  report_break(&report);
  if (trainer.cut_short) fail("stopped on a signal: not all is evaluated");
  report_validation(&report, 0, loss, trainer.bits_per_byte, &data->loader);
  if (!log_line(report.log, LOG_EVENT("summary", NUM("val_loss", loss), NUM("perplexity", exp(loss)))))
    fail("cannot write the log %s: %s", o->log, strerror(errno));
  report_close(&report);
  trainer_destroy(&trainer);
  prompt_close(&prompt);
}

int main(int argc, char **argv) {
  Options o;
  ranks_begin();
  read_options(&o, argc, argv);
  if (o.plan) {
    plan_print(&o);
  } else {
    Backend *backend = machine_open(&o);
    backend_join_ranks(backend);
    plan_resolve(&o, backend->device, machine_agreed_bytes(backend, &o));
    RunData data = run_data_open(&o);
    if (!data.loader.validation_batches)
      fail("there is nothing to evaluate; name --val-data or raise --val-fraction");
    loader_require_targets(&data.loader, false, 0);
    resume_require_same(&o, backend, data.text);
    report_settings(&o, backend, &data);
    plan_require(&o, backend->device, machine_usable_bytes(backend));
    evaluate(&o, backend, &data);
    run_data_close(&data);
    backend_destroy(backend);
  }
  options_free(&o);
  return 0;
}
