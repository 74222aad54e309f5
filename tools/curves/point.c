#include "tools/curves/point.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "tools/curves/accuracy.h"
#include "tools/curves/layer.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/speed.h"
#include "trainer/trainer.h"

// Every point is planned by the very code that measures it, run on a plan backend; so what differs between the
// planned and the measured figures is a mistake in the ledger, not in the question.

const char *sweep_name(Sweep sweep) {
  static const char *const names[SWEEP_COUNT] = {"tokens", "vocab", "hidden", "chunk"};
  return names[sweep];
}

const char *point_status_name(PointStatus status) {
  static const char *const names[POINT_STATUS_COUNT] = {"planned", "measured", "does not fit", "too slow"};
  return names[status];
}

int64_t point_tokens(const Point *p) {
  return p->batch * p->seq_len;
}

double point_value(const Point *p) {
  const int64_t values[SWEEP_COUNT] = {point_tokens(p), p->vocab_size, p->hidden_size,
                                       p->chunk ? p->chunk : point_tokens(p)};
  return (double)values[p->sweep];
}

size_t reading_bytes(const Reading *r) {
  return r->ledger_bytes ? r->ledger_bytes : r->planned_bytes;
}

size_t reading_layer_bytes(const Reading *r) {
  return r->layer_bytes ? r->layer_bytes : r->planned_layer_bytes;
}

Options point_options(const Experiment *e, const Point *p) {
  Options o = *e->options;
  ModelConfig *m = &o.model;
  o.batch = p->batch;
  o.seq_len = p->seq_len;
  o.total_batch = p->batch * p->seq_len;
  o.micro_steps = 1;
  o.mode = p->mode;
  o.lce_chunk = p->chunk ? p->chunk : 1;
  o.lce_memory = 0;
  m->vocab_size = p->vocab_size;
  if (m->hidden_size != p->hidden_size && m->family == FAMILY_GPT2 && p->hidden_size % m->head_dim == 0)
    m->num_attention_heads = m->num_key_value_heads = p->hidden_size / m->head_dim;
  m->hidden_size = p->hidden_size;
  if (!e->layer_only) model_config_check(m);
  return o;
}

static LceShape shape_of(const Experiment *e, const Point *p) {
  return (LceShape){.tokens = point_tokens(p),
                    .hidden_size = p->hidden_size,
                    .vocab_size = p->vocab_size,
                    .dtype = e->options->dtype};
}

double point_flops(const Experiment *e, const Point *p) {
  double tokens = (double)point_tokens(p);
  if (e->layer_only) return 6 * tokens * (double)p->vocab_size * (double)p->hidden_size;
  Options o = point_options(e, p);
  return model_flops_per_token(&o.model, o.seq_len) * tokens;
}

// --- planning ----------------------------------------------------------------------------------------------

// What the two phases of a point need: the steps, and then the last layer by itself.
typedef struct {
  size_t peak, layer;             // Reading's ledger_bytes and layer_bytes
  size_t step_stack, layer_stack; // the stack of each phase
} Needs;

static Needs plan_step(const Experiment *e, const Point *p) {
  Options o = point_options(e, p);
  Backend *backend = plan_backend_create(e->device, o.dtype);
  Ledger *ledger = &backend->memory.ledger;
  Trainer trainer;
  trainer_create(&trainer, &o, backend);
  trainer_set_mode(&trainer, p->mode);
  trainer_step(&trainer, NULL, 0);
  Needs n = {.peak = ledger->peak, .step_stack = ledger->stack_peak};
  ledger_reset_peak(ledger);
  LastLayer layer = layer_push(&trainer, o.seed);
  n.layer = layer_held(&layer, p->mode, o.lce_chunk);
  n.layer_stack = ledger->stack_peak;
  memory_pop_to(&backend->memory, 0);
  trainer_destroy(&trainer);
  backend_destroy(backend);
  return n;
}

static Needs plan_layer(const Experiment *e, const Point *p) {
  Backend *backend = plan_backend_create(e->device, e->options->dtype);
  LastLayer layer = layer_reserve(backend, shape_of(e, p), 1);
  Needs n = {.layer = layer_held(&layer, p->mode, p->chunk)};
  n.peak = backend->memory.ledger.peak;
  n.layer_stack = backend->memory.ledger.stack_peak;
  backend_destroy(backend);
  return n;
}

