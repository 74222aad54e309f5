#include "tools/curves/timeline.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "trainer/machine.h"
#include "trainer/speed.h"
#include "trainer/trainer.h"

// --- the clock ---------------------------------------------------------------------------------------------

// The ledger says what came and went, in which order; the operations between say when. So every operation of
// the backend is wrapped: before and after it the clock is read and the ledger's new events are dated.
static struct {
  const BackendOps *real;
  Backend *backend;
  Timeline *timeline;
  double clock;   // of a plan
  int64_t tokens; // of the step
  double started; // of a device
  size_t dated;   // events of the ledger that have a date
} record;

// What a plan's clock takes an operation to last: as on a device that reaches this many flops and bytes a
// second. Only the proportions matter.
typedef struct {
  double flops, bytes;
} Work;

static double planned_seconds(Work work) {
  bool cuda = record.backend->device == ON_CUDA;
  return work.flops / (cuda ? 650e12 : 100e9) + work.bytes / (cuda ? 3.5e12 : 20e9);
}

static double now(void) {
  if (record.backend->memory.planning) return record.clock;
  backend_synchronize(record.backend);
  return now_seconds() - record.started;
}

static void add_moment(Timeline *t, double seconds, const LedgerEvent *e) {
  // What came and went without any time between is not seen.
  if (t->count && t->moments[t->count - 1].seconds == seconds) t->count--;
  if (t->count == t->capacity) {
    t->capacity = t->capacity ? 2 * t->capacity : 1024;
    t->moments = realloc(t->moments, (size_t)t->capacity * sizeof *t->moments);
    if (!t->moments) fail("out of host memory for a timeline");
  }
  Moment *m = &t->moments[t->count++];
  m->seconds = seconds;
  m->step = e->step;
  memcpy(m->bytes, e->bytes, sizeof m->bytes);
}

static void date_events(void) {
  const Ledger *ledger = &record.backend->memory.ledger;
  if (record.dated == ledger->event_count) return;
  double seconds = now();
  while (record.dated < ledger->event_count)
    add_moment(record.timeline, seconds, &ledger->events[record.dated++]);
}

// --- what operations cost ----------------------------------------------------------------------------------

static double bytes_of(Tensor t) {
  return tensor_exists(t) ? (double)tensor_bytes(t) : 0;
}

static double count_of(Tensor t) {
  return (double)tensor_count(t);
}

// A plan walks the first chunk of the last layer only; it stands for all of them.
static Work all_chunks(Work work, Tensor x) {
  double times = record.backend->memory.planning ? (double)record.tokens / (double)x.shape[0] : 1;
  return (Work){times * work.flops, times * work.bytes};
}

// One product of [rows, a] with [a, b]: 2 rows a b flops, every operand read or written once.
static Work product(Tensor x, Tensor w, Tensor out) {
  return (Work){2 * (double)out.shape[0] * count_of(w), bytes_of(x) + bytes_of(w) + bytes_of(out)};
}

