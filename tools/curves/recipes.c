#include "tools/curves/recipes.h"

#include <math.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"
#include "tools/curves/layer.h"

#define MIB          0x1p20
#define GIB          0x1p30
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const char *const LLAMA3_8B[] = {
    "--model",     "llama-8b", "--batch",        "1",    "--seq-len",           "32768",
    "--recompute", "layer",    "--moment-dtype", "bf16", "--no-master-weights", NULL};
static const char *const TOKENS_81920[] = {"--model", "llama-8b", "--batch", "4", "--seq-len", "20480", NULL};
static const char *const CHUNK_SWEEP[] = {"--batch", "16",      "--seq-len", "1024", "--hidden-size",
                                          "2048",    "--vocab", "131072",    NULL};
static const char *const GEMMA2_2B[] = {"--batch", "8",       "--seq-len", "1024", "--hidden-size",
                                        "2304",    "--vocab", "256000",    NULL};
static const char *const BATCH_512[] = {"--batch",     "1",       "--seq-len", "512",     "--hidden-size",
                                        "512",         "--vocab", "128256",    "--dtype", "fp32",
                                        "--lce-chunk", "64",      NULL};

static const Mark LLAMA3_MARKS[] = {
    {SWEEP_TOKENS, 32768, 15 * GIB, 0, 0, "15 GB, fp32 logits"},
};
static const Mark TOKENS_MARKS[] = {
    {SWEEP_TOKENS, 81920, 19.57 * GIB, 0, 0, "19.57 GiB, bf16 logits"},
};
// The libraries as they were measured for this project: one H200, PyTorch 2.11, median of 7, bf16.
static const Mark CHUNK_MARKS[] = {
    {SWEEP_CHUNK, 0, 24000 * MIB, 1.69, 0, "PyTorch, fp32 logits"},
    {SWEEP_CHUNK, 0, 11712 * MIB, 1.28, 0, "PyTorch, bf16 logits"},
    {SWEEP_CHUNK, 0, 4096 * MIB, 1.29, 0, "torch.compile"},
    {SWEEP_CHUNK, 0, 1088 * MIB, 2.26, 0, "Liger"},
    {SWEEP_CHUNK, 0, 1 * MIB, 1.83, 0, "Cut Cross-Entropy"},
};
static const Mark GEMMA_MARKS[] = {
    {SWEEP_CHUNK, 0, 24000 * MIB, 0, 0, "paper: 24 GB, plain"},
    {SWEEP_CHUNK, 0, 1 * MIB, 0, 0, "paper: 1 MB, CCE"},
    {SWEEP_CHUNK, 0, 22839 * MIB, 1.58, 0, "PyTorch, fp32 logits"},
    {SWEEP_CHUNK, 0, 10839 * MIB, 1.19, 0, "PyTorch, bf16 logits"},
    {SWEEP_CHUNK, 0, 4001 * MIB, 1.20, 0, "torch.compile"},
    {SWEEP_CHUNK, 0, 2314 * MIB, 3.99, 0, "Liger"},
    {SWEEP_CHUNK, 0, 3 * MIB, 1.33, 0, "Cut Cross-Entropy"},
};
static const Mark BATCH_MARKS[] = {
    {SWEEP_TOKENS, 128, 188 * MIB, 0, 1, "PyTorch, playbook"},
    {SWEEP_TOKENS, 256, 378 * MIB, 0, 1, "PyTorch, playbook"},
    {SWEEP_TOKENS, 512, 752 * MIB, 0, 1, "PyTorch, playbook"},
    {SWEEP_TOKENS, 1024, 1506 * MIB, 0, 1, "PyTorch, playbook"},
    {SWEEP_TOKENS, 128, 32 * MIB, 0, 2, "its fused kernel"},
    {SWEEP_TOKENS, 256, 63 * MIB, 0, 2, "its fused kernel"},
    {SWEEP_TOKENS, 512, 126 * MIB, 0, 2, "its fused kernel"},
    {SWEEP_TOKENS, 1024, 251 * MIB, 0, 2, "its fused kernel"},
};

