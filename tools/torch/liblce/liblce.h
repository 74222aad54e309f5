// LM head + loss for any language: linear_cross_entropy behind a plain C interface, as liblce.so (`make liblce.so`).
//
//   lce_context *lce = lce_create("cuda", 0, "bf16");
//   lce_args args = {.tokens = N, .hidden_size = H, .vocab_size = V, .x = x, .weight = w, .targets = y,
//                    .loss = loss, .dx = dx, .dweight = dw, .scale = 1, .mean = 1};
//   if (!lce || lce_linear_cross_entropy(lce, &args) || lce_synchronize(lce)) puts(lce_last_error());
//   lce_destroy(lce);
//
// Memory. The caller owns every tensor. Pointers are to the context's device (a GPU's memory, or the host's
// for "cpu"), tensors dense and row-major, each at a multiple of its elements' size. What is written (loss
// and what follows it in lce_args) shares no memory with another tensor of the call; what is only read may.
// On a GPU tensors are in use until the device has done the call's work. What the layer needs beyond them it
// allocates once for the largest call so far and keeps until lce_destroy; a call that needs more than all
// before it waits for them.
//
// Streams. A call on CUDA is asynchronous and takes its place on the caller's stream (args.stream), as a
// kernel launched there would: it reads what earlier work of that stream has written, later work of that
// stream finds its results, and no wait is needed; lce_synchronize waits if that is wanted. Calls of one
// context run one after the other, whatever their streams. On the CPU a call returns when it is done.
//
// Threads. Any number of threads may use contexts of their own, and a context may pass from thread to thread;
// one thread at a time may use it. On CUDA the context's device must be the current one (cudaSetDevice) of
// the thread that calls lce_linear_cross_entropy, or the call is refused. lce_create makes it that of its own
// thread, and leaves it so.
//
// Errors. Functions that can fail return 0 when all went well; otherwise lce_last_error says why in a
// sentence.
// - An argument that cannot be right (a size, an address, a shape, a term) is refused before anything is read
//   or written. So is a call whose memory cannot be had. The context is as good as before.
// - When CUDA fails while a call gives it work, the call waits, on the host, for what it has queued. So
//   nothing of it runs after its return and the stream may go on, but what the call writes is then
//   unspecified, dweight with accumulate included.
// - When a kernel fails on the device (most often over an address that is not the device's), a later call of
//   any CUDA user in the process shows it, lce_synchronize at the latest. CUDA then accepts no more work from
//   the process; lce_destroy still returns.
// - A target that is neither in [0, V) nor -100 is refused on the CPU, and on CUDA where check_targets asks
//   for it, since the host then waits for the caller's stream and reads the targets. Unchecked, nothing
//   outside of the tensors is read for it, the token counts as one with -100, but its loss is NaN.
#ifndef LCE_LIBLCE_H
#define LCE_LIBLCE_H

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

typedef struct lce_context lce_context;

