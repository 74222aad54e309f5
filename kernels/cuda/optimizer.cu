// AdamW, Nesterov momentum and SGD over a slab, batched GEMMs for orthogonalize, the sum under the global
// norm, and the factor that clips it.
//
// AdamW reads the gradient, both moments and the master copy (or the weight) and writes all but the gradient:
// with fp32 everywhere and a bf16 weight, 30 bytes per parameter, at the memory's bandwidth (on an H200 4.2
// TB/s, the sum of squares 4.4). A bf16 element that is the only copy is rounded stochastically: to nearest,
// small steps would never accumulate. A resumed run draws the same bits.
#include <math.h>

#include "kernels/cuda/cuda_common.cuh"

// 32 bits for an element: 16 for the weight, 16 for its moments. Two neighbours share one draw.
static DEVICE uint32_t element_bits(uint64_t key, uint64_t index) {
  return (uint32_t)(random_bits_of(key, index / 2) >> (index % 2 * 32));
}

// Rounds up with the probability that preserves the mean, by 16 random bits below the bits that are kept.
static DEVICE void store_stochastic(float *to, float x, uint32_t bits) {
  *to = x;
}
static DEVICE void store_stochastic(bf16 *to, float x, uint32_t bits) {
  uint32_t word = __float_as_uint(x);
  if ((word & 0x7F800000u) != 0x7F800000u) x = __uint_as_float((word + (bits & 0xFFFFu)) & 0xFFFF0000u);
  *to = __float2bfloat16(x);
}

// Accurate to a unit in the last place or two; the exact ones would make a slab of bf16 wait for arithmetic.
static DEVICE float root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct UpdateParams {
  float rate;                         // lr / (1 - beta1^t); for sgd lr
  float v_correction;                 // 1 / (1 - beta2^t)
  float beta1, beta2, epsilon, decay; // beta1: or momentum; decay: lr * weight_decay
  uint64_t key;
  int64_t place; // the first element's, among those that share the key
};

template <int W, typename T>
static DEVICE void store_rounded(T *to, const float (&x)[W], const uint32_t (&random)[W], int shift) {
  Group<T, W> group;
  EACH (k, W) store_stochastic(&group.at[k], x[k], random[k] >> shift);
  *reinterpret_cast<Group<T, W> *>(to) = group;
}

enum { THREADS = 256 };
enum UpdateKind { ADAMW, NESTEROV, SGD };

template <UpdateKind KIND, typename T, typename TM, typename TG, bool MASTER, int W>
static __global__ void __launch_bounds__(THREADS, 4)
    update_kernel(T *weight, float *master, TM *m, TM *v, const TG *grad, const float *grad_scale,
                  int64_t first, int64_t end, UpdateParams a) {
  constexpr bool RANDOM = (KIND != SGD && sizeof(TM) == 2) || (KIND != NESTEROV && sizeof(T) == 2 && !MASTER);
  int64_t step = (int64_t)gridDim.x * blockDim.x * W;
  for (int64_t i = first + ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W; i < end; i += step) {
    float w[W], mi[W], vi[W], g[W], scale = KIND == SGD ? 1 : *grad_scale;
    uint32_t random[W] = {};
    load(g, grad + i);
    if (KIND != SGD) load(mi, m + i);
    if (KIND == ADAMW) load(vi, v + i);
    if (MASTER)
      load(w, master + i);
    else if (KIND != NESTEROV)
      load(w, weight + i);
    EACH (k, W) {
      float gradient = g[k] * scale;
      if (KIND != SGD) mi[k] = a.beta1 * mi[k] + (1 - a.beta1) * gradient;
      if (KIND == ADAMW) {
        vi[k] = a.beta2 * vi[k] + (1 - a.beta2) * gradient * gradient;
        w[k] -= __fdividef(a.rate * mi[k], root(vi[k] * a.v_correction) + a.epsilon) + a.decay * w[k];
      } else if (KIND == NESTEROV) {
        w[k] = a.beta1 * mi[k] + (1 - a.beta1) * gradient;
      } else {
        w[k] -= a.rate * gradient + a.decay * w[k];
      }
      if (RANDOM) random[k] = element_bits(a.key, (uint64_t)(a.place + i + k));
    }
    if (KIND != SGD) store_rounded(m + i, mi, random, 16);
    if (KIND == ADAMW) store_rounded(v + i, vi, random, 16);
    if (KIND == NESTEROV) {
      store(weight + i, w);
    } else if (MASTER) {
      store(master + i, w);
      store(weight + i, w);
    } else {
      store_rounded(weight + i, w, random, 0);
    }
  }
}

