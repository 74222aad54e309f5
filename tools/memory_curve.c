// How much memory does a large vocabulary cost, and what does the fused loss save? Sweeps one size over both
// modes of the loss, plans and measures every point, and writes curve.csv, curve.png and a table.
//
//   tools/memory_curve                                        the default model over its tokens
//   tools/memory_curve --model llama-1b --sweep tokens --values 4096:65536:x2
//   tools/memory_curve --layer-only --tokens 4096 --sweep chunk
//   tools/memory_curve --timeline --model llama-8b --seq-len 32768 --batch 1 --plan-only --device cuda
//   tools/memory_curve --recipe gemma2-2b
//
// tools/curves/point.c measures a point, tools/curves/pictures.c draws, tools/curves/recipes.c holds the published experiments.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "tools/curves/pictures.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/speed.h"

// What the command line says, and what follows from it.
typedef struct {
  const char *recipe_name, *out;
  bool fresh, redraw, list_recipes;
  int64_t tokens;
  double memory_gib;
  int resolution;
  Recipe recipe;   // the one named, or what the options say
  Options options; // ./train's
  Experiment e;
  char device[160]; // its description
  size_t usable;    // bytes; 0: unknown
} Run;

// --- options -----------------------------------------------------------------------------------------------

#define OPTION_VALUES Run
static const Option option_rows[] = {
    {GROUP("What is swept")},
    {CHOICE("sweep", "WHAT", recipe.sweeps[0].sweep, "tokens, vocab, hidden or chunk"),
     HELP("tokens, vocab, hidden or chunk (default tokens). A chunk is swept over LM head + loss alone and "
          "drawn as time against memory")},
    {TEXT("values", "LIST", recipe.sweeps[0].values),
     HELP("512,1024,4096 or a range: 256:2048:256, 128:16384:x2; tokens also as batch x sequence, 4x20480 "
          "(default: eight that suit the model)")},
    {FLAG("layer-only", recipe.layer_only, true),
     HELP("LM head + loss alone, on random data: tokens from --batch x --seq-len or --tokens")},
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), HELP("Tokens of --layer-only")},
    {FLAG("gradient-error", recipe.errors, true),
     HELP("With --layer-only: compare sampled gradients with float64")},
    {FLAG("timeline", recipe.timeline, true),
     EXCLUDES("sweep, values, layer-only", "a timeline shows whole steps of one size"),
     HELP("Instead: bytes in use over three training steps, by category, in both modes")},
    {TEXT("recipe", "NAME", recipe_name), EXCLUDES("sweep, values, timeline", "a recipe says what is swept"),
     HELP("A published experiment")},
    {FLAG("list-recipes", list_recipes, true), HELP("Print the recipes there are")},

    {GROUP("How")},
    {FLAG("plan-only", e.plan_only, true),
     HELP("Measure nothing: any model, any device (--device cuda needs no GPU), in seconds")},
    {NUMBER("device-memory", "GIB", memory_gib, 1e-6, 1e6),
     HELP("Memory that the device is taken to have (default: what it reports)")},
    {NUMBER("patience", "SECONDS", e.patience, 0, 1e9), DEFAULT("120"),
     HELP("Time a point may take before it is only planned")},
    {TEXT("out", "DIR", out),
     HELP("Where the files go (default runs/memory_curve, or a directory in it for a recipe)")},
    {FLAG("fresh", fresh, true),
     HELP("Start over; without it a sweep that was stopped continues where it was")},
    {FLAG("redraw", redraw, true), EXCLUDES("fresh", "one needs the old figures, the other drops them"),
     HELP("Only draw again what is in DIR")},
    {WHOLE("resolution", "N", resolution, 1, 4), DEFAULT("2"), HELP("Pixels per point of the pictures")},
    {.type = OPTION_END}};

