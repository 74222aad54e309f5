// Safetensors headers and config.json, valid and malformed. JSON stands here with ' for ".
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/safetensors.h"
#include "model/model.h"
#include "tests/test.h"

static void quote(char *text) {
  for (; *text; text++)
    if (*text == '\'') *text = '"';
}

// A file of this header, its true length before it unless `length` says otherwise, and `data` bytes of zeros.
static char *file_of(const char *header, int64_t length, size_t data, size_t *size) {
  size_t text = strlen(header);
  uint64_t claimed = length < 0 ? text : (uint64_t)length;
  *size = 8 + text + data;
  char *bytes = calloc(*size + 1, 1);
  assert_non_null(bytes);
  strcpy(bytes + 8, header);
  quote(bytes + 8);
  memcpy(bytes, &claimed, 8);
  return realloc(bytes, *size); // exactly, so that ASan detects any read beyond
}

#define F32(name, shape, place) "'" name "':{'dtype':'F32','shape':" shape ",'data_offsets':" place "}"

static const struct {
  const char *header;
  size_t data;
  const char *why; // NULL: it is valid, with
  int64_t count;   // tensors; else the length that the file claims, 0: its own
} headers[] = {
    {"{}", 0, NULL, 0},
    {"{'__metadata__':{'format':'pt'}}   ", 0, NULL, 0},
    {"{" F32("a", "[2,3]", "[0,24]") "," F32("b", "[]", "[24,28]") "}", 28, NULL, 2},
    {"{" F32("b", "[1]", "[24,28]") "," F32("a", "[2,3]", "[0,24]") "}", 28, NULL, 2},
    {"{" F32("a", "[0,3]", "[0,0]") "," F32("b", "[1]", "[0,4]") "," F32("c", "[0]", "[4,4]") "}", 4, NULL,
     3},
    {"{'a':{'dtype':'F8_E4M3','shape':[3],'data_offsets':[0,3],'more':1}}", 3, NULL, 1},
    {"{}", 0, "cut short", 3},
    {"", 0, "cut short", 0},
    {"{}", 8, "cut short", INT64_MAX},
    {"{}", 8, "cut short", INT64_MAX - 7},
    {"{}", 8, "cut short", 100000001},
    {"{} {}", 0, "no JSON object", 0},
    {"[]", 0, "no JSON object", 0},
    {"{'a':", 0, "no JSON object", 0},
    {"{'a':1}", 0, "a lacks a dtype, a shape or data_offsets", 0},
    {"{'a':{}}", 0, "a lacks a dtype, a shape or data_offsets", 0},
    {"{'a':{'dtype':'F31','shape':[1],'data_offsets':[0,4]}}", 0, "unknown dtype F31", 0},
    {"{'a':{'dtype':'F32'}}", 0, "a lacks a dtype, a shape or data_offsets", 0},
    {"{" F32("a", "[-1]", "[0,4]") "}", 4, "no length", 0},
    {"{" F32("a", "[1.5]", "[0,6]") "}", 6, "no length", 0},
    {"{" F32("a", "[1e300]", "[0,4]") "}", 4, "no length", 0},
    {"{" F32("a", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "more than 8 axes", 0},
    {"{" F32("a", "[1]", "[0]") "}", 4, "a lacks a dtype, a shape or data_offsets", 0},
    {"{" F32("a", "[1]", "[4,0]") "}", 4, "a lacks a dtype, a shape or data_offsets", 0},
    {"{" F32("a", "[1]", "[-4,0]") "}", 4, "a lacks a dtype, a shape or data_offsets", 0},
    {"{" F32("a", "[2]", "[0,8]") "}", 4, "cut short", 0},
    {"{" F32("a", "[1]", "[9007199254740988,9007199254740992]") "}", 4, "cut short", 0},
    {"{" F32("a", "[2]", "[0,4]") "}", 4, "a, F32 [2], has 4 bytes", 0},
    {"{" F32("a\\u0000b", "[1]", "[0,4]") "}", 4, "the character \\u0000", 0},
    // 2^62 x 2^62 elements: the product wraps around to 0.
    {"{" F32("a", "[4611686018427387904,4]", "[0,0]") "}", 0, "no length", 0},
    {"{" F32("a", "[4503599627370496,4096,1]", "[0,0]") "}", 0, "has 0 bytes", 0},
    {"{" F32("a", "[1]", "[0,4]") "," F32("b", "[1]", "[0,4]") "}", 4, "overlap", 0},
    {"{" F32("a", "[2]", "[0,8]") "," F32("b", "[1]", "[4,8]") "}", 8, "overlap", 0},
    {"{" F32("a", "[1]", "[4,8]") "}", 8, "gaps", 0},
    {"{" F32("a", "[1]", "[0,4]") "}", 8, "4 bytes behind the last tensor", 0},
    {"{" F32("a", "[1]", "[0,4]") "," F32("a", "[1]", "[4,8]") "}", 8, "\"a\" stands in it twice", 0}};

// Every prefix of a file is refused as well.
TEST(headers_are_read_or_refused) {
  for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
    const char *why = headers[i].why;
    size_t size;
    char *bytes =
        file_of(headers[i].header, why && headers[i].count ? headers[i].count : -1, headers[i].data, &size);
    SafetensorsHeader h;
    Reason reason;
    bool valid = safetensors_parse(bytes, size, &h, &reason);
    if (valid != !why) fail_msg("%s is %s", headers[i].header, valid ? "not refused" : reason.text);
    if (why && !strstr(reason.text, why))
      fail_msg("%s is refused because %s", headers[i].header, reason.text);
    assert_int_equal(h.count, why ? 0 : headers[i].count);
    for (int64_t k = 0; k < h.count; k++) {
      static const char *const names[] = {"a", "b", "c"}; // in the order of the file
      assert_string_equal(h.entries[k].name, names[k]);
      assert_int_equal(h.entries[k].offset + h.entries[k].bytes,
                       k + 1 < h.count ? h.entries[k + 1].offset : size);
    }
    safetensors_free(&h);
    for (size_t length = 0; length < size && !why; length++) {
      char *part = malloc(length ? length : 1);
      memcpy(part, bytes, length);
      assert_false(safetensors_parse(part, length, &h, &reason));
      free(part);
    }
    free(bytes);
  }
  char deep[6002];
  memset(deep, '[', 6000);
  memcpy(deep, "{'a':", 5);
  deep[6000] = 0;
  size_t size;
  char *bytes = file_of(deep, -1, 0, &size);
  SafetensorsHeader h;
  Reason reason;
  assert_false(safetensors_parse(bytes, size, &h, &reason));
  free(bytes);
}

