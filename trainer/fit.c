// A candidate is a micro-batch, a chunk of the loss and a choice of offloading. For each, one ladder of what
// is recomputed: nothing, elementwise in 1 to L layers, the MLPs, whole layers, and these with the MLP in
// chunks. Memory falls and time rises from rung to rung, so the first rung that fits is the fastest: a search
// in halves. A plan (trainer/plan.h) gives both, in milliseconds.
#include "trainer/fit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/json.h"
#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/system.h"
#include "kernels/base/text.h"
#include "kernels/cost.h"
#include "trainer/plan.h"

enum { MLP_CHUNK = 4096, MICRO_BATCH_TOKENS = 65536 };

typedef struct {
  int64_t batch, chunk, recompute_layers, mlp_chunk;
  Recompute recompute;
  unsigned offload;
  size_t peak;
  double rate;  // tokens per second
  double score; // the rate, and a little for memory that stays free and for each thing that is not offloaded
} Choice;

typedef struct {
  const Options *options;
  DeviceKind device;
  size_t usable;
} Machine;

static void apply(const Choice *c, Options *o) {
  o->batch = c->batch;
  o->pass.chunk = c->chunk;
  o->pass.recompute = c->recompute;
  o->pass.recompute_layers = c->recompute_layers;
  o->pass.mlp_chunk = c->mlp_chunk;
  o->dtypes.offload = c->offload;
  int64_t together = o->batch * o->seq_len * o->ranks;
  if (!options_given(o, "total-batch")) o->total_batch = together;
  o->micro_steps = o->total_batch / together;
}

// Plans the choice, and says whether it fits.
static bool fits(const Machine *m, Choice *c) {
  Options o = *m->options;
  apply(c, &o);
  TimedPlan plan = plan_run_timed(&o, m->device, o.pass.mode);
  c->peak = plan.ledger.peak;
  c->rate = (double)(o.trains ? o.total_batch : o.batch * o.seq_len) / plan.seconds;
  c->score = c->rate * (1 - 0.005 * (double)c->peak / (double)m->usable);
  for (unsigned left = c->offload; left; left &= left - 1) c->score *= 0.999;
  return c->peak <= m->usable && plan_fits_host(&plan.ledger, &o, m->device);
}

// Rungs of each kind of recomputation: L layers, or one, as --recompute-layers says.
static int64_t rungs_each(const Options *o) {
  return options_given(o, "recompute-layers") ? 1 : o->model.num_hidden_layers;
}

// Rung 0 recomputes nothing, L elementwise in all layers, 2 L their MLPs, 3 L the layers, 3 L + 1 chunks.
static void set_rung(const Machine *m, Choice *c, int64_t rung) {
  int64_t layers = rungs_each(m->options), last = min_i64(rung, 3 * layers);
  c->recompute = (Recompute)((last + layers - 1) / layers);
  c->recompute_layers = last % layers;
  c->mlp_chunk = rung > last ? MLP_CHUNK : 0;
}

// The choice's first rung that fits; false: none does. Starts at `near`, which is the one of a similar choice
// and becomes this one's.
static bool climb(const Machine *m, Choice *c, int64_t *near) {
  const Options *o = m->options;
  int64_t layers = rungs_each(o), below = -1, above = 3 * layers;
  bool inputs = c->offload & OFFLOAD_ACTIVATIONS;
  c->recompute = o->pass.recompute, c->recompute_layers = o->pass.recompute_layers;
  c->mlp_chunk = o->pass.mlp_chunk;
  if (!o->trains || options_given(o, "recompute"))
    return (!inputs || c->recompute == RECOMPUTE_LAYER) && fits(m, c);
  if (inputs) below = 2 * layers;
  if (c->batch * o->seq_len > MLP_CHUNK && !options_given(o, "mlp-chunk")) above++;
  set_rung(m, c, above);
  if (!fits(m, c)) return false;
  Choice found = *c;
  for (int tries = 0; above - below > 1; tries++) {
    int64_t half = below + (above - below) / 2;
    int64_t middle = tries < 2 ? max_i64(below + 1, min_i64(*near, above - 1)) : half;
    set_rung(m, c, middle);
    bool good = fits(m, c);
    *(good ? &above : &below) = middle;
    if (good) found = *c;
  }
  *c = found;
  *near = above;
  return true;
}

