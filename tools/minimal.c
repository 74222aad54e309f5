// A Llama and its training in one file of plain C: what lce.c does, without what makes it fast and large.
//
//     cc -O3 -fopenmp tools/minimal.c -lm && ./a.out */*.c
//     ./a.out book.txt vocab_size=32768 fused=0 steps=20  other sizes, the other loss; main lists the options
//     ./a.out book.txt check=1                            gradients of twenty weights against differences,
//                                                         after twenty steps
//
// A language model turns tokens into a probability for every possible next token. To train it, repeat:
//
//     forward     the tokens of some text pass through the layers to a loss: -log of the probability of what
//                 came next
//     backward    the chain rule, from the loss back: the derivative of the loss with respect to every weight
//     update      every weight takes a step against its derivative (AdamW), as large as a schedule says
//
// Every matrix has a value and a gradient of the same shape, the derivative of the loss with respect to the
// value. Beside each operation stands its backward function: it takes the same arguments, reads the gradient
// of what the operation wrote, and adds to the gradients of what it read. So the backward pass is the forward
// pass from the last line to the first. In comments dx is the gradient of x. Two rules explain most of it:
//
//     y = x W^T      dx += dy W,   dW += dy^T x         the shapes leave no other choice
//     y = a + b      da += dy,     db += dy             and what is read twice has the sum of two gradients:
//                                                       hence +=
//
// The loss is the special part. The last matmul computes V logits for each of N tokens, one for each entry of
// the vocabulary. At Llama 3's V of 128,256 these logits are often the largest matrix of a training step.
// `loss_materialized` stores them. `loss_fused` does not: it takes the tokens in chunks, and computes the
// gradients while a chunk's logits are still there. kernels/lce/LCE.md goes on from there, down to the tensor
// cores of a GPU.
//
// Letters: B sequences of T tokens, N = B T; H hidden size; Q query heads and K key/value heads of D
// elements; F width of the MLP; V vocabulary. Matrices are dense and row-major: element (n, h) of x [N, H] is
// x[n * H + h]. Names are Hugging Face's. Left out: other families, GPUs and bf16, tokenizers (a byte is a
// token), recomputation, checkpoints, validation.
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// --- the model ---------------------------------------------------------------------------------------------

typedef struct {
  long vocab_size, hidden_size, intermediate_size, num_hidden_layers; // V, H, F, L
  long num_attention_heads, num_key_value_heads, head_dim;            // Q, K, D
  long tie_word_embeddings;                                           // the head is the embedding
  float rope_theta, rms_norm_eps;
} Config;

typedef struct {
  long rows, columns, count;
  float *value, *grad;
  char name[80]; // a weight's, for the test; a norm's weight is one row
  float *m, *v;  // a weight's moments
} Matrix;

typedef struct {
  Matrix input_layernorm, q_proj, k_proj, v_proj, o_proj;
  Matrix post_attention_layernorm, gate_proj, up_proj, down_proj;
  // Activations, which the backward pass reads again.
  Matrix *x;              // [N, H], the output of the block below
  Matrix norm1, q, k, v;  // [N, H], [N, Q D], [N, K D] twice
  float *probs;           // [B, Q, T, T], attention's softmax
  Matrix mixed, middle;   // [N, Q D], [N, H]: x + attention
  Matrix norm2, gate, up; // [N, H], [N, F] twice
  Matrix act, out;        // [N, F], [N, H]: middle + MLP
} Block;

typedef struct {
  Config config;
  long batch, seq_len, chunk; // B, T, and C: tokens of the loss at a time; 0: loss_materialized
  Matrix embed_tokens, norm, lm_head;
  Matrix *head; // lm_head or, tied, embed_tokens
  Block *blocks;
  Matrix embedded, *out, final; // [N, H] each: before the blocks, after them, after the last norm
  float *logits;                // [C, V] or [N, V]
  float *r, *c, *losses;        // [N] each; r and c are loss_fused's
  Matrix **all;                 // every matrix above, weights and activations
  long count;
  char prefix[48]; // of the next weights' names
} Llama;

static void die(const char *what, const char *which) {
  fprintf(stderr, "%s %s\n", what, which);
  exit(1);
}

