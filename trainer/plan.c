#include "trainer/plan.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/ranks/ranks.h"
#include "kernels/system.h"
#include "kernels/text.h"
#include "trainer/machine.h"
#include "trainer/record.h"

// A trainer that allocates nothing; its options stay the caller's.
static void open_planned(Trainer *t, const Options *options, DeviceKind device) {
  Backend *backend = plan_backend_create(device, options->dtype);
  backend->ranks = options->ranks;
  backend->no_sampling = options->no_sampling;
  trainer_create(t, options, backend);
}

static void close_planned(Trainer *t) {
  Backend *backend = t->backend;
  trainer_destroy(t);
  backend_destroy(backend);
}

Ledger plan_run(const Options *given, DeviceKind device, LceMode mode) {
  Options o = *given;
  if (mode == LCE_MATERIALIZED) o.dtypes.vocab_parallel = false; // which that mode does not have
  o.pass.mode = mode;
  o.micro_steps = min_i64(o.micro_steps, 2); // the rest need the same memory
  Trainer trainer;
  open_planned(&trainer, &o, device);
  if (o.train_step) {
    int64_t count;
    o.train_step(&trainer, NULL, 0);
    if (o.sample_every) trainer_sample(&trainer, NULL, 1, 0, &count);
  }
  if (!o.train_step || o.val_data.count || o.val_fraction > 0) trainer_validate(&trainer, NULL, 1);
  if (o.save && o.train_step) // as a rank that writes no files
    weights_store(trainer_model(&trainer), trainer.backend, &(Folder){0}, o.save_dtype, SIZE_MAX);
  Ledger plan = trainer.backend->memory.ledger;
  close_planned(&trainer);
  return plan;
}

void plan_set_mode(Trainer *t, LceMode mode) {
  t->transformer.mode = mode;
  if (t->backend->memory.planning) return;
  Ledger plan = plan_run(t->options, t->backend->device, mode);
  backend_synchronize(t->backend);
  memory_set_stack(&t->backend->memory, plan.stack_peak);
}

// Sequence lengths are multiples of this.
static int64_t seq_len_unit(const Options *o) {
  return o->dtypes.fp8 ? 16 : 1;
}

// The options of a step of one micro-batch of this shape, with its chunk unless --lce-chunk gave one.
static Options with_shape(const Options *given, DeviceKind device, int64_t batch, int64_t seq_len) {
  Options o = *given;
  o.batch = batch;
  o.seq_len = seq_len;
  o.total_batch = batch * seq_len * o.ranks;
  o.micro_steps = 1;
  if (!options_given(&o, "lce-chunk")) o.pass.chunk = 0;
  plan_resolve_chunk(&o, device);
  return o;
}

// What a budget is spent on: tokens of a chunk, which only LM head and loss hold; sequences; units of a sequence's length.
typedef struct {
  const Options *options;
  DeviceKind device;
  LceMode mode;
  size_t bytes;
  enum { CHUNK, BATCH, SEQ_LEN } of;
} Budget;

static size_t bytes_of(const Budget *b, int64_t count) {
  Options o = *b->options;
  if (b->of == CHUNK) o.pass.chunk = count;
  if (b->of == BATCH) o = with_shape(&o, b->device, count, o.seq_len);
  if (b->of == SEQ_LEN) o = with_shape(&o, b->device, o.batch, count * seq_len_unit(&o));
  Ledger plan = plan_run(&o, b->device, b->mode);
  return b->of == CHUNK ? plan.highest[MEMORY_HEAD] : plan.peak;
}

static bool within(const void *budget, int64_t count) {
  return bytes_of(budget, count) <= ((const Budget *)budget)->bytes;
}

void plan_resolve_chunk(Options *o, DeviceKind device) {
  if (o->lce_memory) {
    const Budget budget = {o, device, LCE_FUSED, (size_t)o->lce_memory << 20, CHUNK};
    size_t min = bytes_of(&budget, 1);
    if (min > budget.bytes)
      fail("--lce-memory %lld: even a chunk of one token needs %zu MiB at this vocabulary; give at least "
           "that",
           (long long)o->lce_memory, (min + (1 << 20) - 1) >> 20);
    o->pass.chunk = largest_that_fits(within, &budget, o->batch * o->seq_len);
  }
  if (!o->pass.chunk) o->pass.chunk = lce_default_chunk(device, o->batch * o->seq_len);
}

