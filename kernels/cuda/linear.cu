// GEMMs through cuBLASLt, with bias, GELU, GELU's derivative and the residual in their epilogues; GEMMs of
// FP8 operands sum in fp32, without the library's fast accumulation. hopper_gemm.cu has SwiGLU's.
//
// cuBLASLt is column-major: a row-major [m, n] matrix is its column-major [n, m], so out = left right becomes
// out^T = right^T left^T and the operands change places. The bias then runs along the library's rows.
//
// A GEMM runs on the library's first choice of algorithm, which depends on shapes, GPU and library version
// alone. Only the loss's dW is measured (below). Split-K partials are added in fp32 in a fixed order.
//
// A bf16 matrix that is added to in place may be rounded once more. Rows not aligned to 16 bytes with an
// epilogue, and GELU in fp32, which the library gets wrong by 1e-6, run on a plain kernel of our own.
#include <algorithm>
#include <cublasLt.h>
#include <map>
#include <stdlib.h>
#include <string.h>
#include <tuple>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/hopper_gemm.h"

static void lt_check(cublasStatus_t status, const char *doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail("cuBLASLt failed while %s: %s", doing, cublasLtGetStatusString(status));
}

// --- the GEMMs met so far ----------------------------------------------------------------------------------

// The address's alignment in bytes: a power of two, at most 256.
static uint32_t alignment_of(const void *address) {
  uintptr_t bits = (uintptr_t)address | 256;
  return (uint32_t)(bits & (~bits + 1));
}

// The addend or, without one, out in its place.
static const Tensor &addend_of(const Gemm *p) {
  return tensor_exists(p->addend) ? p->addend : p->out;
}

// Everything that the choice of an algorithm may depend on.
static auto key_of(const Gemm *p) {
  return std::make_tuple(p->m(), p->n(), p->k(), p->left.stride, p->right.stride, addend_of(p).stride,
                         p->out.stride, p->pre.stride, p->batch, p->left.apart, p->right.apart,
                         p->addend_apart, p->out_apart, p->left.transposed, p->right.transposed,
                         p->left.dtype, p->out.dtype, p->epilogue, alignment_of(p->left.data),
                         alignment_of(p->right.data), alignment_of(addend_of(p).data),
                         alignment_of(p->out.data));
}

// In the library's terms: d[m, n] = a[m, k] b[k, n] + c.
struct GemmPlan {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, c, d;
  cublasLtMatmulAlgo_t algorithm;
  bool possible, measured;
};

struct Gemms {
  cublasLtHandle_t handle;
  std::map<decltype(key_of(nullptr)), GemmPlan> plans;
  bool measure;
};

void gemms_create(Backend *backend) {
  Gemms *gemms = cuda_state(backend)->gemms = new Gemms();
  lt_check(cublasLtCreate(&gemms->handle), "starting");
  const char *measure = getenv("LCE_MATMUL_TUNE");
  gemms->measure = !measure || strcmp(measure, "0") != 0;
}

void gemms_destroy(Gemms *gemms) {
  if (!gemms) return;
  for (auto &[key, plan] : gemms->plans) {
    cublasLtMatmulDescDestroy(plan.operation);
    for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c, plan.d})
      cublasLtMatrixLayoutDestroy(layout);
  }
  if (gemms->handle) cublasLtDestroy(gemms->handle);
  delete gemms;
}

static cudaDataType_t lt_type(Dtype dtype) {
  return dtype == DTYPE_BF16 ? CUDA_R_16BF : dtype == DTYPE_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
}

template <typename T>
static void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  lt_check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "describing a GEMM");
}

// Describes t to the library, whose columns are t's rows.
static cublasLtMatrixLayout_t layout(const Tensor &t, int batch, int64_t apart) {
  cublasLtMatrixLayout_t out;
  lt_check(cublasLtMatrixLayoutCreate(&out, lt_type(t.dtype), (uint64_t)t.shape[1], (uint64_t)t.shape[0],
                                      t.stride),
           "describing a matrix");
  auto set_batch = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
    lt_check(cublasLtMatrixLayoutSetAttribute(out, attribute, &value, sizeof value), "describing a batch");
  };
  set_batch(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch);
  set_batch(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, apart);
  return out;
}