static void *zeros(long count, size_t size) {
  void *values = calloc((size_t)count, size);
  if (!values) die("out of memory", "");
  return values;
}

static void zero(float *values, long count) {
  memset(values, 0, (size_t)count * sizeof *values);
}

static long least(long a, long b) {
  return a < b ? a : b;
}

// --- matmul ------------------------------------------------------------------------------------------------

static float dot(const float *a, const float *b, long count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// y += alpha x.
static void add_scaled(float *y, float alpha, const float *x, long count) {
#pragma omp simd
  for (long i = 0; i < count; i++) y[i] += alpha * x[i];
}

// A matrix as a matmul reads it, element (i, j) at[i * row + j * column], so that transposing moves nothing.
typedef struct {
  const float *at;
  long row, column;
} View;

static View plain(const float *at, long columns) {
  return (View){at, columns, 1};
}

static View transposed(const float *at, long columns) {
  return (View){at, 1, columns};
}

// C [M, N] += A [M, K] B [K, N]; nearly all time goes here. A tile of 4 x 16 elements of C stays in registers
// while k runs, so that each value of B that is loaded is used 4 times, and each of A 16 times. Before that,
// PANEL rows of the tile's 16 columns of B are copied to lie side by side in the first-level cache, where
// they serve 128 rows of C.
static void matmul(float *c, View a, View b, long M, long N, long K) {
  enum { ROWS = 4, COLUMNS = 16, PANEL = 256, SERVED = 128 };
#pragma omp parallel for collapse(2)
  for (long first = 0; first < M; first += SERVED)
    for (long left = 0; left < N; left += COLUMNS)
      for (long start = 0; start < K; start += PANEL) {
        float panel[PANEL][COLUMNS];
        long depth = least(PANEL, K - start), columns = least(COLUMNS, N - left);
        for (long k = 0; k < depth; k++)
          for (long j = 0; j < COLUMNS; j++)
            panel[k][j] = j < columns ? b.at[(start + k) * b.row + (left + j) * b.column] : 0;
        for (long top = first; top < least(first + SERVED, M); top += ROWS) {
          float sum[ROWS][COLUMNS] = {{0}};
          const float *row[ROWS]; // the last one stands in for rows past the end
          for (long i = 0; i < ROWS; i++) row[i] = a.at + least(top + i, M - 1) * a.row + start * a.column;
          for (long k = 0; k < depth; k++)
            for (long i = 0; i < ROWS; i++)
              for (long j = 0; j < COLUMNS; j++) sum[i][j] += row[i][k * a.column] * panel[k][j];
          for (long i = 0; i < least(ROWS, M - top); i++)
            add_scaled(c + (top + i) * N + left, 1, sum[i], columns);
        }
      }
}

// y = x W^T, for a weight W.
static void matmul_weight(float *y, const float *x, const Matrix *w, long rows) {
  zero(y, rows * w->rows);
  matmul(y, plain(x, w->columns), transposed(w->value, w->columns), rows, w->rows, w->columns);
}

// y = x W^T + residual; the residual may be NULL.
static void linear(Matrix *y, const Matrix *x, const Matrix *w, const Matrix *residual) {
  matmul_weight(y->value, x->value, w, x->rows);
  if (residual) add_scaled(y->value, 1, residual->value, y->count);
}

// dx += dy W,  dW += dy^T x,  dresidual += dy.
static void linear_backward(const Matrix *y, Matrix *x, Matrix *w, Matrix *residual) {
  matmul(x->grad, plain(y->grad, y->columns), plain(w->value, w->columns), x->rows, x->columns, w->rows);
  matmul(w->grad, transposed(y->grad, y->columns), plain(x->value, x->columns), w->rows, w->columns, x->rows);
  if (residual) add_scaled(residual->grad, 1, y->grad, y->count);
}

// --- the other operations ----------------------------------------------------------------------------------

// y[n] = W[token[n]].
static void embed(Matrix *y, const int32_t *tokens, const Matrix *w) {
  for (long n = 0, H = y->columns; n < y->rows; n++)
    memcpy(y->value + n * H, w->value + tokens[n] * H, (size_t)H * sizeof(float));
}

// dW[token[n]] += dy[n].
static void embed_backward(const Matrix *y, const int32_t *tokens, Matrix *w) {
  for (long n = 0, H = y->columns; n < y->rows; n++)
    add_scaled(w->grad + tokens[n] * H, 1, y->grad + n * H, H);
}

// RMSNorm (Zhang, Sennrich 2019) of each row: y = s x w,  s = 1 / sqrt(mean(x^2) + eps).
static void rmsnorm(Matrix *y, const Matrix *x, const Matrix *w, float eps) {
#pragma omp parallel for
  for (long n = 0; n < x->rows; n++) {
    const float *xn = x->value + n * x->columns;
    float s = 1 / sqrtf(dot(xn, xn, x->columns) / (float)x->columns + eps);
    for (long h = 0; h < x->columns; h++) y->value[n * x->columns + h] = s * xn[h] * w->value[h];
  }
}

// dx += s w dy - s^3 x mean(w dy x), the second since s depends on x;  dw += sum over rows of s x dy.
static void rmsnorm_backward(const Matrix *y, Matrix *x, Matrix *w, float eps) {
  for (long n = 0; n < x->rows; n++) {
    const float *xn = x->value + n * x->columns, *dyn = y->grad + n * x->columns;
    float s = 1 / sqrtf(dot(xn, xn, x->columns) / (float)x->columns + eps), mean = 0;
    for (long h = 0; h < x->columns; h++) mean += w->value[h] * dyn[h] * xn[h] / (float)x->columns;
    for (long h = 0; h < x->columns; h++) {
      x->grad[n * x->columns + h] += s * w->value[h] * dyn[h] - s * s * s * mean * xn[h];
      w->grad[h] += s * xn[h] * dyn[h];
    }
  }
}

// Rotary positions (Su et al. 2021), in place. In every head, elements i and i + D/2 are a point in a plane,
// turned about the origin by t theta^(-2i/D) at position t: so q[t] . k[u] depends on the distance of t and
// u, not on where they are. With direction -1 the gradient turns back.
static void rotate(Matrix *x, const Llama *m, int direction) {
  long D = m->config.head_dim, heads = x->columns / D;
  float *values = direction > 0 ? x->value : x->grad;
#pragma omp parallel for
  for (long t = 0; t < m->seq_len; t++)
    for (long i = 0; i < D / 2; i++) {
      double angle = (double)t * pow((double)m->config.rope_theta, -2.0 * (double)i / (double)D);
      float c = (float)cos(angle), s = (float)sin(direction * angle);
      for (long b = 0; b < m->batch; b++)
        for (long h = 0; h < heads; h++) {
          float *p = values + ((b * m->seq_len + t) * heads + h) * D + i, first = p[0], second = p[D / 2];
          p[0] = c * first - s * second;
          p[D / 2] = s * first + c * second;
        }
    }
}

// SwiGLU (Shazeer 2020): y = silu(gate) up,  silu(g) = g s(g),  s(g) = 1 / (1 + exp(-g)).
static void swiglu(Matrix *y, const Matrix *gate, const Matrix *up) {
#pragma omp parallel for
  for (long i = 0; i < y->count; i++)
    y->value[i] = gate->value[i] / (1 + expf(-gate->value[i])) * up->value[i];
}

// dup += dy silu(gate),  dgate += dy up silu'(gate),  silu'(g) = s + g s (1 - s).
static void swiglu_backward(const Matrix *y, Matrix *gate, Matrix *up) {
#pragma omp parallel for
  for (long i = 0; i < y->count; i++) {
    float g = gate->value[i], s = 1 / (1 + expf(-g));
    up->grad[i] += y->grad[i] * g * s;
    gate->grad[i] += y->grad[i] * up->value[i] * (s + g * s * (1 - s));
  }
}

// Attention (Vaswani et al. 2017): the query of token t mixes the values of the tokens up to t,
//
//     out[t] = sum over u <= t of p[t, u] v[u],   p[t] = softmax over u of  q[t] . k[u] / sqrt(D)
//
// in each head. Q / K query heads in a row share a key/value head (grouped heads; Ainslie et al. 2023). All p
// are kept; FlashAttention (Dao et al. 2022) computes them again instead.
static void attend(Block *b, const Llama *m) {
  long T = m->seq_len, D = m->config.head_dim, Q = b->q.columns / D, K = b->k.columns / D;
  zero(b->mixed.value, b->mixed.count);
#pragma omp parallel for collapse(2)
  for (long s = 0; s < m->batch; s++) // of the sequences
    for (long h = 0; h < Q; h++)
      for (long t = 0; t < T; t++) {
        long row = (s * T + t) * Q * D + h * D, shared = s * T * K * D + h * K / Q * D;
        float *p = b->probs + ((s * Q + h) * T + t) * T, max = -INFINITY, sum = 0;
        const float *q = b->q.value + row, *k = b->k.value + shared, *v = b->v.value + shared;
        for (long u = 0; u <= t; u++) max = fmaxf(max, p[u] = dot(q, k + u * K * D, D) / sqrtf((float)D));
        for (long u = 0; u <= t; u++) sum += p[u] = expf(p[u] - max);
        for (long u = 0; u <= t; u++) add_scaled(b->mixed.value + row, p[u] /= sum, v + u * K * D, D);
      }
}

// dp[t, u] = dout[t] . v[u];  of each dot product q . k, dz = p (dp - sum over u of p dp) / sqrt(D), as for
//                             every softmax;
// dq[t] += dz[t, u] k[u],  dk[u] += dz[t, u] q[t],  dv[u] += p[t, u] dout[t].
static void attend_backward(Block *b, const Llama *m) {
  long T = m->seq_len, D = m->config.head_dim, Q = b->q.columns / D, K = b->k.columns / D;
#pragma omp parallel for collapse(2)
  for (long s = 0; s < m->batch; s++)
    for (long kv = 0; kv < K; kv++) // all heads that share dk and dv: no two threads add to the same
      for (long h = kv * Q / K; h < (kv + 1) * Q / K; h++)
        for (long t = 0; t < T; t++) {
          long row = (s * T + t) * Q * D + h * D;
          const float *p = b->probs + ((s * Q + h) * T + t) * T, *dout = b->mixed.grad + row;
          float sum = dot(dout, b->mixed.value + row, D); // of p dp = p (dout . v) = dout . out
          for (long u = 0; u <= t; u++) {
            long other = (s * T + u) * K * D + kv * D;
            float dz = p[u] * (dot(dout, b->v.value + other, D) - sum) / sqrtf((float)D);
            add_scaled(b->q.grad + row, dz, b->k.value + other, D);
            add_scaled(b->k.grad + other, dz, b->q.value + row, D);
            add_scaled(b->v.grad + other, p[u], dout, D);
          }
        }
}

// --- the loss ----------------------------------------------------------------------------------------------

// exp(z[j] - anchor) in z's place, 0 for j = left_out. Returns the sum.
static float exponentials(float *z, float anchor, long left_out, long count) {
  float sum = 0;
  for (long j = 0; j < count; j++) sum += z[j] = j == left_out ? 0 : expf(z[j] - anchor);
  return sum;
}

// Computes each token's loss and the gradients of their mean from the final norm's output x [N, H], the head
// W [V, H] and the targets y [N]. Since nothing comes after the loss, the gradient of each token's loss is
// known beforehand: 1 / N.
//
//     z    = x W^T                                            the logits [N, V]
//     loss = log(sum over j of exp(z[j])) - z[y]              which is -log softmax(z)[y]
//     dz   = (softmax(z) - onehot(y)) / N                     in z's place
//     dx  += dz W,   dW += dz^T x
static void loss_materialized(Llama *m, const int32_t *y) {
  Matrix *x = &m->final, *w = m->head;
  long N = x->rows, H = x->columns, V = w->rows;
  matmul_weight(m->logits, x->value, w, N);
#pragma omp parallel for
  for (long n = 0; n < N; n++) {
    float *z = m->logits + n * V, target = z[y[n]], max = target;
    for (long j = 0; j < V; j++) max = fmaxf(max, z[j]);
    float sum = exponentials(z, max, -1, V); // less the maximum, so that exp does not overflow
    for (long j = 0; j < V; j++) z[j] = (z[j] / sum - (j == y[n])) / (float)N;
    m->losses[n] = max + logf(sum) - target;
  }
  matmul(x->grad, plain(m->logits, V), plain(w->value, H), N, H, V);
  matmul(w->grad, transposed(m->logits, V), plain(x->value, H), V, H, N);
}

// The same in chunks of C tokens, since a token's loss needs no other token, and with the target's logit as a
// row's anchor in place of the maximum, which is known only when all logits are.
//
//     a    = x . W[y]                                     one dot product
//     E[j] = exp(z[j] - a) for j != y,   E[y] = 0         [C, V], all there is of width V
//     R    = sum over j of E[j]                          the softmax is E / (1 + R), and 1 / (1 + R) at y
//     loss = log(1 + R)
//     r, c = 1 / (1 + R), -R / (1 + R)                    so that  softmax(z) - onehot(y) = r E + c onehot(y)
//     dx   = (r (E W) + c W[y]) / N
//     dW  += E^T (r x) / N,   dW[y] += c x / N
//
// Only r and c depend on a whole row, and they act on vectors of length H. So on a GPU a logit becomes E in
// the registers of its matmul, and is never stored. E overflows where a logit leads the target's by 88. If R
// exceeds 2^96, the row is computed again with its maximum as the anchor; the target's exponential e is then
// less than 1. x's gradient must be 0 before: the matmul adds E W to it, and then its rows are scaled.
static void loss_fused(Llama *m, const int32_t *y) {
  Matrix *x = &m->final, *w = m->head;
  long N = x->rows, H = x->columns, V = w->rows;
  for (long first = 0; first < N; first += m->chunk) {
    long end = least(first + m->chunk, N), C = end - first;
    float *E = m->logits, *r = m->r, *c = m->c;
    matmul_weight(E, x->value + first * H, w, C); // still z
#pragma omp parallel for
    for (long n = first; n < end; n++) {
      const float *xn = x->value + n * H;
      float *En = E + (n - first) * V, target = dot(xn, w->value + y[n] * H, H), a = target, e = 1;
      float R = exponentials(En, a, y[n], V);
      if (R > 0x1p96f) {
        for (long j = 0; j < V; j++) a = fmaxf(a, En[j] = dot(xn, w->value + j * H, H));
        e = expf(target - a);
        R = exponentials(En, a, y[n], V);
      }
      m->losses[n] = a - target + log1pf(R + (e - 1));
      r[n] = 1 / (R + e) / (float)N;
      c[n] = -R * r[n];
    }
    matmul(x->grad + first * H, plain(E, V), plain(w->value, H), C, H, V);
    for (long n = first; n < end; n++) {
      float *xn = x->value + n * H, *dxn = x->grad + n * H;
      for (long h = 0; h < H; h++) dxn[h] = r[n] * dxn[h] + c[n] * w->value[y[n] * H + h];
      add_scaled(w->grad + y[n] * H, c[n], xn, H);
      for (long h = 0; h < H; h++) xn[h] *= r[n]; // x's values are spoilt: nobody reads them again
    }
    matmul(w->grad, transposed(E, V), plain(x->value + first * H, H), V, H, C);
  }
}

// --- forward and backward ----------------------------------------------------------------------------------

// Returns the mean loss. Zeroes all gradients; the loss then writes the gradients of the final norm's output
// and the head.
static double forward(Llama *m, const int32_t *tokens, const int32_t *targets) {
  float eps = m->config.rms_norm_eps;
  double sum = 0;
  for (long i = 0; i < m->count; i++) zero(m->all[i]->grad, m->all[i]->count);
  embed(&m->embedded, tokens, &m->embed_tokens);
  for (long l = 0; l < m->config.num_hidden_layers; l++) {
    Block *b = &m->blocks[l];
    rmsnorm(&b->norm1, b->x, &b->input_layernorm, eps);
    linear(&b->q, &b->norm1, &b->q_proj, NULL);
    linear(&b->k, &b->norm1, &b->k_proj, NULL);
    linear(&b->v, &b->norm1, &b->v_proj, NULL);
    rotate(&b->q, m, 1);
    rotate(&b->k, m, 1);
    attend(b, m);
    linear(&b->middle, &b->mixed, &b->o_proj, b->x);

    rmsnorm(&b->norm2, &b->middle, &b->post_attention_layernorm, eps);
    linear(&b->gate, &b->norm2, &b->gate_proj, NULL);
    linear(&b->up, &b->norm2, &b->up_proj, NULL);
    swiglu(&b->act, &b->gate, &b->up);
    linear(&b->out, &b->act, &b->down_proj, &b->middle);
  }
  rmsnorm(&m->final, m->out, &m->norm, eps);
  (m->chunk ? loss_fused : loss_materialized)(m, targets);
  for (long n = 0; n < m->final.rows; n++) sum += (double)m->losses[n];
  return sum / (double)m->final.rows;
}

// The lines above, from the last to the first.
static void backward(Llama *m, const int32_t *tokens) {
  float eps = m->config.rms_norm_eps;
  rmsnorm_backward(&m->final, m->out, &m->norm, eps);
  for (long l = m->config.num_hidden_layers; l-- > 0;) {
    Block *b = &m->blocks[l];
    linear_backward(&b->out, &b->act, &b->down_proj, &b->middle);
    swiglu_backward(&b->act, &b->gate, &b->up);
    linear_backward(&b->up, &b->norm2, &b->up_proj, NULL);
    linear_backward(&b->gate, &b->norm2, &b->gate_proj, NULL);
    rmsnorm_backward(&b->norm2, &b->middle, &b->post_attention_layernorm, eps);

    linear_backward(&b->middle, &b->mixed, &b->o_proj, b->x);
    attend_backward(b, m);
    rotate(&b->k, m, -1);
    rotate(&b->q, m, -1);
    linear_backward(&b->v, &b->norm1, &b->v_proj, NULL);
    linear_backward(&b->k, &b->norm1, &b->k_proj, NULL);
    linear_backward(&b->q, &b->norm1, &b->q_proj, NULL);
    rmsnorm_backward(&b->norm1, b->x, &b->input_layernorm, eps);
  }
  embed_backward(&m->embedded, tokens, &m->embed_tokens);
}

// --- the update --------------------------------------------------------------------------------------------

// The learning rate of step 0, 1, ...: up to the peak in `warmup` equal steps, then half a cosine down to a
// tenth of it.
static double schedule(double peak, long step, long warmup, long steps) {
  if (step < warmup) return peak * (double)(step + 1) / (double)warmup;
  double progress = (double)(step - warmup) / (double)(steps - warmup);
  return peak * (0.1 + 0.9 * (1 + cos(acos(-1) * progress)) / 2);
}

// AdamW (Loshchilov, Hutter 2019), step 0, 1, ..., of gradients scaled down if their norm exceeds max_norm.
// Returns the norm.
//
//     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2   running means; they begin at 0, and are
//     m' = m / (1 - beta1^t),        v' = v / (1 - beta2^t)          too small in early steps t = 1, 2, ...
//     w = w - lr (m' / (sqrt(v') + epsilon) + decay w)
static double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, decay = 0.1, max_norm = 1;

static double update(Llama *model, double lr, long step) {
  double squares = 0, t = (double)(step + 1);
  for (long i = 0; i < model->count; i++) {
    const Matrix *w = model->all[i];
    for (long k = 0; w->m && k < w->count; k++) squares += (double)w->grad[k] * (double)w->grad[k];
  }
  double norm = sqrt(squares), scale = max_norm > 0 && norm > max_norm ? max_norm / norm : 1;
  for (long i = 0; i < model->count; i++) {
    Matrix *w = model->all[i];
    if (!w->m) continue;
#pragma omp parallel for
    for (long k = 0; k < w->count; k++) {
      double g = scale * (double)w->grad[k];
      double m = beta1 * (double)w->m[k] + (1 - beta1) * g, v = beta2 * (double)w->v[k] + (1 - beta2) * g * g;
      double direction = m / (1 - pow(beta1, t)) / (sqrt(v / (1 - pow(beta2, t))) + epsilon);
      if (w->rows > 1) direction += decay * (double)w->value[k]; // norms do not decay
      w->value[k] -= (float)(lr * direction);
      w->m[k] = (float)m;
      w->v[k] = (float)v;
    }
  }
  return norm;
}

// --- making a model ----------------------------------------------------------------------------------------

// Uniform in [0, 1).
static double uniform(void) {
  return rand() / (RAND_MAX + 1.0);
}

// Normal, of mean 0 and variance 1 (Box, Muller 1958).
static double normal(void) {
  double radius = sqrt(-2 * log(1 - uniform()));
  return radius * cos(2 * acos(-1) * uniform());
}

static void matrix(Llama *m, Matrix *a, long rows, long columns) {
  *a = (Matrix){.rows = rows, .columns = columns, .count = rows * columns};
  a->value = zeros(a->count, sizeof(float));
  a->grad = zeros(a->count, sizeof(float));
  m->all[m->count++] = a;
}

// Matrices begin at N(0, 0.02^2), the weights of norms at 1.
static void weight(Llama *m, Matrix *w, const char *name, long rows, long columns) {
  matrix(m, w, rows, columns);
  snprintf(w->name, sizeof w->name, "%s%s.weight", m->prefix, name);
  w->m = zeros(w->count, sizeof(float));
  w->v = zeros(w->count, sizeof(float));
  for (long k = 0; k < w->count; k++) w->value[k] = rows > 1 ? (float)(0.02 * normal()) : 1;
}

static void make_block(Llama *m, long l) {
  const Config *c = &m->config;
  Block *b = &m->blocks[l];
  long N = m->batch * m->seq_len, H = c->hidden_size, F = c->intermediate_size;
  long QD = c->num_attention_heads * c->head_dim, KD = c->num_key_value_heads * c->head_dim;
  snprintf(m->prefix, sizeof m->prefix, "model.layers.%ld.", l);
  weight(m, &b->input_layernorm, "input_layernorm", 1, H);
  weight(m, &b->q_proj, "self_attn.q_proj", QD, H);
  weight(m, &b->k_proj, "self_attn.k_proj", KD, H);
  weight(m, &b->v_proj, "self_attn.v_proj", KD, H);
  weight(m, &b->o_proj, "self_attn.o_proj", H, QD);
  weight(m, &b->post_attention_layernorm, "post_attention_layernorm", 1, H);
  weight(m, &b->gate_proj, "mlp.gate_proj", F, H);
  weight(m, &b->up_proj, "mlp.up_proj", F, H);
  weight(m, &b->down_proj, "mlp.down_proj", H, F);
  matrix(m, &b->norm1, N, H);
  matrix(m, &b->q, N, QD);
  matrix(m, &b->k, N, KD);
  matrix(m, &b->v, N, KD);
  matrix(m, &b->mixed, N, QD);
  matrix(m, &b->middle, N, H);
  matrix(m, &b->norm2, N, H);
  matrix(m, &b->gate, N, F);
  matrix(m, &b->up, N, F);
  matrix(m, &b->act, N, F);
  matrix(m, &b->out, N, H);
  b->probs = zeros(N * c->num_attention_heads * m->seq_len, sizeof(float));
  b->x = m->out;
  m->out = &b->out;
}

// chunk 0: the materialized mode.
static void make_model(Llama *m, Config c, long batch, long seq_len, long chunk) {
  long N = batch * seq_len, H = c.hidden_size, V = c.vocab_size, L = c.num_hidden_layers;
  *m = (Llama){.config = c, .batch = batch, .seq_len = seq_len, .chunk = least(chunk, N)};
  m->blocks = zeros(L, sizeof *m->blocks);
  m->all = zeros(5 + 20 * L, sizeof(Matrix *));
  weight(m, &m->embed_tokens, "model.embed_tokens", V, H);
  matrix(m, m->out = &m->embedded, N, H);
  weight(m, &m->norm, "model.norm", 1, H);
  matrix(m, &m->final, N, H);
  m->head = c.tie_word_embeddings ? &m->embed_tokens : &m->lm_head;
  if (!c.tie_word_embeddings) weight(m, &m->lm_head, "lm_head", V, H);
  m->logits = zeros((chunk ? m->chunk : N) * V, sizeof(float));
  m->r = zeros(N, sizeof(float));
  m->c = zeros(N, sizeof(float));
  m->losses = zeros(N, sizeof(float));
  for (long l = 0; l < L; l++) make_block(m, l);
}

// --- text, options and the loop ----------------------------------------------------------------------------

static unsigned char *text;
static long text_length;

static void append_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) die("cannot open", path);
  for (size_t got = 1; got; text_length += (long)got) {
    text = realloc(text, (size_t)text_length + 65536);
    if (!text) die("out of memory", "");
    got = fread(text + text_length, 1, 65536, file);
  }
  if (ferror(file)) die("cannot read", path);
  fclose(file);
}

