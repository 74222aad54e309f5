#include "tools/curves/point.h"

#include "tools/curves/layer.h"
#include "tools/measure.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/setup.h"

// Every point is planned by the very code that measures it, run on a plan backend; so what differs between the
// planned and the measured figures is a mistake in the ledger, not in the question.

const char *const SWEEP_NAMES[] = {"tokens", "vocab", "hidden", "chunk", NULL};
const char *const MODE_NAMES[] = {[LCE_FUSED] = "fused", [LCE_MATERIALIZED] = "materialized", NULL};
const char *const STATUS_NAMES[] = {"planned", "measured", "does not fit", "too slow", NULL};

int64_t point_tokens(const Point *p) {
  return p->batch * p->seq_len;
}

double point_value(const Point *p) {
  const int64_t values[SWEEP_COUNT] = {point_tokens(p), p->vocab_size, p->hidden_size,
                                       p->chunk ? p->chunk : point_tokens(p)};
  return (double)values[p->sweep];
}

bool reading_known(const Reading *r) {
  return r->planned_bytes > 0;
}

size_t reading_bytes(const Reading *r) {
  return r->ledger_bytes ? r->ledger_bytes : r->planned_bytes;
}

size_t reading_layer_bytes(const Reading *r) {
  return r->layer_bytes ? r->layer_bytes : r->planned_layer_bytes;
}

