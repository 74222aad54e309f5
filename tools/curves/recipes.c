#include "tools/curves/recipes.h"

#include <stdio.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"
#include "tools/curves/layer.h"

#define MIB       0x1p20
#define GIB       0x1p30
#define ARGUMENTS (const char *const[])
#define MARKS     (const Mark[])

// As in the source's three steps: weights, gradients and every layer's input on the host. The optimizer's state, which
// it leaves out, joins them.
#define ADAMW_IN_BF16 "--recompute", "layer", "--moment-dtype", "bf16", "--no-master-weights"
#define OFFLOADED     ADAMW_IN_BF16, "--offload", "weights,gradients,optimizer,activations"

// The sources' MB and GB are 2^20 and 2^30 bytes: 24 GB are three times Gemma's fp32 logits of 8,000 MiB.
const Recipe RECIPES[] = {
    {.name = "llama3-8b-32k",
     .title = "Llama 3 8B, three offloaded steps of 1 x 32,768 tokens",
     .source = "PyTorch's feature request for linear_cross_entropy (pytorch/pytorch#124480)",
     .says = "at [B, T] = [1, 32768] the fp32 logits are a spike of 15++ GB, 15.66 GiB; 8 chunks of the loss",
     .claim = 8,
     .arguments = ARGUMENTS{"--model", "llama-8b", "--batch", "1", "--seq-len", "32768", "--lce-chunk",
                            "4096", OFFLOADED, NULL},
     .timeline = true,
     .gpu = true},
    {.name = "llama3-8b-4x20480",
     .title = "Llama 3 8B, three offloaded steps of 4 x 20,480 tokens",
     .source = "PyTorch's feature request for linear_cross_entropy (pytorch/pytorch#124480)",
     .says = "at [B, T] = [4, 20480] 128,256 x 81,920 logits, 39.14 GiB in fp32; 8 chunks of the loss",
     .claim = 8,
     .arguments = ARGUMENTS{"--model", "llama-8b", "--batch", "4", "--seq-len", "20480", "--lce-chunk",
                            "10240", OFFLOADED, NULL},
     .timeline = true,
     .gpu = true},
    {.name = "llama3-8b-longest",
     .title = "The longest sequence that trains Llama 3 8B",
     .source = "no source: what the fused loss and offloading make fit, each and together",
     .says = "24, 48 and 80 GiB, or --device-memory; batch 1; lengths beyond llama-8b's 131,072 positions "
             "need --max-position-embeddings",
     .arguments = ARGUMENTS{"--model", "llama-8b", "--batch", "1", "--seq-len", "16",
                            "--max-position-embeddings", "16777216", ADAMW_IN_BF16, NULL},
     .longest = true,
     .gpu = true},
    {.name = "tokens-81920",
     .title = "Llama 3's LM head + loss up to 81,920 tokens",
     .source = "PyTorch's feature request for linear_cross_entropy (pytorch/pytorch#124480)",
     .says = "128,256 x 81,920 x 2 bytes: 19.57 GiB of logits",
     .grey = "what PyTorch's feature request for linear_cross_entropy says",
     .arguments = ARGUMENTS{"--model", "llama-8b", "--batch", "4", "--seq-len", "20480", NULL},
     .layer_only = true,
     .gpu = true,
     .sweeps = {{SWEEP_TOKENS, "10240:81920:10240"}},
     .marks = MARKS{{81920, 19.57 * GIB, 0, "19.57 GiB, bf16 logits"}, {.label = NULL}}},
    {.name = "chunk-sweep",
     .title = "LM head + loss over every size: N 16,384, H 2,048, V 131,072",
     .source = "the second benchmark in PyTorch's feature request for linear_cross_entropy "
               "(pytorch/pytorch#124480)",
     .says = "memory, TFLOP/s and gradient error over each size, the others at N 16,384, H 2,048, V 131,072",
     .arguments =
         ARGUMENTS{"--batch", "16", "--seq-len", "1024", "--hidden-size", "2048", "--vocab", "131072", NULL},
     .layer_only = true,
     .errors = true,
     .gpu = true,
     .sweeps = {{SWEEP_CHUNK, "128:16384:x2"},
                {SWEEP_TOKENS, "2048:32768:x2"},
                {SWEEP_VOCAB, "16384:262144:x2"},
                {SWEEP_HIDDEN, "512:8192:x2"}},
     .marks =
         MARKS{
#define PEER(name, ratio1, mib1, ratio2, mib2, ...) {0, mib2 * MIB, ratio2, name},
#include "tools/curves/peers.inc"
#undef PEER
             {.label = NULL}}},
    {.name = "gemma2-2b",
     .title = "Gemma 2 2B's LM head + loss: N 8,192, H 2,304, V 256,000",
     .source = "Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al. 2025)",
     .says = "24 GB against 1 MB for the loss alone, 28 GB against about 1.1 GB with the gradients",
     .grey = "the paper's figures, whose GB are GiB",
     .arguments =
         ARGUMENTS{"--batch", "8", "--seq-len", "1024", "--hidden-size", "2304", "--vocab", "256000", NULL},
     .layer_only = true,
     .loss_alone = true,
     .gpu = true,
     .sweeps = {{SWEEP_CHUNK, "128:8192:x2"}},
     .marks = MARKS{{0, 24000 * MIB, 0, "paper: 24 GB, plain"},
                    {0, 1 * MIB, 0, "paper: 1 MB, CCE"},
#define PEER(name, ratio1, mib1, ratio2, mib2, ratio3, mib3, ...) {0, mib3 * MIB, ratio3, name},
#include "tools/curves/peers.inc"
#undef PEER
                    {.label = NULL}}},
    {.name = "batch-512",
     .title = "512 tokens at a vocabulary of 128,256, in fp32",
     .source = "NVIDIA's DGX Spark playbooks, on fused cross-entropy for Llama 3.1",
     .says = "250 MB of logits for 512 tokens, and about 6x less memory",
     .grey = "the table in NVIDIA's DGX Spark playbooks, whose MB are MiB",
     .claim = 6,
     .arguments = ARGUMENTS{"--batch", "1", "--seq-len", "512", "--hidden-size", "512", "--vocab", "128256",
                            "--dtype", "fp32", "--lce-chunk", "64", NULL},
     .layer_only = true,
     .sweeps = {{SWEEP_TOKENS, "128,256,512,1024"}},
     .marks = MARKS{{128, 188 * MIB, 0, "PyTorch, playbook"},
                    {256, 378 * MIB, 0, "PyTorch, playbook"},
                    {512, 752 * MIB, 0, "PyTorch, playbook"},
                    {1024, 1506 * MIB, 0, "PyTorch, playbook"},
                    {128, 32 * MIB, 0, "its fused kernel"},
                    {256, 63 * MIB, 0, "its fused kernel"},
                    {512, 126 * MIB, 0, "its fused kernel"},
                    {1024, 251 * MIB, 0, "its fused kernel"},
                    {.label = NULL}}},
    {.name = NULL}};

