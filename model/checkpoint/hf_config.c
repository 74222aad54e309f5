#include "model/checkpoint/hf_config.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "model/checkpoint/files.h"
#include "model/checkpoint/json.h"

// --- reading -----------------------------------------------------------------------------------------------

// A size that has no default.
static void need_size(JsonMembers *from, const char *name, int64_t *value) {
  *value = 0;
  json_size(from, name, value);
  if (from->ok && !*value) from->ok = refuse(from->reason, "%s is missing", name);
}

static void need_text(JsonMembers *from, const char *name, const char *implied, const char *wanted,
                      const char * or) {
  const char *text = implied;
  json_text(from, name, &text);
  if (from->ok && strcmp(text, wanted) && strcmp(text, or))
    from->ok = refuse(from->reason, "%s \"%.40s\" cannot be computed here, only \"%s\"", name, text, wanted);
}

static void need_bool(JsonMembers *from, const char *name, bool implied, bool wanted) {
  bool value = implied;
  json_bool(from, name, &value);
  if (from->ok && value != wanted)
    from->ok = refuse(from->reason, "%s %s cannot be computed here", name, value ? "true" : "false");
}

// rope_scaling (transformers 4: null, or an object with rope_type or type) or rope_parameters (transformers 5:
// an object with rope_theta too).
static void read_rope(JsonMembers *from, ModelConfig *c) {
  c->rope_theta = 10000;
  json_number(from, "rope_theta", &c->rope_theta);
  const char *place = json_member(from, "rope_parameters") ? "rope_parameters" : "rope_scaling";
  JsonMembers rope = {.object = json_member(from, place), .reason = from->reason, .ok = from->ok};
  if (!rope.object || !rope.ok) return;
  double rotated = 1;
  const char *type = "default";
  json_text(&rope, "type", &type);
  json_text(&rope, "rope_type", &type);
  json_number(&rope, "rope_theta", &c->rope_theta);
  json_number(&rope, "partial_rotary_factor", &rotated);
  if (rope.ok && rotated != 1)
    rope.ok = refuse(rope.reason, "partial_rotary_factor %g cannot be computed here", rotated);
  if (rope.ok && !strcmp(type, "llama3")) {
    RopeScaling *s = &c->rope_scaling;
    json_number(&rope, "factor", &s->factor);
    json_number(&rope, "low_freq_factor", &s->low_freq_factor);
    json_number(&rope, "high_freq_factor", &s->high_freq_factor);
    json_size(&rope, "original_max_position_embeddings", &s->original_max_position_embeddings);
    bool sound = s->factor > 0 && s->low_freq_factor > 0 && s->high_freq_factor > s->low_freq_factor &&
                 s->original_max_position_embeddings > 0;
    if (rope.ok && !sound)
      rope.ok = refuse(rope.reason,
                       "%s lacks one of factor, low_freq_factor, high_freq_factor (the larger one) and "
                       "original_max_position_embeddings",
                       place);
  } else if (rope.ok && strcmp(type, "default")) {
    rope.ok = refuse(rope.reason,
                     "rope_type \"%.40s\" cannot be computed here, only \"default\" and \"llama3\"", type);
  }
  from->ok = rope.ok;
}

// Not part of these architectures in transformers, which leaves a key that it does not know alone.
static void read_softcap(JsonMembers *from, ModelConfig *c) {
  json_number(from, "final_logit_softcapping", &c->final_logit_softcapping);
  if (from->ok && !(c->final_logit_softcapping >= 0 && c->final_logit_softcapping <= 1e6))
    from->ok = refuse(from->reason, "final_logit_softcapping is %g, which is not 0 to 1e6",
                      c->final_logit_softcapping);
}

static void read_llama(JsonMembers *from, ModelConfig *c) {
  c->family = FAMILY_LLAMA;
  c->norm = NORM_RMS;
  c->gated_mlp = true;
  c->norm_epsilon = 1e-6;
  c->max_position_embeddings = 2048;
  need_size(from, "vocab_size", &c->vocab_size);
  need_size(from, "hidden_size", &c->hidden_size);
  need_size(from, "intermediate_size", &c->intermediate_size);
  need_size(from, "num_hidden_layers", &c->num_hidden_layers);
  need_size(from, "num_attention_heads", &c->num_attention_heads);
  c->num_key_value_heads = c->num_attention_heads;
  json_size(from, "num_key_value_heads", &c->num_key_value_heads);
  if (from->ok && !json_member(from, "head_dim") && c->hidden_size % c->num_attention_heads)
    from->ok =
        refuse(from->reason, "hidden_size %lld does not divide into %lld heads, and head_dim is missing",
               (long long)c->hidden_size, (long long)c->num_attention_heads);
  if (from->ok) c->head_dim = c->hidden_size / c->num_attention_heads;
  json_size(from, "head_dim", &c->head_dim);
  json_size(from, "max_position_embeddings", &c->max_position_embeddings);
  json_number(from, "rms_norm_eps", &c->norm_epsilon);
  read_softcap(from, c);
  json_bool(from, "tie_word_embeddings", &c->tie_word_embeddings);
  json_bool(from, "attention_bias", &c->attention_bias);
  json_bool(from, "mlp_bias", &c->mlp_bias);
  need_text(from, "hidden_act", "silu", "silu", "swish");
  read_rope(from, c);
}

