// GEMMs through cuBLASLt, with bias, GELU, GELU's derivative and the residual in their epilogues; of FP8 operands too,
// whose partial sums stay in fp32 (without the library's fast accumulation). SwiGLU is in the epilogues of our own GEMMs
// on Hopper (hopper_gemm.cu), else a kernel of its own after the GEMM.
//
// cuBLASLt is column-major: a row-major [m, n] matrix is its column-major [n, m], so out = left right becomes out^T =
// right^T left^T and the operands change places. The bias then runs along the library's rows, as its epilogue expects.
//
// The fastest algorithm is measured once for each distinct GEMM, on random operands. Two algorithms may
// round differently, and a choice by time would then change the loss from run to run. So only those compete whose
// result has the same bits as that of the library's first choice, which depends on shapes, GPU and library version
// alone: most differ from it in the order of tiles, not of summation. LCE_MATMUL_TUNE=0 in the environment takes the
// first choice unmeasured. Split-K partials are reduced in fp32 in a fixed order, never by atomics. A GEMM is not
// measured while it accumulates in place or the stream is captured into a graph. Large ones are measured for half a
// second to two, at the power limit.
//
// Where a bf16 matrix is added to in place, the library may round the GEMM before it adds: one rounding more than from
// one matrix into another. Where rows are not aligned to 16 bytes, it refuses some epilogues and rounds to bf16 before
// others, and GELU in fp32 is off by 1e-6: those few run on a plain kernel of our own.
#include <cublasLt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

// A millisecond and more: a GEMM of this size alone brings a device to its power limit.
static constexpr double SUSTAINED_FLOPS = 1e12;

static void lt_check(cublasStatus_t status, const char *doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail("cuBLASLt failed while %s: %s", doing, cublasLtGetStatusString(status));
}

// --- the GEMMs met so far ----------------------------------------------------------------------------------

// Everything that the choice of an algorithm may depend on, in the library's terms: d[m, n] = a[m, k] b[k,
// n]. Compared as bytes, so it is zeroed before it is filled.
struct GemmKey {
  int64_t m, n, k, lda, ldb, ldc, ldd, ld_pre;
  int32_t operand_dtype, out_dtype, transpose_a, transpose_b, epilogue, no_workspace;
  uint32_t align_a, align_b, align_c, align_d; // bytes: powers of two, at most 256
};

struct GemmPlan {
  GemmKey key;
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, c, d;
  cublasLtMatmulAlgo_t algorithm;
  bool possible, measured;
};

struct Gemms {
  enum { CANDIDATES = 12, ROUNDS = 3 };
  cublasLtHandle_t handle;
  GemmPlan *plans;
  size_t count, capacity;
  bool measure;
  cudaEvent_t begin, end;
  unsigned long long *checksum; // on the device
};

void gemms_create(Backend *backend) {
  Gemms *p = cuda_state(backend)->gemms = static_cast<Gemms *>(calloc(1, sizeof(Gemms)));
  if (!p) fail("out of host memory for the CUDA backend");
  lt_check(cublasLtCreate(&p->handle), "starting");
  cuda_check(cudaEventCreate(&p->begin), "creating an event");
  cuda_check(cudaEventCreate(&p->end), "creating an event");
  cuda_check(cudaMalloc(reinterpret_cast<void **>(&p->checksum), sizeof *p->checksum),
             "allocating a checksum");
  const char *measure = getenv("LCE_MATMUL_TUNE");
  p->measure = !measure || strcmp(measure, "0") != 0;
}

void gemms_destroy(Gemms *p) {
  if (!p) return;
  for (size_t i = 0; i < p->count; i++) {
    cublasLtMatmulDescDestroy(p->plans[i].operation);
    for (cublasLtMatrixLayout_t layout : {p->plans[i].a, p->plans[i].b, p->plans[i].c, p->plans[i].d})
      cublasLtMatrixLayoutDestroy(layout);
  }
  if (p->handle) cublasLtDestroy(p->handle);
  cudaEventDestroy(p->begin);
  cudaEventDestroy(p->end);
  cudaFree(p->checksum);
  free(p->plans);
  free(p);
}

