// Reads the options, and resolves them together: the model, the job, the dtypes.
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

// --- the command line --------------------------------------------------------------------------------------

bool options_given(const Options *o, const char *name) {
  return o->given[option_find(options_rows, name) - options_rows];
}

void options_read(Options *o, const OptionTable *table, int argc, char **argv) {
  *o = (Options){.trains = table == &options_table,
                 .prompt = "\n",
                 .dtypes = {.weight = DTYPE_COUNT, .grad = DTYPE_COUNT, .master = true},
                 .save_dtype = DTYPE_COUNT};
  bool given[OPTION_ROWS_MAX] = {false};
  option_table_parse(table, o, given, argc, argv);
  for (const Option *row = table->rows; row->type != OPTION_END; row++)
    if (given[row - table->rows]) o->given[option_find(options_rows, row->name) - options_rows] = true;
  if (o->val_data || options_given(o, "val-fraction")) return;
  for (int64_t i = 0; i < arrlen(o->data); i++)
    if (manifest_has_validation(o->data[i])) arrput(o->val_data, o->data[i]);
}

// --- the model ---------------------------------------------------------------------------------------------

static bool describes_model(const Option *row) {
  return row->offset - offsetof(Options, model) < sizeof(ModelConfig); // what is before it wraps around
}

// Changes a folder's model as the command line says; all else that it says must agree.
static void change_or_agree(Options *o, const Options *wanted) {
  for (const Option *row = options_rows; row->type != OPTION_END; row++) {
    bool given = o->given[row - options_rows];
    if (!describes_model(row) || !(given || row->type == OPTION_INTEGER)) continue;
    Text now = option_text(row, wanted), have = option_text(row, o);
    if (!strcmp(now.text, have.text)) continue;
    bool fixed = o->model.learned_positions && !strcmp(row->name, "max-position-embeddings");
    if (!given || !(row->flags & ADAPTS) || fixed)
      fail("--%s is %s, and %s/config.json says %s; leave it out, or begin with another model", row->name,
           now.text, o->origin, *have.text ? have.text : "otherwise");
    memcpy((char *)o + row->offset, (const char *)wanted + row->offset, row->size);
    size_t length = strlen(o->changes);
    snprintf(o->changes + length, sizeof o->changes - length, "%s--%s %s in place of %s", length ? ", " : "",
             row->name, now.text, have.text);
  }
}

// Resolves the model: a folder's, or the preset, which the given values in o->model change.
static void resolve_model(Options *o) {
  bool preset = !o->origin || options_given(o, "model");
  const ModelConfig base = o->origin ? hf_config_read(o->origin) : model_preset(o->preset);
  const int64_t vocab_size = o->origin ? base.vocab_size : o->data_vocab_size;
  Options wanted = {.model = preset ? model_preset(o->preset) : base};
  if (wanted.model.family != base.family)
    fail("--model %s is of another family than the model in %s; leave it out", o->preset, o->origin);
  if (vocab_size) wanted.model.vocab_size = vocab_size;
  for (const Option *row = options_rows; row->type != OPTION_END; row++)
    if (o->given[row - options_rows] && describes_model(row))
      memcpy((char *)&wanted + row->offset, (const char *)o + row->offset, row->size);
  if (preset) model_resize(&wanted.model, &o->model);
  o->model = o->origin ? base : wanted.model;
  if (o->model.family == FAMILY_GPT2 && options_given(o, "rope-theta"))
    fail("--rope-theta: %s is a GPT-2, which has no rotary embedding; leave it out", o->model.name);
  if (o->origin) change_or_agree(o, &wanted);
  model_config_check(&o->model);
}

static void resolve_data(Options *o) {
  Source *listed = source_list(o->data, arrlen(o->data));
  o->masked = o->pack || listed->masked;
  if (!o->origin) o->data_vocab_size = source_tokenizer_vocab_size(listed);
  source_close(listed);
}

// --- the job -----------------------------------------------------------------------------------------------

static void resolve_ranks(Options *o) {
  const Launch *launch = ranks_self();
  if (!o->ranks) o->ranks = launch->ranks;
  if (o->ranks != launch->ranks && !o->plan)
    fail("--ranks %d: a launcher starts ranks (tools/launch %d ./train ...); for --plan alone", o->ranks,
         o->ranks);
  ranks_set_timeout(o->timeout);
}

