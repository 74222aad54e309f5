#include "model/checkpoint/hf_config.h"

#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/text.h"

typedef enum {
  SIZE,   // int64_t
  NUMBER, // double
  FLAG,   // bool
  TEXT,   // const char *
  ONLY    // one computable value, also the one meant when absent, and a synonym
} MemberKind;

enum {
  GPT2 = 1 << FAMILY_GPT2,
  LLAMA = 1 << FAMILY_LLAMA,
  MISTRAL = 1 << FAMILY_MISTRAL,
  QWEN2 = 1 << FAMILY_QWEN2,
  QWEN3 = 1 << FAMILY_QWEN3,
  PHI3 = 1 << FAMILY_PHI3,
  OLMO2 = 1 << FAMILY_OLMO2,
  LATER = LLAMA | MISTRAL | QWEN2 | QWEN3 | PHI3 | OLMO2, // than GPT-2
  WINDOWED = MISTRAL | QWEN2 | QWEN3 | PHI3,
  REQUIRED = 1 << FAMILY_COUNT
};

typedef struct {
  const char *name;
  int families; // that have it
  MemberKind kind;
  size_t offset;              // in ModelConfig or RopeScaling
  const char *json, *synonym; // of ONLY, as they stand in the file
} Member;

#define CONFIG(member) .offset = offsetof(ModelConfig, member)
#define ROPE(member)   #member, GPT2 | LATER, .offset = offsetof(RopeScaling, member)

static const Member config_members[] = {
    {"vocab_size", GPT2 | LATER | REQUIRED, SIZE, CONFIG(vocab_size)},
    {"n_embd", GPT2 | REQUIRED, SIZE, CONFIG(hidden_size)},
    {"n_layer", GPT2 | REQUIRED, SIZE, CONFIG(num_hidden_layers)},
    {"n_head", GPT2 | REQUIRED, SIZE, CONFIG(num_attention_heads)},
    {"n_positions", GPT2 | REQUIRED, SIZE, CONFIG(max_position_embeddings)},
    {"n_inner", GPT2, SIZE, CONFIG(intermediate_size)},
    {"layer_norm_epsilon", GPT2, NUMBER, CONFIG(norm_epsilon)},
    {"hidden_size", LATER | REQUIRED, SIZE, CONFIG(hidden_size)},
    {"intermediate_size", LATER | REQUIRED, SIZE, CONFIG(intermediate_size)},
    {"num_hidden_layers", LATER | REQUIRED, SIZE, CONFIG(num_hidden_layers)},
    {"num_attention_heads", LATER | REQUIRED, SIZE, CONFIG(num_attention_heads)},
    {"num_key_value_heads", LATER, SIZE, CONFIG(num_key_value_heads)},
    {"head_dim", LATER, SIZE, CONFIG(head_dim)},
    {"max_position_embeddings", LATER, SIZE, CONFIG(max_position_embeddings)},
    {"sliding_window", WINDOWED, SIZE, CONFIG(sliding_window)},
    {"rms_norm_eps", LATER, NUMBER, CONFIG(norm_epsilon)},
    {"rope_theta", LATER, NUMBER, CONFIG(rope_theta)},
    {"partial_rotary_factor", PHI3, NUMBER, CONFIG(partial_rotary_factor)},
    {"attention_bias", LLAMA | QWEN3 | OLMO2, FLAG, CONFIG(qkv_bias)},
    {"attention_bias", LLAMA | QWEN3 | OLMO2, FLAG, CONFIG(out_bias)},
    {"mlp_bias", LLAMA, FLAG, CONFIG(mlp_bias)},
    {"initializer_range", GPT2 | LATER, NUMBER, CONFIG(initializer_range)},
    {"tie_word_embeddings", GPT2 | LATER, FLAG, CONFIG(tie_word_embeddings)},
    // Not part of these architectures in transformers, which ignores unknown members.
    {"final_logit_softcapping", GPT2 | LATER, NUMBER, CONFIG(final_logit_softcapping)},
    {"activation_function", GPT2, ONLY, .json = "\"gelu_new\"", .synonym = "\"gelu_pytorch_tanh\""},
    {"hidden_act", LATER, ONLY, .json = "\"silu\"", .synonym = "\"swish\""},
    {"scale_attn_weights", GPT2, ONLY, .json = "true"},
    {"scale_attn_by_inverse_layer_idx", GPT2, ONLY, .json = "false"},
    {"add_cross_attention", GPT2, ONLY, .json = "false"},
    {.name = NULL}};

