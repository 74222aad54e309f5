// Rotary embedding and attention against float64: lengths around the tiles' edges, packed documents, grouped
// heads, decoding, odd head sizes; on a GPU the portable kernels, too; twice the same bits.
//
// The allowed error of a result follows from its roundings. With u the unit roundoff of the operands' dtype
// and e the error of a probability in fp32 (its exponent is a sum of D products):
//   out     P is rounded to the dtype:  (u + e) sum |P v|,          and u |out| when stored
//   delta   out was stored:             sum |dout| (error of out)
//   dS      rounded to the dtype:       u |dS| + P (error of delta) + e P (sum |dout v| + |delta|)
//   dq, dk  sums of dS times k, q; dv a sum of P dout; each rounded once more
//   dbias   a sum of these over all tokens, in fp32.
// Bounds, not typical errors: signs are not counted on.
#include <float.h>

#include "kernels/cuda/cuda_ops.h"
#include "tests/harness.h"

#ifdef HAVE_CUDA
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/hopper_gemm.h"
#endif

static int64_t qkv_width(AttentionShape s) {
  return (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim;
}

// Results in float64, and the largest error that each number may have.
typedef struct {
  double *value, *bound;
} Bounded;

static Bounded bounded(Harness *h, int64_t count) {
  return (Bounded){host_values(h, count), host_values(h, count)};
}

typedef struct {
  AttentionShape shape;
  int64_t rows, qkv_width, out_width;
  int32_t *documents;          // [2, N], or NULL
  double *qkv, *dout, *before; // before: what dbias is added to, or NULL
  Bounded out, lse, dqkv, dbias;
} Problem;

// Documents up to, at and past the edges of tiles; each sequence begins with another one.
static int32_t *cut_into_documents(Harness *h, AttentionShape s) {
  static const int64_t lengths[] = {1, 1, 63, 64, 65, 2, 129, 37, 300, 128, 7};
  enum { LENGTHS = sizeof lengths / sizeof *lengths };
  int64_t rows = s.batch * s.seq_len;
  int32_t *documents = random_ids(h, 2 * rows, 1);
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t t = 0, next = 3 * b, length; t < s.seq_len; t += length, next++) {
      length = lengths[next % LENGTHS] < s.seq_len - t ? lengths[next % LENGTHS] : s.seq_len - t;
      for (int64_t i = 0; i < length; i++) {
        documents[b * s.seq_len + t + i] = (int32_t)i;
        documents[rows + b * s.seq_len + t + i] = (int32_t)(length - 1 - i);
      }
    }
  return documents;
}

static Problem problem_make(Harness *h, AttentionShape s, bool packed) {
  Problem p = {.shape = s, .rows = s.batch * s.seq_len};
  if (packed) p.documents = cut_into_documents(h, s);
  if (packed) p.before = random_values(h, qkv_width(s), 1);
  p.qkv_width = qkv_width(s);
  p.out_width = s.num_heads * s.head_dim;
  p.qkv = random_values(h, p.rows * p.qkv_width, 1.5);
  p.dout = random_values(h, p.rows * p.out_width, 1);
  p.out = bounded(h, p.rows * p.out_width);
  p.lse = bounded(h, s.batch * s.num_heads * s.seq_len);
  p.dqkv = bounded(h, p.rows * p.qkv_width);
  p.dbias = bounded(h, p.qkv_width);
  return p;
}

// sum x y, and sum |x y|.
typedef struct {
  double value, magnitude;
} Dot;

static Dot dot(const double *x, const double *y, int64_t count) {
  Dot d = {0, 0};
  for (int64_t i = 0; i < count; i++) {
    d.value += x[i] * y[i];
    d.magnitude += fabs(x[i] * y[i]);
  }
  return d;
}

