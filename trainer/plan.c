#include "trainer/plan.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/file.h"
#include "base/integers.h"
#include "base/json.h"
#include "base/system.h"
#include "base/text.h"
#include "kernels/ranks/ranks.h"
#include "trainer/machine.h"

Ledger plan_run(const Options *given, DeviceKind device, LceMode mode) {
  Options copy = *given;
  const Options *options = &copy;
  if (mode == LCE_MATERIALIZED) copy.dtypes.vocab_parallel = false; // which that mode does not have
  Backend *backend = plan_backend_create(device, options->dtype);
  backend->ranks = options->ranks;
  Trainer trainer;
  trainer_create(&trainer, options, backend);
  trainer.transformer.mode = mode;
  if (!options->eval_only) {
    int64_t count;
    trainer_step(&trainer, NULL, 0);
    if (options->sample_every) trainer_sample(&trainer, NULL, 1, 0, &count);
  }
  if (options->eval_only || options->val_data.count || options->val_fraction > 0)
    trainer_validate(&trainer, NULL, 1);
  if (options->save && !options->eval_only) shards_plan_read(&trainer_model(&trainer)->parameters, backend);
  Ledger plan = backend->memory.ledger;
  trainer_destroy(&trainer);
  backend_destroy(backend);
  return plan;
}

void plan_set_mode(Trainer *t, LceMode mode) {
  t->transformer.mode = mode;
  if (t->backend->memory.planning) return;
  Ledger plan = plan_run(t->options, t->backend->device, mode);
  backend_synchronize(t->backend);
  memory_set_stack(&t->backend->memory, plan.stack_peak);
}

typedef struct {
  const Options *options;
  DeviceKind device;
  LceMode mode;
  size_t bytes;
} Budget;

static size_t head_bytes(const Options *options, DeviceKind device, int64_t chunk) {
  Options o = *options;
  o.lce_chunk = chunk;
  return plan_run(&o, device, LCE_FUSED).highest[MEMORY_HEAD];
}

static bool chunk_fits(const void *budget, int64_t chunk) {
  const Budget *b = budget;
  return head_bytes(b->options, b->device, chunk) <= b->bytes;
}

// 0 when even one token's does not fit; `min` receives what one token's holds.
static int64_t chunk_within(const Options *options, DeviceKind device, size_t bytes, size_t *min) {
  *min = head_bytes(options, device, 1);
  if (*min > bytes) return 0;
  Budget budget = {options, device, LCE_FUSED, bytes};
  return largest_that_fits(chunk_fits, &budget, options->batch * options->seq_len);
}

void plan_resolve_chunk(Options *o, DeviceKind device) {
  if (o->lce_memory) {
    size_t min;
    o->lce_chunk = chunk_within(o, device, (size_t)o->lce_memory << 20, &min);
    if (!o->lce_chunk)
      fail("--lce-memory %lld: even a chunk of one token needs %zu MiB at this vocabulary; give at least "
           "that",
           (long long)o->lce_memory, (min + (1 << 20) - 1) >> 20);
  }
  if (!o->lce_chunk) o->lce_chunk = lce_default_chunk(device, o->batch * o->seq_len);
}

Options plan_with_shape(const Options *given, DeviceKind device, int64_t batch, int64_t seq_len) {
  Options o = *given;
  o.batch = batch;
  o.seq_len = seq_len;
  o.total_batch = batch * seq_len * o.ranks;
  o.micro_steps = 1;
  if (!options_given(&o, "lce-chunk")) o.lce_chunk = 0;
  plan_resolve_chunk(&o, device);
  return o;
}

static bool batch_fits(const void *budget, int64_t batch) {
  const Budget *b = budget;
  Options o = plan_with_shape(b->options, b->device, batch, b->options->seq_len);
  return plan_run(&o, b->device, b->mode).peak <= b->bytes;
}

