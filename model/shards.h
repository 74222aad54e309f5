// Which parameters are sharded over the ranks, and the way in and out of shards (ZeRO; Rajbhandari et al. 2020).
//
// A group is cut into buckets from its end, where the backward pass begins, and each bucket into as many equal slices
// as there are ranks. A rank owns its slice of every bucket: there it has the reduced gradients, master weights and
// moments, and updates weights. A rank's slices lie one after the other in its shards, bucket by bucket.
//
//   zero 0   nothing is sharded: every rank holds and updates everything
//   zero 1   master weights and moments are; gradients are whole, and reduced in the rank's slices of them
//   zero 2   so are the gradients. Those of the head and the embeddings (a pass adds to all of them) and of norms and
//            biases are whole, too. The layers' are in a double buffer of two layers: one layer's are reduce-scattered
//            into the shards while the next layer's are computed
//
// Where the head is split (--vocab-parallel; kernels/linear_cross_entropy.h) its group is one bucket, whose slices are
// whole rows, and a rank computes its rows' gradients from the tokens of all ranks: there is nothing to reduce. Its
// weights are sharded as well, unless they are the embedding's, which every rank reads for its tokens.
#pragma once

#include "model/parameters.h"

// A bucket's: enough for the links' full speed, and few enough that the step's last, which nothing hides, is short.
enum { BUCKET_BYTES = 32 << 20 };

typedef struct {
  int64_t first, count; // elements of the group; a multiple of 128 x ranks
} Bucket;

// The bucket of `group` that ends before element `end` (the group's length for the first of them).
Bucket shards_bucket(const Parameters *parameters, ParameterGroup group, int64_t end);

// Where the rank's slice of a bucket lies in a shard of a group. An absent tensor stays absent.
Tensor shards_slice_of_shard(const Parameters *parameters, Tensor shard, Bucket bucket);

// Whether the group's gradients are those of two layers, a double buffer.
bool shards_double_buffered(const Parameters *parameters, ParameterGroup group);
// This rank's gradients of a bucket: in their group, or at zero 2 in the double buffer.
Tensor shards_local_grads(const Parameters *parameters, ParameterGroup group, Bucket bucket);
// The rank's slice of the weights, and whether the other slices are here too.
Tensor shards_weights(const Parameters *parameters, ParameterGroup group, Bucket bucket);
bool shards_weights_are_whole(const Parameters *parameters, ParameterGroup group);
// The rank's slice of the gradients' sum over all ranks.
Tensor shards_reduced_grads(const Parameters *parameters, ParameterGroup group, Bucket bucket);

// Writes `values` to elements [first, first + count) of a parameter in one role (parameters->master, ...),
// whole or sharded: of a shard each rank writes what it owns. They are fp32 or of the role's `dtype`;
// `rounded` is a buffer for as many. Does nothing where the role is absent.
void shards_write(const Parameters *parameters, Backend *backend, const Tensor *role,
                  const Parameter *parameter, int64_t first, int64_t count, const void *values, Dtype dtype,
                  uint16_t *rounded);

// Reads them to the host of rank 0, in the role's dtype; shards are gathered on the backend's stack, a bucket
// at a time. Call it on all ranks; on the others `host` is not written.
void shards_read(const Parameters *parameters, Backend *backend, const Tensor *role,
                 const Parameter *parameter, int64_t first, int64_t count, void *host);

// Pushes and pops what shards_read needs at most, for a plan.
void shards_plan_read(const Parameters *parameters, Backend *backend);