static cudaDataType_t lt_type(Dtype dtype) {
  return dtype == DTYPE_BF16 ? CUDA_R_16BF : dtype == DTYPE_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
}

static uint32_t alignment_of(const void *address) {
  uintptr_t bits = (uintptr_t)address | 256;
  return (uint32_t)(bits & (~bits + 1));
}

static cublasLtEpilogue_t lt_epilogue(GemmEpilogue epilogue) {
  static const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                                 CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                                 CUBLASLT_EPILOGUE_DGELU}; // in GemmEpilogue's order
  return epilogues[epilogue];
}

template <typename T>
static void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  lt_check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "describing a GEMM");
}

static bool has_bias(GemmEpilogue e) {
  return e == GEMM_BIAS || e == GEMM_BIAS_GELU;
}

static bool has_pre(GemmEpilogue e) {
  return e == GEMM_GELU || e == GEMM_BIAS_GELU || e == GEMM_GELU_DERIVATIVE;
}

static GemmKey key_of(const Gemm *p) {
  GemmKey key;
  memset(&key, 0, sizeof key);
  key.m = p->n, key.n = p->m, key.k = p->k;
  key.lda = p->right.stride, key.ldb = p->left.stride, key.ldd = p->out_stride;
  key.ldc = p->addend ? p->addend_stride : p->out_stride;
  key.ld_pre = has_pre(p->epilogue) ? p->pre_stride : 0;
  key.operand_dtype = p->operand_dtype, key.out_dtype = p->out_dtype;
  key.transpose_a = p->right.transposed, key.transpose_b = p->left.transposed;
  key.epilogue = p->epilogue;
  key.no_workspace = p->stream != nullptr;
  key.align_a = alignment_of(p->right.data), key.align_b = alignment_of(p->left.data);
  key.align_c = alignment_of(p->addend ? p->addend : p->out), key.align_d = alignment_of(p->out);
  return key;
}

static cublasLtMatrixLayout_t layout(Dtype dtype, int64_t rows, int64_t columns, int64_t stride,
                                     bool transposed) {
  cublasLtMatrixLayout_t out;
  if (transposed) {
    int64_t swap = rows;
    rows = columns, columns = swap;
  }
  lt_check(cublasLtMatrixLayoutCreate(&out, lt_type(dtype), (uint64_t)rows, (uint64_t)columns, stride),
           "describing a matrix");
  return out;
}

static void describe(GemmPlan *plan) {
  const GemmKey &key = plan->key;
  Dtype operands = (Dtype)key.operand_dtype, out = (Dtype)key.out_dtype;
  GemmEpilogue epilogue = (GemmEpilogue)key.epilogue;
  lt_check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
  set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, lt_epilogue(epilogue));
  cudaDataType_t bias = lt_type(operands == DTYPE_E4M3 ? DTYPE_BF16 : operands);
  if (has_bias(epilogue)) set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias);
  if (has_pre(epilogue)) {
    set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, lt_type(operands));
    set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.ld_pre);
  }
  plan->a = layout(operands, key.m, key.k, key.lda, key.transpose_a);
  plan->b = layout(operands, key.k, key.n, key.ldb, key.transpose_b);
  plan->c = layout(out, key.m, key.n, key.ldc, false);
  plan->d = layout(out, key.m, key.n, key.ldd, false);
}

static void point_epilogue(GemmPlan *plan, const Gemm *p) {
  if (has_bias(p->epilogue)) set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p->bias);
  if (has_pre(p->epilogue)) set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p->pre);
  if (p->operand_dtype != DTYPE_E4M3) return;
  set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p->right_scale);
  set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p->left_scale);
}