// Sequence lengths are multiples of this.
static int64_t seq_len_unit(const Options *o) {
  return o->dtypes.fp8 ? 16 : 1;
}

static bool seq_len_fits(const void *budget, int64_t units) {
  const Budget *b = budget;
  Options o = plan_with_shape(b->options, b->device, b->options->batch, units * seq_len_unit(b->options));
  return plan_run(&o, b->device, b->mode).peak <= b->bytes;
}

int64_t plan_largest_batch(const Options *options, DeviceKind device, LceMode mode, size_t bytes) {
  return largest_that_fits(batch_fits, &(Budget){options, device, mode, bytes}, INT32_MAX / options->seq_len);
}

static int64_t largest_seq_len(const Budget *budget, int64_t max) {
  int64_t unit = seq_len_unit(budget->options);
  return unit * largest_that_fits(seq_len_fits, budget, max / unit);
}

// --- what offloading costs ---------------------------------------------------------------------------------

// Operations of a plan that add to the HostTraffic in backend->state.

static size_t bytes_on_host(const Backend *backend, Tensor t) {
  const Memory *memory = &backend->memory;
  for (int64_t i = 0; tensor_exists(t) && i < memory->reserved_count; i++) {
    const MemoryBlock *block = &memory->reserved[i];
    uintptr_t first = (uintptr_t)block->data, at = (uintptr_t)t.data;
    if (block->on_host && at >= first && at - first < block->bytes) return tensor_bytes(t);
  }
  return 0;
}

static void count_copy_in(Backend *backend, const Copy *a) {
  ((HostTraffic *)backend->state)->micro_batch.in += tensor_bytes(a->x);
}

static void count_copy_out(Backend *backend, const Copy *a) {
  ((HostTraffic *)backend->state)->micro_batch.out += tensor_bytes(a->x);
}

// A row of each table for every token.
static void count_embedding(Backend *backend, const EmbeddingForward *a) {
  const Tensor tables[] = {a->token_weight, a->position_weight};
  for (int i = 0; i < 2; i++)
    if (bytes_on_host(backend, tables[i]))
      ((HostTraffic *)backend->state)->micro_batch.in += tensor_bytes(a->out);
}

// At most: every row is written, and read where it is added to.
static void count_embedding_backward(Backend *backend, const EmbeddingBackward *a) {
  HostBytes *bytes = &((HostTraffic *)backend->state)->micro_batch;
  size_t tokens = bytes_on_host(backend, a->dtoken_weight),
         positions = bytes_on_host(backend, a->dposition_weight);
  bytes->out += tokens + positions;
  bytes->in += (a->accumulate_token ? tokens : 0) + (a->accumulate_position ? positions : 0);
}

static void count_reduce(Backend *backend, const Reduce *a) {
  ((HostTraffic *)backend->state)->update.in += bytes_on_host(backend, a->x);
}

static void count_adamw(Backend *backend, const AdamW *a) {
  HostBytes *bytes = &((HostTraffic *)backend->state)->update;
  size_t weight = bytes_on_host(backend, a->weight), master = bytes_on_host(backend, a->master);
  size_t moments = bytes_on_host(backend, a->m) + bytes_on_host(backend, a->v);
  bytes->in += (tensor_exists(a->master) ? master : weight) + moments + bytes_on_host(backend, a->grad);
  bytes->out += weight + master + moments;
}

// Of gradients, during the backward pass.
static void count_reduce_scatter(Backend *backend, const Collective *a) {
  HostBytes *bytes = &((HostTraffic *)backend->state)->micro_batch;
  size_t out = bytes_on_host(backend, a->out);
  bytes->in += bytes_on_host(backend, a->x) + (a->accumulate ? out : 0);
  bytes->out += out;
}

// Of weights, after AdamW.
static void count_all_gather(Backend *backend, const Collective *a) {
  HostBytes *bytes = &((HostTraffic *)backend->state)->update;
  bytes->in += bytes_on_host(backend, a->x);
  bytes->out += bytes_on_host(backend, a->out);
}

