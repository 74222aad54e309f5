// LayerNorm and RMSNorm.
//
// A row lies in the registers of a team of as few threads as hold it, GROUPS accesses of 16 bytes each
// (LayerNorm, which needs more registers, two). Up to 768 or 1024 bf16 elements that is one warp: no barrier,
// and a block takes four rows. In the backward pass each team walks over many rows and keeps the sums over
// rows for dweight and dbias in registers too; columns.cu adds the teams' sums in a fixed order.
//
// Traffic: forward reads x and writes out; backward reads x and dout and writes dx. On an H200, whose copy
// moves 4.3 TB/s: LayerNorm 3.6 TB/s at H 768 (65,536 rows), 2.9 at 1600 (16,384 rows); RMSNorm 3.7 at 2048.
#include "kernels/cuda/cuda_common.cuh"

// Rows whose length or address is not a multiple of 16 bytes are read one element at a time.
template <bool ALIGNED> static constexpr int GROUPS = ALIGNED ? 4 : 16;

// Longer rows (from 8192 bf16 elements on) take up to 1024 threads, with 64 registers each.
static constexpr int FEW = 256, MANY = 1024;

// A row as it lies in memory, two bf16 elements to a register; a thread holds every blockDim.x-th group of W.
template <typename T, int W, int N> struct Row {
  static constexpr int WORDS = sizeof(T) * W < 4 ? 1 : sizeof(T) * W / 4;
  uint32_t word[N][WORDS];

  DEVICE void read(const T *from, int length) {
    EACH (g, N) {
      int at = (threadIdx.x + g * blockDim.x) * W;
      bool inside = at < length;
      if constexpr (WORDS == 4) {
        uint4 four = inside ? *reinterpret_cast<const uint4 *>(from + at) : make_uint4(0, 0, 0, 0);
        word[g][0] = four.x, word[g][1] = four.y, word[g][2] = four.z, word[g][3] = four.w;
      } else if constexpr (sizeof(T) == 4) {
        word[g][0] = inside ? reinterpret_cast<const uint32_t *>(from)[at] : 0;
      } else {
        word[g][0] = inside ? reinterpret_cast<const uint16_t *>(from)[at] : 0;
      }
    }
  }
  DEVICE float operator()(int g, int k) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word[g][k]);
    return __uint_as_float(k % 2 ? word[g][k / 2] & 0xFFFF0000u : word[g][k / 2] << 16);
  }
  // Makes the compiler widen the row again from here on, so that not both forms stay in registers.
  DEVICE void forget_widened() {
    EACH (i, N * WORDS) asm volatile("" : "+r"(word[i / WORDS][i % WORDS]));
  }
};

// Start of a row: one of `heads` in each row of the tensor, whose rows lie `stride` apart.
static DEVICE int64_t row_start(int64_t row, int heads, int64_t stride, int hidden_size) {
  return heads == 1 ? row * stride : row / heads * stride + row % heads * hidden_size;
}

// added: a LayerNorm's bias or, with RESIDUAL, the rows of an RMSNorm's residual.
template <typename T, int W, int N, int THREADS, bool LAYER, bool RESIDUAL>
static __global__ void __launch_bounds__(THREADS)
    norm_forward_kernel(T *out, int64_t out_stride, float *mean, float *rstd, const T *x, int64_t x_stride,
                        const T *weight, const T *added, int64_t rows, int heads, int hidden_size,
                        float epsilon, unsigned *amax) {
  int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, teams = (int64_t)gridDim.x * blockDim.y;
  if (row >= rows) return; // with several rows to a block, each is one warp
  unsigned largest = 0;
  Row<T, W, N> next, w, b;
  next.read(x + row_start(row, heads, x_stride, hidden_size), hidden_size);
  w.read(weight, hidden_size);
  if (LAYER) b.read(added, hidden_size);
  if (RESIDUAL) b.read(added + row * hidden_size, hidden_size);
  for (; row < rows; row += teams) {
    Row<T, W, N> v = next;
    if (LAYER && row + teams < rows)
      next.read(x + row_start(row + teams, heads, x_stride, hidden_size), hidden_size);
    float m = 0, sum = 0;
    if (LAYER) {
      EACH (g, N)
        EACH (k, W) sum += v(g, k);
      m = block_sum(sum) / hidden_size;
      sum = 0;
      v.forget_widened();
    }
    EACH (g, N)
      EACH (k, W)
        if ((threadIdx.x + g * blockDim.x) * W < hidden_size) sum += (v(g, k) - m) * (v(g, k) - m);
    float r = rsqrtf(block_sum(sum) / hidden_size + epsilon);
    if (threadIdx.x == 0) {
      if (LAYER) mean[row] = m;
      rstd[row] = r;
    }
    v.forget_widened(), w.forget_widened();
    if (LAYER || RESIDUAL) b.forget_widened();
    EACH (g, N) {
      int at = (threadIdx.x + g * blockDim.x) * W;
      float result[W];
      EACH (k, W) result[k] = (v(g, k) - m) * r * w(g, k) + (LAYER || RESIDUAL ? b(g, k) : 0);
      if (at < hidden_size) {
        store(out + row_start(row, heads, out_stride, hidden_size) + at, result);
        EACH (k, W) largest = max(largest, magnitude(result[k]));
      }
    }
    if (!LAYER) break;
  }
  if (amax) raise_amax<T>(amax, largest);
}