int64_t plan_largest_batch(const Options *options, DeviceKind device, LceMode mode, size_t bytes) {
  return largest_that_fits(within, &(Budget){options, device, mode, bytes, BATCH},
                           INT32_MAX / options->seq_len);
}

// --- what offloading costs ---------------------------------------------------------------------------------

// The tensor's bytes where they are in the host's memory, else 0.
static size_t on_host(const Backend *backend, Tensor t) {
  const Memory *memory = &backend->memory;
  for (int64_t i = 0; tensor_exists(t) && i < memory->reserved_count; i++) {
    const MemoryBlock *block = &memory->reserved[i];
    uintptr_t first = (uintptr_t)block->data, at = (uintptr_t)t.data;
    if (block->on_host && at >= first && at - first < block->bytes) return tensor_bytes(t);
  }
  return 0;
}

// An operation of a plan that adds to the HostTraffic in backend->state what it reads of the host's memory and writes there.
#define COUNT(name, Operation, part, read, written)                                                          \
  static void name(Backend *b, const Operation *a) {                                                         \
    HostBytes *bytes = &((HostTraffic *)b->state)->part;                                                     \
    bytes->in += read;                                                                                       \
    bytes->out += written;                                                                                   \
  }
COUNT(count_copy_in, Copy, micro_batch, tensor_bytes(a->x), 0)
COUNT(count_copy_out, Copy, micro_batch, 0, tensor_bytes(a->x))
// A row of each table for every token.
COUNT(count_embedding, EmbeddingForward, micro_batch,
      tensor_bytes(a->out) * ((on_host(b, a->token_weight) > 0) + (on_host(b, a->position_weight) > 0)), 0)
// At most: every row is written, and read where it is added to.
COUNT(count_embedding_backward, EmbeddingBackward, micro_batch,
      (a->accumulate_token ? on_host(b, a->dtoken_weight) : 0) +
          (a->accumulate_position ? on_host(b, a->dposition_weight) : 0),
      on_host(b, a->dtoken_weight) + on_host(b, a->dposition_weight))
COUNT(count_reduce, Reduce, update, on_host(b, a->x), 0)
COUNT(count_update, Update, update,
      on_host(b, tensor_exists(a->master) ? a->master : a->weight) + on_host(b, a->m) + on_host(b, a->v) +
          on_host(b, a->grad),
      on_host(b, a->weight) + on_host(b, a->master) + on_host(b, a->m) + on_host(b, a->v))
// Of gradients, during the backward pass.
COUNT(count_reduce_scatter, Collective, micro_batch,
      on_host(b, a->x) + (a->accumulate ? on_host(b, a->out) : 0), on_host(b, a->out))
// Of weights, after the update.
COUNT(count_all_gather, Collective, update, on_host(b, a->x), on_host(b, a->out))

HostTraffic plan_host_traffic(const Options *options, DeviceKind device) {
  static const BackendOps counting = {.embedding_forward = count_embedding,
                                      .embedding_backward = count_embedding_backward,
                                      .reduce = count_reduce,
                                      .adamw = count_update,
                                      .nesterov = count_update,
                                      .descend = count_update,
                                      .reduce_scatter = count_reduce_scatter,
                                      .all_gather = count_all_gather,
                                      .copy_in = count_copy_in,
                                      .copy_out = count_copy_out};
  HostTraffic traffic = {0};
  Options o = *options;
  o.micro_steps = 1;
  Trainer t;
  open_planned(&t, &o, device);
  t.backend->ops = &counting;
  t.backend->state = &traffic;
  o.train_step(&t, NULL, 0);
  trainer_model(&t); // with what the step leaves of the update
  close_planned(&t);
  return traffic;
}

// --- what would fit ----------------------------------------------------------------------------------------

// Whether a --total-batch that was given is a multiple of such micro-batches.
static bool divides_total(const Options *o, int64_t batch, int64_t seq_len) {
  return !options_given(o, "total-batch") || o->total_batch % (batch * seq_len * o->ranks) == 0;
}

// Changes of the command line that may help. A weaker one holds more than the next.
typedef struct {
  const char *flag;
  bool on_cuda, weaker;
} Change;