HostTraffic plan_host_traffic(const Options *options, DeviceKind device) {
  static const BackendOps counting = {.embedding_forward = count_embedding,
                                      .embedding_backward = count_embedding_backward,
                                      .reduce = count_reduce,
                                      .adamw = count_adamw,
                                      .reduce_scatter = count_reduce_scatter,
                                      .all_gather = count_all_gather,
                                      .copy_in = count_copy_in,
                                      .copy_out = count_copy_out};
  HostTraffic traffic = {0};
  Options o = *options;
  o.micro_steps = 1;
  Backend *backend = plan_backend_create(device, o.dtype);
  backend->ranks = o.ranks;
  Trainer t;
  trainer_create(&t, &o, backend);
  backend->ops = &counting;
  backend->state = &traffic;
  trainer_step(&t, NULL, 0);
  trainer_model(&t); // with what the step leaves of the update
  trainer_destroy(&t);
  backend_destroy(backend);
  return traffic;
}

// --- what would fit ----------------------------------------------------------------------------------------

// Whether a --total-batch that was given is a multiple of such micro-batches.
static bool divides_total(const Options *o, int64_t batch, int64_t seq_len) {
  return !options_given(o, "total-batch") || o->total_batch % (batch * seq_len * o->ranks) == 0;
}

// A change that may help.
typedef struct {
  const char *flag;
  Recompute recompute; // at least this
  unsigned offload;    // OFFLOAD_...
  bool fused, bf16_moments, no_master, one_sequence;
  bool weaker; // than the next one, which holds less
} Change;

static const Change changes[] = {
    {"--fused-lce", .fused = true},
    {"--recompute elementwise", .recompute = RECOMPUTE_ELEMENTWISE, .weaker = true},
    {"--recompute mlp", .recompute = RECOMPUTE_MLP, .weaker = true},
    {"--recompute layer", .recompute = RECOMPUTE_LAYER},
    {"--moment-dtype bf16", .bf16_moments = true},
    {"--no-master-weights", .no_master = true},
    {"--offload optimizer", .offload = OFFLOAD_OPTIMIZER, .weaker = true},
    {"--offload weights,gradients,optimizer", .offload = OFFLOAD_PARAMETERS},
    {"--batch 1", .one_sequence = true},
};
enum { CHANGES = sizeof changes / sizeof *changes };

// The options with a change; as they are where the device or another option excludes it.
static Options with_change(const Options *options, DeviceKind device, const Change *c) {
  Options o = *options;
  bool cuda = device == ON_CUDA;
  if (c->fused) o.mode = LCE_FUSED;
  if (c->recompute > o.recompute) o.recompute = c->recompute;
  if (c->bf16_moments && cuda) o.dtypes.moment = DTYPE_BF16;
  if (c->no_master && o.dtype == DTYPE_BF16) o.dtypes.master = false;
  if (c->offload && cuda && !(o.dtypes.offload & ~c->offload)) o.dtypes.offload = c->offload;
  return c->one_sequence ? plan_with_shape(options, device, 1, o.seq_len) : o;
}

// Appends to a list.
__attribute__((format(printf, 4, 5))) static void append(char *text, size_t size, const char *separator,
                                                         const char *format, ...) {
  snprintf(text + strlen(text), size - strlen(text), "%s", *text ? separator : "");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + strlen(text), size - strlen(text), format, arguments);
  va_end(arguments);
}

