#include "trainer/options.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "data/source.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/hf_config.h"
#include "trainer/plan.h"
#include "trainer/resume.h"

const char *argp_program_version = "lce.c 0.1";

// clang-format off
enum {
  KEY_MODEL = 1000, KEY_VOCAB, KEY_HIDDEN_SIZE, KEY_INTERMEDIATE_SIZE, KEY_NUM_LAYERS, KEY_NUM_HEADS, KEY_NUM_KV_HEADS,
  KEY_HEAD_DIM, KEY_MAX_POSITIONS, KEY_TIED, KEY_UNTIED, KEY_ROPE_THETA,
  KEY_BATCH, KEY_SEQ_LEN, KEY_TOTAL_BATCH, KEY_STEPS, KEY_SEED,
  KEY_LR, KEY_MIN_LR, KEY_WARMUP, KEY_SCHEDULE, KEY_BETA1, KEY_BETA2, KEY_EPSILON, KEY_WEIGHT_DECAY, KEY_GRAD_CLIP,
  KEY_FUSED, KEY_MATERIALIZED, KEY_CHUNK, KEY_LCE_MEMORY, KEY_FILTER, KEY_SMOOTHING, KEY_Z_LOSS, KEY_SOFTCAP, KEY_METRICS,
  KEY_DATA, KEY_VAL_DATA, KEY_VAL_FRACTION, KEY_EVAL_EVERY, KEY_EVAL_BATCHES, KEY_SAMPLE_EVERY, KEY_SAMPLE_TOKENS,
  KEY_TEMPERATURE, KEY_TOP_K, KEY_TOP_P, KEY_PROMPT, KEY_TOKENIZER, KEY_EVAL_ONLY, KEY_HELLASWAG, KEY_HELLASWAG_EXAMPLES,
  KEY_INIT, KEY_SAVE, KEY_SAVE_EVERY, KEY_KEEP, KEY_SAVE_DTYPE, KEY_RESUME,
  KEY_DEVICE, KEY_DTYPE, KEY_GRAD_DTYPE, KEY_MOMENT_DTYPE, KEY_MASTER, KEY_NO_MASTER, KEY_RECOMPUTE, KEY_ATTENTION,
  KEY_PLAIN_PRODUCTS, KEY_ZERO, KEY_VOCAB_PARALLEL, KEY_RANKS, KEY_TIMEOUT,
  KEY_LOG, KEY_PLAN, KEY_FIT, KEY_COMPARE, KEY_TIMELINE,
  KEY_END
};
// clang-format on