static const Change changes[] = {{.flag = "--fused-lce"},
                                 {"--recompute elementwise", .weaker = true},
                                 {"--recompute mlp", .weaker = true},
                                 {.flag = "--recompute layer"},
                                 {"--moment-dtype bf16", .on_cuda = true},
                                 {"--no-master-weights", .on_cuda = true},
                                 {"--offload optimizer", .on_cuda = true, .weaker = true},
                                 {"--offload weights,gradients,optimizer", .on_cuda = true},
                                 {.flag = "--batch 1"}};
enum {
  CHANGES = sizeof changes / sizeof *changes,
  SINGLE_CHANGES = CHANGES - 1
}; // which batches fit is said apart

// The options with a change; as they are where the device excludes it, or they recompute more already.
static Options with_change(const Options *given, DeviceKind device, const Change *c) {
  Options o = *given;
  char name[32];
  size_t length = strcspn(c->flag, " ");
  snprintf(name, sizeof name, "%.*s", (int)length - 2, c->flag + 2);
  const Option *row = &options_rows[option_row(options_rows, name)];
  option_set(row, &o, c->flag + length + (c->flag[length] != 0));
  if ((c->on_cuda && device != ON_CUDA) || o.pass.recompute < given->pass.recompute) return *given;
  return o.batch == given->batch ? o : with_shape(&o, device, o.batch, o.seq_len);
}

typedef struct {
  char text[512];
} List;

__attribute__((format(printf, 3, 4))) static void append(List *list, const char *separator,
                                                         const char *format, ...) {
  size_t length = strlen(list->text);
  length += (size_t)snprintf(list->text + length, sizeof list->text - length, "%s", length ? separator : "");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(list->text + length, sizeof list->text - length, format, arguments);
  va_end(arguments);
}

// For a run that needs more than `usable` bytes although single changes were made: all changes that help, then also a
// shorter sequence. If that does not suffice either, what is left to need.
static List suggest_together(const Options *options, DeviceKind device, size_t usable) {
  Options o = *options;
  List flags = {""}, text = {""};
  size_t peak = plan_run(&o, device, o.pass.mode).peak;
  for (const Change *c = changes; c < changes + CHANGES && peak > usable; c++) {
    Options changed = with_change(&o, device, c);
    size_t bytes = c->weaker ? peak : plan_run(&changed, device, changed.pass.mode).peak;
    if (bytes >= peak) continue;
    o = changed;
    peak = bytes;
    append(&flags, " ", "%s", c->flag);
  }
  int64_t unit = seq_len_unit(&o);
  if (peak > usable && o.seq_len > unit) {
    const Budget budget = {&o, device, o.pass.mode, usable, SEQ_LEN};
    int64_t seq_len = unit * max_i64(largest_that_fits(within, &budget, (o.seq_len - 1) / unit), 1);
    while (!divides_total(options, o.batch, seq_len)) seq_len -= unit;
    o = with_shape(&o, device, o.batch, seq_len);
    peak = plan_run(&o, device, o.pass.mode).peak;
    append(&flags, " ", "--seq-len %lld", (long long)seq_len);
  }
  bool fits = peak <= usable;
  append(&text, "", "%s%s%s needs %s%s", fits ? "" : "no smaller batch fits, and ",
         !fits && *flags.text ? "even " : "", *flags.text ? flags.text : "this model", text_bytes(peak).text,
         fits ? "" : ": take a smaller model, or a device with more memory");
  return text;
}

// Changes with which the run needs at most `usable` bytes, each checked by a plan.
static List suggest(const Options *options, DeviceKind device, size_t usable) {
  List text = {""};
  bool recompute_fits = false;
  for (const Change *c = changes; c < changes + SINGLE_CHANGES; c++) {
    Options o = with_change(options, device, c);
    bool recomputes = o.pass.recompute > options->pass.recompute;
    size_t bytes = plan_run(&o, device, o.pass.mode).peak;
    if (bytes > usable || (recomputes && recompute_fits)) continue;
    recompute_fits |= recomputes;
    append(&text, ", ", "%s needs %s", c->flag, text_bytes(bytes).text);
  }
  int64_t batch = plan_largest_batch(options, device, options->pass.mode, usable);
  while (batch && !divides_total(options, batch, options->seq_len)) batch--;
  if (batch) append(&text, ", ", "--batch %lld fits", (long long)batch);
  return *text.text ? text : suggest_together(options, device, usable);
}