// The micro-batches to try, from 1 up: divisors of what a rank computes in a step, or powers of two.
static bool next_batch(const Options *o, int64_t *batch) {
  int64_t before = *batch, share = o->total_batch / (o->seq_len * o->ranks),
          most = max_i64(1, MICRO_BATCH_TOKENS / o->seq_len);
  if (options_given(o, "batch")) return (*batch = o->batch) != before;
  if (!options_given(o, "total-batch"))
    *batch = before ? 2 * before : 1;
  else
    do ++*batch;
    while (*batch <= most && share % *batch);
  return *batch <= most;
}

static int better(const void *a, const void *b) {
  double x = ((const Choice *)a)->score, y = ((const Choice *)b)->score;
  return (x < y) - (x > y);
}

// All candidates that fit, the best first, in an array of stb_ds.h; returns how many.
static int64_t search(const Machine *m, Choice **all) {
  const Options *o = m->options;
  static const unsigned offloads[] = {0,
                                      OFFLOAD_OPTIMIZER,
                                      OFFLOAD_OPTIMIZER | OFFLOAD_GRADIENTS,
                                      OFFLOAD_PARAMETERS,
                                      OFFLOAD_ACTIVATIONS,
                                      OFFLOAD_OPTIMIZER | OFFLOAD_ACTIVATIONS,
                                      OFFLOAD_PARAMETERS | OFFLOAD_ACTIVATIONS};
  static const int64_t chunks[] = {1024, 2048, 4096};
  bool open = o->pass.mode == LCE_FUSED && m->device == ON_CUDA && !options_given(o, "lce-chunk");
  int ways = o->fit == FIT_OFFLOAD && o->trains && !o->dtypes.offload ? 7 : 1;
  arrsetlen(*all, 0);
  for (int w = 0; w < ways; w++)
    for (int64_t batch = 0, near = 0; next_batch(o, &batch);) {
      int64_t tokens = batch * o->seq_len,
              chunk = options_given(o, "lce-chunk") ? o->pass.chunk : lce_default_chunk(m->device, tokens);
      for (int k = 0; k < (open ? 3 : 1) && (k == 0 || chunks[k] <= tokens); k++) {
        Choice c = {.batch = batch, .offload = w ? offloads[w] : o->dtypes.offload};
        c.chunk = open ? chunks[k] : chunk;
        if (climb(m, &c, &near)) arrput(*all, c);
      }
    }
  if (arrlen(*all)) qsort(*all, arrlenu(*all), sizeof **all, better);
  return arrlen(*all);
}

// --- what it says ------------------------------------------------------------------------------------------

static void print_choice(const Machine *m, const Choice *c, double best, const char *with) {
  Options o = *m->options;
  apply(c, &o);
  bool known = o.card || (m->device == ON_CUDA && o.device_memory > 0);
  Text rate =
      known ? text_of("%s tokens/s", text_grouped((int64_t)c->rate).text) : text_of("%.2f", c->rate / best);
  printf("  %16s %10s  %s%s--batch %lld", rate.text, text_bytes(c->peak).text, with, *with ? " " : "",
         (long long)c->batch);
  if (o.trains && c->recompute) printf(" --recompute %s", options_words(&o, "recompute").text);
  if (o.trains && c->recompute_layers) printf(" --recompute-layers %lld", (long long)c->recompute_layers);
  if (c->mlp_chunk) printf(" --mlp-chunk %lld", (long long)c->mlp_chunk);
  if (o.pass.mode == LCE_FUSED) printf(" --lce-chunk %lld", (long long)c->chunk);
  if (c->offload) printf(" --offload %s", options_words(&o, "offload").text);
  printf("\n");
}

// Options that the user may add and --fit does not choose: they move tensors or change the numbers.
static const struct {
  const char *name, *value;
  bool gpu, several;
} others[] = {{"zero", "2", false, true},
              {"fit", "offload", false, false},
              {"moment-dtype", "bf16", true, false},
              {"no-master-weights", "set", true, false},
              {"fp8", "all", true, false}};
enum { OTHERS = sizeof others / sizeof *others, REMEDIES = 4 };

// Sets it as the user would; false where it is so already, or cannot be.
static bool set_other(const Machine *m, int which, Options *o) {
  const Option *row = option_find(options_rows, others[which].name);
  Reason reason;
  if (!o->trains || (others[which].gpu && (m->device == ON_CPU || o->dtypes.weight != DTYPE_BF16)))
    return false;
  if (others[which].several && o->ranks == 1) return false;
  if (row->offset == offsetof(Options, dtypes.fp8) && !options_allow_codes(o, &reason)) return false;
  if (!strcmp(option_text(row, o).text, others[which].value)) return false;
  return option_set(row, o, others[which].value, &reason);
}

