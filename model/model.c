#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"

// --- the parameters of both families -----------------------------------------------------------------------

// Hugging Face's names of one family's tensors. %d is the layer's number; where a tensor is made of several,
// the names are in the order of packing.
typedef struct {
  const char *token_embedding, *position_embedding, *head;
  const char *norm1, *qkv[3], *out, *norm2, *up[2], *down, *final_norm;
} Names;

static const Names gpt2_names = {.token_embedding = "transformer.wte",
                                 .position_embedding = "transformer.wpe",
                                 .norm1 = "transformer.h.%d.ln_1",
                                 .qkv = {"transformer.h.%d.attn.c_attn"},
                                 .out = "transformer.h.%d.attn.c_proj",
                                 .norm2 = "transformer.h.%d.ln_2",
                                 .up = {"transformer.h.%d.mlp.c_fc"},
                                 .down = "transformer.h.%d.mlp.c_proj",
                                 .final_norm = "transformer.ln_f",
                                 .head = "lm_head"};

static const Names llama_names = {.token_embedding = "model.embed_tokens",
                                  .norm1 = "model.layers.%d.input_layernorm",
                                  .qkv = {"model.layers.%d.self_attn.q_proj",
                                          "model.layers.%d.self_attn.k_proj",
                                          "model.layers.%d.self_attn.v_proj"},
                                  .out = "model.layers.%d.self_attn.o_proj",
                                  .norm2 = "model.layers.%d.post_attention_layernorm",
                                  .up = {"model.layers.%d.mlp.gate_proj", "model.layers.%d.mlp.up_proj"},
                                  .down = "model.layers.%d.mlp.down_proj",
                                  .final_norm = "model.norm",
                                  .head = "lm_head"};

typedef struct {
  char text[96];
} Name;

static Name tensor_name(const char *pattern, int layer, const char *suffix) {
  const char *number = strstr(pattern, "%d");
  Name name;
  if (number)
    snprintf(name.text, sizeof name.text, "%.*s%d%s.%s", (int)(number - pattern), pattern, layer, number + 2,
             suffix);
  else
    snprintf(name.text, sizeof name.text, "%s.%s", pattern, suffix);
  return name;
}

// A projection from `inputs` to the packed `outputs` of the tensors that `names` lists.
static void add_projection(Model *m, Affine *affine, bool bias, const char *const *names, int count,
                           int layer, const int64_t *outputs, int64_t inputs, double stddev) {
  const ModelConfig *c = &m->config;
  ParameterSpec weights[3], biases[3];
  Name weight_names[3], bias_names[3];
  for (int i = 0; i < count; i++) {
    weight_names[i] = tensor_name(names[i], layer, "weight");
    bias_names[i] = tensor_name(names[i], layer, "bias");
    weights[i] = (ParameterSpec){.name = weight_names[i].text,
                                 .d0 = c->in_out_layout ? inputs : outputs[i],
                                 .d1 = c->in_out_layout ? outputs[i] : inputs,
                                 .init = INIT_NORMAL,
                                 .stddev = stddev};
    biases[i] = (ParameterSpec){.name = bias_names[i].text, .d0 = outputs[i], .init = INIT_ZEROS};
  }
  parameters_add(&m->parameters, &affine->weight, GROUP_MATRICES, weights, count);
  if (bias) parameters_add(&m->parameters, &affine->bias, GROUP_VECTORS, biases, count);
}

static void add_norm(Model *m, Affine *affine, const char *pattern, int layer) {
  Name weight_name = tensor_name(pattern, layer, "weight"), bias_name = tensor_name(pattern, layer, "bias");
  ParameterSpec ones = {.name = weight_name.text, .d0 = m->config.hidden_size, .init = INIT_ONES};
  ParameterSpec zeros = {.name = bias_name.text, .d0 = m->config.hidden_size, .init = INIT_ZEROS};
  parameters_add(&m->parameters, &affine->weight, GROUP_VECTORS, &ones, 1);
  if (m->config.norm == NORM_LAYER) parameters_add(&m->parameters, &affine->bias, GROUP_VECTORS, &zeros, 1);
}

static void add_table(Model *m, Param *param, ParameterGroup group, const char *pattern, int64_t rows) {
  Name name = tensor_name(pattern, 0, "weight");
  ParameterSpec spec = {.name = name.text,
                        .d0 = rows,
                        .d1 = m->config.hidden_size,
                        .init = INIT_NORMAL,
                        .stddev = m->config.initializer_range};
  parameters_add(&m->parameters, param, group, &spec, 1);
}

static void add_layer(Model *m, const Names *names, int index) {
  const ModelConfig *c = &m->config;
  Layer *layer = &m->layers[index];
  int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
  double stddev = c->initializer_range;
  double residual_stddev =
      c->family == FAMILY_GPT2 ? stddev / sqrt(2.0 * (double)c->num_hidden_layers) : stddev;
  int qkv_count = names->qkv[1] ? 3 : 1, up_count = c->gated_mlp ? 2 : 1;
  const int64_t separate[3] = {q, kv, kv}, packed[1] = {q + 2 * kv};
  const int64_t up[2] = {c->intermediate_size, c->intermediate_size}, back[1] = {c->hidden_size};
  add_norm(m, &layer->norm1, names->norm1, index);
  add_projection(m, &layer->qkv, c->attention_bias, names->qkv, qkv_count, index,
                 qkv_count == 3 ? separate : packed, c->hidden_size, stddev);
  add_projection(m, &layer->out, c->attention_bias, &names->out, 1, index, back, q, residual_stddev);
  add_norm(m, &layer->norm2, names->norm2, index);
  add_projection(m, &layer->up, c->mlp_bias, names->up, up_count, index, up, c->hidden_size, stddev);
  add_projection(m, &layer->down, c->mlp_bias, &names->down, 1, index, back, c->intermediate_size,
                 residual_stddev);
}