// "weights 1.20 GiB, gradients 1.20 GiB": the categories that hold `min` bytes or more.
static List holders(const size_t bytes[MEMORY_CATEGORY_COUNT], size_t min) {
  List text = {""};
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    if (bytes[c] >= min)
      append(&text, ", ", "%s %s", memory_category_name((MemoryCategory)c), text_bytes(bytes[c]).text);
  return text;
}

// All ranks of the machine offload as much.
static void require_host(const Ledger *plan) {
  int ranks = ranks_self()->local_ranks > 1 ? ranks_self()->local_ranks : 1;
  size_t needed = ledger_host_bytes(plan) * (size_t)ranks,
         left = system_bytes("/proc/meminfo", "MemAvailable");
  if (!needed || !left || needed <= left) return;
  fail("--offload needs %s of this machine's memory and %s are left (%s%s); offload less, or add "
       "--moment-dtype bf16 or --no-master-weights",
       text_bytes(needed).text, text_bytes(left).text, ranks > 1 ? "of each rank " : "",
       holders(plan->host, 1).text);
}

void plan_require(const Options *options, DeviceKind device, size_t usable) {
  Ledger plan = plan_run(options, device, options->pass.mode);
  require_host(&plan);
  if (!usable || plan.peak <= usable) return;
  fail("this run needs %s and the device has %s to give (%s); %s", text_bytes(plan.peak).text,
       text_bytes(usable).text, holders(plan.at_peak, plan.peak / 100).text,
       suggest(options, device, usable).text);
}

// --- the table ---------------------------------------------------------------------------------------------

enum { MAX_COLUMNS = 3, TIMELINE_STEPS = 3 };

// A row of bytes; none where all are 0, unless it is wanted all the same.
static void print_row(const size_t *bytes, int count, bool wanted, const char *where, const char *name) {
  char cells[MAX_COLUMNS * 32] = "";
  for (int i = 0; i < count; i++) {
    size_t at = strlen(cells);
    snprintf(cells + at, sizeof cells - at, " %24s", bytes[i] ? text_bytes(bytes[i]).text : "-");
    wanted |= bytes[i] > 0;
  }
  if (wanted) printf("  %s%-*s%s\n", where, 34 - (int)strlen(where), name, cells);
}

void plan_print_table(const MemoryColumn *columns, int count, DeviceKind device) {
  bool measured = false, timed = false;
  printf("%-36s", "memory at the step's peak");
  for (int i = 0; i < count; i++) {
    measured |= columns[i].device_bytes > 0;
    timed |= columns[i].pass_seconds > 0;
    printf(" %24s", columns[i].title.text);
  }
  putchar('\n');
  size_t cells[MAX_COLUMNS];
#define ROW(wanted, bytes, where, name)                                                                      \
  for (const MemoryColumn *c = columns; c < columns + count; c++) cells[c - columns] = bytes;                \
  print_row(cells, count, wanted, where, name)
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) {
    ROW(false, c->memory.at_peak[k], "", memory_category_name((MemoryCategory)k));
  }
  ROW(true, c->memory.peak, "", "all together (ledger)");
  for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) {
    ROW(false, c->memory.host[k], "on the host: ", memory_category_name((MemoryCategory)k));
  }
  ROW(measured, c->device_bytes > c->memory.peak ? c->device_bytes - c->memory.peak : 0, "",
      "outside of it (libraries, context)");
  ROW(false, c->device_bytes, "",
      device == ON_CUDA ? "in use on the device" : "in use by the process (VmHWM)");
  ROW(true, c->memory.highest[MEMORY_HEAD], "", "LM head + loss alone, at its peak");
#undef ROW
  if (!timed) return;
  printf("  %-34s", "time of one forward and backward");
  for (int i = 0; i < count; i++) {
    char text[32] = "-";
    if (columns[i].pass_seconds > 0) snprintf(text, sizeof text, "%.1f ms", 1e3 * columns[i].pass_seconds);
    printf(" %24s", text);
  }
  putchar('\n');
}

