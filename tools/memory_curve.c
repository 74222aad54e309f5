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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "tools/curves/pictures.h"
#include "tools/curves/points.h"
#include "tools/curves/run.h"
#include "trainer/machine.h"
#include "trainer/plan.h"
#include "trainer/speed.h"

typedef struct {
  const char *sweep, *values, *recipe, *out;
  bool layer_only, errors, timeline, plan_only, fresh, redraw, list_recipes;
  int64_t tokens;
  double memory_gib, patience;
  int resolution;
} Arguments;

// --- options -----------------------------------------------------------------------------------------------

#define OPTION_VALUES Arguments
static const Option option_rows[] = {
    {GROUP("What is swept")},
    {TEXT("sweep", "WHAT", sweep),
     HELP("tokens, vocab, hidden or chunk (default tokens). A chunk is swept over LM head + loss alone and "
          "drawn as time against memory")},
    {TEXT("values", "LIST", values),
     HELP("512,1024,4096 or a range: 256:2048:256, 128:16384:x2; tokens also as batch x sequence, 4x20480 "
          "(default: eight that suit the model)")},
    {FLAG("layer-only", layer_only, true),
     HELP("LM head + loss alone, on random data: tokens from --batch x --seq-len or --tokens")},
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), HELP("Tokens of --layer-only")},
    {FLAG("gradient-error", errors, true), HELP("With --layer-only: compare sampled gradients with float64")},
    {FLAG("timeline", timeline, true),
     HELP("Instead: bytes in use over three training steps, by category, in both modes")},
    {TEXT("recipe", "NAME", recipe), HELP("A published experiment")},
    {FLAG("list-recipes", list_recipes, true), HELP("Print the recipes there are")},

    {GROUP("How")},
    {FLAG("plan-only", plan_only, true),
     HELP("Measure nothing: any model, any device (--device cuda needs no GPU), in seconds")},
    {NUMBER("device-memory", "GIB", memory_gib, 1e-6, 1e6),
     HELP("Memory that the device is taken to have (default: what it reports)")},
    {NUMBER("patience", "SECONDS", patience, 0, 1e9), DEFAULT("120"),
     HELP("Time a point may take before it is only planned")},
    {TEXT("out", "DIR", out),
     HELP("Where the files go (default runs/memory_curve, or a directory in it for a recipe)")},
    {FLAG("fresh", fresh, true),
     HELP("Start over; without it a sweep that was stopped continues where it was")},
    {FLAG("redraw", redraw, true), HELP("Only draw again what is in DIR")},
    {WHOLE("resolution", "N", resolution, 1, 4), DEFAULT("2"), HELP("Pixels per point of the pictures")},
    {.type = OPTION_END}};

// Takes this program's options; the rest, after the recipe's, are ./train's.
static Arguments parse(int argc, char **argv, const Recipe **recipe, Options *options) {
  static const OptionTable table = {
      option_rows,
      "Memory and time of a training step, or of LM head + loss alone, with the fused loss and with "
      "materialized logits: planned, counted by the ledger, and by the system. Writes curve.csv "
      "and curve.png.\v"
      "Every option of ./train that describes the model, the job or the machine is understood too (./train "
      "--help): --model, --vocab, --batch, --seq-len, --recompute, --lce-chunk, --device, ...",
      NULL};
  Arguments args = {0};
  int words = option_table_take(&table, &args, NULL, argc, argv), count = 1, extra = 0;
  if (args.list_recipes) {
    recipes_list(stdout);
    exit(0);
  }
  *recipe = recipe_named(args.recipe);
  const char *const *arguments = *recipe ? (*recipe)->arguments : NULL;
  while (arguments && arguments[extra]) extra++;
  char **all = host_alloc(words + extra + 1, sizeof *all, "the command line");
  all[0] = argv[0];
  for (int i = 0; i < extra; i++) all[count++] = (char *)arguments[i];
  for (int i = 1; i < words; i++) all[count++] = argv[i];
  options_parse(options, count, all);
  free(all);
  return args;
}

static void check(Arguments *args, const Recipe *recipe, Options *o) {
  if (args->recipe && (args->sweep || args->values || args->timeline))
    fail("--recipe %s says what is swept; leave out --sweep, --values and --timeline", args->recipe);
  if (args->timeline && (args->sweep || args->values || args->layer_only))
    fail("--timeline shows whole steps of one size; leave out --sweep, --values and --layer-only");
  if (args->sweep && sweep_named(args->sweep) == SWEEP_CHUNK) args->layer_only = true;
  if (recipe) args->layer_only = recipe->layer_only, args->errors |= recipe->errors;
  if (args->tokens && !args->layer_only)
    fail("--tokens belongs to --layer-only; a step has --batch and --seq-len");
  if (args->errors && !args->layer_only) fail("--gradient-error belongs to --layer-only");
  if (args->tokens) o->batch = 1, o->seq_len = args->tokens;
  o->total_batch = o->batch * o->seq_len;
  o->micro_steps = 1;
}

