// Shared by the files of the CPU backend: the operations' declarations, and the GEMMs that they use.
#pragma once

#include "kernels/kernels.h"

// Loops of independent iterations: as vector instructions, and by all threads in equal parts.
#define EACH_SIMD(i, count) _Pragma("omp simd") for (int64_t i = 0; i < (count); i++)
#define EACH_PARALLEL(i, count)                                                                              \
  _Pragma("omp parallel for schedule(static)") for (int64_t i = 0; i < (count); i++)

// backend->state.
typedef struct {
  bool no_blas;           // plain loops in place of CBLAS
  float *received;        // collectives.c: the other ranks' slices
  struct Deferred *queue; // operations to be joined, oldest first
  int64_t queued, capacity;
} CpuState;

// Row i of a tensor of rank 1 or 2, as fp32.
static inline float *cpu_row(Tensor t, int64_t i) {
  return (float *)t.data + i * t.stride;
}

// Part i of a matrix that is cut into parts of `size` rows.
static inline Tensor cpu_part(Tensor t, int64_t size, int64_t i) {
  return tensor_rows(t, i * size, min_i64(size, t.shape[0] - i * size));
}

// Tile t of block b of a matrix [C, V]: up to LCE_TILE_ROWS by LCE_TILE_COLUMNS.
static inline Tensor cpu_tile(Tensor logits, int64_t b, int64_t t) {
  int64_t column = t * LCE_TILE_COLUMNS, columns = min_i64(LCE_TILE_COLUMNS, logits.shape[1] - column);
  return tensor_columns(cpu_part(logits, LCE_TILE_ROWS, b), column, columns);
}

// --- gemm.c ------------------------------------------------------------------------------------------------

// out = (accumulate ? out : 0) + alpha a b, where a or b may be transposed, not both. Inside an OpenMP region
// it runs on the calling thread alone: kernels multiply tiles that way.
void cpu_gemm(const Backend *backend, Tensor out, Tensor a, bool a_transposed, Tensor b, bool b_transposed,
              float alpha, bool accumulate);
const char *cpu_blas(void); // the library's name; NULL: none
// tile_logits.c: out = x W^T on the calling thread, for operands in its caches.
void cpu_tile_logits(const Backend *backend, Tensor out, Tensor x, Tensor weight);

// --- codes -------------------------------------------------------------------------------------------------

// Writes the values that x stands for to `to`.
Tensor cpu_dequantize(Quantized x, float *to);
Tensor cpu_dequantize_rows(QuantizedRows x, float *to);
// Writes the codes of x by the rule for an operation that computes x (kernels.h); nothing if amax is absent.
void cpu_quantize_made(Quantized out, Tensor x);

// --- rows.c ------------------------------------------------------------------------------------------------

// amax[0] = max |x|, as Quantized.amax; does nothing if amax is absent.
void cpu_amax(Tensor amax, Tensor x);

// out[ids[n]] += alpha * coefficients[n] * x[n] (coefficients NULL: all 1) for n < N; negative ids name no
// row. Sorted by id, then each row's terms are summed in the order of n, in double. `keys` is scratch [N].
void cpu_scatter_add(Tensor out, Tensor ids, Tensor x, const float *coefficients, float alpha,
                     uint64_t *keys);

// --- streams.c: work that is asynchronous on a GPU ---------------------------------------------------------

// Runs when it is joined: a caller that uses its tensors too early gets wrong results every time.
typedef struct Deferred {
  const char *name; // for the watchdog
  StreamKind stream;
  void (*run)(Backend *backend, const struct Deferred *deferred);
  union {
    Collective collective;
    Copy copy;
    Update update;
  };
} Deferred;

void cpu_defer(Backend *backend, Deferred deferred);
// Runs the operations queued for these two streams, in the order of the calls, but the last `behind` of each.
void cpu_join(Backend *backend, StreamKind stream, int64_t behind, StreamKind other, int64_t other_behind);

// --- the loss's rows: vectors that may be absent -----------------------------------------------------------

static inline double cpu_read(Tensor t, int64_t n, double otherwise) {
  return tensor_exists(t) ? ((const float *)t.data)[n] : otherwise;
}

static inline void cpu_store(Tensor output, int64_t n, double value) {
  if (tensor_exists(output)) ((float *)output.data)[n] = (float)value;
}

// --- shared by the kernels and backend.c -------------------------------------------------------------------

enum { CPU_REDUCE_BLOCK = 32768 };                        // optimizer.c: elements to one partial sum
size_t cpu_lce_logits_exp_scratch(const LceLogitsExp *a); // linear_cross_entropy.c
size_t cpu_lce_sampled_gradients_scratch(const LceSampledGradients *a); // likewise

// --- the operations, as kernels.h describes them -----------------------------------------------------------

#define DECLARE(name, Arguments, group) void cpu_##name(Backend *backend, const Arguments *a);
OPERATIONS(DECLARE, DECLARE)
#undef DECLARE
void cpu_join_ranks(Backend *backend);
void cpu_collectives_join(Backend *backend, int64_t behind);
void cpu_collectives_end(Backend *backend); // collectives.c: at the backend's end
void cpu_copies_join(Backend *backend, int64_t in, int64_t out);