// The results of query t of head h in sequence b, and its share of dk and dv.
static void solve_query(Problem *p, double *scores, int64_t b, int64_t h, int64_t t, double u) {
  AttentionShape s = p->shape;
  int64_t D = s.head_dim, head = h / (s.num_heads / s.num_key_value_heads), row = b * s.seq_len + t;
  int64_t start = p->documents ? t - p->documents[row] : 0;
  double scale = 1 / sqrt((double)D), largest = -INFINITY, sum = 0, magnitude = 0;
  const double *q = p->qkv + row * p->qkv_width + h * D, *dout = p->dout + row * p->out_width + h * D;
  const double *keys = p->qkv + b * s.seq_len * p->qkv_width + (s.num_heads + head) * D;
  const double *values = keys + s.num_key_value_heads * D;
  for (int64_t i = start; i <= t; i++) {
    Dot score = dot(q, keys + i * p->qkv_width, D);
    scores[i] = score.value * scale;
    largest = fmax(largest, scores[i]);
    magnitude = fmax(magnitude, score.magnitude * scale);
  }
  for (int64_t i = start; i <= t; i++) sum += exp(scores[i] - largest);
  double lse = largest + log(fmax(sum, 1)); // the largest score alone makes it 1
  // A score is a sum of D products, the exponentials' has t + 1 terms; exp2 and log are good to a few units.
  double e = FLT_EPSILON * ((double)(D + 8) * (magnitude + fabs(lse)) + (double)t + 16);
  p->lse.value[(b * s.num_heads + h) * s.seq_len + t] = lse;
  p->lse.bound[(b * s.num_heads + h) * s.seq_len + t] = e;

  double *out = p->out.value + row * p->out_width + h * D,
         *out_bound = p->out.bound + row * p->out_width + h * D;
  for (int64_t i = start; i <= t; i++)
    for (int64_t d = 0; d < D; d++) {
      double term = exp(scores[i] - lse) * values[i * p->qkv_width + d];
      out[d] += term;
      out_bound[d] += (u + e) * fabs(term);
    }
  for (int64_t d = 0; d < D; d++) out_bound[d] += u * fabs(out[d]);

  double delta = dot(dout, out, D).value, delta_error = dot(dout, out_bound, D).magnitude;
  double *dq = p->dqkv.value + row * p->qkv_width + h * D,
         *dq_bound = p->dqkv.bound + row * p->qkv_width + h * D;
  for (int64_t i = start; i <= t; i++) {
    const double *key = keys + i * p->qkv_width;
    double *dk = p->dqkv.value + (key - p->qkv), *dk_bound = p->dqkv.bound + (key - p->qkv);
    double *dv = dk + s.num_key_value_heads * D, *dv_bound = dk_bound + s.num_key_value_heads * D;
    double probability = exp(scores[i] - lse);
    Dot dp = dot(dout, values + i * p->qkv_width, D);
    double ds = probability * (dp.value - delta) * scale;
    double ds_error = u * fabs(ds) + probability * scale * (delta_error + e * (dp.magnitude + fabs(delta)));
    for (int64_t d = 0; d < D; d++) {
      dq[d] += ds * key[d];
      dq_bound[d] += ds_error * fabs(key[d]);
      dk[d] += ds * q[d];
      dk_bound[d] += (ds_error + u * fabs(ds)) * fabs(q[d]);
      dv[d] += probability * dout[d];
      dv_bound[d] += (2 * u + e) * probability * fabs(dout[d]);
    }
  }
}

static void problem_solve(Problem *p, Dtype dtype) {
  AttentionShape s = p->shape;
  double u = dtype_epsilon(dtype) / 2;
  int64_t group = s.num_heads / s.num_key_value_heads;
#pragma omp parallel for
  for (int64_t i = 0; i < s.batch * s.num_key_value_heads; i++) {
    int64_t b = i / s.num_key_value_heads, first = i % s.num_key_value_heads * group;
    double *scores = calloc((size_t)s.seq_len, sizeof *scores);
    for (int64_t h = first; h < first + group; h++)
      for (int64_t t = 0; t < s.seq_len; t++) solve_query(p, scores, b, h, t, u);
    free(scores);
  }
  for (int64_t i = 0; p->before && i < p->qkv_width; i++) {
    p->dbias.value[i] = p->before[i];
    p->dbias.bound[i] = FLT_EPSILON * (double)p->rows * fabs(p->before[i]);
  }
  for (int64_t i = 0; i < p->rows * p->qkv_width; i++) {
    p->dqkv.bound[i] += u * fabs(p->dqkv.value[i]);
    p->dbias.value[i % p->qkv_width] += p->dqkv.value[i];
    p->dbias.bound[i % p->qkv_width] +=
        p->dqkv.bound[i] + FLT_EPSILON * (double)p->rows * fabs(p->dqkv.value[i]);
  }
}