static void describe(GemmPlan *plan, const Gemm *p) {
  static const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                                 CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                                 CUBLASLT_EPILOGUE_DGELU}; // in GemmEpilogue's order
  Dtype bias = p->left.dtype == DTYPE_E4M3 ? DTYPE_BF16 : p->left.dtype;
  lt_check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
  set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, p->right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, p->left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogues[p->epilogue]);
  if (tensor_exists(p->bias)) set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, lt_type(bias));
  if (tensor_exists(p->pre)) {
    set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, lt_type(p->left.dtype));
    set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p->pre.stride);
  }
  plan->a = layout(p->right, p->batch, p->right.apart);
  plan->b = layout(p->left, p->batch, p->left.apart);
  plan->c = layout(addend_of(p), p->batch, tensor_exists(p->addend) ? p->addend_apart : p->out_apart);
  plan->d = layout(p->out, p->batch, p->out_apart);
}

static void point_epilogue(GemmPlan *plan, const Gemm *p) {
  if (tensor_exists(p->bias)) set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p->bias.data);
  if (tensor_exists(p->pre)) set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p->pre.data);
  if (p->left.dtype != DTYPE_E4M3) return;
  set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p->right_scale);
  set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p->left_scale);
}

// The library's suggestions, best first by its estimate.
static int suggestions(Gemms *gemms, const GemmPlan *plan, const Gemm *p,
                       cublasLtMatmulHeuristicResult_t *results, int max) {
  cublasLtMatmulPreference_t preference;
  lt_check(cublasLtMatmulPreferenceCreate(&preference), "describing a preference");
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
             "describing a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)CUDA_GEMM_WORKSPACE_BYTES);
  // Split-K partials are added in fp32 in the workspace, in a fixed order.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p->right.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p->left.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(addend_of(p).data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p->out.data));
  int found = 0;
  cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gemms->handle, plan->operation, plan->a, plan->b,
                                                         plan->c, plan->d, preference, max, results, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return 0;
  auto fails = [](const cublasLtMatmulHeuristicResult_t &r) { return r.state != CUBLAS_STATUS_SUCCESS; };
  return (int)(std::remove_if(results, results + found, fails) - results);
}

static cublasStatus_t execute(Backend *backend, const GemmPlan *plan, const Gemm *p,
                              const cublasLtMatmulAlgo_t *algorithm) {
  CudaState *state = cuda_state(backend);
  float beta = tensor_exists(p->addend) ? p->beta : 0.0f;
  return cublasLtMatmul(state->gemms->handle, plan->operation, &p->alpha, p->right.data, plan->a,
                        p->left.data, plan->b, &beta, addend_of(p).data, plan->c, p->out.data, plan->d,
                        algorithm, state->gemm_workspace, CUDA_GEMM_WORKSPACE_BYTES, state->stream);
}

// --- measuring the loss's dW -------------------------------------------------------------------------------

// The loss adds to dW chunk by chunk. The library's estimate ignores the time to read and write dW: at chunks
// of 1024 its first choice makes the loss an eighth slower. So its suggestions are timed once per shape.
//
// A choice by time must not change the loss's bits from run to run or rank to rank. So only algorithms with
// the first choice's bits compete. LCE_MATMUL_TUNE=0 in the environment takes the first choice.

// True for large fp32 gradients of few tokens, in multiples of 128 so that shapes stay few if the token count
// varies. Not if the GEMM adds to out, nor while the stream is captured into a graph.
static bool worth_measuring(Backend *backend, const Gemm *p) {
  bool weight_gradient = p->left.transposed && !p->right.transposed && p->left.dtype == DTYPE_BF16 &&
                         p->out.dtype == DTYPE_F32 && p->epilogue == GEMM_PLAIN && p->batch == 1;
  if (!weight_gradient || tensor_exists(p->addend) || !tensor_is_dense(p->out)) return false;
  if (p->k() % 128 || p->k() > 4096 || tensor_count(p->out) < 1 << 24) return false;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(cuda_stream(backend), &capture),
             "querying whether the stream is captured");
  return capture == cudaStreamCaptureStatusNone;
}