// B windows of T bytes from anywhere in the text. A token's target is the next one.
static void draw_batch(const Llama *m, int32_t *tokens, int32_t *targets) {
  for (long b = 0; b < m->batch; b++) {
    const unsigned char *window = text + (long)(uniform() * (double)(text_length - m->seq_len));
    for (long t = 0; t < m->seq_len; t++) {
      tokens[b * m->seq_len + t] = window[t];
      targets[b * m->seq_len + t] = window[t + 1];
    }
  }
}

// Checks the largest gradient of each of twenty matrices: by definition it is the change of the loss when the
// weight moves a little, over the distance. Returns how many are off.
static int check_gradients(Llama *m, const int32_t *tokens, const int32_t *targets) {
  const float distance = 0.004f;
  int wrong = 0;
  for (long i = 0, checked = 0; checked < 20; i++) {
    Matrix *w = m->all[i % m->count];
    if (!w->m) continue; // an activation
    forward(m, tokens, targets);
    backward(m, tokens);
    long at = 0;
    for (long k = 0; k < w->count; k++)
      if (fabsf(w->grad[k]) > fabsf(w->grad[at])) at = k;
    float gradient = w->grad[at], value = w->value[at];
    w->value[at] = value + distance;
    double up = forward(m, tokens, targets);
    w->value[at] = value - distance;
    double down = forward(m, tokens, targets), slope = (up - down) / (2 * (double)distance);
    w->value[at] = value;
    bool off = !(fabs(slope - (double)gradient) <= 0.01 * fabs(slope) + 3e-5);
    printf("%-46s %9ld  gradient %10.6f  difference %10.6f%s\n", w->name, at, (double)gradient, slope,
           off ? "  off" : "");
    wrong += off;
    checked++;
  }
  return wrong;
}

