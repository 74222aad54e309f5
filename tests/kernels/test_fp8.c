// FP8: codes against their definition, quantisation code by code, matmuls of codes against float64.

#include <float.h>

#include "tests/loss_problem.h"

// Four bits of exponent with bias 7, three of mantissa; exponent 0 is that of 1 without the leading one.
static double defined(int code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  double size = exponent ? (1 + mantissa / 8.0) * pow(2, exponent - 7) : mantissa / 8.0 * pow(2, -6);
  return code & 0x80 ? -size : size;
}

static void assert_code(double value, int want) {
  int got = e4m3_from_f32((float)value);
  if (got != want) fail_msg("%.9g became %02x, not %02x", value, (unsigned)got, (unsigned)want);
}

HARNESS_TEST(test_codes) {
  for (int code = 0; code < 256; code++) {
    if ((code & 0x7F) == 0x7F) {
      assert_true(isnan(e4m3_to_f32((uint8_t)code)));
      continue;
    }
    assert_true((double)e4m3_to_f32((uint8_t)code) == defined(code));
    assert_code(defined(code), code);
  }
  for (int code = 0; code < 0x7E; code++) { // between two codes: the nearer one, or the even one
    double low = defined(code), high = defined(code + 1), tie = (low + high) / 2, bit = (high - low) / 1024;
    for (int sign = 0; sign < 2; sign++) {
      double s = sign ? -1 : 1;
      assert_code(s * tie, (code + code % 2) | sign << 7);
      assert_code(s * (tie - bit), code | sign << 7);
      assert_code(s * (tie + bit), (code + 1) | sign << 7);
    }
  }
  static const double large[] = {448.1, 464, 480, 1e30, INFINITY};
  for (int i = 0; i < 5; i++) assert_code(large[i], 0x7E), assert_code(-large[i], 0xFE);
  assert_code(FLT_MIN, 0), assert_code(-0.0, 0x80);
  assert_int_equal(e4m3_from_f32(NAN), 0x7F);
}

static Quantized poisoned_fp8(Harness *h, int64_t rows, int64_t columns) {
  return (Quantized){.codes = poisoned(h, DTYPE_E4M3, rows, columns),
                     .transposed = poisoned(h, DTYPE_E4M3, columns, rows),
                     .amax = poisoned_vector(h, DTYPE_F32, 1)};
}

static uint8_t *codes_of(Harness *h, Tensor t) {
  uint8_t *codes = (uint8_t *)host_values(h, tensor_count(t));
  backend_to_host(h->backend, codes, t);
  return codes;
}

// Both kinds of codes, of x by amax.
static void assert_codes(Harness *h, Quantized fp8, const double *x, double amax, int64_t rows,
                         int64_t columns) {
  uint8_t *codes = codes_of(h, fp8.codes), *transposed = codes_of(h, fp8.transposed);
  float factor = fminf(448 / (float)amax, FLT_MAX);
  assert_true(*values_of(h, fp8.amax) == amax);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t i = 0; i < columns; i++) {
      uint8_t want = e4m3_from_f32((float)x[n * columns + i] * factor);
      uint8_t got = codes[n * columns + i], turned = transposed[i * rows + n];
      if (got != want || turned != want)
        fail_msg("%lld x %lld: (%lld, %lld) became %02x and %02x, not %02x", (long long)rows,
                 (long long)columns, (long long)n, (long long)i, got, turned, want);
    }
}

static void check_codes(Harness *h, int64_t rows, int64_t columns, double scale, double outlier) {
  double *x = random_values(h, rows * columns, scale);
  x[rows * columns / 2] = outlier;
  Tensor given = tensor_from(h, h->dtype, x, rows, columns);
  Quantized both = poisoned_fp8(h, rows, columns), one = both, other = both;
  one.transposed = other.codes = (Tensor){0};
  quantize(h->backend, (Quantize){.out = both, .x = given});
  uint8_t *codes = codes_of(h, both.codes), *transposed = codes_of(h, both.transposed);
  double amax = 0;
  for (int64_t i = 0; i < rows * columns; i++) amax = fmax(amax, fabs(x[i]));
  assert_codes(h, both, x, amax, rows, columns);
  // Either alone is the same.
  quantize(h->backend, (Quantize){.out = one, .x = given});
  quantize(h->backend, (Quantize){.out = other, .x = given});
  assert_memory_equal(codes_of(h, both.codes), codes, (size_t)(rows * columns));
  assert_memory_equal(codes_of(h, both.transposed), transposed, (size_t)(rows * columns));
  memory_pop_to(&h->backend->memory, 0);
}