// Bf16 values of either sign from 2^-15 to 2: with like magnitudes, sums would be exact in any order.
static __global__ void random_kernel(uint32_t *pairs, int64_t count, uint64_t key) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < count) pairs[i] = ((uint32_t)random_bits_of(key, (uint64_t)i) & 0x87FF87FF) | 0x38003800;
}

// Adds up a hash of each word's place and bits. Integers may be added in any order.
static __global__ void checksum_kernel(unsigned long long *sum, const uint32_t *words, int64_t count) {
  unsigned long long total = 0;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
    total += random_bits_of(random_key(words[i], 0), (uint64_t)i);
  atomicAdd(sum, total);
}

// Replaces the plan's algorithm by the fastest with its bits. Operands are random: the caller's (zeros, say)
// may make all orders of summation equal. out is overwritten.
static void measure(Backend *backend, GemmPlan *plan, Gemm p) {
  constexpr int CANDIDATES = 12;
  constexpr float WARM_UP = 150, MEASURED = 300; // milliseconds
  cublasLtMatmulHeuristicResult_t results[CANDIDATES];
  cublasLtMatmulAlgo_t algorithms[CANDIDATES]; // the competitors
  float times[CANDIDATES] = {}, spent = 0;
  int found = suggestions(cuda_state(backend)->gemms, plan, &p, results, CANDIDATES), count = 0;
  if (found < 2) return;
  size_t left_bytes = memory_padded((size_t)(p.k() * p.left.stride) * sizeof(bf16));
  size_t bytes = left_bytes + memory_padded((size_t)(p.k() * p.right.stride) * sizeof(bf16));
  char *memory = nullptr;
  if (cudaMalloc(reinterpret_cast<void **>(&memory), bytes + sizeof(uint64_t)) != cudaSuccess) {
    cudaGetLastError(); // the first choice serves
    return;
  }
  launch_kernel(per_element(backend, "random operands", (int64_t)bytes / 4), random_kernel,
                reinterpret_cast<uint32_t *>(memory), (int64_t)bytes / 4, random_key(0, 0));
  p.left.data = memory, p.right.data = memory + left_bytes;
  Gemm added = p; // as all chunks but the first
  added.addend = p.out;

  auto run = [&](const Gemm &g, int i) { return execute(backend, plan, &g, &algorithms[i]); };
  auto checksum = [&] {
    auto *sum = reinterpret_cast<unsigned long long *>(memory + bytes);
    unsigned long long value = 0;
    cuda_check(cudaMemsetAsync(sum, 0, sizeof *sum, cuda_stream(backend)), "clearing a checksum");
    launch_kernel({"a checksum", cuda_stream(backend), 1024, 256}, checksum_kernel, sum,
                  data_of<const uint32_t>(p.out), tensor_count(p.out));
    cuda_check(cudaMemcpyAsync(&value, sum, sizeof value, cudaMemcpyDeviceToHost, cuda_stream(backend)),
               "reading a checksum");
    cuda_check(cudaStreamSynchronize(cuda_stream(backend)), "measuring a GEMM");
    return value;
  };
  unsigned long long wanted = 0;
  for (int i = 0; i < found; i++) {
    algorithms[count] = results[i].algo;
    if (run(p, count) != CUBLAS_STATUS_SUCCESS) continue;
    unsigned long long bits = checksum();
    if (run(added, count) != CUBLAS_STATUS_SUCCESS) continue;
    bits = 31 * bits + checksum();
    if (count == 0) wanted = bits;
    if (bits == wanted) count++;
  }

  // Candidates take turns, at a clock that all of them determine, as in a step. Timed alone, each runs at a
  // clock of its own, and the choice makes dW 5 to 10% slower (one H200).
  void *begin = nullptr, *end = nullptr;
  while (count > 1 && spent < WARM_UP + MEASURED) {
    bool warm = spent >= WARM_UP;
    for (int i = 0; i < count; i++) {
      backend->ops->event_record(backend, &begin, STREAM_COMPUTE);
      lt_check(run(added, i), "multiplying");
      backend->ops->event_record(backend, &end, STREAM_COMPUTE);
      float milliseconds = 1e3f * (float)backend->ops->event_seconds(begin, end);
      spent += milliseconds;
      if (warm) times[i] += milliseconds;
    }
  }
  if (count > 1) plan->algorithm = algorithms[std::min_element(times, times + count) - times];
  for (void *event : {begin, end})
    if (event) backend->ops->event_destroy(event);
  cudaFree(memory);
}

