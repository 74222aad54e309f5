// The operations in float64: the formulas of kernels/kernels.h as plain loops over dense, row-major arrays.
#pragma once

#include "kernels/kernels.h"

// position_weight may be NULL.
void reference_embedding(double *out, const int32_t *tokens, const double *token_weight,
                         const double *position_weight, int64_t rows, int64_t hidden, int64_t seq_len);

// mean may be NULL; bias is read for NORM_LAYER only.
void reference_norm(NormKind kind, double *out, double *mean, double *rstd, const double *x,
                    const double *weight, const double *bias, int64_t rows, int64_t hidden, double epsilon);

double reference_gelu(double x);

// out = residual + (x W^T + bias), bias and residual NULL when absent.
void reference_linear(double *out, const double *x, const double *weight, bool in_out_layout,
                      const double *bias, const double *residual, int64_t rows, int64_t inputs,
                      int64_t outputs);

void reference_swiglu(double *out, const double *gate_up, int64_t rows, int64_t width);

// Rotates the first `rotated` elements of each head; cos_sin [T, rotated].
void reference_rope(double *qkv, const double *cos_sin, AttentionShape shape, int64_t rotated);

// loss[n] = logsumexp(z[n]) - z[n, target]; 0 for IGNORE_INDEX.
void reference_cross_entropy(double *loss, const double *logits, const int32_t *targets, int64_t rows,
                             int64_t vocab);

// The whole of kernels.h's "the loss", and the gradients of its objective. Absent arrays are NULL; what is
// computed is written, not added. Ignored tokens give 0 everywhere.
typedef struct {
  int64_t rows, hidden, vocab;
  double *x, *weight, *bias;
  int32_t *targets;
  double *class_weights, *token_weights, *entropy_weights;
  double label_smoothing, z_loss, softcap, temperature; // temperature 0 is read as 1
  double scale;
  bool mean; // scale by 1 / sum of the counted targets' class weights as well
  // TileSampling, full_mass 0 for none: of chunks of so many tokens, or of counted tokens alone.
  double full_mass;
  uint64_t seed;
  int64_t chunk;
  bool counted_alone;
  double sampled[3]; // its stats
  double margin;     // how near the log2 of a mass comes to where its probability changes, at least
  double *loss;      // [rows], as the outputs are; needed
#define MEMBER(name, ...) double *name;
  TOKEN_OUTPUTS(MEMBER)
#undef MEMBER
  double *dx, *dweight, *dbias;
  double objective;
} ReferenceLoss;

void reference_loss(ReferenceLoss *r);

// One step on n elements, in place on weight, m and v.
void reference_adamw(double *weight, double *m, double *v, const double *grad, int64_t count,
                     double grad_scale, double lr, double beta1, double beta2, double epsilon,
                     double weight_decay, int64_t step);

// One step of Muon; rows of weight, m and grad are `stride` apart. reference_orthogonalize: x = scale NS(x).
void reference_muon(double *weight, double *m, const double *grad, int64_t rows, int64_t columns,
                    int64_t stride, double grad_scale, double lr, double momentum, double weight_decay);
void reference_orthogonalize(double *x, int64_t rows, int64_t columns, double scale);

// The sum of a[i] * b[i]: an objective whose gradient with respect to a is b.
double reference_dot(const double *a, const double *b, int64_t count);
// The root of the sum of (a[i] - b[i])^2; and over that of the sum of b[i]^2.
double euclidean_distance(const double *a, const double *b, int64_t count);
double relative_distance(const double *a, const double *b, int64_t count);