// --- the machine -------------------------------------------------------------------------------------------

typedef struct {
  char description[160];
  size_t usable;
} Device;

// What is computed on, and how fast it is. A recipe for a GPU is planned for one where there is none.
static Device choose_device(Arguments *args, const Recipe *recipe, Options *o, Experiment *e) {
  Device d = {.usable = e->memory};
  const char *reason;
  if (recipe && recipe->gpu && o->device == DEVICE_AUTO) {
    Backend *gpu = cuda_backend_create(0, DTYPE_BF16, &reason);
    if (gpu) backend_destroy(gpu);
    if (!gpu) {
      printf("%s is planned for a GPU in bf16, since none is used here: %s\n", recipe->name, reason);
      args->plan_only = true;
    }
    o->device = DEVICE_CUDA;
  }
  if (args->plan_only && o->device != DEVICE_AUTO) {
    e->device = o->device == DEVICE_CUDA ? ON_CUDA : ON_CPU;
    options_resolve_dtypes(o, o->device == DEVICE_CUDA);
    snprintf(d.description, sizeof d.description, "%s", o->device == DEVICE_CUDA ? "a GPU" : "a CPU");
    return d;
  }
  Backend *backend = machine_open(o);
  e->device = backend->device;
  o->device = backend->device == ON_CUDA ? DEVICE_CUDA : DEVICE_CPU; // every point opens the same
  snprintf(d.description, sizeof d.description, "%s", backend->description);
  if (!d.usable) d.usable = machine_usable_bytes(backend);
  if (args->plan_only)
    e->memory = d.usable;
  else
    e->gemm_rate = measure_gemm_rate(backend);
  backend_destroy(backend);
  return d;
}

// --- what is run -------------------------------------------------------------------------------------------