HARNESS_TEST(test_quantize) {
  if (h->backend->no_fp8) skip();
  static const int64_t shapes[][2] = {{16, 16},   {16, 128}, {128, 16},  {128, 128},
                                      {144, 112}, {48, 400}, {272, 144}, {1040, 528}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    check_codes(h, shapes[i][0], shapes[i][1], 1, 0);
    check_codes(h, shapes[i][0], shapes[i][1], 1e-3, -57); // an outlier that makes the others small
  }
  check_codes(h, 32, 48, 1e-38, 0); // 448 / amax overflows
  check_codes(h, 32, 48, 0, 0);
  check_codes(h, 32, 48, 1e30, 0);
}

// A lost number stays visible in whatever is computed from the codes.
HARNESS_TEST(test_not_finite) {
  if (h->backend->no_fp8) skip();
  static const double lost[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 3; i++) {
    double *x = random_values(h, 32 * 48, 1);
    x[100] = lost[i];
    Quantized fp8 = poisoned_fp8(h, 32, 48);
    quantize(h->backend, (Quantize){.out = fp8, .x = tensor_from(h, h->dtype, x, 32, 48)});
    assert_false(isfinite(*values_of(h, fp8.amax)));
    Tensor out = poisoned(h, h->dtype, 32, 32);
    matmul_quantized(h->backend, (MatmulQuantized){.out = out, .a = fp8, .b = fp8});
    double *values = values_of(h, out);
    for (int k = 0; k < 32 * 32; k++) assert_false(isfinite(values[k]));
  }
}

// By the rule of operations that make a matrix: the rows that they sample, and a margin of 8, or max |x|.
static void assert_made(Harness *h, Quantized fp8, Tensor made, bool sample_suffices) {
  int64_t rows = made.shape[0], columns = made.shape[1], apart = rows < 512 ? 1 : rows / 256;
  double *x = values_of(h, made), amax = 0, sampled = 0;
  for (int64_t i = 0; i < rows * columns; i++) {
    amax = fmax(amax, fabs(x[i]));
    if (i / columns % apart == 0) sampled = fmax(sampled, fabs(x[i]));
  }
  if (apart > 1) sampled *= 8;
  assert_true((amax <= sampled) == sample_suffices);
  assert_codes(h, fp8, x, fmax(amax, sampled), rows, columns);
}

// x and dout with zeros in the rows that are sampled, or an outlier in another row.
enum { PLAIN, OUTLIER, ZEROS, LOST, MADE_KINDS };

