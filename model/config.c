#include "model/config.h"

#include <stdio.h>
#include <string.h>

// A family that starts from Llama's names and choices.
#define LIKE_LLAMA(type, architecture, id, ...)                                                              \
  LLAMA_WITH(NAMES_LLAMA, 1e-6, type, architecture, id, __VA_ARGS__)
#define LLAMA_WITH(names, epsilon, type, architecture, id, ...)                                              \
  {                                                                                                          \
    names, type, architecture, "model.", "model.layers.", {".rotary_emb.inv_freq"}, {                        \
      .family = id, .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .norm_epsilon = epsilon,              \
      .rope_theta = 10000, .initializer_range = 0.02, __VA_ARGS__                                            \
    }                                                                                                        \
  }

const Family model_families[FAMILY_COUNT] = {
    [FAMILY_GPT2] = {NAMES_GPT2,
                     "gpt2",
                     "GPT2LMHeadModel",
                     "transformer.",
                     "transformer.h.",
                     {".attn.bias", ".attn.masked_bias"}, // the causal mask
                     {.norm = NORM_LAYER,
                      .activation = ACTIVATION_GELU,
                      .learned_positions = true,
                      .qkv_bias = true,
                      .out_bias = true,
                      .mlp_bias = true,
                      .in_out_layout = true,
                      .tie_word_embeddings = true,
                      .norm_epsilon = 1e-5,
                      .rope_theta = 10000,
                      .initializer_range = 0.02}},
    [FAMILY_LLAMA] = LIKE_LLAMA("llama", "LlamaForCausalLM", FAMILY_LLAMA, .max_position_embeddings = 2048),
    [FAMILY_MISTRAL] = LIKE_LLAMA("mistral", "MistralForCausalLM", FAMILY_MISTRAL, .num_key_value_heads = 8,
                                  .max_position_embeddings = 131072, .sliding_window = 4096),
    [FAMILY_QWEN2] = LIKE_LLAMA("qwen2", "Qwen2ForCausalLM", FAMILY_QWEN2, .num_key_value_heads = 32,
                                .max_position_embeddings = 32768, .sliding_window = 4096, .qkv_bias = true),
    [FAMILY_QWEN3] =
        LIKE_LLAMA("qwen3", "Qwen3ForCausalLM", FAMILY_QWEN3, .num_key_value_heads = 32, .head_dim = 128,
                   .max_position_embeddings = 32768, .sliding_window = 4096, .qk_norm = true),
    [FAMILY_PHI3] =
        LLAMA_WITH(NAMES_PHI3, 1e-5, "phi3", "Phi3ForCausalLM", FAMILY_PHI3, .max_position_embeddings = 4096),
    [FAMILY_OLMO2] = LLAMA_WITH(NAMES_OLMO2, 1e-5, "olmo2", "Olmo2ForCausalLM", FAMILY_OLMO2,
                                .max_position_embeddings = 2048, .qk_norm = true, .post_norm = true),
};

typedef struct {
  const char *name;
  ModelFamily family;
  int64_t vocab, hidden, intermediate, layers, heads, key_value_heads, head_dim, positions;
  bool tied;
  double rope_theta, rope_factor, norm_epsilon, learning_rate;
} Preset;

