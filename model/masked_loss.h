// The loss of a batch in which some targets are ignored.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

// linear_cross_entropy(a) of the counted tokens alone: the first `counted` of `indices` (int32 [N]) name
// these, then come ignored tokens, whose losses, outputs and rows of dx become 0. If indices is absent, and
// in the materialized mode, all tokens are computed. With a shard, `counted` is the largest of all ranks.
// With dx, which then has x's dtype, x is scratch. token_weights is absent.
void masked_linear_cross_entropy(Backend *backend, LinearCrossEntropy a, Tensor indices, int64_t counted);