// --- rotary positions --------------------------------------------------------------------------------------

void rope_frequencies(const ModelConfig *c, float *inv_freq) {
  const double two_pi = 6.283185307179586476925;
  const RopeScaling *s = &c->rope_scaling;
  for (int64_t i = 0; i < c->head_dim / 2; i++) {
    double frequency = pow(c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
    if (s->factor > 0) {
      // How many turns the angle makes over the original context, placed between the two bounds.
      double turns = (double)s->original_max_position_embeddings * frequency / two_pi;
      double kept = (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
      kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
      frequency = (1 - kept) * frequency / s->factor + kept * frequency;
    }
    inv_freq[i] = (float)frequency;
  }
}

static void make_rope_table(Model *m, Backend *backend, int64_t seq_len) {
  int64_t head_dim = m->config.head_dim, half = head_dim / 2;
  size_t bytes = (size_t)(seq_len * head_dim) * sizeof(float);
  void *data = memory_reserve(&backend->memory, "rotary angles", MEMORY_TABLES, bytes);
  m->rope_angles = tensor_2d(data, DTYPE_F32, seq_len, head_dim);
  if (backend->memory.planning) return;
  float *table = host_alloc(seq_len * head_dim, sizeof *table, "rotary angles");
  float *inv_freq = host_alloc(half, sizeof *inv_freq, "rotary angles");
  rope_frequencies(&m->config, inv_freq);
  for (int64_t t = 0; t < seq_len; t++)
    for (int64_t i = 0; i < half; i++) {
      float angle = (float)t * inv_freq[i]; // in fp32, as transformers multiplies them
      table[t * head_dim + i] = (float)cos((double)angle);
      table[t * head_dim + half + i] = (float)sin((double)angle);
    }
  backend_to_device(backend, m->rope_angles, table);
  free(table);
  free(inv_freq);
}

// --- the model ---------------------------------------------------------------------------------------------

void model_create(Model *m, const ModelConfig *config, Backend *backend, ParameterDtypes dtypes,
                  int64_t seq_len) {
  model_config_check(config);
  if (seq_len > config->max_position_embeddings)
    fail("sequences of %lld are longer than the %lld positions of %s; lower --seq-len or raise "
         "--max-position-embeddings",
         (long long)seq_len, (long long)config->max_position_embeddings, config->name);
  *m = (Model){.config = *config};
  const Names *names = config->family == FAMILY_GPT2 ? &gpt2_names : &llama_names;
  m->layers = host_alloc(config->num_hidden_layers, sizeof *m->layers, "layers");

  parameters_spread(&m->parameters, dtypes, config->tie_word_embeddings, backend->rank, backend->ranks);
  ParameterGroup embedding_group = config->tie_word_embeddings ? GROUP_HEAD : GROUP_MATRICES;
  add_table(m, &m->token_embedding, embedding_group, names->token_embedding, config->vocab_size);
  if (config->learned_positions)
    add_table(m, &m->position_embedding, GROUP_MATRICES, names->position_embedding,
              config->max_position_embeddings);
  const int64_t *matrices = &m->parameters.group_elements[GROUP_MATRICES];
  m->parameters.spread.before_layers = *matrices;
  for (int i = 0; i < config->num_hidden_layers; i++) add_layer(m, names, i);
  m->parameters.spread.layer = (*matrices - m->parameters.spread.before_layers) / config->num_hidden_layers;
  add_norm(m, &m->final_norm, names->final_norm, 0);
  if (!config->tie_word_embeddings) add_table(m, &m->head, GROUP_HEAD, names->head, config->vocab_size);

  parameters_allocate(&m->parameters, &backend->memory, dtypes);
  if (config->tie_word_embeddings) m->head = m->token_embedding;
  if (m->parameters.spread.split_head) {
    m->shard.vocab_size = config->vocab_size;
    parameters_local_head(&m->parameters, config->vocab_size, &m->shard.first);
  }
  if (!config->learned_positions) make_rope_table(m, backend, seq_len);
}

void model_initialize(Model *m, Backend *backend, uint64_t seed) {
  parameters_initialize(&m->parameters, backend, seed);
}

Tensor model_head_shard(const Model *m) {
  if (!m->shard.vocab_size || m->parameters.spread.split_head_weights) return m->head.value;
  return tensor_rows(m->head.value, m->shard.first, m->head.grad.shape[0]);
}

MemoryMark model_gather_head(Model *m, Backend *backend) {
  MemoryMark mark = memory_mark(&backend->memory);
  const Parameters *p = &m->parameters;
  if (!p->spread.split_head_weights) return mark;
  Tensor local = p->value[GROUP_HEAD];
  Tensor whole = memory_push_1d(&backend->memory, "gathered head", MEMORY_WORKSPACE, local.dtype,
                                p->group_elements[GROUP_HEAD]);
  all_gather(backend, (Collective){.out = whole, .x = local});
  int64_t vocab_size = m->config.vocab_size, hidden_size = m->config.hidden_size;
  m->head.value = tensor_reshape_2d(tensor_rows(whole, 0, vocab_size * hidden_size), vocab_size, hidden_size);
  return mark;
}

void model_drop_head(Model *m, Backend *backend, MemoryMark mark) {
  if (m->parameters.spread.split_head_weights)
    m->head.value =
        tensor_reshape_2d(tensor_rows(m->parameters.value[GROUP_HEAD], 0, tensor_count(m->head.grad)),
                          m->head.grad.shape[0], m->config.hidden_size);
  memory_pop_to(&backend->memory, mark);
}

void model_destroy(Model *m) {
  parameters_free(&m->parameters);
  free(m->layers);
  *m = (Model){0};
}
