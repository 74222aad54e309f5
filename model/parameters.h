// Every weight of a model: a table of tensors with Hugging Face's names and shapes.
//
// The tensors of one role (weights, gradients, moments, ...) lie in one slab, in four groups, each of which
// the optimizer updates in one pass. Tensors that a GEMM reads as one (q, k and v; gate and up) lie one after
// the other: a Weight spans them all, and the table names each, as a slice.
#pragma once

#include "kernels/kernels.h"

typedef enum {
  GROUP_HEAD,       // the head's matrix: decayed, and its gradient is always fp32
  GROUP_EMBEDDINGS, // tables of positions, and of tokens unless that is the head: decayed
  GROUP_MATRICES,   // of the layers, all of which have as many elements: decayed
  GROUP_VECTORS,    // norms and biases: not decayed
  GROUP_COUNT
} ParameterGroup;

// A weight as an operation sees it.
typedef struct {
  Tensor value; // of the backend's dtype
  Tensor grad;  // fp32, or the gradients' dtype
  Fp8 fp8;      // of a layer's matrix, with ParameterDtypes.fp8
} Weight;

typedef enum { INIT_NORMAL, INIT_ONES, INIT_ZEROS } InitKind;

// One named tensor. Its copies in the roles' slabs have the same shape.
typedef struct {
  char name[96];
  ParameterGroup group;
  int rank;
  int64_t shape[2];  // rank 1: [0] alone
  int column_blocks; // matrices side by side: q, k and v in GPT-2's layout; else 1
  InitKind init;
  double stddev;      // of INIT_NORMAL
  Weight *view;       // spans this tensor and its neighbours of the same view
  int64_t offset;     // elements, within its group
  Tensor value, grad; // the local rows of a split head
} Parameter;

// What lies in the host's memory. GROUP_MATRICES' weights and gradients are copied layer by layer to and from
// a double buffer of two layers on the device; the embeddings' rows, and all that the optimizer reads, are
// accessed in place.
enum {
  OFFLOAD_WEIGHTS = 1 << 0,
  OFFLOAD_GRADIENTS = 1 << 1,
  OFFLOAD_OPTIMIZER = 1 << 2,   // master weights and optimizer states, of all groups
  OFFLOAD_ACTIVATIONS = 1 << 3, // the layers' inputs, under RECOMPUTE_LAYER
  OFFLOAD_PARAMETERS = OFFLOAD_WEIGHTS | OFFLOAD_GRADIENTS | OFFLOAD_OPTIMIZER
};

typedef struct {
  Dtype weight;        // what the GEMMs read
  bool master;         // keep an fp32 copy (only where weight is bf16)
  bool weights_only;   // for evaluation and text: no master, gradients or states
  Dtype grad;          // of all gradients but the head's
  Dtype moment;        // of the optimizer's states
  int optimizer;       // of optimizers[]
  int zero;            // what is sharded where there are several ranks, 0 to 2
  bool vocab_parallel; // the head's rows are split over them; needs zero 1 or 2
  unsigned offload;    // OFFLOAD_...
  // Also FP8 codes of the layers' matrices, for training: the transformer makes them of the weights once a
  // step or, with `offload`, layer after layer in the same memory.
  bool fp8;
} ParameterDtypes;

enum { OPTIMIZER_STATES = 2 };
typedef struct Optimizer Optimizer; // below

// How the parameters are sharded over ranks, as below. {0, 0, 1} shards nothing.
typedef struct {
  int zero;        // 0 to 2
  int part, parts; // this rank's shard, of how many
  int64_t layer;   // elements of GROUP_MATRICES in a layer
  // Vocabulary-parallel: the head's gradients are those of the local rows, and its weights as well unless
  // they are the embedding's.
  bool split_head, split_head_weights;
  int64_t first_head_row, head_rows; // the local ones; the last part may have fewer
} Sharding;

typedef struct ParameterSet {
  Sharding sharding;
  Parameter *items; // in the order of the forward pass
  int64_t count;
  int64_t capacity;
  int64_t group_elements[GROUP_COUNT]; // with padding
  int64_t bucket[GROUP_COUNT];         // elements of the ranges that collectives send gradients in
  // Whole groups, flat: what the optimizer and the norm pass over. Where they are sharded, this rank's
  // shards.
  Tensor value[GROUP_COUNT], master[GROUP_COUNT], grad[GROUP_COUNT];
  const Optimizer *optimizer;
  Tensor state[OPTIMIZER_STATES][GROUP_COUNT];
  Tensor grad_shard[GROUP_COUNT]; // zero 2: the gradients' sums over all ranks, in shards; absent otherwise
  Tensor squares;                 // fp32 [1]: the gradients' sum of squares
  // The double buffers on the device, two layers of GROUP_MATRICES; absent where value or grad is not
  // offloaded.
  Tensor layer_values, layer_grads;
  bool fp8_by_layer; // whether the layers' FP8 codes share the memory of one layer's
} ParameterSet;

// Before the first parameters_add: groups are padded so that every tensor begins at a multiple of 128 x
// parts.
void parameters_shard(ParameterSet *parameters, ParameterDtypes dtypes, bool tied, int rank, int ranks);

// Adds `count` tensors (name, group, rank, shape and first value) of one group and shape[1] that lie one
// after the other. Fails where a split head leaves some rank without rows. parameters_allocate makes `view`
// span them all; it must stay where it is until then.
void parameters_add(ParameterSet *parameters, Weight *view, const Parameter *tensors, int count);

