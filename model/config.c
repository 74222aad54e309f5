#include "model/config.h"

#include <stdio.h>
#include <string.h>

#include "base/fail.h"

typedef struct {
  const char *name;
  ModelFamily family;
  int64_t vocab, hidden, intermediate, layers, heads, key_value_heads, head_dim, positions;
  bool tied;
  double rope_factor;
  double learning_rate;
} Preset;

static const Preset presets[] = {
    // name         family        vocab   hidden  F      L   Q   K   D    positions tied  rope  lr
    {"gpt2-tiny", FAMILY_GPT2, 50257, 128, 512, 4, 4, 4, 32, 1024, true, 0, 2e-3},
    {"gpt2-124m", FAMILY_GPT2, 50257, 768, 3072, 12, 12, 12, 64, 1024, true, 0, 6e-4},
    {"gpt2-350m", FAMILY_GPT2, 50257, 1024, 4096, 24, 16, 16, 64, 1024, true, 0, 3e-4},
    {"gpt2-774m", FAMILY_GPT2, 50257, 1280, 5120, 36, 20, 20, 64, 1024, true, 0, 2.5e-4},
    {"gpt2-1558m", FAMILY_GPT2, 50257, 1600, 6400, 48, 25, 25, 64, 1024, true, 0, 2e-4},
    {"llama-tiny", FAMILY_LLAMA, 128256, 128, 384, 4, 4, 2, 32, 8192, true, 0, 2e-3},
    {"llama-1b", FAMILY_LLAMA, 128256, 2048, 8192, 16, 32, 8, 64, 131072, true, 32, 3e-4},
    {"llama-3b", FAMILY_LLAMA, 128256, 3072, 8192, 28, 24, 8, 128, 131072, true, 32, 3e-4},
    {"llama-8b", FAMILY_LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, 131072, false, 8, 3e-4},
};
enum { PRESET_COUNT = sizeof presets / sizeof *presets };

const char *model_preset_names(void) {
  static char names[256];
  size_t length = 0;
  for (int i = 0; i < PRESET_COUNT; i++)
    length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", i ? ", " : "", presets[i].name);
  return names;
}

static const Preset *find(const char *name) {
  for (int i = 0; i < PRESET_COUNT; i++)
    if (strcmp(presets[i].name, name) == 0) return &presets[i];
  fail("no model preset is called '%s'; there are %s", name, model_preset_names());
}

double model_preset_learning_rate(const char *name) {
  return find(name)->learning_rate;
}

int64_t model_default_seq_len(const ModelConfig *c) {
  int64_t length = c->hidden_size < 512 ? 128 : c->family == FAMILY_GPT2 ? 1024 : 2048;
  return length < c->max_position_embeddings ? length : c->max_position_embeddings;
}

ModelConfig model_preset(const char *name) {
  const Preset *p = find(name);
  bool gpt2 = p->family == FAMILY_GPT2;
  ModelConfig config = {.family = p->family,
                        .vocab_size = p->vocab,
                        .hidden_size = p->hidden,
                        .intermediate_size = p->intermediate,
                        .num_hidden_layers = p->layers,
                        .num_attention_heads = p->heads,
                        .num_key_value_heads = p->key_value_heads,
                        .head_dim = p->head_dim,
                        .max_position_embeddings = p->positions,
                        .norm = gpt2 ? NORM_LAYER : NORM_RMS,
                        .learned_positions = gpt2,
                        .gated_mlp = !gpt2,
                        .attention_bias = gpt2,
                        .mlp_bias = gpt2,
                        .in_out_layout = gpt2,
                        .tie_word_embeddings = p->tied,
                        .norm_epsilon = 1e-5,
                        .rope_theta = 500000,
                        .initializer_range = 0.02};
  if (p->rope_factor > 0)
    config.rope_scaling = (RopeScaling){.factor = p->rope_factor,
                                        .low_freq_factor = 1,
                                        .high_freq_factor = 4,
                                        .original_max_position_embeddings = 8192};
  snprintf(config.name, sizeof config.name, "%s", name);
  return config;
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
               {"rope_theta", c->rope_theta, MIN_ROPE_THETA, MAX_ROPE_THETA},
               {"final_logit_softcapping", c->final_logit_softcapping, 0, MAX_SOFTCAP}};
  enum { WHOLE = 8 }; // the first are whole numbers
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (!(sizes[i].value >= sizes[i].min && sizes[i].value <= sizes[i].max))
      return refuse(reason, "a model cannot have %s %.15g; give a %s from %.15g to %.15g", sizes[i].name,
                    sizes[i].value, i < WHOLE ? "whole number" : "number", sizes[i].min, sizes[i].max);
  if (c->num_attention_heads % c->num_key_value_heads)
    return refuse(
        reason,
        "%lld attention heads cannot share %lld key/value heads evenly; choose --num-key-value-heads that "
        "divides --num-attention-heads",
        (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
  if (c->family == FAMILY_GPT2 && c->num_key_value_heads != c->num_attention_heads)
    return refuse(
        reason,
        "GPT-2 has as many key/value heads as attention heads, not %lld and %lld; grouped heads are Llama's",
        (long long)c->num_key_value_heads, (long long)c->num_attention_heads);
  if (c->family == FAMILY_GPT2 && c->head_dim * c->num_attention_heads != c->hidden_size)
    return refuse(
        reason,
        "GPT-2's %lld heads of %lld do not make up a hidden size of %lld; change --num-attention-heads or "
        "--hidden-size",
        (long long)c->num_attention_heads, (long long)c->head_dim, (long long)c->hidden_size);
  if (!c->learned_positions && c->head_dim % 2)
    return refuse(
        reason,
        "rotary positions rotate pairs of elements, so head_dim cannot be %lld; choose an even --head-dim",
        (long long)c->head_dim);
  const double max = 1e15; // what is derived from these sizes then stays within 64 bits
  double q = (double)c->num_attention_heads * (double)c->head_dim, h = (double)c->hidden_size;
  double weights = (double)c->num_hidden_layers * h * (4 * q + 3 * (double)c->intermediate_size) +
                   h * (2 * (double)c->vocab_size + (double)c->max_position_embeddings);
  if (weights > max)
    return refuse(
        reason,
        "a model of %.1e weights is beyond anything this program counts (%.0e); lower --num-layers, --vocab "
        "or the widths",
        weights, max);
  return true;
}

void model_config_check(const ModelConfig *c) {
  Reason reason;
  if (!model_config_possible(c, &reason)) fail("%s", reason.text);
}
