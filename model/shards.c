#include "model/shards.h"

Bucket shards_bucket(const Parameters *p, ParameterGroup group, int64_t end) {
  int64_t count = min_i64(p->bucket[group], end);
  return (Bucket){end - count, count};
}

static Tensor slice_of_whole(const Parameters *p, Tensor group, Bucket b) {
  int64_t slice = b.count / p->spread.parts;
  return tensor_exists(group) ? tensor_rows(group, b.first + p->spread.part * slice, slice) : group;
}

Tensor shards_slice_of_shard(const Parameters *p, Tensor shard, Bucket b) {
  int64_t parts = p->spread.parts;
  return tensor_exists(shard) ? tensor_rows(shard, b.first / parts, b.count / parts) : shard;
}

bool shards_double_buffered(const Parameters *p, ParameterGroup group) {
  return p->spread.zero == 2 && group == GROUP_MATRICES;
}

Tensor shards_local_grads(const Parameters *p, ParameterGroup group, Bucket b) {
  int64_t first = shards_double_buffered(p, group) ? parameters_buffered(p, b.first) : b.first;
  return tensor_rows(p->grad[group], first, b.count);
}

bool shards_weights_are_whole(const Parameters *p, ParameterGroup group) {
  return group != GROUP_HEAD || !p->spread.split_head_weights;
}

Tensor shards_weights(const Parameters *p, ParameterGroup group, Bucket b) {
  return shards_weights_are_whole(p, group) ? slice_of_whole(p, p->value[group], b) : p->value[group];
}

Tensor shards_reduced_grads(const Parameters *p, ParameterGroup group, Bucket b) {
  if (group == GROUP_HEAD && p->spread.split_head) return p->grad[GROUP_HEAD];
  if (tensor_exists(p->grad_shard[group])) return shards_slice_of_shard(p, p->grad_shard[group], b);
  return slice_of_whole(p, p->grad[group], b);
}

// --- elements to and from the host -------------------------------------------------------------------------

static bool is_sharded(const Parameters *p, const Tensor *role, ParameterGroup group) {
  return tensor_count(role[group]) != p->group_elements[group];
}

void shards_write(const Parameters *p, Backend *backend, const Tensor *role, const Parameter *parameter,
                  int64_t first, int64_t count, const void *values, Dtype dtype, uint16_t *rounded) {
  ParameterGroup group = parameter->group;
  if (!tensor_exists(role[group])) return;
  int64_t begin = parameter->offset + first, stop = begin + count;
  if (!is_sharded(p, role, group)) {
    parameters_upload(backend, tensor_rows(role[group], begin, count), values, dtype, rounded);
    return;
  }
  for (Bucket b = {p->group_elements[group], 0}; b.first > begin;) {
    b = shards_bucket(p, group, b.first);
    int64_t slice = b.count / p->spread.parts, local = b.first + p->spread.part * slice;
    int64_t from = max_i64(begin, local), to = min_i64(stop, local + slice);
    if (from >= to) continue;
    Tensor shard = tensor_rows(shards_slice_of_shard(p, role[group], b), from - local, to - from);
    const char *slice_values = (const char *)values + (size_t)(from - begin) * dtype_bytes(dtype);
    parameters_upload(backend, shard, slice_values, dtype, rounded);
  }
}

// Elements of a split head that each rank contributes to one all-gather: together about a bucket.
static int64_t head_at_once(const Parameters *p, Dtype dtype) {
  return BUCKET_BYTES / (int64_t)dtype_bytes(dtype) / p->spread.parts;
}

static Tensor push_bucket(Backend *backend, Dtype dtype, int64_t count) {
  return memory_push_1d(&backend->memory, "gathered shards", MEMORY_WORKSPACE, dtype, count);
}

// A split head's one bucket is too large to gather: every rank contributes its slice's elements at the same offset.
static void read_head(const Parameters *p, Backend *backend, Tensor shard, int64_t begin, int64_t stop,
                      char *host) {
  int64_t slice = tensor_count(shard), width = (int64_t)dtype_bytes(shard.dtype), count;
  for (int64_t at = begin; at < stop; at += count) {
    int64_t owner = at / slice, offset = at % slice;
    count = min_i64(min_i64(stop - at, slice - offset), head_at_once(p, shard.dtype));
    MemoryMark mark = memory_mark(&backend->memory);
    Tensor all = push_bucket(backend, shard.dtype, count * p->spread.parts);
    all_gather(backend, (Collective){.out = all, .x = tensor_rows(shard, offset, count)});
    if (backend->rank == 0)
      backend_to_host(backend, host + (at - begin) * width, tensor_rows(all, owner * count, count));
    memory_pop_to(&backend->memory, mark);
  }
}

void shards_read(const Parameters *p, Backend *backend, const Tensor *role, const Parameter *parameter,
                 int64_t first, int64_t count, void *host) {
  ParameterGroup group = parameter->group;
  int64_t begin = parameter->offset + first, stop = begin + count;
  if (!is_sharded(p, role, group)) {
    if (backend->rank == 0) backend_to_host(backend, host, tensor_rows(role[group], begin, count));
    return;
  }
  if (group == GROUP_HEAD && p->spread.split_head) {
    read_head(p, backend, role[group], begin, stop, host);
    return;
  }
  size_t width = dtype_bytes(role[group].dtype);
  for (Bucket b = {p->group_elements[group], 0}; b.first > begin;) {
    b = shards_bucket(p, group, b.first);
    if (b.first >= stop) continue;
    MemoryMark mark = memory_mark(&backend->memory);
    Tensor whole = push_bucket(backend, role[group].dtype, b.count);
    all_gather(backend, (Collective){.out = whole, .x = shards_slice_of_shard(p, role[group], b)});
    int64_t from = max_i64(begin, b.first), to = min_i64(stop, b.first + b.count);
    if (backend->rank == 0)
      backend_to_host(backend, (char *)host + (size_t)(from - begin) * width,
                      tensor_rows(whole, from - b.first, to - from));
    memory_pop_to(&backend->memory, mark);
  }
}

void shards_plan_read(const Parameters *p, Backend *backend) {
  const Tensor *const roles[] = {p->value, p->master, p->m, p->v};
  for (int r = 0; r < 4; r++)
    for (int g = 0; g < GROUP_COUNT; g++) {
      Tensor role = roles[r][g];
      if (!tensor_exists(role) || !is_sharded(p, roles[r], (ParameterGroup)g)) continue;
      MemoryMark mark = memory_mark(&backend->memory);
      int64_t count = min_i64(p->bucket[g], p->group_elements[g]);
      if (g == GROUP_HEAD && p->spread.split_head)
        count = min_i64(head_at_once(p, role.dtype), tensor_count(role)) * p->spread.parts;
      push_bucket(backend, role.dtype, count);
      memory_pop_to(&backend->memory, mark);
    }
}