// The library's suggestions, best first by its estimate.
static int suggestions(Gemms *gemms, const GemmPlan *plan, cublasLtMatmulHeuristicResult_t *results,
                       int max) {
  cublasLtMatmulPreference_t preference;
  lt_check(cublasLtMatmulPreferenceCreate(&preference), "describing a preference");
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
             "describing a preference");
  };
  // There is one workspace, and concurrent GEMMs cannot share it.
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
         (uint64_t)(plan->key.no_workspace ? 0 : CUDA_GEMM_WORKSPACE_BYTES));
  // Split-K partials are added in fp32 in the workspace, in a fixed order: not in the output's bf16 or by atomics.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->key.align_a);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->key.align_b);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->key.align_c);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->key.align_d);
  int found = 0;
  cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gemms->handle, plan->operation, plan->a, plan->b,
                                                         plan->c, plan->d, preference, max, results, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return 0;
  int usable = 0;
  for (int i = 0; i < found; i++)
    if (results[i].state == CUBLAS_STATUS_SUCCESS) results[usable++] = results[i];
  return usable;
}

static cudaStream_t stream_of(Backend *backend, const Gemm *p) {
  return p->stream ? p->stream : cuda_stream(backend);
}

static cublasStatus_t execute(Backend *backend, const GemmPlan *plan, const Gemm *p,
                              const cublasLtMatmulAlgo_t *algorithm) {
  Gemms *gemms = cuda_state(backend)->gemms;
  float beta = p->addend ? 1.0f : 0.0f;
  return cublasLtMatmul(gemms->handle, plan->operation, &p->alpha, p->right.data, plan->a, p->left.data,
                        plan->b, &beta, p->addend ? p->addend : p->out, plan->c, p->out, plan->d, algorithm,
                        cuda_state(backend)->gemm_workspace, p->stream ? 0 : CUDA_GEMM_WORKSPACE_BYTES,
                        stream_of(backend, p));
}

// --- measuring ---------------------------------------------------------------------------------------------

// Adds up a hash of each element's place and bits. Integer addition commutes, so the order of the atomics
// does not matter.
template <typename Bits>
static __global__ void checksum_kernel(unsigned long long *sum, const Bits *data, int64_t stride,
                                       int64_t columns) {
  unsigned long long total = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    unsigned long long z = (blockIdx.x * (unsigned long long)columns + i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ data[blockIdx.x * stride + i]) * 0xBF58476D1CE4E5B9u;
    total += (z ^ (z >> 29)) * 0x94D049BB133111EBu;
  }
  atomicAdd(sum, total);
}

static void add_checksum(Backend *backend, const Gemm *p, const void *data, Dtype dtype, int64_t rows,
                         int64_t columns, int64_t stride) {
  unsigned long long *sum = cuda_state(backend)->gemms->checksum;
  if (dtype_bytes(dtype) == 2)
    checksum_kernel<<<(unsigned)rows, 256, 0, stream_of(backend, p)>>>(
        sum, static_cast<const uint16_t *>(data), stride, columns);
  else
    checksum_kernel<<<(unsigned)rows, 256, 0, stream_of(backend, p)>>>(
        sum, static_cast<const uint32_t *>(data), stride, columns);
}

// Of everything that the GEMM writes.
static unsigned long long checksum(Backend *backend, const Gemm *p) {
  unsigned long long *sum = cuda_state(backend)->gemms->checksum, value = 0;
  cuda_check(cudaMemsetAsync(sum, 0, sizeof *sum, stream_of(backend, p)), "clearing a checksum");
  add_checksum(backend, p, p->out, p->out_dtype, p->m, p->n, p->out_stride);
  if (has_pre(p->epilogue) && p->epilogue != GEMM_GELU_DERIVATIVE)
    add_checksum(backend, p, p->pre, p->operand_dtype, p->m, p->n, p->pre_stride);
  cuda_check_launch("a checksum");
  cuda_check(cudaMemcpyAsync(&value, sum, sizeof value, cudaMemcpyDeviceToHost, stream_of(backend, p)),
             "reading a checksum");
  cuda_check(cudaStreamSynchronize(stream_of(backend, p)), "measuring a GEMM");
  return value;
}

