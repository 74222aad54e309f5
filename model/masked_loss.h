// The loss of a batch in which some targets are ignored.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

// linear_cross_entropy(a), of whose tokens only some are computed: their positions are the first `counted` of `rows` (int32 [N]).
// The targets of the others are IGNORE_INDEX, and their losses, outputs and rows of dx become 0. Where rows is absent, and in the
// materialized mode, all are computed. With a shard `counted` is the largest of all ranks, and rows names ignored tokens after
// the counted ones; and so it does where none counts.
//
// With dx, which has x's dtype then, x is scratch and holds nothing afterwards. Weights of tokens and entropies are not for it.
void masked_linear_cross_entropy(Backend *backend, LinearCrossEntropy a, Tensor rows, int64_t counted);