// For a run that needs more than `usable` bytes although single changes were made: all changes that help, then also a
// shorter sequence. If that does not suffice either, what is left to need.
static void suggest_together(const Options *options, DeviceKind device, size_t usable, char *text,
                             size_t size) {
  Options o = *options;
  char flags[256] = "";
  size_t peak = plan_run(&o, device, o.mode).peak;
  for (const Change *c = changes; c < changes + CHANGES && peak > usable; c++) {
    if (c->weaker) continue;
    Options changed = with_change(&o, device, c);
    size_t bytes = plan_run(&changed, device, changed.mode).peak;
    if (bytes >= peak) continue;
    o = changed;
    peak = bytes;
    append(flags, sizeof flags, " ", "%s", c->flag);
  }
  int64_t unit = seq_len_unit(&o);
  if (peak > usable && o.seq_len > unit) {
    int64_t seq_len = largest_seq_len(&(Budget){&o, device, o.mode, usable}, o.seq_len - 1);
    seq_len = max_i64(seq_len, unit);
    while (!divides_total(options, o.batch, seq_len)) seq_len -= unit;
    o = plan_with_shape(&o, device, o.batch, seq_len);
    peak = plan_run(&o, device, o.mode).peak;
    append(flags, sizeof flags, " ", "--seq-len %lld", (long long)seq_len);
  }
  bool fits = peak <= usable;
  snprintf(text, size, "%s%s%s needs %s", fits ? "" : "no smaller batch fits, and ",
           !fits && *flags ? "even " : "", *flags ? flags : "this model", text_bytes(peak).text);
  if (!fits) append(text, size, "", ": take a smaller model, or a device with more memory");
}

// Changes with which the run needs at most `usable` bytes, each checked by a plan.
static void suggest(const Options *options, DeviceKind device, size_t usable, char *text, size_t size) {
  *text = 0;
  bool recompute_fits = false;
  for (const Change *c = changes; !c->one_sequence; c++) { // the last one; which batches fit is said below
    if (c->recompute && recompute_fits) continue;
    Options o = with_change(options, device, c);
    size_t bytes = plan_run(&o, device, o.mode).peak;
    if (bytes > usable) continue;
    recompute_fits |= c->recompute > RECOMPUTE_NONE;
    append(text, size, ", ", "%s needs %s", c->flag, text_bytes(bytes).text);
  }
  int64_t batch = plan_largest_batch(options, device, options->mode, usable);
  while (batch && !divides_total(options, batch, options->seq_len)) batch--;
  if (batch) append(text, size, ", ", "--batch %lld fits", (long long)batch);
  if (!*text) suggest_together(options, device, usable, text, size);
}

// "weights 1.20 GiB, gradients 1.20 GiB": the categories that hold `min` bytes or more.
static void list_holders(const size_t bytes[MEMORY_CATEGORY_COUNT], size_t min, char *text, size_t size) {
  *text = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    if (bytes[c] >= min)
      append(text, size, ", ", "%s %s", memory_category_name((MemoryCategory)c), text_bytes(bytes[c]).text);
}

// All ranks of the machine offload as much.
static void require_host(const Ledger *plan) {
  int ranks = ranks_self()->local_ranks > 1 ? ranks_self()->local_ranks : 1;
  size_t needed = ledger_host_bytes(plan) * (size_t)ranks,
         left = system_bytes("/proc/meminfo", "MemAvailable");
  if (!needed || !left || needed <= left) return;
  char holders[512];
  list_holders(plan->host, 1, holders, sizeof holders);
  fail("--offload needs %s of this machine's memory and %s are left (%s%s); offload less, or add "
       "--moment-dtype bf16 or --no-master-weights",
       text_bytes(needed).text, text_bytes(left).text, ranks > 1 ? "of each rank " : "", holders);
}

void plan_require(const Options *options, DeviceKind device, size_t usable) {
  Ledger plan = plan_run(options, device, options->mode);
  require_host(&plan);
  if (!usable || plan.peak <= usable) return;

  char holders[512], ways[512];
  list_holders(plan.at_peak, plan.peak / 100, holders, sizeof holders);
  suggest(options, device, usable, ways, sizeof ways);
  fail("this run needs %s and the device has %s to give (%s); %s", text_bytes(plan.peak).text,
       text_bytes(usable).text, holders, ways);
}

