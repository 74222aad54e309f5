#include "trainer/report.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/fail.h"
#include "base/text.h"
#include "trainer/speed.h"

// --- the memory table --------------------------------------------------------------------------------------

static void row(FILE *out, const char *name, const MemoryColumn *columns, int count,
                size_t (*bytes)(const MemoryColumn *)) {
  fprintf(out, "  %-34s", name);
  for (int i = 0; i < count; i++) {
    size_t value = bytes(&columns[i]);
    fprintf(out, " %24s", value ? text_bytes(value).text : "-");
  }
  fputc('\n', out);
}

static size_t peak_of(const MemoryColumn *c) {
  return c->memory.peak_bytes;
}
static size_t head_of(const MemoryColumn *c) {
  return c->memory.head_peak_bytes;
}
static size_t outside_of(const MemoryColumn *c) {
  return c->device_bytes > c->memory.peak_bytes ? c->device_bytes - c->memory.peak_bytes : 0;
}
static size_t device_of(const MemoryColumn *c) {
  return c->device_bytes;
}

void report_memory(FILE *out, const MemoryColumn *columns, int count, const char *device_row) {
  fprintf(out, "%-36s", "memory at the step's peak");
  bool timed = false, measured = false;
  for (int i = 0; i < count; i++) {
    fprintf(out, " %24s", columns[i].title);
    timed |= columns[i].pass_seconds > 0;
    measured |= columns[i].device_bytes > 0;
  }
  fputc('\n', out);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) {
    size_t any = 0;
    for (int i = 0; i < count; i++) any |= columns[i].memory.at_peak[c];
    if (!any) continue;
    fprintf(out, "  %-34s", memory_category_name((MemoryCategory)c));
    for (int i = 0; i < count; i++) {
      size_t value = columns[i].memory.at_peak[c];
      fprintf(out, " %24s", value ? text_bytes(value).text : "-");
    }
    fputc('\n', out);
  }
  row(out, "all together (ledger)", columns, count, peak_of);
  if (measured) row(out, "outside of it (libraries, context)", columns, count, outside_of);
  if (measured) row(out, device_row, columns, count, device_of);
  row(out, "the last layer alone, at its peak", columns, count, head_of);
  if (!timed) return;
  fprintf(out, "  %-34s", "time of one forward and backward");
  for (int i = 0; i < count; i++) {
    char text[32] = "-";
    if (columns[i].pass_seconds > 0) snprintf(text, sizeof text, "%.1f ms", 1e3 * columns[i].pass_seconds);
    fprintf(out, " %24s", text);
  }
  fputc('\n', out);
}

void report_timeline(const char *path, const Ledger *ledger) {
  FILE *out = fopen(path, "w");
  if (!out) fail("cannot write the timeline %s: %s", path, strerror(errno));
  fputs("event,step,block,total", out);
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    fprintf(out, ",\"%s\"", memory_category_name((MemoryCategory)c));
  fputc('\n', out);
  for (size_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *e = &ledger->events[i];
    size_t total = 0;
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += e->bytes[c];
    fprintf(out, "%zu,%d,\"%s\",%zu", i, e->step, e->name, total);
    for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) fprintf(out, ",%zu", e->bytes[c]);
    fputc('\n', out);
  }
  if (fclose(out)) fail("cannot write the timeline %s: %s", path, strerror(errno));
}

// --- the progress line -------------------------------------------------------------------------------------

Progress progress_begin(int64_t steps, double flops_per_step, double gemm_rate) {
  double now = now_seconds();
  return (Progress){.terminal = isatty(STDOUT_FILENO),
                    .steps = steps,
                    .flops_per_step = flops_per_step,
                    .gemm_rate = gemm_rate,
                    .started = now,
                    .last_printed = now - 3600};
}

double progress_share(const Progress *p, double seconds_per_step) {
  if (p->gemm_rate <= 0 || seconds_per_step <= 0) return 0;
  return p->flops_per_step / p->gemm_rate / seconds_per_step;
}

void progress_update(Progress *p, const StepResult *last, int count, double seconds, int64_t tokens_per_step,
                     size_t bytes) {
  double each = seconds / count;
  // The first steps are slower than the rest: an average that forgets.
  p->smoothed_seconds = p->smoothed_seconds > 0 ? 0.8 * p->smoothed_seconds + 0.2 * each : each;
  double now = now_seconds();
  int64_t done = last->step + 1;
  bool due = done == p->steps || now - p->last_printed >= (p->terminal ? 0.1 : 5);
  if (!due) return;
  p->last_printed = now;
  double left = (double)(p->steps - done) * p->smoothed_seconds;
  char filtered[64] = "";
  if (!isnan(last->filtered_tiles))
    snprintf(filtered, sizeof filtered, "  filtered %.1f%% of tiles, mass %.1e", 100 * last->filtered_tiles,
             last->filtered_mass);
  printf("%sstep %lld/%lld  loss %.4f  lr %.2e  norm %.2f%s  %s tok/s  %.0f%% of products  %s  %s left%s",
         p->terminal ? "\r\033[K" : "", (long long)done, (long long)p->steps, last->loss, last->learning_rate,
         last->grad_norm, filtered, text_count((double)tokens_per_step / p->smoothed_seconds).text,
         100 * progress_share(p, p->smoothed_seconds), text_bytes(bytes).text, text_duration(left).text,
         p->terminal ? "" : "\n");
  fflush(stdout);
  p->drawn = p->terminal;
}

void progress_break(Progress *p) {
  if (p->drawn) putchar('\n');
  p->drawn = false;
}
