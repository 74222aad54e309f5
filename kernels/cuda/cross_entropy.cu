// Logits become their own gradient in place, as in llm.c's fused classifier, with every term of the loss
// (kernels.h).
//
// One block of 1024 threads owns a row and reads it twice: once for the maximum and the sum of exponentials,
// kept together and rescaled when the maximum grows, then backwards for the gradient. A row of 128,256 bf16
// logits is 256 KB, and one block on each of 132 multiprocessors holds 34 MB of rows at a time, which the L2
// cache keeps: device memory is read once and written once. Measured on an H200 for the plain loss, counting
// those bytes: 3.1 TB/s at a vocabulary of 50,304, 2.9 at 128,256; two exponentials a logit keep it from
// more.
//
// The target stays out of the sums, so that its entry, p - 1 = -others / all, and the loss of a nearly
// certain token do not cancel. fp32 logits may leave bf16 gradients in their place: a block then walks
// forwards, all of it reading before any of it writes, and so never overwrites what is still to be read.
#include <float.h>

#include "kernels/cuda/cuda_common.cuh"

// The terms and the tokens' vectors, as the kernel reads them; absent is NULL.
struct Loss {
  float *loss;
  float *z_loss, *log_prob, *logsumexp, *entropy, *max_logit, *correct;
  int32_t *predicted;
  const int32_t *targets;
  const float *token_weights, *entropy_weights, *factor, *class_weights, *class_weight_sum;
  float epsilon, lambda, softcap, inverse_softcap, sharpness, alpha; // sharpness = 1 / T
  int vocab_size;
};

static __device__ __forceinline__ float read(const float *values, int64_t n, float otherwise) {
  return values ? values[n] : otherwise;
}

static __device__ __forceinline__ void tell(float *output, int64_t n, float value) {
  if (output) output[n] = value;
}

// --- sums over the others of a row -------------------------------------------------------------------------

// Of what was seen so far: with e = exp(v - max). It starts at the lowest finite number, so that a logit of
// minus infinity counts as 0 and only NaN gives NaN. The plain loss uses the first two.
struct Sums {
  float max = -FLT_MAX, e = 0;
  float e_v = 0;      // sum e (v - max)
  float weighted = 0; // sum w v
  int best = INT_MAX; // where the maximum is
};

template <bool PLAIN> static __device__ __forceinline__ void raise(Sums &s, float most) {
  float shrink = __expf(s.max - most);
  if (!PLAIN) s.e_v = (s.e_v + s.e * (s.max - most)) * shrink;
  s.e *= shrink;
  s.max = most;
}

template <bool PLAIN> static __device__ __forceinline__ Sums join(Sums a, Sums b) {
  if (!PLAIN) a.best = b.max > a.max || (b.max == a.max && b.best < a.best) ? b.best : a.best;
  float most = fmaxf(a.max, b.max);
  raise<PLAIN>(a, most);
  raise<PLAIN>(b, most);
  a.e += b.e;
  a.e_v += b.e_v;
  a.weighted += b.weighted;
  return a;
}

template <bool PLAIN> static __device__ __forceinline__ Sums warp_join(Sums s) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    Sums other;
    other.max = __shfl_xor_sync(~0u, s.max, offset);
    other.e = __shfl_xor_sync(~0u, s.e, offset);
    if (!PLAIN) {
      other.e_v = __shfl_xor_sync(~0u, s.e_v, offset);
      other.weighted = __shfl_xor_sync(~0u, s.weighted, offset);
      other.best = __shfl_xor_sync(~0u, s.best, offset);
    }
    s = join<PLAIN>(s, other);
  }
  return s;
}

template <bool PLAIN> static __device__ __forceinline__ Sums block_join(Sums s) {
  __shared__ Sums of_warp[32];
  s = warp_join<PLAIN>(s);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = s;
  __syncthreads();
  s = Sums();
  if (threadIdx.x % 32 < blockDim.x / 32) s = of_warp[threadIdx.x % 32];
  return warp_join<PLAIN>(s);
}

