// Checks a call of linear_cross_entropy; kernels.c checks the operations' tensors.
#include <math.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/lce/call.h"

// Operations see one chunk at a time, so tensors of all tokens are checked here.
static void per_token(const char *field, Tensor t, int64_t tokens) {
  if (tensor_exists(t) && (t.rank != 1 || t.shape[0] != tokens))
    fail("linear_cross_entropy: %s is %s for %lld tokens", field, tensor_text(t).text, (long long)tokens);
}

// True if the call needs more of a row than the sum that sampling knows.
static bool beyond_row_sums(const LinearCrossEntropy *args) {
#define BEYOND(name, type, statistic)                                                                        \
  || (tensor_exists(args->outputs.name) && strcmp(#statistic, "row_sum") != 0)
  return tensor_exists(args->bias) || args->terms.softcap > 0 TOKEN_OUTPUTS(BEYOND);
#undef BEYOND
}

static void check_sampling(const LinearCrossEntropy *args) {
  double mass = args->sampling.full_mass;
  Tensor stats = args->sampling.stats;
  if (!(mass >= 0 && isfinite(mass)))
    fail("linear_cross_entropy: sampling.full_mass is %g, which is not 0 or more and finite", mass);
  if (tensor_exists(stats) && (stats.rank != 1 || stats.shape[0] != 3 || mass == 0))
    fail("linear_cross_entropy: sampling.stats is %s with a full_mass of %g; give fp32 [3] with sampling, "
         "and nothing without",
         tensor_text(stats).text, mass);
  if (mass > 0 && tensor_exists(args->dweight) && !tensor_exists(args->dx))
    fail("linear_cross_entropy: sampling computes dx together with dweight: pass dx as well");
  if (mass > 0 && (args->mode == LCE_MATERIALIZED || beyond_row_sums(args)))
    fail("linear_cross_entropy: sampling knows only the rows' sums; leave it out, or the materialized mode, "
         "a bias, a soft-cap, and largest logits, predictions, entropies and log_sum_sq_probs");
}

void lce_check_shard(const Backend *backend, const LinearCrossEntropy *args) {
  const VocabShard *s = &args->shard;
  int64_t rows = args->weight.shape[0];
  if (!s->vocab_size) return;
  if (s->first < 0 || s->first > s->vocab_size - rows)
    fail("linear_cross_entropy: %lld rows from %lld on are no part of a vocabulary of %lld", (long long)rows,
         (long long)s->first, (long long)s->vocab_size);
  if (rows == 0 && tensor_exists(args->dweight))
    fail("linear_cross_entropy: dweight is %s; leave it out where a rank has no row of weight",
         tensor_text(args->dweight).text);
  if (args->mode == LCE_MATERIALIZED)
    fail("linear_cross_entropy: a head split over %d ranks supports the fused mode; leave out the "
         "materialized one",
         backend->ranks);
}

const char *lce_excludes_smoothing(LceMode mode, double softcap) {
  return mode == LCE_FUSED && softcap > 0
             ? "the fused mode has no label smoothing together with a soft-cap; leave one out, or use the "
               "materialized mode alone (./train: --logit-softcap 0 or --materialized-logits)"
             : NULL;
}

void lce_check(const Backend *backend, const LinearCrossEntropy *args) {
  const char *op = "linear_cross_entropy";
  if (args->x.rank != 2 || args->weight.rank != 2 || args->x.shape[1] != args->weight.shape[1])
    fail("%s: x is %s and weight is %s, whose hidden sizes differ", op, tensor_text(args->x).text,
         tensor_text(args->weight).text);
  int64_t tokens = args->x.shape[0];
  if (tokens < 1) fail("%s: x is %s, which holds no token", op, tensor_text(args->x).text);
  if (args->mode == LCE_FUSED && args->chunk < 1)
    fail("%s: a chunk of %lld tokens", op, (long long)args->chunk);
  if (!isfinite(args->scale)) fail("%s: scale is %g, which is not finite", op, (double)args->scale);
  if (tensor_exists(args->dx) && !tensor_same_shape(args->dx, args->x))
    fail("%s: dx is %s and x is %s", op, tensor_text(args->dx).text, tensor_text(args->x).text);
  if (tensor_exists(args->dbias) != (tensor_exists(args->bias) && tensor_exists(args->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(args->bias).text, tensor_text(args->dbias).text);
  bool one_write = !args->accumulate && !args->shard.vocab_size && args->sampling.full_mass == 0 &&
                   args->terms.label_smoothing == 0 &&
                   (args->mode == LCE_MATERIALIZED || args->chunk >= tokens);
  if (tensor_exists(args->dweight) && args->dweight.dtype != DTYPE_F32 &&
      !(one_write && args->dweight.dtype == args->weight.dtype))
    fail(
        "%s: dweight is %s; fp32 is needed, or weight's type where it is written once: by one chunk, without "
        "sampling, label smoothing, split head or accumulate",
        op, tensor_text(args->dweight).text);
  if (args->loss.rank != 1 || args->loss.shape[0] != tokens || args->targets.rank != 1 ||
      args->targets.shape[0] != tokens)
    fail("%s: loss is %s and targets is %s for %lld tokens", op, tensor_text(args->loss).text,
         tensor_text(args->targets).text, (long long)tokens);
  if (tensor_exists(args->weight_codes.codes) && args->mode == LCE_MATERIALIZED)
    fail("%s: weight_codes are for the fused mode; leave them out, or the materialized one", op);
  per_token("token_weights", args->token_weights, tokens);
#define PER_TOKEN(name, ...) per_token("outputs." #name, args->outputs.name, tokens);
  TOKEN_OUTPUTS(PER_TOKEN)
#undef PER_TOKEN
  if (args->mode == LCE_MATERIALIZED && tensor_exists(args->outputs.log_sum_sq_probs))
    fail("%s: the materialized mode has no log_sum_sq_probs; leave one of them out", op);
  lce_check_shard(backend, args);
  const char *why = lce_excludes_smoothing(args->mode, args->terms.softcap);
  if (args->terms.label_smoothing > 0 && why) fail("%s: %s", op, why);
  check_sampling(args);
}