// Milliseconds of a run.
static float stopwatch(Backend *backend, const GemmPlan *plan, const Gemm *p,
                       const cublasLtMatmulAlgo_t *algorithm) {
  Gemms *gemms = cuda_state(backend)->gemms;
  float milliseconds = 0;
  cuda_check(cudaEventRecord(gemms->begin, stream_of(backend, p)), "measuring a GEMM");
  lt_check(execute(backend, plan, p, algorithm), "multiplying");
  cuda_check(cudaEventRecord(gemms->end, stream_of(backend, p)), "measuring a GEMM");
  cuda_check(cudaEventSynchronize(gemms->end), "measuring a GEMM");
  cuda_check(cudaEventElapsedTime(&milliseconds, gemms->begin, gemms->end), "measuring a GEMM");
  return milliseconds;
}

static bool aligned(const void *data, int64_t stride, Dtype dtype) {
  return !data || ((uintptr_t)data | (uintptr_t)stride * dtype_bytes(dtype)) % 16 == 0;
}

static bool all_aligned(const Gemm *p) {
  return aligned(p->left.data, p->left.stride, p->operand_dtype) &&
         aligned(p->right.data, p->right.stride, p->operand_dtype) &&
         aligned(p->pre, p->pre_stride, p->operand_dtype) && aligned(p->out, p->out_stride, p->out_dtype) &&
         aligned(p->addend, p->addend_stride, p->out_dtype);
}

// What a GEMM reads, made of our own: the caller's data when it is first met (zeros, a single row that is not) may make all
// orders of summation equal. Freed with the object.
struct RandomOperands {
  void *data[6] = {};
  int count = 0;

  ~RandomOperands() {
    for (void *d : data) cudaFree(d);
  }
  // In place of all that p reads; false where there is not the memory.
  bool take(cudaStream_t stream, Gemm *p) {
    Dtype type = p->operand_dtype, of_bias = type == DTYPE_E4M3 ? DTYPE_BF16 : type;
    return fill(stream, DTYPE_F32, 1, &p->left_scale) && fill(stream, DTYPE_F32, 1, &p->right_scale) &&
           fill(stream, type, p->left.stride * (p->left.transposed ? p->k : p->m), &p->left.data) &&
           fill(stream, type, p->right.stride * (p->right.transposed ? p->n : p->k), &p->right.data) &&
           fill(stream, p->out_dtype, p->m * p->addend_stride, &p->addend) &&
           (p->epilogue == GEMM_GELU_DERIVATIVE ? fill(stream, type, p->m * p->pre_stride, &p->pre)
                                                : fill(stream, of_bias, p->n, &p->bias));
  }

private:
  template <typename P> bool fill(cudaStream_t stream, Dtype dtype, int64_t elements, P *pointer);
};

static __global__ void random_kernel(uint32_t *words, int64_t count, uint64_t key, uint32_t keep,
                                     uint32_t set) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < count) words[i] = ((uint32_t)counter_bits(key, (uint64_t)i) & keep) | set;
}

