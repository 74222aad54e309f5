// Rotary embedding and attention as test_kernels_layers.c has the other layers: whole sequences, decoding, packed
// documents; and the same bits in a second run.

#include "tests/harness.h"
#include "tests/reference.h"

// --- attention ---------------------------------------------------------------------------------------------

static int64_t qkv_width(AttentionShape s) {
  return (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim;
}

static void rope_case(Harness *h, AttentionShape s) {
  int64_t rows = s.batch * s.seq_len, count = rows * qkv_width(s), table_rows = s.seq_len + 2;
  double *qkv = random_values(h, count, 1), *table = host_values(h, table_rows * s.head_dim);
  for (int64_t t = 0; t < table_rows; t++)
    for (int64_t i = 0; i < s.head_dim / 2; i++) {
      double angle = (double)t * pow(10000, -2.0 * (double)i / (double)s.head_dim);
      table[t * s.head_dim + i] = cos(angle);
      table[t * s.head_dim + s.head_dim / 2 + i] = sin(angle);
    }
  Tensor cos_sin = tensor_from(h, DTYPE_F32, table, table_rows, s.head_dim);
  Tensor turned = tensor_from(h, h->dtype, qkv, rows, qkv_width(s));
  double *original = copied_values(h, qkv, count);
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s});
  reference_rope(qkv, table, s, false);
  check_values(h, "rope", turned, qkv, of_size(within(2, 2), 1));
  // A rotation's gradient is the rotation back, so the way back is all that the backward pass has to be.
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s, .inverse = true});
  check_values(h, "rope and back", turned, original, of_size(within_stored(h, 2, 4), 1));
}

TEST(test_rope) {
  rope_case(*state, (AttentionShape){2, 7, 4, 2, 6});
  rope_case(*state, (AttentionShape){1, 1, 1, 1, 2});
  rope_case(*state, (AttentionShape){1, 5, 3, 1, 64});
}

typedef struct {
  AttentionShape shape;
  double *qkv, *out, *lse, *dout;
} AttentionCase;

static double attention_objective(void *context) {
  AttentionCase *c = context;
  reference_attention(c->out, c->lse, c->qkv, c->shape);
  AttentionShape s = c->shape;
  return reference_dot(c->out, c->dout, s.batch * s.seq_len * s.num_heads * s.head_dim);
}