template <UpdateKind KIND> static void update(cudaStream_t stream, const Update *a, const char *op) {
  int64_t count = a->weight.shape[0];
  float beta1 = (float)a->beta1, beta2 = (float)a->beta2;
  double correction = 1.0 - (KIND == ADAMW ? pow((double)beta1, (double)a->step) : 0.0);
  UpdateParams params = {.rate = (float)(a->lr / correction),
                         .v_correction = (float)(1.0 / (1.0 - pow((double)beta2, (double)a->step))),
                         .beta1 = KIND == NESTEROV ? (float)a->momentum : beta1,
                         .beta2 = beta2,
                         .epsilon = (float)a->epsilon,
                         .decay = a->lr * (float)a->weight_decay,
                         .key = random_key(a->seed, (uint64_t)a->step),
                         .place = a->first};
  bool aligned = true;
  for (const Tensor &t : {a->weight, a->master, a->m, a->v, a->grad})
    aligned &= !tensor_exists(t) || rows_start_aligned(t, 8);
  with_float(a->weight.dtype, [&](auto weight_type) {
    with_float(a->m.dtype, [&](auto moment_type) {
      with_float(a->grad.dtype, [&](auto grad_type) {
        with_bool(tensor_exists(a->master), [&](auto has_master) {
          using T = decltype(weight_type);
          using TM = decltype(moment_type);
          using TG = decltype(grad_type);
          auto launch = [&](auto width, int64_t first, int64_t end) {
            constexpr int W = decltype(width)::value;
            int64_t blocks = min_i64(ceil_div(end - first, THREADS * W), INT32_MAX);
            launch_kernel(
                {op, stream, blocks, THREADS}, update_kernel<KIND, T, TM, TG, decltype(has_master)::value, W>,
                data_of<T>(a->weight), data_of<float>(a->master), data_of<TM>(a->m), data_of<TM>(a->v),
                data_of<TG>(a->grad), data_of<float>(a->grad_scale), first, end, params);
          };
          constexpr int GROUP = sizeof(TM) == 2 ? 8 : 4;
          int64_t groups_end = aligned ? count / GROUP * GROUP : 0; // then one by one
          launch(std::integral_constant<int, GROUP>(), 0, groups_end);
          launch(std::integral_constant<int, 1>(), groups_end, count);
        });
      });
    });
  });
}

void cuda_adamw(Backend *backend, const Update *a) {
  if (!a->after_copies) {
    update<ADAMW>(cuda_stream(backend), a, "adamw");
    return;
  }
  cudaStream_t stream = side_begin(backend, STREAM_COPY_OUT);
  side_join(backend, STREAM_COPY_IN, stream, 0);
  update<ADAMW>(stream, a, "adamw");
  side_end(backend, STREAM_COPY_OUT);
}
void cuda_nesterov(Backend *backend, const Update *a) {
  update<NESTEROV>(cuda_stream(backend), a, "nesterov");
}
void cuda_sgd(Backend *backend, const Update *a) {
  update<SGD>(cuda_stream(backend), a, "sgd");
}

// --- sums --------------------------------------------------------------------------------------------------