// Of either sign, with magnitudes from 0.5 to 2, in e4m3 up to 2.
template <typename P>
bool RandomOperands::fill(cudaStream_t stream, Dtype dtype, int64_t elements, P *pointer) {
  uint32_t keep = 0xBFBFBFBF, set = 0; // e4m3
  if (dtype == DTYPE_BF16) keep = 0x80FF80FF, set = 0x3F003F00;
  if (dtype == DTYPE_F32) keep = 0x80FFFFFF, set = 0x3F000000;
  int64_t words = ceil_div(elements * (int64_t)dtype_bytes(dtype), 4);
  if (!*pointer) return true; // absent
  if (cudaMalloc(&data[count], (size_t)words * 4) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  random_kernel<<<(unsigned)ceil_div(words, 256), 256, 0, stream>>>(
      static_cast<uint32_t *>(data[count]), words, counter_key((uint64_t)count, 0), keep, set);
  cuda_check_launch("random operands");
  *pointer = data[count++];
  return true;
}

// An algorithm among those measured, and its time: the minimum of its runs, or the sum.
struct Candidate {
  cublasLtMatmulAlgo_t algorithm;
  float milliseconds;
};

static const Candidate *fastest(const Candidate *candidates, int count) {
  const Candidate *best = candidates;
  for (int i = 1; i < count; i++)
    if (candidates[i].milliseconds < best->milliseconds) best = &candidates[i];
  return best;
}

// The fastest of the suggestions that give the first one's bits, written and, where a call may ask for that, added.
static void measure(Backend *backend, GemmPlan *plan, Gemm p) {
  Gemms *gemms = cuda_state(backend)->gemms;
  cublasLtMatmulHeuristicResult_t results[Gemms::CANDIDATES];
  Candidate candidates[Gemms::CANDIDATES];
  int found = suggestions(gemms, plan, results, Gemms::CANDIDATES), count = 0;
  unsigned long long wanted = 0;
  RandomOperands operands;
  plan->measured = true;
  const bool adds = !p.addend && p.epilogue == GEMM_PLAIN &&
                    (p.out_dtype == DTYPE_F32 || all_aligned(&p));     // as cublaslt_gemm
  if (found < 2 || !operands.take(stream_of(backend, &p), &p)) return; // the first choice serves
  point_epilogue(plan, &p);
  // Gradients of weights are written once and added to ever after, so the addition is timed; the run that was asked
  // for overwrites what it leaves. In fp32 alone: the library may refuse to add to bf16 (cublaslt_gemm).
  Gemm added = p;
  if (adds) added.addend = p.out, added.addend_stride = p.out_stride;
  const Gemm timed = p.left.transposed && p.out_dtype == DTYPE_F32 ? added : p;
  for (int i = 0; i < found; i++) {
    if (execute(backend, plan, &p, &results[i].algo) != CUBLAS_STATUS_SUCCESS) continue;
    unsigned long long bits = checksum(backend, &p);
    if (adds && execute(backend, plan, &added, &results[i].algo) != CUBLAS_STATUS_SUCCESS) continue;
    if (adds) bits = 31 * bits + checksum(backend, &added);
    if (count == 0) wanted = bits;
    if (bits == wanted) candidates[count++].algorithm = results[i].algo;
  }
  if (count < 2) return;
  // A rested device is fast for some milliseconds; then large GEMMs bring it to its power limit. In a step they run
  // there among others, so runs of the candidates alternate, at a clock that all of them determine. One
  // algorithm on its own runs at a clock of its own, which favours another than the fastest in a step: on an H200, for
  // the LM head's dW, by 5 to 10% of its time. Rounds before number 0 do not count: the first may load code.
  bool large = 2.0 * (double)p.m * (double)p.n * (double)p.k >= SUSTAINED_FLOPS;
  int warm_up = 0, rounds = Gemms::ROUNDS;
  if (large) {
    constexpr float WARM_UP = 150, SUSTAINED = 300; // milliseconds
    float round_time = (float)count * stopwatch(backend, plan, &p, &candidates[0].algorithm);
    warm_up = (int)ceilf(WARM_UP / round_time);
    rounds = (int)fmaxf(Gemms::ROUNDS, ceilf(SUSTAINED / round_time));
  }
  for (int round = -warm_up; round < rounds; round++)
    for (int i = 0; i < count; i++) {
      float now = stopwatch(backend, plan, &timed, &candidates[i].algorithm),
            *time = &candidates[i].milliseconds;
      *time = round <= 0 ? now : large ? *time + now : fminf(*time, now);
    }
  plan->algorithm = fastest(candidates, count)->algorithm;
}

// Whether running the GEMM several times, here and now, leaves the same result as running it once.
static bool repeatable(Backend *backend, const Gemm *p) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream_of(backend, p), &capture),
             "querying whether the stream is captured");
  return capture == cudaStreamCaptureStatusNone && p->addend != p->out;
}