// Threads per SM that the backward pass has registers for, at 128, 168 or 255 registers per thread.
template <bool LAYER, int N, int THREADS>
static constexpr int RESIDENT = THREADS == MANY  ? MANY
                                : LAYER &&N == 3 ? 384
                                : LAYER &&N == 4 ? FEW
                                                 : 512;

// partials: row t receives team t's part of dweight, then of dbias and dx_sum.
template <typename T, int W, int N, int THREADS, bool LAYER>
static __global__ void __launch_bounds__(RESIDENT<LAYER, N, THREADS>, 1)
    norm_backward_kernel(T *dx, int64_t dx_stride, float *partials, const T *dout, int64_t dout_stride,
                         const T *x, int64_t x_stride, const T *weight, const float *mean, const float *rstd,
                         int64_t rows, int heads, int hidden_size, bool accumulate, int64_t teams,
                         int vectors, unsigned *amax) {
  int64_t team = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  if (team >= teams) return;
  unsigned largest = 0;
  Row<T, W, N> w;
  float dweight[N][W] = {}, dbias[N][W] = {}, dx_sum[N][W] = {};
  w.read(weight, hidden_size);
  Row<T, W, N> next_v, next_d;
  auto fetch = [&](int64_t row) {
    next_v.read(x + row_start(row, heads, x_stride, hidden_size), hidden_size);
    next_d.read(dout + row_start(row, heads, dout_stride, hidden_size), hidden_size);
  };
  constexpr bool AHEAD = LAYER && N <= 3 && THREADS == FEW;
  if (AHEAD) fetch(team);
  for (int64_t row = team; row < rows; row += teams) {
    if (!AHEAD) fetch(row);
    Row<T, W, N> v = next_v, d = next_d, old;
    if (AHEAD && row + teams < rows) fetch(row + teams);
    T *dx_row = dx + row_start(row, heads, dx_stride, hidden_size);
    if (accumulate) old.read(dx_row, hidden_size);
    float r = rstd[row], shift = LAYER ? -mean[row] * r : 0; // xhat = x r + shift
    float2 sums = {0, 0}; // sums of g and of g * xhat; beyond the end of the row g is 0
    EACH (g, N)
      EACH (k, W) {
        float grad = d(g, k) * w(g, k), xhat = v(g, k) * r + shift;
        if (LAYER) sums.x += grad;
        sums.y += grad * xhat;
        dweight[g][k] += d(g, k) * xhat;
        if (LAYER) dbias[g][k] += d(g, k);
      }
    sums = block_sum(sums);
    v.forget_widened(), d.forget_widened(), w.forget_widened();
    float mean_g = sums.x / hidden_size, mean_gx = sums.y / hidden_size;
    EACH (g, N) {
      int at = (threadIdx.x + g * blockDim.x) * W;
      float result[W];
      EACH (k, W) {
        result[k] = r * (d(g, k) * w(g, k) - mean_g - (v(g, k) * r + shift) * mean_gx);
        if (accumulate) result[k] += old(g, k);
        if (LAYER && accumulate) dx_sum[g][k] += old(g, k);
      }
      if (at < hidden_size) {
        store(dx_row + at, result);
        EACH (k, W) largest = max(largest, magnitude(result[k]));
      }
    }
  }
  if (amax) raise_amax<T>(amax, largest);
  partials += team * vectors * hidden_size;
  EACH (g, N) {
    int at = (threadIdx.x + g * blockDim.x) * W;
    if (at >= hidden_size) continue;
    store(partials + at, dweight[g]);
    if (LAYER) store(partials + hidden_size + at, dbias[g]);
    if (LAYER && vectors == 3) store(partials + 2 * hidden_size + at, dx_sum[g]);
  }
}

// The parameters that a kernel is compiled for.
template <typename Element, bool ALIGNED, int HELD, bool MANY_THREADS, bool IS_LAYER> struct RowKernel {
  using T = Element;
  static constexpr int W = ALIGNED ? WIDTH<T> : 1, N = HELD, THREADS = MANY_THREADS ? MANY : FEW;
  static constexpr bool LAYER = IS_LAYER;
};

