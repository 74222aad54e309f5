// A step's update: AdamW, each rank in its slices, after the norm of all gradients. On one rank, layers whose
// gradients and states are offloaded are updated in the next forward pass (deferred_update.c).
#include "kernels/base/profile.h"
#include "model/shards.h"

// The elements of one update: this rank's slice of a bucket; without sharding a layer's matrices, or the rest
// of a group.
typedef struct {
  int place; // of the group, in the order of the updates
  ParameterGroup group;
  Range bucket;
} UpdateRange;

// Steps to the next range, from {0} to the first; false after the last. A group's last elements come first.
static bool next_range(const ParameterSet *p, UpdateRange *range) {
  static const ParameterGroup order[GROUP_COUNT] = {GROUP_MATRICES, GROUP_EMBEDDINGS, GROUP_HEAD,
                                                    GROUP_VECTORS};
  int64_t end = range->bucket.size ? range->bucket.offset : p->group_elements[order[range->place]];
  while (end == 0 && ++range->place < GROUP_COUNT) end = p->group_elements[order[range->place]];
  if (range->place == GROUP_COUNT) return false;
  range->group = order[range->place];
  range->bucket = (Range){0};
  if (p->sharding.parts > 1) return shards_next(p, range->group, (Range){0, end}, &range->bucket);
  int64_t size = range->group == GROUP_MATRICES ? p->sharding.layer : end;
  range->bucket = (Range){end - size, size};
  return true;
}

bool squares_summed_by_layer(const ParameterSet *p, const Backend *backend) {
  return tensor_exists(p->layer_grads) && backend->ranks == 1;
}

void parameters_sum_squares(Backend *backend, const ParameterSet *p) {
  profile_phase(backend, PHASE_UPDATE);
  bool started = false;
  for (UpdateRange range = {0}; next_range(p, &range); started = true) {
    if (range.group == GROUP_MATRICES && squares_summed_by_layer(p, backend)) continue;
    sum_elements(backend,
                 (SumElements){.sum = p->squares,
                               .x = shards_rows(p, p->grad_sum, range.group, shards_slice(p, range.bucket)),
                               .squares = true,
                               .accumulate = started});
  }
  if (p->sharding.parts > 1) all_reduce(backend, (Collective){.out = p->squares, .x = p->squares});
}

void parameters_update(Backend *backend, ParameterSet *p, Update settings) {
  bool deferred = updates_deferred(p, backend);
  if (deferred) p->deferred = settings;
  if (p->muon) muon_update(backend, p, settings);
  for (UpdateRange range = {0}; next_range(p, &range);) {
    if ((p->muon || deferred) && range.group == GROUP_MATRICES) continue;
    adamw(backend, shards_update(p, range.group, range.bucket, settings));
    shards_gather(p, backend, range.group, range.bucket);
  }
  collectives_join(backend, 0);
}