static void describe(Curve *c, const Arguments *args, const Recipe *recipe, const Options *o,
                     const Device *device) {
  const ModelConfig *m = &o->model;
  curve_set(c, "what", "%s", args->layer_only ? "layer" : "step");
  curve_set(c, "recipe", "%s", recipe ? recipe->name : "none");
  curve_set(c, "planned", "%s", args->plan_only ? "yes" : "no");
  curve_set(c, "device", "%s", device->description);
  curve_set(c, "dtype", "%s", dtype_name(o->dtype));
  if (!args->layer_only) {
    curve_set(c, "model", "%s", m->name);
    curve_set(c, "layers", "%lld", (long long)m->num_hidden_layers);
    curve_set(c, "intermediate", "%lld", (long long)m->intermediate_size);
    curve_set(c, "heads", "%lld/%lld of %lld", (long long)m->num_attention_heads,
              (long long)m->num_key_value_heads, (long long)m->head_dim);
    curve_set(c, "head", "%s", m->tie_word_embeddings ? "tied" : "untied");
    curve_set(c, "gradients", "%s", dtype_name(o->dtypes.grad));
    curve_set(c, "moments", "%s", dtype_name(o->dtypes.moment));
    curve_set(c, "master", "%s", o->dtypes.master ? "fp32" : "none");
    curve_set(c, "recompute", "%s", recompute_name(o->recompute));
    curve_set(c, "attention", "%s", o->attention);
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
  if (args->errors) curve_set(c, "gradient_error", "yes");
  if (args->memory_gib > 0) curve_set(c, "memory", "%g GiB", args->memory_gib);
  curve_set(c, "sweep", "%s",
            recipe        ? SWEEP_NAMES[recipe->sweeps[0].sweep]
            : args->sweep ? args->sweep
                          : "tokens");
  curve_set(c, "values", "%s", args->values ? args->values : "usual");
}

// Writes a picture, if this build and machine can draw, and frees it.
static void draw(const char *folder, const char *name, Picture *picture, int resolution) {
  const char *reason;
  char path[600];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  if (!canvas_possible(&reason)) {
    printf("no picture: %s\n", reason);
  } else {
    picture_write(picture, resolution, path);
    printf("wrote %s\n", path);
  }
  picture_free(picture);
}

// The picture of a curve; a grid of panels puts the trade-off into a separate picture.
static void draw_curve(const char *folder, const Curve *c, const Recipe *recipe, int resolution) {
  draw(folder, "curve.png", picture_curve(c, recipe), resolution);
  if (recipe && recipe->sweeps[1].values && picture_has_trade(c))
    draw(folder, "trade.png", picture_trade(c, recipe), resolution);
}

static void sweep(const Arguments *args, const Recipe *recipe, const Experiment *e, const Device *device) {
  const Options *o = e->options;
  Curve curve = {0};
  for (int i = 0; recipe && recipe->sweeps[i].values; i++)
    points_add_sweep(&curve, o, e->device, args->layer_only, recipe->sweeps[i].sweep,
                     recipe->sweeps[i].values);
  if (!recipe)
    points_add_sweep(&curve, o, e->device, args->layer_only,
                     sweep_named(args->sweep ? args->sweep : "tokens"), args->values);
  for (int i = 0; i < curve.count; i++)
    point_options(e, &curve.readings[i].point); // refuses what is no model, first
  describe(&curve, args, recipe, o, device);
  char csv[600];
  snprintf(csv, sizeof csv, "%s/curve.csv", args->out);
  printf("%s\n\n", curve_caption(&curve).text);
  run_points(stdout, e, csv, args->fresh, &curve);
  run_summary(stdout, e, &curve);
  if (recipe) recipe_compare(stdout, recipe, e, &curve);
  printf("\nwrote %s\n", csv);
  draw_curve(args->out, &curve, recipe, args->resolution);
  curve_free(&curve);
}

static void timeline(const Arguments *args, const Recipe *recipe, Experiment e, const Device *device) {
  const Options *o = e.options;
  Curve points = {0};
  char value[64], csv[600];
  snprintf(value, sizeof value, "%lldx%lld", (long long)o->batch, (long long)o->seq_len);
  points_add_sweep(&points, o, e.device, false, SWEEP_TOKENS, value);
  for (int i = 0; i < points.count && !e.plan_only; i++) {
    Options at = point_options(&e, &points.readings[i].point);
    size_t needs = plan_run(&at, e.device, points.readings[i].point.mode).peak_bytes;
    if (device->usable && needs > device->usable) {
      printf("the timeline is planned: %s needs %s of %s\n", lce_mode_name(points.readings[i].point.mode),
             text_bytes(needs).text, text_bytes(device->usable).text);
      e.plan_only = true;
    }
  }
  Timeline timelines[2]; // materialized above, fused below
  for (int i = 0; i < 2; i++) timelines[1 - i] = timeline_record(&e, &points.readings[i].point);
  Arguments shown = *args;
  shown.plan_only = e.plan_only;
  Curve settings = {0};
  describe(&settings, &shown, recipe, o, device);
  snprintf(csv, sizeof csv, "%s/timeline.csv", args->out);
  timeline_write(timelines, &settings, csv);
  printf("wrote %s\n", csv);
  draw(args->out, "timeline.png", picture_timeline(timelines, &settings), args->resolution);
  for (int i = 0; i < 2; i++) timeline_free(&timelines[i]);
  curve_free(&points);
}

// Redraws what the folder holds.
static void redraw(const Arguments *args) {
  char path[600];
  Curve curve = {0}, settings = {0};
  Timeline timelines[2];
  snprintf(path, sizeof path, "%s/curve.csv", args->out);
  bool any = curve_read(&curve, path) && curve.count;
  if (any) {
    Setting name = curve_setting(&curve, "recipe");
    draw_curve(args->out, &curve, recipe_named(strcmp(name.text, "none") ? name.text : NULL),
               args->resolution);
  }
  curve_free(&curve);
  snprintf(path, sizeof path, "%s/timeline.csv", args->out);
  if (timeline_read(timelines, &settings, path)) {
    draw(args->out, "timeline.png", picture_timeline(timelines, &settings), args->resolution);
    for (int i = 0; i < 2; i++) timeline_free(&timelines[i]);
    any = true;
  }
  if (!any)
    fail("%s holds neither curve.csv nor timeline.csv; run a sweep first, or name another --out", args->out);
}

int main(int argc, char **argv) {
  Options options;
  const Recipe *recipe;
  Arguments args = parse(argc, argv, &recipe, &options);
  check(&args, recipe, &options);
  char folder[300];
  snprintf(folder, sizeof folder, "runs/memory_curve%s%s", recipe ? "/" : "", recipe ? recipe->name : "");
  if (!args.out) args.out = folder;
  if (args.redraw) {
    redraw(&args);
    options_free(&options);
    return 0;
  }
  Experiment e = {.options = &options,
                  .layer_only = args.layer_only,
                  .errors = args.errors,
                  .memory = (size_t)(args.memory_gib * 0x1p30),
                  .patience = args.patience};
  Device device = choose_device(&args, recipe, &options, &e);
  e.plan_only = args.plan_only;
  path_make_folders("out", args.out);
  if (!args.timeline) sweep(&args, recipe, &e, &device);
  if (args.timeline || (recipe && recipe->timeline)) timeline(&args, recipe, e, &device);
  options_free(&options);
  return 0;
}
