#include "model/parameters.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/random.h"

// A Param that spans `count` tensors of the table from `first` on.
struct ParameterView {
  Param *param;
  int64_t first, count;
};

static void *grow(void *array, int64_t count, int64_t *capacity, size_t element) {
  if (count < *capacity) return array;
  *capacity = *capacity ? 2 * *capacity : 64;
  void *grown = realloc(array, (size_t)*capacity * element);
  if (!grown) fail("out of host memory for the table of parameters");
  return grown;
}

static int64_t elements_of(const Parameter *p) {
  return p->rank == 1 ? p->shape[0] : p->shape[0] * p->shape[1];
}

void parameters_add(Parameters *parameters, Param *param, ParameterGroup group, const ParameterSpec *specs,
                    int count) {
  parameters->views =
      grow(parameters->views, parameters->view_count, &parameters->view_capacity, sizeof *parameters->views);
  parameters->views[parameters->view_count++] =
      (struct ParameterView){.param = param, .first = parameters->count, .count = count};
  int64_t *end = &parameters->group_elements[group];
  for (int i = 0; i < count; i++) {
    parameters->items =
        grow(parameters->items, parameters->count, &parameters->capacity, sizeof *parameters->items);
    Parameter *p = &parameters->items[parameters->count++];
    *p = (Parameter){.group = group,
                     .rank = specs[i].d1 ? 2 : 1,
                     .shape = {specs[i].d0, specs[i].d1},
                     .offset = *end,
                     .init = specs[i].init,
                     .stddev = specs[i].stddev};
    snprintf(p->name, sizeof p->name, "%s", specs[i].name);
    *end += elements_of(p);
  }
  // Views start aligned in every dtype; padding stays zero for ever, since no gradient reaches it.
  const int64_t step = MEMORY_ALIGNMENT / 2;
  *end = (*end + step - 1) / step * step;
}

static Tensor slice(Tensor group, int64_t offset, int rank, const int64_t shape[2]) {
  if (!tensor_exists(group)) return group;
  int64_t count = rank == 1 ? shape[0] : shape[0] * shape[1];
  Tensor flat = tensor_rows(group, offset, count);
  return rank == 1 ? flat : tensor_reshape_2d(flat, shape[0], shape[1]);
}

// One slab for one role; groups[g] becomes the flat tensor of group g.
static void reserve_role(const Parameters *parameters, Memory *memory, const char *name,
                         MemoryCategory category, const Dtype dtypes[GROUP_COUNT],
                         Tensor groups[GROUP_COUNT]) {
  size_t bytes = 0;
  for (int g = 0; g < GROUP_COUNT; g++)
    bytes += (size_t)parameters->group_elements[g] * dtype_bytes(dtypes[g]);
  uintptr_t at = (uintptr_t)memory_reserve(memory, name, category, bytes);
  for (int g = 0; g < GROUP_COUNT; g++) {
    groups[g] = tensor_1d((void *)at, dtypes[g], parameters->group_elements[g]);
    at += tensor_bytes(groups[g]);
  }
}

void parameters_allocate(Parameters *parameters, Memory *memory, ParameterDtypes d) {
  const Dtype weight[GROUP_COUNT] = {d.weight, d.weight, d.weight};
  const Dtype master[GROUP_COUNT] = {DTYPE_F32, DTYPE_F32, DTYPE_F32};
  const Dtype grad[GROUP_COUNT] = {DTYPE_F32, d.grad, d.grad};
  const Dtype moment[GROUP_COUNT] = {d.moment, d.moment, d.moment};
  reserve_role(parameters, memory, "weights", MEMORY_WEIGHTS, weight, parameters->value);
  if (d.master && !d.frozen)
    reserve_role(parameters, memory, "master weights", MEMORY_MASTER_WEIGHTS, master, parameters->master);
  if (!d.frozen) {
    reserve_role(parameters, memory, "gradients", MEMORY_GRADIENTS, grad, parameters->grad);
    reserve_role(parameters, memory, "first moments", MEMORY_MOMENTS, moment, parameters->m);
    reserve_role(parameters, memory, "second moments", MEMORY_MOMENTS, moment, parameters->v);
  }

  for (int64_t i = 0; i < parameters->count; i++) {
    Parameter *p = &parameters->items[i];
    p->value = slice(parameters->value[p->group], p->offset, p->rank, p->shape);
    p->grad = slice(parameters->grad[p->group], p->offset, p->rank, p->shape);
    p->m = slice(parameters->m[p->group], p->offset, p->rank, p->shape);
    p->v = slice(parameters->v[p->group], p->offset, p->rank, p->shape);
    p->master = slice(parameters->master[p->group], p->offset, p->rank, p->shape);
  }
  for (int64_t i = 0; i < parameters->view_count; i++) {
    struct ParameterView view = parameters->views[i];
    const Parameter *first = &parameters->items[view.first];
    int64_t shape[2] = {0, first->shape[1]};
    for (int64_t k = 0; k < view.count; k++) shape[0] += first[k].shape[0];
    view.param->value = slice(parameters->value[first->group], first->offset, first->rank, shape);
    view.param->grad = slice(parameters->grad[first->group], first->offset, first->rank, shape);
  }
}

// --- first values ------------------------------------------------------------------------------------------

enum { DRAWN_AT_ONCE = 1 << 22 }; // elements: bounds the host memory that initialisation takes

static void draw(const Parameter *p, uint64_t seed, uint64_t stream, int64_t first, int64_t count,
                 float *out) {
  if (p->init != INIT_NORMAL) {
    for (int64_t i = 0; i < count; i++) out[i] = p->init == INIT_ONES;
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++)
    out[i] = (float)(p->stddev * random_normal(seed, stream, (uint64_t)(first + i)));
}

void parameters_upload(Backend *backend, Tensor to, const float *values, uint16_t *rounded) {
  if (to.dtype == DTYPE_F32) {
    backend_to_device(backend, to, values);
    return;
  }
  int64_t count = tensor_count(to);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++) rounded[i] = bf16_from_f32(values[i]);
  backend_to_device(backend, to, rounded);
}

void parameters_initialize(Parameters *parameters, Backend *backend, uint64_t seed) {
  float *values = malloc(DRAWN_AT_ONCE * sizeof *values);
  uint16_t *rounded = malloc(DRAWN_AT_ONCE * sizeof *rounded);
  if (!values || !rounded) fail("out of host memory for the initial weights");
  for (int64_t i = 0; i < parameters->count; i++) {
    const Parameter *p = &parameters->items[i];
    Tensor value = tensor_flat(p->value),
           master = tensor_exists(p->master) ? tensor_flat(p->master) : p->master;
    for (int64_t first = 0, total = elements_of(p); first < total; first += DRAWN_AT_ONCE) {
      int64_t count = total - first < DRAWN_AT_ONCE ? total - first : DRAWN_AT_ONCE;
      draw(p, seed, (uint64_t)i, first, count, values);
      parameters_upload(backend, tensor_rows(value, first, count), values, rounded);
      if (tensor_exists(master))
        parameters_upload(backend, tensor_rows(master, first, count), values, rounded);
    }
  }
  free(values);
  free(rounded);
}

Parameter *parameters_find(Parameters *parameters, const char *name) {
  for (int64_t i = 0; i < parameters->count; i++)
    if (strcmp(parameters->items[i].name, name) == 0) return &parameters->items[i];
  return NULL;
}

void parameters_free(Parameters *parameters) {
  free(parameters->items);
  free(parameters->views);
  *parameters = (Parameters){0};
}