const Recipe *recipe_named(const char *name) {
  Label names = {""};
  for (const Recipe *r = RECIPES; r->name; r++) {
    if (strcmp(name, r->name) == 0) return r;
    names = label("%s%s%s", names.text, names.text[0] ? ", " : "", r->name);
  }
  fail("no recipe is called '%s'; there are %s", name, names.text);
}

const Recipe *recipe_of(const Curve *settings) {
  Label name = curve_setting(settings, "recipe");
  return name.text[0] && strcmp(name.text, "none") ? recipe_named(name.text) : NULL;
}

void recipes_list(void) {
  for (const Recipe *r = RECIPES; r->name; r++)
    printf("%-16s%s\n%16s%s\n%16ssays %s\n", r->name, r->title, "", r->source, "", r->says);
}

// --- next to the source ------------------------------------------------------------------------------------

// The smallest reading of a mode at a size; 0: at any size.
static const Reading *reading_at(const Curve *c, Sweep sweep, double value, LceMode mode) {
  const Reading *best = NULL;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->point.sweep != sweep || r->point.mode != mode) continue;
    if (value > 0 && point_value(&r->point) != value) continue;
    if (!best || reading_layer_bytes(r) < reading_layer_bytes(best)) best = r;
  }
  return best;
}

static Label our_figure(const Reading *r) {
  if (!r) return (Label){"-"};
  bool chunk = r->point.sweep == SWEEP_CHUNK && r->point.chunk;
  return label("%s%s%s", text_bytes(reading_layer_bytes(r)).text,
               chunk ? label(" at chunk %lld", (long long)r->point.chunk).text : "",
               r->layer_bytes ? "" : " plan");
}

// What the LM head + loss pushes when only the losses are computed.
static size_t loss_alone_bytes(const Experiment *e, const Point *p) {
  Backend *plan = plan_backend_create(e->device, e->options->dtype);
  LceTensors layer = layer_reserve(plan, point_shape(e, p));
  layer.dx = layer.dweight = (Tensor){0};
  size_t bytes = layer_held(plan, layer_call(&layer, p->mode, p->chunk));
  backend_destroy(plan);
  return bytes;
}

static const char row[] = "  %-48s %15s %27s %27s\n";

static Label times(double ratio) {
  return ratio < 100 ? label("%.1f", ratio) : label("%s", text_grouped((int64_t)ratio).text);
}

// How many times less the fused mode holds.
static void print_ratio(double source, double ours) {
  printf(row, "  times less when fused", times(source).text, times(ours).text, "");
}