static void check_bounds(Harness *h, const char *what, AttentionShape s, Tensor t, Bounded want) {
  const double *got = values_of(h, t);
  for (int64_t i = 0; i < tensor_count(t); i++) {
    if (fabs(got[i] - want.value[i]) <= want.bound[i] + FLT_MIN) continue;
    fail_msg("%s of batch %d, T %d, heads %d/%d, D %d: number %d is %.9g, not %.9g within %.3g", what,
             (int)s.batch, (int)s.seq_len, (int)s.num_heads, (int)s.num_key_value_heads, (int)s.head_dim,
             (int)i, got[i], want.value[i], want.bound[i]);
  }
}

// The backward pass, whose arguments hold all of the forward pass'.
static AttentionBackward call_make(Harness *h, Problem *p) {
  AttentionShape s = p->shape;
  Tensor documents = {0};
  if (p->documents) documents = tensor_reshape_2d(ids_from(h, p->documents, 2 * p->rows), 2, p->rows);
  return (AttentionBackward){.documents = documents,
                             .qkv = tensor_from(h, h->dtype, p->qkv, p->rows, p->qkv_width),
                             .dout = tensor_from(h, h->dtype, p->dout, p->rows, p->out_width),
                             .out = poisoned(h, h->dtype, p->rows, p->out_width),
                             .lse = poisoned(h, DTYPE_F32, s.batch, s.num_heads * s.seq_len),
                             .dqkv = poisoned(h, h->dtype, p->rows, p->qkv_width),
                             .dbias = p->before ? vector_from(h, DTYPE_F32, p->before, p->qkv_width)
                                                : poisoned_vector(h, DTYPE_F32, p->qkv_width),
                             .shape = s,
                             .accumulate = p->before};
}

// Both passes, by this device's kernels or by the tensor-core kernels that devices before Hopper take.
static void run_passes(Harness *h, AttentionBackward backward, bool portable) {
  AttentionForward forward = {.out = backward.out,
                              .lse = backward.lse,
                              .qkv = backward.qkv,
                              .documents = backward.documents,
                              .shape = backward.shape};
  if (!portable) {
    attention_forward(h->backend, forward);
    attention_backward(h->backend, backward);
    return;
  }
#ifdef HAVE_CUDA
  int64_t count = (int64_t)(cuda_attention_statistics_bytes(backward.shape) / sizeof(float));
  backward.workspace = poisoned_vector(h, DTYPE_F32, count); // the statistics
  Tensor counters = poisoned_vector(h, DTYPE_I32, ATTENTION_COUNTERS);
  backend_synchronize(h->backend);
  attention_tensor_core_forward(&forward, cudaStreamPerThread);
  attention_statistics(&backward, counters.data, cudaStreamPerThread);
  attention_tensor_core_backward(&backward, cudaStreamPerThread);
  assert_int_equal(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
#endif
}

enum { KINDS = 2 }; // of kernels: those for this device, the portable ones

// The first `kinds` of kernels against one reference, which takes longest, and against their bits again.
static void check_shape(Harness *h, AttentionShape s, int kinds) {
  for (int packed = 0; packed < 2; packed++) {
    Problem p = problem_make(h, s, packed);
    call_make(h, &p); // rounds the operands
    problem_solve(&p, h->dtype);
    for (int portable = 0; portable < kinds; portable++) {
      AttentionBackward r = call_make(h, &p), again = call_make(h, &p);
      run_passes(h, r, portable);
      run_passes(h, again, portable);
      const struct {
        const char *what;
        Tensor got, again;
        Bounded want;
      } results[] = {{portable ? "portable out" : "out", r.out, again.out, p.out},
                     {portable ? "portable lse" : "lse", r.lse, again.lse, p.lse},
                     {portable ? "portable dqkv" : "dqkv", r.dqkv, again.dqkv, p.dqkv},
                     {"dbias", r.dbias, again.dbias, p.dbias}};
      for (int i = 0; i < (portable ? 3 : 4); i++) {
        check_bounds(h, results[i].what, s, results[i].got, results[i].want);
        check_bitwise_equal(h, results[i].what, results[i].got, results[i].again);
      }
    }
    harness_clear(h);
  }
}

// Sequences whose lengths lie around tiles, with heads of 64 or 128 elements. A last shape has more work tiles than
// SMs, so that who does what differs between the runs.
static void check_lengths(Harness *h, int64_t head_dim) {
  static const int64_t lengths[] = {1, 7, 63, 64, 65, 127, 128, 129, 191, 193, 320, 385},
                       heads[][2] = {{2, 2}, {3, 1}, {8, 2}, {8, 1}};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    const int64_t *q = heads[(i + (size_t)head_dim / 64) % 4];
    check_shape(h, (AttentionShape){1 + (int64_t)i % 3, lengths[i], q[0], q[1], head_dim}, KINDS);
  }
  AttentionShape last = {3, 1003, 8, 4, 128};
  check_shape(h, head_dim == 64 ? (AttentionShape){8, 385, 12, 4, 64} : last, KINDS);
}