// All 65,536 values of 16 bits.
TEST(half_precision_widens_exactly) {
  enum { COUNT = 1 << 16 };
  static char bytes[2 * COUNT + 1];
  static float f16[COUNT], bf16[COUNT], odd[COUNT];
  for (int i = 0; i < COUNT; i++) {
    uint16_t bits = (uint16_t)i;
    memcpy(bytes + 2 * i, &bits, 2);
  }
  assert_true(safetensors_convert("F16", bytes, COUNT, DTYPE_F32, f16));
  assert_true(safetensors_convert("BF16", bytes, COUNT, DTYPE_F32, bf16));
  for (int i = 0; i < COUNT; i++) {
    int exponent = i >> 10 & 31, fraction = i & 1023;
    double want = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31) want = fraction ? NAN : INFINITY;
    if (i >> 15) want = -want;
    assert_true(isnan(want) ? isnan(f16[i]) : f16[i] == want && !signbit(f16[i]) == !signbit(want));
    uint32_t got;
    memcpy(&got, &bf16[i], 4);
    assert_int_equal(got, (uint32_t)i << 16);
  }
  memmove(bytes + 1, bytes, 2 * COUNT); // not aligned
  assert_true(safetensors_convert("F16", bytes + 1, COUNT, DTYPE_F32, odd));
  assert_memory_equal(odd, f16, sizeof odd);
  static uint16_t rounded[COUNT];
  for (int i = 0; i < COUNT; i++) odd[i] = (float)i / 3;
  assert_true(safetensors_convert("F32", (char *)odd, COUNT, DTYPE_BF16, rounded));
  for (int i = 0; i < COUNT; i++) assert_int_equal(rounded[i], bf16_from_f32(odd[i]));
  assert_false(safetensors_convert("I32", bytes, 1, DTYPE_F32, odd));
}