// --- the table ---------------------------------------------------------------------------------------------

enum { MAX_COLUMNS = 3 };

// The field at `place` of every column; no row where all are 0, unless it is wanted all the same.
static void print_row(const char *name, const MemoryColumn *columns, int count, size_t place, bool wanted) {
  size_t bytes[MAX_COLUMNS];
  for (int i = 0; i < count; i++) {
    memcpy(&bytes[i], (const char *)&columns[i] + place, sizeof bytes[i]);
    wanted |= bytes[i] > 0;
  }
  if (!wanted) return;
  printf("  %-34s", name);
  for (int i = 0; i < count; i++) printf(" %24s", bytes[i] ? text_bytes(bytes[i]).text : "-");
  putchar('\n');
}

void plan_print_table(const MemoryColumn *given, int count, DeviceKind device) {
  MemoryColumn columns[MAX_COLUMNS];
  bool measured = false, timed = false;
  printf("%-36s", "memory at the step's peak");
  for (int i = 0; i < count; i++) {
    MemoryColumn *c = &columns[i];
    *c = given[i];
    if (c->device_bytes > c->memory.peak) c->outside_bytes = c->device_bytes - c->memory.peak;
    measured |= c->device_bytes > 0;
    timed |= c->pass_seconds > 0;
    printf(" %24s", c->title);
  }
  putchar('\n');
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++)
    print_row(memory_category_name((MemoryCategory)k), columns, count,
              offsetof(MemoryColumn, memory.at_peak) + (size_t)k * sizeof(size_t), false);
  print_row("all together (ledger)", columns, count, offsetof(MemoryColumn, memory.peak), true);
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) {
    char name[64];
    snprintf(name, sizeof name, "on the host: %s", memory_category_name((MemoryCategory)k));
    print_row(name, columns, count, offsetof(MemoryColumn, memory.host) + (size_t)k * sizeof(size_t), false);
  }
  print_row("outside of it (libraries, context)", columns, count, offsetof(MemoryColumn, outside_bytes),
            measured);
  print_row(device == ON_CUDA ? "in use on the device" : "in use by the process (VmHWM)", columns, count,
            offsetof(MemoryColumn, device_bytes), false);
  print_row("LM head + loss alone, at its peak", columns, count,
            offsetof(MemoryColumn, memory.highest[MEMORY_HEAD]), true);
  if (!timed) return;
  printf("  %-34s", "time of one forward and backward");
  for (int i = 0; i < count; i++) {
    char text[32] = "-";
    if (columns[i].pass_seconds > 0) snprintf(text, sizeof text, "%.1f ms", 1e3 * columns[i].pass_seconds);
    printf(" %24s", text);
  }
  putchar('\n');
}

const char *spread_name(const ParameterDtypes *dtypes) {
  static const char *const names[2][3] = {
      {"nothing is spread over them", "master weights and moments are spread over them",
       "gradients, master weights and moments are spread over them"},
      {"", "master weights, moments and the head's rows are spread over them",
       "gradients, master weights, moments and the head's rows are spread over them"}};
  return names[dtypes->vocab_parallel][dtypes->zero];
}

// --- --plan and --fit --------------------------------------------------------------------------------------

// The device that a plan is for, the requested one or the one that is there, with the options finished for it. One with
// --device-memory need not be there.
static DeviceKind planned_device(Options *o, size_t *capacity) {
  DeviceKind device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
  size_t given = bytes_from_gib(o->device_memory);
  if (o->device == DEVICE_AUTO || (o->fit && !given)) {
    Backend *backend = machine_open(o);
    device = backend->device;
    *capacity = machine_usable_bytes(backend);
    backend_destroy(backend);
  } else {
    options_resolve_dtypes(o, device == ON_CUDA);
  }
  if (given) *capacity = given;
  plan_resolve_chunk(o, device);
  return device;
}

