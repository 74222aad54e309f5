// FP8: codes against their definition, quantisation code by code, matmuls of codes against float64.

#include <float.h>

#include "tests/harness.h"

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

static Fp8 poisoned_fp8(Harness *h, int64_t rows, int64_t columns) {
  return (Fp8){.codes = poisoned(h, DTYPE_E4M3, rows, columns),
               .transposed = poisoned(h, DTYPE_E4M3, columns, rows),
               .amax = poisoned_vector(h, DTYPE_F32, 1)};
}

static uint8_t *codes_of(Harness *h, Tensor t) {
  uint8_t *codes = (uint8_t *)host_values(h, tensor_count(t));
  backend_to_host(h->backend, codes, t);
  return codes;
}

static void check_codes(Harness *h, int64_t rows, int64_t columns, double scale, double outlier) {
  double *x = random_values(h, rows * columns, scale);
  x[rows * columns / 2] = outlier;
  Tensor given = tensor_from(h, h->dtype, x, rows, columns);
  Fp8 both = poisoned_fp8(h, rows, columns), one = both, other = both;
  one.transposed = other.codes = (Tensor){0};
  quantize(h->backend, (Quantize){.out = both, .x = given});
  uint8_t *codes = codes_of(h, both.codes), *transposed = codes_of(h, both.transposed);
  double amax = 0;
  for (int64_t i = 0; i < rows * columns; i++) amax = fmax(amax, fabs(x[i]));
  assert_true(*values_of(h, both.amax) == amax);
  float factor = fminf(448 / (float)amax, FLT_MAX);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t i = 0; i < columns; i++) {
      uint8_t want = e4m3_from_f32((float)x[n * columns + i] * factor);
      uint8_t got = codes[n * columns + i], turned = transposed[i * rows + n];
      if (got != want || turned != want)
        fail_msg("%lld x %lld: (%lld, %lld) became %02x and %02x, not %02x", (long long)rows,
                 (long long)columns, (long long)n, (long long)i, got, turned, want);
    }
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
    Fp8 fp8 = poisoned_fp8(h, 32, 48);
    quantize(h->backend, (Quantize){.out = fp8, .x = tensor_from(h, h->dtype, x, 32, 48)});
    assert_false(isfinite(*values_of(h, fp8.amax)));
    Tensor out = poisoned(h, h->dtype, 32, 32);
    matmul_fp8(h->backend, (MatmulFp8){.out = out, .a = fp8, .b = fp8});
    double *values = values_of(h, out);
    for (int k = 0; k < 32 * 32; k++) assert_false(isfinite(values[k]));
  }
}

static double *decoded(Harness *h, Fp8 fp8) {
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
  Fp8 a = poisoned_fp8(h, rows, inputs), b = poisoned_fp8(h, outputs, inputs);
  quantize(h->backend,
           (Quantize){a, tensor_from(h, h->dtype, random_values(h, rows * inputs, 1), rows, inputs)});
  quantize(h->backend, (Quantize){b, tensor_from(h, h->dtype, random_values(h, outputs * inputs, 0.02),
                                                 outputs, inputs)});
  MatmulFp8 m = {.a = a, .b = b};
  if (variant & BIAS) m.bias = vector_from(h, cuda ? DTYPE_BF16 : dtype, bias, outputs);
  Tensor addend = strided_from(h, dtype, terms, rows, outputs, outputs + 16);
  if (variant & (RESIDUAL | IN_PLACE)) m.residual = addend;
  m.out = variant & IN_PLACE ? addend : poisoned_strided(h, dtype, rows, outputs, outputs + 16);
  double *x = decoded(h, a), *w = decoded(h, b), *want = host_values(h, rows * outputs);
  reference_linear(want, x, w, false, variant & BIAS ? bias : NULL, tensor_exists(m.residual) ? terms : NULL,
                   rows, inputs, outputs);
  matmul_fp8(h->backend, m);
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
      if (!(variant & BIAS)) check_matmul(h, DTYPE_F32, shapes[i][0], shapes[i][1], shapes[i][2], variant);
    }
}

HARNESS_TEST(test_refusals) {
  Tensor x = poisoned(h, h->dtype, 16, 24), amax = poisoned_vector(h, DTYPE_F32, 1);
  Tensor codes = poisoned(h, DTYPE_E4M3, 16, 24), out = poisoned(h, h->dtype, 16, 16);
  const char *part = "FP8 takes multiples of 16 rows and columns, and not ";
  assert_fails(h, part, quantize(h->backend, (Quantize){.out = {.codes = codes, .amax = amax}, .x = x}));
  Fp8 fp8 = {.codes = codes, .amax = amax};
  assert_fails(h, part, matmul_fp8(h->backend, (MatmulFp8){.out = out, .a = fp8, .b = fp8}));
}

TEST_MAIN(run_on_backends())