// The source's ratio, next to ours at each of its sizes.
static void print_claim(const Recipe *recipe, const Curve *c) {
  Sweep sweep = recipe->sweeps[0].sweep;
  for (int i = 0; i < c->count; i++) {
    const Reading *logits = &c->readings[i];
    double value = point_value(&logits->point);
    const Reading *fused = reading_at(c, sweep, value, LCE_FUSED);
    if (logits->point.sweep != sweep || logits->point.mode != LCE_MATERIALIZED || !fused) continue;
    printf(row,
           label("times less when fused, %s %s", SWEEP_NAMES[sweep], text_grouped((int64_t)value).text).text,
           times(recipe->claim).text,
           times((double)reading_layer_bytes(logits) / (double)reading_layer_bytes(fused)).text, "");
  }
}

void recipe_compare(const Recipe *recipe, const Experiment *e, const Curve *c) {
  Sweep sweep = recipe->sweeps[0].sweep;
  printf("\n%s\n  says: %s\n", recipe->source, recipe->says);
  printf(row, "memory of the LM head + loss", "source", "fused here", "materialized here");
  for (const Mark *m = recipe->marks; m->label; m++) {
    Label what = label(m->value > 0 ? "%s, %s %s" : "%s", m->label, SWEEP_NAMES[sweep],
                       text_grouped((int64_t)m->value).text);
    printf(row, what.text, text_bytes((uint64_t)m->bytes).text,
           our_figure(reading_at(c, sweep, m->value, LCE_FUSED)).text,
           our_figure(reading_at(c, sweep, m->value, LCE_MATERIALIZED)).text);
  }
  if (recipe->claim > 0) print_claim(recipe, c);
  const Reading *both[] = {reading_at(c, SWEEP_CHUNK, 0, LCE_FUSED),
                           reading_at(c, SWEEP_CHUNK, 0, LCE_MATERIALIZED)};
  if (!recipe->loss_alone || !both[0] || !both[1]) return;
  size_t alone[2], whole[2];
  for (int i = 0; i < 2; i++) {
    LceShape s = point_shape(e, &both[i]->point);
    size_t gradients = (size_t)(s.tokens * s.hidden_size) * dtype_bytes(s.dtype) +
                       (size_t)(s.vocab_size * s.hidden_size) * sizeof(float);
    alone[i] = loss_alone_bytes(e, &both[i]->point);
    whole[i] = reading_layer_bytes(both[i]) + gradients;
  }
  printf(row, "the loss alone, no gradients (planned)", "1 MB / 24 GB", text_bytes(alone[0]).text,
         text_bytes(alone[1]).text);
  print_ratio(24000, (double)alone[1] / (double)alone[0]);
  printf(row, "with the gradients (ours keep dW in fp32)", "1.1 / 28 GB", text_bytes(whole[0]).text,
         text_bytes(whole[1]).text);
  print_ratio(28 / 1.1, (double)whole[1] / (double)whole[0]);
}

void timeline_compare(const Timeline *t, const Curve *settings) {
  static const char timeline_row[] = "  %-40s %12s %20s %28s\n";
  const Recipe *recipe = recipe_of(settings);
  size_t bytes[2][TIMELINE_MODES] = {{0}}; // of all categories, of the LM head
  for (int m = 0; m < TIMELINE_MODES; m++) {
    Timeline part = timeline_of(t, m);
    bytes[0][m] = timeline_peak(&part, MEMORY_CATEGORY_COUNT);
    bytes[1][m] = timeline_peak(&part, MEMORY_HEAD);
  }
  if (recipe) printf("\n%s\n  says: %s\n", recipe->source, recipe->says);
  bool fp32 = bytes[0][TIMELINE_FP32] > 0;
  printf("\n");
  printf(timeline_row,
         label("peak in %d steps, %s", TIMELINE_STEPS, t->planned ? "planned" : "measured").text, "fused",
         "materialized", fp32 ? "with fp32 logits, planned" : "");
  for (int k = 0; k < 2; k++) {
    const size_t *b = bytes[k];
    printf(timeline_row, k ? "LM head + loss" : "in use on the device", text_bytes(b[LCE_FUSED]).text,
           text_bytes(b[LCE_MATERIALIZED]).text, fp32 ? text_bytes(b[TIMELINE_FP32]).text : "");
    double fused = (double)b[LCE_FUSED];
    printf(timeline_row, "  times what the fused mode holds", "",
           times((double)b[LCE_MATERIALIZED] / fused).text,
           fp32 ? times((double)b[TIMELINE_FP32] / fused).text : "");
  }
  if (recipe && recipe->claim > 0)
    printf(timeline_row, "  the source: fp32 logits over a chunk's", "", "", times(recipe->claim).text);
  if (t->host_bytes) printf("  %s are offloaded to the host in every mode\n", text_bytes(t->host_bytes).text);
}