// Whether equal results mean an equal order of summation. Rounding to bf16 hides all but one in some ten thousand of
// the differences that another order makes in fp32: a small bf16 result agrees by chance, on this step's data and not
// on a later one's. Small GEMMs are not worth measuring anyway.
static bool conclusive(const Gemm *p) {
  return p->m * p->n >= (p->out_dtype == DTYPE_BF16 ? 1 << 20 : 1 << 14) && p->k >= 64;
}

static GemmPlan *plan_of(Backend *backend, const Gemm *p) {
  Gemms *gemms = cuda_state(backend)->gemms;
  GemmKey key = key_of(p);
  for (size_t i = 0; i < gemms->count; i++)
    if (memcmp(&gemms->plans[i].key, &key, sizeof key) == 0) return &gemms->plans[i];
  if (gemms->count == gemms->capacity) {
    gemms->capacity = gemms->capacity ? 2 * gemms->capacity : 64;
    gemms->plans = static_cast<GemmPlan *>(realloc(gemms->plans, gemms->capacity * sizeof *gemms->plans));
    if (!gemms->plans) fail("out of host memory for the GEMMs' algorithms");
  }
  GemmPlan *plan = &gemms->plans[gemms->count++];
  memset(plan, 0, sizeof *plan);
  plan->key = key;
  describe(plan);
  point_epilogue(plan, p);
  cublasLtMatmulHeuristicResult_t first;
  plan->possible = suggestions(gemms, plan, &first, 1) > 0;
  if (plan->possible) plan->algorithm = first.algo;
  return plan;
}

// False when the library cannot do this GEMM, or not accurately.
static bool cublaslt_gemm(Backend *backend, const Gemm *p) {
  if (p->operand_dtype == DTYPE_F32 && has_pre(p->epilogue)) return false;
  if ((p->addend || p->epilogue != GEMM_PLAIN) && p->out_dtype == DTYPE_BF16 && !all_aligned(p)) return false;
  GemmPlan *plan = plan_of(backend, p);
  if (!plan->possible) return false;
  bool measuring = cuda_state(backend)->gemms->measure && conclusive(p) && repeatable(backend, p);
  if (!plan->measured && measuring) measure(backend, plan, *p);
  point_epilogue(plan, p);
  lt_check(execute(backend, plan, p, &plan->algorithm), "multiplying");
  return true;
}

// --- the plain GEMM ----------------------------------------------------------------------------------------

// A block makes a tile of 64 x 64, a thread every 16th row and column, and the tiles of the operands
// pass through shared memory 16 terms at a time.
static constexpr int TILE = 64, TERMS = 16;

// Rows [first, first + TILE) of an operand's [rows, k] and terms [term, term + TERMS), 0 beyond its ends.
// `along`: the terms of a row follow one another in memory.
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
  T *pre = static_cast<T *>(p.pre) + row * p.pre_stride + column;
  if (p.addend) value += to_float(static_cast<const TO *>(p.addend)[row * p.addend_stride + column]);
  if (p.bias) value += to_float(static_cast<const T *>(p.bias)[column]);
  if (p.epilogue == GEMM_GELU_DERIVATIVE) {
    value *= Gelu::derivative(to_float(*pre));
  } else if (p.pre) {
    *pre = from_float<T>(value);
    value = Gelu::value(value, 0);
  }
  static_cast<TO *>(p.out)[row * p.out_stride + column] = from_float<TO>(value);
}