static void attention_case(Harness *h, AttentionShape s, bool accumulate) {
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim;
  AttentionCase c = {.shape = s};
  c.qkv = random_values(h, rows * qkv_width(s), 1.5);
  c.out = host_values(h, rows * width);
  c.lse = host_values(h, s.batch * s.num_heads * s.seq_len);
  c.dout = random_values(h, rows * width, 1);
  Tensor qkv = tensor_from(h, h->dtype, c.qkv, rows, qkv_width(s));
  Tensor dout = tensor_from(h, h->dtype, c.dout, rows, width);
  Tensor out = poisoned(h, h->dtype, rows, width), dqkv = poisoned(h, h->dtype, rows, qkv_width(s));
  Tensor lse = poisoned(h, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
  double *sums = random_values(h, qkv_width(s), 1);
  Tensor dbias = accumulate ? vector_from(h, DTYPE_F32, sums, qkv_width(s))
                            : poisoned_vector(h, DTYPE_F32, qkv_width(s));
  attention_forward(h->backend, (AttentionForward){.out = out, .lse = lse, .qkv = qkv, .shape = s});
  attention_backward(h->backend, (AttentionBackward){.dqkv = dqkv,
                                                     .dbias = dbias,
                                                     .dout = dout,
                                                     .out = out,
                                                     .lse = lse,
                                                     .qkv = qkv,
                                                     .shape = s,
                                                     .accumulate = accumulate});
  attention_objective(&c);
  // Scores are sums of D terms, and their error multiplies the exponentials; then T of those are summed.
  double terms = (double)(s.head_dim + s.seq_len);
  check_values(h, "attention out", out, c.out, of_size(within_stored(h, 8, terms), 1));
  check_values(h, "attention lse", lse, c.lse, of_size(within(8, terms), 1));
  check_gradient(h, "dqkv", dqkv, NULL, c.qkv, attention_objective, &c,
                 of_size(within_stored(h, 16, terms), 1));
  const double *rows_of_dqkv = values_of(h, dqkv);
  for (int64_t i = 0; i < qkv_width(s); i++) {
    if (!accumulate) sums[i] = 0;
    for (int64_t n = 0; n < rows; n++) sums[i] += rows_of_dqkv[n * qkv_width(s) + i];
  }
  check_values(h, "dbias", dbias, sums, of_size(within_stored(h, 8, (double)rows), 1));
}

TEST(test_attention) {
  const AttentionShape shapes[] = {
      {1, 1, 1, 1, 1},  {2, 7, 2, 2, 6},   {1, 1, 3, 1, 64},   {3, 5, 4, 2, 2},    {1, 64, 2, 1, 10},
      {1, 65, 1, 1, 2}, {2, 67, 6, 2, 10}, {1, 131, 2, 1, 64}, {1, 70, 1, 1, 128},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    attention_case(*state, shapes[i], i % 2);
    harness_pop(state);
  }
}

// Decoding in pieces of any length gives the rows that attending to the whole sequence gives.
static void decode_case(Harness *h, AttentionShape s, int64_t capacity, const int64_t *pieces) {
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim, packed = qkv_width(s);
  double *qkv = random_values(h, rows * packed, 1.5), *want = host_values(h, rows * width);
  tensor_from(h, h->dtype, qkv, rows, packed); // rounds the values
  reference_attention(want, NULL, qkv, s);
  Tensor keys = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  Tensor values = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  for (int64_t past = 0; past < s.seq_len; past += *pieces++) {
    int64_t count = *pieces;
    double *part = host_values(h, s.batch * count * packed),
           *want_part = host_values(h, s.batch * count * width);
    for (int64_t b = 0; b < s.batch; b++) {
      int64_t first = b * s.seq_len + past;
      memcpy(part + b * count * packed, qkv + first * packed, (size_t)(count * packed) * sizeof *part);
      memcpy(want_part + b * count * width, want + first * width, (size_t)(count * width) * sizeof *part);
    }
    AttentionShape step = s;
    step.seq_len = count;
    Tensor out = poisoned(h, h->dtype, s.batch * count, width);
    attention_decode(h->backend,
                     (AttentionDecode){.out = out,
                                       .keys = keys,
                                       .values = values,
                                       .qkv = tensor_from(h, h->dtype, part, s.batch * count, packed),
                                       .shape = step,
                                       .past = past});
    check_values(h, "decoded attention", out, want_part,
                 of_size(within_stored(h, 8, (double)(s.head_dim + s.seq_len)), 1));
  }
}

TEST(test_attention_decode) {
  decode_case(*state, (AttentionShape){1, 1, 1, 1, 2}, 1, (const int64_t[]){1});
  decode_case(*state, (AttentionShape){2, 9, 4, 2, 6}, 11, (const int64_t[]){5, 1, 1, 2});
  decode_case(*state, (AttentionShape){3, 131, 6, 3, 64}, 131, (const int64_t[]){67, 1, 63});
}

// --- packed documents --------------------------------------------------------------------------------------

// Sequences that are cut into documents of these lengths, up to 0, give what their documents alone give.
static void documents_case(Harness *h, AttentionShape s, const int64_t *lengths) {
  enum { HIDDEN = 8 };
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim, qkv_columns = qkv_width(s), first = 0;
  int32_t *before_and_after = random_ids(h, 2 * rows, 1);
  for (int64_t b = 0; b < s.batch; b++)
    for (const int64_t *length = lengths; *length; first += *length++)
      for (int64_t i = 0; i < *length; i++) {
        before_and_after[first + i] = (int32_t)i;
        before_and_after[rows + first + i] = (int32_t)(*length - 1 - i);
      }
  assert_int_equal(first, rows);
  Tensor documents = tensor_reshape_2d(ids_from(h, before_and_after, 2 * rows), 2, rows);
  Tensor positions = tensor_flat(tensor_rows(documents, 0, 1));
  double *qkv_values = random_values(h, rows * qkv_columns, 1.5);
  Tensor cos_sin =
      tensor_from(h, DTYPE_F32, random_values(h, s.seq_len * s.head_dim, 1), s.seq_len, s.head_dim);
  Tensor dout = tensor_from(h, h->dtype, random_values(h, rows * width, 1), rows, width);
  Tensor tokens = ids_from(h, random_ids(h, rows, 5), rows);
  Tensor table = tensor_from(h, h->dtype, random_values(h, 5 * HIDDEN, 1), 5, HIDDEN);
  Tensor table2 = tensor_from(h, h->dtype, random_values(h, s.seq_len * HIDDEN, 1), s.seq_len, HIDDEN);
  Tensor dstream = tensor_from(h, h->dtype, random_values(h, rows * HIDDEN, 1), rows, HIDDEN);
  Tensor qkv[2], out[2], dqkv[2], stream[2], dpositions[2], dtable = poisoned(h, DTYPE_F32, 5, HIDDEN);
  for (int alone = 0; alone < 2; alone++) {
    qkv[alone] = tensor_from(h, h->dtype, qkv_values, rows, qkv_columns);
    out[alone] = poisoned(h, h->dtype, rows, width);
    dqkv[alone] = poisoned(h, h->dtype, rows, qkv_columns);
    stream[alone] = poisoned(h, h->dtype, rows, HIDDEN);
    dpositions[alone] = poisoned(h, DTYPE_F32, s.seq_len, HIDDEN);
    const int64_t *length = alone ? lengths : &rows;
    for (int64_t at = 0; at < rows; at += *length++) {
      if (!*length) length = lengths;
      AttentionShape shape = s;
      if (alone) shape.batch = 1, shape.seq_len = *length;
      Tensor part = tensor_rows(qkv[alone], at, *length), part_out = tensor_rows(out[alone], at, *length);
      Tensor lse = poisoned(h, DTYPE_F32, shape.batch, s.num_heads * shape.seq_len), none = {0};
      Tensor places = alone ? none : positions, cuts = alone ? none : documents;
      rope(h->backend, (Rope){.qkv = part, .cos_sin = cos_sin, .positions = places, .shape = shape});
      attention_forward(
          h->backend,
          (AttentionForward){.out = part_out, .lse = lse, .qkv = part, .documents = cuts, .shape = shape});
      attention_backward(h->backend, (AttentionBackward){.dqkv = tensor_rows(dqkv[alone], at, *length),
                                                         .dout = tensor_rows(dout, at, *length),
                                                         .out = part_out,
                                                         .lse = lse,
                                                         .qkv = part,
                                                         .documents = cuts,
                                                         .shape = shape});
      embedding_forward(h->backend, (EmbeddingForward){.out = tensor_rows(stream[alone], at, *length),
                                                       .tokens = tensor_rows(tokens, at, *length),
                                                       .token_weight = table,
                                                       .position_weight = table2,
                                                       .positions = places,
                                                       .seq_len = shape.seq_len});
      embedding_backward(h->backend, (EmbeddingBackward){.dtoken_weight = dtable,
                                                         .dposition_weight = dpositions[alone],
                                                         .dout = tensor_rows(dstream, at, *length),
                                                         .tokens = tensor_rows(tokens, at, *length),
                                                         .positions = places,
                                                         .seq_len = shape.seq_len,
                                                         .accumulate_position = at > 0});
    }
  }
  check_bitwise_equal(h, "rope of documents", qkv[0], qkv[1]);
  check_bitwise_equal(h, "embeddings of documents", stream[0], stream[1]);
  Tolerance tolerance = of_size(within_stored(h, 16, (double)(s.head_dim + s.seq_len)), 1);
  check_values(h, "attention of documents", out[0], values_of(h, out[1]), tolerance);
  check_values(h, "dqkv of documents", dqkv[0], values_of(h, dqkv[1]), tolerance);
  check_values(h, "dposition_weight of documents", dpositions[0], values_of(h, dpositions[1]),
               of_size(within(4, (double)rows), 1));
  harness_pop((void **)&h);
}

TEST(test_documents) {
  documents_case(*state, (AttentionShape){2, 7, 2, 1, 6}, (const int64_t[]){1, 4, 2, 0});
  documents_case(*state, (AttentionShape){1, 9, 1, 1, 2}, (const int64_t[]){9, 0});
  documents_case(*state, (AttentionShape){3, 200, 4, 2, 64}, (const int64_t[]){64, 1, 63, 1, 1, 70, 0});
  documents_case(*state, (AttentionShape){1, 333, 2, 2, 128}, (const int64_t[]){1, 65, 128, 100, 39, 0});
}

// --- the same bits again -----------------------------------------------------------------------------------

TEST(test_bitwise_repeatable) {
  Harness *h = *state;
  AttentionShape s = {2, 97, 4, 2, 16};
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim;
  Tensor qkv = tensor_from(h, h->dtype, random_values(h, rows * qkv_width(s), 1), rows, qkv_width(s));
  Tensor dout = tensor_from(h, h->dtype, random_values(h, rows * width, 1), rows, width);
  Tensor out[2], lse[2], dqkv[2], dweight[2], dtoken[2];
  Tensor tokens = ids_from(h, random_ids(h, rows, 5), rows);
  for (int i = 0; i < 2; i++) {
    out[i] = poisoned(h, h->dtype, rows, width);
    lse[i] = poisoned(h, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
    dqkv[i] = poisoned(h, h->dtype, rows, qkv_width(s));
    dweight[i] = poisoned(h, DTYPE_F32, qkv_width(s), width);
    dtoken[i] = poisoned(h, DTYPE_F32, 5, width);
    attention_forward(h->backend, (AttentionForward){.out = out[i], .lse = lse[i], .qkv = qkv, .shape = s});
    attention_backward(
        h->backend, (AttentionBackward){
                        .dqkv = dqkv[i], .dout = dout, .out = out[i], .lse = lse[i], .qkv = qkv, .shape = s});
    linear_backward_weight(h->backend,
                           (LinearBackwardWeight){.dweight = dweight[i], .dout = qkv, .x = out[i]});
    embedding_backward(h->backend,
                       (EmbeddingBackward){
                           .dtoken_weight = dtoken[i], .dout = dout, .tokens = tokens, .seq_len = s.seq_len});
  }
  check_bitwise_equal(h, "attention out", out[0], out[1]);
  check_bitwise_equal(h, "dqkv", dqkv[0], dqkv[1]);
  check_bitwise_equal(h, "dweight", dweight[0], dweight[1]);
  check_bitwise_equal(h, "dtoken_weight", dtoken[0], dtoken[1]);
}

int main(void) {
  return run_on_backends();
}