// A line of the log: a plan in one mode, its bytes under the names that a run's summary has for them.
static void log_plan(FILE *log, const Options *o, DeviceKind device, LceMode mode, const Ledger *plan,
                     size_t capacity) {
  const ModelConfig *m = &o->model;
  const struct {
    const char *name, *text;
  } texts[] = {
      {"event", "plan"},  {"loss_mode", lce_mode_name(mode)}, {"device", device == ON_CUDA ? "cuda" : "cpu"},
      {"model", m->name}, {"dtype", dtype_name(o->dtype)},    {"recompute", options_recompute(o).text}};
  const struct {
    const char *name;
    double value;
  } numbers[] = {{"batch", (double)o->batch},
                 {"seq_len", (double)o->seq_len},
                 {"vocab_size", (double)m->vocab_size},
                 {"hidden_size", (double)m->hidden_size},
                 {"intermediate_size", (double)m->intermediate_size},
                 {"head_dim", (double)m->head_dim},
                 {"max_seq_len", (double)model_max_seq_len(m)},
                 {"lce_chunk", mode == LCE_FUSED ? (double)options_used_chunk(o) : 0},
                 {"peak_bytes", (double)plan->peak},
                 {"head_peak_bytes", (double)plan->highest[MEMORY_HEAD]},
                 {"host_bytes", (double)ledger_host_bytes(plan)},
                 {"usable_bytes", (double)capacity}}; // 0: unknown
  cJSON *line = cJSON_CreateObject(), *at_peak = cJSON_CreateObject();
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    cJSON_AddStringToObject(line, texts[i].name, texts[i].text);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    cJSON_AddNumberToObject(line, numbers[i].name, numbers[i].value);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    cJSON_AddNumberToObject(at_peak, memory_category_name((MemoryCategory)c), (double)plan->at_peak[c]);
  cJSON_AddItemToObject(line, "at_peak", at_peak);
  char *text = json_print(line, false);
  fprintf(log, "%s\n", text);
  free(text);
  cJSON_Delete(line);
}

// Three planned steps in the mode of the options.
static void plan_timeline(const Options *o, DeviceKind device) {
  Backend *backend = plan_backend_create(device, o->dtype);
  backend->ranks = o->ranks;
  Ledger *ledger = &backend->memory.ledger;
  Trainer trainer;
  trainer_create(&trainer, o, backend);
  plan_set_mode(&trainer, o->mode);
  ledger->recording = true;
  for (ledger->step = 1; ledger->step <= TIMELINE_STEPS; ledger->step++)
    trainer_step(&trainer, NULL, ledger->step - 1);
  plan_write_timeline(o->timeline, ledger);
  trainer_destroy(&trainer);
  backend_destroy(backend);
}

void plan_print(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[MAX_COLUMNS] = {
      {.title = "fused, planned", .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = "materialized, planned", .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = "head split, planned", .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, spread_name(&o->dtypes));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s%s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         dtype_name(o->dtype), o->dtypes.fp8 ? " and FP8" : "", (long long)options_used_chunk(o),
         options_recompute(o).text);
  bool split = o->dtypes.vocab_parallel && o->ranks > 1;
  plan_print_table(columns, split ? 3 : 2, device);
  if (o->log) {
    FILE *log = file_create("the log", o->log, "{\"event\":\"plan\",", false);
    for (int m = 0; m < 2; m++) // fused as the run would be
      log_plan(log, o, device, (LceMode)m, &columns[split && m == LCE_FUSED ? 2 : m].memory, capacity);
    if (fclose(log)) fail("cannot write the log %s: %s", o->log, strerror(errno));
  }
  if (o->timeline) plan_timeline(o, device);
  if (o->device_memory > 0) plan_require(o, device, capacity);
}