template <typename T, typename TO> static __global__ void __launch_bounds__(256) plain_gemm_kernel(Gemm p) {
  __shared__ float left[TERMS][TILE + 1], right[TERMS][TILE + 1];
  const unsigned down =
      (unsigned)((p.m + TILE - 1) / TILE); // tiles; in one axis, for the other two are short
  int64_t first_row = (int64_t)(blockIdx.x % down) * TILE, first_column = (int64_t)(blockIdx.x / down) * TILE;
  int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int64_t term = 0; term < p.k; term += TERMS) {
    load_tile(left, static_cast<const T *>(p.left.data), p.left.stride, !p.left.transposed, first_row, p.m,
              term, p.k);
    load_tile(right, static_cast<const T *>(p.right.data), p.right.stride, p.right.transposed, first_column,
              p.n, term, p.k);
    __syncthreads();
    EACH (t, TERMS)
      EACH (i, 4)
        EACH (j, 4) sum[i][j] += left[t][y + 16 * i] * right[t][x + 16 * j];
    __syncthreads();
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      int64_t row = first_row + y + 16 * i, column = first_column + x + 16 * j;
      if (row < p.m && column < p.n) plain_epilogue<T, TO>(p, row, column, sum[i][j]);
    }
}

static void plain_gemm(Backend *backend, const Gemm *p) {
  unsigned grid = (unsigned)(ceil_div(p->m, TILE) * ceil_div(p->n, TILE));
  with_float(p->operand_dtype, [&](auto type) {
    with_float(p->out_dtype, [&](auto out_type) {
      plain_gemm_kernel<decltype(type), decltype(out_type)><<<grid, 256, 0, stream_of(backend, p)>>>(*p);
    });
  });
  cuda_check_launch("a plain GEMM");
}

// --- ragged ends -------------------------------------------------------------------------------------------

// The library's fast kernels move 16 bytes at a time along a matrix's contiguous axis. Where that axis is no multiple
// of 8 elements long, though its rows are aligned (a vocabulary of 50257 in rows of 50304), it falls back to kernels
// several times slower. So the last few terms, rows or columns of such a GEMM are a GEMM of their own.
enum { WHOLE = 8 };

static bool ragged(int64_t extent) {
  return extent % WHOLE != 0 && extent >= 64 * WHOLE;
}

static void skip(Operand *o, Dtype dtype, int64_t rows, int64_t columns) {
  int64_t elements = o->transposed ? columns * o->stride + rows : rows * o->stride + columns;
  o->data = static_cast<const char *>(o->data) + elements * (int64_t)dtype_bytes(dtype);
}

// Rows [rows, m) and columns [columns, n) of the GEMM.
static Gemm corner(const Gemm *p, int64_t rows, int64_t columns) {
  Gemm rest = *p;
  int64_t bytes = (int64_t)dtype_bytes(p->out_dtype);
  rest.m -= rows;
  rest.n -= columns;
  skip(&rest.left, p->operand_dtype, rows, 0);
  skip(&rest.right, p->operand_dtype, 0, columns);
  rest.out = static_cast<char *>(p->out) + (rows * p->out_stride + columns) * bytes;
  if (p->addend)
    rest.addend = static_cast<const char *>(p->addend) + (rows * p->addend_stride + columns) * bytes;
  return rest;
}

static void any_gemm(Backend *backend, const Gemm *p) {
  if (!cublaslt_gemm(backend, p)) plain_gemm(backend, p);
}

