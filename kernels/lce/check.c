// What linear_cross_entropy refuses; kernels.c checks what it gives to the operations.
#include <math.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/lce/call.h"

// The operations get only a chunk's part, so what belongs to all tokens is measured here.
static void per_token(const char *field, Tensor t, int64_t tokens) {
  if (tensor_exists(t) && (t.rank != 1 || t.shape[0] != tokens))
    fail("linear_cross_entropy: %s is %s for %lld tokens", field, tensor_text(t).text, (long long)tokens);
}

// True if the call needs more of a row than the sum that sampling knows.
static bool beyond_row_sums(const LinearCrossEntropy *a) {
#define BEYOND(name, type, statistic)                                                                        \
  || (tensor_exists(a->outputs.name) && strcmp(#statistic, "row_sum") != 0)
  return tensor_exists(a->bias) || a->terms.softcap > 0 TOKEN_OUTPUTS(BEYOND);
#undef BEYOND
}

static void check_sampling(const LinearCrossEntropy *a) {
  double mass = a->sampling.full_mass;
  Tensor stats = a->sampling.stats;
  if (!(mass >= 0 && isfinite(mass)))
    fail("linear_cross_entropy: sampling.full_mass is %g, which is not 0 or more and finite", mass);
  if (tensor_exists(stats) && (stats.rank != 1 || stats.shape[0] != 3 || mass == 0))
    fail("linear_cross_entropy: sampling.stats is %s with a full_mass of %g; give fp32 [3] with sampling, "
         "and nothing without",
         tensor_text(stats).text, mass);
  if (mass > 0 && tensor_exists(a->dweight) && !tensor_exists(a->dx))
    fail("linear_cross_entropy: sampling makes dx where it makes dweight; give dx, too");
  if (mass > 0 && (a->mode == LCE_MATERIALIZED || beyond_row_sums(a)))
    fail("linear_cross_entropy: sampling knows only the rows' sums; leave it out, or the materialized mode, "
         "a bias, a soft-cap, and largest logits, predictions, entropies and log_sum_sq_probs");
}

void lce_check_shard(const Backend *backend, const LinearCrossEntropy *a) {
  const VocabShard *s = &a->shard;
  int64_t rows = a->weight.shape[0];
  if (!s->vocab_size) return;
  if (s->first < 0 || s->first > s->vocab_size - rows)
    fail("linear_cross_entropy: %lld rows from %lld on are no part of a vocabulary of %lld", (long long)rows,
         (long long)s->first, (long long)s->vocab_size);
  if (rows == 0 && tensor_exists(a->dweight))
    fail("linear_cross_entropy: dweight is %s; leave it out where a rank has no row of weight",
         tensor_text(a->dweight).text);
  if (a->mode == LCE_MATERIALIZED)
    fail("linear_cross_entropy: a head split over %d ranks supports the fused mode; leave out the "
         "materialized one",
         backend->ranks);
}

void lce_check(const Backend *backend, const LinearCrossEntropy *a) {
  const char *op = "linear_cross_entropy";
  if (a->x.rank != 2 || a->weight.rank != 2 || a->x.shape[1] != a->weight.shape[1])
    fail("%s: x is %s and weight is %s, whose hidden sizes differ", op, tensor_text(a->x).text,
         tensor_text(a->weight).text);
  int64_t tokens = a->x.shape[0];
  if (tokens < 1) fail("%s: x is %s, which holds no token", op, tensor_text(a->x).text);
  if (a->mode == LCE_FUSED && a->chunk < 1) fail("%s: a chunk of %lld tokens", op, (long long)a->chunk);
  if (!isfinite(a->scale)) fail("%s: scale is %g, which is not finite", op, (double)a->scale);
  if (tensor_exists(a->dx) && !tensor_same_shape(a->dx, a->x))
    fail("%s: dx is %s and x is %s", op, tensor_text(a->dx).text, tensor_text(a->x).text);
  if (tensor_exists(a->dbias) != (tensor_exists(a->bias) && tensor_exists(a->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(a->bias).text, tensor_text(a->dbias).text);
  bool one_write = !a->accumulate && !a->shard.vocab_size && a->sampling.full_mass == 0 &&
                   a->terms.label_smoothing == 0 && (a->mode == LCE_MATERIALIZED || a->chunk >= tokens);
  if (tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32 &&
      !(one_write && a->dweight.dtype == a->weight.dtype))
    fail(
        "%s: dweight is %s; fp32 is needed, or weight's type where it is written once: by one chunk, without "
        "sampling, label smoothing, split head or accumulate",
        op, tensor_text(a->dweight).text);
  if (a->loss.rank != 1 || a->loss.shape[0] != tokens || a->targets.rank != 1 ||
      a->targets.shape[0] != tokens)
    fail("%s: loss is %s and targets is %s for %lld tokens", op, tensor_text(a->loss).text,
         tensor_text(a->targets).text, (long long)tokens);
  if (tensor_exists(a->weight_codes.codes) && a->mode == LCE_MATERIALIZED)
    fail("%s: weight_codes are for the fused mode; leave them out, or the materialized one", op);
  per_token("token_weights", a->token_weights, tokens);
#define PER_TOKEN(name, ...) per_token("outputs." #name, a->outputs.name, tokens);
  TOKEN_OUTPUTS(PER_TOKEN)
#undef PER_TOKEN
  if (a->mode == LCE_MATERIALIZED && tensor_exists(a->outputs.log_sum_sq_probs))
    fail("%s: the materialized mode has no log_sum_sq_probs; leave one of them out", op);
  lce_check_shard(backend, a);
  if (a->mode == LCE_FUSED && a->terms.softcap > 0 && a->terms.label_smoothing > 0)
    fail("%s: the fused mode has no label smoothing together with a soft-cap; leave one out, or choose the "
         "materialized mode (./train: --materialized-logits)",
         op);
  check_sampling(a);
}
