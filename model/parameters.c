#include "model/parameters.h"

#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/random.h"
#include "kernels/ranks/ranks.h"
#include "model/shards.h"

int64_t parameter_elements(const Parameter *p) {
  return p->rank == 1 ? p->shape[0] : p->shape[0] * p->shape[1];
}

void parameters_shard(ParameterSet *parameters, ParameterDtypes d, bool tied, int rank, int ranks) {
  bool sharded = d.zero && ranks > 1, split = sharded && d.vocab_parallel && !d.weights_only;
  parameters->sharding = (Sharding){.zero = sharded ? d.zero : 0,
                                    .part = sharded ? rank : 0,
                                    .parts = sharded ? ranks : 1,
                                    .split_head = split,
                                    .split_head_weights = split && !tied};
}

// Views and their slices start aligned in every dtype; the padding stays zero.
static int64_t alignment(const ParameterSet *parameters) {
  return MEMORY_ALIGNMENT / 2 * parameters->sharding.parts;
}

// Whole rows for every part, which begins aligned.
static void split_head(ParameterSet *p, int64_t vocab_size, int64_t hidden_size) {
  Sharding *s = &p->sharding;
  int64_t step = 1, unit = MEMORY_ALIGNMENT / 2;
  while (step * hidden_size % unit) step++;
  int64_t rows = round_up(ceil_div(vocab_size, s->parts), step);
  if ((s->parts - 1) * rows >= vocab_size)
    fail("a vocabulary of %lld, in parts of %lld, cannot be split over %d ranks; leave out --vocab-parallel",
         (long long)vocab_size, (long long)rows, s->parts);
  s->head_rows = range_overlap((Range){s->part * rows, rows}, (Range){0, vocab_size});
  p->group_elements[GROUP_HEAD] = s->parts * rows * hidden_size;
}

void parameters_add(ParameterSet *p, Weight *view, const Parameter *tensors, int count) {
  int64_t *end = &p->group_elements[tensors->group];
  for (int i = 0; i < count; i++, p->count++) {
    Parameter added = tensors[i];
    added.view = view;
    added.offset = *end;
    arrput(p->items, added);
    *end += parameter_elements(&added);
  }
  *end = round_up(*end, alignment(p));
  if (tensors->group == GROUP_HEAD && p->sharding.split_head)
    split_head(p, tensors->shape[0], tensors->shape[1]);
}

enum {
  NO_GROUP = 0,
  HEAD = 1 << GROUP_HEAD,
  MATRICES = 1 << GROUP_MATRICES | 1 << GROUP_EMBEDDINGS,
  ALL = (1 << GROUP_COUNT) - 1
};

// A group's flat tensor in a role: all of it or, if the role is sharded, this rank's part.
static Tensor tensor_of(const ParameterSet *p, const Tensor *role, int group, Dtype dtype, bool sharded) {
  int64_t count = p->group_elements[group] / (sharded ? p->sharding.parts : 1);
  if (role == p->state[1] && group == GROUP_MATRICES && p->muon) count = 0;
  if (role == p->grad_sum && group == GROUP_HEAD) count = 0;
  if (role == p->grad && grads_double_buffered(p, group)) // padding stays zero
    count = min_i64(count, 2 * p->sharding.layer);
  bool head_grad = (role == p->grad || role == p->grad_sum) && group == GROUP_HEAD;
  return tensor_1d(NULL, head_grad ? DTYPE_F32 : dtype, count);
}

// A slab on the device and, for the groups in `host`, one in the host's memory.
static void reserve_role(const ParameterSet *p, Memory *memory, const char *name, MemoryCategory category,
                         Dtype dtype, int sharded, int host, Tensor role[GROUP_COUNT]) {
  for (int on_host = 0; on_host < 2; on_host++) {
    size_t bytes = 0, at[GROUP_COUNT];
    Tensor groups[GROUP_COUNT];
    for (int g = 0; g < GROUP_COUNT; g++) {
      groups[g] = tensor_of(p, role, g, dtype, sharded >> g & 1);
      at[g] = bytes;
      if ((host >> g & 1) == on_host) bytes += tensor_bytes(groups[g]);
    }
    if (!bytes) continue;
    char *slab = (on_host ? memory_reserve_host : memory_reserve)(memory, name, category, bytes);
    for (int g = 0; g < GROUP_COUNT; g++) {
      if ((host >> g & 1) != on_host || !tensor_count(groups[g])) continue;
      role[g] = groups[g];
      role[g].data = (void *)((uintptr_t)slab + at[g]);
    }
  }
}

