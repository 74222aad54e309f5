// Resolves the options together: the model, the job, the dtypes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/fail.h"
#include "kernels/base/memory.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/hf_config.h"
#include "model/fp8.h"
#include "trainer/options.h"

// --- the model ---------------------------------------------------------------------------------------------

// True if a row describes the model; after parsing, o->model holds the given values.
static bool describes_model(const Option *row) {
  size_t model = offsetof(Options, model);
  return row->offset >= model && row->offset < model + sizeof(ModelConfig);
}

static const char *preset_name(const Options *o) {
  return o->preset ? o->preset : "llama-tiny";
}

// The preset, overridden.
static ModelConfig requested_model(const Options *o) {
  Options with = {.model = model_preset(preset_name(o))};
  if (o->data_vocab_size) with.model.vocab_size = o->data_vocab_size;
  for (const Option *row = options_rows; row->type != OPTION_END; row++)
    if (o->given[row - options_rows] && describes_model(row))
      memcpy((char *)&with + row->offset, (const char *)o + row->offset, row->size);
  model_resize(&with.model, &o->model);
  return with.model;
}

// Changes a folder's model as the command line says; all else that it says must agree.
static void change_or_agree(Options *o, const Options *requested) {
  if (o->preset && requested->model.family != o->model.family)
    fail("--model %s is of another family than the model in %s; leave it out", o->preset, o->origin);
  for (int i = 0, length = 0; options_rows[i].type != OPTION_END; i++) {
    const Option *row = &options_rows[i];
    if (!describes_model(row) || !(o->given[i] || (o->preset && row->type == OPTION_INTEGER))) continue;
    double wanted = option_number(row, requested), have = option_number(row, o);
    if (wanted == have) continue;
    if (row->type == OPTION_FLAG)
      fail("--%s: the head of the model in %s %s; leave it out, or begin with another model", row->name,
           o->origin, have != 0 ? "is its token embedding" : "has a matrix of its own");
    bool fixed = o->model.learned_positions && !strcmp(row->name, "max-position-embeddings");
    if (!o->given[i] || !(row->flags & ADAPTS) || fixed)
      fail("--%s is %.10g, and %s/config.json says %.10g; leave it out, or begin with another model",
           row->name, wanted, o->origin, have);
    memcpy((char *)o + row->offset, (const char *)requested + row->offset, row->size);
    length += snprintf(o->changes + length, sizeof o->changes - (size_t)length,
                       "%s--%s %.10g in place of %.10g", length ? ", " : "", row->name, wanted, have);
  }
}

static void resolve_data(Options *o) {
  Source *listed = source_list(o->data, arrlen(o->data));
  o->masked = o->pack || listed->masked;
  if (!o->origin) o->data_vocab_size = source_tokenizer_vocab_size(listed);
  source_close(listed);
}

static void resolve_model(Options *o) {
  Options requested = *o;
  if (o->preset || !o->origin) requested.model = requested_model(o);
  o->model = o->origin ? hf_config_read(o->origin) : requested.model;
  if (o->model.family == FAMILY_GPT2 && options_given(o, "rope-theta"))
    fail("--rope-theta: %s is a GPT-2, which has no rotary embedding; leave it out", o->model.name);
  if (o->origin) change_or_agree(o, &requested);
  model_config_check(&o->model);
}

// --- the job -----------------------------------------------------------------------------------------------

static void resolve_ranks(Options *o) {
  const Launch *launch = ranks_self();
  if (o->ranks && !o->plan && o->ranks != launch->ranks)
    fail("--ranks %d: a launcher starts ranks (tools/launch %d ./train ...); for --plan alone", o->ranks,
         o->ranks);
  if (!o->ranks) o->ranks = launch->ranks;
  o->rank = launch->rank < o->ranks ? launch->rank : 0;
  ranks_set_timeout(o->timeout);
}

// The tokens of an optimizer step, cut into micro-batches.
static void resolve_batch(Options *o) {
  if (o->fit && !options_given(o, "batch")) o->batch = 1; // until it is chosen
  int64_t tokens = o->batch * o->seq_len;
  if (tokens > INT32_MAX)
    fail("--batch %lld of --seq-len %lld is more than %d tokens in a micro-batch; lower one and raise "
         "--total-batch",
         (long long)o->batch, (long long)o->seq_len, INT32_MAX);
  int64_t together = tokens * o->ranks;
  if (!o->total_batch) o->total_batch = together;
  const char *saved = json_text(json_member(o->resumed_from, "settings"), "total-batch");
  bool resumed = saved && strtoll(saved, NULL, 10) == o->total_batch;
  if (o->total_batch % together)
    fail("--total-batch %lld%s%s is not a multiple of the %lld tokens of a micro-batch (%s--batch x "
         "--seq-len); change --batch or --total-batch",
         (long long)o->total_batch, resumed ? ", as in " : "", resumed ? o->origin : "", (long long)together,
         o->ranks > 1 ? "ranks x " : "");
  o->micro_steps = o->total_batch / together;
}

static void resolve_schedule(Options *o) {
  if (!options_given(o, "lr")) // of fine-tuning, or of training from scratch
    o->schedule.peak = o->origin ? 2e-5 : model_preset_learning_rate(preset_name(o));
  o->schedule.total_steps = o->steps;
  if (!options_given(o, "warmup")) o->schedule.warmup_steps = (o->steps + 19) / 20;
  if (o->schedule.warmup_steps > o->steps && !o->resumed_from)
    fail("--warmup %lld is longer than --steps %lld; shorten it or raise --steps",
         (long long)o->schedule.warmup_steps, (long long)o->steps);
  if (o->first_step > o->steps)
    fail("--steps %lld: %s is after step %lld already; give --steps above that or resume an earlier one",
         (long long)o->steps, o->origin, (long long)o->first_step);
}

