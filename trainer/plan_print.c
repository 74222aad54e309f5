// Settings that a device leaves open, and --plan.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/text.h"
#include "trainer/fit.h"
#include "trainer/plan.h"
#include "trainer/report.h"

void plan_resolve(Options *o, DeviceKind device, size_t usable) {
  if (o->fit)
    fit_choose(o, device, usable);
  else if (!o->pass.chunk)
    o->pass.chunk = lce_default_chunk(device, o->batch * o->seq_len);
}

static void require_host(const Ledger *plan, const Options *o, DeviceKind device) {
  char holders[512];
  if (plan_fits_host(plan, o, device)) return;
  fail("--offload needs %s of this machine's memory and %s are left (%s%s); %s",
       text_bytes(plan_host_bytes(plan, o, device)).text, text_bytes(plan_host_left(o)).text,
       plan_host_ranks(o) > 1 ? "of each rank " : "", memory_holders(plan->host, 1, holders),
       device == ON_CPU ? "leave it out: it is of no use on a CPU, which computes in the same memory"
                        : "offload less, or add --moment-dtype bf16 or --no-master-weights");
}

void plan_require(const Options *options, DeviceKind device, size_t usable) {
  char holders[512];
  Ledger plan = plan_run(options, device, options->pass.mode);
  require_host(&plan, options, device);
  if (!usable || plan.peak <= usable) return;
  fail("this run needs %s and the device has %s to give (%s); %s", text_bytes(plan.peak).text,
       text_bytes(usable).text, memory_holders(plan.at_peak, plan.peak / 100, holders),
       fit_remedy(options, device, usable).text);
}

// The device that a plan is for. Only --fit without --device-memory, and --device auto, look for one.
static DeviceKind planned_device(Options *o, size_t *capacity) {
  DeviceKind device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
  size_t given = bytes_from_gib(o->device_memory);
  if (o->device == DEVICE_AUTO || (o->fit && !given)) {
    Backend *backend = machine_open(o);
    device = backend->device;
    *capacity = machine_usable_bytes(backend);
    backend_destroy(backend);
  } else {
    options_resolve_device(o, &(Backend){.device = device});
  }
  if (given) *capacity = given;
  plan_resolve(o, device, *capacity);
  return device;
}

// A plan in one mode as a line of the log; its bytes have the names that they have in a run's summary.
static bool log_plan(FILE *log, const Options *o, DeviceKind device, LceMode mode, const Ledger *plan,
                     size_t capacity) {
  const ModelConfig *m = &o->model;
  LogField at_peak[MEMORY_CATEGORY_COUNT + 1] = {{0}};
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    at_peak[c] = (LogField){memory_category_name((MemoryCategory)c), .number = (double)plan->at_peak[c]};
  return log_line(log, LOG_EVENT("plan", LOG_RUN(o, mode), STR("device", device_name(device)),
                                 NUM("intermediate_size", m->intermediate_size), NUM("head_dim", m->head_dim),
                                 NUM("max_seq_len", model_max_seq_len(m)), NUM("peak_bytes", plan->peak),
                                 NUM("head_peak_bytes", plan->highest[MEMORY_HEAD]),
                                 NUM("host_bytes", ledger_host_bytes(plan)),
                                 NUM("usable_bytes", capacity), // 0: unknown
                                 {"at_peak", .item = log_object(at_peak)}));
}

void plan_print(Options *o) {
  size_t capacity = 0;
  DeviceKind device = planned_device(o, &capacity);
  Options whole = *o;
  whole.dtypes.vocab_parallel = false;
  MemoryColumn columns[] = {
      {.title = {"fused, planned"}, .memory = plan_run(&whole, device, LCE_FUSED)},
      {.title = {"materialized, planned"}, .memory = plan_run(o, device, LCE_MATERIALIZED)},
      {.title = {"head split, planned"}, .memory = plan_run(o, device, LCE_FUSED)}};
  if (o->ranks > 1) printf("on each of %d ranks; %s\n", o->ranks, sharding_name(&o->dtypes));
  printf("%s (%s parameters) on %s: batch %lld x %lld, V %s, %s, chunks of %lld, recompute %s\n\n",
         o->model.name, text_count((double)model_parameter_count(&o->model)).text, device_name(device),
         (long long)o->batch, (long long)o->seq_len, text_grouped(o->model.vocab_size).text,
         options_precision(o).text, (long long)options_used_chunk(o), options_recompute(o).text);
  report_memory(columns, o->dtypes.vocab_parallel && o->ranks > 1 ? 3 : 2, device);
  if (o->log) {
    FILE *log = file_create("the log", o->log, "{\"event\":\"plan\",", OVERWRITE);
    bool written = log_plan(log, o, device, LCE_FUSED, &columns[2].memory, capacity) &&
                   log_plan(log, o, device, LCE_MATERIALIZED, &columns[1].memory, capacity);
    if (!written || fclose(log)) fail("cannot write the log %s: %s", o->log, strerror(errno));
  }
  if (o->timeline) plan_write_timeline(o, device);
  if (o->device_memory > 0) plan_require(o, device, capacity);
}
