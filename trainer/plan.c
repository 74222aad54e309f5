#include "trainer/plan.h"

#include <stdio.h>
#include <string.h>

#include "base/fail.h"
#include "base/integers.h"
#include "base/text.h"
#include "model/shards.h"
#include "trainer/trainer.h"

Plan plan_from_ledger(const Ledger *ledger) {
  Plan plan = {.peak_bytes = ledger->peak,
               .stack_bytes = ledger->stack_peak,
               .head_peak_bytes = ledger->highest[MEMORY_HEAD]};
  memcpy(plan.at_peak, ledger->at_peak, sizeof plan.at_peak);
  return plan;
}

Plan plan_run(const Options *given, DeviceKind device, LceMode mode) {
  Options copy = *given;
  const Options *options = &copy;
  if (mode == LCE_MATERIALIZED) copy.dtypes.vocab_parallel = false; // which that mode does not have
  Backend *backend = plan_backend_create(device, options->dtype);
  backend->ranks = options->ranks;
  Trainer trainer;
  trainer_create(&trainer, options, backend);
  trainer_set_mode(&trainer, mode);
  if (!options->eval_only) {
    int64_t count;
    trainer_step(&trainer, NULL, 0);
    trainer_sample(&trainer, NULL, 1, 0, &count);
  }
  trainer_validate(&trainer, NULL, 1);
  if (options->save && !options->eval_only) shards_plan_read(&trainer.model.parameters, backend);
  Plan plan = plan_from_ledger(&backend->memory.ledger);
  trainer_destroy(&trainer);
  backend_destroy(backend);
  return plan;
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
  return plan_run(&o, device, LCE_FUSED).head_peak_bytes;
}

static bool chunk_fits(const void *budget, int64_t chunk) {
  const Budget *b = budget;
  return head_bytes(b->options, b->device, chunk) <= b->bytes;
}

int64_t plan_chunk_within(const Options *options, DeviceKind device, size_t bytes, size_t *min) {
  *min = head_bytes(options, device, 1);
  if (*min > bytes) return 0;
  Budget budget = {options, device, LCE_FUSED, bytes};
  return largest_that_fits(chunk_fits, &budget, 1, options->batch * options->seq_len + 1);
}

static Options with_batch(const Options *options, DeviceKind device, int64_t batch) {
  Options o = *options;
  o.batch = batch;
  o.total_batch = batch * o.seq_len * o.ranks;
  o.micro_steps = 1;
  if (!o.chunk_given) { // as it would be chosen for that batch
    Backend *plan = plan_backend_create(device, o.dtype);
    o.lce_chunk = 0;
    options_resolve_chunk(&o, plan);
    backend_destroy(plan);
  }
  return o;
}

static bool batch_fits(const void *budget, int64_t batch) {
  const Budget *b = budget;
  Options o = with_batch(b->options, b->device, batch);
  return plan_run(&o, b->device, b->mode).peak_bytes <= b->bytes;
}

int64_t plan_largest_batch(const Options *options, DeviceKind device, LceMode mode, size_t bytes) {
  Budget budget = {options, device, mode, bytes};
  int64_t max = INT32_MAX / options->seq_len, fits = 0, above = 1;
  while (above <= max && batch_fits(&budget, above)) {
    fits = above;
    above *= 2;
  }
  return largest_that_fits(batch_fits, &budget, fits, min_i64(above, max + 1));
}

// Appends "; --flag needs 12.3 GiB" when that is less than the capacity. Returns whether it fits.
static bool suggest(char *text, size_t size, const char *flag, const Options *o, DeviceKind device,
                    LceMode mode, size_t capacity) {
  size_t bytes = plan_run(o, device, mode).peak_bytes;
  if (bytes > capacity) return false;
  size_t length = strlen(text);
  snprintf(text + length, size - length, "%s%s needs %s", length ? ", " : "", flag, text_bytes(bytes).text);
  return true;
}

void plan_require(const Options *options, DeviceKind device, size_t usable) {
  Plan plan = plan_run(options, device, options->mode);
  if (!usable || plan.peak_bytes <= usable) return;

  char holders[512] = "", ways[512] = "";
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) {
    size_t length = strlen(holders);
    if (plan.at_peak[c] >> 20)
      snprintf(holders + length, sizeof holders - length, "%s%s %s", length ? ", " : "",
               memory_category_name((MemoryCategory)c), text_bytes(plan.at_peak[c]).text);
  }
  if (options->mode == LCE_MATERIALIZED)
    suggest(ways, sizeof ways, "--fused-lce", options, device, LCE_FUSED, usable);
  for (int r = options->recompute + 1; r < RECOMPUTE_COUNT; r++) {
    Options o = *options;
    o.recompute = (Recompute)r;
    char flag[40];
    snprintf(flag, sizeof flag, "--recompute %s", recompute_name(o.recompute));
    if (suggest(ways, sizeof ways, flag, &o, device, options->mode, usable)) break;
  }
  int64_t batch = plan_largest_batch(options, device, options->mode, usable);
  if (batch) {
    size_t length = strlen(ways);
    snprintf(ways + length, sizeof ways - length, "%s--batch %lld fits", length ? ", " : "",
             (long long)batch);
  }
  fail("this run needs %s and the device has %s to give (%s); %s", text_bytes(plan.peak_bytes).text,
       text_bytes(usable).text, holders,
       ways[0] ? ways
               : "no smaller batch fits: take a smaller model, --moment-dtype bf16 or --no-master-weights");
}
