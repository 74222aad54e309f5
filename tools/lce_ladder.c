// The loss as a ladder (kernels/LCE.md): times six versions of LM head + cross-entropy, from materialized
// logits to linear_cross_entropy, each alternating with the three plain GEMMs that none can do without (logits = X W^T,
// dX = L W, dW = L^T X over all tokens at once). Prints medians, ratios to the GEMMs, the bytes held beyond
// inputs and gradients, and the errors of loss, dX and dW against float64 at sampled rows.
//
//   OMP_NUM_THREADS=1 tools/lce_ladder --tokens 1024 --hidden-size 256 --vocab 32768 --chunk 128
//   tools/lce_ladder --device cuda --tokens 8192 --hidden-size 4096 --vocab 128256 --chunk 1024 --csv ladder.csv
#include <errno.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/fail.h"
#include "base/file.h"
#include "base/option_rows.h"
#include "base/system.h"
#include "base/text.h"
#include "tools/curves/layer.h"
#include "tools/ladder/ladder.h"
#include "tools/measure.h"
#include "tools/plot/chart.h"

typedef struct {
  int64_t tokens, hidden_size, vocab_size, chunk, repeat;
  DeviceKind device;
  const char *csv, *plot;
} Settings;

typedef struct {
  Medians time; // against the three plain GEMMs
  size_t bytes;
  Errors errors;
} Result;

#define OPTION_VALUES Settings
// clang-format off
static const Option options[] = {
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), DEFAULT("1024"), HELP("Tokens")},
    {WHOLE("hidden-size", "H", hidden_size, 1, INT32_MAX), DEFAULT("256"), HELP("Hidden size")},
    {WHOLE("vocab", "V", vocab_size, 1, INT32_MAX), DEFAULT("32768"), HELP("Vocabulary")},
    {WHOLE("chunk", "C", chunk, 1, INT32_MAX), DEFAULT("128"), HELP("Tokens per chunk")},
    {CHOICE("device", "NAME", device, "cpu or cuda"), DEFAULT("cpu"), HELP("Where to run: cpu or cuda")},
    {WHOLE("repeat", "R", repeat, 1, MEASURE_MAX_ROUNDS), DEFAULT("5"), HELP("Rounds, of which the median counts")},
    {TEXT("csv", "FILE", csv), HELP("Write the table as CSV, too")},
    {TEXT("plot", "FILE", plot), HELP("Draw time and memory as PNG")},
    {.type = OPTION_END}};
// clang-format on

static const OptionTable table = {options,
                                  "Times six versions of LM head + cross-entropy against their GEMMs.", NULL};

// --- measuring ---------------------------------------------------------------------------------------------

// With one CPU thread the process's own time, which other programs on the machine disturb less.
static double clock_seconds(Backend *backend) {
  struct timespec t;
  if (backend->device == ON_CUDA || omp_get_max_threads() > 1) return device_seconds(backend);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
  const Settings *settings;
  LceTensors layer;
} Bench;

// Seconds of a rung; rung 0 is the three plain GEMMs.
static double seconds(void *bench, int rung) {
  const Bench *b = bench;
  Backend *backend = b->layer.backend;
  double start = clock_seconds(backend);
  if (rung)
    ladder_run(backend, rung, layer_call(&b->layer, LCE_FUSED, b->settings->chunk));
  else
    layer_gemms(&b->layer, b->settings->tokens);
  return clock_seconds(backend) - start;
}

// Errors and bytes from a first run, then times alternating with the GEMMs.
static Result run(Bench *b, Reference *reference, int rung) {
  Result result = {0};
  Ledger *ledger = &b->layer.backend->memory.ledger;
  size_t before = ledger->stack;
  ledger->stack_peak = before;
  seconds(b, rung);
  result.bytes = ledger->stack_peak - before;
  result.errors = reference_errors(reference, &b->layer);
  result.time = measure(seconds, b, 0, rung, 0.7, b->settings->repeat);
  return result;
}

// --- output ------------------------------------------------------------------------------------------------

