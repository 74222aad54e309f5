// Memory curves: figures worked out by hand, plan against ledger, pictures looked at pixel by pixel, a sweep
// that is killed, and every refusal.
#include "base/text.h"
#include "kernels/linear_cross_entropy.h"
#include "tests/data_files.h"
#include "tests/png.h"
#include "tests/process.h"
#include "tools/curves/pictures.h"
#include "trainer/plan.h"
#include "trainer/setup.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// A model whose steps take no time.
#define TINY                                                                                                 \
  "--model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 2 "                   \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 16 --batch 2 "

// --- the tool ----------------------------------------------------------------------------------------------

static char trainer[4096], tool[4200];

// Both programs lie where the build puts them: ./train next to the directory of tools/memory_curve.
static int find_programs(void **state) {
  const char *named = getenv("LCE_TRAIN");
  if (named) {
    snprintf(trainer, sizeof trainer, "%s", named);
  } else {
    ssize_t length = readlink("/proc/self/exe", trainer, sizeof trainer - 16); // build/VARIANT/tests/test_x
    assert_true(length > 0);
    trainer[length] = 0;
    for (int i = 0; i < 2; i++) *strrchr(trainer, '/') = 0;
    strcat(trainer, "/train");
    if (access(trainer, X_OK)) strcpy(trainer, "./train");
  }
  const char *slash = strrchr(trainer, '/');
  snprintf(tool, sizeof tool, "%.*stools/memory_curve", slash ? (int)(slash + 1 - trainer) : 0, trainer);
  setenv("LCE_TRAIN", tool, 1); // what tests/process.h runs
  return make_temp_dir(state);
}

static void succeeds(Output o) {
  if (o.status) fail_msg("exit status %d: %s%s", o.status, o.out, o.err);
  output_free(&o);
}

static Curve curve_in(const char *folder) {
  char path[700];
  Curve curve;
  snprintf(path, sizeof path, "%s/curve.csv", folder);
  if (!curve_read(&curve, path)) fail_msg("there is no %s", path);
  return curve;
}

static const Reading *reading(const Curve *c, LceMode mode, Sweep sweep, double value) {
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->point.mode == mode && r->point.sweep == sweep && point_value(&r->point) == value) return r;
  }
  fail_msg("the curve has no %s %g", SWEEP_NAMES[sweep], value);
  return NULL;
}

static bool can_draw(void) {
  return !canvas_missing();
}

static void assert_not_blank(const Image *p) {
  long dark = 0;
  for (long i = 0; i < 3L * p->width * p->height; i++) dark += p->rgb[i] < 128;
  assert_true(dark > 3000);
}

// --- figures -----------------------------------------------------------------------------------------------

// N 64, H 32, V 1000 on a GPU in bf16. Every block counts in whole 256 bytes.
static void hand_worked_csv(void **state) {
  (void)state;
  const char *out = temp_path("hand");
  succeeds(
      train("--layer-only --plan-only --device cuda --sweep tokens --values 64 --hidden-size 32 --vocab 1000 "
            "--lce-chunk 16 --out %s",
            out));
  Curve c = curve_in(out);
  assert_int_equal(c.count, 2);
  size_t x = 64 * 32 * 2, weight = 1000 * 32 * 2, dweight = 1000 * 32 * 4, losses = 256, targets = 256;
  size_t held = x + weight + x + dweight + losses + targets + ((size_t)32 << 20); // and the GEMMs' workspace

  const Reading *whole = reading(&c, LCE_MATERIALIZED, SWEEP_TOKENS, 64);
  size_t logits = 64 * 1024 * 2; // rows of 1000 stand 1024 apart: whole cache lines
  assert_int_equal(whole->planned_layer_bytes, logits);
  assert_int_equal(whole->planned_bytes, held + logits);
  assert_int_equal(whole->status, POINT_PLANNED);
  assert_int_equal(whole->ledger_bytes, 0);

  const Reading *fused = reading(&c, LCE_FUSED, SWEEP_TOKENS, 64);
  size_t chunk = 6 * 256 + 16 * 1024 * 2; // six fp32 columns of 16 rows, exponentials
  Tensor exps = tensor_2d(NULL, DTYPE_BF16, 16, 1000), x_chunk = tensor_2d(NULL, DTYPE_BF16, 16, 32);
  Tensor w = tensor_2d(NULL, DTYPE_BF16, 1000, 32);
  exps.data = x_chunk.data = w.data = &chunk; // only has to be there
  size_t sweep = memory_padded(cuda_scratch.lce_logits_exp(
      &(LceLogitsExp){.exps = exps, .dx_raw = x_chunk, .x = x_chunk, .weight = w}));
  size_t scatter = memory_padded(cuda_scratch.lce_target_gradient(&(LceTargetGradient){.x = x_chunk}));
  size_t scratch = sweep > scatter ? sweep : scatter; // one after the other, as scaled x after the sweep
  assert_true(scratch >= 16 * 32 * 2);
  assert_int_equal(fused->planned_layer_bytes, chunk + scratch);
  assert_int_equal(fused->planned_bytes, held + chunk + scratch);
  assert_int_equal(fused->point.chunk, 16);

  // And the file itself, as another program reads it.
  char *text = read_text(temp_path("hand/curve.csv")), row[200];
  snprintf(row, sizeof row, "\ntokens,materialized,1,64,64,1000,32,0,planned,%zu,%zu,,,,,,,,,,,\n",
           held + logits, logits);
  assert_says(text, row);
  free(text);
  curve_free(&c);
}

