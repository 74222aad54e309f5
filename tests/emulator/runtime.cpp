// The emulator's CUDA runtime and cuBLASLt (emulator.h): memory is the host's, and every call is synchronous.
#include "tests/emulator/emulator.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <time.h>

#include <map>
#include <set>
#include <vector>

// --- the runtime -------------------------------------------------------------------------------------------

static std::map<const char *, size_t> allocations;

// A function that does this and succeeds.
#define RUNTIME(name, parameters, ...)                                                                       \
  cudaError_t name parameters {                                                                              \
    __VA_ARGS__;                                                                                             \
    return cudaSuccess;                                                                                      \
  }

extern "C" {

cudaError_t cudaMalloc(void **out, size_t bytes) {
  *out = aligned_alloc(256, (bytes + 256) / 256 * 256);
  if (!*out) return cudaErrorMemoryAllocation;
  allocations[static_cast<char *>(*out)] = bytes;
  return cudaSuccess;
}
RUNTIME(cudaFree, (void *data), allocations.erase(static_cast<char *>(data)), free(data))
cudaError_t cudaMallocHost(void **out, size_t bytes) {
  *out = malloc(bytes);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
RUNTIME(cudaFreeHost, (void *data), free(data))
RUNTIME(cudaHostRegister, (void *, size_t, unsigned))
RUNTIME(cudaHostUnregister, (void *))
RUNTIME(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t),
        memmove(to, from, bytes))
RUNTIME(cudaMemsetAsync, (void *to, int value, size_t bytes, cudaStream_t), memset(to, value, bytes))
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  size_t used = 0;
  for (auto &[data, bytes] : allocations) used += bytes;
  *total = (size_t)16 << 30, *available = *total - used;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *at) {
  auto after = allocations.upper_bound(static_cast<const char *>(at));
  bool known = after != allocations.begin() && (--after, at < after->first + after->second);
  memset(out, 0, sizeof *out);
  out->type = known ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

RUNTIME(cudaDriverGetVersion, (int *version), *version = CUDART_VERSION)
RUNTIME(cudaRuntimeGetVersion, (int *version), *version = CUDART_VERSION)
RUNTIME(cudaGetDeviceCount, (int *count), *count = 1)
RUNTIME(cudaGetDevice, (int *device), *device = 0)
RUNTIME(cudaSetDevice, (int))
RUNTIME(cudaDeviceGetAttribute, (int *value, cudaDeviceAttr attribute, int),
        *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
                 : attribute == cudaDevAttrMultiProcessorCount  ? emulator::MULTIPROCESSORS
                                                                : 0)
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "emulated GPU");
  out->major = 9, out->multiProcessorCount = emulator::MULTIPROCESSORS,
  out->totalGlobalMem = (size_t)16 << 30;
  return cudaSuccess;
}
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
        (int *count, const void *, int, size_t, unsigned), *count = 1)
RUNTIME(cudaGetLastError, ())
const char *cudaGetErrorString(cudaError_t) {
  return "an error";
}
const char *cudaGetErrorName(cudaError_t) {
  return "cudaError";
}

RUNTIME(cudaDeviceGetStreamPriorityRange, (int *lowest, int *highest), *lowest = 0, *highest = -1)
RUNTIME(cudaStreamCreateWithPriority, (cudaStream_t * out, unsigned, int),
        *out = static_cast<cudaStream_t>(malloc(1)))
RUNTIME(cudaStreamDestroy, (cudaStream_t stream), free(stream))
RUNTIME(cudaStreamSynchronize, (cudaStream_t))
RUNTIME(cudaStreamWaitEvent, (cudaStream_t, cudaEvent_t, unsigned))
RUNTIME(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus *status),
        *status = cudaStreamCaptureStatusNone)