// Adds W entries from column i on; the target, if it is among them, is left out.
template <bool PLAIN, int W>
static __device__ __forceinline__ void add_entries(Sums &s, float (&v)[W], int i, int target,
                                                   const Loss &loss) {
  if (!PLAIN && loss.epsilon > 0) {
#pragma unroll
    for (int k = 0; k < W; k++) s.weighted += read(loss.class_weights, i + k, 1) * v[k];
  }
  if ((unsigned)(target - i) < W) {
#pragma unroll
    for (int k = 0; k < W; k++)
      if (i + k == target) v[k] = -INFINITY;
  }
  float most = s.max;
#pragma unroll
  for (int k = 0; k < W; k++) {
    if (!PLAIN && v[k] > most) s.best = i + k;
    most = fmaxf(most, v[k]);
  }
  raise<PLAIN>(s, most);
#pragma unroll
  for (int k = 0; k < W; k++) {
    float e = __expf(v[k] - most);
    s.e += e;
    if (!PLAIN) s.e_v += e == 0 ? 0 : e * (v[k] - most);
  }
}

// --- v and its slope ---------------------------------------------------------------------------------------

// tanh, off by 1e-7 at most: what a soft-cap of 30 makes of that is an fp32 logit's own rounding.
static __device__ __forceinline__ float fast_tanh(float x) {
  return 1 - __fdividef(2, 1 + __expf(2 * x));
}

// Of the entry in column j.
template <bool PLAIN, typename TB>
static __device__ __forceinline__ float v_of(float z, int j, const TB *bias, const Loss &loss) {
  if (!PLAIN && bias) z += to_float(bias[j]);
  if (!PLAIN && loss.softcap > 0) z = loss.softcap * fast_tanh(z * loss.inverse_softcap);
  return z * loss.sharpness;
}

// dv/dz = (1 - (u/c)^2) / T
template <bool PLAIN> static __device__ __forceinline__ float slope_of(float v, const Loss &loss) {
  if (PLAIN || loss.softcap == 0) return loss.sharpness;
  float ratio = v * loss.inverse_softcap / loss.sharpness;
  return loss.sharpness * (1 - ratio * ratio);
}

// --- a row -------------------------------------------------------------------------------------------------

// What makes the gradient of each entry, once the row's sums are there.
struct RowGradient {
  float anchor;
  float per_e, entropy_per_e, from_anchor; // e (per_e - entropy_per_e (v - anchor + from_anchor))
  float uniform;                           // - uniform w[j]
  float target;                            // the target's entry
};

static __device__ __forceinline__ RowGradient finish_row(Sums s, float target_v, int target, int64_t row,
                                                         const Loss &a) {
  bool ahead = target_v > s.max || (target_v == s.max && target < s.best);
  float anchor = fmaxf(target_v, s.max), shift = s.max - anchor, shrink = __expf(shift);
  if (isnan(target_v)) anchor = target_v;
  float others = s.e * shrink, e_v = (s.e_v + s.e * shift) * shrink;
  float target_e = expf(target_v - anchor), offset = anchor - target_v, all = others + target_e;
  float nll = target_e == 1 ? log1pf(others) : offset + logf(all), lse = target_v + nll;
  float w = read(a.class_weights, target, 1), weight_sum = read(a.class_weight_sum, 0, (float)a.vocab_size);
  float share = a.epsilon / (float)a.vocab_size;
  float entropy = logf(all) - (e_v - target_e * offset) / all;
  if (threadIdx.x == 0) {
    float smooth = a.epsilon > 0 ? share * (weight_sum * lse - s.weighted) : 0;
    a.loss[row] = (1 - a.epsilon) * w * nll + smooth;
    tell(a.z_loss, row, a.lambda * lse * lse);
    tell(a.log_prob, row, -nll);
    tell(a.logsumexp, row, lse);
    tell(a.entropy, row, entropy);
    tell(a.max_logit, row, anchor);
    int predicted = ahead || s.best == INT_MAX ? target : s.best;
    if (a.predicted) a.predicted[row] = predicted;
    tell(a.correct, row, predicted == target);
  }
  float alpha = a.alpha * read(a.factor, 0, 1), of_entropy = alpha * read(a.entropy_weights, row, 0);
  float weight = alpha * read(a.token_weights, row, 1), own = weight * (1 - a.epsilon) * w;
  float spread = weight * (share * weight_sum + 2 * a.lambda * lse), p = target_e / all;
  RowGradient g;
  g.anchor = anchor;
  g.per_e = (own + spread) / all;
  g.entropy_per_e = of_entropy / all;
  g.from_anchor = anchor - lse + entropy;
  g.uniform = weight * share;
  g.target = spread * p - own * (others / all) - g.uniform * w - of_entropy * p * (target_v - lse + entropy);
  return g;
}