#define SIZES                                                                                                \
  "'vocab_size':10,'hidden_size':12,'intermediate_size':20,'num_hidden_layers':2,'num_attention_heads':3"
#define LLAMA        "{'model_type':'llama'," SIZES
#define GPT2         "{'model_type':'gpt2','vocab_size':10,'n_embd':12,'n_layer':2,'n_head':3,'n_positions':7"
#define LLAMA3_ALONE "'rope_type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4"
#define LLAMA3       "'factor':8,'low_freq_factor':1,'high_freq_factor':4,'original_max_position_embeddings':32"

static bool parse_config(const char *text, ModelConfig *config, Reason *reason) {
  char quoted[4096];
  snprintf(quoted, sizeof quoted, "%s", text);
  quote(quoted);
  return hf_config_parse(quoted, strlen(quoted), config, reason);
}

static ModelConfig read_config(const char *text) {
  ModelConfig config;
  Reason reason;
  if (!parse_config(text, &config, &reason)) fail_msg("%s is refused: %s", text, reason.text);
  return config;
}

#define MISTRAL        "{'model_type':'mistral'," SIZES
#define QWEN2          "{'model_type':'qwen2'," SIZES ",'num_key_value_heads':3"
#define QWEN3          "{'model_type':'qwen3'," SIZES
#define PHI3           "{'model_type':'phi3'," SIZES
#define OLMO2          "{'model_type':'olmo2'," SIZES
#define PLAIN_QWEN2    "10 12 20 2 3 3 4 32768 0 rms gated qkv_bias 1e-06 10000"
#define WINDOWED_QWEN2 "10 12 20 2 3 3 4 32768 9 rms gated qkv_bias 1e-06 10000"
#define SCALED         "10 12 20 2 3 3 4 2048 0 rms gated 1e-06 7"

// V H F L Q K D P and the window; choices; epsilon and theta; RoPE's scaling where there is one.
static const char *config_text(const ModelConfig *c) {
  static char text[256];
  const RopeScaling *s = &c->rope_scaling;
  int length = snprintf(
      text, sizeof text, "%lld %lld %lld %lld %lld %lld %lld %lld %lld %s%s%s%s%s%s%s%s%s%s%g %g",
      (long long)c->vocab_size, (long long)c->hidden_size, (long long)c->intermediate_size,
      (long long)c->num_hidden_layers, (long long)c->num_attention_heads, (long long)c->num_key_value_heads,
      (long long)c->head_dim, (long long)c->max_position_embeddings, (long long)c->sliding_window,
      c->norm == NORM_RMS ? "rms " : "", c->learned_positions ? "learned " : "",
      is_gated(c->activation) ? "gated " : "", c->qk_norm ? "qk_norm " : "", c->post_norm ? "post_norm " : "",
      c->qkv_bias ? "qkv_bias " : "", c->out_bias ? "out_bias " : "", c->mlp_bias ? "mlp_bias " : "",
      c->in_out_layout ? "in_out " : "", c->tie_word_embeddings ? "tied " : "", c->norm_epsilon,
      c->rope_theta);
  if (s->factor > 0)
    snprintf(text + length, sizeof text - (size_t)length, " %g %g %g %lld", s->factor, s->low_freq_factor,
             s->high_freq_factor, (long long)s->original_max_position_embeddings);
  else if (c->partial_rotary_factor > 0)
    snprintf(text + length, sizeof text - (size_t)length, " rotates %lld", (long long)model_rotary_dim(c));
  return text;
}