// Reserves the slabs (zeroed) and fills in every tensor of the table and every requested Weight.
void parameters_allocate(ParameterSet *parameters, Memory *memory, ParameterDtypes dtypes);

// Layer `layer` of an offloaded role (value or grad), and its half of that role's double buffer.
Tensor parameters_layer(const ParameterSet *parameters, const Tensor role[GROUP_COUNT], int64_t layer);
Tensor parameters_layer_buffer(const ParameterSet *parameters, Tensor buffer, int64_t layer);

// First values, drawn on the host from (seed, tensor, element) alone: the same on every backend and rank
// count.
void parameters_initialize(ParameterSet *parameters, Backend *backend, uint64_t seed);

// fp32 values as elements of `dtype`: themselves, or rounded to bf16 in `rounded`, a buffer for as many.
const void *parameters_round(Dtype dtype, const float *values, int64_t count, uint16_t *rounded);

int64_t parameter_elements(const Parameter *parameter); // of the whole, however it is sharded

// The tensor called `name`, or NULL.
Parameter *parameters_find(ParameterSet *parameters, const char *name);

void parameters_free(ParameterSet *parameters);

// --- shards -----------------------------------------------------------------------------------------------

// Shards over the ranks (ZeRO; Rajbhandari et al. 2020), and the way in and out of them.
//
// A group is cut into buckets from its end, where the backward pass begins, and each bucket into as many
// equal slices as there are ranks. A rank owns its slice of every bucket: there it has the reduced gradients,
// master weights and states, and updates weights. A rank's slices lie one after the other in its shards,
// bucket by bucket.
//
//   zero 0   nothing is sharded: every rank holds and updates everything
//   zero 1   master weights and states are; gradients are whole, and reduced in the rank's slices of them
//   zero 2   so are the gradients. Those of the head and the embeddings (a pass adds to all of them) and of
//            norms and biases are whole, too. The layers' are in a double buffer of two layers: one layer's
//            are reduce-scattered into the shards while the next layer's are computed
//
// Where the head is split (--vocab-parallel; kernels/lce/linear_cross_entropy.h) its group is one bucket,
// whose slices are whole rows, and a rank computes its rows' gradients from the tokens of all ranks: there is
// nothing to reduce. Its weights are sharded as well, unless they are the embedding's, which every rank reads
// for its tokens.

// A bucket's: enough for the links' full speed, and few enough that the step's last, which nothing hides, is
// short.
enum { BUCKET_BYTES = 32 << 20 };

typedef struct {
  int64_t first, count; // elements of the group; a multiple of 128 x ranks
} Bucket;

// The bucket of `group` that ends before element `end` (the group's length for the first of them).
Bucket shards_bucket(const ParameterSet *parameters, ParameterGroup group, int64_t end);

// Whether this rank holds a part alone of the group's tensors in one role (parameters->value, ...).
bool shards_hold_part(const ParameterSet *parameters, const Tensor *role, ParameterGroup group);
// The rank's slice of a bucket in one role, whole or sharded. What is absent stays absent.
Tensor shards_part(const ParameterSet *parameters, const Tensor *role, ParameterGroup group, Bucket bucket);

// Whether the group's gradients are those of two layers, a double buffer.
bool shards_double_buffered(const ParameterSet *parameters, ParameterGroup group);
// This rank's gradients of a bucket: in their group, or at zero 2 in the double buffer.
Tensor shards_local_grads(const ParameterSet *parameters, ParameterGroup group, Bucket bucket);
// The rank's slice of the gradients' sum over all ranks.
Tensor shards_reduced_grads(const ParameterSet *parameters, ParameterGroup group, Bucket bucket);

// Writes `values`, of the role's dtype, to elements [first, first + count) of a parameter in one role
// (parameters->master, ...), whole or sharded: of a shard each rank writes what it owns. Does nothing where
// the role is absent.
void shards_write(const ParameterSet *parameters, Backend *backend, const Tensor *role,
                  const Parameter *parameter, int64_t first, int64_t count, const void *values);

// Reads them to the host of rank 0, in the role's dtype; shards are gathered on the backend's stack, a bucket
// at a time. Call it on all ranks; on the others `host` is not written.
void shards_read(const ParameterSet *parameters, Backend *backend, const Tensor *role,
                 const Parameter *parameter, int64_t first, int64_t count, void *host);

// --- the optimizers (optimizer.c) --------------------------------------------------------------------------

// What an optimizer keeps for every weight, and how it updates them.
struct Optimizer {
  const char *name;
  struct {
    const char *name,
        *label; // "NAME.PARAMETER" in a checkpoint, and what a plan calls it; NULL after the last
  } states[OPTIMIZER_STATES];
  // A bucket's part that this rank updates, whose weights are then gathered (collectives_join waits).
  // `settings` has no tensors but grad_scale, and the run's seed.
  void (*update)(Backend *backend, const ParameterSet *parameters, ParameterGroup group, Bucket bucket,
                 Update settings);
  // The layers' matrices, all at once, and without the second state; NULL: they are updated as the others.
  void (*update_layers)(Backend *backend, const ParameterSet *parameters, Update settings);
};

extern const Optimizer optimizers[]; // AdamW, Muon