static const Recipe recipes[] = {
    {.name = "llama3-8b-32k",
     .title = "Llama 3 8B, training step at long context",
     .source = "PyTorch's feature request for linear_cross_entropy (pytorch/pytorch#124480)",
     .says = "at [B, T] = [1, 32768] and [4, 20480] the fp32 logits are a spike of 15 GB that the fused loss "
             "removes",
     .grey = "what PyTorch's feature request for linear_cross_entropy says",
     .arguments = LLAMA3_8B,
     .timeline = true,
     .gpu = true,
     .sweeps = {{SWEEP_TOKENS, "1x4096,1x8192,1x16384,1x32768,4x20480"}},
     .sweep_count = 1,
     .marks = LLAMA3_MARKS,
     .mark_count = COUNT(LLAMA3_MARKS)},
    {.name = "tokens-81920",
     .title = "Llama 3's last layer up to 81,920 tokens",
     .source = "PyTorch's feature request for linear_cross_entropy (pytorch/pytorch#124480)",
     .says = "128,256 x 81,920 x 2 bytes: 19.57 GiB of logits",
     .grey = "what PyTorch's feature request for linear_cross_entropy says",
     .arguments = TOKENS_81920,
     .layer_only = true,
     .gpu = true,
     .sweeps = {{SWEEP_TOKENS, "10240:81920:10240"}},
     .sweep_count = 1,
     .marks = TOKENS_MARKS,
     .mark_count = COUNT(TOKENS_MARKS)},
    {.name = "chunk-sweep",
     .title = "The last layer over every size: N 16,384, H 2,048, V 131,072",
     .source = "the second benchmark in PyTorch's feature request for linear_cross_entropy "
               "(pytorch/pytorch#124480)",
     .says =
         "memory, TFLOP/s and gradient error over each size, the others at N 16,384, H 2,048, V 131,072; the "
         "libraries beside it were measured on one H200 with PyTorch 2.11",
     .grey = "other libraries, as measured on one H200 with PyTorch 2.11",
     .arguments = CHUNK_SWEEP,
     .layer_only = true,
     .errors = true,
     .gpu = true,
     .sweeps = {{SWEEP_CHUNK, "128:16384:x2"},
                {SWEEP_TOKENS, "2048:32768:x2"},
                {SWEEP_VOCAB, "16384:262144:x2"},
                {SWEEP_HIDDEN, "512:8192:x2"}},
     .sweep_count = 4,
     .marks = CHUNK_MARKS,
     .mark_count = COUNT(CHUNK_MARKS)},
    {.name = "gemma2-2b",
     .title = "Gemma 2 2B's last layer: N 8,192, H 2,304, V 256,000",
     .source = "Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al. 2025)",
     .says = "24 GB against 1 MB for the loss alone, 28 GB against about 1.1 GB with the gradients; the "
             "libraries "
             "beside it were measured on one H200 with PyTorch 2.11",
     .grey = "the paper's figures; other libraries, as measured on one H200 with PyTorch 2.11",
     .arguments = GEMMA2_2B,
     .layer_only = true,
     .loss_alone = true,
     .gpu = true,
     .sweeps = {{SWEEP_CHUNK, "128:8192:x2"}},
     .sweep_count = 1,
     .marks = GEMMA_MARKS,
     .mark_count = COUNT(GEMMA_MARKS)},
    {.name = "batch-512",
     .title = "512 tokens at a vocabulary of 128,256, in fp32",
     .source = "NVIDIA's DGX Spark playbooks, on fused cross-entropy for Llama 3.1",
     .says = "250 MB of logits for 512 tokens, and about 6x less memory",
     .grey = "the table in NVIDIA's DGX Spark playbooks",
     .arguments = BATCH_512,
     .layer_only = true,
     .sweeps = {{SWEEP_TOKENS, "128,256,512,1024"}},
     .sweep_count = 1,
     .marks = BATCH_MARKS,
     .mark_count = COUNT(BATCH_MARKS)},
};

int recipe_count(void) {
  return COUNT(recipes);
}

const Recipe *recipe_at(int index) {
  return &recipes[index];
}

const Recipe *recipe_named(const char *name) {
  char names[256] = "";
  if (!name) return NULL;
  for (int i = 0; i < COUNT(recipes); i++) {
    if (strcmp(name, recipes[i].name) == 0) return &recipes[i];
    strcat(strcat(names, i ? ", " : ""), recipes[i].name);
  }
  fail("no recipe is called '%s'; there are %s", name, names);
}

void recipes_list(FILE *out) {
  for (int i = 0; i < COUNT(recipes); i++)
    fprintf(out, "%-16s%s\n%16s%s\n%16ssays %s\n", recipes[i].name, recipes[i].title, "", recipes[i].source,
            "", recipes[i].says);
}

