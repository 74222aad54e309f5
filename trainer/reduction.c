#include "trainer/reduction.h"

#include "model/shards.h"

// At zero 2 layers take turns in one room: their sums are added up instead, micro-batch by micro-batch.
static bool sums_every_time(const Reduction *r, ParameterGroup group) {
  return r->parameters->spread.zero == 2 && group != GROUP_HEAD;
}

static void send_off(const Reduction *r, ParameterGroup group, Bucket bucket) {
  const Parameters *p = r->parameters;
  Collective c = {.x = shards_gradients_made(p, group, bucket), .async = true};
  if (p->spread.parts == 1) {
    c.out = c.x;
    all_reduce(r->backend, c);
    return;
  }
  c.out = shards_gradients_summed(p, group, bucket);
  c.accumulate = sums_every_time(r, group) && !r->first;
  reduce_scatter(r->backend, c);
}

// A GradientsReady: sends off the buckets that are whole.
static void ready(void *reduction, ParameterGroup group, int64_t first) {
  Reduction *r = reduction;
  const Parameters *p = r->parameters;
  if (group == GROUP_HEAD && p->spread.split_head) return; // they are the sums already
  if (!r->last && !sums_every_time(r, group)) return;
  int64_t sent = 0; // of this layer
  while (r->left[group] > first) {
    Bucket bucket = shards_bucket(p, group, r->left[group]);
    if (bucket.first < first) break;
    send_off(r, group, bucket);
    r->left[group] = bucket.first;
    sent++;
  }
  if (p->spread.zero != 2 || group != GROUP_MATRICES) return;
  // The layer below writes where the one above was: that one's sums must be done.
  collectives_join(r->backend, sent < 64 ? sent : 0);
}

void reduction_begin(Reduction *r, Backend *backend, const Parameters *parameters, bool first, bool last,
                     TransformerOptions *options) {
  if (backend->ranks == 1) return;
  *r = (Reduction){.backend = backend, .parameters = parameters, .first = first, .last = last};
  for (int g = 0; g < GROUP_COUNT; g++) r->left[g] = parameters->group_elements[g];
  if (parameters->spread.zero == 2)
    collectives_join(backend, 0); // the last micro-batch's are not to be overwritten
  options->ready = ready;
  options->ready_context = r;
  options->sums_head = last && !tensor_exists(parameters->grad_shard[GROUP_HEAD]);
  options->fresh = parameters->spread.zero == 2;
}