// Calls f with the RowKernel for these rows, and with the block: the threads of a row, and its rows.
template <typename F>
static void with_row_kernel(std::initializer_list<Tensor> tensors, bool layer, int64_t hidden_size, F f) {
  Dtype dtype = tensors.begin()->dtype;
  bool aligned = rows_align(tensors, 16 / (int64_t)dtype_bytes(dtype));
  int64_t groups = aligned ? hidden_size * (int64_t)dtype_bytes(dtype) / 16 : hidden_size;
  int64_t max = aligned ? GROUPS<true> : GROUPS<false>;
  if (groups > MANY * max)
    fail("a norm over %lld elements is more than the CUDA backend takes (%lld)", (long long)hidden_size,
         (long long)(MANY * max * hidden_size / groups));
  int threads = row_threads(ceil_div(groups, max), MANY);
  bool three = aligned && groups <= 3 * threads; // fewer registers: 768, 1280
  bool two = aligned && !three && layer && groups <= 2 * FEW;
  if (two) threads = row_threads(ceil_div(groups, 2), FEW);
  dim3 block((unsigned)threads, threads == 32 ? 4 : 1);
  with_float(dtype, [&](auto type) {
    with_bool(layer, [&](auto is_layer) {
      using T = decltype(type);
      constexpr bool LAYER = decltype(is_layer)::value;
      with_bool(threads > FEW, [&](auto many) {
        constexpr bool MANY_THREADS = decltype(many)::value;
        if (!aligned)
          f(RowKernel<T, false, GROUPS<false>, MANY_THREADS, LAYER>(), block);
        else if (three)
          f(RowKernel<T, true, 3, MANY_THREADS, LAYER>(), block);
        else if (LAYER && two)
          f(RowKernel<T, true, 2, false, true>(), block);
        else
          f(RowKernel<T, true, GROUPS<true>, MANY_THREADS, LAYER>(), block);
      });
    });
  });
}

// Counts the blocks that the device holds at once.
template <typename Kernel> static int64_t blocks_at_once(Backend *backend, Kernel *kernel, dim3 block) {
  int blocks_per_sm = 0;
  cuda_check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, (int)(block.x * block.y), 0),
      "counting blocks");
  return (int64_t)blocks_per_sm * cuda_state(backend)->multiprocessors;
}

void cuda_norm_forward(Backend *backend, const NormForward *a) {
  int64_t rows = a->rstd.shape[0], hidden_size = a->weight.shape[0];
  if (tensor_exists(a->amax)) cuda_fill_zero(backend, &a->amax);
  if (rows == 0) return;
  bool layer = a->kind == NORM_LAYER;
  Tensor added = layer ? a->bias : a->residual;
  with_row_kernel({a->x, a->out, a->weight, added}, layer, hidden_size, [&](auto kernel, dim3 block) {
    with_bool(!layer && tensor_exists(added), [&](auto residual) {
      using K = decltype(kernel);
      using T = typename K::T;
      constexpr bool RESIDUAL = !K::LAYER && decltype(residual)::value;
      auto *entry = norm_forward_kernel<T, K::W, K::N, K::THREADS, K::LAYER, RESIDUAL>;
      int64_t blocks = ceil_div(rows, block.y);
      if (K::LAYER) blocks = min_i64(blocks, blocks_at_once(backend, entry, block));
      launch_kernel({"norm_forward", cuda_stream(backend), blocks, block}, entry, data_of<T>(a->out),
                    a->out.stride, data_of<float>(a->mean), data_of<float>(a->rstd), data_of<T>(a->x),
                    a->x.stride, data_of<T>(a->weight), data_of<T>(added), rows,
                    (int)(a->x.shape[1] / hidden_size), (int)hidden_size, a->epsilon,
                    data_of<unsigned>(a->amax));
    });
  });
}

void cuda_norm_backward(Backend *backend, const NormBackward *a) {
  int64_t rows = a->rstd.shape[0], hidden_size = a->weight.shape[0], teams = 0;
  bool layer = a->kind == NORM_LAYER;
  if (tensor_exists(a->amax)) cuda_fill_zero(backend, &a->amax);
  float *partials = data_of<float>(a->workspace);
  int64_t vectors = layer ? tensor_exists(a->dx_sum) ? 3 : 2 : 1, stride = vectors * hidden_size;
  if (rows > 0) {
    with_row_kernel({a->x, a->dout, a->dx, a->weight}, layer, hidden_size, [&](auto kernel, dim3 block) {
      using K = decltype(kernel);
      using T = typename K::T;
      auto *entry = norm_backward_kernel<T, K::W, K::N, K::THREADS, K::LAYER>;
      teams = min_i64(cuda_norm_teams(rows, 32 * block.x), block.y * blocks_at_once(backend, entry, block));
      launch_kernel({"norm_backward", cuda_stream(backend), ceil_div(teams, block.y), block}, entry,
                    data_of<T>(a->dx), a->dx.stride, partials, data_of<T>(a->dout), a->dout.stride,
                    data_of<T>(a->x), a->x.stride, data_of<T>(a->weight), data_of<float>(a->mean),
                    data_of<float>(a->rstd), rows, (int)(a->x.shape[1] / hidden_size), (int)hidden_size,
                    a->accumulate_dx, teams, (int)vectors, data_of<unsigned>(a->amax));
    });
  }
  add_partials(backend, {a->dweight, a->dbias, a->dx_sum}, partials, teams, stride, 1.0f, a->accumulate);
}
