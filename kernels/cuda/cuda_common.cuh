// What every .cu file of the backend needs: errors as sentences, launches that overlap, 16-byte loads and
// stores that widen to fp32, sums over warps and blocks in a fixed order, and the few functions that one file
// lends to another.
#ifndef LCE_KERNELS_CUDA_CUDA_COMMON_CUH
#define LCE_KERNELS_CUDA_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <type_traits>

#include "base/fail.h"
#include "kernels/cuda/cuda_ops.h"

typedef __nv_bfloat16 bf16;

// --- the backend's state -----------------------------------------------------------------------------------

struct Products;        // linear.cu: cuBLASLt's handle and the products it has seen
struct Staging;         // backend.cu: pinned memory between the host and the device
struct Hopper;          // hopper_gemm.cu: what it found on this device
struct CudaCollectives; // collectives.cu: what connects this GPU to those of the other ranks

struct CudaState {
  cudaStream_t stream; // every operation runs in its order
  // Two more, which an operation may fork off the first and joins before it ends, and the events to do it
  // with. The second of them goes before all others.
  cudaStream_t side, urgent;
  cudaEvent_t forked[CUDA_LCE_TILES], joined[CUDA_LCE_TILES];
  cudaEvent_t handed; // between the first stream and a caller's own
  int ordinal, multiprocessors;
  size_t peak_bytes; // most the device held after any allocation
  Products *products;
  Staging *staging;
  Hopper *hopper;               // NULL until it is asked for
  CudaCollectives *collectives; // NULL while there is one rank
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

static inline void cuda_check_launch(const char *op) {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    fail("CUDA could not launch %s: %s (%s)", op, cudaGetErrorString(error), cudaGetErrorName(error));
}

// --- kernels that overlap ----------------------------------------------------------------------------------

// With it, a kernel's blocks may take their places while those of the kernel before it in the stream leave
// theirs (programmatic dependent launch; from sm_90 on). Every thread of a kernel that is launched so calls
// griddepcontrol_wait() before it touches memory that others write or read, and griddepcontrol_launch_dependents() early, where the
// kernel after it may take its place likewise.
static inline cudaLaunchAttribute pdl_attribute() {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return early;
}

// Launches a kernel, so or as any other.
template <typename... Params, typename... Args>
static inline void launch_kernel(bool early, cudaStream_t stream, dim3 grid, int threads,
                                 void (*kernel)(Params...), Args &&...args) {
  cudaLaunchAttribute overlap = pdl_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3((unsigned)threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Args &&>(args)...), "launching a kernel");
}

// Until all that the stream holds before this kernel is done.
static __device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- scalars -----------------------------------------------------------------------------------------------

static constexpr float LOG2_E = 1.4426950408889634f;

static __device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t &>(pair);
}

// 2^x, within 2 units in the last place; subnormal results become 0.
static __device__ __forceinline__ float exp2_approx(float x) {
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

// Elements of a 16-byte access.
template <typename T> constexpr int WIDTH = 16 / (int)sizeof(T);

// Whether every row starts where groups of `width` elements may be read, 16 bytes or the whole group at a
// time.
static inline bool rows_start_aligned(Tensor t, int64_t width) {
  uintptr_t bytes = (uintptr_t)min_i64(16, width * (int64_t)dtype_bytes(t.dtype));
  return (uintptr_t)t.data % bytes == 0 &&
         (t.rank == 1 || (uintptr_t)t.stride * dtype_bytes(t.dtype) % bytes == 0);
}

// Whether, beyond that, a row is a whole number of groups.
static inline bool rows_align(Tensor t, int64_t width) {
  return rows_start_aligned(t, width) && t.shape[t.rank - 1] % width == 0;
}

// Threads for a block that works on one row of `groups` accesses: whole warps, at most `most`.
static inline int row_threads(int64_t groups, int64_t most) {
  return (int)max_i64(32, min_i64(most, ceil_div(groups, 32) * 32));
}

template <typename T> static inline T *data_of(Tensor t) {
  return static_cast<T *>(t.data);
}

// --- loads and stores --------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Group { T at[N]; };

static __device__ __forceinline__ float to_float(float x) {
  return x;
}
static __device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}

template <typename T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}