// An event is the time it was recorded.
RUNTIME(cudaEventCreate, (cudaEvent_t * out), *out = static_cast<cudaEvent_t>(calloc(1, sizeof(timespec))))
RUNTIME(cudaEventCreateWithFlags, (cudaEvent_t * out, unsigned), cudaEventCreate(out))
RUNTIME(cudaEventDestroy, (cudaEvent_t event), free(event))
RUNTIME(cudaEventRecord, (cudaEvent_t event, cudaStream_t),
        clock_gettime(CLOCK_MONOTONIC, reinterpret_cast<timespec *>(event)))
RUNTIME(cudaEventSynchronize, (cudaEvent_t))
RUNTIME(cudaEventQuery, (cudaEvent_t))
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  auto *from = reinterpret_cast<timespec *>(begin), *to = reinterpret_cast<timespec *>(end);
  *milliseconds = (float)(to->tv_sec - from->tv_sec) * 1e3f + (float)(to->tv_nsec - from->tv_nsec) * 1e-6f;
  return cudaSuccess;
}

} // extern "C"

// --- cuBLASLt ----------------------------------------------------------------------------------------------

// A caller's settings, by attribute.
struct Settings {
  std::map<int, std::vector<char>> values;
  void set(int attribute, const void *value, size_t bytes) {
    auto *from = static_cast<const char *>(value);
    values[attribute].assign(from, from + bytes);
  }
  template <typename T> T get(int attribute, T otherwise) const {
    auto found = values.find(attribute);
    T out = otherwise;
    if (found != values.end()) memcpy(&out, found->second.data(), sizeof out);
    return out;
  }
};

struct Layout {
  cudaDataType_t type;
  int64_t stride;
  uint64_t rows, columns;
  int64_t batch = 1, pitch = 0;
};

static float element(const void *data, cudaDataType_t type, int64_t i) {
  if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[i]);
  if (type == CUDA_R_8F_E4M3) return (float)static_cast<const __nv_fp8_e4m3 *>(data)[i];
  return static_cast<const float *>(data)[i];
}

static void put(void *data, cudaDataType_t type, int64_t i, float x) {
  if (type == CUDA_R_16BF)
    static_cast<__nv_bfloat16 *>(data)[i] = __float2bfloat16(x);
  else
    static_cast<float *>(data)[i] = x;
}

// tanh's GELU and its derivative.
static float gelu(float x, bool derivative) {
  float c = 0.7978845608f, t = tanhf(c * (x + 0.044715f * x * x * x));
  if (!derivative) return 0.5f * x * (1 + t);
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * c * (1 + 3 * 0.044715f * x * x);
}

#define CUBLAS(name, parameters, ...)                                                                        \
  cublasStatus_t name parameters {                                                                           \
    __VA_ARGS__;                                                                                             \
    return CUBLAS_STATUS_SUCCESS;                                                                            \
  }

extern "C" {

const char *cublasLtGetStatusString(cublasStatus_t) {
  return "an error";
}
CUBLAS(cublasLtCreate, (cublasLtHandle_t *))
CUBLAS(cublasLtDestroy, (cublasLtHandle_t))
CUBLAS(cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * out, cublasComputeType_t, cudaDataType_t),
       *out = reinterpret_cast<cublasLtMatmulDesc_t>(new Settings))
CUBLAS(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t settings),
       delete reinterpret_cast<Settings *>(settings))
CUBLAS(cublasLtMatmulDescSetAttribute,
       (cublasLtMatmulDesc_t settings, cublasLtMatmulDescAttributes_t attribute, const void *value,
        size_t bytes),
       reinterpret_cast<Settings *>(settings)->set(attribute, value, bytes))
CUBLAS(cublasLtMatrixLayoutCreate,
       (cublasLtMatrixLayout_t * out, cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t stride),
       *out = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, stride, rows, columns}))
CUBLAS(cublasLtMatrixLayoutSetAttribute,
       (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t),
       auto &l = *reinterpret_cast<Layout *>(layout);
       if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) l.batch = *static_cast<const int32_t *>(value);
       else l.pitch = *static_cast<const int64_t *>(value))
