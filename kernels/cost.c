#include "kernels/cost.h"

#include <math.h>
#include <string.h>

#include "kernels/base/memory.h"

// --- amounts -----------------------------------------------------------------------------------------------

static double bytes_of(Tensor t) {
  return tensor_exists(t) ? (double)tensor_bytes(t) : 0;
}

// A GEMM of `rows` rows with each element of a matrix.
static Amount gemm(int64_t rows, Tensor matrix, int64_t inner, double operands, double epilogue) {
  return (Amount){.flops = 2.0 * (double)rows * (double)tensor_count(matrix),
                  .bytes = operands + epilogue,
                  .epilogue = epilogue,
                  .inner = inner};
}

static Amount attention(AttentionShape s, double passes) { // Q K^T and P V, half of either
  return (Amount){.flops = passes * 2 * (double)(s.batch * s.num_heads * s.head_dim) * (double)s.seq_len *
                           (double)s.seq_len};
}

static Amount moved(double bytes) {
  return (Amount){.bytes = bytes};
}

static double codes_bytes(Quantized x) {
  return bytes_of(x.codes) + bytes_of(x.transposed);
}

static Amount matmul_quantized_amount(const MatmulQuantized *m) {
  Amount a = gemm(m->a.codes.shape[0], m->b.codes, tensor_exists(m->bias) ? m->a.codes.shape[1] : 0,
                  bytes_of(m->a.codes) + bytes_of(m->b.codes), bytes_of(m->out) + bytes_of(m->residual));
  a.of_codes = a.flops;
  return a;
}

// The logits and, if given, dX.
static Amount logits_exp_amount(const LceLogitsExp *l) {
  bool backward = tensor_exists(l->dx_raw);
  Amount a = gemm(l->x.shape[0], l->weight, 0, (1 + backward) * bytes_of(l->weight), bytes_of(l->exps));
  if (tensor_exists(l->x_codes.codes)) a.of_codes = a.flops;
  a.flops *= 1 + backward;
  return a;
}