// --- beside the source -------------------------------------------------------------------------------------

// The smallest reading of a mode at the mark's place.
static const Reading *reading_at(const Curve *c, const Mark *m, LceMode mode) {
  const Reading *best = NULL;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->point.sweep != m->sweep || r->point.mode != mode) continue;
    if (m->value > 0 && point_value(&r->point) != m->value) continue;
    if (!best || reading_layer_bytes(r) < reading_layer_bytes(best)) best = r;
  }
  return best;
}

static void our_figures(FILE *out, const Reading *r) {
  if (!r) {
    fprintf(out, " %27s", "-");
    return;
  }
  char text[96], chunk[32] = "";
  if (r->point.sweep == SWEEP_CHUNK && r->point.chunk)
    snprintf(chunk, sizeof chunk, " at chunk %lld", (long long)r->point.chunk);
  snprintf(text, sizeof text, "%s%s%s", text_bytes(reading_layer_bytes(r)).text, chunk,
           r->layer_bytes ? "" : " plan");
  fprintf(out, " %27s", text);
}

static LceShape own_shape(const Options *o) {
  return (LceShape){.tokens = o->batch * o->seq_len,
                    .hidden_size = o->model.hidden_size,
                    .vocab_size = o->model.vocab_size,
                    .dtype = o->dtype};
}

// What the layer pushes when only the losses are asked for.
static size_t loss_alone_bytes(const Experiment *e, LceMode mode, int64_t chunk) {
  LceShape s = own_shape(e->options);
  Backend *plan = plan_backend_create(e->device, s.dtype);
  LastLayer l = layer_reserve(plan, s, 1);
  linear_cross_entropy(plan, (LinearCrossEntropy){.mode = mode,
                                                  .chunk = chunk,
                                                  .loss = l.loss,
                                                  .x = l.x,
                                                  .weight = l.weight,
                                                  .targets = l.targets,
                                                  .scale = 1});
  size_t bytes = plan->memory.ledger.stack_peak;
  backend_destroy(plan);
  return bytes;
}

static size_t gradient_bytes(const Experiment *e) {
  LceShape s = own_shape(e->options);
  return (size_t)(s.tokens * s.hidden_size) * dtype_bytes(s.dtype) +
         (size_t)(s.vocab_size * s.hidden_size) * sizeof(float);
}

void recipe_compare(FILE *out, const Recipe *recipe, const Experiment *e, const Curve *c) {
  fprintf(out, "\n%s\n  says: %s\n", recipe->source, recipe->says);
  fprintf(out, "  %-48s %12s %27s %27s\n", "what the last layer holds", "source", "fused here",
          "materialized here");
  for (int i = 0; i < recipe->mark_count; i++) {
    const Mark *m = &recipe->marks[i];
    char what[80];
    snprintf(what, sizeof what, m->value > 0 ? "%s, %s %s" : "%s", m->label, sweep_name(m->sweep),
             text_grouped((int64_t)m->value).text);
    fprintf(out, "  %-48s %12s", what, text_bytes((uint64_t)m->bytes).text);
    our_figures(out, reading_at(c, m, LCE_FUSED));
    our_figures(out, reading_at(c, m, LCE_MATERIALIZED));
    fputc('\n', out);
  }
  if (!recipe->loss_alone) return;
  Mark any = {.sweep = SWEEP_CHUNK};
  const Reading *fused = reading_at(c, &any, LCE_FUSED), *whole = reading_at(c, &any, LCE_MATERIALIZED);
  if (!fused || !whole) return;
  fprintf(out, "  %-48s %12s %27s %27s\n", "the loss alone, no gradients (planned)", "1 MB / 24 GB",
          text_bytes(loss_alone_bytes(e, LCE_FUSED, fused->point.chunk)).text,
          text_bytes(loss_alone_bytes(e, LCE_MATERIALIZED, 0)).text);
  char fused_all[48], whole_all[48];
  snprintf(fused_all, sizeof fused_all, "%s",
           text_bytes(reading_layer_bytes(fused) + gradient_bytes(e)).text);
  snprintf(whole_all, sizeof whole_all, "%s",
           text_bytes(reading_layer_bytes(whole) + gradient_bytes(e)).text);
  fprintf(out, "  %-48s %12s %27s %27s\n", "with the gradients (ours keep dW in fp32)", "1.1 / 28 GB",
          fused_all, whole_all);
}