static void check_made(Harness *h, Activation activation, int64_t rows, int64_t width, int kind) {
  bool gated = is_gated(activation), suffices = kind == PLAIN || rows < 512;
  int64_t columns = gated ? 2 * width : width, apart = rows < 512 ? 1 : rows / 256;
  double *x = random_values(h, rows * columns, 1), *dout = random_values(h, rows * width, 1e-3);
  int64_t other = rows - 1 - (rows - 1) % apart - (apart > 1); // a row that is not sampled
  if (kind == OUTLIER || kind == LOST) {
    x[other * columns + 3] = kind == LOST ? NAN : 200, dout[other * width + 3] = 8;
    if (gated) x[other * columns + width + 3] = 200;
  }
  for (int64_t n = 0; kind == ZEROS && apart > 1 && n < rows; n += apart)
    for (int64_t i = 0; i < columns; i++) x[n * columns + i] = dout[n * width + i % width] = 0;
  Tensor in = tensor_from(h, h->dtype, x, rows, columns), d = tensor_from(h, h->dtype, dout, rows, width);
  Tensor out = poisoned(h, h->dtype, rows, width), dx = poisoned(h, h->dtype, rows, columns), none = {0};
  activation_forward(h->backend, (ActivationForward){activation, .out = out, .x = in});
  activation_backward(h->backend, (ActivationBackward){activation, .dx = dx, .dout = d, .x = in});
  for (int with_values = 0; with_values < 2; with_values++) {
    Quantized forward = poisoned_fp8(h, rows, width), backward = poisoned_fp8(h, rows, columns);
    Tensor out_too = with_values ? poisoned(h, h->dtype, rows, width) : none;
    Tensor dx_too = with_values ? gated ? in : d : none; // in place
    activation_forward(h->backend,
                       (ActivationForward){activation, .out = out_too, .x = in, .quantized = forward});
    activation_backward(h->backend, (ActivationBackward){activation, .dx = dx_too, .dout = d, .x = in,
                                                         .quantized = backward});
    if (kind == LOST) {
      assert_true(isnan(*values_of(h, forward.amax)) && isnan(*values_of(h, backward.amax)));
      continue;
    }
    assert_made(h, forward, out, suffices);
    assert_made(h, backward, dx, suffices);
    if (!with_values) continue;
    assert_memory_equal(values_of(h, out_too), values_of(h, out), (size_t)(rows * width) * sizeof(double));
    assert_memory_equal(values_of(h, dx_too), values_of(h, dx), (size_t)(rows * columns) * sizeof(double));
  }
  memory_pop_to(&h->backend->memory, 0);
}

HARNESS_TEST(test_activations) {
  if (h->backend->no_fp8) skip();
  static const int64_t shapes[][2] = {{16, 16}, {144, 80}, {512, 48}, {1040, 272}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int kind = 0; kind < MADE_KINDS; kind++) {
      check_made(h, ACTIVATION_GELU, shapes[i][0], shapes[i][1], kind);
      check_made(h, ACTIVATION_SWIGLU, shapes[i][0], shapes[i][1], kind);
    }
}

static double *decoded(Harness *h, Quantized fp8) {
  uint8_t *codes = codes_of(h, fp8.codes);
  double *values = host_values(h, tensor_count(fp8.codes)), scale = *values_of(h, fp8.amax) / 448;
  for (int64_t i = 0; i < tensor_count(fp8.codes); i++) values[i] = (double)e4m3_to_f32(codes[i]) * scale;
  return values;
}

enum { BIAS = 1, RESIDUAL = 2, IN_PLACE = 4, VARIANTS = 8 };

static void check_matmul(Harness *h, Dtype dtype, int64_t rows, int64_t outputs, int64_t inputs,
                         int variant) {
  bool cuda = h->backend->device == ON_CUDA;
  double *terms = random_values(h, rows * outputs, 3), *bias = random_values(h, outputs, 1);
  Quantized a = poisoned_fp8(h, rows, inputs), b = poisoned_fp8(h, outputs, inputs);
  quantize(h->backend,
           (Quantize){a, tensor_from(h, h->dtype, random_values(h, rows * inputs, 1), rows, inputs)});
  quantize(h->backend, (Quantize){b, tensor_from(h, h->dtype, random_values(h, outputs * inputs, 0.02),
                                                 outputs, inputs)});
  MatmulQuantized m = {.a = a, .b = b};
  if (variant & BIAS) m.bias = vector_from(h, cuda ? DTYPE_BF16 : dtype, bias, outputs);
  Tensor addend = strided_from(h, dtype, terms, rows, outputs, outputs + 16);
  if (variant & (RESIDUAL | IN_PLACE)) m.residual = addend;
  m.out = variant & IN_PLACE ? addend : poisoned_strided(h, dtype, rows, outputs, outputs + 16);
  double *x = decoded(h, a), *w = decoded(h, b), *want = host_values(h, rows * outputs);
  reference_linear(want, x, w, false, variant & BIAS ? bias : NULL, tensor_exists(m.residual) ? terms : NULL,
                   rows, inputs, outputs);
  matmul_quantized(h->backend, m);
  // Hopper's tensor cores align the products of an instruction to their largest and keep 13 bits below it; a
  // bf16 result that is added to may be rounded before, too.
  Tolerance t = within(4, (double)inputs);
  if (cuda) t.operations = 0x1p-13;
  if (cuda && tensor_exists(m.residual) && dtype == DTYPE_BF16) t = (Tolerance){1, 1, 0x1p-7, 1};
  check_values(h, "FP8 matmul", m.out, want, with_size(t, sqrt((double)inputs) * 0.02));
  check_gaps(h, "FP8 matmul", m.out);
  memory_pop_to(&h->backend->memory, 0);
}

