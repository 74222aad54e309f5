// A problem of the loss: its inputs, the float64 solution (ReferenceLoss), the call that has to find it.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"
#include "tests/harness.h"

// Terms that a problem may have, all of them at once, too.
enum {
  TERM_SMOOTHING = 1,
  TERM_Z_LOSS = 2,
  TERM_SOFTCAP = 4,
  TERM_TEMPERATURE = 8,
  TERM_CLASS_WEIGHTS = 16,
  TERM_TOKEN_WEIGHTS = 32,
  TERM_ENTROPY = 64,
  TERM_BIAS = 128,
  TERM_MEAN = 256
};

// A call's tensors but targets: their places in ReferenceLoss and LinearCrossEntropy, their rows (N, V) and
// columns. LOSS_APART: an input that LinearCrossEntropy has not.
typedef enum { LOSS_OPERAND, LOSS_INPUT, LOSS_APART, LOSS_OUTPUT, LOSS_OF_LOGITS, LOSS_GRADIENT } LossKind;
typedef struct {
  const char *name, *size;
  LossKind kind;
  size_t reference, call;
} LossField;
extern const LossField loss_fields[]; // a name of NULL ends it
double **loss_values(const ReferenceLoss *r, const LossField *f);
int64_t loss_count(const ReferenceLoss *r, const LossField *f);
Tensor *loss_tensor(const LinearCrossEntropy *a, const LossField *f);

// A problem of host values: it has its outputs, and after reference_gradients its gradients. x has the
// deviation 1, the logits about the deviation given; scale is 0.5.
ReferenceLoss loss_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double deviation);
void loss_problem_add(Harness *h, ReferenceLoss *p, int terms);
// Token n's logit `column` exceeds its target's by exactly `lead`: x[n] becomes the unit vector n mod hidden.
void loss_problem_lead(ReferenceLoss *p, int64_t n, int64_t column, double lead);
// The same for nine rows over 1,511 columns, of which 1 and 4 to 6 must be repaired.
void loss_problem_lead_far(ReferenceLoss *p);
// A problem for tile sampling in chunks of this size: tokens come in runs of three kinds, and the logits of
// kind k are 0 in every third tile of the vocabulary from the k-th on, 2 less in all others, but for noise.
ReferenceLoss loss_problem_tiles(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, int64_t chunk);
// Positions of the tokens that count, then of those that do not; *counted of them count.
Tensor counted_positions(Harness *h, const int32_t *targets, int64_t rows, int64_t *counted);

void reference_outputs(Harness *h, ReferenceLoss *r); // gives r arrays for its losses and outputs
void reference_gradients(Harness *h,
                         ReferenceLoss *r); // and for dx, dweight and, where there is a bias, dbias

// The call over all of r's tokens: inputs as the backend's dtype holds them, the terms, poisoned loss,
// z_loss, log_prob and logsumexp; poisoned dx (of that dtype), dweight and dbias where r has them.
LinearCrossEntropy loss_call(Harness *h, const ReferenceLoss *r, LceMode mode, int64_t chunk);
// The same with sampling's statistics, and without outputs.
LinearCrossEntropy sampled_loss_call(Harness *h, ReferenceLoss *r, int64_t chunk);
// The part of the call of a rank of a split head: its `rows` tokens, and its `part` rows of the head.
LinearCrossEntropy loss_call_of_rank(const Backend *backend, LinearCrossEntropy a, int64_t rows,
                                     int64_t part);
// With the other outputs: entropy, log_sum_sq_probs (not materialized), max_logit, correct, predicted.
void loss_call_all_outputs(Harness *h, LinearCrossEntropy *a, const ReferenceLoss *r);
// With dweight and dbias that are added to what they hold before.
typedef struct {
  double *dweight, *dbias;
} LossBefore;
void loss_call_adds(Harness *h, LinearCrossEntropy *a, LossBefore *before);
// Checks the call's results against r from token `first` and the shard's first row on. Sets gradients.terms.
void check_loss(Harness *h, const char *which, const LinearCrossEntropy *a, const ReferenceLoss *r,
                int64_t first, LossBefore before, Tolerance outputs, Tolerance gradients);
// Checks that all results of ignored tokens are 0.
void check_ignored(Harness *h, const char *what, const LinearCrossEntropy *a, const int32_t *targets);
// Checks that the results of both calls have the same bits.
void check_same_bits(Harness *h, const LinearCrossEntropy *a, const LinearCrossEntropy *b);
// True if sampling saves time: always on the CPU, on a GPU with the Hopper kernels. Else gradients are exact.
bool samples(const Harness *h, int64_t hidden, int64_t chunk);
// Results and stats of a call with sampling against float64, which this computes.
void check_sampled(Harness *h, const LinearCrossEntropy *a, ReferenceLoss *r, LossBefore before);
// If r was sampled, some tiles were dropped, some kept, and none by a hair's breadth.
void assert_some_dropped(const ReferenceLoss *r);
// Losses are the exact ones; the mean gradient over so many seeds is off by no more than one seed's distance
// over the root of their number. Returns the share of tiles dropped.
double check_unbiased(Harness *h, void (*run)(Backend *, LinearCrossEntropy), LinearCrossEntropy sampled,
                      const LinearCrossEntropy *exact, int seeds);

// The call, changed (`a` is a copy of it), fails with this part of a sentence.
#define ASSERT_REFUSED(h, call, part, change)                                                                \
  do {                                                                                                       \
    LinearCrossEntropy a = call;                                                                             \
    change;                                                                                                  \
    assert_fails(h, part, linear_cross_entropy((h)->backend, a));                                            \
  } while (0)

// The materialized mode with the gradients of entropies, too.
void loss_with_entropies(Backend *backend, LinearCrossEntropy a, Tensor entropy_weights);