// --- GEMMs by the library ----------------------------------------------------------------------------------

// True if all rows start on multiples of 16 bytes.
static bool all_aligned(const Gemm *p) {
  for (const Tensor &t : {(Tensor)p->left, (Tensor)p->right, p->pre, p->out, p->addend})
    if (tensor_exists(t) && !rows_start_aligned(t, 16)) return false;
  return true;
}

static GemmPlan *plan_of(Backend *backend, const Gemm *p) {
  Gemms *gemms = cuda_state(backend)->gemms;
  auto [entry, is_new] = gemms->plans.try_emplace(key_of(p));
  GemmPlan *plan = &entry->second;
  if (!is_new) return plan;
  describe(plan, p);
  point_epilogue(plan, p);
  cublasLtMatmulHeuristicResult_t first;
  plan->possible = suggestions(gemms, plan, p, &first, 1) > 0;
  if (plan->possible) plan->algorithm = first.algo;
  return plan;
}

// False when the library cannot do this GEMM, or not accurately.
static bool cublaslt_gemm(Backend *backend, const Gemm *p) {
  if (p->left.dtype == DTYPE_F32 && tensor_exists(p->pre)) return false;
  if ((tensor_exists(p->addend) || p->epilogue != GEMM_PLAIN) && p->out.dtype == DTYPE_BF16 &&
      !all_aligned(p))
    return false;
  GemmPlan *plan = plan_of(backend, p);
  if (!plan->possible) return false;
  if (!plan->measured && cuda_state(backend)->gemms->measure && worth_measuring(backend, p)) {
    plan->measured = true;
    measure(backend, plan, *p);
  }
  point_epilogue(plan, p);
  lt_check(execute(backend, plan, p, &plan->algorithm), "multiplying");
  return true;
}

// --- the plain GEMM ----------------------------------------------------------------------------------------

// A block computes a tile of 64 x 64, a thread every 16th row and column, 16 terms at a time.
static constexpr int TILE = 64, TERMS = 16;

// Loads rows [first, first + TILE) of an operand's [rows, k] and terms [term, term + TERMS), 0 beyond its
// ends. `along`: the terms of a row follow one another in memory.
template <typename T>
static __device__ void load_tile(float (&tile)[TERMS][TILE + 1], const T *data, int64_t stride, bool along,
                                 int64_t first, int64_t rows, int64_t term, int64_t terms) {
  for (int i = threadIdx.x; i < TILE * TERMS; i += blockDim.x) {
    int row = along ? i / TERMS : i % TILE, t = along ? i % TERMS : i / TILE;
    bool inside = first + row < rows && term + t < terms;
    int64_t at = along ? (first + row) * stride + term + t : (term + t) * stride + first + row;
    tile[t][row] = inside ? to_float(data[at]) : 0.0f;
  }
}

template <typename T, typename TO>
static __device__ void plain_epilogue(const Gemm &p, int64_t row, int64_t column, float sum) {
  float value = p.alpha * sum;
  T *pre = data_of<T>(p.pre) + row * p.pre.stride + column;
  if (p.addend.data) value += p.beta * to_float(data_of<TO>(p.addend)[row * p.addend.stride + column]);
  if (p.bias.data) value += to_float(data_of<T>(p.bias)[column]);
  if (p.epilogue == GEMM_GELU_DERIVATIVE) {
    value *= Gelu::derivative(to_float(*pre));
  } else if (p.pre.data) {
    *pre = from_float<T>(value);
    value = Gelu::value(value, 0);
  }
  data_of<TO>(p.out)[row * p.out.stride + column] = from_float<TO>(value);
}