// The tokens of an optimizer step, cut into micro-batches.
static void resolve_batch(Options *o) {
  if (!o->seq_len) o->seq_len = model_default_seq_len(&o->model);
  model_check_seq_len(&o->model, o->seq_len);
  if (o->fit && !options_given(o, "batch")) o->batch = 1; // until it is chosen
  int64_t tokens = o->batch * o->seq_len;
  if (tokens > INT32_MAX)
    fail("--batch %lld of --seq-len %lld is more than %d tokens in a micro-batch; lower one and raise "
         "--total-batch",
         (long long)o->batch, (long long)o->seq_len, INT32_MAX);
  tokens *= o->ranks;
  if (!o->total_batch) o->total_batch = tokens;
  o->micro_steps = o->total_batch / tokens;
  if (o->total_batch % tokens == 0) return;
  Text total = options_words(o, "total-batch");
  bool saved = json_is(json_member(o->resumed_from, "settings"), "total-batch", total.text);
  fail("--total-batch %s%s%s%s is not a multiple of the %lld tokens of a micro-batch (%s--batch x --seq-len)"
       "; change --batch or --total-batch",
       total.text, saved ? ", as in " : "", saved ? o->origin : "", saved ? "," : "", (long long)tokens,
       o->ranks > 1 ? "ranks x " : "");
}

static void resolve_schedule(Options *o) {
  if (!options_given(o, "lr")) o->lr = o->origin ? 2e-5 : model_preset_learning_rate(o->preset);
  if (!options_given(o, "warmup")) o->warmup = (o->steps + 19) / 20;
  if (o->warmup > o->steps && !o->resumed_from)
    fail("--warmup %lld is longer than --steps %lld; shorten it or raise --steps", (long long)o->warmup,
         (long long)o->steps);
  if (o->first_step > o->steps)
    fail("--steps %lld: %s is after step %lld already; give --steps above that or resume an earlier one",
         (long long)o->steps, o->origin, (long long)o->first_step);
}

bool options_allow_codes(const Options *o, Reason *reason) {
  if (o->no_codes)
    return refuse(reason, "--fp8 needs a GPU of compute capability 8.9 (Ada) or later; %s",
                  o->resumed_from ? "resume with --no-fp8" : "leave it out");
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
  memory_set_advice("a smaller --batch or --seq-len, --recompute layer, or --fused-lce with a smaller "
                    "--lce-chunk needs less, and --plan says how much");
  option_require_possible(options_rows, o, o->given);
  resolve_data(o);
  resolve_model(o);
  resolve_ranks(o);
  resolve_batch(o);
  resolve_schedule(o);
  check_job(o);
  if (o->log) keep_inputs(o, "log", o->log);
  if (o->timeline) keep_inputs(o, "timeline", o->timeline);
}

void options_resolve_device(Options *o, const Backend *backend) {
  ParameterDtypes *d = &o->dtypes;
  bool cuda = backend->device == ON_CUDA;
  if (!cuda && o->dtypes_from_gpu) d->weight = d->grad = d->moment = DTYPE_F32; // a GPU's run continues here
  if (d->weight == DTYPE_COUNT) d->weight = cuda ? DTYPE_BF16 : DTYPE_F32;
  if (d->grad == DTYPE_COUNT) d->grad = d->weight;
  if (!cuda && (d->weight != DTYPE_F32 || d->grad != DTYPE_F32 || d->moment != DTYPE_F32))
    fail("the CPU computes in fp32 only; leave out --dtype, --grad-dtype, --moment-dtype or use a GPU");
  if (cuda && d->fp8 && d->weight == DTYPE_F32)
    fail("--fp8 reads and writes bf16 on cuda, and not fp32: give --dtype bf16");
  d->weights_only = !o->trains;
  if (o->save_dtype == DTYPE_COUNT) o->save_dtype = d->weight;
  if (d->weight == DTYPE_F32) d->master = false; // the weights are their own master
  o->no_sampling = backend->no_sampling;
  o->no_codes = backend->no_fp8;
  Reason reason;
  if (d->fp8 && !options_allow_codes(o, &reason)) fail("%s", reason.text);
}

// With --compare-modes both modes' plans count the codes, which exist in both.
ParameterDtypes options_used_dtypes(const Options *o) {
  ParameterDtypes used = o->dtypes;
  bool logits = !o->no_sampling && (o->pass.mode == LCE_FUSED || o->compare_modes);
  if (used.fp8 == FP8_ALL && !logits) used.fp8 = FP8_LAYERS;
  return used;
}

Text options_precision(const Options *o) {
  return text_of("%s%s", dtype_name(o->dtypes.weight), o->dtypes.fp8 ? " and FP8" : "");
}

int64_t options_used_chunk(const Options *o) {
  return lce_used_chunk(o->batch * o->seq_len, o->pass.chunk);
}

Text options_words(const Options *o, const char *name) {
  return option_text(option_find(options_rows, name), o);
}

Text options_recompute(const Options *o) {
  return text_of(o->pass.recompute_layers ? "%s in %lld layers" : "%s", options_words(o, "recompute").text,
                 (long long)o->pass.recompute_layers);
}

void options_free(Options *o) {
  arrfree(o->data);
  arrfree(o->val_data);
  free(o->origin);
  cJSON_Delete(o->resumed_from);
  *o = (Options){0};
}