// Cuts a layer into equal buckets of about the usual size.
static int64_t bucket_of_layer(const ParameterSet *p, int64_t usual) {
  int64_t units = p->sharding.layer / alignment(p), pieces = ceil_div(p->sharding.layer, usual);
  while (pieces < units && units % pieces) pieces++;
  return p->sharding.layer / pieces;
}

static void cut_buckets(ParameterSet *p, Dtype grad) {
  for (int g = 0; g < GROUP_COUNT; g++) {
    size_t width = dtype_bytes(g == GROUP_HEAD ? DTYPE_F32 : grad);
    int64_t usual = BUCKET_BYTES / (int64_t)width / alignment(p) * alignment(p);
    if (usual == 0) usual = alignment(p);
    bool by_layer = g == GROUP_MATRICES && (p->sharding.zero == 2 || p->muon);
    p->bucket[g] = by_layer ? bucket_of_layer(p, usual) : usual;
  }
  if (p->sharding.split_head)
    p->bucket[GROUP_HEAD] = p->group_elements[GROUP_HEAD]; // a slice is a rank's rows
}

Tensor parameters_layer(const ParameterSet *p, const Tensor role[GROUP_COUNT], int64_t layer) {
  return tensor_rows(role[GROUP_MATRICES], layer * p->sharding.layer, p->sharding.layer);
}

Tensor parameters_layer_buffer(const ParameterSet *p, Tensor buffer, int64_t layer) {
  return tensor_rows(buffer, layer % 2 * p->sharding.layer, p->sharding.layer);
}

// The weights or the gradients of a parameter.
static Tensor view_of(const ParameterSet *p, bool grad, const Parameter *parameter) {
  ParameterGroup group = parameter->group;
  Tensor slab = (grad ? p->grad : p->value)[group], buffer = grad ? p->layer_grads : p->layer_values;
  int64_t offset = parameter->offset, rows = parameter->shape[0];
  bool offloaded = tensor_exists(buffer) && group == GROUP_MATRICES;
  if (offloaded || (grad && grads_double_buffered(p, group))) offset %= 2 * p->sharding.layer;
  if (offloaded) slab = buffer;
  if (group == GROUP_HEAD && (grad ? p->sharding.split_head : p->sharding.split_head_weights))
    rows = p->sharding.head_rows.size;
  if (!tensor_exists(slab)) return slab;
  if (parameter->rank == 1) return tensor_rows(slab, offset, rows);
  int64_t columns = parameter->shape[1];
  return tensor_reshape_2d(tensor_rows(slab, offset, rows * columns), rows, columns);
}

// Two tensors that lie one after the other as one; the first may be absent.
static Tensor joined(Tensor a, Tensor b) {
  if (!tensor_exists(a)) return b;
  int64_t rows = a.shape[0] + b.shape[0];
  return a.rank == 1 ? tensor_1d(a.data, a.dtype, rows) : tensor_2d(a.data, a.dtype, rows, a.shape[1]);
}

const OptimizerState optimizer_states[] = {{"m", "first moments"}, {"v", "second moments"}};

// Master weights, gradients and the optimizer's states.
static void reserve_for_training(ParameterSet *p, Memory *memory, ParameterDtypes d) {
  const Sharding *s = &p->sharding;
  bool grads_on_host = d.offload & OFFLOAD_GRADIENTS, grads_buffered = grads_on_host && s->zero < 2;
  int optimizer_host = d.offload & OFFLOAD_OPTIMIZER ? ALL : NO_GROUP;
  if (d.master)
    reserve_role(p, memory, "master weights", MEMORY_MASTER_WEIGHTS, DTYPE_F32, ALL, optimizer_host,
                 p->master);
  reserve_role(p, memory, "gradients", MEMORY_GRADIENTS, d.grad, s->split_head ? HEAD : NO_GROUP,
               grads_buffered ? MATRICES : NO_GROUP, p->grad);
  if (grads_buffered)
    p->layer_grads =
        memory_reserve_1d(memory, "gradients of two layers", MEMORY_GRADIENTS, d.grad, 2 * s->layer);
  if (s->zero == 2)
    reserve_role(p, memory, "summed gradients", MEMORY_GRADIENTS, d.grad, ALL, grads_on_host ? ALL : NO_GROUP,
                 p->grad_sum);
  for (int g = 0; g < GROUP_COUNT; g++)
    if (!tensor_exists(p->grad_sum[g])) p->grad_sum[g] = p->grad[g];
  p->squares = memory_reserve_1d(memory, "sum of squares", MEMORY_TABLES, DTYPE_F32, 1);
  for (int k = 0; k < OPTIMIZER_STATES; k++)
    reserve_role(p, memory, optimizer_states[k].label, MEMORY_MOMENTS, d.moment, ALL, optimizer_host,
                 p->state[k]);
}

