// Shards over the ranks (ZeRO; Rajbhandari et al. 2020). A group is cut into buckets from its end, where the
// backward pass begins, and each bucket into a slice for each rank, which has the summed gradients, master
// weights and states there and updates its weights. A rank's slices lie one after the other in its shards.
//
//   zero 0   nothing is sharded: every rank holds and updates everything
//   zero 1   master weights and states are; gradients are whole, and summed in the rank's slices
//   zero 2   summed gradients are, too. Local ones are whole but for the layers', in a double buffer of two
//            layers: one layer's are reduce-scattered while the next layer's are computed
//
// A split head (--vocab-parallel) is one bucket with slices of whole rows, whose gradients a rank computes
// from the tokens of all ranks. Its weights are sharded unless they are the embedding's.
#pragma once

#include "model/parameters.h"

// Steps from {0} to the last bucket with some of these elements, and from there down; false after the first.
bool shards_next(const ParameterSet *parameters, ParameterGroup group, Range elements, Range *bucket);
// This rank's slice of a bucket.
Range shards_slice(const ParameterSet *parameters, Range bucket);
// A bucket, or this rank's slice of it, in a role (parameters->value, ...). A role that is sharded has slices
// alone; if it is absent, so is the result.
Tensor shards_rows(const ParameterSet *parameters, const Tensor *role, ParameterGroup group, Range range);

// Gathers the weights of a bucket from the ranks' slices, on all ranks. Asynchronous.
void shards_gather(const ParameterSet *parameters, Backend *backend, ParameterGroup group, Range bucket);

// The settings with the tensors of this rank's slice of a bucket.
Update shards_update(const ParameterSet *parameters, ParameterGroup group, Range bucket, Update settings);

// Writes `values`, of the role's dtype, to elements [first, first + count) of a parameter in one role, or to
// this rank's part of them. Does nothing if the role is absent.
void shards_write(const ParameterSet *parameters, Backend *backend, const Tensor *role,
                  const Parameter *parameter, int64_t first, int64_t count, const void *values);

// Reads them to `host` on rank 0; shards are gathered on the backend's stack. Call it on all ranks.
void shards_read(const ParameterSet *parameters, Backend *backend, const Tensor *role,
                 const Parameter *parameter, int64_t first, int64_t count, void *host);