static void assert_planned_is_ledger(const Curve *c) {
  int measured = 0;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->status != POINT_MEASURED) continue;
    measured++;
    assert_int_equal(r->ledger_bytes, r->planned_bytes);
    assert_int_equal(r->layer_bytes, r->planned_layer_bytes);
    assert_true(r->layer_seconds > 0);
    assert_true(r->device_bytes > 0);
  }
  assert_int_equal(measured, c->count);
}

static void plan_equals_ledger(void **state) {
  (void)state;
  static const char *const sweeps[] = {"--sweep tokens --values 16,48,4x40 " TINY,
                                       "--sweep vocab --values 280:900:x2 " TINY,
                                       "--sweep hidden --values 8:24:8 " TINY,
                                       "--sweep tokens --values 64,96 --recompute layer --lce-chunk 7 " TINY,
                                       "--sweep chunk --values 3,50 --gradient-error " TINY "--tokens 50",
                                       "--layer-only --sweep vocab --values 300,501 " TINY};
  static const int counts[] = {6, 4, 6, 4, 3, 4};
  for (size_t i = 0; i < sizeof sweeps / sizeof *sweeps; i++) {
    char name[32];
    snprintf(name, sizeof name, "ledger%zu", i);
    const char *out = temp_path(name);
    succeeds(train("--device cpu %s --out %s", sweeps[i], out));
    Curve c = curve_in(out);
    assert_int_equal(c.count, counts[i]);
    assert_planned_is_ledger(&c);
    curve_free(&c);
  }
}

// What ./train --plan says is what the curve says.
static void curve_equals_plan(void **state) {
  (void)state;
  const char *out = temp_path("plan");
  succeeds(train("--plan-only --device cuda --model llama-1b --seq-len 512 --values 2048 --out %s", out));
  Curve c = curve_in(out);
  char *arguments[] = {"train", "--model", "llama-1b", "--seq-len", "512", "--batch", "4", NULL};
  Options o;
  setup_options(&o, 7, arguments);
  options_resolve_dtypes(&o, true);
  o.lce_chunk = options_default_chunk(2048, true);
  for (int m = 0; m < 2; m++) {
    Ledger plan = plan_run(&o, ON_CUDA, (LceMode)m);
    assert_int_equal(reading(&c, (LceMode)m, SWEEP_TOKENS, 2048)->planned_bytes, plan.peak);
  }
  options_free(&o);
  curve_free(&c);
}

// The gradients on this machine against float64: fp32 arithmetic, anchored and not.
static void gradient_errors(void **state) {
  (void)state;
  const char *out = temp_path("errors");
  succeeds(train("--device cpu --layer-only --gradient-error --values 40 --vocab 700 --hidden-size 24 "
                 "--lce-chunk 16 --out %s",
                 out));
  Curve c = curve_in(out);
  for (int i = 0; i < c.count; i++) {
    const Reading *r = &c.readings[i];
    assert_true(r->loss_error > 0 && r->loss_error < 1e-6);
    assert_true(r->dx_error > 0 && r->dx_error < 1e-5);
    assert_true(r->dweight_error > 0 && r->dweight_error < 1e-5);
  }
  curve_free(&c);
}

static void what_does_not_fit(void **state) {
  (void)state;
  const char *out = temp_path("small");
  // Between the two modes' needs: the fused one fits, the materialized one does not.
  Output o = train("--plan-only --device cuda --layer-only --values 4096 --vocab 128256 --hidden-size 64 "
                   "--device-memory 0.5 --out %s",
                   out);
  assert_int_equal(o.status, 0);
  assert_says(o.out, "does not fit: needs 1.06 GiB of 512.0 MiB");
  output_free(&o);
  Curve c = curve_in(out);
  assert_int_equal(reading(&c, LCE_FUSED, SWEEP_TOKENS, 4096)->status, POINT_PLANNED);
  assert_int_equal(reading(&c, LCE_MATERIALIZED, SWEEP_TOKENS, 4096)->status, POINT_NO_MEMORY);
  curve_free(&c);
  // The same where it would be measured.
  succeeds(train("--device cpu " TINY "--values 32,64 --device-memory 1e-5 --out %s", temp_path("small2")));
  c = curve_in(temp_path("small2"));
  for (int i = 0; i < c.count; i++) assert_int_equal(c.readings[i].status, POINT_NO_MEMORY);
  curve_free(&c);
}

// What takes longer than the patience is planned, and measured later when there is more.
static void patience(void **state) {
  (void)state;
  const char *out = temp_path("patience");
  succeeds(train("--device cpu " TINY "--values 512,1024 --patience 1e-6 --out %s", out));
  Curve c = curve_in(out);
  for (int i = 0; i < c.count; i++) assert_int_equal(c.readings[i].status, POINT_TOO_SLOW);
  curve_free(&c);
  succeeds(train("--device cpu " TINY "--values 512,1024 --out %s", out));
  c = curve_in(out);
  assert_int_equal(c.count, 4);
  assert_planned_is_ledger(&c);
  curve_free(&c);
}

// --- recipes -----------------------------------------------------------------------------------------------