static Work of_embedding_forward(const EmbeddingForward *a) {
  return (Work){0, 2 * bytes_of(a->out)};
}
static Work of_embedding_backward(const EmbeddingBackward *a) {
  return (Work){0, 2 * bytes_of(a->dout) + bytes_of(a->dtoken_weight)};
}
static Work of_norm_forward(const NormForward *a) {
  return (Work){0, bytes_of(a->x) + bytes_of(a->out)};
}
static Work of_norm_backward(const NormBackward *a) {
  return (Work){0, bytes_of(a->x) + bytes_of(a->dout) + 2 * bytes_of(a->dx)};
}
static Work of_linear_forward(const LinearForward *a) {
  return product(a->x, a->weight, a->out);
}
static Work of_linear_backward_input(const LinearBackwardInput *a) {
  return product(a->dout, a->weight, a->dx);
}
static Work of_linear_backward_weight(const LinearBackwardWeight *a) {
  Work work = {2 * (double)a->x.shape[0] * count_of(a->dweight),
               bytes_of(a->x) + bytes_of(a->dout) + 2 * bytes_of(a->dweight)};
  return all_chunks(work, a->x); // outside the last layer x holds all tokens anyway
}
static Work of_gelu_forward(const GeluForward *a) {
  return (Work){0, 2 * bytes_of(a->x)};
}
static Work of_swiglu_forward(const SwigluForward *a) {
  return (Work){0, bytes_of(a->gate_up) + bytes_of(a->out)};
}
static Work of_swiglu_backward(const SwigluBackward *a) {
  return (Work){0, 2 * bytes_of(a->gate_up) + bytes_of(a->dout)};
}
static Work of_rope(const Rope *a) {
  return (Work){0, 2 * bytes_of(a->qkv)};
}
// Causal: half of the T x T scores; two products forward, five backward.
static Work attention(const AttentionShape *s, Tensor qkv, double products) {
  double scores = (double)s->batch * (double)s->num_heads * (double)s->seq_len * (double)s->seq_len / 2;
  return (Work){2 * products * scores * (double)s->head_dim, products * bytes_of(qkv)};
}
static Work of_attention_forward(const AttentionForward *a) {
  return attention(&a->shape, a->qkv, 2);
}
static Work of_attention_backward(const AttentionBackward *a) {
  return attention(&a->shape, a->qkv, 5);
}
static Work of_lce_logits_exp(const LceLogitsExp *a) {
  double products = tensor_exists(a->exps) ? 2 : 1;
  Work work = {2 * products * count_of(a->x) * (double)a->weight.shape[0],
               products * bytes_of(a->weight) + 2 * bytes_of(a->exps)};
  return all_chunks(work, a->x);
}
static Work of_lce_rows(const LceRows *a) {
  return all_chunks((Work){0, 2 * bytes_of(a->x)}, a->x);
}
static Work of_lce_input_gradient(const LceInputGradient *a) {
  return all_chunks((Work){0, 3 * bytes_of(a->dx)}, a->dx);
}
static Work of_lce_target_gradient(const LceTargetGradient *a) {
  return all_chunks((Work){0, 3 * bytes_of(a->x)}, a->x);
}
static Work of_cross_entropy_in_place(const CrossEntropyInPlace *a) {
  return (Work){0, 3 * bytes_of(a->logits)};
}
static Work of_gather_rows(const MoveRows *a) {
  return (Work){0, 2 * bytes_of(a->out)};
}
static Work of_scatter_rows(const MoveRows *a) {
  return (Work){0, 2 * bytes_of(a->x)};
}
static Work of_adamw(const AdamW *a) {
  return (Work){0, 2 * (bytes_of(a->weight) + bytes_of(a->master) + bytes_of(a->m) + bytes_of(a->v)) +
                       bytes_of(a->grad)};
}
static Work of_reduce(const Reduce *a) {
  return (Work){0, bytes_of(a->x)};
}

// The wrapped operations, by their names in BackendOps. What is left out (copies, collectives, scalars) takes
// next to no time in a step on one device.
#define TIMED(X)                                                                                             \
  X(embedding_forward, EmbeddingForward)                                                                     \
  X(embedding_backward, EmbeddingBackward)                                                                   \
  X(norm_forward, NormForward)                                                                               \
  X(norm_backward, NormBackward)                                                                             \
  X(linear_forward, LinearForward)                                                                           \
  X(linear_backward_input, LinearBackwardInput)                                                              \
  X(linear_backward_weight, LinearBackwardWeight)                                                            \
  X(gelu_forward, GeluForward)                                                                               \
  X(swiglu_forward, SwigluForward)                                                                           \
  X(swiglu_backward, SwigluBackward)                                                                         \
  X(rope, Rope)                                                                                              \
  X(attention_forward, AttentionForward)                                                                     \
  X(attention_backward, AttentionBackward)                                                                   \
  X(lce_logits_exp, LceLogitsExp)                                                                            \
  X(lce_rows, LceRows)                                                                                       \
  X(lce_input_gradient, LceInputGradient)                                                                    \
  X(lce_target_gradient, LceTargetGradient)                                                                  \
  X(cross_entropy_in_place, CrossEntropyInPlace)                                                             \
  X(gather_rows, MoveRows)                                                                                   \
  X(scatter_rows, MoveRows)                                                                                  \
  X(adamw, AdamW)                                                                                            \
  X(reduce, Reduce)

#define WRAP(name, Type)                                                                                     \
  static void dated_##name(Backend *backend, const Type *a) {                                                \
    date_events();                                                                                           \
    if (record.real->name) record.real->name(backend, a);                                                    \
    record.clock += planned_seconds(of_##name(a));                                                           \
  }
TIMED(WRAP)

static const BackendOps *wrapped_operations(const BackendOps *real) {
  static BackendOps wrapped;
  wrapped = *real;
#define PUT(name, Type) wrapped.name = dated_##name;
  TIMED(PUT)
  return &wrapped;
}

// --- recording ---------------------------------------------------------------------------------------------