int main(int argc, char **argv) {
  Config c = {256, 128, 384, 4, 4, 2, 32, 1, 10000, 1e-5f}; // in the order of its members
  long batch = 8, seq_len = 128, fused = 1, chunk = 128, steps = 150, warmup = 10, check = 0;
  double peak = 2e-3, sum = 0;
  for (int i = 1; i < argc; i++) {
    const char *a = argv[i];
    if (sscanf(a, "vocab_size=%ld", &c.vocab_size) == 1 || sscanf(a, "fused=%ld", &fused) == 1) continue;
    if (sscanf(a, "check=%ld", &check) == 1) continue;
    if (sscanf(a, "chunk=%ld", &chunk) == 1 || sscanf(a, "steps=%ld", &steps) == 1) continue;
    append_file(a);
  }
  if (check)
    batch = 1, steps = 20; // where every target still has p = 1 / V, a wrong term may be too small to see
  if (c.vocab_size < 256 || chunk < 1) die("vocab_size must be at least 256, for bytes,", "and chunk 1");
  if (text_length <= seq_len)
    die("usage: FILE... [vocab_size=N] [fused=0] [chunk=N] [steps=N] [check=1]", "");

  static Llama m;
  make_model(&m, c, batch, seq_len, fused ? chunk : 0);
  long N = batch * seq_len, rows = fused ? least(chunk, N) : N;
  printf("%ld bytes of text; of %ld x %ld logits, %ld rows (%.2f MiB) at a time\n", text_length, N,
         c.vocab_size, rows, (double)(rows * c.vocab_size) * 0x1p-18);
  int32_t *tokens = zeros(N, sizeof *tokens), *targets = zeros(N, sizeof *targets);
  time_t start = time(NULL);
  for (long step = 0; step < steps; step++) {
    draw_batch(&m, tokens, targets);
    sum = forward(&m, tokens, targets) + (step % 10 ? sum : 0);
    backward(&m, tokens);
    double norm = update(&m, schedule(peak, step, warmup, steps), step);
    if ((step + 1) % 10 && step + 1 < steps) continue;
    sum /= (double)(step % 10 + 1); // the mean of ten steps, at the end of fewer
    printf("step %ld  loss %.3f  norm %.2f  %.0f s\n", step + 1, sum, norm, difftime(time(NULL), start));
  }
  return check && check_gradients(&m, tokens, targets);
}
