// Gradient filtering on the CPU: which tiles of E count, and the two GEMMs over those.
//
// lce_filter reads at most 4 C V bytes of E, and leaves a tile at the first row that has an entry to keep. The
// GEMMs take 4 C V H flops where all tiles count, and half of that where half of them do: a tile that is
// left out is not touched again, nor are the rows of W that it meets. Rows of dW that no tile leads to are
// left as they are, or made 0 where nothing is added to them.
//
// dX is made in pieces of 128 rows. Where those are fewer than the threads they are cut into strips of
// columns, and not otherwise: each strip reads its rows of E again. dW is made in pieces of 256 rows. One
// thread makes a piece, from E's tiles in their order, so the bits are the same for any number of threads.
#include <omp.h>
#include <string.h>

#include "kernels/cpu/tile.h"

enum { STRIP = 64 }; // a strip of dX has a multiple of so many columns, whole panels of tile.c

// One tile of E.
typedef struct {
  int64_t row, rows, column, columns;
} Tile;

static Tile tile_of(Tensor exps, int64_t b, int64_t t) {
  int64_t row = b * LCE_FILTER_ROWS, column = t * LCE_FILTER_COLUMNS;
  return (Tile){.row = row,
                .rows = min_i64(LCE_FILTER_ROWS, exps.shape[0] - row),
                .column = column,
                .columns = min_i64(LCE_FILTER_COLUMNS, exps.shape[1] - column)};
}

// The tile's mass, or -1 when it counts.
static float mass_left_out(const LceFilter *a, Tile tile) {
  double mass = 0;
  for (int64_t n = tile.row; n < tile.row + tile.rows; n++) {
    const float *e = cpu_row(a->exps, n) + tile.column;
    float all = ((const float *)a->rows.row_sum.data)[n] + ((const float *)a->rows.target_e.data)[n];
    float threshold = a->epsilon * all;
    int below = 0; // a NaN is not
    double sum = 0;
#pragma omp simd reduction(+ : below, sum)
    for (int64_t i = 0; i < tile.columns; i++) {
      below += e[i] < threshold;
      sum += (double)e[i];
    }
    if (below < tile.columns) return -1;
    mass += sum / (double)all;
  }
  return (float)mass;
}

void cpu_lce_filter(Backend *backend, const LceFilter *a) {
  (void)backend;
  int64_t blocks = a->tiles.shape[0], across = a->tiles.shape[1];
#pragma omp parallel for collapse(2) schedule(dynamic, 8)
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t t = 0; t < across; t++) cpu_row(a->tiles, b)[t] = mass_left_out(a, tile_of(a->exps, b, t));
  float *stats = a->stats.data;
  double left_out = 0, mass = 0;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t t = 0; t < across; t++) {
      float of_tile = cpu_row(a->tiles, b)[t];
      if (of_tile >= 0) left_out++, mass += (double)of_tile;
    }
  stats[0] += (float)left_out;
  stats[1] += (float)(blocks * across);
  stats[2] += (float)mass;
}

static bool counts(const LceFilteredGemms *a, int64_t b, int64_t t) {
  return cpu_row(a->tiles, b)[t] < 0;
}

static CpuMatrix part_of(Tensor t, int64_t row, int64_t column, bool transposed) {
  return (CpuMatrix){.data = cpu_row(t, row) + column, .stride = t.stride, .transposed = transposed};
}

static void zero_rows(Tensor t, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  for (int64_t n = row; n < row + rows; n++)
    memset(cpu_row(t, n) + column, 0, (size_t)columns * sizeof(float));
}

// Columns [first, first + width) of dX's rows under block b.
static void input_strip(bool plain, const LceFilteredGemms *a, int64_t b, int64_t first, int64_t width) {
  Tile tile = tile_of(a->exps, b, 0);
  bool begun = false;
  for (int64_t t = 0; t < a->tiles.shape[1]; t++) {
    if (!counts(a, b, t)) continue;
    tile = tile_of(a->exps, b, t);
    tile_multiply(plain, tile.rows, width, tile.columns, 1.0f, part_of(a->exps, tile.row, tile.column, false),
                  part_of(a->weight, tile.column, first, false), begun, cpu_row(a->dx_raw, tile.row) + first,
                  a->dx_raw.stride);
    begun = true;
  }
  if (!begun) zero_rows(a->dx_raw, tile.row, tile.rows, first, width);
}

// dW's rows that column t of the tiles leads to.
static void weight_rows(bool plain, const LceFilteredGemms *a, int64_t t) {
  int64_t hidden = a->weight.shape[1];
  Tile tile = tile_of(a->exps, 0, t);
  bool begun = a->accumulate;
  for (int64_t b = 0; b < a->tiles.shape[0]; b++) {
    if (!counts(a, b, t)) continue;
    tile = tile_of(a->exps, b, t);
    tile_multiply(plain, tile.columns, hidden, tile.rows, a->alpha,
                  part_of(a->exps, tile.row, tile.column, true), part_of(a->scaled_x, tile.row, 0, false),
                  begun, cpu_row(a->dweight, tile.column), a->dweight.stride);
    begun = true;
  }
  if (!begun) zero_rows(a->dweight, tile.column, tile.columns, 0, hidden);
}

void cpu_lce_filtered_gemms(Backend *backend, const LceFilteredGemms *a) {
  if (a->exps.shape[0] == 0) return;
  bool plain = cpu_plain_loops(backend);
  int64_t hidden = a->weight.shape[1];
  int64_t strips = ceil_div(omp_get_max_threads(), a->tiles.shape[0]);
  int64_t width = ceil_div(ceil_div(hidden, strips), STRIP) * STRIP;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < a->tiles.shape[0]; b++)
    for (int64_t first = 0; first < hidden; first += width)
      input_strip(plain, a, b, first, min_i64(width, hidden - first));
#pragma omp parallel for schedule(dynamic)
  for (int64_t t = 0; t < a->tiles.shape[1]; t++) weight_rows(plain, a, t);
}