template <int N, typename T> static __device__ __forceinline__ void load(float (&out)[N], const T *from) {
  Group<T, N> group = *reinterpret_cast<const Group<T, N> *>(from);
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = to_float(group.at[i]);
}

template <int N, typename T> static __device__ __forceinline__ void store(T *to, const float (&values)[N]) {
  Group<T, N> group;
#pragma unroll
  for (int i = 0; i < N; i++) group.at[i] = from_float<T>(values[i]);
  *reinterpret_cast<Group<T, N> *>(to) = group;
}

// to (+)= values.
template <int N, typename T>
static __device__ __forceinline__ void store_or_add(T *to, float (&values)[N], bool accumulate) {
  if (accumulate) {
    float old[N];
    load(old, to);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] += old[i];
  }
  store(to, values);
}

// --- sums --------------------------------------------------------------------------------------------------

// Butterflies: every lane gets the same bits.
template <typename T> static __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Over a block of whole warps, at most 32; every thread gets the result.
static __device__ __forceinline__ float2 block_sum(float2 x) {
  __shared__ float2 of_warp[32];
  x.x = warp_sum(x.x), x.y = warp_sum(x.y);
  if (blockDim.x == 32) return x;
  __syncthreads(); // the previous call's results have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : make_float2(0, 0);
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

static __device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warp[32];
  x = warp_sum(x);
  if (blockDim.x == 32) return x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f);
}

// --- lent from file to file --------------------------------------------------------------------------------

// linear.cu. A row-major matrix as a product reads it: element (i, j) of the operand at data[i * stride + j],
// or at data[j * stride + i] when transposed.
struct Operand {
  const void *data;
  int64_t stride;
  bool transposed;
};

// out[m, n] = alpha * left[m, k] right[k, n] + addend[m, n], in fp32 until out is rounded. With an epilogue:
// + bias[n] on every row; then out = gelu of that, and what gelu was taken of is kept in pre; or out times
// gelu'(pre), to which nothing is added.
enum ProductEpilogue {
  PRODUCT_PLAIN,
  PRODUCT_BIAS,
  PRODUCT_GELU,
  PRODUCT_BIAS_GELU,
  PRODUCT_TIMES_GELU_SLOPE
};

struct Product {
  int64_t m, n, k;
  Operand left, right;
  Dtype operand_dtype, out_dtype; // out, addend: out_dtype; left, right, bias, pre: operand_dtype
  void *out;
  int64_t out_stride;
  const void *addend = nullptr; // may be out itself, with the same stride
  int64_t addend_stride = 0;
  float alpha = 1.0f;
  ProductEpilogue epilogue = PRODUCT_PLAIN;
  const void *bias = nullptr;
  void *pre = nullptr;
  int64_t pre_stride = 0;
  // Where it runs beside other products and so without a workspace; NULL: on the backend's stream, with one.
  cudaStream_t stream = nullptr;
};

void cuda_gemm(Backend *backend, const Product *product);

Products *products_create(Backend *backend);
void products_use_workspace(Backend *backend, void *workspace);
void products_destroy(Products *products);

// NULL is fine.
void hopper_destroy(Hopper *hopper);

// columns.cu: out[j] (+)= alpha * sum_i coefficients[i] x[i, j], in a fixed order; coefficients may be NULL
// (all 1). x is [rows, columns]; `partials` holds cuda_column_slices(rows) * columns floats.
void column_sums(Backend *backend, Tensor out, Tensor x, const float *coefficients, float alpha,
                 bool accumulate, float *partials);
// The second half of it, for kernels that make the partial sums themselves: partials is [slices, out's
// length], its rows `stride` apart.
void column_sums_finish(Backend *backend, Tensor out, const float *partials, int64_t slices, int64_t stride,
                        float alpha, bool accumulate);

// segments.cu: out[ids[n]] (+)= alpha * coefficients[n] * x[n] summed over all n with that id, in a fixed
// order, without atomics; coefficients may be NULL (all 1), and IGNORE_INDEX and ELSEWHERE name no row. x is
// [N, H]; workspace holds cuda_segment_bytes(N, H). Rows of out that no id names are left alone: without
// accumulate the caller has zeroed them.
void segment_add(Backend *backend, Tensor out, const int32_t *ids, Tensor x, const float *coefficients,
                 float alpha, bool accumulate, void *workspace);

#endif