// What --fit compares: nothing offloaded, the optimizer's state, all but activations, everything.
enum { FIT_CHOICES = 4 };
typedef struct {
  const char *name;
  unsigned offload;
  int64_t batch[2]; // the largest, by LceMode
} FitChoice;

// Bytes a second in each direction, of the 63e9 that PCIe 5 x16 carries at most.
static const double HOST_LINK_RATE = 50e9;

// Those that the options allow; with --offload that one alone. Offloading from a CPU to its own memory saves nothing.
static int fit_choices(const Options *o, DeviceKind device, FitChoice choices[FIT_CHOICES]) {
  static const FitChoice all[FIT_CHOICES] = {
      {"nothing", 0, {0}},
      {"optimizer", OFFLOAD_OPTIMIZER, {0}},
      {"weights,gradients,optimizer", OFFLOAD_PARAMETERS, {0}},
      {"weights,gradients,optimizer,activations", OFFLOAD_PARAMETERS | OFFLOAD_ACTIVATIONS, {0}}};
  memcpy(choices, all, sizeof all);
  if (o->dtypes.offload) choices[0] = (FitChoice){o->offload, o->dtypes.offload, {0}};
  if (o->dtypes.offload || device == ON_CPU || o->eval_only) return 1;
  return o->recompute == RECOMPUTE_LAYER ? FIT_CHOICES : FIT_CHOICES - 1;
}

static void print_link(HostBytes b) {
  size_t more = b.in > b.out ? b.in : b.out; // both directions at once
  printf("  %10s / %-10s %6.2f s", text_bytes(b.in).text, text_bytes(b.out).text,
         (double)more / HOST_LINK_RATE);
}

static void print_fit(const Options *o, DeviceKind device, const FitChoice *c) {
  printf("%-40s", c->name);
  for (int m = 0; m < 2; m++) {
    char batch[24] = "none";
    if (c->batch[m]) snprintf(batch, sizeof batch, "%lld", (long long)c->batch[m]);
    printf(" %*s", m ? 13 : 7, batch);
  }
  if (c->offload && c->batch[LCE_FUSED]) {
    Options with = *o;
    with.dtypes.offload = c->offload;
    with = plan_with_shape(&with, device, c->batch[LCE_FUSED], o->seq_len);
    Ledger plan = plan_run(&with, device, LCE_FUSED);
    HostTraffic traffic = plan_host_traffic(&with, device);
    printf(" %11s", text_bytes(ledger_host_bytes(&plan)).text);
    print_link(traffic.micro_batch);
    print_link(traffic.update);
  }
  putchar('\n');
}

void plan_print_fit(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  if (!capacity) fail("--fit: the memory of the device is not known; give it by --device-memory GIB");
  FitChoice choices[FIT_CHOICES];
  int count = fit_choices(o, device, choices);
  bool any = false;
  for (int i = 0; i < count; i++) {
    Options with = *o;
    with.dtypes.offload = choices[i].offload;
    for (int m = 0; m < 2; m++) choices[i].batch[m] = plan_largest_batch(&with, device, (LceMode)m, capacity);
    any |= choices[i].batch[LCE_FUSED] > 0;
  }
  if (!any) {
    Options one = plan_with_shape(o, device, 1, o->seq_len);
    char ways[512];
    one.mode = LCE_FUSED;
    suggest(&one, device, capacity, ways, sizeof ways);
    fail("--fit: not even one sequence of %lld token%s fits in %s; %s", (long long)o->seq_len,
         o->seq_len == 1 ? "" : "s", text_bytes(capacity).text, ways);
  }
  printf("the largest --batch of %s at --seq-len %lld in %s\n", o->model.name, (long long)o->seq_len,
         text_bytes(capacity).text);
  bool offloads = choices[count - 1].offload != 0;
  printf("%-40s %7s %13s", "--offload", "fused", "materialized");
  printf(offloads ? " %11s  %-32s  %s\n" : "\n", "on the host", "  a micro-batch: in / out",
         "  an update: in / out");
  for (int i = 0; i < count; i++) print_fit(o, device, &choices[i]);
  if (offloads)
    printf(
        "in / out: bytes over the host link at the fused --batch, and their time at %g GB/s a direction "
        "(PCIe 5 x16), part of which\ncomputation hides; a micro-batch after a step's first also reads the "
        "gradients that it adds to\n",
        1e-9 * HOST_LINK_RATE);
}