// Takes this program's options; the rest, after the recipe's, are ./train's.
static void parse(Run *r, int argc, char **argv) {
  static const OptionTable table = {
      option_rows,
      "Memory and time of a training step, or of LM head + loss alone, with the fused loss and with "
      "materialized logits: planned, counted by the ledger, and by the system. Writes curve.csv "
      "and curve.png.\v"
      "Every option of ./train that describes the model, the job or the machine is understood too (./train "
      "--help): --model, --vocab, --batch, --seq-len, --recompute, --lce-chunk, --device, ...",
      NULL};
  r->recipe = (Recipe){.name = "none", .sweeps = {{.values = VALUES_USUAL}}};
  int words = option_table_take(&table, r, argc, argv), count = 1, extra = 0;
  if (r->recipe.timeline) r->recipe.sweeps[0].values = NULL;
  if (r->list_recipes) {
    recipes_list();
    exit(0);
  }
  if (r->recipe_name) {
    bool errors = r->recipe.errors;
    r->recipe = *recipe_named(r->recipe_name);
    r->recipe.errors |= errors;
  }
  const char *const *arguments = r->recipe.arguments;
  while (arguments && arguments[extra]) extra++;
  char **all = host_alloc(words + extra + 1, sizeof *all, "the command line");
  all[0] = argv[0];
  for (int i = 0; i < extra; i++) all[count++] = (char *)arguments[i];
  for (int i = 1; i < words; i++) all[count++] = argv[i];
  options_parse(&r->options, count, all);
  free(all);
}

static void check(Run *r) {
  Options *o = &r->options;
  Experiment *e = &r->e;
  e->layer_only = r->recipe.layer_only || r->recipe.sweeps[0].sweep == SWEEP_CHUNK;
  e->errors = r->recipe.errors;
  e->plan_only |= r->recipe.longest;
  if (r->tokens && !e->layer_only) fail("--tokens belongs to --layer-only; a step has --batch and --seq-len");
  if (e->errors && !e->layer_only) fail("--gradient-error belongs to --layer-only");
  if (r->tokens) o->batch = 1, o->seq_len = r->tokens;
  o->total_batch = o->batch * o->seq_len;
  o->micro_steps = 1;
  e->options = o;
  e->memory = r->usable = bytes_from_gib(r->memory_gib);
}

// --- the machine -------------------------------------------------------------------------------------------

// What is computed on, and how fast it is. A recipe for a GPU is planned for one where there is none.
static void choose_device(Run *r) {
  Options *o = &r->options;
  Experiment *e = &r->e;
  const char *reason;
  if (r->recipe.gpu && o->device == DEVICE_AUTO) {
    Backend *gpu = cuda_backend_create(0, DTYPE_BF16, &reason);
    if (gpu) backend_destroy(gpu);
    if (!gpu) {
      printf("%s is planned for a GPU in bf16, since none is used here: %s\n", r->recipe.name, reason);
      e->plan_only = true;
    }
    o->device = DEVICE_CUDA;
  }
  if (e->plan_only && o->device != DEVICE_AUTO) {
    e->device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
    options_resolve_dtypes(o, o->device == DEVICE_CUDA);
    strcpy(r->device, o->device == DEVICE_CUDA ? "a GPU" : "a CPU");
    return;
  }
  Backend *backend = machine_open(o);
  e->device = backend->device;
  o->device = backend->device == ON_CUDA ? DEVICE_CUDA : DEVICE_CPU; // every point opens the same
  snprintf(r->device, sizeof r->device, "%s", backend->description);
  if (!r->usable) r->usable = machine_usable_bytes(backend);
  if (e->plan_only)
    e->memory = r->usable;
  else
    e->gemm_rate = measure_gemm_rate(backend);
  backend_destroy(backend);
}

// --- the table ---------------------------------------------------------------------------------------------

static Text bytes_cell(size_t bytes) {
  return bytes ? text_bytes(bytes) : (Text){"-"};
}

