// Tokens to vectors, and their gradients back to the rows of the tables.
//
// Forward: one block per token copies its row (and adds the position's). Backward: a token may occur many
// times (the commonest is a tenth of a text), so segments.cu sorts and sums in a fixed order. A position
// occurs once per sequence, at known places, or like a token where sequences pack documents.
#include "kernels/cuda/cuda_common.cuh"

template <typename T, int W>
static __global__ void embedding_forward_kernel(const __grid_constant__ EmbeddingForward a) {
  int64_t row = blockIdx.x;
  int hidden_size = (int)a.out.shape[1];
  const int32_t *positions = data_of<int32_t>(a.positions);
  const T *token = data_of<T>(a.token_weight) + (int64_t)data_of<int32_t>(a.tokens)[row] * hidden_size;
  int64_t position = positions ? positions[row] : (int)row % (int)a.seq_len;
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float sum[W];
    load(sum, token + i);
    if (a.position_weight.data) {
      float added[W];
      load(added, data_of<T>(a.position_weight) + position * hidden_size + i);
      EACH (k, W) sum[k] += added[k];
    }
    store(data_of<T>(a.out) + row * hidden_size + i, sum);
  }
}

void cuda_embedding_forward(Backend *backend, const EmbeddingForward *a) {
  with_access(a->out.dtype, {a->out, a->token_weight, a->position_weight}, [&](auto type, auto width) {
    launch_kernel(per_row(backend, "embedding_forward", a->out.shape[0], ceil_div(a->out.shape[1], width)),
                  embedding_forward_kernel<decltype(type), width>, *a);
  });
}

// One block per position; it takes its row of every sequence in turn.
template <typename TD, typename T, int W>
static __global__ void position_gradient_kernel(TD *dposition, const T *dout, int batch, int hidden_size,
                                                bool accumulate) {
  int64_t t = blockIdx.x, seq_len = gridDim.x;
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float sum[W] = {};
#pragma unroll 4
    for (int b = 0; b < batch; b++) {
      float values[W];
      load(values, dout + (b * seq_len + t) * hidden_size + i);
      EACH (k, W) sum[k] += values[k];
    }
    TD *to = dposition + t * hidden_size + i;
    if (accumulate) {
      float old[W];
      load(old, to);
      EACH (k, W) sum[k] += old[k];
    }
    store(to, sum);
  }
}

static void position_gradient(Backend *backend, const EmbeddingBackward *a) {
  int64_t rows = a->dout.shape[0], hidden_size = a->dout.shape[1], positions = a->dposition_weight.shape[0];
  Tensor unused = tensor_rows(a->dposition_weight, a->seq_len, positions - a->seq_len);
  if (tensor_exists(a->positions))
    return segment_add(backend, a->dposition_weight, data_of<int32_t>(a->positions), a->dout, nullptr, 1.0f,
                       a->accumulate_position, a->workspace.data);
  if (!a->accumulate_position && positions > a->seq_len) cuda_fill_zero(backend, &unused);
  with_float(a->dposition_weight.dtype, [&](auto gradient_type) {
    using TD = decltype(gradient_type);
    with_access(a->dout.dtype, {a->dout, a->dposition_weight}, [&](auto type, auto width) {
      using T = decltype(type);
      launch_kernel(per_row(backend, "embedding_backward", a->seq_len, ceil_div(hidden_size, width)),
                    position_gradient_kernel<TD, T, width>, data_of<TD>(a->dposition_weight),
                    data_of<T>(a->dout), (int)(rows / a->seq_len), (int)hidden_size, a->accumulate_position);
    });
  });
}

void cuda_embedding_backward(Backend *backend, const EmbeddingBackward *a) {
  if (tensor_exists(a->dtoken_weight))
    segment_add(backend, a->dtoken_weight, data_of<int32_t>(a->tokens), a->dout, nullptr, 1.0f,
                a->accumulate_token, a->workspace.data);
  if (tensor_exists(a->dposition_weight)) position_gradient(backend, a);
}