HARNESS_TEST(test_tensor_cores) {
  if (h->dtype != DTYPE_BF16) skip(); // fp32 has no tensor cores
  unsetenv("LCE_CLUSTER_TOKENS");
  if (!small_shapes()) return check_lengths(h, 64), check_lengths(h, 128);
  check_shape(h, (AttentionShape){2, 65, 3, 1, 64}, KINDS);
  check_shape(h, (AttentionShape){1, 129, 2, 2, 128}, KINDS);
}

// Hopper's clusters, which are for long sequences with heads of 128.
HARNESS_TEST(test_clusters) {
#ifdef HAVE_CUDA
  if (h->dtype != DTYPE_BF16 || !hopper_runs(h->backend)) skip();
  setenv("LCE_CLUSTER_TOKENS", "1", true);
  if (small_shapes()) {
    check_shape(h, (AttentionShape){1, 193, 4, 2, 128}, 1);
    check_shape(h, (AttentionShape){1, 65, 3, 1, 128}, 1);
  } else {
    check_lengths(h, 128);
  }
  unsetenv("LCE_CLUSTER_TOKENS");
#else
  skip();
#endif
}

// Heads that have no tensor-core kernel; in fp32 none has.
HARNESS_TEST(test_other_shapes) {
  static const AttentionShape shapes[] = {{2, 1, 1, 1, 1},   {1, 7, 2, 2, 2},    {2, 33, 6, 2, 10},
                                          {1, 65, 4, 1, 80}, {2, 40, 3, 3, 96},  {1, 70, 2, 1, 256},
                                          {1, 63, 4, 4, 32}, {2, 193, 8, 2, 64}, {1, 129, 3, 1, 128},
                                          {1, 1, 3, 1, 64},  {3, 5, 4, 2, 2},    {2, 67, 6, 2, 10}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_shape(h, shapes[i], 1);
}

// The float64 gradients are the derivatives of the float64 results.
static double attention_objective(void *context) {
  Problem *p = context;
  memset(p->out.value, 0, (size_t)(p->rows * p->out_width) * sizeof(double));
  problem_solve(p, DTYPE_F32); // its gradients are not read again
  return reference_dot(p->out.value, p->dout, p->rows * p->out_width);
}

HARNESS_TEST(test_reference_gradients) {
  for (int packed = 0; packed < 2; packed++) {
    Problem p = problem_make(h, (AttentionShape){2, 67, 4, 2, 6}, packed);
    problem_solve(&p, DTYPE_F32);
    double *before = host_values(h, p.rows * p.qkv_width);
    Tensor dqkv =
        tensor_from(h, DTYPE_F32, copied_values(h, p.dqkv.value, p.rows * p.qkv_width), p.rows, p.qkv_width);
    check_gradient(h, "reference dqkv", dqkv, before, p.qkv, attention_objective, &p,
                   with_size(within(4, 1), 1));
  }
}

static void check_rope(Harness *h, AttentionShape s, int64_t rotated) {
  int64_t rows = s.batch * s.seq_len, count = rows * qkv_width(s), table_rows = s.seq_len + 2;
  double *qkv = random_values(h, count, 1), *table = host_values(h, table_rows * rotated);
  for (int64_t t = 0; t < table_rows; t++)
    for (int64_t i = 0; i < rotated / 2; i++) {
      double angle = (double)t * pow(10000, -2.0 * (double)i / (double)rotated);
      table[t * rotated + i] = cos(angle);
      table[t * rotated + rotated / 2 + i] = sin(angle);
    }
  Tensor cos_sin = tensor_from(h, DTYPE_F32, table, table_rows, rotated);
  Tensor turned = tensor_from(h, h->dtype, qkv, rows, qkv_width(s));
  double *original = copied_values(h, qkv, count);
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s});
  reference_rope(qkv, table, s, rotated);
  check_values(h, "rope", turned, qkv, with_size(within(2, 2), 1));
  // A rotation's gradient is the rotation back, so the way back is all that the backward pass has to be.
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s, .inverse = true});
  check_values(h, "rope and back", turned, original, with_size(within_stored(h, 2, 4), 1));
}

