#include "tests/loss_problem.h"

#include "kernels/lce/call.h"

ReferenceLoss loss_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double deviation) {
  ReferenceLoss r = {.rows = rows, .hidden = hidden, .vocab = vocab, .scale = 0.5};
  r.x = random_values(h, rows * hidden, 1);
  r.weight = random_values(h, vocab * hidden, deviation / sqrt((double)hidden));
  r.targets = random_ids(h, rows, vocab);
  reference_outputs(h, &r);
  return r;
}

void loss_problem_add(Harness *h, ReferenceLoss *r, int terms) {
  if (terms & TERM_SMOOTHING) r->label_smoothing = (float)0.1;
  if (terms & TERM_Z_LOSS) r->z_loss = (float)0.02;
  if (terms & TERM_SOFTCAP) r->softcap = 3;
  if (terms & TERM_TEMPERATURE) r->temperature = 1.5;
  if (terms & TERM_CLASS_WEIGHTS) {
    r->class_weights = random_values(h, r->vocab, 1);
    for (int64_t j = 0; j < r->vocab; j++) r->class_weights[j] = 0.25 + fabs(r->class_weights[j]);
  }
  if (terms & TERM_TOKEN_WEIGHTS) r->token_weights = random_values(h, r->rows, 1);
  if (terms & TERM_ENTROPY) r->entropy_weights = random_values(h, r->rows, 1);
  if (terms & TERM_BIAS) r->bias = random_values(h, r->vocab, 1);
  r->mean = terms & TERM_MEAN;
}

void loss_problem_lead(ReferenceLoss *p, int64_t n, int64_t column, double lead) {
  int64_t hidden = p->hidden, axis = n % hidden;
  for (int64_t i = 0; i < hidden; i++) p->x[n * hidden + i] = i == axis;
  p->weight[column * hidden + axis] = p->weight[p->targets[n] * hidden + axis] + lead;
}

void loss_problem_lead_far(ReferenceLoss *p) {
  for (int64_t n = 0; n < p->rows; n++) {
    p->targets[n] = (int32_t)(100 * n + 5);
    for (int64_t i = 0; i < p->rows; i++) p->x[n * p->hidden + i] = 0; // the axes of the rows below
  }
  loss_problem_lead(p, 1, 1400, 500); // exp overflows by far
  loss_problem_lead(p, 4, 3, 88.5);   // just below the largest number
  loss_problem_lead(p, 5, 700, 86);   // E is no overflow yet, and E W would be
  loss_problem_lead(p, 6, 1500, 1e4);
  loss_problem_lead(p, 7, 0, 60); // no overflow
  loss_problem_lead(p, 8, 0, 0);
  p->weight[p->targets[8] * p->hidden + 8] = 500; // every E is 0
}

ReferenceLoss loss_problem_tiles(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, int64_t chunk) {
  enum { KINDS = 3, RUN = 150 };
  h->draws = 700; // whatever was drawn before: with these, masses keep away from where q changes
  ReferenceLoss r = loss_problem(h, rows, hidden, vocab, 0.02 * sqrt((double)hidden)), *p = &r;
  r.full_mass = 50, r.seed = 7, r.chunk = chunk;
  for (int64_t i = 0; i < p->rows * p->hidden; i++) p->x[i] *= 0.05;
  for (int64_t n = 0; n < p->rows; n++) p->x[n * p->hidden + n / RUN % KINDS] += 4;
  for (int64_t j = 0; j < p->vocab; j++)
    for (int k = 0; k < KINDS; k++)
      if (j / LCE_TILE_COLUMNS % KINDS != k) p->weight[j * p->hidden + k] -= 0.5;
  return r;
}

bool samples(const Harness *h, int64_t hidden, int64_t chunk) {
  if (h->backend->device == ON_CPU) return true;
  return !h->backend->no_sampling && h->dtype == DTYPE_BF16 && hidden % 8 == 0 && chunk >= LCE_TILE_ROWS;
}

void check_sampled(Harness *h, const LinearCrossEntropy *a, ReferenceLoss *r, LossBefore before) {
  if (!samples(h, r->hidden, r->chunk)) r->full_mass = 0;
  reference_loss(r);
  const double *stats = values_of(h, a->sampling.stats), *want = r->sampled;
  double rounding = 0.5 * dtype_epsilon(h->dtype) + 1e-5;
  if (!(stats[0] == want[0] && stats[1] == want[1] && fabs(stats[2] - want[2]) <= rounding * want[2]))
    fail_msg("%g of %g tiles and a mass of %.9g are dropped, not %g of %g and %.9g", stats[0], stats[1],
             stats[2], want[0], want[1], want[2]);
  check_loss(h, "sampled", a, r, 0, before, with_size(within(16, (double)(r->hidden + r->vocab)), 8),
             with_size(within_stored(h, 8, 0), r->scale));
}