static Text time_cell(double seconds) {
  Text t = {"-"};
  if (seconds > 0)
    snprintf(t.text, sizeof t.text, seconds < 10 ? "%.1f ms" : "%.1f s",
             seconds < 10 ? 1e3 * seconds : seconds);
  return t;
}

static void print_head(const Experiment *e) {
  printf("%-17s %-13s %6s %11s %11s %11s %11s %10s %10s", "", "", "chunk", "planned", "ledger", "device",
         "LM head", e->layer_only ? "GEMMs" : "step", "LM head");
  if (e->errors) printf(" %9s %9s %9s", "loss err", "dX err", "dW err");
  putchar('\n');
}

static Label point_name(const Point *p) {
  return label("%s %s", SWEEP_NAMES[p->sweep], text_grouped((int64_t)point_value(p)).text);
}

static void print_row(const Experiment *e, const Reading *r, const char *left) {
  const Point *p = &r->point;
  printf("%-17s %-13s %6s %11s %11s %11s %11s %10s %10s", point_name(p).text, lce_mode_name(p->mode),
         p->chunk ? label("%lld", (long long)p->chunk).text : "-", bytes_cell(r->planned_bytes).text,
         bytes_cell(r->ledger_bytes).text, bytes_cell((size_t)fmax(0, reading_device_bytes(r))).text,
         bytes_cell(reading_layer_bytes(r)).text,
         time_cell(e->layer_only ? r->floor_seconds : r->step_seconds).text,
         time_cell(r->layer_seconds).text);
  if (e->errors && r->status == POINT_MEASURED)
    printf(" %9.2g %9.2g %9.2g", r->loss_error, r->dx_error, r->dweight_error);
  if (r->status == POINT_NO_MEMORY)
    printf("  does not fit: needs %s of %s", text_bytes(r->planned_bytes).text,
           text_bytes(r->usable_bytes).text);
  else if (r->status != POINT_MEASURED)
    printf("  %s", STATUS_NAMES[r->status]);
  printf("%s\n", left);
  fflush(stdout);
}

// --- measuring ---------------------------------------------------------------------------------------------

// Takes the file's readings of this sweep; a file of other settings ends the program. What was too slow before is
// tried again: the patience may have grown.
static void resume(Curve *c, const char *path) {
  Curve found;
  int had = 0;
  if (!curve_read(&found, path)) return;
  curve_require_same(&found, c, path);
  for (int i = 0; i < c->count; i++) {
    const Reading *r = curve_find(&found, &c->readings[i].point);
    if (r && r->status != POINT_TOO_SLOW) c->readings[i] = *r, had++;
  }
  curve_free(&found);
  if (had) printf("%d of %d points are in %s already (--fresh measures them again)\n", had, c->count, path);
}

// Reads every point that the file does not have yet, writes it down at once, and prints a row of a table with the
// time left.
static void measure_points(const Experiment *e, Curve *c, const char *path) {
  double ahead = 0, done = 0, started = now_seconds();
  for (int i = 0; i < c->count; i++)
    if (!reading_known(&c->readings[i])) ahead += point_flops(e, &c->readings[i].point);
  curve_write(c, path);
  print_head(e);
  for (int i = 0; i < c->count; i++) {
    Reading *r = &c->readings[i];
    const Point *p = &r->point;
    Label left = {""};
    if (!reading_known(r)) {
      if (isatty(STDOUT_FILENO)) printf("%s, %s ...\r", point_name(p).text, lce_mode_name(p->mode));
      fflush(stdout);
      *r = point_read(e, p);
      curve_write(c, path);
      // What was only planned took no time: it says nothing about the rest.
      if (r->status == POINT_MEASURED)
        done += point_flops(e, p);
      else
        ahead -= point_flops(e, p);
      double spent = now_seconds() - started;
      if (done > 0 && ahead - done > 1e-6 * ahead)
        left = label("  %s left", text_duration(spent / done * (ahead - done)).text);
    }
    print_row(e, r, left.text);
  }
}