void cuda_gemm(Backend *backend, const Gemm *p) {
  if (p->m == 0 || p->n == 0) return;
  bool splits = p->operand_dtype == DTYPE_BF16 && p->epilogue == GEMM_PLAIN && all_aligned(p);
  Gemm bulk = *p, rest;
  if (splits && ragged(p->k) && (!p->left.transposed || p->right.transposed)) {
    bulk.k -= p->k % WHOLE;
    rest = *p;
    rest.k = p->k % WHOLE;
    skip(&rest.left, p->operand_dtype, 0, bulk.k);
    skip(&rest.right, p->operand_dtype, bulk.k, 0);
    rest.addend = p->out;
    rest.addend_stride = p->out_stride;
    cuda_gemm(backend, &bulk);
    plain_gemm(backend, &rest);
  } else if (splits && ragged(p->m) && p->left.transposed) {
    bulk.m -= p->m % WHOLE;
    rest = corner(p, bulk.m, 0);
    cuda_gemm(backend, &bulk);
    any_gemm(backend, &rest);
  } else if (splits && ragged(p->n)) {
    bulk.n -= p->n % WHOLE;
    rest = corner(p, 0, bulk.n);
    cuda_gemm(backend, &bulk);
    plain_gemm(backend, &rest);
  } else {
    any_gemm(backend, p);
  }
}

// --- the three GEMMs of a linear layer ---------------------------------------------------------------------

// GELU is in cuBLASLt's epilogues and SwiGLU in those of our own GEMMs on Hopper; else an activation is a kernel of its own.
void cuda_linear_forward(Backend *backend, const LinearForward *a) {
  bool bias = tensor_exists(a->bias), fused = a->activation == ACTIVATION_GELU;
  bool apart = a->activation && !fused;
  if (a->activation == ACTIVATION_SWIGLU && !bias && !a->in_out_layout &&
      hopper_swiglu(backend, a->out, a->pre_activation, a->x, a->weight))
    return;
  Gemm g = gemm_of(apart ? a->pre_activation : a->out, a->x, false, a->weight, !a->in_out_layout);
  g.addend = a->residual.data, g.addend_stride = a->residual.stride;
  g.epilogue = fused ? bias ? GEMM_BIAS_GELU : GEMM_GELU : bias ? GEMM_BIAS : GEMM_PLAIN;
  g.bias = a->bias.data;
  if (fused) g.pre = a->pre_activation.data, g.pre_stride = a->pre_activation.stride;
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
  if (fused) {
    g.epilogue = GEMM_GELU_DERIVATIVE;
    g.pre = a->pre_activation.data, g.pre_stride = a->pre_activation.stride;
  }
  cuda_gemm(backend, &g);
  ActivationBackward activation = {
      .activation = a->activation, .dx = a->dx, .dout = product, .x = a->pre_activation};
  if (a->activation && !fused) cuda_activation_backward(backend, &activation);
}

void cuda_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
  Gemm g = gemm_of(a->dweight, left, true, right, false, a->accumulate);
  g.alpha = a->alpha;
  if (g.k > 0)
    cuda_gemm(backend, &g);
  else if (!a->accumulate && tensor_exists(a->dweight))
    cuda_fill_zero(backend, &a->dweight);
  if (tensor_exists(a->dbias))
    column_sums(backend, a->dbias, a->dout, data_of<float>(a->coefficients), a->alpha, a->accumulate,
                data_of<float>(a->workspace));
}

void cuda_matmul_fp8(Backend *backend, const MatmulFp8 *a) {
  Gemm g = gemm_of(a->out, a->a.codes, false, a->b.codes, true);
  g.addend = a->residual.data, g.addend_stride = a->residual.stride;
  g.epilogue = tensor_exists(a->bias) ? GEMM_BIAS : GEMM_PLAIN;
  g.bias = a->bias.data;
  g.left_scale = a->a.amax.data, g.right_scale = a->b.amax.data, g.alpha = 1 / (E4M3_MAX * E4M3_MAX);
  if (g.m && g.n && !cublaslt_gemm(backend, &g))
    fail("cuBLASLt has no FP8 GEMM for this GPU and %s times the transpose of %s",
         tensor_text(a->a.codes).text, tensor_text(a->b.codes).text);
}
