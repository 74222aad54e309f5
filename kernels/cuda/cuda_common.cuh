// Errors as sentences, launches, accesses that widen to fp32, sums in a fixed order, shared functions.
#pragma once

#include <atomic>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <initializer_list>
#include <type_traits>

#include "kernels/base/fail.h"
#include "kernels/base/random.h"
#include "kernels/cuda/cuda_ops.h"

typedef __nv_bfloat16 bf16;

#define DEVICE __device__ __forceinline__
// A loop over [0, count), unrolled.
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

// --- the backend's state -----------------------------------------------------------------------------------

struct Gemms;  // linear.cu: cuBLASLt's handle and the GEMMs it has met
struct Hopper; // hopper_gemm.cu: what it found on this device

// A stream beside the backend's, with an order of its own.
struct SideStream {
  cudaStream_t stream;            // NULL until first used
  cudaEvent_t before;             // marks the backend's work before the latest operation here
  cudaEvent_t done[ASYNC_EVENTS]; // done[i % ASYNC_EVENTS]: operation i
  std::atomic<int64_t> count;     // operations so far; the watchdog's thread reads it too
};

// A reservation that the copy engines of all ranks can reach, once all ranks have registered theirs.
struct SharedBlock {
  char *data; // NULL: a free place of the table
  size_t bytes;
  struct ncclWindow_vidmem *window; // NULL until a collective first needs it
};

enum { STAGING_SLOTS = 16, STAGING_SLOT_BYTES = 1 << 20, SHARED_BLOCKS = 24 };

struct CudaState {
  cudaStream_t stream;            // every operation runs in its order
  SideStream concurrent[STREAMS]; // by StreamKind
  int ordinal, multiprocessors;
  size_t peak_bytes; // most the device held after any allocation
  Gemms *gemms;
  void *gemm_workspace; // CUDA_GEMM_WORKSPACE_BYTES
  // Pinned memory: each upload takes the next slot, from which the copy engine reads.
  char *staging;
  cudaEvent_t uploaded[STAGING_SLOTS]; // the device has read the slot
  int64_t uploads;
  Hopper *hopper;
  struct ncclComm *comm; // NULL while there is one rank
  bool sharing;          // weights and gradients become shared blocks
  SharedBlock shared[SHARED_BLOCKS];
  char *shares; // BUCKET_BYTES of a shared block: receives what this rank sums
};

static inline CudaState *cuda_state(Backend *backend) {
  return static_cast<CudaState *>(backend->state);
}

static inline cudaStream_t cuda_stream(Backend *backend) {
  return cuda_state(backend)->stream;
}

// Stops with a sentence unless the call went well. A kernel's own failure shows at a later call.
static inline void cuda_check(cudaError_t error, const char *doing) {
  if (error != cudaSuccess)
    fail("CUDA failed while %s: %s (%s); `compute-sanitizer ./train ...` names a kernel that misbehaves",
         doing, cudaGetErrorString(error), cudaGetErrorName(error));
}

template <typename T> static __host__ DEVICE T *data_of(const Tensor &t) {
  return static_cast<T *>(t.data);
}

// streams.cu. Work queued between side_begin and side_end is one operation of the side stream, which waits
// for the backend's operations before it.
cudaStream_t side_begin(Backend *backend, StreamKind kind);
void side_end(Backend *backend, StreamKind kind);
// `later` waits for all operations of a side stream but the last `behind`.
void side_join(Backend *backend, StreamKind kind, cudaStream_t later, int64_t behind);
void side_destroy(SideStream *side);
cudaStream_t new_stream(bool urgent);
cudaEvent_t new_event();

// --- launches ----------------------------------------------------------------------------------------------

// Programmatic dependent launch (PDL, from sm_90 on): a kernel's blocks may start while those of the kernel
// before it finish. Every thread of such a kernel calls pdl_begin() before it touches memory that others
// write or read: it lets the blocks of the next kernel start, and waits for the kernels before this one.
static DEVICE void pdl_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct Grid : dim3 {
  Grid(int64_t x, int64_t y = 1) : dim3((unsigned)x, (unsigned)y) {}
};

struct KernelLaunch {
  const char *op; // for the error's sentence
  cudaStream_t stream;
  Grid grid; // without blocks nothing is launched
  dim3 block;
  bool pdl = false;
  size_t shared_bytes = 0;  // dynamic shared memory
  unsigned cluster = 0;     // CTAs per cluster; 0: no clusters
  bool cooperative = false; // all blocks run at the same time
};

struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attributes[3] = {};

  template <typename Kernel> LaunchConfig(const KernelLaunch &l, Kernel *kernel) : cudaLaunchConfig_t() {
    gridDim = l.grid, blockDim = l.block, dynamicSmemBytes = l.shared_bytes, stream = l.stream;
    attrs = attributes;
    if (l.pdl) {
      attributes[numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (l.cluster) {
      attributes[numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[numAttrs++].val.clusterDim = {l.cluster, 1, 1};
    }
    if (l.cooperative) {
      attributes[numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[numAttrs++].val.cooperative = 1;
    }
    constexpr size_t ALWAYS_ALLOWED = 48 << 10;
    if (l.shared_bytes > ALWAYS_ALLOWED)
      cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)l.shared_bytes),
                 "requesting shared memory");
  }
};

template <typename... Params, typename... Args>
static inline void launch_kernel(const KernelLaunch &l, void (*kernel)(Params...), Args &&...args) {
  if (l.grid.x == 0 || l.grid.y == 0) return;
  LaunchConfig config(l, kernel);
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Args &&>(args)...), l.op);
}

// Threads for a block that works on one row of `groups` accesses: whole warps, at most `max`.
static inline int row_threads(int64_t groups, int64_t max) {
  return (int)max_i64(32, min_i64(max, ceil_div(groups, 32) * 32));
}

// One block per row of `groups` accesses.
static inline KernelLaunch per_row(Backend *backend, const char *op, int64_t rows, int64_t groups,
                                   bool pdl = false) {
  return {op, cuda_stream(backend), rows, row_threads(groups, 256), pdl};
}

// One thread per element.
static inline KernelLaunch per_element(Backend *backend, const char *op, int64_t elements) {
  return {op, cuda_stream(backend), ceil_div(elements, 256), 256};
}

// --- scalars -----------------------------------------------------------------------------------------------

static constexpr float LOG2_E = 1.4426950408889634f;

static DEVICE uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

static DEVICE uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t &>(pair);
}

static DEVICE float2 unpack_bf16(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<__nv_bfloat162 &>(pair));
}

// 2^x, within 2 units in the last place; subnormal results become 0.
static DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- choosing a kernel by dtype and alignment --------------------------------------------------------------

// Calls f with a value of the element type, so that f's body can name the type.
template <typename F> static inline void with_float(Dtype dtype, F f) {
  if (dtype == DTYPE_BF16)
    f(bf16());
  else
    f(float());
}

template <typename F> static inline void with_bool(bool condition, F f) {
  if (condition)
    f(std::true_type());
  else
    f(std::false_type());
}

// Elements per 16-byte access.
template <typename T> constexpr int WIDTH = 16 / (int)sizeof(T);

// Calls f with the elements per access, as an integral constant: 16 bytes' worth if `wide`, else one.
template <typename T, typename F> static inline void with_width(bool wide, F f) {
  if (wide)
    f(std::integral_constant<int, WIDTH<T>>());
  else
    f(std::integral_constant<int, 1>());
}

// True if rows start aligned and are whole numbers of groups.
static inline bool rows_align(Tensor t, int64_t width) {
  return rows_start_aligned(t, width) && t.shape[t.rank - 1] % width == 0;
}

// True if this holds for all of these tensors that exist.
static inline bool rows_align(std::initializer_list<Tensor> tensors, int64_t width) {
  for (const Tensor &t : tensors)
    if (tensor_exists(t) && !rows_align(t, width)) return false;
  return true;
}

// Calls f with a value of the element type and, as an integral constant, the elements of an access: 16 bytes
// where the rows of all these tensors are a whole number of such groups (absent ones aside), else one.
template <typename F>
static inline void with_access(Dtype dtype, std::initializer_list<Tensor> tensors, F f) {
  with_float(dtype, [&](auto type) {
    using T = decltype(type);
    with_width<T>(rows_align(tensors, WIDTH<T>), [&](auto width) { f(type, width); });
  });
}

// --- loads and stores --------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Group { T at[N]; };

static DEVICE float to_float(float x) {
  return x;
}
static DEVICE float to_float(bf16 x) {
  return __bfloat162float(x);
}

template <typename T> static DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) {
  return x;
}
template <> DEVICE bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}