static const Member rope_members[] = {{ROPE(factor), .kind = NUMBER},
                                      {ROPE(low_freq_factor), .kind = NUMBER},
                                      {ROPE(high_freq_factor), .kind = NUMBER},
                                      {ROPE(original_max_position_embeddings), .kind = SIZE},
                                      {.name = NULL}};

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

static bool check_member(const cJSON *json, const Member *m, Reason *reason) {
  const cJSON *item = json_member(json, m->name);
  if (!item) return true;
  char *value = json_print(item, false);
  bool good = !strcmp(value, m->json) || (m->synonym && !strcmp(value, m->synonym)) ||
              refuse(reason, "%s %.40s cannot be computed here, only %s", m->name, value, m->json);
  free(value);
  return good;
}

static bool read_members(const cJSON *json, const Member *members, ModelFamily family, void *to,
                         Reason *reason) {
  for (const Member *m = members; m->name; m++) {
    if (!(m->families >> family & 1)) continue;
    if (m->kind == ONLY ? !check_member(json, m, reason)
                        : !read_member(json, m->name, m->kind, (char *)to + m->offset, reason))
      return false;
    if (m->families & REQUIRED && !json_member(json, m->name))
      return refuse(reason, "%s is missing", m->name);
  }
  return true;
}

// rope_scaling (transformers 4: null, or with rope_type or type) or rope_parameters (5: with rope_theta too).
static bool read_rope(const cJSON *json, ModelConfig *c, Reason *reason) {
  const char *place = json_member(json, "rope_parameters") ? "rope_parameters" : "rope_scaling";
  const cJSON *rope = json_member(json, place), *item;
  RopeScaling *s = &c->rope_scaling;
  double rotated = 1;
  const char *type = NULL;
  if (!rope) return true;
  const cJSON *older = json_member(json, "rope_scaling"); // which transformers prefers
  if (older && older != rope && !cJSON_Compare(older, rope, true))
    return refuse(reason, "rope_parameters and rope_scaling differ; leave one of them out");
  if (!cJSON_IsObject(rope)) return refuse(reason, "%s is no object with a rope_type", place);
  if (!read_member(rope, "type", TEXT, &type, reason) ||
      !read_member(rope, "rope_type", TEXT, &type, reason) ||
      !read_member(rope, "rope_theta", NUMBER, &c->rope_theta, reason) ||
      !read_member(rope, "partial_rotary_factor", NUMBER, &rotated, reason))
    return false;
  if (json_member(rope, "partial_rotary_factor") && c->family == FAMILY_PHI3)
    c->partial_rotary_factor = rotated;
  else if (rotated != 1)
    return refuse(reason, "partial_rotary_factor %g cannot be computed here", rotated);
  // Another member without a type: a factor, or an object for each type of attention.
  cJSON_ArrayForEach(item, rope) {
    if (!type && json_member(rope, item->string) && strcmp(item->string, "rope_theta"))
      return refuse(reason, "%s has %.40s and no rope_type", place, item->string);
  }
  if (!type || !strcmp(type, "default")) return true;
  bool llama3 = !strcmp(type, "llama3"), dynamic = !strcmp(type, "dynamic");
  if (!llama3 && !dynamic && strcmp(type, "linear"))
    return refuse(reason,
                  "rope_type \"%.40s\" cannot be computed here, only default, linear, dynamic and llama3",
                  type);
  if (!read_members(rope, rope_members, c->family, s, reason)) return false;
  // As in transformers: the length beside rope_scaling goes first, then the one in it, then the model's.
  int64_t *length = &s->original_max_position_embeddings;
  if (!*length) *length = c->max_position_embeddings;
  if (!read_member(json, "original_max_position_embeddings", SIZE, length, reason)) return false;
  if (!llama3) *s = (RopeScaling){.factor = s->factor};
  if (!(s->factor > 0) || (llama3 && !(s->low_freq_factor > 0 && s->high_freq_factor > s->low_freq_factor)))
    return refuse(reason, "%s lacks %s", place,
                  llama3 ? "one of factor, low_freq_factor and high_freq_factor (the larger one)" : "factor");
  if (dynamic) *s = (RopeScaling){0}; // it scales beyond max_position_embeddings alone
  return true;
}

static bool is_null(const cJSON *json, const char *name) {
  return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(json, name));
}