static __device__ void ignore_row(int64_t row, const Loss &a) {
  a.loss[row] = 0;
  float *const outputs[] = {a.z_loss, a.log_prob, a.logsumexp, a.entropy, a.max_logit, a.correct};
  for (float *output : outputs) tell(output, row, 0);
  if (a.predicted) a.predicted[row] = 0;
}

// dlogits is NULL, or logits in TG; both strides are in elements.
template <typename T, typename TG, typename TB, int W, bool PLAIN>
static __global__ void __launch_bounds__(1024, 1)
    cross_entropy_kernel(T *logits, int64_t stride, TG *dlogits, int64_t dstride, const TB *bias,
                         const __grid_constant__ Loss a) {
  int64_t row = blockIdx.x;
  int target = a.targets[row], step = blockDim.x * W, first = threadIdx.x * W;
  int body = a.vocab_size / W * W,
      tail = body + threadIdx.x; // whole groups, then one element for each thread
  logits += row * stride;
  if (dlogits) dlogits += row * dstride;
  if (target == IGNORE_INDEX) {
    float zero[W] = {};
    if (threadIdx.x == 0) ignore_row(row, a);
    if (!dlogits) return;
    for (int i = first; i < body; i += step) store(dlogits + i, zero);
    if (tail < a.vocab_size) dlogits[tail] = from_float<TG>(0);
    return;
  }
  float target_v = v_of<PLAIN>(to_float(logits[target]), target, bias, a); // before anybody writes
  float tail_v[1] = {tail < a.vocab_size ? v_of<PLAIN>(to_float(logits[tail]), tail, bias, a) : -INFINITY};

  Sums s;
  int last = first;
#pragma unroll 4
  for (int i = first; i < body; i += step) {
    float v[W];
    load(v, logits + i);
#pragma unroll
    for (int k = 0; k < W; k++) v[k] = v_of<PLAIN>(v[k], i + k, bias, a);
    add_entries<PLAIN>(s, v, i, target, a);
    last = i;
  }
  float kept = tail_v[0];
  if (tail < a.vocab_size) add_entries<PLAIN>(s, tail_v, tail, target, a);
  s = block_join<PLAIN>(s);
  RowGradient g = finish_row(s, target_v, target, row, a);
  if (!dlogits) return;

  auto gradient = [&](float v, int j) {
    if (j == target) return g.target * slope_of<PLAIN>(v, a);
    float distance = v - g.anchor, e = __expf(distance), d = e * g.per_e;
    if (PLAIN) return d * a.sharpness;
    if (e > 0) d -= e * g.entropy_per_e * (distance + g.from_anchor);
    return (d - g.uniform * read(a.class_weights, j, 1)) * slope_of<PLAIN>(v, a);
  };
  auto group = [&](float(&v)[W], int i) {
#pragma unroll
    for (int k = 0; k < W; k++) v[k] = gradient(v_of<PLAIN>(v[k], i + k, bias, a), i + k);
  };
  if (sizeof(T) == sizeof(TG)) {
    if (tail < a.vocab_size) dlogits[tail] = from_float<TG>(gradient(kept, tail));
    if (first >= body) return;
#pragma unroll 4
    for (int i = last; i >= 0; i -= step) {
      float v[W];
      load(v, logits + i);
      group(v, i);
      store(dlogits + i, v);
    }
  } else {
    for (int begin = 0; begin < body; begin += step) {
      int i = begin + first;
      float v[W];
      if (i < body) load(v, logits + i);
      __syncthreads();
      if (i >= body) continue;
      group(v, i);
      store(dlogits + i, v);
    }
    if (tail < a.vocab_size) dlogits[tail] = from_float<TG>(gradient(kept, tail));
  }
}

static Loss loss_of(const CrossEntropyInPlace *a) {
  const LossTerms *t = &a->terms;
  Loss l;
  l.loss = data_of<float>(a->loss);
  l.z_loss = data_of<float>(a->outputs.z_loss);
  l.log_prob = data_of<float>(a->outputs.log_prob);
  l.logsumexp = data_of<float>(a->outputs.logsumexp);
  l.entropy = data_of<float>(a->outputs.entropy);
  l.max_logit = data_of<float>(a->outputs.max_logit);
  l.correct = data_of<float>(a->outputs.correct);
  l.predicted = data_of<int32_t>(a->outputs.predicted);
  l.targets = data_of<int32_t>(a->targets);
  l.token_weights = data_of<float>(a->token_weights);
  l.entropy_weights = data_of<float>(a->entropy_weights);
  l.factor = data_of<float>(a->factor);
  l.class_weights = data_of<float>(t->class_weights);
  l.class_weight_sum = data_of<float>(t->class_weight_sum);
  l.epsilon = t->label_smoothing;
  l.lambda = t->z_loss;
  l.softcap = t->softcap;
  l.inverse_softcap = t->softcap > 0 ? 1 / t->softcap : 0;
  l.sharpness = t->temperature > 0 ? 1 / t->temperature : 1;
  l.alpha = a->alpha;
  l.vocab_size = (int)a->logits.shape[1];
  return l;
}