// clang-format off
static const struct argp_option table[] = {
    {0, 0, 0, 0, "Model (a preset's sizes are the published ones; each can be overridden)", 1},
    {"model", KEY_MODEL, "PRESET", 0,
     "gpt2-tiny, -124m, -350m, -774m, -1558m; llama-tiny, -1b, -3b, -8b (default llama-tiny)", 0},
    {"vocab", KEY_VOCAB, "V", 0, "Vocabulary size (default the preset's: 50257 or 128256)", 0},
    {"hidden-size", KEY_HIDDEN_SIZE, "H", 0, "Width of the residual stream", 0},
    {"intermediate-size", KEY_INTERMEDIATE_SIZE, "F", 0, "Width of the MLP", 0},
    {"num-layers", KEY_NUM_LAYERS, "L", 0, "Transformer blocks", 0},
    {"num-attention-heads", KEY_NUM_HEADS, "Q", 0, "Query heads", 0},
    {"num-key-value-heads", KEY_NUM_KV_HEADS, "K", 0, "Key/value heads (Llama); divides the query heads", 0},
    {"head-dim", KEY_HEAD_DIM, "D", 0, "Size of a head (default hidden size / query heads)", 0},
    {"max-position-embeddings", KEY_MAX_POSITIONS, "P", 0, "Longest sequence the model can take", 0},
    {"tie-word-embeddings", KEY_TIED, 0, 0, "The head is the token embedding", 0},
    {"untie-word-embeddings", KEY_UNTIED, 0, 0, "The head has a matrix of its own", 0},
    {"rope-theta", KEY_ROPE_THETA, "THETA", 0, "Base of the rotary frequencies (default 500000)", 0},

    {0, 0, 0, 0, "Job", 2},
    {"batch", KEY_BATCH, "B", 0, "Sequences in a micro-batch (default 4)", 0},
    {"seq-len", KEY_SEQ_LEN, "T", 0, "Tokens in a sequence (default 128 for tiny models, 1024 for GPT-2, 2048 for Llama)",
     0},
    {"total-batch", KEY_TOTAL_BATCH, "TOKENS", 0,
     "Tokens in an optimizer step over all ranks, a multiple of ranks x B x T; the rest is gradient accumulation "
     "(default ranks x B x T)", 0},
    {"steps", KEY_STEPS, "N", 0, "Optimizer steps (default 200)", 0},
    {"seed", KEY_SEED, "SEED", 0, "Of the weights and the order of the data (default 1)", 0},

    {0, 0, 0, 0, "Optimizer (AdamW)", 3},
    {"lr", KEY_LR, "RATE", 0, "Highest learning rate (default the preset's; 2e-5 with --init)", 0},
    {"min-lr", KEY_MIN_LR, "SHARE", 0, "Share of --lr left at the end, 0 to 1 (default 0.1)", 0},
    {"warmup", KEY_WARMUP, "N", 0, "Warm-up steps (default a twentieth of --steps)", 0},
    {"schedule", KEY_SCHEDULE, "KIND", 0, "cosine, linear, constant or wsd (default cosine)", 0},
    {"beta1", KEY_BETA1, "B", 0, "Decay of the first moment (default 0.9)", 0},
    {"beta2", KEY_BETA2, "B", 0, "Decay of the second moment (default 0.95)", 0},
    {"epsilon", KEY_EPSILON, "E", 0, "Added to the root of the second moment (default 1e-8)", 0},
    {"weight-decay", KEY_WEIGHT_DECAY, "D", 0, "Decoupled; matrices only, not norms and biases (default 0.1)", 0},
    {"grad-clip", KEY_GRAD_CLIP, "NORM", 0, "Largest global gradient norm; 0 does not clip (default 1)", 0},

    {0, 0, 0, 0, "Last layer", 4},
    {"fused-lce", KEY_FUSED, 0, 0, "Fused, chunked lm_head + cross-entropy; gradients in the forward pass (default)", 0},
    {"materialized-logits", KEY_MATERIALIZED, 0, 0, "Keep the logits of all tokens, to compare with", 0},
    {"lce-chunk", KEY_CHUNK, "TOKENS", 0, 
     "Tokens per chunk (default an eighth of B x T, within 128, on cuda 1024, and 4096)", 0},
    {"lce-memory", KEY_LCE_MEMORY, "MIB", 0, "Choose the largest chunk whose layer holds at most this much", 0},
    {"lce-filter", KEY_FILTER, "EPS", 0,
     "Leave tiles of 128 tokens x 256 vocabulary entries, all of probability below EPS, out of the gradients, and "
     "tell how many and how much (default 0: none)", 0},

    {"label-smoothing", KEY_SMOOTHING, "EPS", 0,
     "Share of every target that is spread over the vocabulary, 0 to 1 (default 0); validation has none", 0},
    {"z-loss", KEY_Z_LOSS, "LAMBDA", 0,
     "Add LAMBDA logsumexp^2 to the training loss, logged apart (default 0; PaLM has 1e-4)", 0},
    {"logit-softcap", KEY_SOFTCAP, "C", 0,
     "Logits become C tanh(logit / C), as in Gemma 2 (default what --init says, else 0: none); a chunk then holds fp32 "
     "logits",
     0},
    {"metrics", KEY_METRICS, 0, 0,
     "Log each step's accuracy, entropy and largest logit; a chunk then holds fp32 logits", 0},

    {0, 0, 0, 0, "Data", 5},
    {"data", KEY_DATA, "PATH", 0,
     "Text file, directory or glob (a byte is a token), or llm.c shards (*.bin); may be given again (default: this "
     "source tree)", 0},
    {"val-data", KEY_VAL_DATA, "PATH", 0, "Validation data of its own (default: a held-out part of --data)", 0},
    {"val-fraction", KEY_VAL_FRACTION, "SHARE", 0, "Part held out for validation, below 1; 0 for none (default 0.05)", 0},
    {"eval-every", KEY_EVAL_EVERY, "N", 0, "Validate every N steps and at the end; 0 only at the end (default 50)", 0},
    {"eval-batches", KEY_EVAL_BATCHES, "N", 0, "Batches of a validation; 0 takes all (default 8)", 0},
    {"sample-every", KEY_SAMPLE_EVERY, "N", 0, "Show a text sample every N steps; 0 for none (default 100)", 0},
    {"sample-tokens", KEY_SAMPLE_TOKENS, "N", 0, "Tokens of a sample (default 64)", 0},
    {"temperature", KEY_TEMPERATURE, "T", 0, "Of the samples; 0 takes the likeliest token (default 0.8)", 0},
    {"top-k", KEY_TOP_K, "K", 0, "Samples take one of the K likeliest tokens; 0 of all (default 0)", 0},
    {"top-p", KEY_TOP_P, "P", 0, "Samples take of the fewest tokens that have probability P together (default 1)", 0},
    {"tokenizer", KEY_TOKENIZER, "PATH", 0,
     "tokenizer.json, or a directory with one: samples are prompted and shown as text (default the one in --init)", 0},
    {"eval-only", KEY_EVAL_ONLY, 0, 0, "Only evaluate --init or --resume: the loss over all of --val-data (or the held-out part)", 0},
    {"hellaswag", KEY_HELLASWAG, "FILE", 0, "At the end choose among completions: an evaluation file of llm.c", 0},
    {"hellaswag-examples", KEY_HELLASWAG_EXAMPLES, "N", 0, "Of it take the first N examples; 0 takes all (default 0)", 0},
    {"prompt", KEY_PROMPT, "TEXT", 0, "What samples begin with (default a newline)", 0},

    {0, 0, 0, 0, "Checkpoints", 6},
    {"init", KEY_INIT, "DIR", 0,
     "Begin with the model in DIR (config.json and safetensors of Hugging Face: Llama or GPT-2); instead of --model", 0},
    {"save", KEY_SAVE, "DIR", 0, "Save checkpoints as DIR/step-...; they and DIR open as models in transformers", 0},
    {"save-every", KEY_SAVE_EVERY, "N", 0, "Save every N steps and at the end; 0 only at the end (default 0)", 0},
    {"keep", KEY_KEEP, "M", 0, "Keep the newest M checkpoints; 0 keeps all (default 0)", 0},
    {"save-dtype", KEY_SAVE_DTYPE, "TYPE", 0, "bf16 or fp32 stored weights (default as --dtype)", 0},
    {"resume", KEY_RESUME, "WHERE", 0,
     "Carry on from a checkpoint, or with auto from the newest intact one in --save, if any; what is not given of the "
     "training is as it was, on any number of ranks and with any --zero and --vocab-parallel", 0},

    {0, 0, 0, 0, "Machine and memory", 7},
    {"device", KEY_DEVICE, "DEVICE", 0, "cpu, cuda or auto: the GPU if there is one (default auto)", 0},
    {"dtype", KEY_DTYPE, "TYPE", 0, "bf16 or fp32 weights and activations (default bf16 on cuda; the CPU is fp32)", 0},
    {"grad-dtype", KEY_GRAD_DTYPE, "TYPE", 0, "bf16 or fp32 weight gradients (default as --dtype); the head's are fp32", 0},
    {"moment-dtype", KEY_MOMENT_DTYPE, "TYPE", 0, "bf16 or fp32 AdamW moments (default fp32)", 0},
    {"master-weights", KEY_MASTER, 0, 0, "Keep fp32 master weights beside bf16 ones (default)", 0},
    {"no-master-weights", KEY_NO_MASTER, 0, 0, "Update bf16 weights directly, with stochastic rounding", 0},
    {"recompute", KEY_RECOMPUTE, "WHAT", 0,
     "Compute again in the backward pass instead of keeping: none, elementwise, mlp or layer (default none)", 0},
    {"attention", KEY_ATTENTION, "WHICH", 0, "own, cudnn or auto (cuda only; default auto)", 0},
    {"plain-products", KEY_PLAIN_PRODUCTS, 0, 0, "CPU: matrix products by plain loops, to compare with", 0},

    {0, 0, 0, 0, "Many GPUs (as many ranks as torchrun, mpirun, srun or tools/launch starts; one GPU each)", 8},
    {"zero", KEY_ZERO, "LEVEL", 0,
     "Spread over the ranks: 0 nothing, 1 master weights and moments, 2 also gradients (default 0)", 0},
    {"vocab-parallel", KEY_VOCAB_PARALLEL, 0, 0,
     "Split the head's rows over the ranks: each computes its part of every token's loss (with --zero 1 or 2)", 0},
    {"timeout", KEY_TIMEOUT, "SECONDS", 0, "End the job when no rank has got on for so long (default 300)", 0},
    {"ranks", KEY_RANKS, "N", 0, "With --plan or --fit: as if N ranks had been started", 0},

    {0, 0, 0, 0, "Output", 9},
    {"log", KEY_LOG, "FILE", 0, "Write one JSON object a line; the last is the summary", 0},
    {"plan", KEY_PLAN, 0, 0, "Only say how much memory this run would need, in both modes; nothing is allocated", 0},
    {"fit", KEY_FIT, 0, 0, "Only say the largest --batch that fits the device's memory, in both modes", 0},
    {"compare-modes", KEY_COMPARE, 0, 0, "Afterwards measure a few steps in both modes and print the table", 0},
    {"timeline", KEY_TIMELINE, "FILE", 0, "Write the bytes in use over the first three steps, by category, as CSV", 0},
    {0}};