Timeline timeline_record(const Experiment *e, const Point *p) {
  Options o = point_options(e, p);
  Options machine = o;
  bool planned = e->plan_only;
  Backend *backend = planned ? plan_backend_create(e->device, o.dtype) : machine_open(&machine);
  Source *source = NULL;
  Loader loader = {0};
  if (!planned) {
    source = trainer_open_source(&o);
    loader = loader_create(
        (LoaderOptions){.source = source, .batch = o.batch, .seq_len = o.seq_len, .seed = o.seed});
  }
  Trainer trainer;
  trainer_create(&trainer, &o, backend);
  trainer_set_mode(&trainer, p->mode);
  StepResult results[TRAINER_PENDING];
  Ledger *ledger = &backend->memory.ledger;
  if (!planned) {
    trainer_step(&trainer, &loader, 0);
    trainer_collect(&trainer, results);
  }

  Timeline t = {.mode = p->mode, .planned = planned};
  record.real = backend->ops;
  record.backend = backend;
  record.timeline = &t;
  record.clock = 0;
  record.tokens = point_tokens(p);
  record.dated = ledger->event_count;
  record.started = now_seconds();
  backend->ops = wrapped_operations(record.real);
  ledger_record(ledger, true);
  LedgerEvent before = {.step = 1};
  memcpy(before.bytes, ledger->now, sizeof before.bytes);
  add_moment(&t, 0, &before);
  for (int step = 1; step <= TIMELINE_STEPS; step++) {
    ledger_step(ledger, step);
    trainer_step(&trainer, planned ? NULL : &loader, step);
    if (!planned) trainer_collect(&trainer, results);
    date_events();
  }
  t.duration = now();
  backend->ops = record.real;
  trainer_destroy(&trainer);
  source_close(source);
  backend_destroy(backend);
  return t;
}

void timeline_free(Timeline *t) {
  free(t->moments);
  *t = (Timeline){0};
}

// --- on disk -----------------------------------------------------------------------------------------------

static const char MARK[] = "# lce.c timeline; ";

void timeline_write(const Timeline timelines[2], const char *settings, const char *path) {
  FILE *out = fopen(path, "w");
  if (!out) fail("cannot write %s: %s", path, strerror(errno));
  fprintf(out, "%s%s\nmode,seconds,step", MARK, settings);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    fprintf(out, ",\"%s\"", memory_category_name((MemoryCategory)c));
  fputc('\n', out);
  for (int i = 0; i < 2; i++) {
    const Timeline *t = &timelines[i];
    for (int k = 0; k <= t->count; k++) { // the last moment once more, at the end
      const Moment *m = &t->moments[k < t->count ? k : t->count - 1];
      fprintf(out, "%s,%.9g,%d", lce_mode_name(t->mode), k < t->count ? m->seconds : t->duration, m->step);
      for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) fprintf(out, ",%zu", m->bytes[c]);
      fputc('\n', out);
    }
  }
  if (fclose(out)) fail("cannot write %s: %s", path, strerror(errno));
}

void timeline_read(Timeline timelines[2], char *settings, size_t size, const char *path) {
  FILE *in = fopen(path, "r");
  if (!in) fail("cannot read the timeline %s: %s", path, strerror(errno));
  char line[4096];
  if (!fgets(line, sizeof line, in) || strncmp(line, MARK, sizeof MARK - 1)) fail("%s is no timeline", path);
  line[strcspn(line, "\n")] = 0;
  snprintf(settings, size, "%s", line + sizeof MARK - 1);
  bool planned = strstr(settings, "planned=yes") != NULL;
  timelines[0] = (Timeline){.mode = LCE_MATERIALIZED, .planned = planned};
  timelines[1] = (Timeline){.mode = LCE_FUSED, .planned = planned};
  if (!fgets(line, sizeof line, in)) fail("%s holds no moments", path);
  for (int number = 3; fgets(line, sizeof line, in); number++) {
    Timeline *t = &timelines[strncmp(line, "fused,", 6) == 0];
    char *at = strchr(line, ',');
    LedgerEvent e = {0};
    t->duration = at ? strtod(at + 1, &at) : 0;
    e.step = at && *at == ',' ? (int)strtol(at + 1, &at, 10) : 0;
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) {
      if (!at || *at != ',') fail("%s:%d is no row of a timeline", path, number);
      e.bytes[c] = strtoull(at + 1, &at, 10);
    }
    add_moment(t, t->duration, &e);
  }
  fclose(in);
  if (!timelines[0].count || !timelines[1].count) fail("%s lacks the timeline of a mode", path);
}