void parameters_allocate(ParameterSet *p, Memory *memory, ParameterDtypes d) {
  bool weights_on_host = d.offload & OFFLOAD_WEIGHTS;
  p->states_offloaded = d.offload & OFFLOAD_OPTIMIZER;
  p->muon = d.optimizer == OPTIMIZER_MUON;
  cut_buckets(p, d.grad);
  reserve_role(p, memory, "weights", MEMORY_WEIGHTS, d.weight,
               p->sharding.split_head_weights ? HEAD : NO_GROUP, weights_on_host ? MATRICES : NO_GROUP,
               p->value);
  if (weights_on_host)
    p->layer_values =
        memory_reserve_1d(memory, "weights of two layers", MEMORY_WEIGHTS, d.weight, 2 * p->sharding.layer);
  if (!d.weights_only) reserve_for_training(p, memory, d);
  for (Parameter *t = p->items; t < p->items + p->count; t++) {
    t->value = view_of(p, false, t);
    t->grad = view_of(p, true, t);
    t->view->value = joined(t->view->value, t->value);
    t->view->grad = joined(t->view->grad, t->grad);
  }
}

// --- first values ------------------------------------------------------------------------------------------

enum { DRAWN_AT_ONCE = 1 << 22 }; // elements: bounds the host memory that initialisation takes

static void draw(const Parameter *p, uint64_t seed, uint64_t stream, int64_t first, int64_t count,
                 float *out) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++)
    out[i] = p->init == INIT_NORMAL ? (float)(p->stddev * random_normal(seed, stream, (uint64_t)(first + i)))
                                    : p->init == INIT_ONES;
}

// fp32 values as elements of `dtype`: themselves, or rounded to bf16 in `rounded`, a buffer for as many.
static const void *round_to(Dtype dtype, const float *values, int64_t count, uint16_t *rounded) {
  if (dtype == DTYPE_F32) return values;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++) rounded[i] = bf16_from_f32(values[i]);
  return rounded;
}

void parameters_fill_normal(Backend *backend, Tensor t, double mean, double deviation, uint64_t seed,
                            uint64_t stream) {
  int64_t all = tensor_count(t), most = min_i64(all, DRAWN_AT_ONCE);
  float *values = host_alloc(most, sizeof *values, "random values");
  uint16_t *rounded = host_alloc(most, sizeof *rounded, "random values");
  for (int64_t first = 0, count; first < all; first += count) {
    count = min_i64(most, all - first);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++)
      values[i] = (float)(mean + deviation * random_normal(seed, stream, (uint64_t)(first + i)));
    backend_to_device(backend, tensor_rows(tensor_flat(t), first, count),
                      round_to(t.dtype, values, count, rounded));
  }
  free(values);
  free(rounded);
}

void parameters_initialize(ParameterSet *parameters, Backend *backend, uint64_t seed) {
  float *values = host_alloc(DRAWN_AT_ONCE, sizeof *values, "the initial weights");
  uint16_t *rounded = host_alloc(DRAWN_AT_ONCE, sizeof *rounded, "the initial weights");
  for (int64_t i = 0; i < parameters->count; i++) {
    const Parameter *p = &parameters->items[i];
    Range all = {p->offset, parameter_elements(p)};
    for (Range b = {0}; shards_next(parameters, p->group, all, &b);) {
      Range mine = range_overlap(shards_slice(parameters, b), all);
      for (int64_t first = mine.offset - all.offset, count; mine.size; mine.size -= count, first += count) {
        count = min_i64(mine.size, DRAWN_AT_ONCE);
        draw(p, seed, (uint64_t)i, first, count, values);
        const void *weights = round_to(parameters->value->dtype, values, count, rounded);
        shards_write(parameters, backend, parameters->value, p, first, count, weights);
        shards_write(parameters, backend, parameters->master, p, first, count, values);
        ranks_alive();
      }
    }
  }
  free(values);
  free(rounded);
  for (ParameterGroup g = 0; g < GROUP_COUNT; g++)
    for (Range b = {0}; shards_next(parameters, g, (Range){0, parameters->group_elements[g]}, &b);)
      shards_gather(parameters, backend, g, b);
  collectives_join(backend, 0);
}

Parameter *parameters_find(ParameterSet *parameters, const char *name) {
  for (int64_t i = 0; i < parameters->count; i++)
    if (strcmp(parameters->items[i].name, name) == 0) return &parameters->items[i];
  return NULL;
}

void parameters_free(ParameterSet *parameters) {
  arrfree(parameters->items);
  *parameters = (ParameterSet){0};
}