static void recipes_plan(void **state) {
  (void)state;
  Output list = train("--list-recipes");
  assert_int_equal(list.status, 0);
  static const int points[] = {0, 0, 0, 16, 39, 8, 8}; // 0: no sweep
  static const char *const names[] = {"llama3-8b-32k", "llama3-8b-4x20480", "llama3-8b-longest",
                                      "tokens-81920",  "chunk-sweep",       "gemma2-2b",
                                      "batch-512"};
  assert_null(RECIPES[7].name);
  for (int i = 0; i < 7; i++) {
    const Recipe *r = &RECIPES[i];
    assert_string_equal(r->name, names[i]);
    assert_says(list.out, r->name);
    assert_says(list.out, r->source);
    const char *out = temp_path(r->name);
    Output o = train("--recipe %s --plan-only --out %s", r->name, out);
    assert_int_equal(o.status, 0);
    assert_says(o.out, r->source);
    assert_says(o.out, r->says);
    output_free(&o);
    if (!points[i]) continue;
    Curve c = curve_in(out);
    assert_int_equal(c.count, points[i]);
    for (int k = 0; k < c.count; k++)
      assert_true(c.readings[k].planned_bytes > c.readings[k].planned_layer_bytes);
    curve_free(&c);
  }
  output_free(&list);
  // The figures that the sources are known for come out of ours.
  Curve c = curve_in(temp_path("tokens-81920"));
  double gib = (double)reading(&c, LCE_MATERIALIZED, SWEEP_TOKENS, 81920)->planned_layer_bytes / 0x1p30;
  assert_true(fabs(gib - 19.57) < 0.01);
  curve_free(&c);
  c = curve_in(temp_path("batch-512"));
  double mib = (double)reading(&c, LCE_MATERIALIZED, SWEEP_TOKENS, 512)->planned_layer_bytes / 0x1p20;
  assert_true(mib > 250 && mib < 253);
  curve_free(&c);
  // The ratios that the sources claim, next to ours; and a footnote promises only marks that are drawn.
  Output o = train("--recipe batch-512 --plan-only --out %s", temp_path("batch-512"));
  assert_says(o.out, "times less when fused, tokens 512");
  output_free(&o);
  o = train("--recipe gemma2-2b --plan-only --out %s", temp_path("gemma2-2b"));
  assert_says(o.out, " 24,000 ");
  assert_says(o.out, " 25.5 ");
  output_free(&o);
  c = curve_in(temp_path("gemma2-2b"));
  for (int trade = 0; trade < 2; trade++) {
    Picture *picture = trade ? picture_trade(&c) : picture_curve(&c);
    assert_says(picture->note, "the paper's figures");
    assert_int_equal(strstr(picture->note, "libraries") != NULL, trade);
    picture_free(picture);
  }
  curve_free(&c);
}

// The published setting: offloaded, 8 chunks, and a baseline whose logits are fp32. What is printed is what ./train
// plans for the same options.
static void offloaded_timelines(void **state) {
  (void)state;
  static const struct {
    const char *name, *logits, *batch, *seq_len, *chunk;
  } recipes[] = {{"llama3-8b-32k", "15.66 GiB", "1", "32768", "4096"},
                 {"llama3-8b-4x20480", "39.14 GiB", "4", "20480", "10240"}};
  for (size_t i = 0; i < 2; i++) {
    Output o = train("--recipe %s --plan-only --out %s", recipes[i].name, temp_path(recipes[i].name));
    assert_int_equal(o.status, 0);
    char *arguments[] = {"train",       "--model",
                         "llama-8b",    "--recompute",
                         "layer",       "--moment-dtype",
                         "bf16",        "--no-master-weights",
                         "--offload",   "weights,gradients,optimizer,activations",
                         "--batch",     (char *)recipes[i].batch,
                         "--seq-len",   (char *)recipes[i].seq_len,
                         "--lce-chunk", (char *)recipes[i].chunk,
                         NULL};
    Options options;
    setup_options(&options, sizeof arguments / sizeof *arguments - 1, arguments);
    options_resolve_dtypes(&options, true);
    size_t tokens = (size_t)(options.batch * options.seq_len);
    assert_int_equal(tokens, 8 * (size_t)options_used_chunk(&options));
    Timeline t;
    Curve settings = {0};
    char path[700];
    snprintf(path, sizeof path, "%s/timeline.csv", temp_path(recipes[i].name));
    assert_true(timeline_read(&t, &settings, path));
    assert_true(curve_is(&settings, "offload", "weights,gradients,optimizer,activations"));
    for (int m = 0; m < TIMELINE_MODES; m++) {
      bool fp32 = m == TIMELINE_FP32;
      size_t more = fp32 ? tokens * 128256 * 2 : 0;
      Ledger plan = plan_run(&options, ON_CUDA, fp32 ? LCE_MATERIALIZED : (LceMode)m);
      Timeline part = timeline_of(&t, m);
      assert_int_equal(timeline_peak(&part, MEMORY_HEAD), plan.highest[MEMORY_HEAD] + more);
      assert_int_equal(timeline_peak(&part, MEMORY_CATEGORY_COUNT), plan.peak + more);
      assert_int_equal(part.moments[part.count - 1].bytes[MEMORY_HEAD], 0);
      for (int k = 1; k < part.count; k++) assert_true(part.moments[k].at >= part.moments[k - 1].at);
      char host[80];
      snprintf(host, sizeof host, "\n  %s are offloaded to the host",
               text_bytes(ledger_host_bytes(&plan)).text);
      assert_says(o.out, host);
      assert_says(o.out, text_bytes(plan.peak + more).text);
    }
    assert_says(o.out, recipes[i].logits);
    assert_says(o.out, "with fp32 logits, planned");
    timeline_free(&t);
    options_free(&options);
    output_free(&o);
  }
}

