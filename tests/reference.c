#include "tests/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/random.h"

void reference_embedding(double *out, const int32_t *tokens, const double *token_weight,
                         const double *position_weight, int64_t rows, int64_t hidden, int64_t seq_len) {
  for (int64_t n = 0; n < rows; n++)
    for (int64_t i = 0; i < hidden; i++) {
      out[n * hidden + i] = token_weight[tokens[n] * hidden + i];
      if (position_weight) out[n * hidden + i] += position_weight[n % seq_len * hidden + i];
    }
}

void reference_norm(NormKind kind, double *out, double *mean, double *rstd, const double *x,
                    const double *weight, const double *bias, int64_t rows, int64_t hidden, double epsilon) {
  for (int64_t n = 0; n < rows; n++) {
    const double *row = x + n * hidden;
    double centre = 0, square = 0;
    if (kind == NORM_LAYER)
      for (int64_t i = 0; i < hidden; i++) centre += row[i] / (double)hidden;
    for (int64_t i = 0; i < hidden; i++) square += (row[i] - centre) * (row[i] - centre) / (double)hidden;
    double r = 1 / sqrt(square + epsilon);
    for (int64_t i = 0; i < hidden; i++)
      out[n * hidden + i] = (row[i] - centre) * r * weight[i] + (kind == NORM_LAYER ? bias[i] : 0);
    if (mean) mean[n] = centre;
    rstd[n] = r;
  }
}

double reference_gelu(double x) {
  return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

void reference_linear(double *out, const double *x, const double *weight, bool in_out_layout,
                      const double *bias, const double *residual, int64_t rows, int64_t inputs,
                      int64_t outputs) {
#pragma omp parallel for collapse(2) if (rows * outputs * inputs > 1 << 20)
  for (int64_t n = 0; n < rows; n++)
    for (int64_t o = 0; o < outputs; o++) {
      const double *row = x + n * inputs, *column = weight + o * inputs;
      double sum = bias ? bias[o] : 0;
      if (in_out_layout) {
        for (int64_t i = 0; i < inputs; i++) sum += row[i] * weight[i * outputs + o];
      } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < inputs; i++) sum += row[i] * column[i];
      }
      out[n * outputs + o] = sum + (residual ? residual[n * outputs + o] : 0);
    }
}

void reference_swiglu(double *out, const double *gate_up, int64_t rows, int64_t width) {
  for (int64_t n = 0; n < rows; n++)
    for (int64_t i = 0; i < width; i++) {
      double gate = gate_up[n * 2 * width + i], up = gate_up[n * 2 * width + width + i];
      out[n * width + i] = gate / (1 + exp(-gate)) * up;
    }
}