// --- --compare-modes ---------------------------------------------------------------------------------------

// A few forward and backward passes in `mode`, with the ledger's peaks measured again. What the system counts would
// hold the buffers that libraries keep from the mode before.
static MemoryColumn measure_mode(Trainer *trainer, LceMode mode, const char *title) {
  enum { PASSES = 3 };
  Backend *backend = trainer->backend;
  plan_set_mode(trainer, LCE_FUSED); // releases a larger stack before measuring
  memory_set_stack(&backend->memory, 0);
  ledger_reset_peak(&backend->memory.ledger);
  plan_set_mode(trainer, mode);
  double best = INFINITY;
  for (int i = 0; i < PASSES; i++) {
    backend_synchronize(backend);
    double start = now_seconds();
    trainer_gradient_pass(trainer);
    backend_synchronize(backend);
    best = fmin(best, now_seconds() - start);
  }
  return (MemoryColumn){.title = title, .memory = backend->memory.ledger, .pass_seconds = best};
}

void plan_compare_modes(Trainer *trainer) {
  static const char *const measured[2] = {"fused, measured", "materialized, measured"};
  static const char *const planned[2] = {"fused, planned", "materialized, planned"};
  const Options *o = trainer->options;
  DeviceKind device = trainer->backend->device;
  size_t usable = machine_usable_bytes(trainer->backend);
  MemoryColumn columns[2];
  for (int i = 0; i < 2; i++) {
    LceMode mode = i == 0 ? LCE_FUSED : LCE_MATERIALIZED;
    Ledger plan = plan_run(o, device, mode);
    bool fits = !usable || plan.peak <= usable;
    columns[i] =
        fits ? measure_mode(trainer, mode, measured[i]) : (MemoryColumn){.title = planned[i], .memory = plan};
    if (!fits) printf("the %s mode does not fit here: it is planned, not measured\n", lce_mode_name(mode));
  }
  putchar('\n');
  plan_print_table(columns, 2, device);
  double less =
      (double)columns[1].memory.highest[MEMORY_HEAD] / (double)columns[0].memory.highest[MEMORY_HEAD];
  printf("\nat %s tokens and V %s LM head + loss hold %.1f times %s when fused\n",
         text_grouped(o->batch * o->seq_len).text, text_grouped(o->model.vocab_size).text,
         less < 1 ? 1 / less : less, less < 1 ? "more" : "less");
}

// --- --timeline --------------------------------------------------------------------------------------------

void plan_write_timeline(const char *path, const Ledger *ledger) {
  static const char columns[] = "event,step,at,block,total";
  FILE *out = file_create("the timeline", path, columns, false);
  fputs(columns, out);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    fprintf(out, ",\"%s\"", memory_category_name((MemoryCategory)c));
  fputc('\n', out);
  size_t before = 0;
  double moved = 0;
  for (int64_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *e = &ledger->events[i];
    size_t total = 0;
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += e->bytes[c];
    if (i) moved += fabs((double)total - (double)before);
    before = total;
    double at = ledger->clock ? e->seconds - ledger->events[0].seconds : moved;
    fprintf(out, "%lld,%d,%.15g,\"%s\",%zu", (long long)i, e->step, at, e->name, total);
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) fprintf(out, ",%zu", e->bytes[c]);
    fputc('\n', out);
  }
  if (fclose(out)) fail("cannot write the timeline %s: %s", path, strerror(errno));
}
