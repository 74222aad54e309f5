#include "model/shards.h"

static bool sharded(const ParameterSet *p, const Tensor *role, ParameterGroup group) {
  return tensor_count(role[group]) != p->group_elements[group];
}

bool shards_next(const ParameterSet *p, ParameterGroup group, Range elements, Range *bucket) {
  int64_t size = p->bucket[group], all = p->group_elements[group];
  int64_t end = bucket->size ? bucket->offset : all - (all - range_end(elements)) / size * size;
  *bucket = (Range){max_i64(end - size, 0), min_i64(size, end)};
  return end > elements.offset;
}

Range shards_slice(const ParameterSet *p, Range bucket) {
  int64_t size = bucket.size / p->sharding.parts;
  return (Range){bucket.offset + p->sharding.part * size, size};
}

Tensor shards_rows(const ParameterSet *p, const Tensor *role, ParameterGroup group, Range range) {
  const Sharding *s = &p->sharding;
  if (role == p->grad && grads_double_buffered(p, group))
    range.offset %= 2 * s->layer;
  else if (sharded(p, role, group)) // the bucket begins `part` slices before this rank's
    range.offset = (range.offset - s->part * range.size) / s->parts;
  return tensor_rows(role[group], range.offset, range.size);
}

void shards_gather(const ParameterSet *p, Backend *backend, ParameterGroup group, Range bucket) {
  if (p->sharding.parts == 1 || sharded(p, p->value, group)) return;
  all_gather(backend, (Collective){.out = shards_rows(p, p->value, group, bucket),
                                   .x = shards_rows(p, p->value, group, shards_slice(p, bucket)),
                                   .async = true});
}

Update shards_update(const ParameterSet *p, ParameterGroup group, Range bucket, Update u) {
  Range mine = shards_slice(p, bucket);
  u.weight = shards_rows(p, p->value, group, mine);
  u.master = shards_rows(p, p->master, group, mine);
  u.m = shards_rows(p, p->state[0], group, mine);
  u.v = shards_rows(p, p->state[1], group, mine);
  u.grad = shards_rows(p, p->grad_sum, group, mine);
  u.seed = u.seed * GROUP_COUNT + (uint64_t)group; // for stochastic rounding
  u.first = mine.offset;
  if (group == GROUP_VECTORS) u.weight_decay = 0;
  return u;
}

// --- elements to and from the host -------------------------------------------------------------------------

void shards_write(const ParameterSet *p, Backend *backend, const Tensor *role, const Parameter *parameter,
                  int64_t first, int64_t count, const void *values) {
  ParameterGroup group = parameter->group;
  if (!tensor_exists(role[group])) return;
  Range written = {parameter->offset + first, count};
  for (Range b = {0}; shards_next(p, group, written, &b);) {
    Range mine = sharded(p, role, group) ? shards_slice(p, b) : b, common = range_overlap(mine, written);
    if (!common.size) continue;
    backend_to_device(
        backend, tensor_rows(shards_rows(p, role, group, mine), common.offset - mine.offset, common.size),
        (const char *)values + (size_t)(common.offset - written.offset) * dtype_bytes(role[group].dtype));
  }
}

void shards_read(const ParameterSet *p, Backend *backend, const Tensor *role, const Parameter *parameter,
                 int64_t first, int64_t count, void *host) {
  ParameterGroup group = parameter->group;
  Dtype dtype = role[group].dtype;
  Range wanted = {parameter->offset + first, count};
  if (!sharded(p, role, group)) {
    if (backend->rank == 0) backend_to_host(backend, host, tensor_rows(role[group], wanted.offset, count));
    return;
  }
  for (Range b = {0}; shards_next(p, group, wanted, &b);) {
    Tensor slice = shards_rows(p, role, group, shards_slice(p, b));
    int64_t size = slice.shape[0], most = size, each;
    if (group == GROUP_HEAD && p->sharding.split_head) // its one bucket is too large to gather at once
      most = min_i64(BUCKET_BYTES / (int64_t)dtype_bytes(dtype) / p->sharding.parts, size);
    for (int64_t at = 0; at < size; at += each) {
      each = min_i64(most, size - at);
      MemoryMark mark = memory_mark(&backend->memory);
      Tensor all = {0};
      for (int part = 0; part < p->sharding.parts; part++) {
        Range piece = {b.offset + part * size + at, each}, common = range_overlap(piece, wanted);
        if (!common.size) continue;
        if (!tensor_exists(all)) {
          all = memory_push_1d(&backend->memory, "gathered shards", MEMORY_WORKSPACE, dtype,
                               each * p->sharding.parts);
          all_gather(backend, (Collective){.out = all, .x = tensor_rows(slice, at, each)});
        }
        if (backend->rank == 0)
          backend_to_host(backend,
                          (char *)host + (size_t)(common.offset - wanted.offset) * dtype_bytes(dtype),
                          tensor_rows(all, part * each + common.offset - piece.offset, common.size));
      }
      memory_pop_to(&backend->memory, mark);
    }
  }
}