HARNESS_TEST(test_matmul) {
  if (h->backend->no_fp8) skip();
  static const int64_t shapes[][3] = {{16, 16, 16}, {16, 144, 32}, {400, 48, 272}, {272, 528, 1040}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int variant = 0; variant < VARIANTS; variant++) {
      check_matmul(h, h->dtype, shapes[i][0], shapes[i][1], shapes[i][2], variant);
      if (!(variant & BIAS) && h->dtype != DTYPE_F32)
        check_matmul(h, DTYPE_F32, shapes[i][0], shapes[i][1], shapes[i][2], variant);
    }
}

// --- a scale for each row or for all, and the loss's logits of such codes ----------------------------------

static QuantizedRows coded(Harness *h, Tensor x, bool by_row) {
  QuantizedRows out = {.codes = poisoned(h, DTYPE_E4M3, x.shape[0], x.shape[1]),
                       .scale = poisoned_vector(h, DTYPE_F32, by_row ? x.shape[0] : 1)};
  quantize_rows(h->backend, (QuantizeRows){.out = out, .x = x});
  return out;
}

static double *read_of(Harness *h, QuantizedRows fp8) {
  int64_t rows = fp8.codes.shape[0], columns = fp8.codes.shape[1];
  const uint8_t *codes = codes_of(h, fp8.codes);
  double *values = host_values(h, rows * columns), *scales = values_of(h, fp8.scale);
  for (int64_t i = 0; i < rows * columns; i++)
    values[i] = (double)e4m3_to_f32(codes[i]) * scales[tensor_count(fp8.scale) > 1 ? i / columns : 0];
  return values;
}

static void check_rows(Harness *h, int64_t rows, int64_t columns, double scale, bool by_row) {
  double *x = random_values(h, rows * columns, scale);
  x[columns - 1] = -57 * scale; // an outlier
  for (int64_t i = 0; i < columns && rows > 2; i++) x[2 * columns + i] = 0;
  QuantizedRows fp8 = coded(h, tensor_from(h, h->dtype, x, rows, columns), by_row);
  const uint8_t *codes = codes_of(h, fp8.codes);
  const double *scales = values_of(h, fp8.scale), *got = read_of(h, fp8);
  int64_t of = by_row ? columns : rows * columns, step = by_row ? 1 : ceil_div(rows, FP8_SUMMED_ROWS);
  for (int64_t first = 0; first < rows * columns; first += of) {
    float amax = 0;
    double squares = 0, products = 0, error = 0;
    for (int64_t i = first; i < first + of; i++) amax = fmaxf(amax, fabsf((float)x[i]));
    for (int64_t i = first; i < first + of; i++) {
      uint8_t want = e4m3_from_f32((float)x[i] * fminf(448 / amax, FLT_MAX));
      if (codes[i] != want)
        fail_msg("element %lld of %lld x %lld times %g: code %02x, not %02x", (long long)i, (long long)rows,
                 (long long)columns, scale, codes[i], want);
      if (!by_row && i / columns % step) continue;
      squares += x[i] * x[i], products += x[i] * (double)e4m3_to_f32(want);
      error += x[i] * (got[i] - x[i]);
    }
    double want = products > 0 ? squares / products : 1, found = scales[first / of];
    if (!(fabs(found - want) <= 1e-6 * want) || !(fabs(error) <= 1e-5 * squares))
      fail_msg("scale %lld of %lld x %lld times %g is %.9g, not %.9g", (long long)(first / of),
               (long long)rows, (long long)columns, scale, found, want);
  }
}