static void read_gpt2(JsonMembers *from, ModelConfig *c) {
  c->family = FAMILY_GPT2;
  c->norm = NORM_LAYER;
  c->learned_positions = c->attention_bias = c->mlp_bias = c->in_out_layout = c->tie_word_embeddings = true;
  c->norm_epsilon = 1e-5;
  need_size(from, "vocab_size", &c->vocab_size);
  need_size(from, "n_embd", &c->hidden_size);
  need_size(from, "n_layer", &c->num_hidden_layers);
  need_size(from, "n_head", &c->num_attention_heads);
  need_size(from, "n_positions", &c->max_position_embeddings);
  if (from->ok && c->hidden_size % c->num_attention_heads)
    from->ok = refuse(from->reason, "n_embd %lld does not divide into %lld heads", (long long)c->hidden_size,
                      (long long)c->num_attention_heads);
  if (from->ok) c->head_dim = c->hidden_size / c->num_attention_heads;
  c->num_key_value_heads = c->num_attention_heads;
  c->intermediate_size = 4 * c->hidden_size;
  json_size(from, "n_inner", &c->intermediate_size);
  if (from->ok && c->intermediate_size > INT32_MAX)
    from->ok = refuse(from->reason, "n_embd %lld makes the MLP too wide", (long long)c->hidden_size);
  json_number(from, "layer_norm_epsilon", &c->norm_epsilon);
  read_softcap(from, c);
  json_bool(from, "tie_word_embeddings", &c->tie_word_embeddings);
  need_text(from, "activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh");
  need_bool(from, "scale_attn_weights", true, true);
  need_bool(from, "scale_attn_by_inverse_layer_idx", false, false);
  need_bool(from, "add_cross_attention", false, false);
}

static const char *architecture_of(const ModelConfig *c) {
  return c->family == FAMILY_GPT2 ? "GPT2LMHeadModel" : "LlamaForCausalLM";
}

static void check_architecture(JsonMembers *from, const ModelConfig *c) {
  const cJSON *first = cJSON_GetArrayItem(json_member(from, "architectures"), 0);
  if (from->ok && cJSON_IsString(first) && strcmp(first->valuestring, architecture_of(c)))
    from->ok =
        refuse(from->reason,
               "architecture \"%.60s\" cannot be computed here, only LlamaForCausalLM and GPT2LMHeadModel",
               first->valuestring);
  if (from->ok && json_member(from, "quantization_config"))
    from->ok = refuse(from->reason, "the weights are quantized; take the model as it was before");
}

bool hf_config_parse(const char *text, size_t length, ModelConfig *config, Reason *reason) {
  cJSON *json = json_parse(text, length, reason);
  if (!json) return false;
  JsonMembers from = {.object = json, .reason = reason, .ok = true};
  ModelConfig c = {.rope_theta = 10000, .initializer_range = 0.02};
  const char *type = "", *name = "";
  json_text(&from, "model_type", &type);
  json_text(&from, "_name_or_path", &name);
  json_number(&from, "initializer_range", &c.initializer_range);
  if (!strcmp(type, "llama"))
    read_llama(&from, &c);
  else if (!strcmp(type, "gpt2"))
    read_gpt2(&from, &c);
  else if (from.ok)
    from.ok =
        refuse(reason, "model_type \"%.40s\" cannot be computed here, only \"llama\" and \"gpt2\"", type);
  check_architecture(&from, &c);
  const char *slash = strrchr(name, '/');
  snprintf(c.name, sizeof c.name, "%s", slash ? slash + 1 : name);
  if (from.ok) *config = c;
  cJSON_Delete(json);
  return from.ok;
}