// One call. N tokens, H hidden size, V vocabulary. "fp32/bf16" is the context's dtype. NULL stands for an
// absent tensor, and a struct of zeros for a call without any term. With z = x weight^T + bias for a token, y
// its target:
//
//   u       = c tanh(z / c)  (softcap c; none: u = z)        v = u / T  (temperature T)
//   p       = softmax(v)                                     lse = logsumexp(v)
//   loss    = (1 - e) w[y] (lse - v[y]) + e / V sum_j w[j] (lse - v[j])   (class_weights w, label_smoothing
//             e; as torch.nn.functional.cross_entropy with reduction="none")
//   zl      = z_loss lse^2
//   entropy = lse - sum_j p[j] v[j]                          log_sum_sq_probs = log sum_j p[j]^2
//
// label_smoothing under a softcap stores a chunk's logits, in the context's dtype; it excludes sample,
// batch_invariant, log_sum_sq_probs and a split head.
//
// sample makes the gradients cheaper and noisy, but unbiased: the softmax gradient (p of all but the targets,
// [N, V]) is cut into tiles of 128 tokens x 192 vocabulary entries. A tile whose probabilities add up to m is
// kept with probability min(1, m / sample), rounded to a power of two, and divided by it; the others are
// skipped. Losses and outputs stay the same to the bit. With 1 about nine tiles of ten are skipped in a
// trained model of 128,256 entries. Gradients stay exact where it would save no time: on GPUs other than
// Hopper, in fp32 on a GPU, in chunks below 128 tokens, without dweight, and with sample below 1/32. It
// excludes materialized, bias, softcap, entropy, log_sum_sq_probs, max_logit, correct and predicted, and dweight
// without dx.
typedef struct {
  int64_t tokens, hidden_size, vocab_size; // N, H, V: 1 to 2^31 - 65536 each
  int64_t chunk;                           // tokens at a time; 0 lets the library choose
  int32_t materialized;                    // hold the logits of all tokens, to compare with
  int32_t mean;                            // scale by 1 / (sum of the counted tokens' class weights) as well
  int32_t accumulate;                      // add to dweight and dbias rather than write them
  int32_t targets_int64;                   // targets are int64, as PyTorch's; otherwise int32
  // dweight has the context's dtype: in one chunk or with known_log_prob alone; not with sample,
  // label_smoothing, split head, accumulate
  int32_t narrow_dweight;
  // A row's loss, outputs and dx (without `mean`) have the same bits wherever it stands and whatever rows are
  // beside it, in chunks of any size. On the CPU, slowly, and in bf16 on Hopper with H a multiple of 8; not
  // with sample, materialized, split head and exps
  int32_t batch_invariant;
  int32_t check_targets; // 1: refuse targets out of range; -1: do not; 0: on the CPU
  float scale;           // of the gradients; 0 makes them 0, so say 1 for plain ones
  float label_smoothing, z_loss, softcap, temperature; // finite; 0: none (temperature: as 1, else from 1e-6)
  float sample;               // the mass from which a tile is kept; 0: exact gradients
  uint64_t sample_seed;       // of the draws, to be changed from call to call
  int64_t first_row, rows;    // which of V rows weight, bias and their gradients have (lce_join); 0, 0: all
  const void *x;              // fp32/bf16 [N, H]
  const void *weight;         // fp32/bf16 [V, H]
  const void *bias;           // fp32/bf16 [V], or NULL
  const void *targets;        // int32 or int64 [N], each in [0, V) or -100, which does not count
  const float *class_weights; // [V], or NULL
  const float *token_weights; // [N], or NULL: what each token's gradient is multiplied by
  // [N], or NULL: adds these times the entropies to the objective; with known_entropy, or materialized
  const float *entropy_weights;
  // Outputs of an earlier call of the same x, weight, bias, targets, softcap and temperature: this one then
  // computes the gradients alone, without a sum of dweight over chunks. known_entropy comes with entropy_weights.
  // There is no loss and no other output, no materialized, sample and label_smoothing.
  const float *known_log_prob, *known_entropy; // [N], or NULL
  // N (B + 4) bytes, or NULL: B is what V elements of the context's dtype take, rounded up to a multiple of
  // 128. A call for losses and outputs alone, with a chunk of N or more and no softcap, keeps exponentials in
  // them, and the call with known_log_prob, given the same, overwrites them and computes no logits again:
  // three GEMMs in all, not four.
  void *exps;
  float *loss;   // [N]: per token, before scale, mean and token weights; 0 of what does not count
  void *dx;      // fp32/bf16 [N, H], or NULL: not computed
  void *dweight; // fp32 [V, H] (see narrow_dweight), or NULL, likewise; without both the forward pass alone
  float *dbias;  // [V]; there when bias and dweight are
  // For each token, like the loss, or NULL: zl, log p[y], lse, entropy, max v[j], whether predicted is y.
  float *token_z_loss, *log_prob, *logsumexp, *entropy, *max_logit, *correct; // [N]
  float *log_sum_sq_probs; // [N], or NULL: as above; not with materialized
  int32_t *predicted;      // [N], or NULL: the first largest v's j
  void *stream; // a cudaStream_t of the context's device; NULL is its default stream. Ignored on the CPU
} lce_args;