CUBLAS(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout),
       delete reinterpret_cast<Layout *>(layout))
CUBLAS(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t *))
CUBLAS(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t))
CUBLAS(cublasLtMatmulPreferenceSetAttribute,
       (cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t))
// One algorithm.
CUBLAS(cublasLtMatmulAlgoGetHeuristic,
       (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
        cublasLtMatmulHeuristicResult_t results[], int *found),
       memset(&results[0], 0, sizeof results[0]), *found = 1)

// d = epilogue(alpha op(a) op(b) + beta c), column-major, sums in fp32.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t) {
  const auto &settings = *reinterpret_cast<Settings *>(description);
  const Layout &la = *reinterpret_cast<Layout *>(a_layout), &lb = *reinterpret_cast<Layout *>(b_layout),
               &lc = *reinterpret_cast<Layout *>(c_layout), &ld = *reinterpret_cast<Layout *>(d_layout);
  if (ld.batch > 1) {
    Layout one[] = {la, lb, lc, ld};
    auto layout = [&](int i) { return reinterpret_cast<cublasLtMatrixLayout_t>(&one[i]); };
    auto matrix = [](const void *data, const Layout &l, int64_t i) {
      int64_t width = l.type == CUDA_R_16BF ? 2 : l.type == CUDA_R_8F_E4M3 ? 1 : 4;
      return (char *)data + i * l.pitch * width;
    };
    for (Layout &l : one) l.batch = 1;
    for (int64_t i = 0; i < ld.batch; i++)
      cublasLtMatmul(nullptr, description, alpha, matrix(a, la, i), layout(0), matrix(b, lb, i), layout(1),
                     beta, matrix(c, lc, i), layout(2), matrix(d, ld, i), layout(3), nullptr, nullptr, 0,
                     nullptr);
    return CUBLAS_STATUS_SUCCESS;
  }
  bool ta = settings.get(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) == CUBLAS_OP_T,
       tb = settings.get(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) == CUBLAS_OP_T;
  int64_t m = (int64_t)ld.rows, n = (int64_t)ld.columns, k = (int64_t)(ta ? la.rows : la.columns);
  auto epilogue = settings.get(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  const void *bias = settings.get<const void *>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  auto bias_type = settings.get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F),
       aux_type = settings.get(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, CUDA_R_32F);
  void *aux = settings.get<void *>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr);
  int64_t aux_stride = settings.get<int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0);
  float scale = *static_cast<const float *>(alpha), c_scale = *static_cast<const float *>(beta);
  for (int attribute : {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER})
    if (auto *operand_scale = settings.get<const float *>(attribute, nullptr)) scale *= *operand_scale;
  bool adds = epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
       is_gelu = epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  std::vector<float> a_values((size_t)(m * k)), sum((size_t)m); // [k, m]
  for (int64_t i = 0; i < m; i++)
    for (int64_t l = 0; l < k; l++)
      a_values[(size_t)(l * m + i)] = element(a, la.type, ta ? i * la.stride + l : l * la.stride + i);
  for (int64_t j = 0; j < n; j++) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t l = 0; l < k; l++) {
      float x = element(b, lb.type, tb ? l * lb.stride + j : j * lb.stride + l);
      for (int64_t i = 0; i < m; i++) sum[(size_t)i] += a_values[(size_t)(l * m + i)] * x;
    }
    for (int64_t i = 0; i < m; i++) {
      float x = scale * sum[(size_t)i];
      if (c_scale != 0) x += c_scale * element(c, lc.type, j * lc.stride + i);
      if (adds) x += element(bias, bias_type, i);
      if (is_gelu) {
        put(aux, aux_type, j * aux_stride + i, x);
        x = gelu(x, false);
      }
      if (epilogue == CUBLASLT_EPILOGUE_DGELU) x *= gelu(element(aux, aux_type, j * aux_stride + i), true);
      put(d, ld.type, j * ld.stride + i, x);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