// A block's sum in a fixed order: each thread its own, then a tree over the threads. Thread 0 gets it.
static __device__ double block_total(double sum) {
  __shared__ double partial_sums[256];
  partial_sums[threadIdx.x] = sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial_sums[threadIdx.x] += partial_sums[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? partial_sums[0] : 0;
}

template <typename T, int W, bool SQUARES>
static __global__ void __launch_bounds__(256) sum_blocks(double *partial, const T *x, int64_t count) {
  double total = 0;
  int64_t body = count / W * W, thread = (int64_t)blockIdx.x * 256 + threadIdx.x;
#pragma unroll 4
  for (int64_t i = thread * W; i < body; i += (int64_t)gridDim.x * 256 * W) {
    float values[W], sum = 0;
    load(values, x + i);
    EACH (k, W) sum += SQUARES ? values[k] * values[k] : values[k];
    total += sum;
  }
  if (body + thread < count) {
    float value = to_float(x[body + thread]);
    total += SQUARES ? value * value : value;
  }
  total = block_total(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

static __global__ void __launch_bounds__(256)
    sum_partials(float *sum, const double *partial, int count, bool accumulate) {
  double total = 0;
  for (int i = threadIdx.x; i < count; i += 256) total += partial[i];
  total = block_total(total);
  if (threadIdx.x == 0) *sum = (float)(accumulate ? *sum + total : total);
}

void cuda_sum_elements(Backend *backend, const SumElements *a) {
  int64_t count = tensor_count(a->x);
  Tensor flat = tensor_1d(a->x.data, a->x.dtype, count);
  double *partial = data_of<double>(a->workspace);
  int blocks = 0;
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    with_width<T>(rows_start_aligned(flat, WIDTH<T>), [&](auto width) {
      with_bool(a->squares, [&](auto squares) {
        constexpr int W = decltype(width)::value;
        blocks = (int)max_i64(1, min_i64(CUDA_SUM_BLOCKS, ceil_div(count, 256 * W)));
        launch_kernel({"sum_elements", cuda_stream(backend), blocks, 256},
                      sum_blocks<T, W, decltype(squares)::value>, partial, data_of<T>(a->x), count);
      });
    });
  });
  launch_kernel({"sum_elements", cuda_stream(backend), 1, 256}, sum_partials, data_of<float>(a->sum), partial,
                blocks, a->accumulate);
}

// --- batches of matrices -----------------------------------------------------------------------------------

// Each warp computes s for one row of matrix blockIdx.y.
template <typename T, int W> static __global__ void __launch_bounds__(256) aol_sums(AolScale a) {
  int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, side = a.gram.first.shape[0];
  if (row >= side) return;
  const T *gram = data_of<T>(a.gram.first) + blockIdx.y * a.gram.apart + row * a.gram.first.stride;
  float sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32 * W; i < side; i += 32 * W) {
    float values[W];
    load(values, gram + i);
    EACH (k, W) sum += fabsf(values[k]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) write(a.s, blockIdx.y * side + row, 1 / sqrtf(sum < 1e-20f ? 1e-20f : sum));
}

// Multiplies matrix i's rows, columns or both by s, in blocks (b, i).
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    scale_kernel(Matrices out, Matrices x, Tensor s, bool rows, bool columns) {
  const float *scales = data_of<float>(s) + blockIdx.y * s.stride;
  int64_t across = x.first.shape[1] / W, groups = x.first.shape[0] * across;
#pragma unroll 4
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < groups; i += gridDim.x * 256) {
    int64_t row = i / across, column = i % across * W;
    float values[W], factors[W];
    load(values, data_of<T>(x.first) + blockIdx.y * x.apart + row * x.first.stride + column);
    if (columns) load(factors, scales + column);
    EACH (k, W) values[k] *= (rows ? scales[row] : 1) * (columns ? factors[k] : 1);
    store(data_of<T>(out.first) + blockIdx.y * out.apart + row * out.first.stride + column, values);
  }
}

void cuda_aol_scale(Backend *backend, const AolScale *a) {
  bool tall = a->x.first.shape[0] > a->x.first.shape[1];
  KernelLaunch sums = {"aol_scale", cuda_stream(backend), Grid(ceil_div(a->s.shape[1], 8), a->count), 256};
  KernelLaunch scale = {"aol_scale", cuda_stream(backend), Grid(256, a->count), 256};
  with_access(a->x.first.dtype, {a->x.first, a->out.first, a->gram.first, a->s}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int W = decltype(width)::value;
    launch_kernel(sums, aol_sums<T, W>, *a);
    launch_kernel(scale, scale_kernel<T, W>, a->out, a->x, a->s, !tall, tall);
    launch_kernel(scale, scale_kernel<T, W>, a->gram, a->gram, a->s, true, true);
  });
}

// Adds `value` to the diagonal of matrix blockIdx.y.
template <typename T> static __global__ void __launch_bounds__(256) add_diagonal(Matrices x, float value) {
  int64_t i = blockIdx.x * 256 + threadIdx.x;
  if (i >= x.first.shape[0] || i >= x.first.shape[1]) return;
  T *at = data_of<T>(x.first) + blockIdx.y * x.apart + i * (x.first.stride + 1);
  *at = from_float<T>(to_float(*at) + value);
}

void cuda_batched_gemm(Backend *backend, const BatchedGemm *a) {
  Gemm g = gemm_of(a->out.first, a->left.first, a->left_transposed, a->right.first, a->right_transposed);
  g.alpha = a->alpha, g.beta = a->beta, g.batch = (int)a->count;
  g.left.apart = a->left.apart, g.right.apart = a->right.apart, g.out_apart = a->out.apart;
  g.addend = a->addend.first, g.addend_apart = a->addend.apart;
  if (g.batch) cuda_gemm(backend, &g);
  if (a->diagonal == 0) return;
  KernelLaunch launch = {"batched_gemm", cuda_stream(backend), Grid(ceil_div(g.m(), 256), g.batch), 256};
  with_float(g.out.dtype,
             [&](auto type) { launch_kernel(launch, add_diagonal<decltype(type)>, a->out, a->diagonal); });
}

// --- the clip factor ---------------------------------------------------------------------------------------

static __global__ void clip_scale_kernel(const __grid_constant__ ClipScale a) {
  float norm = sqrtf(*data_of<float>(a.sum_of_squares)), scale = 1;
  if (a.max_norm > 0 && norm > a.max_norm) scale = a.max_norm / norm;
  *data_of<float>(a.norm) = norm;
  *data_of<float>(a.scale) = isfinite(norm) ? scale : NAN;
}

void cuda_clip_scale(Backend *backend, const ClipScale *a) {
  launch_kernel({"clip_scale", cuda_stream(backend), 1, 1}, clip_scale_kernel, *a);
}