Amount amount_of(int op, const void *arguments) {
#define OF(name, Arguments, ...)                                                                             \
  case OP_##name: {                                                                                          \
    const Arguments *a = arguments;                                                                          \
    return __VA_ARGS__;                                                                                      \
  }
  switch (op) {
    OF(embedding_forward, EmbeddingForward, moved(2 * bytes_of(a->out)))
    OF(embedding_backward, EmbeddingBackward, moved(3 * bytes_of(a->dout)))
    OF(linear_forward, LinearForward,
       gemm(a->x.shape[0], a->weight, a->in_out_layout ? a->x.shape[1] : 0,
            bytes_of(a->x) + bytes_of(a->weight),
            bytes_of(a->out) + bytes_of(a->residual) + bytes_of(a->pre_activation)))
    OF(linear_backward_input, LinearBackwardInput,
       gemm(a->dout.shape[0], a->weight, a->in_out_layout ? a->dout.shape[1] : 0,
            bytes_of(a->dout) + bytes_of(a->weight),
            bytes_of(a->dx) * (1 + a->accumulate) + bytes_of(a->pre_activation) + bytes_of(a->dactivation)))
    OF(linear_backward_weight, LinearBackwardWeight,
       gemm(a->dout.shape[0], a->dweight, a->in_out_layout ? a->dout.shape[0] : 0,
            bytes_of(a->dout) + bytes_of(a->x), bytes_of(a->dweight) * (1 + a->accumulate)))
    OF(sum_columns, SumColumns, moved(bytes_of(a->x)))
    OF(matmul_quantized, MatmulQuantized, matmul_quantized_amount(a))
    OF(lce_logits_exp, LceLogitsExp, logits_exp_amount(a))
    OF(lce_sampled_gradients, LceSampledGradients,
       gemm(a->exps.shape[0] * (1 + tensor_exists(a->dweight)), a->weight, 0, 0, 0))
    OF(cross_entropy_in_place, CrossEntropyInPlace, moved(bytes_of(a->logits) * (1 + a->backward)))
    OF(attention_forward, AttentionForward, attention(a->shape, 1))
    OF(attention_backward, AttentionBackward, attention(a->shape, 2.5))
    OF(norm_forward, NormForward, moved(bytes_of(a->x) + bytes_of(a->out) + bytes_of(a->residual)))
    OF(norm_backward, NormBackward,
       moved(bytes_of(a->dx) * (1 + a->accumulate_dx) + bytes_of(a->dout) + bytes_of(a->x)))
    OF(activation_forward, ActivationForward,
       moved(bytes_of(a->x) + bytes_of(a->out) + codes_bytes(a->quantized)))
    OF(activation_backward, ActivationBackward,
       moved(bytes_of(a->x) + bytes_of(a->dx) + bytes_of(a->dout) + codes_bytes(a->quantized)))
    OF(rope, Rope, moved(2 * bytes_of(a->qkv)))
    OF(quantize, Quantize, moved(bytes_of(a->x) * (1 + !a->out.amax_known) + codes_bytes(a->out)))
    OF(quantize_rows, QuantizeRows, moved(bytes_of(a->x) + bytes_of(a->out.codes)))
    OF(adamw, Update,
       moved(bytes_of(a->grad) +
             2 * (bytes_of(a->weight) + bytes_of(a->master) + bytes_of(a->m) + bytes_of(a->v))))
    OF(nesterov, Update, moved(bytes_of(a->grad) + 2 * bytes_of(a->m) + bytes_of(a->weight)))
    OF(batched_gemm, BatchedGemm, gemm(a->count * a->out.first.shape[0], a->right.first, 0, 0, 0))
    OF(sgd, Update, moved(bytes_of(a->grad) + 2 * (bytes_of(a->weight) + bytes_of(a->master))))
    OF(sum_elements, SumElements, moved(bytes_of(a->x)))
    OF(fill_zero, Tensor, moved(bytes_of(*a)))
    OF(all_reduce, Collective, moved(bytes_of(a->x)))
    OF(reduce_scatter, Collective, moved(bytes_of(a->x)))
    OF(all_gather, Collective, moved(bytes_of(a->out)))
    OF(broadcast_rank_0, Collective, moved(bytes_of(a->x)))
    OF(copy_in, Copy, moved(bytes_of(a->x)))
    OF(copy_out, Copy, moved(bytes_of(a->x)))
  default:
    return (Amount){0};
  }
#undef OF
}

StreamKind stream_of(int op, const void *arguments) {
  if (op == OP_copy_in) return STREAM_COPY_IN;
  if (op == OP_copy_out || (op == OP_adamw && ((const Update *)arguments)->after_copies))
    return STREAM_COPY_OUT;
  return op >= OP_all_reduce && op <= OP_broadcast_rank_0 ? STREAM_COLLECTIVES : STREAM_COMPUTE;
}

// --- cards -------------------------------------------------------------------------------------------------

double gpu_peak_flops(const char *name) {
  // Without sparsity, from NVIDIA's data sheets of A100, L40S, H100, H200, HGX B200 and GB200 NVL72, and its
  // whitepaper on Ada. The first row that is part of the name counts.
  static const struct {
    const char *part;
    double teraflops;
  } peaks[] = {{"MIG", NAN},       {"Laptop", NAN},   {"4090 D", NAN},   {"H100 PCIe", 756},
               {"H800 PCIe", 756}, {"H100 NVL", 835}, {"H200 NVL", 835}, {"H100", 989},
               {"H200", 989},      {"H800", 989},     {"GB200", 2500},   {"B200", 2250},
               {"A100", 312},      {"A800", 312},     {"L40S", 362},     {"RTX 4090", 165}};
  for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
    if (strstr(name, peaks[i].part)) return 1e12 * peaks[i].teraflops;
  return NAN;
}

