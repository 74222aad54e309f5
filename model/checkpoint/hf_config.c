#include "model/checkpoint/hf_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"

// --- Hugging Face's members --------------------------------------------------------------------------------

typedef enum { SIZE, NUMBER, FLAG, TEXT } MemberKind; // int64_t, double, bool, const char *

enum { GPT2 = 1 << FAMILY_GPT2, LLAMA = 1 << FAMILY_LLAMA };

typedef struct {
  const char *names[2]; // of GPT-2 and of Llama; NULL: the family has none
  MemberKind kind;
  int required;  // GPT2, LLAMA
  size_t offset; // in ModelConfig or RopeScaling
} Member;

#define CONFIG(member) offsetof(ModelConfig, member)
#define ROPE(member, kind)                                                                                   \
  { {NULL, #member}, kind, 0, offsetof(RopeScaling, member) }

static const Member config_members[] = {
    {{"vocab_size", "vocab_size"}, SIZE, GPT2 | LLAMA, CONFIG(vocab_size)},
    {{"n_embd", "hidden_size"}, SIZE, GPT2 | LLAMA, CONFIG(hidden_size)},
    {{"n_inner", "intermediate_size"}, SIZE, LLAMA, CONFIG(intermediate_size)},
    {{"n_layer", "num_hidden_layers"}, SIZE, GPT2 | LLAMA, CONFIG(num_hidden_layers)},
    {{"n_head", "num_attention_heads"}, SIZE, GPT2 | LLAMA, CONFIG(num_attention_heads)},
    {{NULL, "num_key_value_heads"}, SIZE, 0, CONFIG(num_key_value_heads)},
    {{NULL, "head_dim"}, SIZE, 0, CONFIG(head_dim)},
    {{"n_positions", "max_position_embeddings"}, SIZE, GPT2, CONFIG(max_position_embeddings)},
    {{"layer_norm_epsilon", "rms_norm_eps"}, NUMBER, 0, CONFIG(norm_epsilon)},
    {{NULL, "rope_theta"}, NUMBER, 0, CONFIG(rope_theta)},
    {{"initializer_range", "initializer_range"}, NUMBER, 0, CONFIG(initializer_range)},
    {{"tie_word_embeddings", "tie_word_embeddings"}, FLAG, 0, CONFIG(tie_word_embeddings)},
    {{NULL, "attention_bias"}, FLAG, 0, CONFIG(attention_bias)},
    {{NULL, "mlp_bias"}, FLAG, 0, CONFIG(mlp_bias)},
    // Not part of these architectures in transformers, which ignores unknown members.
    {{"final_logit_softcapping", "final_logit_softcapping"}, NUMBER, 0, CONFIG(final_logit_softcapping)},
    {{NULL}, SIZE, 0, 0}};

static const Member rope_members[] = {ROPE(factor, NUMBER),
                                      ROPE(low_freq_factor, NUMBER),
                                      ROPE(high_freq_factor, NUMBER),
                                      ROPE(original_max_position_embeddings, SIZE),
                                      {{NULL}, SIZE, 0, 0}};

// What this program computes in one way alone: the value that the member must have, and has when absent.
static const struct {
  ModelFamily family;
  const char *name, *text, *synonym; // text NULL: true or false
  bool flag;
} fixed_members[] = {{FAMILY_GPT2, "activation_function", "gelu_new", "gelu_pytorch_tanh", false},
                     {FAMILY_GPT2, "scale_attn_weights", NULL, NULL, true},
                     {FAMILY_GPT2, "scale_attn_by_inverse_layer_idx", NULL, NULL, false},
                     {FAMILY_GPT2, "add_cross_attention", NULL, NULL, false},
                     {FAMILY_LLAMA, "hidden_act", "silu", "swish", false}};

static const char *const model_types[] = {[FAMILY_GPT2] = "gpt2", [FAMILY_LLAMA] = "llama"};
static const char *const architectures[] = {"GPT2LMHeadModel", "LlamaForCausalLM"};

// --- reading -----------------------------------------------------------------------------------------------

// An absent or null member leaves *value as it is.
static bool read_member(const cJSON *json, const char *name, MemberKind kind, void *value, Reason *reason) {
  static const char *const wanted[] = {"a whole number from 1 to 2147483647", "a number above 0",
                                       "true or false", "a text"};
  const cJSON *item = json_member(json, name);
  if (!item) return true;
  double number = cJSON_IsNumber(item) ? item->valuedouble : 0;
  const bool good[] = {number >= 1 && number <= INT32_MAX && number == floor(number),
                       number > 0 && isfinite(number), cJSON_IsBool(item), cJSON_IsString(item)};
  if (!good[kind]) return refuse(reason, "%s is not %s", name, wanted[kind]);
  if (kind == SIZE) *(int64_t *)value = (int64_t)number;
  if (kind == NUMBER) *(double *)value = number;
  if (kind == FLAG) *(bool *)value = cJSON_IsTrue(item);
  if (kind == TEXT) *(const char **)value = item->valuestring;
  return true;
}

// The members that the family requires, or those that it does not.
static bool read_members(const cJSON *json, const Member *members, ModelFamily family, bool required,
                         void *to, Reason *reason) {
  for (const Member *m = members; m->names[FAMILY_LLAMA]; m++) {
    const char *name = m->names[family];
    if (!name || (m->required >> family & 1) != required) continue;
    if (!read_member(json, name, m->kind, (char *)to + m->offset, reason)) return false;
    if (required && !json_member(json, name)) return refuse(reason, "%s is missing", name);
  }
  return true;
}

static bool check_fixed(const cJSON *json, ModelFamily family, Reason *reason) {
  for (size_t i = 0; i < sizeof fixed_members / sizeof *fixed_members; i++) {
    const char *name = fixed_members[i].name, *want = fixed_members[i].text, *text = want;
    bool flag = fixed_members[i].flag;
    if (fixed_members[i].family != family) continue;
    if (!read_member(json, name, want ? TEXT : FLAG, want ? (void *)&text : &flag, reason)) return false;
    if (want && strcmp(text, want) && strcmp(text, fixed_members[i].synonym))
      return refuse(reason, "%s \"%.40s\" cannot be computed here, only \"%s\"", name, text, want);
    if (flag != fixed_members[i].flag)
      return refuse(reason, "%s %s cannot be computed here", name, flag ? "true" : "false");
  }
  return true;
}

// rope_scaling (transformers 4: null, or with rope_type or type) or rope_parameters (5: with rope_theta too).
static bool read_rope(const cJSON *json, ModelConfig *c, Reason *reason) {
  const char *place = json_member(json, "rope_parameters") ? "rope_parameters" : "rope_scaling";
  const cJSON *rope = json_member(json, place);
  RopeScaling *s = &c->rope_scaling;
  double rotated = 1;
  const char *type = "default";
  if (!rope) return true;
  if (!read_member(rope, "type", TEXT, &type, reason) ||
      !read_member(rope, "rope_type", TEXT, &type, reason) ||
      !read_member(rope, "rope_theta", NUMBER, &c->rope_theta, reason) ||
      !read_member(rope, "partial_rotary_factor", NUMBER, &rotated, reason))
    return false;
  if (rotated != 1) return refuse(reason, "partial_rotary_factor %g cannot be computed here", rotated);
  if (!strcmp(type, "default")) return true;
  if (strcmp(type, "llama3"))
    return refuse(reason, "rope_type \"%.40s\" cannot be computed here, only \"default\" and \"llama3\"",
                  type);
  if (!read_members(rope, rope_members, FAMILY_LLAMA, false, s, reason)) return false;
  return (s->factor > 0 && s->low_freq_factor > 0 && s->high_freq_factor > s->low_freq_factor &&
          s->original_max_position_embeddings > 0) ||
         refuse(reason,
                "%s lacks one of factor, low_freq_factor, high_freq_factor (the larger one) and "
                "original_max_position_embeddings",
                place);
}

// transformers' own defaults, those that follow from the required sizes included.
static bool set_defaults(const cJSON *json, ModelConfig *c, Reason *reason) {
  bool gpt2 = c->family == FAMILY_GPT2, divides = c->hidden_size % c->num_attention_heads == 0;
  if (gpt2 && !divides)
    return refuse(reason, "n_embd %lld does not divide into %lld heads", (long long)c->hidden_size,
                  (long long)c->num_attention_heads);
  if (!divides && !json_member(json, "head_dim"))
    return refuse(reason, "hidden_size %lld does not divide into %lld heads, and head_dim is missing",
                  (long long)c->hidden_size, (long long)c->num_attention_heads);
  c->head_dim = c->hidden_size / c->num_attention_heads;
  c->num_key_value_heads = c->num_attention_heads;
  c->norm = gpt2 ? NORM_LAYER : NORM_RMS;
  c->gated_mlp = !gpt2;
  c->learned_positions = c->attention_bias = c->mlp_bias = c->in_out_layout = c->tie_word_embeddings = gpt2;
  c->norm_epsilon = gpt2 ? 1e-5 : 1e-6;
  if (gpt2) c->intermediate_size = 4 * c->hidden_size;
  if (!gpt2) c->max_position_embeddings = 2048;
  return true;
}

static bool check_architecture(const cJSON *json, const ModelConfig *c, Reason *reason) {
  const cJSON *first = cJSON_GetArrayItem(json_member(json, "architectures"), 0);
  if (cJSON_IsString(first) && strcmp(first->valuestring, architectures[c->family]))
    return refuse(reason,
                  "architecture \"%.60s\" cannot be computed here, only LlamaForCausalLM and GPT2LMHeadModel",
                  first->valuestring);
  return !json_member(json, "quantization_config") ||
         refuse(reason, "the weights are quantized; take the model as it was before");
}

static bool read_config(const cJSON *json, ModelConfig *c, Reason *reason) {
  const char *type = "", *name = "";
  if (!read_member(json, "model_type", TEXT, &type, reason) ||
      !read_member(json, "_name_or_path", TEXT, &name, reason))
    return false;
  ModelFamily family = strcmp(type, "llama") ? FAMILY_GPT2 : FAMILY_LLAMA;
  if (strcmp(type, model_types[family]))
    return refuse(reason, "model_type \"%.40s\" cannot be computed here, only \"llama\" and \"gpt2\"", type);
  const char *slash = strrchr(name, '/');
  *c = (ModelConfig){.family = family, .rope_theta = 10000, .initializer_range = 0.02};
  const char *base = slash ? slash + 1 : name;
  text_escape(c->name, sizeof c->name, base, strlen(base));
  return read_members(json, config_members, family, true, c, reason) && set_defaults(json, c, reason) &&
         read_members(json, config_members, family, false, c, reason) && check_fixed(json, family, reason) &&
         (family == FAMILY_GPT2 || read_rope(json, c, reason)) && check_architecture(json, c, reason) &&
         model_config_possible(c, reason);
}

bool hf_config_parse(const char *text, size_t length, ModelConfig *config, Reason *reason) {
  cJSON *json = json_parse(text, length, reason);
  ModelConfig c;
  bool good = json && read_config(json, &c, reason);
  if (good) *config = c;
  cJSON_Delete(json);
  return good;
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
    text_escape(config.name, sizeof config.name, directory + begin, end - begin);
  }
  return config;
}

// --- writing -----------------------------------------------------------------------------------------------

static void set(cJSON *json, const char *name, cJSON *value) {
  cJSON_DeleteItemFromObjectCaseSensitive(json, name);
  cJSON_AddItemToObject(json, name, value);
}

// Members that are 0 are absent.
static void write_members(cJSON *json, const Member *members, ModelFamily family, const void *from) {
  for (const Member *m = members; m->names[FAMILY_LLAMA]; m++) {
    const void *value = (const char *)from + m->offset;
    const char *name = m->names[family];
    if (!name) continue;
    if (m->kind == SIZE) cJSON_AddNumberToObject(json, name, (double)*(const int64_t *)value);
    if (m->kind == FLAG) cJSON_AddBoolToObject(json, name, *(const bool *)value);
    if (m->kind == NUMBER && *(const double *)value > 0)
      cJSON_AddNumberToObject(json, name, *(const double *)value);
  }
}

// The spelling of transformers 4, which transformers 5 reads too.
static cJSON *describe(const ModelConfig *c) {
  cJSON *json = cJSON_CreateObject();
  set(json, "architectures", cJSON_CreateStringArray(&architectures[c->family], 1));
  cJSON_AddStringToObject(json, "model_type", model_types[c->family]);
  if (*c->name) cJSON_AddStringToObject(json, "_name_or_path", c->name);
  cJSON_AddNullToObject(json, "bos_token_id");
  cJSON_AddNullToObject(json, "eos_token_id");
  write_members(json, config_members, c->family, c);
  for (size_t i = 0; i < sizeof fixed_members / sizeof *fixed_members; i++)
    if (fixed_members[i].family == c->family && fixed_members[i].text)
      cJSON_AddStringToObject(json, fixed_members[i].name, fixed_members[i].text);
  if (c->family == FAMILY_GPT2) {
    cJSON_AddNumberToObject(json, "n_ctx", (double)c->max_position_embeddings);
    static const char *const dropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}; // there was none
    for (int i = 0; i < 3; i++) cJSON_AddNumberToObject(json, dropouts[i], 0);
  } else if (c->rope_scaling.factor > 0) {
    cJSON *scaling = cJSON_AddObjectToObject(json, "rope_scaling");
    cJSON_AddStringToObject(scaling, "rope_type", "llama3");
    write_members(scaling, rope_members, FAMILY_LLAMA, &c->rope_scaling);
  } else {
    cJSON_AddNullToObject(json, "rope_scaling");
  }
  return json;
}

char *hf_config_write(const ModelConfig *c, Dtype dtype, const char *original) {
  cJSON *json = original ? cJSON_Parse(original) : describe(c);
  const char *const names[] = {"torch_dtype", "dtype"}; // transformers 4 and 5
  for (int i = 0; i < 2; i++)
    set(json, names[i], cJSON_CreateString(dtype == DTYPE_BF16 ? "bfloat16" : "float32"));
  char *text = json_print(json, true);
  cJSON_Delete(json);
  return text;
}