bool options_allow_codes(const Options *o, Reason *reason) {
  if (o->no_codes) return refuse(reason, "this GPU has no FP8");
  return fp8_possible(&o->model, o->seq_len, o->pass.mlp_chunk, reason);
}

static void check_job(const Options *o) {
  double softcap = o->model.final_logit_softcapping;
  if (!*o->prompt) fail("--prompt: give at least one character for samples to continue");
  if (o->end_of_text >= o->model.vocab_size)
    fail("--end-of-text %lld: the vocabulary has %lld tokens", (long long)o->end_of_text,
         (long long)o->model.vocab_size);
  if (o->pass.recompute_layers > o->model.num_hidden_layers)
    fail("--recompute-layers %lld: the model has %lld layers; leave it out, or give 0, for all of them",
         (long long)o->pass.recompute_layers, (long long)o->model.num_hidden_layers);
  if (o->dtypes.offload & OFFLOAD_ACTIVATIONS && o->pass.recompute != RECOMPUTE_LAYER)
    fail("--offload activations keeps the layers' inputs, from which all else is computed again: add "
         "--recompute layer");
  if (o->dump && (o->micro_steps > 1 || o->ranks > 1))
    fail("--dump is of a step of one micro-batch on one rank, and this one has %lld: %s",
         (long long)(o->micro_steps * o->ranks),
         o->ranks > 1 ? "start one rank alone" : "leave out --total-batch");
  if (o->dump && o->first_step >= o->steps)
    fail("--dump: there is no step to run; raise --steps above %lld", (long long)o->first_step);
  Reason reason;
  if (o->dtypes.fp8 && !options_allow_codes(o, &reason)) fail("%s", reason.text);
  if (softcap > 0 && o->pass.sampling.full_mass > 0)
    fail("--lce-sample has no logit soft-cap, and %s has one, of %g; leave it out, or give --logit-softcap 0",
         o->model.name, softcap);
  const char *why = lce_excludes_smoothing(o->compare_modes ? LCE_FUSED : o->pass.mode, softcap);
  if (why && o->pass.terms.label_smoothing > 0)
    fail("--label-smoothing with %s's logit soft-cap of %g: %s", o->model.name, softcap, why);
}

// An earlier log may be written over, but not while it is read as text.
static void keep_inputs(const Options *o, const char *what, const char *output) {
  bool reads = o->tokenizer && path_is_same(output, o->tokenizer);
  for (int64_t i = 0; i < arrlen(o->data); i++) reads |= path_is_same(output, o->data[i]);
  for (int64_t i = 0; i < arrlen(o->val_data); i++) reads |= path_is_same(output, o->val_data[i]);
  if (reads) fail("cannot write the %s %s: this run reads it; name another file", what, output);
}

void options_resolve(Options *o) {
  memory_set_advice(
      "a smaller --batch or --seq-len, --recompute layer, or --fused-lce with a smaller --lce-chunk needs "
      "less, and --plan says how much");
  option_require_possible(options_rows, o, o->given);
  resolve_data(o);
  resolve_model(o);
  resolve_ranks(o);
  if (!o->seq_len) o->seq_len = model_default_seq_len(&o->model);
  model_check_seq_len(&o->model, o->seq_len);
  resolve_batch(o);
  resolve_schedule(o);
  check_job(o);
  if (o->log) keep_inputs(o, "log", o->log);
  if (o->timeline) keep_inputs(o, "timeline", o->timeline);
}

void options_resolve_device(Options *o, const Backend *backend) {
  bool cuda = backend->device == ON_CUDA;
  if (!cuda && o->dtypes_from_gpu) { // a GPU's run continues here in fp32
    o->dtype = o->dtypes.grad = o->dtypes.moment = DTYPE_F32;
    o->dtypes.master = true;
  }
  if (o->dtype == DTYPE_COUNT) o->dtype = cuda ? DTYPE_BF16 : DTYPE_F32;
  if (o->dtypes.grad == DTYPE_COUNT) o->dtypes.grad = o->dtype;
  if (!cuda && (o->dtype != DTYPE_F32 || o->dtypes.grad != DTYPE_F32 || o->dtypes.moment != DTYPE_F32))
    fail("the CPU computes in fp32 only; leave out --dtype, --grad-dtype, --moment-dtype or use a GPU");
  if (cuda && o->dtypes.fp8 && o->dtype == DTYPE_F32)
    fail("--fp8 reads and writes bf16 on cuda, and not fp32: give --dtype bf16");
  if (o->dtypes.fp8 && backend->no_fp8)
    fail("--fp8 needs a GPU of compute capability 8.9 (Ada) or later, and this is %s; %s",
         backend->description, o->resumed_from ? "resume with --no-fp8" : "leave it out");
  o->dtypes.weight = o->dtype;
  o->dtypes.weights_only = !o->trains;
  if (o->save_dtype == DTYPE_COUNT) o->save_dtype = o->dtype;
  if (o->dtype == DTYPE_F32) o->dtypes.master = false; // the weights are their own master
  o->no_sampling = backend->no_sampling;
  o->no_codes = backend->no_fp8;
}