TEST(configs_are_read_with_the_defaults_of_transformers) {
  static const struct {
    const char *json, *config;
    int64_t parameters; // 0: not counted
  } cases[] = {
      {LLAMA "}", "10 12 20 2 3 3 4 2048 0 rms gated 1e-06 10000", 0},
      {LLAMA ",'num_key_value_heads':1,'head_dim':8,'tie_word_embeddings':true,'attention_bias':true,"
             "'mlp_bias':true,'rms_norm_eps':1e-5,'rope_theta':5e5,'rope_scaling':null,"
             "'hidden_act':'silu','architectures':['LlamaForCausalLM']}",
       "10 12 20 2 3 1 8 2048 0 rms gated qkv_bias out_bias mlp_bias tied 1e-05 500000", 0},
      // The published sizes of Llama 2 7B and of SmolLM2 135M.
      {"{'architectures':['LlamaForCausalLM'],'model_type':'llama','vocab_size':32000,'hidden_size':4096,"
       "'intermediate_size':11008,'num_hidden_layers':32,'num_attention_heads':32,'num_key_value_heads':32,"
       "'max_position_embeddings':4096,'rms_norm_eps':1e-05,'rope_scaling':null,'pretraining_tp':1,'hidden_"
       "act':'silu'}",
       "32000 4096 11008 32 32 32 128 4096 0 rms gated 1e-05 10000", 6738415616},
      {"{'architectures':['LlamaForCausalLM'],'model_type':'llama','vocab_size':49152,'hidden_size':576,"
       "'intermediate_size':1536,'num_hidden_layers':30,'num_attention_heads':9,'num_key_value_heads':3,"
       "'max_position_embeddings':8192,'rms_norm_eps':1e-05,'rope_theta':100000,'rope_scaling':null,"
       "'rope_interleaved':false,'attention_bias':false,'mlp_bias':false,'tie_word_embeddings':true,'hidden_"
       "act':'silu'}",
       "49152 576 1536 30 9 3 64 8192 0 rms gated tied 1e-05 100000", 134515008},
      {LLAMA ",'rope_theta':7,'rope_scaling':{'rope_type':'llama3'," LLAMA3 "}}", SCALED " 8 1 4 32", 0},
      {LLAMA ",'rope_theta':7,'rope_scaling':{'type':'llama3'," LLAMA3 "}}", SCALED " 8 1 4 32", 0},
      {LLAMA ",'rope_parameters':{'rope_theta':7,'rope_type':'llama3'," LLAMA3 "}}", SCALED " 8 1 4 32", 0},
      {LLAMA ",'rope_parameters':{'rope_theta':7,'rope_type':'default'}}", SCALED, 0},
      {LLAMA ",'rope_parameters':{'rope_theta':7}}", SCALED, 0},
      {LLAMA ",'rope_parameters':{'rope_theta':7},'rope_scaling':{'rope_theta':7}}", SCALED, 0},
      {LLAMA ",'rope_theta':7,'rope_scaling':{}}", SCALED, 0},
      {LLAMA ",'rope_theta':7,'rope_scaling':{'type':'linear','factor':2}}", SCALED " 2 0 0 0", 0},
      {LLAMA ",'rope_theta':7,'rope_scaling':{'type':'linear','factor':2,'low_freq_factor':1,"
             "'original_max_position_embeddings':32}}",
       SCALED " 2 0 0 0", 0},
      // As transformers 5.24 reads each
      {LLAMA ",'rope_theta':7,'rope_scaling':{'rope_type':'dynamic','factor':2}}", SCALED, 0},
      {LLAMA ",'rope_theta':7,'rope_scaling':{" LLAMA3_ALONE "}}", SCALED " 8 1 4 2048", 0},
      {LLAMA ",'rope_theta':7,'original_max_position_embeddings':16,'rope_scaling':{" LLAMA3_ALONE "}}",
       SCALED " 8 1 4 16", 0},
      {LLAMA ",'rope_theta':7,'original_max_position_embeddings':16,'rope_scaling':{'type':'llama3'," LLAMA3
             "}}",
       SCALED " 8 1 4 16", 0},
      {GPT2 "}", "10 12 48 2 3 3 4 7 0 learned qkv_bias out_bias mlp_bias in_out tied 1e-05 10000", 0},
      {GPT2 ",'n_inner':5,'tie_word_embeddings':false,'activation_function':'gelu_new'}",
       "10 12 5 2 3 3 4 7 0 learned qkv_bias out_bias mlp_bias in_out 1e-05 10000", 0},
      {MISTRAL ",'num_key_value_heads':1}", "10 12 20 2 3 1 4 131072 4096 rms gated 1e-06 10000", 0},
      {MISTRAL ",'num_key_value_heads':null}", "10 12 20 2 3 3 4 131072 4096 rms gated 1e-06 10000", 0},
      // transformers ignores attention_bias there
      {MISTRAL ",'num_key_value_heads':1,'sliding_window':null,'attention_bias':true}",
       "10 12 20 2 3 1 4 131072 0 rms gated 1e-06 10000", 0},
      {QWEN2 "}", PLAIN_QWEN2, 0},
      // Without max_window_layers the first 28 layers have no window.
      {QWEN2 ",'use_sliding_window':true,'sliding_window':9}", PLAIN_QWEN2, 0},
      {QWEN2 ",'use_sliding_window':true,'sliding_window':9,'max_window_layers':2}", PLAIN_QWEN2, 0},
      {QWEN2 ",'use_sliding_window':true,'sliding_window':9,'max_window_layers':1}", WINDOWED_QWEN2, 0},
      {QWEN2 ",'use_sliding_window':true,'sliding_window':9,'max_window_layers':0,"
             "'layer_types':['full_attention','full_attention']}",
       PLAIN_QWEN2, 0},
      {QWEN2 ",'use_sliding_window':true,'sliding_window':9,'max_window_layers':2,"
             "'layer_types':['full_attention','sliding_attention']}",
       WINDOWED_QWEN2, 0},
      {QWEN2 ",'sliding_window':9,'layer_types':['sliding_attention','sliding_attention']}", PLAIN_QWEN2, 0},
      {QWEN3 ",'num_key_value_heads':3}", "10 12 20 2 3 3 128 32768 0 rms gated qk_norm 1e-06 10000", 0},
      {PHI3 "}", "10 12 20 2 3 3 4 4096 0 rms gated 1e-05 10000", 0},
      {PHI3 ",'sliding_window':9,'partial_rotary_factor':0.5}",
       "10 12 20 2 3 3 4 4096 9 rms gated 1e-05 10000 rotates 2", 0},
      {PHI3 ",'rope_parameters':{'rope_type':'default','partial_rotary_factor':0.5}}",
       "10 12 20 2 3 3 4 4096 0 rms gated 1e-05 10000 rotates 2", 0},
      {OLMO2 "}", "10 12 20 2 3 3 4 2048 0 rms gated qk_norm post_norm 1e-05 10000", 0},
      // The published sizes of OLMo 2 13B.
      {"{'architectures':['Olmo2ForCausalLM'],'model_type':'olmo2','vocab_size':100352,'hidden_size':5120,"
       "'intermediate_size':13824,'num_hidden_layers':40,'num_attention_heads':40,'num_key_value_heads':40,"
       "'max_position_embeddings':4096,'rms_norm_eps':1e-06,'rope_scaling':null,'rope_theta':500000,"
       "'attention_bias':false,'attention_dropout':0.0,'tie_word_embeddings':false,'hidden_act':'silu'}",
       "100352 5120 13824 40 40 40 128 4096 0 rms gated qk_norm post_norm 1e-06 500000", 13716198400},
      {QWEN3 ",'num_key_value_heads':1,'head_dim':6,'attention_bias':true}",
       "10 12 20 2 3 1 6 32768 0 rms gated qk_norm qkv_bias out_bias 1e-06 10000", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ModelConfig c = read_config(cases[i].json);
    const char *text = config_text(&c);
    if (strcmp(text, cases[i].config))
      fail_msg("%s is read as %s, not as %s", cases[i].json, text, cases[i].config);
    if (cases[i].parameters) assert_int_equal(model_parameter_count(&c), cases[i].parameters);
    assert_int_equal(model_max_seq_len(&c), c.sliding_window ? c.sliding_window : c.max_position_embeddings);
  }
}

TEST(other_configs_are_refused_by_name) {
  static const char *const refused[][2] = {
      {"", "no JSON object"},
      {"[]", "no JSON object"},
      {"{}", "model_type \"\""},
      {"{'model_type':'gemma'}", "model_type \"gemma\" cannot be computed here, only gpt2, llama, mistral"},
      {"{'model_type':'mistral'}", "vocab_size is missing"},
      {"{'model_type':'llama'}", "vocab_size is missing"},
      {"{'model_type':'gpt2','vocab_size':5}", "n_embd is missing"},
      {LLAMA ",'head_dim':'4'}", "head_dim is not a whole number"},
      {LLAMA ",'head_dim':1e99}", "head_dim is not a whole number"},
      {LLAMA ",'head_dim':-4}", "head_dim is not a whole number"},
      {LLAMA ",'head_dim':3}", "even --head-dim"},
      {LLAMA ",'rms_norm_eps':1e999}", "rms_norm_eps is not a number above 0"},
      {LLAMA ",'rms_norm_eps':1e30}", "norm_epsilon 1e+30; give a number from 1e-30 to 1"},
      {LLAMA ",'attention_bias':1}", "attention_bias is not true or false"},
      {LLAMA ",'hidden_act':'gelu'}", "hidden_act \"gelu\""},
      {LLAMA ",'architectures':['LlamaForSequenceClassification']}", "LlamaForSequence"},
      {LLAMA ",'quantization_config':{}}", "quantized"},
      {LLAMA ",'rope_scaling':{'rope_type':'yarn','factor':4}}", "rope_type \"yarn\""},
      {LLAMA ",'rope_scaling':{'rope_type':'linear'}}", "rope_scaling lacks factor"},
      {LLAMA ",'rope_scaling':{'rope_type':'dynamic'}}", "rope_scaling lacks factor"},
      {QWEN2 ",'use_sliding_window':true,'max_window_layers':-1}", "max_window_layers is not a whole number"},
      {LLAMA ",'rope_scaling':{'rope_type':'llama3','factor':4}}", "lacks one of"},
      {LLAMA ",'rope_scaling':'linear'}", "rope_scaling is no object with a rope_type"},
      {LLAMA ",'rope_scaling':[8]}", "rope_scaling is no object with a rope_type"},
      {LLAMA ",'rope_scaling':8}", "rope_scaling is no object with a rope_type"},
      {LLAMA ",'rope_scaling':{'factor':8}}", "rope_scaling has factor and no rope_type"},
      {LLAMA ",'rope_scaling':{'rope_type':null,'factor':8}}", "rope_scaling has factor and no rope_type"},
      {LLAMA ",'rope_parameters':{'full_attention':{'rope_type':'linear','factor':8}}}",
       "rope_parameters has full_attention and no rope_type"},
      {LLAMA ",'rope_parameters':{'partial_rotary_factor':0.5}}", "partial_rotary_factor 0.5"},
      {PHI3 ",'partial_rotary_factor':0.8}", "partial_rotary_factor 0.8 rotates 3 of a head's 4 elements"},
      {PHI3 ",'partial_rotary_factor':1.5}", "partial_rotary_factor 1.5 rotates 6"},
      {PHI3 ",'rope_scaling':{'type':'longrope','short_factor':[1]}}", "rope_type \"longrope\""},
      {LLAMA ",'rope_parameters':{'rope_theta':7},'rope_scaling':{'rope_type':'linear','factor':2}}",
       "rope_parameters and rope_scaling differ"},
      {LLAMA ",'rope_scaling':{'rope_type':'linear','factor':2,'factor':3}}",
       "\"factor\" stands in it twice"},
      {LLAMA ",'rope_theta':1e13}", "rope_theta 10000000000000; give a number from 1 to"},
      {LLAMA ",'rope_parameters':{'rope_theta':0.5}}", "rope_theta 0.5"},
      {LLAMA ",'final_logit_softcapping':1e7}", "final_logit_softcapping 10000000"},
      {"{'model_type':'llama','vocab_size':10,'hidden_size':13,'intermediate_size':20,'num_hidden_layers':2,"
       "'num_attention_heads':3}",
       "13 does not divide into 3 heads"},
      {"{'model_type':'gpt2','vocab_size':5,'n_embd':600000000,'n_layer':1,'n_head':1,'n_positions':7}",
       "intermediate_size 2400000000; give a whole number from 1 to 2147483647"},
      {"{'model_type':'gpt2','vocab_size':5,'n_embd':12,'n_layer':10001,'n_head':1,'n_positions':7}",
       "num_hidden_layers 10001; give a whole number"},
      {GPT2 ",'activation_function':'relu'}", "activation_function \"relu\""},
      {GPT2 ",'scale_attn_by_inverse_layer_idx':true}", "scale_attn_by_inverse_layer_idx true"},
      {GPT2 ",'scale_attn_weights':false}", "scale_attn_weights false"},
      {GPT2 ",'add_cross_attention':true}", "add_cross_attention true"}};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    ModelConfig config;
    Reason reason;
    if (parse_config(refused[i][0], &config, &reason)) fail_msg("%s is not refused", refused[i][0]);
    if (!strstr(reason.text, refused[i][1]))
      fail_msg("%s is refused because %s, not because %s", refused[i][0], reason.text, refused[i][1]);
  }
}