HARNESS_TEST(test_quantize_rows) {
  if (h->backend->no_fp8) skip();
  static const int64_t shapes[][2] = {{1, 16}, {3, 48}, {131, 528}, {9, 4112}, {2500, 32}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int by_row = 0; by_row < 2; by_row++) {
      check_rows(h, shapes[i][0], shapes[i][1], 1, by_row);
      check_rows(h, shapes[i][0], shapes[i][1], 1e-15, by_row);
    }
  check_rows(h, 5, 32, 1e18, true);
  check_rows(h, 5, 32, 1e18, false);
  double *alone = host_values(h, 2500 * 32); // a value in a row that is not summed
  alone[32 + 3] = 7;
  assert_true(fabs(read_of(h, coded(h, tensor_from(h, h->dtype, alone, 2500, 32), false))[32 + 3] - 7) <
              1e-5);
  double x[3 * 32] = {[5] = NAN, [32 + 7] = -INFINITY, [64 + 1] = 2};
  Tensor given = tensor_from(h, h->dtype, x, 3, 32);
  double *scales = values_of(h, coded(h, given, true).scale);
  assert_true(isnan(scales[0]) && isnan(scales[1]) && fabs(scales[2] * 448 - 2) < 1e-6);
  assert_true(isnan(*values_of(h, coded(h, given, false).scale)));
}

// True if the logits come from codes; a GPU without the Hopper kernels, or in fp32, computes them exactly.
static bool logits_of_codes(const Harness *h) {
  return h->backend->device == ON_CPU || (h->dtype == DTYPE_BF16 && !h->backend->no_sampling);
}

typedef struct {
  int64_t rows, hidden, vocab;
  bool terms; // a soft-cap, distances and the largest logits
} CodedShape;

