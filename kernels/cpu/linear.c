// A linear layer: three GEMMs (Y = X W^T, dX = dY W, dW = dY^T X) and what is fused around them.
//
// Bias, GELU and residual are one more pass over the rows that the GEMM has just written. A residual that
// is added in place costs nothing: the GEMM starts from it (beta = 1). The gradient of a vocabulary's
// weight has a GEMM of its own, below.
#include "kernels/cpu/tile.h"
#include "kernels/cpu/vector_math.h"

static CpuMatrix matrix(Tensor t, bool transposed) {
  return (CpuMatrix){.data = t.data, .stride = t.stride, .transposed = transposed};
}

static void add_row(float *restrict row, const float *restrict term, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) row[i] += term[i];
}

void cpu_linear_forward(Backend *backend, const LinearForward *a) {
  int64_t rows = a->x.shape[0], inputs = a->x.shape[1], outputs = a->out.shape[1];
  bool gelu = tensor_exists(a->pre_activation), bias = tensor_exists(a->bias);
  bool residual = tensor_exists(a->residual);
  bool in_place = residual && a->residual.data == a->out.data;
  Tensor pre = gelu ? a->pre_activation : a->out;
  cpu_gemm(cpu_plain_loops(backend), rows, outputs, inputs, 1.0f, matrix(a->x, false),
           matrix(a->weight, !a->in_out_layout), in_place ? 1.0f : 0.0f, pre.data, pre.stride);
  if (!gelu && !bias && (!residual || in_place)) return;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    float *row = cpu_row(pre, n);
    if (bias) add_row(row, a->bias.data, outputs);
    if (residual && !in_place) add_row(row, cpu_row(a->residual, n), outputs);
    if (gelu) {
      float *activated = cpu_row(a->out, n);
#pragma omp simd
      for (int64_t i = 0; i < outputs; i++) activated[i] = gelu_f32(row[i]);
    }
  }
}

void cpu_linear_backward_input(Backend *backend, const LinearBackwardInput *a) {
  int64_t rows = a->dx.shape[0], inputs = a->dx.shape[1], outputs = a->dout.shape[1];
  cpu_gemm(cpu_plain_loops(backend), rows, inputs, outputs, 1.0f, matrix(a->dout, false),
           matrix(a->weight, a->in_out_layout), a->accumulate ? 1.0f : 0.0f, a->dx.data, a->dx.stride);
  if (!tensor_exists(a->pre_activation)) return;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    float *dx = cpu_row(a->dx, n);
    const float *pre = cpu_row(a->pre_activation, n);
#pragma omp simd
    for (int64_t i = 0; i < inputs; i++) dx[i] *= gelu_derivative_f32(pre[i]);
  }
}

// --- the gradient of a tall weight -------------------------------------------------------------------------
//
// Over a vocabulary dW [O, I] is the largest matrix in sight. When the inner length, a chunk of tokens, is
// short, the GEMM is limited by reading and writing dW unless something fetches ahead. Here a block of
// dW's rows is finished at a time, its old values are fetched while their sums run, the columns of dout
// that the next block needs come during this one, and x is packed once for all blocks.

enum {
  TALL_BLOCK = 48,  // rows of dW at a time: three cache lines of a row of dout
  TALL_DEPTH = 128, // longest inner length: a panel of x stays in the first-level cache. sgemm wins beyond
  LINE = 64 / sizeof(float)
};

// Whether to do it this way: a chunk against a vocabulary's weight, not a layer's.
static bool is_tall(const LinearBackwardWeight *a) {
  int64_t rows = a->x.shape[0], outputs = a->dout.shape[1];
  return !a->in_out_layout && rows <= TALL_DEPTH && outputs >= 4096 && outputs >= 8 * a->x.shape[1];
}

// x as panels [inputs / TILE_COLUMNS][rows][TILE_COLUMNS]; enough for any machine's TILE_COLUMNS.
size_t cpu_linear_backward_weight_scratch(const LinearBackwardWeight *a) {
  if (!is_tall(a)) return 0;
  return (size_t)(a->x.shape[0] * ceil_div(a->x.shape[1], 64) * 64) * sizeof(float);
}

// Part `part` of `parts` of the columns [first, first + TALL_BLOCK) of dout.
static void fetch_columns(Tensor dout, int64_t first, int64_t part, int64_t parts) {
  if (first + TALL_BLOCK > dout.shape[1]) return;
  int64_t lines = dout.shape[0] * (TALL_BLOCK / LINE);
  for (int64_t l = part * lines / parts; l < (part + 1) * lines / parts; l++)
    __builtin_prefetch(cpu_row(dout, l / (TALL_BLOCK / LINE)) + first + l % (TALL_BLOCK / LINE) * LINE, 0, 2);
}

// Rows [first, first + count) of dW.
static void tall_block(const LinearBackwardWeight *a, int64_t first, int64_t count) {
  int64_t rows = a->x.shape[0], inputs = a->x.shape[1], part = 0;
  int64_t parts = ceil_div(inputs, TILE_COLUMNS) * ceil_div(count, TILE_ROWS);
  for (int64_t i = 0; i < inputs; i += TILE_COLUMNS)
    for (int64_t o = first; o < first + count; o += TILE_ROWS) {
      fetch_columns(a->dout, first + TALL_BLOCK, part++, parts);
      tile_panel_product(min_i64(TILE_ROWS, first + count - o), min_i64(TILE_COLUMNS, inputs - i), rows,
                         a->alpha, cpu_row(a->dout, 0) + o, 1, a->dout.stride,
                         (const float *)a->workspace.data + i * rows, a->accumulate,
                         cpu_row(a->dweight, o) + i, a->dweight.stride);
    }
}

static void tall_gemm(const LinearBackwardWeight *a) {
  int64_t rows = a->x.shape[0], inputs = a->x.shape[1], outputs = a->dout.shape[1];
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < inputs; i += TILE_COLUMNS)
      tile_pack((float *)a->workspace.data + i * rows,
                (CpuMatrix){.data = cpu_row(a->x, 0) + i, .stride = a->x.stride}, rows,
                min_i64(TILE_COLUMNS, inputs - i));
#pragma omp for schedule(dynamic, 8)
    for (int64_t o = 0; o < outputs; o += TALL_BLOCK) tall_block(a, o, min_i64(TALL_BLOCK, outputs - o));
  }
}

void cpu_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  bool plain = cpu_plain_loops(backend);
  if (!plain && is_tall(a)) {
    tall_gemm(a);
  } else {
    Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
    cpu_gemm(plain, a->dweight.shape[0], a->dweight.shape[1], a->x.shape[0], a->alpha, matrix(left, true),
             matrix(right, false), a->accumulate ? 1.0f : 0.0f, a->dweight.data, a->dweight.stride);
  }
  if (tensor_exists(a->dbias)) cpu_column_sums(a->dbias.data, a->dout, NULL, a->alpha, a->accumulate);
}