static Text other_words(int i) {
  const char *alone = option_find(options_rows, others[i].name)->bare;
  bool bare = alone && !strcmp(alone, others[i].value);
  return text_of(" --%s%s%s", others[i].name, bare ? "" : " ", bare ? "" : others[i].value);
}

// Prints each of these options that would make the run faster, and by how much.
static void print_others(const Machine *m, Choice **all, double best) {
  for (int i = 0; i < OTHERS; i++) {
    Options with = *m->options;
    const Machine other = {&with, m->device, m->usable};
    if (set_other(m, i, &with) && search(&other, all) && (*all)->rate > 1.01 * best)
      print_choice(&other, *all, best, other_words(i).text + 1);
  }
}

enum { NAMES = 256 };

static void append(char names[NAMES], const char *dashes, const char *name) {
  size_t length = strlen(names);
  snprintf(names + length, NAMES - length, " %s%s", dashes, name);
}

// Opens what was given and --fit would choose, and appends the names of what is not the checkpoint's, which
// --fit chooses again.
static void leave_out(Options *o, char names[NAMES]) {
  const cJSON *settings = json_member(o->resumed_from, "settings");
  for (int i = 0; options_rows[i].type != OPTION_END; i++) {
    const Option *row = &options_rows[i];
    if (!(row->flags & FITTED) || !o->given[i]) continue;
    o->given[i] = false;
    if (!json_is(settings, row->name, option_text(row, o).text)) append(names, "--", row->name);
  }
}

Reason fit_remedy(const Options *o, DeviceKind device, size_t usable) {
  Options with = *o;
  const Machine m = {&with, device, usable};
  Choice *all = NULL;
  char added[NAMES] = "", left_out[NAMES] = "";
  Reason remedy;
  if (!o->fit) with.fit = FIT_DEVICE;
  bool found = !o->fit && search(&m, &all);
  if (!found) leave_out(&with, left_out), found = search(&m, &all);
  for (int i = 0; i < REMEDIES && !found; i++) { // one on top of the other
    if (!set_other(&m, i, &with)) continue;
    if (strcmp(others[i].name, "fit")) append(added, "", other_words(i).text + 1);
    found = search(&m, &all);
  }
  arrfree(all);
  refuse(&remedy, "take a smaller model, a smaller --seq-len or a device with more memory");
  if (!found) return remedy;
  const char *fit = with.fit == o->fit ? "" : with.fit == FIT_OFFLOAD ? " --fit offload" : " --fit";
  bool adds = *fit || *added, leaves = *left_out;
  refuse(&remedy, "%s%s%s%s%s%s", adds ? "add" : "", fit, added, adds && leaves ? " and " : "",
         leaves ? "leave out" : "", left_out);
  return remedy;
}

void fit_choose(Options *o, DeviceKind device, size_t usable) {
  if (!usable) fail("--fit: cannot tell how much memory the device has; give --device-memory GIB");
  const Machine m = {o, device, usable};
  Choice *all = NULL;
  int64_t count = search(&m, &all);
  char batch[64] = "not even one sequence";
  if (options_given(o, "batch"))
    snprintf(batch, sizeof batch, "no batch of %lld sequences", (long long)o->batch);
  if (!count)
    fail("--fit: %s of %lld tokens fits in %s; %s", batch, (long long)o->seq_len, text_bytes(usable).text,
         fit_remedy(o, device, usable).text);
  Choice best = all[0];
  printf("--fit: the best of %lld settings that fit in %s, by prediction; the next; with other options\n",
         (long long)count, text_bytes(usable).text);
  print_choice(&m, &best, best.rate, "");
  for (int64_t i = 1, shown = 0; i < count && shown < 3; i++) {
    bool seen = false; // another chunk of one that was shown
    for (int64_t k = 0; k < i; k++) seen |= all[k].batch == all[i].batch && all[k].offload == all[i].offload;
    if (!seen) print_choice(&m, &all[i], best.rate, ""), shown++;
  }
  print_others(&m, &all, best.rate);
  printf("\n");
  apply(&best, o);
  arrfree(all);
}