// --- measuring ---------------------------------------------------------------------------------------------

enum { ROUNDS_MOST = 9 };
static const double ROUND_SECONDS = 1; // after so long, the rounds so far must do

static double timed_layer(const LastLayer *layer, const Point *p) {
  backend_synchronize(layer->backend);
  double start = now_seconds();
  layer_run(layer, p->mode, p->chunk);
  backend_synchronize(layer->backend);
  return now_seconds() - start;
}

static double timed_products(const LastLayer *layer, int64_t rows) {
  backend_synchronize(layer->backend);
  double start = now_seconds();
  layer_gemms(layer, rows);
  backend_synchronize(layer->backend);
  return now_seconds() - start;
}

static void measure_step(const Experiment *e, Reading *r, const Needs *needs, Backend *backend) {
  const Point *p = &r->point;
  Options o = point_options(e, p);
  Ledger *ledger = &backend->memory.ledger;
  backend->ops->device_peak_reset(backend);
  Source *source = trainer_open_source(&o);
  Loader loader = loader_create(
      (LoaderOptions){.source = source, .batch = o.batch, .seq_len = o.seq_len, .seed = o.seed});
  Trainer trainer;
  trainer_create(&trainer, &o, backend);
  trainer_set_mode(&trainer, p->mode);
  StepResult results[TRAINER_PENDING];
  double seconds[ROUNDS_MOST] = {0}, spent = 0;
  int rounds = 0;
  for (int step = 0; rounds < ROUNDS_MOST && spent < ROUND_SECONDS; step++) {
    backend_synchronize(backend);
    double start = now_seconds();
    trainer_step(&trainer, &loader, step);
    trainer_collect(&trainer, results);
    if (step == 0) continue; // the first one warms up
    spent += seconds[rounds++] = now_seconds() - start;
  }
  r->step_seconds = median(seconds, rounds);
  r->ledger_bytes = ledger->peak;
  r->device_bytes = backend->ops->device_bytes_peak(backend);

  if (needs->layer_stack > needs->step_stack) memory_set_stack(&backend->memory, needs->layer_stack);
  LastLayer layer = layer_push(&trainer, o.seed);
  r->layer_bytes = layer_held(&layer, p->mode, p->chunk);
  rounds = 0, spent = 0;
  do spent += seconds[rounds++] = timed_layer(&layer, p);
  while (rounds < ROUNDS_MOST && spent < 0.5 * ROUND_SECONDS);
  r->layer_seconds = median(seconds, rounds);
  memory_pop_to(&backend->memory, 0);
  trainer_destroy(&trainer);
  source_close(source);
}

// The most tokens whose bare products fit beside the layer's own tensors; all of them where there is room.
static int64_t floor_rows(const Backend *backend, LceShape shape, size_t usable) {
  int64_t rows = shape.tokens;
  size_t left = usable > backend->memory.ledger.total ? usable - backend->memory.ledger.total : 0;
  while (usable && rows > 1 && layer_gemms_stack(backend, shape, rows) > left) rows = (rows + 1) / 2;
  return rows;
}

// The fused run whose losses complete the reference of the gradients.
static Point reference_point(const Experiment *e, const Point *p) {
  Point fused = *p;
  if (p->mode == LCE_MATERIALIZED) fused.chunk = options_default_chunk(point_tokens(p), e->device == ON_CUDA);
  fused.mode = LCE_FUSED;
  return fused;
}

static void measure_errors(const Experiment *e, Reading *r, const LastLayer *layer) {
  // The reference is dear and the same for all modes and chunks of a shape: it is kept for the next point.
  static Reference *reference;
  static LceShape kept;
  LceShape shape = shape_of(e, &r->point);
  bool same = reference && kept.tokens == shape.tokens && kept.hidden_size == shape.hidden_size &&
              kept.vocab_size == shape.vocab_size;
  if (!same) {
    reference_destroy(reference);
    reference = reference_create(shape, 1);
    kept = shape;
    layer_run(layer, LCE_FUSED, reference_point(e, &r->point).chunk);
    reference_errors(reference, layer);
    layer_run(layer, r->point.mode, r->point.chunk);
  }
  Errors errors = reference_errors(reference, layer);
  r->loss_error = errors.loss;
  r->dx_error = errors.dx;
  r->dweight_error = errors.dweight;
}