template <typename T, typename TO> static __global__ void __launch_bounds__(256) plain_gemm_kernel(Gemm p) {
  __shared__ float left[TERMS][TILE + 1], right[TERMS][TILE + 1];
  p.left.data = data_of<T>(p.left) + blockIdx.y * p.left.apart;
  p.right.data = data_of<T>(p.right) + blockIdx.y * p.right.apart;
  p.out.data = data_of<TO>(p.out) + blockIdx.y * p.out_apart;
  if (p.addend.data) p.addend.data = data_of<TO>(p.addend) + blockIdx.y * p.addend_apart;
  const int64_t m = p.m(), n = p.n(), k = p.k();
  const unsigned down = (unsigned)((m + TILE - 1) / TILE); // tiles; in one axis, for the other two are short
  int64_t first_row = (int64_t)(blockIdx.x % down) * TILE, first_column = (int64_t)(blockIdx.x / down) * TILE;
  int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int64_t term = 0; term < k; term += TERMS) {
    load_tile(left, data_of<const T>(p.left), p.left.stride, !p.left.transposed, first_row, m, term, k);
    load_tile(right, data_of<const T>(p.right), p.right.stride, p.right.transposed, first_column, n, term, k);
    __syncthreads();
    EACH (t, TERMS)
      EACH (i, 4)
        EACH (j, 4) sum[i][j] += left[t][y + 16 * i] * right[t][x + 16 * j];
    __syncthreads();
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      int64_t row = first_row + y + 16 * i, column = first_column + x + 16 * j;
      if (row < m && column < n) plain_epilogue<T, TO>(p, row, column, sum[i][j]);
    }
}

static void plain_gemm(Backend *backend, const Gemm *p) {
  Grid grid(ceil_div(p->m(), TILE) * ceil_div(p->n(), TILE), p->batch);
  with_float(p->left.dtype, [&](auto type) {
    with_float(p->out.dtype, [&](auto out_type) {
      launch_kernel({"a plain GEMM", cuda_stream(backend), grid, 256},
                    plain_gemm_kernel<decltype(type), decltype(out_type)>, *p);
    });
  });
}

// --- ragged ends -------------------------------------------------------------------------------------------

// The library's fast kernels move 16 bytes along a matrix's contiguous axis. Where that axis is no multiple
// of 8 elements (a vocabulary of 50257 in rows of 50304), it falls back to kernels several times slower. So
// the last few terms, rows or columns of such a GEMM are a GEMM of their own.
enum { WHOLE = 8 };

static bool ragged(int64_t extent) {
  return extent % WHOLE != 0 && extent >= 64 * WHOLE;
}

struct Range {
  int64_t first, count;
};

static Tensor part_of(Tensor t, Range rows, Range columns) {
  if (!tensor_exists(t)) return t;
  return tensor_columns(tensor_rows(t, rows.first, rows.count), columns.first, columns.count);
}

static Operand part_of(Operand o, Range rows, Range columns) {
  if (o.transposed) std::swap(rows, columns);
  return {part_of((Tensor)o, rows, columns), o.transposed, o.apart};
}

static Gemm part_of(const Gemm *p, Range m, Range n, Range k) {
  Gemm part = *p;
  part.left = part_of(p->left, m, k), part.right = part_of(p->right, k, n);
  part.out = part_of(p->out, m, n), part.addend = part_of(p->addend, m, n);
  return part;
}

static void any_gemm(Backend *backend, const Gemm *p) {
  if (!cublaslt_gemm(backend, p)) plain_gemm(backend, p);
}