// --- the summary -------------------------------------------------------------------------------------------

static void print_agreement(const Curve *c) {
  int measured = 0, exact = 0;
  double least = INFINITY, most = -INFINITY, base = 0;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->status != POINT_MEASURED) continue;
    measured++;
    exact += r->planned_bytes == r->ledger_bytes && r->planned_layer_bytes == r->layer_bytes;
    double apart = reading_device_bytes(r) - (double)r->ledger_bytes;
    least = fmin(least, apart);
    most = fmax(most, apart);
    base = fmax(base, (double)r->device_base_bytes);
  }
  if (!measured) {
    printf("\nevery figure is planned: nothing was allocated\n");
    return;
  }
  printf("\nplanned and ledger agree to the byte at %d of %d measured points\n", exact, measured);
  printf("the device counts from %s less to %s more than the ledger, and up to %s for its context and "
         "libraries\n",
         text_bytes((uint64_t)fmax(0, -least)).text, text_bytes((uint64_t)fmax(0, most)).text,
         text_bytes((uint64_t)base).text);
}

// The materialized reading that a fused one is to be compared with.
static const Reading *partner(const Curve *c, const Reading *fused) {
  Point p = fused->point;
  p.mode = LCE_MATERIALIZED;
  p.chunk = 0;
  return curve_find(c, &p);
}

static void print_saving(const Experiment *e, const Reading *fused, const Reading *logits) {
  const Point *p = &fused->point;
  double less = (double)reading_layer_bytes(logits) / (double)reading_layer_bytes(fused);
  bool measured = fused->layer_bytes && logits->layer_bytes;
  printf("at N %s, H %s, V %s the peak of the LM head + loss beyond its gradients falls %.1f times, from %s "
         "materialized to %s fused at chunk %s (%s, %s)\n",
         text_grouped(point_tokens(p)).text, text_grouped(p->hidden_size).text,
         text_grouped(p->vocab_size).text, less, text_bytes(reading_layer_bytes(logits)).text,
         text_bytes(reading_layer_bytes(fused)).text, text_grouped(p->chunk).text,
         dtype_name(e->options->dtype), measured ? "measured" : "planned");
  if (e->layer_only) return;
  double planned = (double)logits->planned_bytes - (double)fused->planned_bytes;
  printf("the whole step's peak falls from %s to %s", text_bytes(reading_bytes(logits)).text,
         text_bytes(reading_bytes(fused)).text);
  if (fused->ledger_bytes && logits->ledger_bytes) {
    double ledger = (double)logits->ledger_bytes - (double)fused->ledger_bytes;
    double device = reading_device_bytes(logits) - reading_device_bytes(fused);
    printf(": by %s, where the plan says %s and the device %s\n", text_bytes((uint64_t)fmax(0, ledger)).text,
           text_bytes((uint64_t)fmax(0, planned)).text, text_bytes((uint64_t)fmax(0, device)).text);
  } else {
    printf(", planned\n");
  }
}

static void print_summary(const Experiment *e, const Curve *c) {
  print_agreement(c);
  // One sentence for the largest point of each curve, the measured one where there is one.
  for (int s = 0; s < SWEEP_COUNT; s++) {
    const Reading *best = NULL;
    for (int i = 0; i < c->count; i++) {
      const Reading *r = &c->readings[i], *other = partner(c, r);
      if (r->point.sweep != (Sweep)s || r->point.mode != LCE_FUSED || !other) continue;
      bool measured = r->layer_bytes && other->layer_bytes;
      bool had = best && best->layer_bytes && partner(c, best)->layer_bytes;
      // Of chunks, the first says most; of the rest, the last.
      if (!best || (measured && !had) || (measured == had && s != SWEEP_CHUNK)) best = r;
    }
    if (best) print_saving(e, best, partner(c, best));
  }
}

// --- what a run does -----------------------------------------------------------------------------------------