static const Preset presets[] = {
    // name, family, vocab, hidden, F, L, Q, K, D, positions, tied, rope theta and factor, norm epsilon, lr
    {"gpt2-tiny", FAMILY_GPT2, 50257, 128, 512, 4, 4, 4, 32, 1024, true, 1e4, 0, 1e-5, 2e-3},
    {"gpt2-124m", FAMILY_GPT2, 50257, 768, 3072, 12, 12, 12, 64, 1024, true, 1e4, 0, 1e-5, 6e-4},
    {"gpt2-350m", FAMILY_GPT2, 50257, 1024, 4096, 24, 16, 16, 64, 1024, true, 1e4, 0, 1e-5, 3e-4},
    {"gpt2-774m", FAMILY_GPT2, 50257, 1280, 5120, 36, 20, 20, 64, 1024, true, 1e4, 0, 1e-5, 2.5e-4},
    {"gpt2-1558m", FAMILY_GPT2, 50257, 1600, 6400, 48, 25, 25, 64, 1024, true, 1e4, 0, 1e-5, 2e-4},
    {"llama-tiny", FAMILY_LLAMA, 128256, 128, 384, 4, 4, 2, 32, 8192, true, 5e5, 0, 1e-5, 2e-3},
    {"llama-1b", FAMILY_LLAMA, 128256, 2048, 8192, 16, 32, 8, 64, 131072, true, 5e5, 32, 1e-5, 3e-4},
    {"llama-3b", FAMILY_LLAMA, 128256, 3072, 8192, 28, 24, 8, 128, 131072, true, 5e5, 32, 1e-5, 3e-4},
    {"llama-8b", FAMILY_LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, 131072, false, 5e5, 8, 1e-5, 3e-4},
    {"mistral-7b", FAMILY_MISTRAL, 32768, 4096, 14336, 32, 32, 8, 128, 32768, false, 1e6, 0, 1e-5, 3e-4},
    {"qwen3-0.6b", FAMILY_QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, 40960, true, 1e6, 0, 1e-6, 3e-4},
    {"qwen3-1.7b", FAMILY_QWEN3, 151936, 2048, 6144, 28, 16, 8, 128, 40960, true, 1e6, 0, 1e-6, 3e-4},
    {"qwen3-4b", FAMILY_QWEN3, 151936, 2560, 9728, 36, 32, 8, 128, 40960, true, 1e6, 0, 1e-6, 3e-4},
    {"olmo2-1b", FAMILY_OLMO2, 100352, 2048, 8192, 16, 16, 16, 128, 4096, false, 5e5, 0, 1e-6, 3e-4},
    {"olmo2-7b", FAMILY_OLMO2, 100352, 4096, 11008, 32, 32, 32, 128, 4096, false, 5e5, 0, 1e-6, 3e-4},
};
enum { PRESET_COUNT = sizeof presets / sizeof *presets };

const char *model_preset_names(const char *begin) {
  static char names[256];
  size_t length = 0;
  *names = 0;
  for (int i = 0; i < PRESET_COUNT; i++)
    if (!strncmp(presets[i].name, begin, strlen(begin)))
      length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", length ? ", " : "",
                                 presets[i].name);
  return names;
}

static const Preset *find(const char *name) {
  for (int i = 0; i < PRESET_COUNT; i++)
    if (strcmp(presets[i].name, name) == 0) return &presets[i];
  const char *begin = *model_preset_names(name) ? name : "";
  fail("no model preset is called '%s'; there are %s", name, model_preset_names(begin));
}

double model_preset_learning_rate(const char *name) {
  return find(name)->learning_rate;
}

int64_t model_default_seq_len(const ModelConfig *c) {
  int64_t length = c->hidden_size < 512 ? 256 : c->family == FAMILY_GPT2 ? 1024 : 2048;
  return min_i64(length, model_max_seq_len(c));
}

int64_t model_max_seq_len(const ModelConfig *c) {
  return min_i64(c->max_position_embeddings, c->sliding_window ? c->sliding_window : INT64_MAX);
}

int64_t model_rotary_dim(const ModelConfig *c) {
  return c->partial_rotary_factor > 0 ? (int64_t)((double)c->head_dim * c->partial_rotary_factor)
                                      : c->head_dim;
}

void model_check_seq_len(const ModelConfig *c, int64_t seq_len) {
  if (seq_len > c->max_position_embeddings)
    fail("--seq-len %lld is longer than the %lld positions of %s; lower it, or %s --max-position-embeddings",
         (long long)seq_len, (long long)c->max_position_embeddings, c->name,
         c->learned_positions ? "train a new model with more" : "raise");
  if (seq_len > model_max_seq_len(c))
    fail("--seq-len %lld is longer than the sliding window of %lld tokens through which %s attends, and only "
         "full attention is computed here; lower it to the window",
         (long long)seq_len, (long long)c->sliding_window, c->name);
}

ModelConfig model_preset(const char *name) {
  const Preset *p = find(name);
  ModelConfig config = model_families[p->family].config;
  config.vocab_size = p->vocab;
  config.hidden_size = p->hidden;
  config.intermediate_size = p->intermediate;
  config.num_hidden_layers = p->layers;
  config.num_attention_heads = p->heads;
  config.num_key_value_heads = p->key_value_heads;
  config.head_dim = p->head_dim;
  config.max_position_embeddings = p->positions;
  config.sliding_window = 0;
  config.tie_word_embeddings = p->tied;
  config.norm_epsilon = p->norm_epsilon;
  config.rope_theta = p->rope_theta;
  if (p->rope_factor > 0)
    config.rope_scaling = (RopeScaling){.factor = p->rope_factor,
                                        .low_freq_factor = 1,
                                        .high_freq_factor = 4,
                                        .original_max_position_embeddings = 8192};
  snprintf(config.name, sizeof config.name, "%s", name);
  return config;
}