const char *sharding_name(const ParameterDtypes *dtypes) {
  static const char *const names[2][3] = {
      {"nothing is sharded over them", "master weights and moments are sharded over them",
       "gradients, master weights and moments are sharded over them"},
      {"", "master weights, moments and the head's rows are sharded over them",
       "gradients, master weights, moments and the head's rows are sharded over them"}};
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
static bool log_plan(FILE *log, const Options *o, DeviceKind device, LceMode mode, const Ledger *plan,
                     size_t capacity) {
  const ModelConfig *m = &o->model;
  RecordField at_peak[MEMORY_CATEGORY_COUNT + 1] = {{0}};
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    at_peak[c] = (RecordField){memory_category_name((MemoryCategory)c), .number = (double)plan->at_peak[c]};
  return record_write(
      log,
      EVENT("plan", TEXT("loss_mode", lce_mode_name(mode)),
            TEXT("device", device == ON_CUDA ? "cuda" : "cpu"), TEXT("model", m->name),
            TEXT("dtype", dtype_name(o->dtype)), TEXT("recompute", options_recompute(o).text),
            NUMBER("batch", o->batch), NUMBER("seq_len", o->seq_len), NUMBER("vocab_size", m->vocab_size),
            NUMBER("hidden_size", m->hidden_size), NUMBER("intermediate_size", m->intermediate_size),
            NUMBER("head_dim", m->head_dim), NUMBER("max_seq_len", model_max_seq_len(m)),
            NUMBER("lce_chunk", mode == LCE_FUSED ? options_used_chunk(o) : 0),
            NUMBER("peak_bytes", plan->peak), NUMBER("head_peak_bytes", plan->highest[MEMORY_HEAD]),
            NUMBER("host_bytes", ledger_host_bytes(plan)), NUMBER("usable_bytes", capacity), // 0: unknown
            {"at_peak", .item = record_object(at_peak)}));
}

// Three planned steps in the mode of the options.
static void plan_timeline(const Options *given, DeviceKind device) {
  Options o = *given;
  o.micro_steps = min_i64(o.micro_steps, 2); // as plan_run
  Trainer trainer;
  open_planned(&trainer, &o, device);
  Ledger *ledger = &trainer.backend->memory.ledger;
  ledger->recording = true;
  for (ledger->step = 1; ledger->step <= TIMELINE_STEPS; ledger->step++)
    o.train_step(&trainer, NULL, ledger->step - 1);
  plan_write_timeline(o.timeline, ledger);
  close_planned(&trainer);
}

void plan_print(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[MAX_COLUMNS] = {
      {.title = {"fused, planned"}, .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = {"materialized, planned"}, .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = {"head split, planned"}, .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, sharding_name(&o->dtypes));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s%s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         dtype_name(o->dtype), o->dtypes.fp8 ? " and FP8" : "", (long long)options_used_chunk(o),
         options_recompute(o).text);
  bool split = o->dtypes.vocab_parallel && o->ranks > 1;
  plan_print_table(columns, split ? 3 : 2, device);
  if (o->log) {
    FILE *log = file_create("the log", o->log, "{\"event\":\"plan\",", REPLACE);
    bool written = true;
    for (int m = 0; m < 2; m++) // fused as the run would be
      written &=
          log_plan(log, o, device, (LceMode)m, &columns[split && m == LCE_FUSED ? 2 : m].memory, capacity);
    if (!written || fclose(log)) fail("cannot write the log %s: %s", o->log, strerror(errno));
  }
  if (o->timeline) plan_timeline(o, device);
  if (o->device_memory > 0) plan_require(o, device, capacity);
}

// Bytes a second in each direction, of the 63e9 that PCIe 5 x16 carries at most.
static const double HOST_LINK_RATE = 50e9;

static void print_link(HostBytes b) {
  size_t more = b.in > b.out ? b.in : b.out; // both directions at once
  printf("  %10s / %-10s %6.2f s", text_bytes(b.in).text, text_bytes(b.out).text,
         (double)more / HOST_LINK_RATE);
}

// A row: the largest batches in both modes, and what offloading costs at the fused one.
static void print_fit(const Options *o, DeviceKind device, const int64_t batch[2]) {
  char words[64], cells[2][24];
  for (int m = 0; m < 2; m++)
    snprintf(cells[m], sizeof cells[m], batch[m] ? "%lld" : "none", (long long)batch[m]);
  printf("%-40s %7s %13s", o->dtypes.offload ? options_words(o, "offload", words) : "nothing", cells[0],
         cells[1]);
  if (o->dtypes.offload && batch[LCE_FUSED]) {
    Options with = with_shape(o, device, batch[LCE_FUSED], o->seq_len);
    Ledger plan = plan_run(&with, device, LCE_FUSED);
    HostTraffic traffic = plan_host_traffic(&with, device);
    printf(" %11s", text_bytes(ledger_host_bytes(&plan)).text);
    print_link(traffic.micro_batch);
    print_link(traffic.update);
  }
  putchar('\n');
}

void plan_print_fit(Options *o) {
  enum { CHOICES = 4 };
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  if (!capacity) fail("--fit: the memory of the device is not known; give it by --device-memory GIB");
  // With --offload that one alone. Offloading from a CPU to its own memory saves nothing.
  const unsigned offloads[CHOICES] = {o->dtypes.offload, OFFLOAD_OPTIMIZER, OFFLOAD_PARAMETERS,
                                      OFFLOAD_PARAMETERS | OFFLOAD_ACTIVATIONS};
  int count = o->dtypes.offload || device == ON_CPU || !o->train_step ? 1
              : o->pass.recompute == RECOMPUTE_LAYER                  ? CHOICES
                                                                      : CHOICES - 1;
  int64_t batches[CHOICES][2], largest = 0;
  Options with[CHOICES];
  for (int i = 0; i < count; i++) {
    with[i] = *o;
    with[i].dtypes.offload = offloads[i];
    for (int m = 0; m < 2; m++) batches[i][m] = plan_largest_batch(&with[i], device, (LceMode)m, capacity);
    largest = max_i64(largest, batches[i][LCE_FUSED]);
  }
  if (!largest) {
    Options one = with_shape(o, device, 1, o->seq_len);
    one.pass.mode = LCE_FUSED;
    fail("--fit: not even one sequence of %lld token%s fits in %s; %s", (long long)o->seq_len,
         o->seq_len == 1 ? "" : "s", text_bytes(capacity).text, suggest(&one, device, capacity).text);
  }
  printf("the largest --batch of %s at --seq-len %lld in %s\n", o->model.name, (long long)o->seq_len,
         text_bytes(capacity).text);
  bool costs = offloads[count - 1] != 0;
  printf("%-40s %7s %13s", "--offload", "fused", "materialized");
  printf(costs ? " %11s  %-32s  %s\n" : "\n", "on the host", "  a micro-batch: in / out",
         "  an update: in / out");
  for (int i = 0; i < count; i++) print_fit(&with[i], device, batches[i]);
  if (costs)
    printf(
        "in / out: bytes over the host link at the fused --batch, and their time at %g GB/s a direction "
        "(PCIe 5 x16), part of which\ncomputation hides; a micro-batch after a step's first also reads the "
        "gradients that it adds to\n",
        1e-9 * HOST_LINK_RATE);
}

// --- --compare-modes ---------------------------------------------------------------------------------------

// A few forward and backward passes in `mode`, with the ledger's peaks measured again. What the system counts would
// hold the buffers that libraries keep from the mode before.
static MemoryColumn measure_mode(Trainer *trainer, LceMode mode) {
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
  return (MemoryColumn){.memory = backend->memory.ledger, .pass_seconds = best};
}

void plan_compare_modes(Trainer *trainer) {
  const Options *o = trainer->options;
  DeviceKind device = trainer->backend->device;
  size_t usable = machine_usable_bytes(trainer->backend);
  MemoryColumn columns[2];
  for (int i = 0; i < 2; i++) {
    LceMode mode = (LceMode)i;
    Ledger plan = plan_run(o, device, mode);
    bool fits = !usable || plan.peak <= usable;
    columns[i] = fits ? measure_mode(trainer, mode) : (MemoryColumn){.memory = plan};
    snprintf(columns[i].title.text, sizeof columns[i].title.text, "%s, %s", lce_mode_name(mode),
             fits ? "measured" : "planned");
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

void plan_record(Ledger *ledger, const Options *o, int64_t step) {
  // Not of the first step, which also chooses algorithms.
  ledger->recording = o->timeline && step > o->first_step && step <= o->first_step + TIMELINE_STEPS;
  ledger->step = (int)step;
}

static double device_seconds(void *backend) {
  backend_synchronize(backend);
  return now_seconds();
}

void plan_write_recorded(const Options *o, Backend *backend) {
  Ledger *ledger = &backend->memory.ledger;
  ledger->clock = device_seconds;
  ledger->clock_context = backend;
  if (o->timeline && o->rank == 0) plan_write_timeline(o->timeline, ledger);
}

void plan_write_timeline(const char *path, const Ledger *ledger) {
  static const char columns[] = "event,step,at,block,total";
  FILE *out = file_create("the timeline", path, columns, REPLACE);
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