// Every length fits its memory, with one token more it does not, and both the fused loss and offloading lengthen it.
static void longest_sequences(void **state) {
  (void)state;
  const char *out = temp_path("longest");
  Output o = train("--recipe llama3-8b-longest --out %s", out);
  assert_int_equal(o.status, 0);
  Options options;
  char *arguments[] = {"train",    "--model",
                       "llama-8b", "--max-position-embeddings",
                       "16777216", "--batch",
                       "1",        "--seq-len",
                       "1",        "--recompute",
                       "layer",    "--moment-dtype",
                       "bf16",     "--no-master-weights",
                       NULL};
  setup_options(&options, sizeof arguments / sizeof *arguments - 1, arguments);
  options_resolve_dtypes(&options, true);
  Longest all[LONGEST_MAX];
  Experiment e = {.options = &options, .device = ON_CUDA, .plan_only = true};
  assert_int_equal(longest_plan(&e, all), LONGEST_MAX);
  const double memories[] = {24, 48, 80};
  char *csv = read_text(temp_path("longest/longest.csv"));
  for (int i = 0; i < LONGEST_MAX; i++) {
    const Longest *l = &all[i];
    size_t memory = bytes_from_gib(l->memory_gib);
    assert_true(l->memory_gib == memories[i / 4]);
    for (int more = 0; more < 2; more++) {
      Options at = options;
      at.seq_len = at.total_batch = l->seq_len + more;
      at.dtypes.offload = l->offload ? 15 : 0;
      if (!at.seq_len) continue;
      plan_resolve_chunk(&at, ON_CUDA);
      Ledger plan = plan_run(&at, ON_CUDA, (LceMode)l->mode);
      assert_int_equal(plan.peak > memory, more);
      if (!more) assert_int_equal(plan.peak, l->planned_bytes);
      assert_int_equal(ledger_host_bytes(&plan) > 0, l->offload);
    }
    if (l->mode == LCE_FUSED) assert_true(l->seq_len > l[1].seq_len || l->seq_len == 0);
    if (!l->offload) assert_true(l[2].seq_len > l->seq_len);
    char row[100];
    snprintf(row, sizeof row, "\n%g,%s,%s,", l->memory_gib, l->offload ? "all" : "nothing",
             MODE_NAMES[l->mode]);
    if (l->seq_len) snprintf(row + strlen(row), sizeof row - strlen(row), "%lld,", (long long)l->seq_len);
    assert_says(csv, row);
    assert_says(o.out, l->seq_len ? text_grouped(l->seq_len).text : "none");
  }
  free(csv);
  output_free(&o);
  options_free(&options);
  // One memory that is given.
  o = train("--recipe llama3-8b-longest --device-memory 100 --redraw --out %s", out);
  assert_int_equal(o.status, 0);
  assert_says(o.out, "\n   100 GiB  all ");
  assert_null(strstr(o.out, " 24 GiB  "));
  output_free(&o);
  if (!can_draw()) return;
  Image p = image_read(temp_path("longest/longest.png"));
  assert_non_null(p.rgb);
  assert_int_equal(p.width, 2080);
  assert_int_equal(p.height, 2 * (180 + 62 * 2));
  assert_not_blank(&p);
  image_free(&p);
}

// --- a sweep that is killed --------------------------------------------------------------------------------

static void killed_sweep_resumes(void **state) {
  (void)state;
  const char *line = "--device cpu --layer-only --values 64:384:64 --vocab 10000 --hidden-size 32";
  char killed[600], whole[600];
  snprintf(killed, sizeof killed, "%s", temp_path("killed"));
  snprintf(whole, sizeof whole, "%s", temp_path("whole"));
  succeeds(train("%s --out %s", line, whole));

  Process p = train_start("%s --out %s", line, killed);
  process_wait_for(&p, "tokens 192");
  kill(p.pid, SIGKILL);
  Output o = process_finish(&p);
  assert_int_equal(o.status, 128 + SIGKILL);
  output_free(&o);
  Curve before = curve_in(killed);
  assert_true(before.count >= 5 && before.count < 12);
  // A row that was cut off in the middle is no row.
  char path[700];
  snprintf(path, sizeof path, "%s/curve.csv", killed);
  FILE *file = fopen(path, "a");
  fputs("tokens,fused,1,64", file);
  fclose(file);

  o = train("%s --out %s", line, killed);
  assert_int_equal(o.status, 0);
  char said[80];
  snprintf(said, sizeof said, "%d of 12 points are in", before.count);
  assert_says(o.out, said);
  output_free(&o);
  Curve after = curve_in(killed), never = curve_in(whole);
  assert_int_equal(after.count, 12);
  assert_string_equal(after.settings, never.settings);
  for (int i = 0; i < 12; i++) {
    const Reading *a = &after.readings[i], *b = curve_find(&never, &a->point);
    assert_non_null(b);
    assert_int_equal(a->status, b->status);
    assert_int_equal(a->planned_bytes, b->planned_bytes);
    assert_int_equal(a->ledger_bytes, b->ledger_bytes);
    assert_int_equal(a->layer_bytes, b->layer_bytes);
    // What was measured before the kill was not measured again.
    if (i < before.count) assert_true(a->layer_seconds == before.readings[i].layer_seconds);
  }
  // A finished sweep changes nothing, other settings are refused, and --fresh replaces them.
  char *text = read_text(path);
  succeeds(train("%s --out %s", line, killed));
  char *again = read_text(path);
  assert_string_equal(text, again);
  free(text);
  free(again);
  o = train("--device cpu --layer-only --values 64 --vocab 10001 --hidden-size 32 --out %s", killed);
  assert_int_equal(o.status, 1);
  assert_says(
      o.err,
      "holds a sweep with vocab 10000, and this one has 10001; give another --out, or --fresh to start over");
  output_free(&o);
  succeeds(
      train("--device cpu --layer-only --values 64 --vocab 10001 --hidden-size 32 --fresh --out %s", killed));
  curve_free(&before);
  curve_free(&after);
  curve_free(&never);
}