// clang-format on

// --- values ------------------------------------------------------------------------------------------------

static const char *option_name(int key) {
  for (const struct argp_option *o = table; o->name || o->doc; o++)
    if (o->key == key) return o->name;
  return "?";
}

static int64_t integer(int key, const char *text, int64_t least, int64_t most) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (errno || end == text || *end || value < least || value > most)
    fail("--%s %s: give a whole number from %lld to %lld", option_name(key), text, (long long)least,
         (long long)most);
  return value;
}

static double number(int key, const char *text, double least, double most) {
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (errno || end == text || *end || !(value >= least && value <= most))
    fail("--%s %s: give a number from %g to %g", option_name(key), text, least, most);
  return value;
}

// In [0, 1).
static double share_below_one(int key, const char *text) {
  double value = number(key, text, 0, 1);
  if (!((float)value < 1)) fail("--%s %s: give a number from 0 to below 1", option_name(key), text);
  return value;
}

static int choice(int key, const char *text, const char *const *names, int count) {
  char list[128] = "";
  for (int i = 0; i < count; i++) {
    if (strcmp(text, names[i]) == 0) return i;
    strcat(strcat(list, i == 0 ? "" : i + 1 < count ? ", " : " or "), names[i]);
  }
  fail("--%s %s: give %s", option_name(key), text, list);
}

static Dtype dtype(int key, const char *text) {
  static const char *const names[] = {"fp32", "bf16"};
  return choice(key, text, names, 2) ? DTYPE_BF16 : DTYPE_F32;
}

static void append(const char ***list, int64_t *count, const char *path) {
  *list = realloc(*list, (size_t)(*count + 1) * sizeof **list);
  if (!*list) fail("out of host memory for the list of paths");
  (*list)[(*count)++] = path;
}

// --- parsing -----------------------------------------------------------------------------------------------

// Sizes and settings as given; 0 or NAN where nothing was.
typedef struct {
  Options *options;
  const char *model; // NULL: none was named
  ModelConfig given;
  int tied;                       // 1 tie, -1 untie
  double rope_theta, lr, softcap; // softcap: below 0 when not given
  int64_t warmup;
  int dtype, grad_dtype, moment_dtype; // 1 + Dtype
  int mode;                            // 1 + LceMode
  bool seen[KEY_END - KEY_MODEL];      // which options were given
} Parsed;

static void once(Parsed *p, LceMode mode) {
  if (p->mode && p->mode != 1 + (int)mode)
    fail("--fused-lce and --materialized-logits exclude each other; give one of them");
  p->mode = 1 + (int)mode;
}