template <int N, typename T> static DEVICE void load(float (&out)[N], const T *from) {
  Group<T, N> group = *reinterpret_cast<const Group<T, N> *>(from);
  EACH (i, N) out[i] = to_float(group.at[i]);
}

template <int N, typename T> static DEVICE void store(T *to, const float (&values)[N]) {
  Group<T, N> group;
  EACH (i, N) group.at[i] = from_float<T>(values[i]);
  *reinterpret_cast<Group<T, N> *>(to) = group;
}

// An operation's optional vectors, fp32.
static DEVICE float read(const Tensor &t, int64_t n, float otherwise) {
  return t.data ? data_of<float>(t)[n] : otherwise;
}
static DEVICE void write(const Tensor &t, int64_t n, float value) {
  if (t.data) data_of<float>(t)[n] = value;
}

// --- sums --------------------------------------------------------------------------------------------------

// Butterflies: every lane gets the same bits.
template <typename T> static DEVICE T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

static DEVICE float2 warp_sum(float2 x) {
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

// sum of x[i] * w[i], by one warp; every lane gets it. Loads of several steps are on their way together.
template <typename T, int W> static __device__ float warp_dot(const T *x, const T *w, int hidden_size) {
  constexpr int STEPS = 4, STEP = 32 * W;
  float sum = 0;
  for (int first = threadIdx.x % 32 * W; first < hidden_size; first += STEPS * STEP) {
    float a[STEPS][W] = {}, b[STEPS][W] = {};
    EACH (j, STEPS) {
      if (first + j * STEP >= hidden_size) break;
      load(a[j], x + first + j * STEP);
      load(b[j], w + first + j * STEP);
    }
    EACH (j, STEPS)
      EACH (k, W) sum += a[j][k] * b[j][k];
  }
  return warp_sum(sum);
}

// Sums over a block of whole warps, at most 32; every thread gets the result.
template <typename T> static DEVICE T block_sum(T x) {
  __shared__ T partial[32];
  x = warp_sum(x);
  if (blockDim.x == 32) return x;
  __syncthreads(); // the previous call's results have been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : T());
}

// An entry and its column in one number: the largest of a row's is the largest entry's, the first of several.
typedef unsigned long long Ranked;
static DEVICE Ranked ranked(float z, int column) {
  unsigned bits = __float_as_uint(z + 0.0f); // -0 becomes 0
  return (Ranked)(bits ^ (bits >> 31 ? ~0u : 1u << 31)) << 32 | ~(unsigned)column;
}
static DEVICE float ranked_value(Ranked r) {
  unsigned bits = (unsigned)(r >> 32);
  return __uint_as_float(bits ^ (bits >> 31 ? 1u << 31 : ~0u));
}
static DEVICE int ranked_column(Ranked r) {
  return (int)~(unsigned)r;
}

template <typename T> static DEVICE T warp_max(T x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x = max(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

static DEVICE Ranked block_max(Ranked x) {
  __shared__ Ranked partial[32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0);
}

// tanh to a relative 4e-7, as much as a logit's fp32 rounding comes to after a soft-cap. Below 0.55 it is a
// polynomial, since 1 - 2 / (1 + e^2x) cancels there.
static DEVICE float fast_tanh(float x) {
  float square = x * x, p = fmaf(square, 0x1.0d5044p-6f, -0x1.af7cd0p-5f);
  p = fmaf(square, fmaf(square, p, 0x1.10cef6p-3f), -0x1.555452p-2f);
  float small = fmaf(square * p, x, x), large = 1 - __fdividef(2, 1 + exp2_approx(2 * LOG2_E * x));
  return square < 0.55f * 0.55f ? small : large;
}

// Adds the bias to an entry's logit and caps it: returns u, with du/dz in `slope`.
template <typename T> struct Capped {
  const T *bias; // or NULL
  float cap;     // 0: none
  DEVICE float operator()(float z, int64_t column, float &slope) const {
    if (bias) z += to_float(bias[column]);
    slope = 1;
    if (cap == 0) return z;
    float t = fast_tanh(z / cap);
    slope = 1 - t * t;
    return cap * t;
  }
};

// The bits of |x|, which are ordered as the values are, with NaN above infinity.
static DEVICE unsigned magnitude(float x) {
  return __float_as_uint(x) & 0x7FFFFFFF;
}

// *amax = max(*amax, the warp's largest magnitude, rounded to T), in any order. Most warps' maxima are not
// larger, and need no atomic.
template <typename T> static DEVICE void raise_amax(unsigned *amax, unsigned largest) {
  largest = __reduce_max_sync(~0u, largest);
  largest = magnitude(to_float(from_float<T>(__uint_as_float(largest))));
  if (threadIdx.x % 32 == 0 && largest > *(volatile unsigned *)amax) atomicMax(amax, largest);
}

// --- called from several files -----------------------------------------------------------------------------

// linear.cu. A matrix as it is stored; the GEMM reads its transpose where `transposed`.
struct Operand : Tensor {
  bool transposed;
  int64_t apart = 0; // elements from one matrix of a batch to the next
};

// With bias: + bias[n] on every row. GELU: out = gelu of that, and its argument is stored in pre.
// GELU_DERIVATIVE: out times gelu'(pre), without addend or bias.
enum GemmEpilogue { GEMM_PLAIN, GEMM_BIAS, GEMM_GELU, GEMM_BIAS_GELU, GEMM_GELU_DERIVATIVE };

// out[m, n] = alpha * left[m, k] right[k, n] + beta * addend[m, n] in fp32; then the epilogue and rounding.
struct Gemm {
  Operand left, right; // of one type, also that of bias and pre
  Tensor out, addend;  // of one type; addend: absent, or possibly out itself
  float alpha = 1.0f, beta = 1.0f;
  int batch = 1; // so many GEMMs, without bias or pre
  int64_t out_apart = 0, addend_apart = 0;
  GemmEpilogue epilogue = GEMM_PLAIN;
  Tensor bias = {}, pre = {};
  // Scales of codes, on the device: they multiply the result. The bias is then bf16.
  const void *left_scale = nullptr, *right_scale = nullptr;

  __host__ DEVICE int64_t m() const { return out.shape[0]; }
  __host__ DEVICE int64_t n() const { return out.shape[1]; }
  __host__ DEVICE int64_t k() const { return left.transposed ? left.shape[0] : left.shape[1]; }
};

// out = left right, each transposed or not; accumulate: added to out.
static inline Gemm gemm_of(Tensor out, Tensor left, bool left_transposed, Tensor right, bool right_transposed,
                           bool accumulate = false) {
  return {{left, left_transposed}, {right, right_transposed}, out, accumulate ? out : Tensor{}};
}

void cuda_gemm(Backend *backend, const Gemm *gemm);

void gemms_create(Backend *backend);
void gemms_destroy(Gemms *gemms);

Hopper *hopper_create(Backend *backend);
void hopper_destroy(Hopper *hopper); // NULL is fine

// columns.cu: out[j] (+)= alpha * sum_i coefficients[i] x[i, j], in a fixed order; coefficients may be NULL
// (all 1). x is [rows, columns]; `partials` holds cuda_column_slices(rows) * columns floats.
void column_sums(Backend *backend, Tensor out, Tensor x, const float *coefficients, float alpha,
                 bool accumulate, float *partials);
// Its second half, for kernels that write partial sums themselves: each of `slices` rows, `stride` apart,
// holds the sums of up to three outs of one length and dtype, one after the other.
void add_partials(Backend *backend, std::initializer_list<Tensor> outs, const float *partials, int64_t slices,
                  int64_t stride, float alpha, bool accumulate);

// segments.cu: out[ids[n]] (+)= alpha * coefficients[n] * x[n] summed over all n with that id, in a fixed
// order; coefficients may be NULL (all 1), and IGNORE_INDEX and ELSEWHERE name no row. x is [N, H]; workspace
// holds cuda_segment_bytes(N). Rows that no id names stay, or become 0 without accumulate.
void segment_add(Backend *backend, Tensor out, const int32_t *ids, Tensor x, const float *coefficients,
                 float alpha, bool accumulate, void *workspace);

// copy_engines.cu: out (+)= the sum over r of shares [ranks, out's elements], in that order, rounded before
// it is added to out.
void sum_shares(cudaStream_t stream, Tensor out, const void *shares, int ranks, bool accumulate);
// Memory for weights and gradients, which ranks share; NULL if they cannot, or if it fails.
void *cuda_shared_allocate(Backend *backend, size_t bytes);
bool cuda_shared_release(Backend *backend, void *data); // false: it is other memory
// An all_reduce, reduce_scatter or all_gather by copy engines; false where they do not reach the tensors.
bool by_copy_engines(Backend *backend, const Collective *a, cudaStream_t stream);