static void damaged_files(void **state) {
  (void)state;
  make_directory("damaged");
  write_text("damaged/curve.csv", "tokens,bytes\n1,2\n");
  Output o = train("--plan-only --device cpu " TINY "--out %s", temp_path("damaged"));
  assert_int_equal(o.status, 1);
  assert_says(o.err, "is no memory curve of this version");
  output_free(&o);
  o = train("--redraw --out %s", temp_path("nothing"));
  assert_int_equal(o.status, 1);
  assert_says(o.err, "holds neither curve.csv nor timeline.csv");
  output_free(&o);
}

// The README's table of what others take is the file that the recipes' marks come from.
// BENCHMARKS.md has all, the README some, without the third size.
static void the_documents_have_the_peers(void **state) {
  (void)state;
  char *readme = read_text("README.md"), *benchmarks = read_text("tools/BENCHMARKS.md");
  static const struct {
    const char *name;
    double figures[8];
  } peers[] = {
#define PEER(name, ...) {name, {__VA_ARGS__}},
#include "tools/curves/peers.inc"
#undef PEER
  };
  int in_readme = 0;
  for (size_t i = 0; i < sizeof peers / sizeof *peers; i++) {
    const double *f = peers[i].figures;
    char begin[100], third[40], last[40], line[200];
    snprintf(begin, sizeof begin, "\n| %s | %.2f, %.0f MiB | %.2f, %.0f MiB |", peers[i].name, f[0], f[1],
             f[2], f[3]);
    snprintf(third, sizeof third, " %.2f, %.0f MiB |", f[4], f[5]);
    snprintf(last, sizeof last, " %.2f, %.0f MiB |\n", f[6], f[7]);
    snprintf(line, sizeof line, "%s%s%s", begin, third, last);
    assert_says(benchmarks, line);
    snprintf(line, sizeof line, "\n| %s |", peers[i].name);
    if (!strstr(readme, line)) continue;
    snprintf(line, sizeof line, "%s%s", begin, last);
    assert_says(readme, line);
    in_readme++;
  }
  assert_true(in_readme > 3);
  free(readme);
  free(benchmarks);
}

// --- refusals ----------------------------------------------------------------------------------------------