void reference_rope(double *qkv, const double *cos_sin, AttentionShape s, int64_t rotated) {
  int64_t half = rotated / 2, width = (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim;
  for (int64_t n = 0; n < s.batch * s.seq_len; n++)
    for (int64_t h = 0; h < s.num_heads + s.num_key_value_heads; h++)
      for (int64_t i = 0; i < half; i++) {
        double *x = qkv + n * width + h * s.head_dim + i, *y = x + half, kept = *x;
        double c = cos_sin[n % s.seq_len * rotated + i];
        double sine = cos_sin[n % s.seq_len * rotated + half + i];
        *x = kept * c - *y * sine;
        *y = *y * c + kept * sine;
      }
}

void reference_cross_entropy(double *loss, const double *logits, const int32_t *targets, int64_t rows,
                             int64_t vocab) {
  for (int64_t n = 0; n < rows; n++) {
    const double *z = logits + n * vocab;
    loss[n] = 0;
    if (targets[n] == IGNORE_INDEX) continue;
    double non_target = 0; // in units of the target's exponential; log1p keeps the digits of a loss near 0
    for (int64_t j = 0; j < vocab; j++)
      if (j != targets[n]) non_target += exp(z[j] - z[targets[n]]);
    loss[n] = log1p(non_target);
  }
}

static void store(double *output, int64_t n, double value) {
  if (output) output[n] = value;
}

static double or_else(const double *values, int64_t n, double otherwise) {
  return values ? values[n] : otherwise;
}

// The tiles' places, and their factors.
typedef struct {
  int64_t *tile_row; // [rows]: of a token, or -1
  int64_t tile_rows, across;
  double *factor; // [tile_rows, across]: 1 / q, or 0
} Sampling;

static void reference_loss_row(ReferenceLoss *r, const Sampling *sampling, int64_t n, double scale, double *v,
                               double *derivative) {
  const double *x = r->x + n * r->hidden, *w = r->class_weights;
  int64_t V = r->vocab;
  int32_t y = r->targets[n];
  double T = r->temperature > 0 ? r->temperature : 1, eps = r->label_smoothing;
  reference_linear(v, x, r->weight, false, r->bias, NULL, 1, r->hidden, V);
  double maximum = -INFINITY, best = 0, weight_sum = 0, weighted = 0;
  for (int64_t j = 0; j < V; j++) {
    double u = r->softcap > 0 ? r->softcap * tanh(v[j] / r->softcap) : v[j];
    derivative[j] = (r->softcap > 0 ? 1 - u * u / (r->softcap * r->softcap) : 1) / T;
    v[j] = u / T;
    if (v[j] > maximum) maximum = v[j], best = (double)j;
    weight_sum += or_else(w, j, 1);
    weighted += or_else(w, j, 1) * v[j];
  }
  // The non-targets' sum apart from the target's term keeps the digits of a loss near 0.
  double non_target = 0, mean_v = 0, squares = 0;
  for (int64_t j = 0; j < V; j++) {
    double e = exp(v[j] - maximum);
    mean_v += e * v[j];
    squares += e * e;
    if (j != y) non_target += e;
  }
  double target_e = exp(v[y] - maximum), all = non_target + target_e;
  double nll = target_e > 1e-200 ? log1p(non_target / target_e) : maximum - v[y] + log(non_target);
  double lse = v[y] + nll, entropy = lse - mean_v / all, z_loss = r->z_loss * lse * lse;
  double loss = (1 - eps) * or_else(w, y, 1) * nll + eps / (double)V * (weight_sum * lse - weighted);
  store(r->loss, n, loss);
  store(r->token_z_loss, n, z_loss);
  store(r->log_prob, n, -nll);
  store(r->logsumexp, n, lse);
  store(r->entropy, n, entropy);
  store(r->log_sum_sq_probs, n, log(squares / (all * all)));
  store(r->max_logit, n, maximum);
  store(r->correct, n, best == y);
  store(r->predicted, n, best);
  double s = scale * or_else(r->token_weights, n, 1), b = scale * or_else(r->entropy_weights, n, 0);
  r->objective += s * (loss + z_loss) + b * entropy;
  if (!r->dx) return;
  double *dx = r->dx + n * r->hidden;
#pragma omp parallel for reduction(+ : dx[:r->hidden]) if (V * r->hidden > 1 << 20)
  for (int64_t j = 0; j < V; j++) {
    double p = exp(v[j] - lse), nll_weight = (1 - eps) * or_else(w, y, 1);
    if (r->full_mass > 0 && j != y)
      p *= sampling->factor[sampling->tile_row[n] * sampling->across + j / LCE_TILE_COLUMNS];
    double p_minus_target = j == y ? expm1(-nll) : p; // p - 1 without the cancellation
    double dv = s * (nll_weight * p_minus_target + eps / (double)V * (weight_sum * p - or_else(w, j, 1)) +
                     2 * r->z_loss * lse * p) -
                b * p * (v[j] - lse + entropy);
    double dz = dv * derivative[j];
    if (r->dbias) r->dbias[j] += dz;
    for (int64_t i = 0; i < r->hidden; i++) {
      dx[i] += dz * r->weight[j * r->hidden + i];
      r->dweight[j * r->hidden + i] += dz * x[i];
    }
  }
}

// p of a token's non-target entries; the target's is 0.
static void non_target_probabilities(const ReferenceLoss *r, int64_t n, double *p) {
  double T = r->temperature > 0 ? r->temperature : 1, maximum = -INFINITY, all = 0;
  reference_linear(p, r->x + n * r->hidden, r->weight, false, NULL, NULL, 1, r->hidden, r->vocab);
  for (int64_t j = 0; j < r->vocab; j++) maximum = fmax(maximum, p[j] / T);
  for (int64_t j = 0; j < r->vocab; j++) all += p[j] = exp(p[j] / T - maximum);
  for (int64_t j = 0; j < r->vocab; j++) p[j] = j == r->targets[n] ? 0 : p[j] / all;
}

// 1 / q where a tile is kept, or 0; `sum` is the sum of q over the tiles before it. Between 2^(k - 1/2) and
// 2^(k + 1/2) times full_mass q is 2^k, and never above 1.
static double tile_factor(ReferenceLoss *r, double mass, double *sum) {
  if (mass == 0) return 0;
  double place = log2(mass / r->full_mass), power = fmax(-32, fmin(0, round(place)));
  if (place < 0) r->margin = fmin(r->margin, 0.5 - fabs(place - power));
  double before = floor(*sum);
  *sum += exp2(power);
  return floor(*sum) > before ? exp2(-power) : 0;
}

static Sampling make_sampling(ReferenceLoss *r, double *p) {
  int64_t across = (r->vocab + LCE_TILE_COLUMNS - 1) / LCE_TILE_COLUMNS;
  Sampling s = {.tile_row = host_alloc(r->rows, sizeof *s.tile_row, "a test"), .across = across};
  s.factor = host_alloc(r->rows * across, sizeof *s.factor, "a test");
  double *mass = host_alloc(r->rows * across, sizeof *mass, "a test");
  int64_t *chunk_of = host_alloc(r->rows, sizeof *chunk_of, "a test"),
          *block_of = host_alloc(r->rows, sizeof *block_of, "a test");
  for (int64_t n = 0, place = 0; n < r->rows; n++) {
    bool counted = r->targets[n] != IGNORE_INDEX;
    s.tile_row[n] = -1;
    if (!counted && r->counted_alone) continue;
    s.tile_rows += place % r->chunk % LCE_TILE_ROWS == 0;
    s.tile_row[n] = s.tile_rows - 1;
    chunk_of[s.tile_rows - 1] = place / r->chunk,
                           block_of[s.tile_rows - 1] = place % r->chunk / LCE_TILE_ROWS;
    place++;
    if (!counted) continue;
    non_target_probabilities(r, n, p);
    for (int64_t j = 0; j < r->vocab; j++) mass[s.tile_row[n] * across + j / LCE_TILE_COLUMNS] += p[j];
  }
  r->margin = 0.5;
  double sum = 0;
  for (int64_t i = 0; i < s.tile_rows * across; i++) {
    uint64_t stream = (uint64_t)chunk_of[i / across], block = (uint64_t)block_of[i / across];
    if (i % across == 0) sum = (double)(random_bits(r->seed, stream, block) >> 32) * 0x1p-32;
    s.factor[i] = tile_factor(r, mass[i], &sum);
    r->sampled[0] += s.factor[i] == 0;
    r->sampled[1] += 1;
    r->sampled[2] += s.factor[i] == 0 ? mass[i] : 0;
  }
  free(mass);
  free(chunk_of);
  free(block_of);
  return s;
}

static void zero(double *values, int64_t count) {
  for (int64_t i = 0; values && i < count; i++) values[i] = 0;
}

void reference_loss(ReferenceLoss *r) {
  double *v = host_alloc(2 * r->vocab, sizeof *v, "a test"), normaliser = 0;
#define ZERO(name, ...) zero(r->name, r->rows);
  TOKEN_OUTPUTS(ZERO)
#undef ZERO
  zero(r->loss, r->rows);
  zero(r->dx, r->rows * r->hidden);
  zero(r->dweight, r->vocab * r->hidden);
  zero(r->dbias, r->vocab);
  r->objective = 0;
  for (int64_t n = 0; n < r->rows; n++)
    if (r->targets[n] != IGNORE_INDEX) normaliser += or_else(r->class_weights, r->targets[n], 1);
  double scale = r->mean ? r->scale / normaliser : r->scale;
  zero(r->sampled, 3);
  Sampling sampling = {0};
  if (r->full_mass > 0) sampling = make_sampling(r, v);
  for (int64_t n = 0; n < r->rows; n++)
    if (r->targets[n] != IGNORE_INDEX) reference_loss_row(r, &sampling, n, scale, v, v + r->vocab);
  free(sampling.tile_row);
  free(sampling.factor);
  free(v);
}

void reference_adamw(double *weight, double *m, double *v, const double *grad, int64_t count,
                     double grad_scale, double lr, double beta1, double beta2, double epsilon,
                     double weight_decay, int64_t step) {
  for (int64_t i = 0; i < count; i++) {
    double g = grad[i] * grad_scale;
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    double m_hat = m[i] / (1 - pow(beta1, (double)step)), v_hat = v[i] / (1 - pow(beta2, (double)step));
    weight[i] -= lr * (m_hat / (sqrt(v_hat) + epsilon) + weight_decay * weight[i]);
  }
}

// x = diag(s) x for AOL's s of its rows; of its columns where it has more rows.
static void reference_aol_scale(double *x, int64_t rows, int64_t columns) {
  int64_t side = rows > columns ? columns : rows, count = rows * columns / side;
  int64_t apart = rows > columns ? 1 : columns, step = rows > columns ? columns : 1;
  double *s = calloc((size_t)side, sizeof *s);
  for (int64_t i = 0; i < side; i++) {
    for (int64_t j = 0; j < side; j++) {
      double product = 0;
      for (int64_t k = 0; k < count; k++) product += x[i * apart + k * step] * x[j * apart + k * step];
      s[i] += fabs(product);
    }
    s[i] = 1 / sqrt(fmax(s[i], 1e-20));
  }
  for (int64_t i = 0; i < side; i++)
    for (int64_t k = 0; k < count; k++) x[i * apart + k * step] *= s[i];
  free(s);
}

// (a + b A + c A A) x with A = x x^T, whatever the shape: for a tall x the same polynomial as x (a + b B + c
// B B), B = x^T x.
void reference_orthogonalize(double *x, int64_t rows, int64_t columns, double scale) {
  int64_t count = rows * columns;
  double *gram = calloc((size_t)(rows * rows), sizeof *gram), *one = calloc((size_t)count, sizeof *one);
  double *three = calloc((size_t)count, sizeof *three), *five = calloc((size_t)count, sizeof *five);
  static const double steps[4][3] = {{7.9845, -21.3937, 14.3833},
                                     {3.9641, -2.8377, 0.5158},
                                     {3.4368, -2.4752, 0.4762},
                                     {2.4901, -1.8343, 0.4368}};
  reference_aol_scale(x, rows, columns);
  for (int step = 0; step < 4; step++) {
    const double *p = steps[step];
    memcpy(one, x, (size_t)count * sizeof *x);
    reference_linear(gram, one, one, false, NULL, NULL, rows, columns, rows);
    reference_linear(three, gram, one, true, NULL, NULL, rows, rows, columns);
    reference_linear(five, gram, three, true, NULL, NULL, rows, rows, columns);
    for (int64_t i = 0; i < count; i++) x[i] = p[0] * one[i] + p[1] * three[i] + p[2] * five[i];
  }
  for (int64_t i = 0; i < count; i++) x[i] *= scale;
  free(gram);
  free(one);
  free(three);
  free(five);
}

void reference_muon(double *weight, double *m, const double *grad, int64_t rows, int64_t columns,
                    int64_t stride, double grad_scale, double lr, double momentum, double weight_decay) {
  double *update = calloc((size_t)(rows * columns), sizeof *update);
  for (int64_t i = 0; i < rows * columns; i++) {
    int64_t at = i / columns * stride + i % columns;
    double g = grad[at] * grad_scale;
    m[at] = momentum * m[at] + (1 - momentum) * g;
    update[i] = (1 - momentum) * g + momentum * m[at];
  }
  reference_orthogonalize(update, rows, columns, 0.2 * sqrt((double)(rows > columns ? rows : columns)));
  for (int64_t i = 0; i < rows * columns; i++) {
    double *w = &weight[i / columns * stride + i % columns];
    *w -= lr * (update[i] + weight_decay * *w);
  }
  free(update);
}

double reference_dot(const double *a, const double *b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

double euclidean_distance(const double *a, const double *b, int64_t count) {
  double squares = 0;
  for (int64_t i = 0; i < count; i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return sqrt(squares);
}

double relative_distance(const double *a, const double *b, int64_t count) {
  return euclidean_distance(a, b, count) / sqrt(reference_dot(b, b, count) + 1e-30);
}