ModelConfig hf_config_read(const char *directory) {
  char *path = path_join(directory, "config.json");
  size_t length;
  char *text = file_read(path, &length);
  if (!text) fail("%s does not exist; name a directory that holds a model in Hugging Face's layout", path);
  ModelConfig config;
  Reason reason;
  if (!hf_config_parse(text, length, &config, &reason)) fail("%s: %s", path, reason.text);
  free(text);
  free(path);
  if (!*config.name) {
    size_t end = strlen(directory);
    while (end > 1 && directory[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && directory[begin - 1] != '/') begin--;
    snprintf(config.name, sizeof config.name, "%.*s", (int)(end - begin), directory + begin);
  }
  return config;
}

// --- writing -----------------------------------------------------------------------------------------------

static void set(cJSON *json, const char *name, cJSON *value) {
  cJSON_DeleteItemFromObjectCaseSensitive(json, name);
  cJSON_AddItemToObject(json, name, value);
}

static void set_number(cJSON *json, const char *name, double value) {
  set(json, name, cJSON_CreateNumber(value));
}

// The spelling of transformers 4, which transformers 5 reads too.
static cJSON *describe(const ModelConfig *c) {
  cJSON *json = cJSON_CreateObject();
  const char *architecture = architecture_of(c);
  set(json, "architectures", cJSON_CreateStringArray(&architecture, 1));
  set(json, "bos_token_id", cJSON_CreateNull());
  set(json, "eos_token_id", cJSON_CreateNull());
  set_number(json, "initializer_range", c->initializer_range);
  set(json, "tie_word_embeddings", cJSON_CreateBool(c->tie_word_embeddings));
  set_number(json, "vocab_size", (double)c->vocab_size);
  if (c->final_logit_softcapping > 0) set_number(json, "final_logit_softcapping", c->final_logit_softcapping);
  if (*c->name) set(json, "_name_or_path", cJSON_CreateString(c->name));
  if (c->family == FAMILY_GPT2) {
    set(json, "model_type", cJSON_CreateString("gpt2"));
    set(json, "activation_function", cJSON_CreateString("gelu_new"));
    set_number(json, "layer_norm_epsilon", c->norm_epsilon);
    set_number(json, "n_ctx", (double)c->max_position_embeddings);
    set_number(json, "n_embd", (double)c->hidden_size);
    set_number(json, "n_head", (double)c->num_attention_heads);
    set_number(json, "n_inner", (double)c->intermediate_size);
    set_number(json, "n_layer", (double)c->num_hidden_layers);
    set_number(json, "n_positions", (double)c->max_position_embeddings);
    // What training here did not have either.
    set_number(json, "attn_pdrop", 0);
    set_number(json, "embd_pdrop", 0);
    set_number(json, "resid_pdrop", 0);
    return json;
  }
  set(json, "model_type", cJSON_CreateString("llama"));
  set(json, "attention_bias", cJSON_CreateBool(c->attention_bias));
  set_number(json, "head_dim", (double)c->head_dim);
  set(json, "hidden_act", cJSON_CreateString("silu"));
  set_number(json, "hidden_size", (double)c->hidden_size);
  set_number(json, "intermediate_size", (double)c->intermediate_size);
  set_number(json, "max_position_embeddings", (double)c->max_position_embeddings);
  set(json, "mlp_bias", cJSON_CreateBool(c->mlp_bias));
  set_number(json, "num_attention_heads", (double)c->num_attention_heads);
  set_number(json, "num_hidden_layers", (double)c->num_hidden_layers);
  set_number(json, "num_key_value_heads", (double)c->num_key_value_heads);
  set_number(json, "rms_norm_eps", c->norm_epsilon);
  set_number(json, "rope_theta", c->rope_theta);
  cJSON *scaling = cJSON_CreateNull();
  if (c->rope_scaling.factor > 0) {
    cJSON_Delete(scaling);
    scaling = cJSON_CreateObject();
    set(scaling, "rope_type", cJSON_CreateString("llama3"));
    set_number(scaling, "factor", c->rope_scaling.factor);
    set_number(scaling, "low_freq_factor", c->rope_scaling.low_freq_factor);
    set_number(scaling, "high_freq_factor", c->rope_scaling.high_freq_factor);
    set_number(scaling, "original_max_position_embeddings",
               (double)c->rope_scaling.original_max_position_embeddings);
  }
  set(json, "rope_scaling", scaling);
  return json;
}

char *hf_config_write(const ModelConfig *c, Dtype dtype, const char *original) {
  cJSON *json = original ? cJSON_Parse(original) : describe(c);
  const char *name = dtype == DTYPE_BF16 ? "bfloat16" : "float32";
  set(json, "torch_dtype", cJSON_CreateString(name)); // transformers 4
  set(json, "dtype", cJSON_CreateString(name));       // transformers 5
  char *text = cJSON_Print(json);
  if (!text) fail("out of host memory for a config.json");
  cJSON_Delete(json);
  return text;
}