double reading_device_bytes(const Reading *r) {
  return (double)r->device_bytes - (double)r->device_base_bytes;
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

LceShape point_shape(const Experiment *e, const Point *p) {
  return (LceShape){.tokens = point_tokens(p),
                    .hidden_size = p->hidden_size,
                    .vocab_size = p->vocab_size,
                    .dtype = e->options->dtype};
}

double point_flops(const Experiment *e, const Point *p) {
  const double setup = 1e9;
  double tokens = (double)point_tokens(p);
  if (e->layer_only) return setup + 6 * tokens * (double)p->vocab_size * (double)p->hidden_size;
  Options o = point_options(e, p);
  return setup + model_flops_per_token(&o.model, o.seq_len) * tokens;
}

void steps_begin(Steps *s, const Options *o, Backend *backend, LceMode mode) {
  *s = (Steps){0};
  if (!backend->memory.planning) {
    s->source = setup_data(o).source;
    s->loader = loader_create(
        (LoaderOptions){.source = s->source, .batch = o->batch, .seq_len = o->seq_len, .seed = o->seed});
  }
  trainer_create(&s->trainer, o, backend);
  plan_set_mode(&s->trainer, mode);
}

void steps_run(Steps *s) {
  StepResult results[TRAINER_PENDING];
  trainer_step(&s->trainer, s->source ? &s->loader : NULL, s->step++);
  if (s->source) trainer_collect(&s->trainer, results);
}

void steps_end(Steps *s) {
  trainer_destroy(&s->trainer);
  source_close(s->source);
}

// --- planning and measuring --------------------------------------------------------------------------------

// What the two phases of a point need: the steps, and then the LM head + loss by itself.
typedef struct {
  size_t peak, layer;             // Reading's ledger_bytes and layer_bytes
  size_t step_stack, layer_stack; // the stack of each phase
} Needs;

enum { ROUNDS_MAX = 9 };
static const double ROUND_SECONDS = 1; // after so long, the rounds so far must do

typedef struct {
  double seconds[ROUNDS_MAX];
  int count;
  double spent;
} Rounds;

static void add_round(Rounds *r, Backend *backend, double start) {
  r->spent += r->seconds[r->count++] = device_seconds(backend) - start;
}

// The call of a point, or the plain GEMMs of so many rows at a time.
static void time_layer(Rounds *r, const LceTensors *layer, const Point *p, int64_t gemm_rows) {
  double start = device_seconds(layer->backend);
  if (gemm_rows)
    layer_gemms(layer, gemm_rows);
  else
    linear_cross_entropy(layer->backend, layer_call(layer, p->mode, p->chunk));
  add_round(r, layer->backend, start);
}

// The steps of a point and then its LM head + loss alone, planned (r NULL) or measured into r, whose needs are known.
static Needs run_step(const Experiment *e, const Point *p, Backend *backend, const Needs *known, Reading *r) {
  Options o = point_options(e, p);
  Ledger *ledger = &backend->memory.ledger;
  if (r) backend->ops->device_peak_reset(backend);
  Steps run;
  Rounds steps = {0}, layers = {0};
  steps_begin(&run, &o, backend, p->mode);
  steps_run(&run); // warms up
  while (r && steps.count < ROUNDS_MAX && steps.spent < ROUND_SECONDS) {
    double start = device_seconds(backend);
    steps_run(&run);
    add_round(&steps, backend, start);
  }
  Needs n = {.peak = ledger->peak, .step_stack = ledger->stack_peak};
  if (r) r->device_bytes = backend->ops->device_bytes_peak(backend);
  if (r && known->layer_stack > known->step_stack) memory_set_stack(&backend->memory, known->layer_stack);

  ledger_reset_peak(ledger);
  LceTensors layer = layer_push(&run.trainer);
  n.layer = layer_held(backend, layer_call(&layer, p->mode, o.lce_chunk));
  n.layer_stack = ledger->stack_peak;
  while (r && layers.count < ROUNDS_MAX && layers.spent < 0.5 * ROUND_SECONDS)
    time_layer(&layers, &layer, p, 0);
  memory_pop_to(&backend->memory, 0);
  steps_end(&run);
  if (!r) return n;
  r->step_seconds = median(steps.seconds, steps.count);
  r->layer_seconds = median(layers.seconds, layers.count);
  return n;
}

// The most tokens whose GEMMs fit next to the tensors of the call; all of them where there is space.
static int64_t floor_rows(const Backend *backend, LceShape shape, size_t usable) {
  int64_t rows = shape.tokens;
  size_t left = usable > backend->memory.ledger.total ? usable - backend->memory.ledger.total : 0;
  while (usable && rows > 1 && layer_gemms_stack(backend, shape, rows) > left) rows = (rows + 1) / 2;
  return rows;
}

static void measure_errors(Reading *r, const LceTensors *layer, LceShape shape, int64_t chunk) {
  // The reference takes long and is the same for all modes and chunks of a shape: it is kept.
  static Reference *reference;
  static LceShape kept;
  if (!reference || kept.tokens != shape.tokens || kept.hidden_size != shape.hidden_size ||
      kept.vocab_size != shape.vocab_size) {
    reference_destroy(reference);
    reference = reference_create(layer, chunk);
    kept = shape;
  }
  linear_cross_entropy(layer->backend, layer_call(layer, r->point.mode, r->point.chunk));
  Errors errors = reference_errors(reference, layer);
  r->loss_error = errors.loss;
  r->dx_error = errors.dx;
  r->dweight_error = errors.dweight;
}

static void measure_layer(const Experiment *e, Reading *r, const LceTensors *layer, size_t stack) {
  const Point *p = &r->point;
  Backend *backend = layer->backend;
  LceShape shape = point_shape(e, p);
  int64_t rows = floor_rows(backend, shape, r->usable_bytes);
  // The fused run whose losses complete the reference of the gradients.
  int64_t chunk = p->chunk ? p->chunk : options_default_chunk(shape.tokens, e->device == ON_CUDA);
  size_t gemms = layer_gemms_stack(backend, shape, rows), fused = lce_bytes(backend, LCE_FUSED, chunk, shape);
  if (gemms > stack) stack = gemms;
  if (e->errors && fused > stack) stack = fused;
  memory_set_stack(&backend->memory, stack);
  Rounds first = {0}, layers = {0}, floors = {0};
  time_layer(&first, layer, p, rows); // chooses algorithms
  time_layer(&first, layer, p, 0);
  do { // alternating: a GPU's speed changes with its temperature
    time_layer(&floors, layer, p, rows);
    time_layer(&layers, layer, p, 0);
  } while (layers.count < ROUNDS_MAX && layers.spent + floors.spent < ROUND_SECONDS);
  r->layer_seconds = median(layers.seconds, layers.count);
  r->floor_seconds = median(floors.seconds, floors.count);
  if (e->errors) measure_errors(r, layer, shape, chunk);
}

// The LM head + loss with its tensors, planned (r NULL) or measured into r.
static Needs run_layer(const Experiment *e, const Point *p, Backend *backend, const Needs *known,
                       Reading *r) {
  Memory *memory = &backend->memory;
  LceTensors layer = layer_reserve(backend, point_shape(e, p));
  if (r) {
    measure_layer(e, r, &layer, known->layer_stack);
    // Memory last, when the libraries have all they keep for themselves.
    memory_set_stack(memory, 0);
    ledger_reset_peak(&memory->ledger);
    backend->ops->device_peak_reset(backend);
    memory_set_stack(memory, known->layer_stack);
  }
  Needs n = {.layer = layer_held(backend, layer_call(&layer, p->mode, p->chunk))};
  n.peak = memory->ledger.peak;
  n.layer_stack = memory->ledger.stack_peak;
  if (!r) return n;
  backend_synchronize(backend);
  r->device_bytes = backend->ops->device_bytes_peak(backend);
  return n;
}

// Bytes that the device can give now. A host's memory is shared: what is free counts, not what is there.
static size_t usable_bytes(const Experiment *e, const Backend *backend) {
  if (e->memory) return e->memory;
  size_t usable = machine_usable_bytes(backend);
  size_t left = backend->device == ON_CPU ? system_bytes("/proc/meminfo", "MemAvailable") : 0;
  if (left && left < usable) usable = left;
  return usable - usable / 32; // a margin for what the ledger does not count
}

Reading point_read(const Experiment *e, const Point *p) {
  Needs (*run)(const Experiment *, const Point *, Backend *, const Needs *, Reading *) =
      e->layer_only ? run_layer : run_step;
  Backend *backend = plan_backend_create(e->device, e->options->dtype);
  Needs needs = run(e, p, backend, NULL, NULL);
  backend_destroy(backend);
  Reading r = {.point = *p,
               .planned_bytes = needs.peak,
               .planned_layer_bytes = needs.layer,
               .usable_bytes = e->memory};
  if (e->plan_only) {
    r.status = e->memory && needs.peak > e->memory ? POINT_NO_MEMORY : POINT_PLANNED;
    return r;
  }
  Options machine = point_options(e, p);
  backend = machine_open(&machine);
  r.usable_bytes = usable_bytes(e, backend);
  enum { PASSES = 4 }; // warm-up, two at least for the step, one for the layer
  if (r.usable_bytes && needs.peak > r.usable_bytes) {
    r.status = POINT_NO_MEMORY;
  } else if (e->gemm_rate > 0 && PASSES * point_flops(e, p) / e->gemm_rate > e->patience) {
    r.status = POINT_TOO_SLOW;
  } else {
    r.status = POINT_MEASURED;
    Needs used = run(e, p, backend, &needs, &r);
    r.ledger_bytes = used.peak;
    r.layer_bytes = used.layer;
    // What the context and cuBLASLt keep for themselves, loaded and touched already.
    memory_destroy(&backend->memory);
    r.device_base_bytes = backend->ops->device_bytes_now(backend);
  }
  backend_destroy(backend);
  return r;
}