void assert_some_dropped(const ReferenceLoss *r) {
  if (r->full_mass > 0 && !(r->sampled[0] > 0 && r->sampled[0] < r->sampled[1] && r->margin > 0.002))
    fail_msg("%g of %g tiles are dropped, and a mass is within %g of where q changes", r->sampled[0],
             r->sampled[1], r->margin);
}

Tensor counted_positions(Harness *h, const int32_t *targets, int64_t rows, int64_t *counted) {
  int32_t *positions = random_ids(h, rows, 1);
  int64_t count = 0;
  for (int ignored = 0; ignored < 2; ignored++) {
    for (int64_t n = 0; n < rows; n++)
      if ((targets[n] == IGNORE_INDEX) == ignored) positions[count++] = (int32_t)n;
    if (!ignored) *counted = count;
  }
  return ids_from(h, positions, rows);
}

#define IN_CALL(name, size, kind)                                                                            \
  { #name, size, kind, offsetof(ReferenceLoss, name), offsetof(LinearCrossEntropy, name) }
#define IN_OUTPUTS(name, type, statistic)                                                                    \
  {#name, "N",                                                                                               \
   offsetof(SoftmaxStatistics, statistic) == offsetof(SoftmaxStatistics, row_sum) ? LOSS_OUTPUT              \
                                                                                  : LOSS_OF_LOGITS,          \
   offsetof(ReferenceLoss, name), offsetof(LinearCrossEntropy, outputs.name)},
#define APART(name, size)                                                                                    \
  { #name, size, LOSS_APART, offsetof(ReferenceLoss, name), 0 }
const LossField loss_fields[] = {IN_CALL(x, "NH", LOSS_OPERAND),
                                 IN_CALL(weight, "VH", LOSS_OPERAND),
                                 IN_CALL(bias, "V", LOSS_OPERAND),
                                 {"class_weights", "V", LOSS_INPUT, offsetof(ReferenceLoss, class_weights),
                                  offsetof(LinearCrossEntropy, terms.class_weights)},
                                 IN_CALL(token_weights, "N", LOSS_INPUT),
                                 APART(entropy_weights, "N"),
                                 IN_CALL(loss, "N", LOSS_OUTPUT),
                                 TOKEN_OUTPUTS(IN_OUTPUTS) IN_CALL(dx, "NH", LOSS_GRADIENT),
                                 IN_CALL(dweight, "VH", LOSS_GRADIENT),
                                 IN_CALL(dbias, "V", LOSS_GRADIENT),
                                 {0}};

double **loss_values(const ReferenceLoss *r, const LossField *f) {
  return (double **)((char *)r + f->reference);
}

Tensor *loss_tensor(const LinearCrossEntropy *a, const LossField *f) {
  return (Tensor *)((char *)a + f->call);
}

static int64_t rows_of(const ReferenceLoss *r, const LossField *f) {
  return f->size[0] == 'N' ? r->rows : r->vocab;
}

int64_t loss_count(const ReferenceLoss *r, const LossField *f) {
  return rows_of(r, f) * (f->size[1] ? r->hidden : 1);
}

void reference_outputs(Harness *h, ReferenceLoss *r) {
  for (const LossField *f = loss_fields; f->name; f++)
    if (f->kind == LOSS_OUTPUT || f->kind == LOSS_OF_LOGITS)
      *loss_values(r, f) = host_values(h, loss_count(r, f));
}

void reference_gradients(Harness *h, ReferenceLoss *r) {
  for (const LossField *f = loss_fields; f->name; f++)
    if (f->kind == LOSS_GRADIENT && (r->bias || strcmp(f->name, "dbias") != 0))
      *loss_values(r, f) = host_values(h, loss_count(r, f));
}

static Tensor unwritten(Harness *h, const ReferenceLoss *r, const LossField *f) {
  bool ids = !strcmp(f->name, "predicted"), dx = !strcmp(f->name, "dx");
  Tensor t = poisoned(h,
                      ids  ? DTYPE_I32
                      : dx ? h->dtype
                           : DTYPE_F32,
                      rows_of(r, f), f->size[1] ? r->hidden : 1);
  return f->size[1] ? t : tensor_flat(t);
}

LinearCrossEntropy loss_call(Harness *h, const ReferenceLoss *r, LceMode mode, int64_t chunk) {
  LinearCrossEntropy a = {.mode = mode,
                          .chunk = chunk,
                          .targets = ids_from(h, r->targets, r->rows),
                          .terms = {.label_smoothing = (float)r->label_smoothing,
                                    .z_loss = (float)r->z_loss,
                                    .softcap = (float)r->softcap,
                                    .temperature = (float)r->temperature},
                          .sampling = {.full_mass = (float)r->full_mass, .seed = r->seed},
                          .scale = (float)r->scale,
                          .mean = r->mean};
  for (const LossField *f = loss_fields; f->name; f++) {
    double *values = *loss_values(r, f);
    if (!values || f->kind == LOSS_OF_LOGITS || f->kind == LOSS_APART) continue;
    Dtype dtype = f->kind == LOSS_OPERAND ? h->dtype : DTYPE_F32;
    if (f->kind == LOSS_OUTPUT || f->kind == LOSS_GRADIENT)
      *loss_tensor(&a, f) = unwritten(h, r, f);
    else if (f->size[1])
      *loss_tensor(&a, f) = tensor_from(h, dtype, values, rows_of(r, f), r->hidden);
    else
      *loss_tensor(&a, f) = vector_from(h, dtype, values, rows_of(r, f));
  }
  return a;
}

LinearCrossEntropy sampled_loss_call(Harness *h, ReferenceLoss *r, int64_t chunk) {
  reference_gradients(h, r);
  LinearCrossEntropy a = loss_call(h, r, LCE_FUSED, chunk);
  a.outputs = (TokenOutputs){0};
  a.sampling.stats = poisoned_vector(h, DTYPE_F32, 3);
  return a;
}

LinearCrossEntropy loss_call_of_rank(const Backend *backend, LinearCrossEntropy a, int64_t rows,
                                     int64_t part) {
  int64_t vocab = a.weight.shape[0], first = min_i64(vocab, backend->rank * part);
  int64_t count = min_i64(part, vocab - first);
  a.shard = (VocabShard){.first = first, .vocab_size = vocab};
  if (count == 0) a.dweight = a.dbias = (Tensor){0};
  for (const LossField *f = loss_fields; f->name; f++) {
    Tensor *t = loss_tensor(&a, f);
    if (!tensor_exists(*t) || !strcmp(f->name, "class_weights")) continue;
    *t = f->size[0] == 'N' ? tensor_rows(*t, backend->rank * rows, rows) : tensor_rows(*t, first, count);
  }
  a.targets = tensor_rows(a.targets, backend->rank * rows, rows);
  return a;
}

void loss_call_all_outputs(Harness *h, LinearCrossEntropy *a, const ReferenceLoss *r) {
  for (const LossField *f = loss_fields; f->name; f++)
    if (f->kind == LOSS_OF_LOGITS) *loss_tensor(a, f) = unwritten(h, r, f);
  if (a->mode == LCE_MATERIALIZED) a->outputs.log_sum_sq_probs = (Tensor){0};
}

void loss_call_adds(Harness *h, LinearCrossEntropy *a, LossBefore *before) {
  Tensor w = a->dweight;
  a->accumulate = true;
  before->dweight = random_values(h, tensor_count(w), 1);
  a->dweight = tensor_from(h, DTYPE_F32, before->dweight, w.shape[0], w.shape[1]);
  if (!tensor_exists(a->dbias)) return;
  before->dbias = random_values(h, w.shape[0], 1);
  a->dbias = vector_from(h, DTYPE_F32, before->dbias, w.shape[0]);
}

void check_loss(Harness *h, const char *which, const LinearCrossEntropy *a, const ReferenceLoss *r,
                int64_t first, LossBefore before, Tolerance outputs, Tolerance gradients) {
  // Predictions are what the logits are that were stored.
  bool exact = outputs.operations == dtype_epsilon(DTYPE_F32);
  for (const LossField *f = loss_fields; f->name; f++) {
    Tensor got = *loss_tensor(a, f);
    bool prediction = !strcmp(f->name, "predicted") || !strcmp(f->name, "correct");
    if (f->kind < LOSS_OUTPUT || !tensor_exists(got) || (prediction && !exact)) continue;
    char what[320];
    snprintf(what, sizeof what, "%s (%s)", f->name, which);
    int64_t row = f->size[0] == 'N' ? first : a->shard.first, count = tensor_count(got);
    const double *want = *loss_values(r, f) + row * (f->size[1] ? r->hidden : 1);
    double *all = copied_values(h, want, count);
    const double *added = !strcmp(f->name, "dweight") ? before.dweight
                          : !strcmp(f->name, "dbias") ? before.dbias
                                                      : NULL;
    for (int64_t i = 0; added && i < count; i++) all[i] += added[i];
    // The error of the logits, of H terms, multiplies exponentials, of which V or N are summed.
    gradients.terms = (double)(r->hidden + (f->size[0] == 'N' ? r->vocab : r->rows));
    Tolerance t = f->kind == LOSS_GRADIENT ? gradients : outputs;
    if (prediction) t = (Tolerance){0};
    check_values(h, what, got, all, t);
    if (f->kind != LOSS_GRADIENT) continue;
    // And as a whole, since most entries are smaller than an entry's tolerance.
    double off = euclidean_distance(values_of(h, got), all, count);
    double size = euclidean_distance(want, host_values(h, count), count) * gradients.size / r->scale;
    if (!(off <= (6 * dtype_epsilon(h->dtype) + 1e-3) * size + 1e-6 * sqrt((double)count)))
      fail_msg("%s is off by %g of %g", what, off, size);
  }
}

void check_ignored(Harness *h, const char *what, const LinearCrossEntropy *a, const int32_t *targets) {
  for (const LossField *f = loss_fields; f->name; f++) {
    Tensor t = *loss_tensor(a, f);
    if (f->kind < LOSS_OUTPUT || f->size[0] != 'N' || !tensor_exists(t)) continue;
    const double *values = values_of(h, t);
    int64_t width = tensor_count(t) / t.shape[0];
    for (int64_t k = 0; k < tensor_count(t); k++)
      if (targets[k / width] == IGNORE_INDEX && values[k] != 0)
        fail_msg("%s: %s of the ignored token %d is %g", what, f->name, (int)(k / width), values[k]);
  }
}

void check_same_bits(Harness *h, const LinearCrossEntropy *a, const LinearCrossEntropy *b) {
  for (const LossField *f = loss_fields; f->name; f++)
    if (f->kind >= LOSS_OUTPUT && tensor_exists(*loss_tensor(a, f)) && tensor_exists(*loss_tensor(b, f)))
      check_bitwise_equal(h, f->name, *loss_tensor(a, f), *loss_tensor(b, f));
}

double check_unbiased(Harness *h, void (*run)(Backend *, LinearCrossEntropy), LinearCrossEntropy a,
                      const LinearCrossEntropy *exact, int seeds) {
  Tensor sampled[] = {a.dx, a.dweight}, whole[] = {exact->dx, exact->dweight};
  double *want[2], *sum[2], *zeros[2], squares[2] = {0}, dropped = 0;
  for (int i = 0; i < 2; i++) {
    want[i] = values_of(h, whole[i]);
    sum[i] = host_values(h, tensor_count(whole[i])), zeros[i] = host_values(h, tensor_count(whole[i]));
  }
  for (int seed = 1; seed <= seeds; seed++) {
    a.sampling.seed = (uint64_t)seed;
    run(h->backend, a);
    check_bitwise_equal(h, "loss with sampling", a.loss, exact->loss);
    if (tensor_exists(a.sampling.stats)) {
      const double *stats = values_of(h, a.sampling.stats);
      assert_true(stats[1] > 0 && stats[0] <= stats[1] && (stats[0] > 0) == (stats[2] > 0));
      dropped += stats[0] / stats[1] / seeds;
    }
    for (int i = 0; i < 2; i++) {
      int64_t count = tensor_count(sampled[i]);
      const double *got = values_of(h, sampled[i]);
      for (int64_t k = 0; k < count; k++) sum[i][k] += got[k] - want[i][k];
      double off = euclidean_distance(got, want[i], count);
      squares[i] += off * off;
      if (seed != seeds / 8 && seed != seeds) continue;
      double mean = euclidean_distance(sum[i], zeros[i], count) / seed, expected = sqrt(squares[i]) / seed;
      double rounding = dtype_epsilon(sampled[i].dtype) * euclidean_distance(want[i], zeros[i], count);
      if (!(expected > 0)) fail_msg("%s: no seed drops a tile whose gradient is not 0", i ? "dweight" : "dx");
      if (!(mean < 2 * expected + rounding))
        fail_msg("%s: the mean over %d seeds is off by %g, where %g is expected", i ? "dweight" : "dx", seed,
                 mean, expected);
    }
  }
  return dropped;
}

void loss_with_entropies(Backend *backend, LinearCrossEntropy a, Tensor entropy_weights) {
  lce_check(backend, &a);
  Call c = lce_begin(backend, &a);
  lce_materialized(&c, entropy_weights);
  lce_end(&c);
}