// H100: solved for from measured steps of llama-1b, with codes and without, and gpt2-124m. A CPU's ratios are rough.
static const Card cards[] = {
    {"H100", 722e12, 1300e12, .memory = 2.95e12, .host = 50e9, .links = 250e9, .launch = 3e-6, .tail = 8e-6},
    {"H200", 722e12, 1300e12, .memory = 4.13e12, .host = 50e9, .links = 250e9, .launch = 3e-6, .tail = 8e-6},
    {"CPU", 100e9, 50e9, .memory = 20e9, .host = 20e9, .links = 5e9, .launch = 20e-6}};
enum { H100, H200, CPU };

const Card *card_of(const char *description) {
  for (int i = 0; i < CPU; i++) // of the SXM form: others have a lower peak, and less bandwidth
    if (strstr(description, cards[i].part) && gpu_peak_flops(description) == 989e12) return &cards[i];
  return NULL;
}

// --- time --------------------------------------------------------------------------------------------------

// The next tile hides most of a tile's epilogue. A short inner dimension hides less, and codes are read twice
// as fast.
static double gemm_seconds(const Card *card, Amount a) {
  if (a.flops == 0) return a.bytes / card->memory;
  static const double SHOWN = 0.4, HALF = 500;
  double k = a.inner ? (double)a.inner : INFINITY;
  double bf16 = card->bf16 / (1 + HALF / k), codes = card->codes / (1 + 2 * HALF / k);
  double compute = (a.flops - a.of_codes) / bf16 + a.of_codes / codes;
  return fmax(compute + SHOWN * a.epilogue / card->memory, a.bytes / card->memory);
}

// Attention reaches its rate as sequences grow, and half of it at `half` positions. Heads of 64 and of 128.
static double attention_seconds(const Card *card, Amount a, AttentionShape s, bool backward) {
  static const struct {
    double rate, half;
  } all[2][2] = {{{438e12, 431}, {413e12, 466}}, {{634e12, 1308}, {495e12, 711}}};
  double rate = all[s.head_dim >= 96][backward].rate, half = all[s.head_dim >= 96][backward].half;
  return a.flops / (rate * card->bf16 / cards[H100].bf16) * (1 + half / (double)s.seq_len);
}

static const double KEPT_TILES = 0.12; // of a trained model, at a full mass of 1

// Tensors on the host are read and written there, both ways at once.
static double update_seconds(const Card *card, const Update *u, Amount a) {
  const Tensor all[] = {u->grad, u->weight, u->master, u->m, u->v};
  double on_host = 0;
  for (int i = 0; i < 5; i++)
    if (memory_plans_on_host(all[i])) on_host += bytes_of(all[i]);
  return fmax(a.bytes / card->memory, on_host / card->host);
}

static double seconds_alone(const Card *card, int ranks, int op, const void *arguments, Amount a) {
  double others = (double)(ranks - 1) / ranks;
  switch (op) {
  case OP_attention_forward:
    return attention_seconds(card, a, ((const AttentionForward *)arguments)->shape, false);
  case OP_attention_backward:
    return attention_seconds(card, a, ((const AttentionBackward *)arguments)->shape, true);
  case OP_lce_sampled_gradients:
    return KEPT_TILES * gemm_seconds(card, a);
  case OP_adamw:
  case OP_nesterov:
  case OP_sgd:
    return update_seconds(card, arguments, a);
  case OP_all_reduce:
    return 2 * others * a.bytes / card->links;
  case OP_reduce_scatter:
  case OP_all_gather:
  case OP_broadcast_rank_0:
    return others * a.bytes / card->links;
  case OP_copy_in:
  case OP_copy_out:
    return a.bytes / card->host;
  default:
    return gemm_seconds(card, a);
  }
}

double cost_seconds(const Card *card, const Backend *backend, int op, const void *arguments) {
  Amount a = amount_of(op, arguments);
  if (!card) card = &cards[backend->device == ON_CPU ? CPU : H100];
  return card->launch + (a.flops > 0 ? card->tail : 0) +
         seconds_alone(card, backend->ranks, op, arguments, a);
}