static void refusals(void **state) {
  (void)state;
  static const struct {
    const char *arguments, *says;
  } cases[] = {
      {"--sweep depth", "--sweep depth: give tokens, vocab, hidden or chunk"},
      {"--values 0", "'0' is no whole number from 1 to 2147483647"},
      {"--values 12a", "'12a' is not understood"},
      {"--values ''", "--values is empty"},
      {"--values 64,32", "32 stands after 64"},
      {"--values 32,32", "32 stands after 32"},
      {"--values 64:32:8", "the range ends at 32, before it begins at 64"},
      {"--values 64:128", "a range is first:last:step or first:last:xfactor"},
      {"--values 64:128:0", "'0' is no whole number"},
      {"--values 64:128:x1", "a factor is 2 or more"},
      {"--values 1:100000:1", "more than 256 points"},
      {"--values 99999999999", "is no whole number from 1 to 2147483647"},
      {"--values 100", "100 tokens are not whole sequences of 16"},
      {"--values 70000x70000", "tokens are more than 2147483647"},
      {"--sweep vocab --values 4x4", "'4x4' is not understood"},
      {"--sweep chunk --tokens 64 --values 65", "a chunk of 65 is more than the 64 tokens there are"},
      {"--sweep", "--sweep needs a value"},
      {"--tokens 64", "--tokens belongs to --layer-only"},
      {"--tokens 0 --layer-only", "--tokens 0: give a whole number from 1"},
      {"--gradient-error", "--gradient-error belongs to --layer-only"},
      {"--timeline --sweep tokens", "exclude each other: a timeline shows whole steps of one size"},
      {"--recipe soup", "no recipe is called 'soup'; there are llama3-8b-32k, llama3-8b-4x20480, "
                        "llama3-8b-longest, tokens-81920, chunk-sweep, "
                        "gemma2-2b, batch-512"},
      {"--recipe batch-512 --sweep vocab", "exclude each other: a recipe says what is swept"},
      {"--resolution 9", "--resolution 9: give a whole number from 1 to 4"},
      {"--patience never", "--patience never: give a number"},
      {"--device-memory 0", "--device-memory 0: give a number"},
      {"--model gpt2-tiny --sweep hidden --values 100", "do not make up a hidden size of 100"},
      {"--out /proc/nothing", "cannot make the folder /proc/nothing"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *out = strstr(cases[i].arguments, "--out") ? "" : "--out ",
               *folder = *out ? temp_path("refused") : "";
    const char *model = strstr(cases[i].arguments, "--model") ? "" : TINY;
    Output o = train("--plan-only --device cpu %s %s%s %s", model, out, folder, cases[i].arguments);
    if (o.status != 1) fail_msg("'%s' ended with %d: %s", cases[i].arguments, o.status, o.out);
    assert_says(o.err, cases[i].says);
    assert_true(strncmp(o.err, "lce: ", 5) == 0);
    assert_ptr_equal(strchr(o.err, '\n'), o.err + strlen(o.err) - 1); // one sentence
    output_free(&o);
  }
}

// --- pictures ----------------------------------------------------------------------------------------------

static Color pixel(const Image *p, Spot at, double scale) {
  int x = (int)(at.x * scale), y = (int)(at.y * scale);
  assert_in_range(x, 0, p->width - 1);
  assert_in_range(y, 0, p->height - 1);
  const unsigned char *c = p->rgb + 3 * (y * p->width + x);
  return (Color){c[0], c[1], c[2]};
}

static void assert_color(const char *what, const Image *p, Spot at, double scale, Color want) {
  Color c = pixel(p, at, scale);
  if (abs(c.r - want.r) + abs(c.g - want.g) + abs(c.b - want.b) > 6)
    fail_msg("%s at (%g, %g) is #%02x%02x%02x and not #%02x%02x%02x", what, at.x, at.y, c.r, c.g, c.b, want.r,
             want.g, want.b);
}

// Draws and returns the picture, its axes fitted. The caller frees it.
static Picture *drawn(const Curve *c, double scale, const char *path) {
  Picture *picture = picture_curve(c);
  picture_write(picture, scale, path);
  return picture;
}

// A log without noise: the trend hides the values behind it, at the start too, and the axis ends at the last step.
static void the_trend_of_a_run(void **state) {
  (void)state;
  if (!can_draw()) skip();
  enum { STEPS = 1030 };
  FILE *log = fopen(temp_path("smooth.jsonl"), "w");
  assert_non_null(log);
  for (int i = 1; i <= STEPS; i++)
    fprintf(log, "{\"event\":\"step\",\"step\":%d,\"loss\":%.6f}\n", i, 3 + 8 * exp(-i / 15.0));
  fclose(log);
  char command[9000];
  snprintf(command, sizeof command, "'%.*splot_run' --out '%s' '%s' >/dev/null",
           (int)(strrchr(tool, '/') + 1 - tool), tool, temp_path("smooth.png"), temp_path("smooth.jsonl"));
  assert_int_equal(system(command), 0);
  Image image = image_read(temp_path("smooth.png"));
  if (!image.rgb) skip();
  int pale = 0, last = 0;
  for (int y = 180; y < 660; y++) // of the loss's panel
    for (int x = 144; x < 1020; x++) {
      const unsigned char *c = image.rgb + 3 * ((long)y * image.width + x);
      pale += abs(c[0] - 242) < 6 && abs(c[1] - 205) < 6 && abs(c[2] - 179) < 6;
      if (c[0] == 0xd9 && c[1] == 0x6a && c[2] == 0x1c) last = x;
    }
  image_free(&image);
  assert_in_range(pale, 0, 60); // where lines are smoothed into the paper
  assert_in_range(last, 990, 1000);
}

// A group's bars begin below the panel's top, as many as there are.
static void bars_of_groups(void **state) {
  (void)state;
  if (!can_draw()) skip();
  write_text("lone-1.jsonl",
             "{\"event\":\"validation\",\"step\":1,\"val_loss\":2}\n"
             "{\"event\":\"summary\",\"val_loss\":2,\"tokens_per_second\":9,\"head_peak_bytes\":9}\n");
  char command[9000];
  snprintf(command, sizeof command, "'%.*splot_run' --groups --out '%s' '%s' >/dev/null",
           (int)(strrchr(tool, '/') + 1 - tool), tool, temp_path("lone.png"), temp_path("lone-1.jsonl"));
  assert_int_equal(system(command), 0);
  Image image = image_read(temp_path("lone.png"));
  if (!image.rgb) skip();
  int inked = 0;
  for (int y = 824; y < 1040; y++) { // the upper bar's panel, from 828 to 1034
    const unsigned char *c = image.rgb + 3 * ((long)y * image.width + 1400);
    inked += c[0] == 0xd9 && c[1] == 0x6a && c[2] == 0x1c;
  }
  image_free(&image);
  assert_in_range(inked, 115, 130); // 0.6 of it
}

// A curve of made-up readings, measured but for the last point.
static Curve made_up(const char *what, Sweep sweep) {
  Curve c = {0};
  curve_set(&c, "what", "%s", what);
  curve_set(&c, "device", "a machine");
  curve_set(&c, "dtype", "bf16");
  curve_set(&c, "model", "llama-1b");
  curve_set(&c, "vocab", "128256");
  curve_set(&c, "hidden", "2048");
  curve_set(&c, "batch", "1");
  curve_set(&c, "seq_len", "1024");
  curve_set(&c, "sweep", "%s", SWEEP_NAMES[sweep]);
  for (int i = 1; i <= 4; i++)
    for (int m = 0; m < 2; m++) {
      Reading r = {.point = {.sweep = sweep,
                             .mode = (LceMode)m,
                             .batch = 1,
                             .vocab_size = 128256,
                             .hidden_size = 2048},
                   .status = i < 4 ? POINT_MEASURED : POINT_NO_MEMORY,
                   .loss_error = NAN,
                   .dx_error = NAN,
                   .dweight_error = NAN};
      bool chunks = sweep == SWEEP_CHUNK;
      if (chunks && m == LCE_MATERIALIZED && i < 4) continue;
      r.point.seq_len = chunks ? 1024 : 1024 * i;
      r.point.chunk = m == LCE_FUSED ? (chunks ? 64 << i : 128) : 0;
      r.planned_layer_bytes = m == LCE_FUSED ? (size_t)(chunks ? i : 1) << 28 : (size_t)i << 30;
      r.planned_bytes = ((size_t)4 << 30) + r.planned_layer_bytes;
      if (i < 4 || chunks) {
        r.status = POINT_MEASURED;
        r.ledger_bytes = r.planned_bytes;
        r.layer_bytes = r.planned_layer_bytes;
        r.step_seconds = 0.1 * i;
        r.layer_seconds = 0.011 * i;
        r.floor_seconds = 0.01 * i;
      }
      curve_add(&c, &r);
    }
  return c;
}

static void lines_are_where_they_should_be(void **state) {
  (void)state;
  if (!can_draw()) skip();
  static const char *const kinds[] = {"step", "layer"};
  for (int k = 0; k < 2; k++)
    for (int scale = 1; scale <= 2; scale++) {
      Curve c = made_up(kinds[k], SWEEP_TOKENS);
      const char *path = temp_path("curve.png");
      Picture *picture = drawn(&c, scale, path);
      Image p = image_read(path);
      assert_non_null(p.rgb);
      assert_int_equal(p.width, (int)picture->width * scale);
      assert_int_equal(p.height, (int)picture->height * scale);
      assert_not_blank(&p);
      const Panel *panel = &picture->panels[0];
      for (int m = 0; m < 2; m++)
        for (int i = 1; i <= 4; i++) {
          const Reading *r = reading(&c, (LceMode)m, SWEEP_TOKENS, 1024 * i);
          double bytes = (double)(k == 0 ? r->planned_bytes : r->planned_layer_bytes);
          Spot at = panel_spot(panel, 1024 * i, bytes);
          // Filled where measured, hollow where only planned.
          const Color white = {255, 255, 255};
          assert_color("a marker", &p, at, scale, i < 4 ? COLOR_MODE[m] : white);
          if (i >= 3) continue;
          const Reading *next = reading(&c, (LceMode)m, SWEEP_TOKENS, 1024 * (i + 1));
          double more = (double)(k == 0 ? next->planned_bytes : next->planned_layer_bytes);
          Spot middle = panel_spot(panel, 1024 * (i + 0.5), (bytes + more) / 2);
          assert_color("a line", &p, middle, scale, COLOR_MODE[m]);
        }
      // Nothing above the materialized line.
      assert_color("the paper", &p, panel_spot(panel, 1500, panel->y.high * 0.93), scale,
                   (Color){255, 255, 255});
      image_free(&p);
      picture_free(picture);
      curve_free(&c);
    }
}

static void other_pictures(void **state) {
  (void)state;
  if (!can_draw()) skip();
  // Time against memory.
  Curve c = {0};
  for (int r = 0; r < 8; r++) { // the last without a recipe
    curve_free(&c);
    c = made_up("layer", SWEEP_CHUNK);
    curve_set(&c, "recipe", "%s", RECIPES[r].name ? RECIPES[r].name : "none");
    assert_true(picture_has_trade(&c));
    picture_free(drawn(&c, 1, temp_path("trade.png")));
    Image p = image_read(temp_path("trade.png"));
    assert_non_null(p.rgb);
    assert_not_blank(&p);
    image_free(&p);
  }
  // Two sweeps: small multiples, larger.
  Curve other = made_up("layer", SWEEP_TOKENS);
  for (int i = 0; i < other.count; i++) curve_add(&c, &other.readings[i]);
  Picture *picture = drawn(&c, 1, temp_path("grid.png"));
  Image p = image_read(temp_path("grid.png"));
  assert_non_null(p.rgb);
  assert_int_equal(p.width, (int)picture->width);
  assert_int_equal(p.height, (int)picture->height);
  assert_not_blank(&p);
  picture_free(picture);
  image_free(&p);
  curve_free(&other);
  curve_free(&c);
}

// The tool's own files: drawn, redrawn, and at the resolution asked for.
static void drawn_and_redrawn(void **state) {
  (void)state;
  if (!can_draw()) skip();
  const char *out = temp_path("drawn"), *path = temp_path("drawn/curve.png");
  succeeds(train("--plan-only --device cpu " TINY "--resolution 1 --out %s", out));
  Image p = image_read(path);
  assert_non_null(p.rgb);
  assert_int_equal(p.width, 1040);
  image_free(&p);
  remove(path);
  succeeds(train("--redraw --resolution 3 --out %s", out));
  p = image_read(path);
  assert_int_equal(p.width, 3120);
  assert_int_equal(p.height, 1680);
  assert_not_blank(&p);
  image_free(&p);
}

// --- the timeline ------------------------------------------------------------------------------------------

static size_t highest_total(const Timeline *t) {
  size_t highest = 0;
  for (int i = 0; i < t->count; i++) {
    size_t total = 0;
    for (int k = 0; k < MEMORY_CATEGORY_COUNT; k++) total += t->moments[i].bytes[k];
    if (total > highest) highest = total;
  }
  return highest;
}

static void timelines(void **state) {
  (void)state;
  succeeds(train("--plan-only --device cpu " TINY "--values 32 --out %s", temp_path("peaks")));
  Curve c = curve_in(temp_path("peaks"));
  for (int planned = 0; planned < 2; planned++) {
    const char *out = temp_path("time");
    succeeds(train("--timeline --device cpu %s " TINY "--resolution 1 --out %s", planned ? "--plan-only" : "",
                   out));
    Timeline both;
    Curve settings = {0};
    assert_true(timeline_read(&both, &settings, temp_path("time/timeline.csv")));
    assert_int_equal(both.planned, planned);
    assert_int_equal(both.moments[0].mode, LCE_MATERIALIZED);
    Timeline t[2] = {timeline_of(&both, LCE_MATERIALIZED), timeline_of(&both, LCE_FUSED)};
    for (int i = 0; i < 2; i++) {
      LceMode mode = (LceMode)t[i].moments[0].mode;
      assert_int_equal(highest_total(&t[i]), reading(&c, mode, SWEEP_TOKENS, 32)->planned_bytes);
      assert_int_equal(t[i].moments[0].step, 1);
      assert_int_equal(t[i].moments[t[i].count - 1].step, TIMELINE_STEPS);
      for (int k = 1; k < t[i].count; k++) assert_true(t[i].moments[k].at >= t[i].moments[k - 1].at);
      // Nothing of a step outlives it.
      const size_t *left = t[i].moments[t[i].count - 1].bytes;
      assert_int_equal(left[MEMORY_HEAD] + left[MEMORY_ACTIVATIONS] + left[MEMORY_ACTIVATION_GRADIENTS], 0);
    }
    timeline_free(&both);
    if (!can_draw()) continue;
    Image p = image_read(temp_path("time/timeline.png"));
    assert_non_null(p.rgb);
    assert_int_equal(p.width, 1080);
    assert_not_blank(&p);
    image_free(&p);
  }
  curve_free(&c);
}

// --- what fits ---------------------------------------------------------------------------------------------

static void fit(void **state) {
  (void)state;
  setenv("LCE_TRAIN", trainer, 1);
  Output o = train("--fit --device cpu --model llama-tiny --seq-len 128");
  assert_int_equal(o.status, 0);
  long long fused = 0, whole = 0;
  const char *at = strstr(o.out, "\nnothing ");
  assert_non_null(at);
  assert_int_equal(sscanf(at, " nothing %lld %lld", &fused, &whole), 2);
  assert_true(whole > 0 && fused > 4 * whole);
  output_free(&o);
  o = train("--fit --device cpu --model llama-8b --vocab 2000000000 --seq-len 128");
  assert_int_equal(o.status, 1);
  assert_says(o.err, "not even one sequence of 128 tokens fits");
  output_free(&o);
  setenv("LCE_TRAIN", tool, 1);

  // By the plan alone: the largest batch fits, and one more does not.
  char *arguments[] = {"train", "--model", "llama-tiny", "--seq-len", "64", "--lce-chunk", "64", NULL};
  Options options;
  setup_options(&options, 7, arguments);
  options_resolve_dtypes(&options, false);
  for (int m = 0; m < 2; m++) {
    size_t limit = (size_t)1 << 30;
    int64_t batch = plan_largest_batch(&options, ON_CPU, (LceMode)m, limit);
    for (int more = 0; more < 2; more++) {
      Options at_batch = options;
      at_batch.batch = batch + more;
      at_batch.total_batch = at_batch.batch * 64;
      at_batch.micro_steps = 1;
      assert_int_equal(plan_run(&at_batch, ON_CPU, (LceMode)m).peak <= limit, more == 0);
    }
  }
  options_free(&options);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(hand_worked_csv),    cmocka_unit_test(plan_equals_ledger),
      cmocka_unit_test(curve_equals_plan),  cmocka_unit_test(gradient_errors),
      cmocka_unit_test(what_does_not_fit),  cmocka_unit_test(patience),
      cmocka_unit_test(recipes_plan),       cmocka_unit_test(offloaded_timelines),
      cmocka_unit_test(longest_sequences),  cmocka_unit_test(killed_sweep_resumes),
      cmocka_unit_test(damaged_files),      cmocka_unit_test(the_documents_have_the_peers),
      cmocka_unit_test(the_trend_of_a_run), cmocka_unit_test(bars_of_groups),
      cmocka_unit_test(refusals),           cmocka_unit_test(lines_are_where_they_should_be),
      cmocka_unit_test(other_pictures),     cmocka_unit_test(drawn_and_redrawn),
      cmocka_unit_test(timelines),          cmocka_unit_test(fit),
  };
  return cmocka_run_group_tests_name("memory curves", tests, find_programs, remove_temp_dir);
}