void cuda_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a) {
  int64_t rows = a->logits.shape[0], vocab_size = a->logits.shape[1];
  if (rows == 0) return;
  Loss loss = loss_of(a);
  bool plain = loss.softcap == 0 && loss.epsilon == 0 && !loss.entropy_weights && !loss.entropy &&
               !loss.max_logit && !loss.predicted && !loss.correct && !tensor_exists(a->bias);
  with_float(a->logits.dtype, [&](auto type) {
    using T = decltype(type);
    auto launch = [&](auto gradient_type) {
      using TG = decltype(gradient_type);
      bool aligned = rows_start_aligned(a->logits, WIDTH<T>) &&
                     (!tensor_exists(a->dlogits) || rows_start_aligned(a->dlogits, WIDTH<T>));
      with_bool(aligned, [&](auto wide) {
        constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
        int threads = row_threads(ceil_div(vocab_size, W), 1024);
        auto run = [&](auto kernel, auto bias) {
          kernel<<<(unsigned)rows, threads, 0, cuda_stream(backend)>>>(
              data_of<T>(a->logits), a->logits.stride, data_of<TG>(a->dlogits), a->dlogits.stride, bias,
              loss);
        };
        if (plain)
          run(cross_entropy_kernel<T, TG, float, W, true>, (const float *)nullptr);
        else if (a->bias.dtype == DTYPE_BF16)
          run(cross_entropy_kernel<T, TG, bf16, W, false>, (const bf16 *)a->bias.data);
        else
          run(cross_entropy_kernel<T, TG, float, W, false>, (const float *)a->bias.data);
      });
    };
    if (tensor_exists(a->dlogits) && a->dlogits.dtype == DTYPE_BF16)
      launch(bf16());
    else
      launch(T());
  });
  cuda_check_launch("cross_entropy_in_place");
}

// --- the mean's factor -------------------------------------------------------------------------------------

static __global__ void __launch_bounds__(1024)
    loss_factor_kernel(float *factor, const int32_t *targets, int64_t tokens, const float *class_weights) {
  float sum = 0; // a whole number, or a sum of up to a few hundred weights a thread
  for (int64_t n = threadIdx.x; n < tokens; n += blockDim.x)
    if (targets[n] != IGNORE_INDEX) sum += read(class_weights, targets[n], 1);
  sum = block_sum(sum);
  if (threadIdx.x == 0) *factor = sum != 0 ? 1 / sum : 0;
}

void cuda_loss_factor(Backend *backend, const LossFactor *a) {
  loss_factor_kernel<<<1, 1024, 0, cuda_stream(backend)>>>(data_of<float>(a->factor),
                                                           data_of<int32_t>(a->targets), a->targets.shape[0],
                                                           data_of<float>(a->class_weights));
  cuda_check_launch("loss_factor");
}

// --- targets from outside ----------------------------------------------------------------------------------

template <typename Id>
static __global__ void read_targets_kernel(int32_t *targets, float *loss, const Id *ids, int64_t tokens,
                                           int64_t vocab_size) {
  int64_t n = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (n >= tokens) return;
  int64_t id = ids[n];
  bool counts = id >= 0 && id < vocab_size;
  if (targets) targets[n] = counts ? (int32_t)id : IGNORE_INDEX;
  if (loss && !counts && id != IGNORE_INDEX) loss[n] = NAN;
}

void cuda_read_targets(Backend *backend, const ReadTargets *a) {
  int64_t tokens = a->ids.shape[0];
  if (tokens == 0) return;
  auto launch = [&](auto id) {
    read_targets_kernel<<<(unsigned)ceil_div(tokens, 256), 256, 0, cuda_stream(backend)>>>(
        data_of<int32_t>(a->targets), data_of<float>(a->loss), data_of<decltype(id)>(a->ids), tokens,
        a->vocab_size);
  };
  if (a->ids.dtype == DTYPE_I64)
    launch(int64_t());
  else
    launch(int32_t());
  cuda_check_launch("read_targets");
}