void model_resize(ModelConfig *c, const ModelConfig *given) {
  const Preset *p = find(c->name);
  if (c->num_attention_heads == p->heads && c->hidden_size == p->hidden) return;
  bool gpt2 = c->family == FAMILY_GPT2;
  if (gpt2 && !given->num_key_value_heads) c->num_key_value_heads = c->num_attention_heads;
  if (gpt2 && !given->intermediate_size) c->intermediate_size = 4 * c->hidden_size;
  if (given->head_dim || model_families[c->family].config.head_dim) return; // Qwen3 has its own
  if (c->hidden_size % c->num_attention_heads)
    fail("a hidden size of %lld does not divide into %lld heads; change one, or give --head-dim",
         (long long)c->hidden_size, (long long)c->num_attention_heads);
  c->head_dim = c->hidden_size / c->num_attention_heads;
}

bool model_config_possible(const ModelConfig *c, Reason *reason) {
  const struct {
    const char *name;
    double value, min, max;
  } sizes[] = {{"vocab_size", (double)c->vocab_size, 1, INT32_MAX},
               {"hidden_size", (double)c->hidden_size, 1, INT32_MAX},
               {"intermediate_size", (double)c->intermediate_size, 1, INT32_MAX},
               {"num_hidden_layers", (double)c->num_hidden_layers, 1, MAX_LAYERS},
               {"num_attention_heads", (double)c->num_attention_heads, 1, INT32_MAX},
               {"num_key_value_heads", (double)c->num_key_value_heads, 1, INT32_MAX},
               {"head_dim", (double)c->head_dim, 1, INT32_MAX},
               {"max_position_embeddings", (double)c->max_position_embeddings, 1, INT32_MAX},
               {"norm_epsilon", c->norm_epsilon, MIN_EPSILON, 1},
               {"rope_theta", c->rope_theta, MIN_ROPE_THETA, MAX_ROPE_THETA},
               {"final_logit_softcapping", c->final_logit_softcapping, 0, MAX_SOFTCAP}};
  enum { WHOLE = 8 }; // the first are whole numbers
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (!(sizes[i].value >= sizes[i].min && sizes[i].value <= sizes[i].max))
      return refuse(reason, "a model cannot have %s %.15g; give a %s from %.15g to %.15g", sizes[i].name,
                    sizes[i].value, i < WHOLE ? "whole number" : "number", sizes[i].min, sizes[i].max);
  long long hidden = c->hidden_size, heads = c->num_attention_heads, shared = c->num_key_value_heads,
            dim = c->head_dim;
  bool gpt2 = c->family == FAMILY_GPT2;
  if (heads % shared)
    return refuse(reason,
                  "%lld attention heads cannot share %lld key/value heads evenly; choose "
                  "--num-key-value-heads that divides --num-attention-heads",
                  heads, shared);
  if (gpt2 && shared != heads)
    return refuse(
        reason,
        "GPT-2 has as many key/value heads as attention heads, not %lld and %lld; grouped heads are "
        "Llama's",
        shared, heads);
  if (gpt2 && dim * heads != hidden)
    return refuse(reason,
                  "GPT-2's %lld heads of %lld do not make up a hidden size of %lld; change "
                  "--num-attention-heads or --hidden-size",
                  heads, dim, hidden);
  if (!c->learned_positions && dim % 2)
    return refuse(
        reason,
        "rotary positions rotate pairs of elements, so head_dim cannot be %lld; choose an even --head-dim",
        dim);
  int64_t rotary = model_rotary_dim(c);
  if (!c->learned_positions && (rotary % 2 || rotary < 2 || rotary > dim))
    return refuse(reason,
                  "partial_rotary_factor %g rotates %lld of a head's %lld elements; give one of at most 1 "
                  "that makes them even",
                  c->partial_rotary_factor, (long long)rotary, dim);
  const double max = 1e15; // products of these sizes then stay within 64 bits
  double weights = (double)c->num_hidden_layers * (double)hidden *
                       (4 * (double)heads * (double)dim + 3 * (double)c->intermediate_size) +
                   (double)hidden * (2 * (double)c->vocab_size + (double)c->max_position_embeddings);
  return weights <= max ||
         refuse(reason,
                "a model of %.1e weights is beyond anything this program counts (%.0e); lower --num-layers, "
                "--vocab or the widths",
                weights, max);
}

void model_config_check(const ModelConfig *c) {
  Reason reason;
  if (!model_config_possible(c, &reason)) fail("%s", reason.text);
}