static void describe(Curve *c, const Run *r) {
  const Options *o = &r->options;
  const ModelConfig *m = &o->model;
  curve_set(c, "what", "%s", r->e.layer_only ? "layer" : "step");
  curve_set(c, "recipe", "%s", r->recipe.name);
  curve_set(c, "planned", "%s", r->e.plan_only ? "yes" : "no");
  curve_set(c, "device", "%s", r->device);
  curve_set(c, "dtype", "%s", dtype_name(o->dtype));
  if (!r->e.layer_only) {
    curve_set(c, "model", "%s", m->name);
    curve_set(c, "layers", "%lld", (long long)m->num_hidden_layers);
    curve_set(c, "intermediate", "%lld", (long long)m->intermediate_size);
    curve_set(c, "heads", "%lld/%lld of %lld", (long long)m->num_attention_heads,
              (long long)m->num_key_value_heads, (long long)m->head_dim);
    curve_set(c, "head", "%s", m->tie_word_embeddings ? "tied" : "untied");
    curve_set(c, "gradients", "%s", dtype_name(o->dtypes.grad));
    curve_set(c, "moments", "%s", dtype_name(o->dtypes.moment));
    curve_set(c, "master", "%s", o->dtypes.master ? "fp32" : "none");
    curve_set(c, "recompute", "%s", options_recompute(o).text);
    if (o->offload) curve_set(c, "offload", "%s", o->offload);
  }
  curve_set(c, "vocab", "%lld", (long long)m->vocab_size);
  curve_set(c, "hidden", "%lld", (long long)m->hidden_size);
  curve_set(c, "batch", "%lld", (long long)o->batch);
  curve_set(c, "seq_len", "%lld", (long long)o->seq_len);
  curve_set(c, "chunk",
            o->lce_chunk    ? "%lld"
            : o->lce_memory ? "within %lld MiB"
                            : "an eighth",
            (long long)(o->lce_chunk ? o->lce_chunk : o->lce_memory));
  if (r->e.errors) curve_set(c, "gradient_error", "yes");
  if (r->memory_gib > 0) curve_set(c, "memory", "%g GiB", r->memory_gib);
  curve_set(c, "sweep", "%s", SWEEP_NAMES[r->recipe.sweeps[0].sweep]);
  bool own = !r->recipe_name && r->recipe.sweeps[0].values; // a recipe's need not be said
  curve_set(c, "values", "%s", own ? r->recipe.sweeps[0].values : VALUES_USUAL);
}

// Writes a picture, if this build and machine can draw, and frees it.
static void draw(const Run *r, const char *name, Picture *picture) {
  const char *missing = canvas_missing();
  char *path = path_join(r->out, name);
  if (missing) {
    printf("no picture: %s\n", missing);
  } else {
    picture_write(picture, r->resolution, path);
    printf("wrote %s\n", path);
  }
  free(path);
  picture_free(picture);
}

// The picture of a curve; a grid of panels puts the trade-off into a separate picture.
static void draw_curve(const Run *r, const Curve *c) {
  const Recipe *recipe = recipe_of(c);
  draw(r, "curve.png", picture_curve(c));
  if (recipe && recipe->sweeps[1].values && picture_has_trade(c)) draw(r, "trade.png", picture_trade(c));
}

static void sweep(const Run *r) {
  const Experiment *e = &r->e;
  Curve curve = {0};
  for (int i = 0; r->recipe.sweeps[i].values; i++)
    curve_add_sweep(&curve, e, r->recipe.sweeps[i].sweep, r->recipe.sweeps[i].values);
  describe(&curve, r);
  char *csv = path_join(r->out, "curve.csv");
  printf("%s\n\n", curve_caption(&curve).text);
  if (!r->fresh) resume(&curve, csv);
  measure_points(e, &curve, csv);
  print_summary(e, &curve);
  if (r->recipe_name) recipe_compare(&r->recipe, e, &curve);
  printf("\nwrote %s\n", csv);
  draw_curve(r, &curve);
  free(csv);
  curve_free(&curve);
}