// A context on "cpu" (dtype "fp32"; the ordinal is ignored) or on CUDA device `ordinal`, counted from 0
// (dtype "bf16" or "fp32"; compute capability 8.0 or later). The caller owns it, and gives it back to
// lce_destroy. NULL when there is none. On CUDA it takes 32 MiB for GEMMs and 16 MiB of pinned host memory,
// and waits for the device.
lce_context *lce_create(const char *device, int ordinal, const char *dtype);

// Waits for the context's calls, and frees it and what it holds, not the tensors. NULL is fine.
void lce_destroy(lce_context *context);

// A head whose rows are split over the R ranks of a job, each with a context of its own: the tokens that a
// rank gives to a call are its own, as many as every other rank's, and so are its losses and dx; dweight is
// the sum over all ranks' tokens. Of lce_args tokens, vocab_size (of the whole head), chunk, scale, the terms
// and which gradients are there must be the same on all ranks; bias and dbias are of the rank's rows, and
// mean is over all ranks' tokens. materialized is refused. The ranks' rows follow one another, in parts of any
// size. The last ranks may have none: first_row is then vocab_size and rows 0, weight and bias are any
// addresses that are not NULL, and dweight and dbias are NULL.
//
// The ranks exchange data by `collective`, which the library calls in the same order on every rank, within a
// call's thread. It works on the call's stream as a kernel launched there would, returns 0 when all went
// well, and must not longjmp or throw. x has `count` elements, of a dtype that is 0 for fp32, 1 for bf16, 2
// for int32:
//   LCE_ALL_REDUCE      out [count] = the sum of all ranks' x; out may be x
//   LCE_REDUCE_SCATTER  out [count / R] = the sum of all ranks' slice `rank` of x
//   LCE_ALL_GATHER      out [count R] = the ranks' x one after the other
typedef enum { LCE_ALL_REDUCE, LCE_REDUCE_SCATTER, LCE_ALL_GATHER } lce_collective_kind;
typedef int (*lce_collective)(void *user, int kind, void *out, const void *x, int64_t count, int dtype);

// Makes the context rank `rank` of `ranks`, before its first call. Returns 0, or 1 with lce_last_error.
int lce_join(lce_context *context, int rank, int ranks, lce_collective collective, void *user);

// Losses and the requested outputs, and those of the gradients that are given, with respect to x, weight and
// bias, of
//
//   scale * factor * sum_n (token_weights[n] (loss[n] + zl[n]) + entropy_weights[n] entropy[n])
//
// over the tokens that count, where factor is 1 or the mean's, and a weight that is absent 1, but an
// entropy's 0. Sums run in fp32 or wider; the same call on the same machine and build gives the same bits.
// Returns 0, or 1 with lce_last_error. args is read before the call returns, and not kept.
int lce_linear_cross_entropy(lce_context *context, const lce_args *args);

// Log-probabilities of ids that each token names, K or by offsets any number, lse and entropy: with v and p as above
//
//   log_probs[m] = v[ids[m]] - lse (0 for -100)        lse[n] = logsumexp(v), also of a row without ids
//
// and, given these and dlog_probs, the gradients of
//
//   sum_m dlog_probs[m] log_probs[m] + sum_n (dlse[n] lse[n] + dentropy[n] entropy[n])
//
// Memory is O(N + id_count) and a chunk. A token may have an id twice. The backward
// pass compares all pairs of a token's ids, which takes time where they are thousands.
typedef struct {
  int64_t tokens, hidden_size, vocab_size, chunk;     // as in lce_args
  int64_t id_count;                                   // N K, or with offsets the number of all ids, 1 or more
  int32_t ids_int64, narrow_dweight, batch_invariant; // as in lce_args
  int32_t check_ids;                                  // ids and offsets, as check_targets
  float softcap, temperature;
  const void *x, *weight, *bias; // as in lce_args; bias may be NULL
  const void *ids;               // int32 or int64 [id_count], each in [0, V) or -100, which does not count
  // [N + 1], rising from 0 to id_count: token n's ids are those from offsets[n] to offsets[n + 1] - 1. NULL:
  // each has K. Wrong ones that are not checked make results wrong, but reach nothing outside of the tensors.
  const int64_t *offsets;
  float *log_probs, *lse;       // [id_count], [N]: written, or with dlog_probs read
  float *entropy;               // [N], or NULL: likewise
  const float *dlog_probs;      // [id_count], or NULL: the forward pass alone
  const float *dlse, *dentropy; // [N], or NULL: 0; dentropy comes with entropy
  void *dx, *dweight;           // as in lce_args; written
  float *dbias;                 // [V]; there when bias and dweight are
  void *stream;                 // as in lce_args
} lce_ids_args;