// True if Qwen's attention is windowed in some layer: by layer_types or, without, from max_window_layers on.
static bool read_windowed(const cJSON *json, const ModelConfig *c, bool *windowed, Reason *reason) {
  const cJSON *type, *types = json_member(json, "layer_types"),
                     *from = json_member(json, "max_window_layers");
  if (!read_member(json, "use_sliding_window", FLAG, windowed, reason)) return false;
  if (from && !json_is_whole(from)) return refuse(reason, "max_window_layers is not a whole number");
  bool some = !types && (from ? from->valuedouble : 28) < (double)c->num_hidden_layers;
  cJSON_ArrayForEach(type, types) {
    some |= !cJSON_IsString(type) || strcmp(type->valuestring, "full_attention");
  }
  *windowed &= some;
  return true;
}

// Sets transformers' defaults that follow from other members.
static bool set_defaults(const cJSON *json, ModelConfig *c, Reason *reason) {
  bool windowed = c->family == FAMILY_MISTRAL || c->family == FAMILY_PHI3;
  if (!c->num_key_value_heads || is_null(json, "num_key_value_heads"))
    c->num_key_value_heads = c->num_attention_heads;
  if (!c->intermediate_size) c->intermediate_size = 4 * c->hidden_size; // GPT-2's
  if (!c->head_dim && c->hidden_size % c->num_attention_heads)
    return refuse(reason, "a hidden size of %lld does not divide into %lld heads", (long long)c->hidden_size,
                  (long long)c->num_attention_heads);
  if (!c->head_dim) c->head_dim = c->hidden_size / c->num_attention_heads;
  if (WINDOWED >> c->family & 1 && !windowed && !read_windowed(json, c, &windowed, reason)) return false;
  if (is_null(json, "sliding_window") || !windowed) c->sliding_window = 0;
  return true;
}

static bool check_architecture(const cJSON *json, const ModelConfig *c, Reason *reason) {
  const char *wanted = model_families[c->family].architecture;
  const char *first = cJSON_GetStringValue(cJSON_GetArrayItem(json_member(json, "architectures"), 0));
  if (first && strcmp(first, wanted))
    return refuse(reason, "architecture \"%.60s\" cannot be computed here, only %s", first, wanted);
  return !json_member(json, "quantization_config") ||
         refuse(reason, "the weights are quantized; take the model as it was before");
}

