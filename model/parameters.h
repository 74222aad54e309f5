// Every weight of a model: a table of tensors with Hugging Face's names and shapes.
//
// The tensors of a role (weights, gradients, moments, ...) lie in one slab, in four groups. Tensors that a
// GEMM reads as one (q, k and v; gate and up) lie one after the other: a Weight spans them all, and the table
// names each slice.
#pragma once

#include "kernels/kernels.h"

typedef enum {
  GROUP_HEAD,       // the head's matrix: decayed, and its gradient is always fp32
  GROUP_EMBEDDINGS, // tables of positions, and of tokens unless that is the head: decayed
  GROUP_MATRICES,   // the layers', each with as many elements: decayed
  GROUP_VECTORS,    // norms and biases: not decayed
  GROUP_COUNT
} ParameterGroup;

// A weight as an operation sees it.
typedef struct {
  Tensor value;        // of the backend's dtype
  Tensor grad;         // fp32, or the gradients' dtype
  Quantized quantized; // fp8.c's
} Weight;

typedef enum { INIT_NORMAL, INIT_ONES, INIT_ZEROS } InitKind;

// One named tensor. Its copies in the roles' slabs have the same shape.
typedef struct {
  char name[96];
  ParameterGroup group;
  int rank;
  int64_t shape[2];     // rank 1: [0] alone
  int64_t matrices[3];  // outputs of each matrix in it: of q, k and v, of gate and up, or all
  bool outputs_in_rows; // else in columns
  InitKind init;
  double stddev;      // of INIT_NORMAL
  Weight *view;       // spans this tensor and its neighbours of the same view
  int64_t offset;     // elements, within its group
  Tensor value, grad; // the local rows of a split head
} Parameter;

// Tensors in the host's memory. Weights and gradients of GROUP_MATRICES are copied to and from a double
// buffer of two layers on the device; embeddings are accessed in place, and so are the optimizer's tensors,
// but in a deferred update.
enum {
  OFFLOAD_WEIGHTS = 1 << 0,
  OFFLOAD_GRADIENTS = 1 << 1,
  OFFLOAD_OPTIMIZER = 1 << 2,   // master weights and optimizer states, of all groups
  OFFLOAD_ACTIVATIONS = 1 << 3, // the layers' inputs, under RECOMPUTE_LAYER
  OFFLOAD_PARAMETERS = OFFLOAD_WEIGHTS | OFFLOAD_GRADIENTS | OFFLOAD_OPTIMIZER
};

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON } Optimizer;

typedef enum { FP8_NONE, FP8_ALL, FP8_LAYERS } Fp8Use; // the layers' matmuls; all: and the loss's logits

typedef struct {
  Dtype weight;      // the GEMMs' operands
  bool master;       // keep an fp32 copy (only if weight is bf16)
  bool weights_only; // for evaluation and text: no master, gradients or states
  Dtype grad;        // of all gradients but the head's
  Dtype moment;      // of the optimizer's states
  Optimizer optimizer;
  int zero;            // sharding over several ranks, 0 to 2
  bool vocab_parallel; // the head's rows are split over them; needs zero 1 or 2
  unsigned offload;    // OFFLOAD_...
  Fp8Use fp8;          // the matmuls trained in FP8
} ParameterDtypes;

// Each weight has these; under Muon the layers' matrices have only the first.
enum { OPTIMIZER_STATES = 2 };
typedef struct {
  const char *name, *label; // "NAME.PARAMETER" in a checkpoint; a plan's name
} OptimizerState;
extern const OptimizerState optimizer_states[OPTIMIZER_STATES];

// Some elements of a group, or rows of a matrix.
typedef struct {
  int64_t offset, size;
} Range;

static inline int64_t range_end(Range r) {
  return r.offset + r.size;
}

static inline Range range_overlap(Range a, Range b) {
  int64_t offset = max_i64(a.offset, b.offset), end = min_i64(range_end(a), range_end(b));
  return (Range){offset, max_i64(end - offset, 0)};
}

// Copies that a call begins, in each direction; copies_join may let as many run on.
typedef struct {
  int64_t in, out;
} CopyCount;

// How the parameters are sharded over ranks (shards.h). {0, 0, 1} shards nothing.
typedef struct {
  int zero;                            // 0 to 2
  int part, parts;                     // this rank's shard, and their number
  int64_t layer;                       // elements of GROUP_MATRICES in a layer
  bool split_head, split_head_weights; // gradients of local rows alone; and weights, unless tied
  Range head_rows;                     // the local ones; the last part may have fewer
} Sharding;