static void rope_case(Harness *h, const void *shape) {
  AttentionShape s = *(const AttentionShape *)shape;
  check_rope(h, s, s.head_dim);
  if (s.head_dim > 2) check_rope(h, s, s.head_dim / 4 * 2); // a part of each head
}

HARNESS_TEST(test_rope) {
  static const AttentionShape shapes[] = {
      {2, 7, 4, 2, 6}, {1, 1, 1, 1, 2}, {1, 5, 3, 1, 64}, {2, 9, 12, 4, 64}, {3, 5, 2, 1, 10}};
  RUN_CASES(h, rope_case, shapes);
}

// Decoding in pieces of any length gives the rows that attending to the whole sequence gives.
static void decode_case(Harness *h, AttentionShape s, int64_t capacity, const int64_t *pieces) {
  Problem p = problem_make(h, s, false);
  AttentionBackward r = call_make(h, &p);
  problem_solve(&p, h->dtype);
  Tensor keys = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  Tensor values = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  for (int64_t past = 0; past < s.seq_len; past += *pieces++) {
    AttentionShape step = s;
    step.seq_len = *pieces;
    int64_t count = s.batch * step.seq_len;
    int32_t *places = random_ids(h, count, 1);
    for (int64_t i = 0; i < count; i++)
      places[i] = (int32_t)(i / step.seq_len * s.seq_len + past + i % step.seq_len);
    Tensor positions = ids_from(h, places, count), qkv = poisoned(h, h->dtype, count, p.qkv_width),
           out = poisoned(h, h->dtype, count, p.out_width);
    gather_rows(h->backend, (MoveRows){.out = qkv, .x = r.qkv, .indices = positions});
    attention_decode(
        h->backend, (AttentionDecode){
                        .out = out, .keys = keys, .values = values, .qkv = qkv, .shape = step, .past = past});
    scatter_rows(h->backend, (MoveRows){.out = r.out, .x = out, .indices = positions});
  }
  check_values(h, "decoded attention", r.out, p.out.value,
               with_size(within_stored(h, 8, (double)(s.head_dim + s.seq_len)), 1));
}