static void timeline(Run *r) {
  const Options *o = &r->options;
  Curve points = {0}, settings = {0};
  char *csv = path_join(r->out, "timeline.csv");
  curve_add_sweep(&points, &r->e, SWEEP_TOKENS,
                  label("%lldx%lld", (long long)o->batch, (long long)o->seq_len).text);
  for (int i = 0; i < points.count && !r->e.plan_only; i++) {
    const Point *p = &points.readings[i].point;
    Options at = point_options(&r->e, p);
    size_t needs = plan_run(&at, r->e.device, p->mode).peak;
    if (r->usable && needs > r->usable) {
      printf("the timeline is planned: %s needs %s of %s\n", lce_mode_name(p->mode), text_bytes(needs).text,
             text_bytes(r->usable).text);
      r->e.plan_only = true;
    }
    if (!r->e.plan_only) plan_require(&at, r->e.device, 0); // of the host's memory
  }
  Timeline t = {0};
  for (int i = points.count - 1; i >= 0; i--) timeline_record(&t, &r->e, &points.readings[i].point);
  if (o->dtype == DTYPE_BF16)
    timeline_add_fp32(&t, (size_t)(o->batch * o->seq_len * o->model.vocab_size) * sizeof(uint16_t));
  describe(&settings, r);
  printf("%s\n", curve_caption(&settings).text);
  timeline_compare(&t, &settings);
  timeline_write(&t, &settings, csv);
  printf("\nwrote %s\n", csv);
  draw(r, "timeline.png", picture_timeline(&t, &settings));
  free(csv);
  timeline_free(&t);
  curve_free(&points);
}

static void longest(const Run *r) {
  Longest all[LONGEST_MAX];
  int count = longest_plan(&r->e, all);
  Curve settings = {0};
  describe(&settings, r);
  printf("%s\n  %s\n\n", r->recipe.source, r->recipe.says);
  longest_print(&r->e, all, count);
  char *csv = path_join(r->out, "longest.csv");
  longest_write(all, count, &settings, csv);
  printf("\nwrote %s\n", csv);
  free(csv);
  draw(r, "longest.png", picture_longest(all, count, &settings));
}

// Redraws what the folder holds.
static void redraw(const Run *r) {
  char *curve_csv = path_join(r->out, "curve.csv"), *timeline_csv = path_join(r->out, "timeline.csv");
  Curve curve, settings = {0};
  Timeline t;
  bool any = curve_read(&curve, curve_csv) && curve.count;
  if (any) draw_curve(r, &curve);
  curve_free(&curve);
  if (timeline_read(&t, &settings, timeline_csv)) {
    draw(r, "timeline.png", picture_timeline(&t, &settings));
    timeline_free(&t);
  } else if (!any) {
    fail("%s holds neither curve.csv nor timeline.csv; run a sweep first, or name another --out", r->out);
  }
  free(curve_csv);
  free(timeline_csv);
}

int main(int argc, char **argv) {
  Run r = {0};
  parse(&r, argc, argv);
  check(&r);
  char folder[300];
  snprintf(folder, sizeof folder, "runs/memory_curve%s%s", r.recipe_name ? "/" : "",
           r.recipe_name ? r.recipe_name : "");
  if (!r.out) r.out = folder;
  if (r.redraw && !r.recipe.longest) { // plans are made again
    redraw(&r);
  } else {
    choose_device(&r);
    Reason reason;
    if (!path_make_folders(r.out, &reason)) fail("--out %s: %s", r.out, reason.text);
    if (r.recipe.longest) longest(&r);
    if (r.recipe.sweeps[0].values) sweep(&r);
    if (r.recipe.timeline) timeline(&r);
  }
  options_free(&r.options);
  return 0;
}