typedef struct {
  Sharding sharding;
  Parameter *items; // in the order of the forward pass; an array of stb_ds.h
  int64_t count;
  int64_t group_elements[GROUP_COUNT]; // with padding
  int64_t bucket[GROUP_COUNT];         // elements of the ranges that collectives send gradients in
  // Whole groups, flat, or this rank's shards of them.
  Tensor value[GROUP_COUNT], master[GROUP_COUNT], grad[GROUP_COUNT];
  bool muon; // updates the layers' matrices
  Tensor state[OPTIMIZER_STATES][GROUP_COUNT];
  Tensor grad_sum[GROUP_COUNT];     // over all ranks: grad or, at zero 2, shards
  Tensor squares;                   // fp32 [1]: the gradients' sum of squares
  Tensor layer_values, layer_grads; // double buffers of two layers, if value or grad is offloaded
  bool states_offloaded;
  Update deferred; // of the layers' matrices, to the next forward pass; step 0: none
} ParameterSet;

// At zero 2 the gradients of layers are a double buffer of two.
static inline bool grads_double_buffered(const ParameterSet *p, ParameterGroup group) {
  return p->sharding.zero == 2 && group == GROUP_MATRICES;
}

// Comes before parameters_add, which pads groups so that every tensor begins at a multiple of 128 x parts.
void parameters_shard(ParameterSet *parameters, ParameterDtypes dtypes, bool tied, int rank, int ranks);

// Adds `count` tensors (name, group, rank, shape and first value) of one group and shape[1], which
// parameters_allocate makes `view` span. Fails if a split head leaves some rank without rows.
void parameters_add(ParameterSet *parameters, Weight *view, const Parameter *tensors, int count);

// Reserves the slabs (zeroed) and fills in every tensor of the table and every requested Weight.
void parameters_allocate(ParameterSet *parameters, Memory *memory, ParameterDtypes dtypes);

// Layer `layer` of an offloaded role (value or grad), and its half of that role's double buffer.
Tensor parameters_layer(const ParameterSet *parameters, const Tensor role[GROUP_COUNT], int64_t layer);
Tensor parameters_layer_buffer(const ParameterSet *parameters, Tensor buffer, int64_t layer);

// First values, drawn on the host from (seed, tensor, element) alone: each rank draws its slices.
void parameters_initialize(ParameterSet *parameters, Backend *backend, uint64_t seed);

// Fills a dense tensor with values of N(mean, deviation^2), drawn from (seed, stream, element) alone.
void parameters_fill_normal(Backend *backend, Tensor tensor, double mean, double deviation, uint64_t seed,
                            uint64_t stream);

int64_t parameter_elements(const Parameter *parameter); // the whole's, however it is sharded

// The tensor called `name`, or NULL.
Parameter *parameters_find(ParameterSet *parameters, const char *name);

void parameters_free(ParameterSet *parameters);

// The sum of the squares of all gradients, over the ranks, to parameters->squares.
void parameters_sum_squares(Backend *backend, const ParameterSet *parameters);
// True if layer_leave sums the layers' squares, before the offloaded gradients leave the device.
bool squares_summed_by_layer(const ParameterSet *parameters, const Backend *backend);
// Updates all weights; each rank updates its part of sharded ones, and the new weights are gathered.
// `settings` has no tensor but grad_scale, and the run's seed.
void parameters_update(Backend *backend, ParameterSet *parameters, Update settings);
// Updates the layers' matrices, all at once.
void muon_update(Backend *backend, const ParameterSet *parameters, Update settings);

// deferred_update.c: AdamW of offloaded layers, beside the forward pass that needs their weights next.

// True if parameters_update leaves the layers' matrices to that pass.
bool updates_deferred(const ParameterSet *parameters, const Backend *backend);
// Begins the deferred update of layer l, whose weights come to its half of layer_values; 0 to the last, in
// order.
CopyCount update_deferred_layer(Backend *backend, const ParameterSet *parameters, int64_t l);
// Ends it after the pass's last layer.
void end_deferred_update(Backend *backend, ParameterSet *parameters);
// Makes a deferred update, if there is one, at once: values and states are read next.
void parameters_finish_update(Backend *backend, ParameterSet *parameters);
