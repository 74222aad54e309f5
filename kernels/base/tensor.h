// A tensor is a small value: the elements' address, type and shape. It owns nothing.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

typedef enum { DTYPE_F32, DTYPE_BF16, DTYPE_I32, DTYPE_I64, DTYPE_E4M3, DTYPE_COUNT } Dtype;

typedef struct Tensor {
  void *data;       // address of element [0, ..., 0] in the backend's memory; NULL means "no such tensor"
  Dtype dtype;      // every element's
  int rank;         // 1 or 2; 0: an absent tensor
  int64_t shape[2]; // the last axis is a row, contiguous in memory
  int64_t stride;   // elements from the start of one row to the start of the next; the row length when dense
} Tensor;

size_t dtype_bytes(Dtype dtype);
const char *dtype_name(Dtype dtype);

// Dense tensors over memory that the caller owns. Dimensions of 0 are allowed (an empty tensor).
Tensor tensor_1d(void *data, Dtype dtype, int64_t d0);
Tensor tensor_2d(void *data, Dtype dtype, int64_t d0, int64_t d1);

static inline bool tensor_exists(Tensor t) {
  return t.data != NULL;
}
int64_t tensor_count(Tensor t); // elements
size_t tensor_bytes(Tensor t);  // of the elements alone, without gaps between rows
bool tensor_is_dense(Tensor t); // rows follow one another without a gap
bool tensor_same_shape(Tensor a, Tensor b);

// Views: rows, or columns of the last axis, [first, first + count); a dense tensor as one row, or a matrix.
// Rows of an absent tensor are absent, too.
Tensor tensor_rows(Tensor t, int64_t first, int64_t count);
Tensor tensor_columns(Tensor t, int64_t first, int64_t count);
Tensor tensor_flat(Tensor t);
Tensor tensor_reshape_2d(Tensor t, int64_t rows, int64_t columns);

// "bf16 [4096, 128256]" or "absent", for messages.
typedef struct {
  char text[96];
} TensorText;
TensorText tensor_text(Tensor t);

// bf16 is the upper half of an fp32; conversion rounds to nearest even and keeps NaN a NaN.
uint16_t bf16_from_f32(float value);

// e4m3: FP8 with four bits of exponent and three of mantissa (Micikevicius et al. 2022). Conversion rounds to
// nearest even, saturates at E4M3_MAX, and keeps NaN a NaN (0x7F); there is no infinity.
#define E4M3_MAX 448.0f
uint8_t e4m3_from_f32(float value);
float e4m3_to_f32(uint8_t code);

__END_DECLS