void cuda_gemm(Backend *backend, const Gemm *p) {
  if (p->m() == 0 || p->n() == 0) return;
  Range m = {0, p->m()}, n = {0, p->n()}, k = {0, p->k()}, *cut = nullptr;
  if (p->left.dtype == DTYPE_BF16 && p->epilogue == GEMM_PLAIN && all_aligned(p)) {
    if (ragged(k.count) && (!p->left.transposed || p->right.transposed))
      cut = &k;
    else if (ragged(m.count) && p->left.transposed)
      cut = &m;
    else if (ragged(n.count))
      cut = &n;
  }
  if (!cut) return any_gemm(backend, p);
  int64_t more = cut->count % WHOLE;
  cut->count -= more;
  Gemm bulk = part_of(p, m, n, k);
  *cut = {cut->count, more};
  Gemm rest = part_of(p, m, n, k);
  if (cut == &k) rest.addend = p->out, rest.addend_apart = p->out_apart, rest.beta = 1;
  cuda_gemm(backend, &bulk);
  (cut == &m ? any_gemm : plain_gemm)(backend, &rest);
}

// --- the three GEMMs of a linear layer ---------------------------------------------------------------------

// cuBLASLt's epilogues have GELU, and our GEMMs' on Hopper SwiGLU; other activations are separate kernels.
void cuda_linear_forward(Backend *backend, const LinearForward *a) {
  bool bias = tensor_exists(a->bias), fused = a->activation == ACTIVATION_GELU;
  bool apart = a->activation && !fused;
  if (a->activation == ACTIVATION_SWIGLU && !bias && !a->in_out_layout &&
      hopper_swiglu(backend, a->out, a->pre_activation, a->x, a->weight))
    return;
  Gemm g = gemm_of(apart ? a->pre_activation : a->out, a->x, false, a->weight, !a->in_out_layout);
  g.addend = a->residual;
  g.epilogue = fused ? bias ? GEMM_BIAS_GELU : GEMM_GELU : bias ? GEMM_BIAS : GEMM_PLAIN;
  g.bias = a->bias;
  if (fused) g.pre = a->pre_activation;
  cuda_gemm(backend, &g);
  ActivationForward activation = {.activation = a->activation, .out = a->out, .x = a->pre_activation};
  if (apart) cuda_activation_forward(backend, &activation);
}

void cuda_linear_backward_input(Backend *backend, const LinearBackwardInput *a) {
  bool fused = a->activation == ACTIVATION_GELU;
  if (a->activation == ACTIVATION_SWIGLU && !a->in_out_layout &&
      hopper_swiglu_gradient(backend, a->dx, a->pre_activation, a->dout, a->weight))
    return;
  Tensor product = is_gated(a->activation) ? a->dactivation : a->dx;
  Gemm g = gemm_of(product, a->dout, false, a->weight, a->in_out_layout, a->accumulate);
  if (fused) g.epilogue = GEMM_GELU_DERIVATIVE, g.pre = a->pre_activation;
  cuda_gemm(backend, &g);
  ActivationBackward activation = {
      .activation = a->activation, .dx = a->dx, .dout = product, .x = a->pre_activation};
  if (a->activation && !fused) cuda_activation_backward(backend, &activation);
}

void cuda_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
  Gemm g = gemm_of(a->dweight, left, true, right, false, a->accumulate);
  g.alpha = a->alpha;
  if (g.k() > 0)
    cuda_gemm(backend, &g);
  else if (!a->accumulate)
    cuda_fill_zero(backend, &a->dweight);
  if (tensor_exists(a->dbias))
    column_sums(backend, a->dbias, a->dout, nullptr, a->alpha, a->accumulate, data_of<float>(a->workspace));
}

void cuda_matmul_quantized(Backend *backend, const MatmulQuantized *a) {
  Gemm g = gemm_of(a->out, a->a.codes, false, a->b.codes, true);
  g.addend = a->residual;
  g.epilogue = tensor_exists(a->bias) ? GEMM_BIAS : GEMM_PLAIN;
  g.bias = a->bias;
  g.left_scale = a->a.amax.data, g.right_scale = a->b.amax.data, g.alpha = 1 / (E4M3_MAX * E4M3_MAX);
  if (g.m() && g.n() && !cublaslt_gemm(backend, &g))
    fail("cuBLASLt has no FP8 GEMM for this GPU and %s times the transpose of %s",
         tensor_text(a->a.codes).text, tensor_text(a->b.codes).text);
}