HARNESS_TEST(test_attention_decode) {
  decode_case(h, (AttentionShape){1, 1, 1, 1, 2}, 1, (const int64_t[]){1});
  decode_case(h, (AttentionShape){2, 9, 4, 2, 6}, 11, (const int64_t[]){5, 1, 1, 2});
  decode_case(h, (AttentionShape){3, 131, 6, 3, 64}, 131, (const int64_t[]){67, 1, 63});
  decode_case(h, (AttentionShape){2, 9, 8, 1, 128}, 11, (const int64_t[]){4, 1, 1, 3});
}

// Tokens of packed documents count their positions from their document's first: as its documents alone would.
static void positions_case(Harness *h, const void *shape) {
  enum { HIDDEN = 8, VOCAB = 5 };
  AttentionShape s = *(const AttentionShape *)shape;
  int64_t rows = s.batch * s.seq_len, columns = qkv_width(s), length = 0;
  int32_t *places = cut_into_documents(h, s), *ids = random_ids(h, rows, VOCAB);
  double *qkv_values = random_values(h, rows * columns, 1.5);
  Tensor cos_sin =
      tensor_from(h, DTYPE_F32, random_values(h, s.seq_len * s.head_dim, 1), s.seq_len, s.head_dim);
  Tensor tokens = ids_from(h, ids, rows), positions = ids_from(h, places, rows);
  Tensor table = tensor_from(h, h->dtype, random_values(h, VOCAB * HIDDEN, 1), VOCAB, HIDDEN);
  Tensor table2 = tensor_from(h, h->dtype, random_values(h, s.seq_len * HIDDEN, 1), s.seq_len, HIDDEN);
  Tensor dstream = tensor_from(h, h->dtype, random_values(h, rows * HIDDEN, 1), rows, HIDDEN);
  Tensor qkv[2], stream[2], dpositions[2], dtable = poisoned(h, DTYPE_F32, VOCAB, HIDDEN);
  for (int alone = 0; alone < 2; alone++) {
    qkv[alone] = tensor_from(h, h->dtype, qkv_values, rows, columns);
    stream[alone] = poisoned(h, h->dtype, rows, HIDDEN);
    dpositions[alone] = poisoned(h, DTYPE_F32, s.seq_len, HIDDEN);
    for (int64_t at = 0; at < rows; at += length) {
      length = alone ? places[rows + at] + 1 : rows; // of the document
      AttentionShape document = {1, length, s.num_heads, s.num_key_value_heads, s.head_dim};
      AttentionShape part = alone ? document : s;
      Tensor named = {0};
      if (!alone) named = positions;
      rope(h->backend, (Rope){.qkv = tensor_rows(qkv[alone], at, length),
                              .cos_sin = cos_sin,
                              .positions = named,
                              .shape = part});
      embedding_forward(h->backend, (EmbeddingForward){.out = tensor_rows(stream[alone], at, length),
                                                       .tokens = tensor_rows(tokens, at, length),
                                                       .token_weight = table,
                                                       .position_weight = table2,
                                                       .positions = named,
                                                       .seq_len = part.seq_len});
      embedding_backward(h->backend, (EmbeddingBackward){.dtoken_weight = dtable,
                                                         .dposition_weight = dpositions[alone],
                                                         .dout = tensor_rows(dstream, at, length),
                                                         .tokens = tensor_rows(tokens, at, length),
                                                         .positions = named,
                                                         .seq_len = part.seq_len,
                                                         .accumulate_position = at > 0});
    }
  }
  check_bitwise_equal(h, "rope of documents", qkv[0], qkv[1]);
  check_bitwise_equal(h, "embeddings of documents", stream[0], stream[1]);
  check_values(h, "dposition_weight of documents", dpositions[0], values_of(h, dpositions[1]),
               with_size(within(4, (double)rows), 1));
}

HARNESS_TEST(test_positions) {
  static const AttentionShape shapes[] = {
      {2, 7, 2, 1, 6}, {1, 9, 1, 1, 2}, {3, 200, 4, 2, 64}, {1, 333, 2, 2, 128}};
  RUN_CASES(h, positions_case, shapes);
}

TEST_MAIN(run_on_backends())