// E of what the codes stand for about the exact logit of the target, and dx = E W of the exact W.
static void logits_of_codes_case(Harness *h, const void *shape) {
  CodedShape s = *(const CodedShape *)shape;
  if (small_shapes() && s.rows * s.vocab > 400000) return;
  double *x = random_values(h, s.rows * s.hidden, 1),
         *weight = random_values(h, s.vocab * s.hidden, 2 / sqrt((double)s.hidden));
  int32_t *targets = random_ids(h, s.rows, s.vocab);
  targets[0] = (int32_t)s.vocab - 1;
  if (s.rows > 3) targets[3] = IGNORE_INDEX;
  for (int64_t i = 0; i < s.hidden; i++) x[i] += 2 * weight[s.vocab / 2 * s.hidden + i]; // a logit of about 8
  Tensor x_tensor = tensor_from(h, h->dtype, x, s.rows, s.hidden);
  Tensor weight_tensor = tensor_from(h, h->dtype, weight, s.vocab, s.hidden);
  QuantizedRows weight_codes = coded(h, weight_tensor, false), x_codes = coded(h, x_tensor, true);
  double *x_read = x, *weight_read = weight, *z = host_values(h, s.rows * s.vocab);
  if (logits_of_codes(h)) x_read = read_of(h, x_codes), weight_read = read_of(h, weight_codes);
  reference_linear(z, x_read, weight_read, false, NULL, NULL, s.rows, s.hidden, s.vocab);
  Tensor all = poisoned(h, DTYPE_F32, 6, s.rows), ids = ids_from(h, targets, s.rows);
  SoftmaxStatistics softmax = {0};
  Tensor *given[] = {&softmax.target_z, &softmax.anchor,     &softmax.row_sum,
                     &softmax.target_e, &softmax.e_distance, &softmax.max};
  for (int i = 0; i < (s.terms ? 6 : 4); i++) *given[i] = tensor_flat(tensor_rows(all, i, 1));
  if (s.terms) softmax.best = ids_from(h, targets, s.rows);
  double softcap = s.terms ? 5 : 0;
  lce_target_logits(h->backend, (LceTargetLogits){.target_z = softmax.target_z,
                                                  .x = x_tensor,
                                                  .weight = weight_tensor,
                                                  .targets = ids,
                                                  .softcap = (float)softcap});
  LceLogitsExp a = {.exps = poisoned_strided(h, h->dtype, s.rows, s.vocab, (s.vocab + 63) / 64 * 64),
                    .dx_raw = poisoned(h, DTYPE_F32, s.rows, s.hidden),
                    .softmax = softmax,
                    .x = x_tensor,
                    .weight = weight_tensor,
                    .x_codes = x_codes,
                    .weight_codes = weight_codes,
                    .targets = ids,
                    .softcap = (float)softcap};
  int64_t across = ceil_div(s.vocab, LCE_TILE_COLUMNS);
  if (!s.terms) a.tile_sums = poisoned(h, DTYPE_F32, s.rows, across);
  lce_logits_exp(h->backend, a);
  // Hopper adds products of codes to 14 bits: of these logits, up to 0.03 is lost.
  double error = h->backend->device == ON_CUDA && logits_of_codes(h) ? 0.05 : 3e-5;
  double stored = h->dtype == DTYPE_BF16 ? 0x1.02p-8 : 0;
  double *exps = values_of(h, a.exps), *sums = values_of(h, softmax.row_sum),
         *anchors = values_of(h, softmax.anchor);
  double *tile_sums = s.terms ? NULL : values_of(h, a.tile_sums);
  double *dx = host_values(h, s.rows * s.hidden);
  for (int64_t n = 0; n < s.rows; n++) {
    double anchor = 0, sum = 0;
    for (int64_t i = 0; i < s.hidden && targets[n] >= 0; i++)
      anchor += x[n * s.hidden + i] * weight[targets[n] * s.hidden + i];
    if (softcap > 0) anchor = softcap * tanh(anchor / softcap);
    if (targets[n] >= 0 && !(fabs(anchors[n] - anchor) <= 1e-4))
      fail_msg("anchor %lld is %.9g, not %.9g", (long long)n, anchors[n], anchor);
    for (int64_t j = 0; j < s.vocab; j++) {
      double u = z[n * s.vocab + j], slope = 1, got = exps[n * s.vocab + j];
      if (softcap > 0) u = softcap * tanh(u / softcap), slope = 1 - u * u / (softcap * softcap);
      double e = targets[n] == IGNORE_INDEX || j == targets[n] ? 0 : exp(u - anchor);
      sum += e;
      if (!(fabs(got - e * slope) <= (error + stored) * e + 1e-30))
        fail_msg("E[%lld, %lld] is %.9g, not %.9g (%lld x %lld x %lld)", (long long)n, (long long)j, got,
                 e * slope, (long long)s.rows, (long long)s.hidden, (long long)s.vocab);
      for (int64_t i = 0; i < s.hidden; i++) dx[n * s.hidden + i] += got * weight[j * s.hidden + i];
    }
    double of_tiles = s.terms ? sums[n] : 0;
    for (int64_t t = 0; t < across && !s.terms; t++) of_tiles += tile_sums[n * across + t];
    assert_true(fabs(of_tiles - sums[n]) <= (1e-5 + stored) * sum);
    if (!(fabs(sums[n] - sum) <= error * sum))
      fail_msg("row sum %lld is %.9g, not %.9g", (long long)n, sums[n], sum);
  }
  check_gaps(h, "E", in_pieces(a.exps));
  check_values(h, "E W", a.dx_raw, dx, with_size(within(8, (double)s.vocab), 1));
}

HARNESS_TEST(test_logits_of_codes) {
  if (h->backend->no_fp8) skip();
  static const CodedShape shapes[] = {{1, 16, 7, .terms = false},      {5, 48, 193, .terms = true},
                                      {130, 144, 385, .terms = false}, {257, 272, 1000, .terms = true},
                                      {129, 256, 192, .terms = false}, {300, 1040, 2001, .terms = false},
                                      {70, 2048, 1003, .terms = true}};
  RUN_CASES(h, logits_of_codes_case, shapes);
}