static error_t parse_model(int key, char *text, Parsed *p) {
  const int64_t most = INT32_MAX;
  switch (key) {
  case KEY_MODEL:
    p->model = text;
    return 0;
  case KEY_VOCAB:
    p->given.vocab_size = integer(key, text, 1, most);
    return 0;
  case KEY_HIDDEN_SIZE:
    p->given.hidden_size = integer(key, text, 1, most);
    return 0;
  case KEY_INTERMEDIATE_SIZE:
    p->given.intermediate_size = integer(key, text, 1, most);
    return 0;
  case KEY_NUM_LAYERS:
    p->given.num_hidden_layers = integer(key, text, 1, 10000);
    return 0;
  case KEY_NUM_HEADS:
    p->given.num_attention_heads = integer(key, text, 1, most);
    return 0;
  case KEY_NUM_KV_HEADS:
    p->given.num_key_value_heads = integer(key, text, 1, most);
    return 0;
  case KEY_HEAD_DIM:
    p->given.head_dim = integer(key, text, 1, most);
    return 0;
  case KEY_MAX_POSITIONS:
    p->given.max_position_embeddings = integer(key, text, 1, most);
    return 0;
  case KEY_TIED:
    p->tied = 1;
    return 0;
  case KEY_UNTIED:
    p->tied = -1;
    return 0;
  case KEY_ROPE_THETA:
    p->rope_theta = number(key, text, 1, 1e12);
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_job(int key, char *text, Parsed *p) {
  Options *o = p->options;
  const int64_t most = INT32_MAX;
  static const char *const schedules[] = {"cosine", "linear", "constant", "wsd"};
  switch (key) {
  case KEY_BATCH:
    o->batch = integer(key, text, 1, most);
    return 0;
  case KEY_SEQ_LEN:
    o->seq_len = integer(key, text, 1, most);
    return 0;
  case KEY_TOTAL_BATCH:
    o->total_batch = integer(key, text, 1, (int64_t)1 << 40);
    return 0;
  case KEY_STEPS:
    o->steps = integer(key, text, 0, (int64_t)1 << 40);
    return 0;
  case KEY_SEED:
    o->seed = (uint64_t)integer(key, text, 0, INT64_MAX);
    return 0;
  case KEY_LR:
    p->lr = number(key, text, 0, 100);
    return 0;
  case KEY_MIN_LR:
    o->schedule.floor = number(key, text, 0, 1);
    return 0;
  case KEY_WARMUP:
    p->warmup = integer(key, text, 0, (int64_t)1 << 40);
    return 0;
  case KEY_SCHEDULE:
    o->schedule.kind = (ScheduleKind)choice(key, text, schedules, SCHEDULE_COUNT);
    return 0;
  case KEY_BETA1:
    o->beta1 = number(key, text, 0, 0.999999);
    return 0;
  case KEY_BETA2:
    o->beta2 = number(key, text, 0, 0.999999);
    return 0;
  case KEY_EPSILON:
    o->epsilon = number(key, text, 1e-30, 1);
    return 0;
  case KEY_WEIGHT_DECAY:
    o->weight_decay = number(key, text, 0, 100);
    return 0;
  case KEY_GRAD_CLIP:
    o->max_grad_norm = number(key, text, 0, 1e30);
    return 0;
  case KEY_FUSED:
    once(p, LCE_FUSED);
    return 0;
  case KEY_MATERIALIZED:
    once(p, LCE_MATERIALIZED);
    return 0;
  case KEY_CHUNK:
    o->lce_chunk = integer(key, text, 1, most);
    return 0;
  case KEY_LCE_MEMORY:
    o->lce_memory = integer(key, text, 1, (int64_t)1 << 30);
    return 0;
  case KEY_FILTER:
    o->lce_filter = share_below_one(key, text);
    return 0;
  case KEY_SMOOTHING:
    o->label_smoothing = number(key, text, 0, 1);
    return 0;
  case KEY_Z_LOSS:
    o->z_loss = number(key, text, 0, 1e6);
    return 0;
  case KEY_SOFTCAP:
    p->softcap = number(key, text, 0, 1e6);
    return 0;
  case KEY_METRICS:
    o->metrics = true;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_checkpoints(int key, char *text, Parsed *p) {
  Options *o = p->options;
  switch (key) {
  case KEY_INIT:
    o->init = text;
    return 0;
  case KEY_SAVE:
    o->save = text;
    return 0;
  case KEY_SAVE_EVERY:
    o->save_every = integer(key, text, 0, (int64_t)1 << 40);
    return 0;
  case KEY_KEEP:
    o->keep = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_SAVE_DTYPE:
    o->save_dtype = dtype(key, text);
    return 0;
  case KEY_RESUME:
    o->resume = text;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_rest(int key, char *text, Parsed *p) {
  Options *o = p->options;
  static const char *const devices[] = {"auto", "cpu", "cuda"};
  static const char *const attentions[] = {"auto", "own", "cudnn"};
  static const char *const levels[] = {"none", "elementwise", "mlp", "layer"};
  switch (key) {
  case KEY_DATA:
    append(&o->data, &o->data_count, text);
    return 0;
  case KEY_VAL_DATA:
    append(&o->val_data, &o->val_data_count, text);
    return 0;
  case KEY_VAL_FRACTION:
    o->val_fraction = number(key, text, 0, 0.999);
    return 0;
  case KEY_EVAL_EVERY:
    o->eval_every = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_EVAL_BATCHES:
    o->eval_batches = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_SAMPLE_EVERY:
    o->sample_every = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_SAMPLE_TOKENS:
    o->sample_tokens = integer(key, text, 1, 1 << 20);
    return 0;
  case KEY_TEMPERATURE:
    o->temperature = number(key, text, 0, 100);
    return 0;
  case KEY_TOKENIZER:
    o->tokenizer = text;
    return 0;
  case KEY_EVAL_ONLY:
    o->eval_only = true;
    return 0;
  case KEY_HELLASWAG:
    o->hellaswag = text;
    return 0;
  case KEY_HELLASWAG_EXAMPLES:
    o->hellaswag_examples = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_TOP_K:
    o->top_k = integer(key, text, 0, INT32_MAX);
    return 0;
  case KEY_TOP_P:
    o->top_p = number(key, text, 1e-9, 1);
    return 0;
  case KEY_PROMPT:
    if (!*text) fail("--prompt: give at least one character for samples to continue");
    o->prompt = text;
    return 0;
  case KEY_DEVICE:
    o->device = (DeviceChoice)choice(key, text, devices, 3);
    return 0;
  case KEY_DTYPE:
    p->dtype = 1 + (int)dtype(key, text);
    return 0;
  case KEY_GRAD_DTYPE:
    p->grad_dtype = 1 + (int)dtype(key, text);
    return 0;
  case KEY_MOMENT_DTYPE:
    p->moment_dtype = 1 + (int)dtype(key, text);
    return 0;
  case KEY_MASTER:
    o->dtypes.master = true;
    return 0;
  case KEY_NO_MASTER:
    o->dtypes.master = false;
    return 0;
  case KEY_RECOMPUTE:
    o->recompute = (Recompute)choice(key, text, levels, RECOMPUTE_COUNT);
    return 0;
  case KEY_ATTENTION:
    o->attention = attentions[choice(key, text, attentions, 3)];
    return 0;
  case KEY_PLAIN_PRODUCTS:
    o->plain_loops = true;
    return 0;
  case KEY_ZERO:
    o->dtypes.zero = (int)integer(key, text, 0, 2);
    return 0;
  case KEY_VOCAB_PARALLEL:
    o->dtypes.vocab_parallel = true;
    return 0;
  case KEY_RANKS:
    o->ranks = (int)integer(key, text, 1, 1 << 20);
    return 0;
  case KEY_TIMEOUT:
    o->timeout = number(key, text, 1, 1e6);
    return 0;
  case KEY_LOG:
    o->log = text;
    return 0;
  case KEY_PLAN:
    o->plan = true;
    return 0;
  case KEY_FIT:
    o->fit = true;
    return 0;
  case KEY_COMPARE:
    o->compare_modes = true;
    return 0;
  case KEY_TIMELINE:
    o->timeline = text;
    return 0;
  case ARGP_KEY_ARG:
    fail("'%s' is not an option; paths are given with --data PATH, and --help lists the rest", text);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_one(int key, char *text, struct argp_state *state) {
  Parsed *p = state->input;
  error_t result = parse_model(key, text, p);
  if (result == ARGP_ERR_UNKNOWN) result = parse_job(key, text, p);
  if (result == ARGP_ERR_UNKNOWN) result = parse_checkpoints(key, text, p);
  if (result == ARGP_ERR_UNKNOWN) result = parse_rest(key, text, p);
  if (key >= KEY_MODEL && key < KEY_END) p->seen[key - KEY_MODEL] = true;
  return result;
}

// --- what follows from what was given ----------------------------------------------------------------------

static void override(int64_t *size, int64_t given) {
  if (given) *size = given;
}

static const char *preset_name(const Parsed *p) {
  return p->model ? p->model : "llama-tiny";
}

// The preset, overridden.
static ModelConfig asked_model(const Parsed *p) {
  ModelConfig asked = model_preset(preset_name(p)), *m = &asked;
  int64_t preset_heads = m->num_attention_heads, preset_hidden = m->hidden_size;
  override(&m->vocab_size, p->given.vocab_size);
  override(&m->hidden_size, p->given.hidden_size);
  override(&m->intermediate_size, p->given.intermediate_size);
  override(&m->num_hidden_layers, p->given.num_hidden_layers);
  override(&m->num_attention_heads, p->given.num_attention_heads);
  override(&m->max_position_embeddings, p->given.max_position_embeddings);
  bool reshaped = m->num_attention_heads != preset_heads || m->hidden_size != preset_hidden;
  if (reshaped) {
    if (m->family == FAMILY_GPT2) m->num_key_value_heads = m->num_attention_heads;
    if (!p->given.head_dim) {
      if (m->hidden_size % m->num_attention_heads)
        fail("a hidden size of %lld does not divide into %lld heads; change --hidden-size or "
             "--num-attention-heads, or "
             "give --head-dim",
             (long long)m->hidden_size, (long long)m->num_attention_heads);
      m->head_dim = m->hidden_size / m->num_attention_heads;
    }
    // GPT-2's MLP is four times as wide as the stream.
    if (m->family == FAMILY_GPT2 && !p->given.intermediate_size) m->intermediate_size = 4 * m->hidden_size;
  }
  override(&m->num_key_value_heads, p->given.num_key_value_heads);
  override(&m->head_dim, p->given.head_dim);
  if (p->tied) m->tie_word_embeddings = p->tied > 0;
  if (p->rope_theta > 0) m->rope_theta = p->rope_theta;
  return asked;
}

static void require_same(const Options *o, int key, double asked, double have) {
  if (asked != have)
    fail(
        "--%s is asked to be %.10g, and %s/config.json says %.10g; leave it out, or begin with another model",
        option_name(key), asked, o->origin, have);
}

static void require_size(const Options *o, int key, int64_t asked, int64_t have) {
  if (asked) require_same(o, key, (double)asked, (double)have);
}

// A model that comes from a directory is as it is; what the command line says about it must be so.
static void require_agreement(const Options *o, const Parsed *p) {
  const ModelConfig *m = &o->model;
  ModelConfig a = p->model ? asked_model(p) : p->given;
  if (p->model && a.family != m->family)
    fail("--model %s is of another family than the model in %s; leave it out", p->model, o->origin);
  require_size(o, KEY_VOCAB, a.vocab_size, m->vocab_size);
  require_size(o, KEY_HIDDEN_SIZE, a.hidden_size, m->hidden_size);
  require_size(o, KEY_INTERMEDIATE_SIZE, a.intermediate_size, m->intermediate_size);
  require_size(o, KEY_NUM_LAYERS, a.num_hidden_layers, m->num_hidden_layers);
  require_size(o, KEY_NUM_HEADS, a.num_attention_heads, m->num_attention_heads);
  require_size(o, KEY_NUM_KV_HEADS, a.num_key_value_heads, m->num_key_value_heads);
  require_size(o, KEY_HEAD_DIM, a.head_dim, m->head_dim);
  require_size(o, KEY_MAX_POSITIONS, a.max_position_embeddings, m->max_position_embeddings);
  if (p->tied)
    require_same(o, p->tied > 0 ? KEY_TIED : KEY_UNTIED, 1, (p->tied > 0) == m->tie_word_embeddings);
  if (p->rope_theta > 0) require_same(o, KEY_ROPE_THETA, p->rope_theta, m->rope_theta);
}

static void settle_model(Options *o, const Parsed *p) {
  if (o->init && p->model) fail("--init and --model both say what the model is; give one of them");
  o->model = o->origin ? hf_config_read(o->origin) : asked_model(p);
  if (p->softcap >= 0) o->model.final_logit_softcapping = p->softcap;
  model_config_check(&o->model);
  if (o->origin) require_agreement(o, p);
}

static void settle_ranks(Options *o) {
  const Launch *launch = ranks_self();
  bool imagined = o->plan || o->fit;
  if (o->ranks && !imagined && o->ranks != launch->ranks)
    fail("--ranks %d: a launcher starts ranks (tools/launch %d ./train ...); the option alone is for --plan "
         "and --fit",
         o->ranks, o->ranks);
  if (!o->ranks) o->ranks = launch->ranks;
  o->rank = launch->rank < o->ranks ? launch->rank : 0;
  ranks_set_timeout(o->timeout);
}

// The tokens of an optimizer step, cut into micro-batches.
static void settle_batch(Options *o) {
  int64_t tokens = o->batch * o->seq_len, together = tokens * o->ranks;
  if (tokens > INT32_MAX)
    fail("--batch %lld of --seq-len %lld is more than %d tokens in a micro-batch; lower one and raise "
         "--total-batch",
         (long long)o->batch, (long long)o->seq_len, INT32_MAX);
  if (!o->total_batch || o->eval_only) o->total_batch = together;
  if (o->total_batch % together && o->ranks == 1)
    fail("--total-batch %lld is not a multiple of the %lld tokens of a micro-batch (--batch x --seq-len)",
         (long long)o->total_batch, (long long)tokens);
  if (o->total_batch % together)
    fail("--total-batch %lld is not a multiple of the %lld tokens that a micro-batch of %d ranks has "
         "(ranks x --batch x --seq-len); change --batch or --total-batch",
         (long long)o->total_batch, (long long)together, o->ranks);
  o->micro_steps = o->total_batch / together;
}

static void check_vocab_parallel(const Options *o) {
  if (!o->dtypes.zero)
    fail("--vocab-parallel leaves the head's gradients where its rows are, and so its master weights and "
         "moments: "
         "add --zero 1 or --zero 2");
  if (o->mode == LCE_MATERIALIZED || o->compare_modes)
    fail("--vocab-parallel belongs to --fused-lce; leave out %s",
         o->compare_modes ? "--compare-modes" : "--materialized-logits");
  if (o->metrics || o->lce_filter > 0)
    fail("--vocab-parallel knows what row sums tell; leave out %s",
         o->metrics ? "--metrics" : "--lce-filter");
  if (o->model.final_logit_softcapping > 0)
    fail("--vocab-parallel knows no logit soft-cap, and %s has one; leave out --vocab-parallel, or give "
         "--logit-softcap 0",
         o->model.name);
}

static void settle_job(Options *o, const Parsed *p) {
  if (!o->seq_len) o->seq_len = model_default_seq_len(&o->model);
  if (o->seq_len > o->model.max_position_embeddings)
    fail(
        "--seq-len %lld is longer than the %lld positions of %s; lower it or raise --max-position-embeddings",
        (long long)o->seq_len, (long long)o->model.max_position_embeddings, o->model.name);
  settle_batch(o);
  const double tuning = 2e-5; // for a model that is trained already
  double usual = o->origin ? tuning : model_preset_learning_rate(preset_name(p));
  o->schedule.peak = isnan(p->lr) ? usual : p->lr;
  o->schedule.total_steps = o->steps;
  o->schedule.warmup_steps = p->warmup >= 0 ? p->warmup : (o->steps + 19) / 20;
  o->masked = source_paths_masked(o->data, o->data_count);
  if (o->eval_only) {
    o->dtypes.frozen = true;
    o->dtypes.zero = 0;
    o->dtypes.vocab_parallel = false;
    o->eval_batches = o->sample_every = 0;
  }
  o->chunk_given = o->lce_chunk > 0;
  if (o->lce_chunk && o->lce_memory)
    fail("--lce-chunk and --lce-memory both choose the chunk; give one of them");
  if (o->mode == LCE_MATERIALIZED && (o->lce_chunk || o->lce_memory))
    fail("--lce-chunk and --lce-memory belong to --fused-lce; --materialized-logits has no chunks");
  if (o->mode == LCE_MATERIALIZED && o->lce_filter > 0)
    fail("--lce-filter belongs to --fused-lce; leave out --lce-filter or --materialized-logits");
  if (o->dtypes.vocab_parallel) check_vocab_parallel(o);
  if (o->lce_filter > 0 && o->metrics)
    fail("--lce-filter acts on exponentials, and --metrics needs logits; leave out one of them");
  if (o->lce_filter > 0 && o->model.final_logit_softcapping > 0)
    fail("--lce-filter acts on exponentials, and a soft-cap of %g on logits; leave out --lce-filter, or give "
         "--logit-softcap 0",
         o->model.final_logit_softcapping);
}

// "--a, --b and --c": those of `keys` that were given. Returns how many.
static int list_given(const Parsed *p, const int *keys, size_t count, char *list, size_t size) {
  int given = 0, listed = 0;
  for (size_t i = 0; i < count; i++) given += p->seen[keys[i] - KEY_MODEL];
  list[0] = 0;
  for (size_t i = 0; i < count; i++) {
    if (!p->seen[keys[i] - KEY_MODEL]) continue;
    size_t length = strlen(list);
    const char *before = !listed ? "" : listed == given - 1 ? " and " : ", ";
    snprintf(list + length, size - length, "%s--%s", before, option_name(keys[i]));
    listed++;
  }
  return given;
}

// What is asked for and would not be done is refused; what only says how to train is said to be idle.
static void check_eval_only(const Options *o, const Parsed *given) {
  static const int refused[] = {KEY_SAVE,       KEY_SAVE_EVERY, KEY_KEEP,
                                KEY_SAVE_DTYPE, KEY_COMPARE,    KEY_TIMELINE};
  static const int idle[] = {
      KEY_TOTAL_BATCH, KEY_STEPS,        KEY_LR,           KEY_MIN_LR,        KEY_WARMUP,
      KEY_SCHEDULE,    KEY_BETA1,        KEY_BETA2,        KEY_EPSILON,       KEY_WEIGHT_DECAY,
      KEY_GRAD_CLIP,   KEY_SMOOTHING,    KEY_Z_LOSS,       KEY_METRICS,       KEY_FILTER,
      KEY_EVAL_EVERY,  KEY_EVAL_BATCHES, KEY_SAMPLE_EVERY, KEY_SAMPLE_TOKENS, KEY_TEMPERATURE,
      KEY_TOP_K,       KEY_TOP_P,        KEY_PROMPT,       KEY_GRAD_DTYPE,    KEY_MOMENT_DTYPE,
      KEY_MASTER,      KEY_NO_MASTER,    KEY_RECOMPUTE,    KEY_ZERO,          KEY_VOCAB_PARALLEL};
  char list[1024];
  if (o->resume && !strcmp(o->resume, "auto"))
    fail("--eval-only saves nothing, and --resume auto looks where a run saves: name the folder, --resume "
         "DIR");
  if (list_given(given, refused, sizeof refused / sizeof *refused, list, sizeof list))
    fail("--eval-only trains nothing: leave out %s", list);
  int count = list_given(given, idle, sizeof idle / sizeof *idle, list, sizeof list);
  if (count) warn("--eval-only trains nothing: %s mean%s nothing here", list, count == 1 ? "s" : "");
}

// --- reading the command line ------------------------------------------------------------------------------

static Parsed parse(Options *o, int argc, char **argv) {
  static const char doc[] =
      "Trains GPT-2 and Llama in plain C and CUDA. The last layer is a fused, chunked lm_head + "
      "cross-entropy, beside a "
      "materialized-logits mode to measure it against.\v"
      "Examples:\n"
      "  ./train --vocab 128256 --fused-lce\n"
      "  ./train --model llama-8b --seq-len 32768 --batch 1 --plan\n"
      "  ./train --model gpt2-124m --data 'shards/train_*.bin' --val-data shards/val.bin --batch 64\n";
  static const struct argp argp = {.options = table, .parser = parse_one, .doc = doc};
  *o = (Options){.batch = 4,
                 .steps = 200,
                 .seed = 1,
                 .schedule = {.kind = SCHEDULE_COSINE, .floor = 0.1},
                 .beta1 = 0.9,
                 .beta2 = 0.95,
                 .epsilon = 1e-8,
                 .weight_decay = 0.1,
                 .max_grad_norm = 1,
                 .val_fraction = 0.05,
                 .eval_every = 50,
                 .eval_batches = 8,
                 .sample_every = 100,
                 .sample_tokens = 64,
                 .temperature = 0.8,
                 .top_p = 1,
                 .prompt = "\n",
                 .timeout = 300,
                 .save_dtype = DTYPE_COUNT,
                 .attention = "auto",
                 .dtypes.master = true};
  Parsed p = {.options = o, .lr = NAN, .warmup = -1, .softcap = -1};
  error_t error = argp_parse(&argp, argc, argv, 0, NULL, &p);
  if (error) fail("cannot read the command line: %s", strerror(error));
  return p;
}

// Adds --name=value, or --name where the value is empty, to a command line.
static void remember(Options *o, const char *name, const char *value) {
  char *text;
  o->remembered = realloc(o->remembered, (size_t)(o->remembered_count + 1) * sizeof *o->remembered);
  if (!o->remembered || asprintf(&text, *value ? "--%s=%s" : "--%s", name, value) < 0)
    fail("out of host memory for the options of a checkpoint");
  o->remembered[o->remembered_count++] = text;
}

static void remember_paths(Options *o, const char *name, const char *member) {
  const cJSON *path, *paths = cJSON_GetObjectItemCaseSensitive(o->resumed_from, member);
  cJSON_ArrayForEach(path, paths) {
    if (cJSON_IsString(path)) remember(o, name, path->valuestring);
  }
}

// What the checkpoint remembers of the options that are not given now.
static void remember_settings(Options *o, const Parsed *given) {
  static const int keys[] = {
      KEY_SEED,         KEY_BATCH,     KEY_SEQ_LEN,      KEY_TOTAL_BATCH, KEY_STEPS,        KEY_SCHEDULE,
      KEY_LR,           KEY_MIN_LR,    KEY_WARMUP,       KEY_BETA1,       KEY_BETA2,        KEY_EPSILON,
      KEY_WEIGHT_DECAY, KEY_GRAD_CLIP, KEY_VAL_FRACTION, KEY_FUSED,       KEY_MATERIALIZED, KEY_CHUNK,
      KEY_RECOMPUTE,    KEY_SMOOTHING, KEY_Z_LOSS,       KEY_METRICS,     KEY_DTYPE,        KEY_GRAD_DTYPE,
      KEY_MOMENT_DTYPE, KEY_MASTER,    KEY_NO_MASTER,    KEY_FILTER};
  static const int dtype_keys[] = {KEY_DTYPE, KEY_GRAD_DTYPE, KEY_MOMENT_DTYPE, KEY_MASTER, KEY_NO_MASTER};
  bool dtypes_given = false;
  for (size_t i = 0; i < sizeof dtype_keys / sizeof *dtype_keys; i++)
    dtypes_given |= given->seen[dtype_keys[i] - KEY_MODEL];
  const cJSON *device = cJSON_GetObjectItemCaseSensitive(o->resumed_from, "device");
  bool from_gpu = cJSON_IsString(device) && !strcmp(device->valuestring, "cuda");
  const cJSON *settings = cJSON_GetObjectItemCaseSensitive(o->resumed_from, "settings");
  bool materialized = given->mode == 1 + (int)LCE_MATERIALIZED, other_chunk = o->lce_memory || materialized;
  // As settle_job wants it. A split head takes up what a whole one left, in the only way it knows.
  bool split = o->dtypes.vocab_parallel, no_mode = given->mode || split;
  bool no_filter = materialized || o->metrics || split, no_metrics = o->lce_filter > 0 || split;
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(settings, option_name(keys[i]));
    bool is_mode = keys[i] == KEY_FUSED || keys[i] == KEY_MATERIALIZED;
    bool overruled = given->seen[keys[i] - KEY_MODEL] || (is_mode && no_mode) ||
                     (keys[i] == KEY_CHUNK && other_chunk) || (keys[i] == KEY_FILTER && no_filter) ||
                     (keys[i] == KEY_METRICS && no_metrics);
    bool is_master = keys[i] == KEY_MASTER || keys[i] == KEY_NO_MASTER;
    overruled |= is_master && (given->seen[KEY_MASTER - KEY_MODEL] || given->seen[KEY_NO_MASTER - KEY_MODEL]);
    for (size_t k = 0; k < sizeof dtype_keys / sizeof *dtype_keys; k++)
      overruled |= keys[i] == dtype_keys[k] && !from_gpu;
    if (cJSON_IsString(value) && !overruled) remember(o, option_name(keys[i]), value->valuestring);
  }
  o->dtypes_remembered = from_gpu && !dtypes_given;
  if (!o->data_count) remember_paths(o, "data", "data_paths");
  if (!o->val_data_count && !o->data_count) remember_paths(o, "val-data", "val_data_paths");
}

// Once more, with what the checkpoint remembers put before what was given.
static Parsed parse_resumed(Options *o, const Parsed *given, int argc, char **argv) {
  remember_settings(o, given);
  int remembered = (int)o->remembered_count, count = argc + remembered;
  char **all = calloc((size_t)count + 1, sizeof *all);
  if (!all) fail("out of host memory for %d options", count);
  all[0] = argv[0];
  for (int i = 0; i < remembered; i++) all[1 + i] = o->remembered[i];
  for (int i = 1; i < argc; i++) all[remembered + i] = argv[i];
  Options before = *o;
  free(o->data);
  free(o->val_data);
  Parsed p = parse(o, count, all);
  free(all);
  o->origin = before.origin;
  o->resumed_from = before.resumed_from;
  o->first_step = before.first_step;
  o->dtypes_remembered = before.dtypes_remembered;
  o->remembered = before.remembered;
  o->remembered_count = before.remembered_count;
  return p;
}

void options_parse(Options *o, int argc, char **argv) {
  Parsed p = parse(o, argc, argv);
  if (o->eval_only) check_eval_only(o, &p);
  resume_find(o);
  if (o->resumed_from) p = parse_resumed(o, &p, argc, argv);
  o->mode = p.mode ? (LceMode)(p.mode - 1) : LCE_FUSED;
  settle_model(o, &p);
  settle_ranks(o);
  settle_job(o, &p);
  // Dtypes are settled when the device is known; until then COUNT says that nothing was given.
  o->dtype = p.dtype ? (Dtype)(p.dtype - 1) : DTYPE_COUNT;
  o->dtypes.grad = p.grad_dtype ? (Dtype)(p.grad_dtype - 1) : DTYPE_COUNT;
  o->dtypes.moment = p.moment_dtype ? (Dtype)(p.moment_dtype - 1) : DTYPE_F32;
}

void options_resolve_dtypes(Options *o, bool cuda) {
  o->on_cuda = cuda;
  if (!cuda && o->dtypes_remembered) { // a GPU's run goes on here in fp32
    o->dtype = o->dtypes.grad = o->dtypes.moment = DTYPE_F32;
    o->dtypes.master = true;
  }
  if (o->dtype == DTYPE_COUNT) o->dtype = cuda ? DTYPE_BF16 : DTYPE_F32;
  if (o->dtypes.grad == DTYPE_COUNT) o->dtypes.grad = o->dtype;
  if (!cuda && (o->dtype != DTYPE_F32 || o->dtypes.grad != DTYPE_F32 || o->dtypes.moment != DTYPE_F32))
    fail("the CPU computes in fp32 only; leave out --dtype, --grad-dtype and --moment-dtype, or use --device "
         "cuda");
  o->dtypes.weight = o->dtype;
  if (o->save_dtype == DTYPE_COUNT) o->save_dtype = o->dtype;
  if (o->dtype == DTYPE_F32) o->dtypes.master = false; // the weights are their own master
}

int64_t options_default_chunk(int64_t tokens, bool cuda) {
  const int64_t least_on_cuda = 1024;
  int64_t chunk = lce_default_chunk(tokens);
  return cuda && chunk < least_on_cuda ? least_on_cuda : chunk;
}

void options_resolve_chunk(Options *o, const Backend *backend) {
  int64_t tokens = o->batch * o->seq_len;
  bool cuda = backend->device == ON_CUDA;
  if (o->lce_memory) {
    size_t least;
    o->lce_chunk = plan_chunk_within(o, backend->device, (size_t)o->lce_memory << 20, &least);
    if (!o->lce_chunk)
      fail("--lce-memory %lld: even a chunk of one token needs %zu MiB at this vocabulary; give at least "
           "that",
           (long long)o->lce_memory, (least + (1 << 20) - 1) >> 20);
  }
  if (!o->lce_chunk) o->lce_chunk = options_default_chunk(tokens, cuda);
}

void options_free(Options *o) {
  free(o->data);
  free(o->val_data);
  free(o->origin);
  cJSON_Delete(o->resumed_from);
  for (int64_t i = 0; i < o->remembered_count; i++) free(o->remembered[i]);
  free(o->remembered);
  *o = (Options){0};
}