static void print_row(int rung, const Result *r) {
  printf("%-32s %9.2f ms %7.3f %12s   %.1e  %.1e  %.1e\n", ladder_names[rung - 1], 1e3 * r->time.work,
         r->time.ratio, text_bytes(r->bytes).text, r->errors.loss, r->errors.dx, r->errors.dweight);
  fflush(stdout);
}

static void write_csv(const Settings *o, const Result *results, const char *caption) {
  FILE *file = file_create("the table", o->csv, "# N ", false);
  fprintf(file, "# %s\n", caption);
  fprintf(file, "rung,seconds,ratio,bytes,loss_error,dx_error,dweight_error\n");
  for (int i = 0; i < RUNGS; i++)
    fprintf(file, "%s,%.9g,%.4f,%zu,%.3e,%.3e,%.3e\n", ladder_names[i], results[i].time.work,
            results[i].time.ratio, results[i].bytes, results[i].errors.loss, results[i].errors.dx,
            results[i].errors.dweight);
  if (fclose(file)) fail("--csv %s: %s", o->csv, strerror(errno));
}

// Time and memory of each rung as bars, one panel each; linear_cross_entropy stands out.
static void draw(const Settings *o, const Result *results, const char *caption) {
  Picture *picture =
      picture_create(760, 300, label("Six versions of LM head + cross-entropy"), label("%s", caption));
  for (int which = 0; which < 2; which++) {
    Panel *panel =
        picture_panel(picture, which ? (Box){470, 100, 670, 290} : (Box){220, 100, 390, 290},
                      label(which ? "Memory beyond inputs and gradients" : "Time / three plain GEMMs"));
    panel->x = (Axis){.unit = which ? UNIT_BYTES : UNIT_PLAIN, .from_zero = true};
    panel->y = (Axis){.names = ladder_names, .hidden = which, .low = -0.6, .high = RUNGS - 0.4};
    for (int i = 0; i < RUNGS; i++) {
      Series style = {.color = {31, 119, 180}, .opacity = i < RUNGS - 1 ? 0.5 : 1};
      double value = which ? (double)results[i].bytes : results[i].time.ratio;
      panel_bar(panel, style, value, i - 0.35, i + 0.35, axis_value(panel->x.unit, value));
    }
  }
  picture_write(picture, 2, o->plot);
  picture_free(picture);
}

int main(int argc, char **argv) {
  Settings o = {0};
  option_table_parse(&table, &o, NULL, argc, argv);
  if (o.chunk > o.tokens) o.chunk = o.tokens;

  const char *missing = canvas_missing();
  if (o.plot && missing) fail("--plot %s: %s", o.plot, missing);
  Backend *backend = layer_backend(o.device, 0);
  LceShape shape = {
      .tokens = o.tokens, .hidden_size = o.hidden_size, .vocab_size = o.vocab_size, .dtype = backend->dtype};
  Bench bench = {&o, layer_reserve(backend, shape)};
  // Rung 1 holds more than any other: logits and their gradient.
  size_t logits =
      (size_t)(o.tokens * backend->scratch->logits_stride(o.vocab_size, DTYPE_F32)) * sizeof(float);
  memory_set_stack(&backend->memory,
                   2 * logits + lce_bytes(backend, LCE_FUSED, o.chunk, shape) + ((size_t)64 << 20));
  char caption[512];
  snprintf(caption, sizeof caption, "N %s, H %s, V %s, chunks of %s; %s", text_grouped(o.tokens).text,
           text_grouped(o.hidden_size).text, text_grouped(o.vocab_size).text, text_grouped(o.chunk).text,
           backend->description);
  puts(caption);
  printf("%-32s %12s %7s %12s   %-22s\n", "", "median", "/ GEMMs", "memory", "error of loss, dX, dW");
  Reference *reference = reference_create(&bench.layer, o.chunk);
  Result results[RUNGS];
  for (int rung = 1; rung <= RUNGS; rung++) {
    results[rung - 1] = run(&bench, reference, rung);
    print_row(rung, &results[rung - 1]);
  }
  if (o.csv) write_csv(&o, results, caption);
  if (o.plot) draw(&o, results, caption);
  reference_destroy(reference);
  backend_destroy(backend);
  return 0;
}