// Returns 0, or 1 with lce_last_error. An id out of range, where it is not refused, counts as -100, but its
// log_probs are NaN. The head is whole, also in a context that has joined others.
int lce_ids_log_probs(lce_context *context, const lce_ids_args *args);

// The divergence of a student's distribution p = softmax(v) from a teacher's, q, for each token; v as above, each head
// with its own hidden size, bias, softcap and temperature, and one vocabulary:
//
//   kind 0: KL(q || p)   1: KL(p || q)   2: beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q
//
// and the gradients of sum_n token_weights[n] loss[n] with respect to the student's x, weight and bias. They hold no
// factor of temperature^2. Both heads' logits of a chunk are stored in the context's dtype. Where a bias of minus
// infinity masks an entry of one head alone, a divergence that is infinite is about 1e30.
typedef struct {
  int64_t tokens, hidden_size, teacher_hidden_size, vocab_size, chunk;
  int32_t kind, narrow_dweight; // narrow_dweight as in lce_args: in four chunks at most
  float beta;                   // of kind 2: above 0, below 1
  float softcap, temperature, teacher_softcap, teacher_temperature;
  const void *x, *weight, *bias;                         // as in lce_args; bias may be NULL
  const void *teacher_x, *teacher_weight, *teacher_bias; // likewise, with teacher_hidden_size
  const int32_t *mask;        // [N], or NULL: 0 does not count, and x is finite there
  const float *token_weights; // [N], or NULL: 1
  float *loss,
      *entropy;       // [N]: before token_weights, 0 of what does not count; the student's entropy, or NULL
  void *dx, *dweight; // as in lce_args; written
  float *dbias;       // [V]; there when bias and dweight are
  void *stream;       // as in lce_args
} lce_divergence_args;

// Returns 0, or 1 with lce_last_error. The heads are whole, also in a context that has joined others.
int lce_linear_divergence(lce_context *context, const lce_divergence_args *args);

// out[i] = factor[0] x[i] for i < count, rounded to out's dtype: for gradients whose factor is known only
// after the call. x, out: on the context's device, of dtype 0, fp32, or 1, bf16 (not on the CPU); out may be
// x, and a factor of 1 then costs no time. count 0 does nothing. factor: fp32 [1], there too. stream: as in
// lce_args. Returns 0, or 1 with lce_last_error.
int lce_scale(lce_context *context, void *out, int out_dtype, const void *x, int x_dtype, int64_t count,
              const float *factor, void *stream);

// Waits, on the host, until the context's calls are done, and with them what their streams held before.
// Returns 0, or 1 when one of them failed on the device, with lce_last_error. Needs no current device.
int lce_synchronize(lce_context *context);

// Bytes that the last call that went well held at its peak beyond the caller's tensors, without the fixed
// workspace of GEMMs that a context on CUDA has from the start; 0 for NULL and before the first such call.
int64_t lce_held_bytes(const lce_context *context);

// Why the calling thread's last call that failed did so, in one sentence; "" when none has. The text is the
// library's, and stays until the next failure in this thread.
const char *lce_last_error(void);

#if defined(__cplusplus)
}
#endif
#endif