// The layer, in chunks: near the exact one, in the mean without a trend; a NaN stays in its row.
HARNESS_TEST(test_loss_of_codes) {
  if (h->backend->no_fp8) skip();
  enum { ROWS = 300, HIDDEN = 144, VOCAB = 1003, CHUNK = 130, LOST = 7, REPAIRED = 141 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 3);
  p.scale = 1.0 / ROWS;
  for (int64_t n = 0; n < ROWS; n += 9) p.targets[n] = IGNORE_INDEX;
  loss_problem_lead(&p, REPAIRED, (p.targets[REPAIRED] + 1) % VOCAB, 90); // its sum is too large
  reference_gradients(h, &p);
  LinearCrossEntropy calls[2] = {loss_call(h, &p, LCE_FUSED, CHUNK), loss_call(h, &p, LCE_FUSED, CHUNK)};
  calls[1].weight_codes = coded(h, calls[1].weight, false);
  const double *loss[2], *dx[2], *dweight[2];
  double mean[2] = {0};
  for (int i = 0; i < 2; i++) {
    linear_cross_entropy(h->backend, calls[i]);
    loss[i] = values_of(h, calls[i].loss), dx[i] = values_of(h, calls[i].dx),
    dweight[i] = values_of(h, calls[i].dweight);
    for (int64_t n = 0; n < ROWS; n++) mean[i] += loss[i][n] / ROWS;
  }
  assert_true(fabs(loss[1][REPAIRED] / loss[0][REPAIRED] - 1) < 0.01 && loss[0][REPAIRED] > 80);
  bool codes = logits_of_codes(h);
  double off[] = {relative_distance(dx[1], dx[0], ROWS * HIDDEN),
                  relative_distance(dweight[1], dweight[0], VOCAB * HIDDEN)};
  if (!(fabs(mean[1] / mean[0] - 1) <= (codes ? 4e-3 : 0) && off[0] <= 0.05 && off[1] <= 0.05))
    fail_msg("the mean loss is %.6g, not %.6g; dx is off by %.3g, dweight by %.3g", mean[1], mean[0], off[0],
             off[1]);
  assert_true(codes == (off[0] > 0 && off[1] > 0));
  if (codes) ASSERT_REFUSED(h, calls[1], "weight_codes are for the fused mode", a.mode = LCE_MATERIALIZED);
  const float lost = NAN; // a bf16 is its upper half
  char *at = (char *)calls[1].x.data + LOST * HIDDEN * dtype_bytes(h->dtype);
  backend_to_device(h->backend, tensor_1d(at, h->dtype, 1), (const char *)&lost + 4 - dtype_bytes(h->dtype));
  linear_cross_entropy(h->backend, calls[1]);
  const double *again = values_of(h, calls[1].loss);
  for (int64_t n = 0; n < ROWS; n++) assert_true(n == LOST ? isnan(again[n]) : again[n] == loss[1][n]);
}

HARNESS_TEST(test_refusals) {
  Tensor x = poisoned(h, h->dtype, 16, 24), amax = poisoned_vector(h, DTYPE_F32, 1);
  Tensor codes = poisoned(h, DTYPE_E4M3, 16, 24), out = poisoned(h, h->dtype, 16, 16);
  const char *part = "FP8 takes multiples of 16 rows and columns, and not ";
  assert_fails(h, part, quantize(h->backend, (Quantize){.out = {.codes = codes, .amax = amax}, .x = x}));
  Quantized fp8 = {.codes = codes, .amax = amax};
  assert_fails(h, part, matmul_quantized(h->backend, (MatmulQuantized){.out = out, .a = fp8, .b = fp8}));
  QuantizedRows by_row = {.codes = codes, .scale = poisoned_vector(h, DTYPE_F32, 16)};
  assert_fails(h, "FP8 takes multiples of 16 columns, and not x of 24",
               quantize_rows(h->backend, (QuantizeRows){.out = by_row, .x = x}));
}

TEST_MAIN(run_on_backends())