TEST(written_configs_are_read_again) {
  static const char *const presets[] = {"gpt2-124m",  "llama-1b", "llama-8b", "llama-tiny",
                                        "mistral-7b", "qwen3-4b", "olmo2-1b"};
  for (int i = 0; i < 7; i++) {
    ModelConfig c = model_preset(presets[i]);
    c.qkv_bias = c.out_bias = c.family != FAMILY_MISTRAL;
    if (c.family == FAMILY_MISTRAL) c.rope_scaling.factor = 2;
    if (c.family == FAMILY_QWEN3) c.sliding_window = 7;
    char *text = hf_config_write(&c, DTYPE_BF16, NULL), before[256];
    assert_non_null(strstr(text, "\"bfloat16\""));
    assert_true(!strstr(text, "pad_token_id") == (c.family != FAMILY_OLMO2));
    ModelConfig again = read_config(text);
    snprintf(before, sizeof before, "%s", config_text(&c));
    assert_string_equal(config_text(&again), before);
    assert_string_equal(again.name, c.name);
    char *twice = hf_config_write(&again, DTYPE_BF16, NULL);
    assert_string_equal(text, twice);
    free(text);
    free(twice);
  }
  // A config.json that the model came with keeps what this program does not know.
  char original[1024];
  snprintf(original, sizeof original, "%s", LLAMA ",'eos_token_id':7,'torch_dtype':'float16'}");
  ModelConfig c = read_config(original);
  quote(original);
  c.final_logit_softcapping = 30; // a run changed it, or took it away
  char *text = hf_config_write(&c, DTYPE_F32, original);
  assert_non_null(strstr(text, "\"eos_token_id\":\t7"));
  assert_null(strstr(text, "float16\""));
  assert_non_null(strstr(text, "\"float32\""));
  assert_true(read_config(text).final_logit_softcapping == 30);
  c.final_logit_softcapping = 0;
  char *without = hf_config_write(&c, DTYPE_F32, text);
  assert_true(read_config(without).final_logit_softcapping == 0);
  free(without);
  free(text);
}

TEST_MAIN(tests_run("safetensors", NULL, NULL))