static bool read_config(const cJSON *json, ModelConfig *c, Reason *reason) {
  const char *type = "", *name = "";
  if (!read_member(json, "model_type", TEXT, &type, reason) ||
      !read_member(json, "_name_or_path", TEXT, &name, reason))
    return false;
  int family = 0;
  while (family < FAMILY_COUNT && strcmp(type, model_families[family].model_type)) family++;
  if (family == FAMILY_COUNT)
    return refuse(reason, "model_type \"%.40s\" cannot be computed here, only " FAMILY_NAMES, type);
  const char *slash = strrchr(name, '/');
  *c = model_families[family].config;
  const char *base = slash ? slash + 1 : name;
  text_escape(c->name, sizeof c->name, base, strlen(base));
  return read_members(json, config_members, c->family, c, reason) && set_defaults(json, c, reason) &&
         (c->family == FAMILY_GPT2 || read_rope(json, c, reason)) && check_architecture(json, c, reason) &&
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

bool hf_config_try_read(const char *directory, ModelConfig *config, Reason *reason) {
  Path path = path_in(directory, "config.json");
  size_t length;
  char *text = file_read(path.text, &length, reason);
  if (!text) return false;
  bool good =
      hf_config_parse(text, length, config, reason) || refuse(reason, "%s: %s", path.text, reason->text);
  free(text);
  if (!good || *config->name) return good;
  path = path_in(directory, "");
  const char *base = basename(path.text); // of a path that ends in slashes, too
  text_escape(config->name, sizeof config->name, base, strlen(base));
  return true;
}

ModelConfig hf_config_read(const char *directory) {
  ModelConfig config;
  Reason reason;
  if (hf_config_try_read(directory, &config, &reason)) return config;
  if (*reason.text) fail("%s", reason.text);
  fail("%s/config.json does not exist; name a directory that holds a model in Hugging Face's layout",
       directory);
}

static void set(cJSON *json, const char *name, cJSON *value) {
  cJSON_DeleteItemFromObjectCaseSensitive(json, name);
  cJSON_AddItemToObject(json, name, value);
}

// Members that are 0 are absent.
static void write_members(cJSON *json, const Member *members, ModelFamily family, const void *from) {
  for (const Member *m = members; m->name; m++) {
    const void *value = (const char *)from + m->offset;
    if (!(m->families >> family & 1)) continue;
    double number = 0;
    if (m->kind == SIZE) number = (double)*(const int64_t *)value;
    if (m->kind == NUMBER) number = *(const double *)value;
    if (number > 0) set(json, m->name, cJSON_CreateNumber(number));
    if (m->kind == FLAG) set(json, m->name, cJSON_CreateBool(*(const bool *)value));
    if (m->kind == ONLY && m->synonym) set(json, m->name, cJSON_CreateRaw(m->json));
  }
}

// The spelling of transformers 4, which transformers 5 reads too.
static cJSON *describe(const ModelConfig *c) {
  cJSON *json = cJSON_CreateObject();
  set(json, "architectures", cJSON_CreateStringArray(&model_families[c->family].architecture, 1));
  cJSON_AddStringToObject(json, "model_type", model_families[c->family].model_type);
  if (*c->name) cJSON_AddStringToObject(json, "_name_or_path", c->name);
  cJSON_AddNullToObject(json, "bos_token_id");
  cJSON_AddNullToObject(json, "eos_token_id");
  // Without it transformers takes 1, and does not train that token's embedding.
  if (c->family == FAMILY_OLMO2) cJSON_AddNullToObject(json, "pad_token_id");
  write_members(json, config_members, c->family, c);
  if (WINDOWED >> c->family & 1 && !c->sliding_window) cJSON_AddNullToObject(json, "sliding_window");
  if (c->family == FAMILY_QWEN2 || c->family == FAMILY_QWEN3) {
    cJSON_AddBoolToObject(json, "use_sliding_window", c->sliding_window > 0);
    cJSON_AddNumberToObject(json, "max_window_layers", 0);
  }
  if (c->family == FAMILY_GPT2) {
    cJSON_AddNumberToObject(json, "n_ctx", (double)c->max_position_embeddings);
    static const char *const dropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}; // there was none
    for (int i = 0; i < 3; i++) cJSON_AddNumberToObject(json, dropouts[i], 0);
  } else if (c->rope_scaling.factor > 0) {
    cJSON *scaling = cJSON_AddObjectToObject(json, "rope_scaling");
    bool linear = !c->rope_scaling.original_max_position_embeddings;
    cJSON_AddStringToObject(scaling, "rope_type", linear ? "linear" : "llama3");
    write_members(scaling, rope_members, c->family, &c->rope_scaling);
  } else {
    cJSON_AddNullToObject(json, "rope_scaling");
  }
  return json;
}

// A number that a run may change, wherever the file has it; added if it is absent and not the default.
static void change_number(cJSON *json, const char *name, double value, double standard) {
  cJSON *places[] = {json, cJSON_GetObjectItemCaseSensitive(json, "rope_parameters"),
                     cJSON_GetObjectItemCaseSensitive(json, "rope_scaling")};
  bool found = value == standard;
  for (int i = 0; i < 3; i++) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(places[i], name);
    if (cJSON_IsNumber(item)) cJSON_SetNumberValue(item, value), found = true;
  }
  if (!found) set(json, name, cJSON_CreateNumber(value));
}

char *hf_config_write(const ModelConfig *c, Dtype dtype, const char *original) {
  cJSON *json = original ? cJSON_Parse(original) : describe(c);
  const ModelConfig *standard = &model_families[c->family].config;
  if (!c->learned_positions) {
    change_number(json, "rope_theta", c->rope_theta, standard->rope_theta);
    change_number(json, "max_position_embeddings", (double)c->max_position_embeddings,
                  (double)standard->max_position_embeddings);
  }
  static const char softcap[] = "final_logit_softcapping"; // a run may change it
  if (c->final_logit_softcapping > 0)
    set(json, softcap, cJSON_CreateNumber(c->final_logit_softcapping));
  else
    cJSON_DeleteItemFromObjectCaseSensitive(json, softcap);
  const char *const names[] = {"torch_dtype", "dtype"}; // transformers 4 and 5
  for (int i = 0; i < 2; i++)
    set(json, names[i], cJSON_CreateString(dtype == DTYPE_BF16 ? "bfloat16" : "float32"));
  char *text = json_print(json, true);
  cJSON_Delete(json);
  return text;
}