static void measure_layer(const Experiment *e, Reading *r, const Needs *needs, Backend *backend) {
  const Point *p = &r->point;
  Memory *memory = &backend->memory;
  LastLayer layer = layer_reserve(backend, shape_of(e, p), 1);
  int64_t rows = floor_rows(backend, shape_of(e, p), r->usable_bytes);
  size_t stack = layer_gemms_stack(backend, shape_of(e, p), rows);
  if (needs->layer_stack > stack) stack = needs->layer_stack;
  if (e->errors) {
    Point fused = reference_point(e, p);
    size_t more = plan_layer(e, &fused).layer_stack;
    if (more > stack) stack = more;
  }
  memory_set_stack(memory, stack);
  double layers[ROUNDS_MOST] = {0}, floors[ROUNDS_MOST] = {0}, spent = 0;
  int rounds = 0;
  timed_products(&layer, rows); // the first of each chooses its algorithms
  timed_layer(&layer, p);
  do { // in turn: a card's speed changes with its heat
    floors[rounds] = timed_products(&layer, rows);
    layers[rounds] = timed_layer(&layer, p);
    spent += floors[rounds] + layers[rounds];
    rounds++;
  } while (rounds < ROUNDS_MOST && spent < ROUND_SECONDS);
  r->layer_seconds = median(layers, rounds);
  r->floor_seconds = median(floors, rounds);
  if (e->errors) measure_errors(e, r, &layer);

  // Memory last, when the libraries have all they keep for themselves.
  memory_set_stack(memory, 0);
  ledger_reset_peak(&memory->ledger);
  backend->ops->device_peak_reset(backend);
  memory_set_stack(memory, needs->layer_stack);
  r->layer_bytes = layer_held(&layer, p->mode, p->chunk);
  backend_synchronize(backend);
  r->ledger_bytes = memory->ledger.peak;
  r->device_bytes = backend->ops->device_bytes_peak(backend);
}

// Bytes that the device can give now. A host's memory is shared: what is free counts, not what is there.
static size_t usable_bytes(const Experiment *e, const Backend *backend) {
  if (e->memory) return e->memory;
  size_t usable = machine_usable_bytes(backend);
  FILE *file = backend->device == ON_CPU ? fopen("/proc/meminfo", "r") : NULL;
  char line[128];
  unsigned long long kib;
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1 && kib * 1024 < usable) usable = (size_t)kib * 1024;
  if (file) fclose(file);
  return usable - usable / 32; // a margin for what no ledger sees
}

Reading point_read(const Experiment *e, const Point *p) {
  Reading r = {.point = *p,
               .status = POINT_PLANNED,
               .usable_bytes = e->memory,
               .loss_error = NAN,
               .dx_error = NAN,
               .dweight_error = NAN};
  Needs needs = e->layer_only ? plan_layer(e, p) : plan_step(e, p);
  r.planned_bytes = needs.peak;
  r.planned_layer_bytes = needs.layer;
  if (e->plan_only) {
    if (e->memory && needs.peak > e->memory) r.status = POINT_NO_ROOM;
    return r;
  }
  Options machine = point_options(e, p);
  Backend *backend = machine_open(&machine);
  r.usable_bytes = usable_bytes(e, backend);
  enum { PASSES = 4 }; // warm-up, two at least for the step, one for the layer
  if (r.usable_bytes && needs.peak > r.usable_bytes)
    r.status = POINT_NO_ROOM;
  else if (e->gemm_rate > 0 && PASSES * point_flops(e, p) / e->gemm_rate > e->patience)
    r.status = POINT_TOO_SLOW;
  else
    r.status = POINT_MEASURED;
  if (r.status == POINT_MEASURED) {
    if (e->layer_only)
      measure_layer(e, &r, &needs, backend);
    else
      measure_step(e, &r, &needs, backend);
    // What the context and the product library keep for themselves, loaded and touched by now.
    memory_destroy(&backend->memory);
    r.device_base_bytes = backend->ops->device_bytes_now(backend);
  }
  backend_destroy(backend);
  return r;
}
