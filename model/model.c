#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"

// --- the parameters of all families ------------------------------------------------------------------------

// RESIDUAL: added to the residual stream.
enum { TABLE = 0, NORM = 1, QKV = 2, OUT = 4, MLP = 8, RESIDUAL = 16, QK_NORM = 32 };

// One tensor of Hugging Face's, without the layer's prefix and the suffix .weight or .bias. Sizes are
// letters: V H F P as in config.h, Q for Q D, K for K D, S for (Q + 2K) D, G for 2F.
typedef struct {
  char outputs;
  const char *name;
} Part;

// A weight and the tensors it packs, in order, by the names of each family. A bias follows the configuration.
typedef struct {
  size_t place; // of a Weight (TABLE) or a WeightAndBias in Model or Layer
  int kind;
  char inputs;
  Part parts[NAMES_COUNT][3]; // none: there is no such weight
} WeightRow;

// First values (parameters_initialize) are those of each family's paper and code:
//   GPT-2: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), biases 0, norms 1 (Radford et al. 2019)
//   others: N(0, 0.02), biases 0, norms 1 (transformers' initializer_range)
// clang-format off
static const WeightRow embeddings[] = {
    {offsetof(Model, token_embedding), TABLE, 'H', {{{'V', "transformer.wte"}}, {{'V', "model.embed_tokens"}}}},
    {offsetof(Model, position_embedding), TABLE, 'H', {{{'P', "transformer.wpe"}}}}};

static const WeightRow layer_weights[] = {
    {offsetof(Layer, norm1), NORM, 0, {{{'H', "ln_1"}}, {{'H', "input_layernorm"}}, {{0}}, {{'H', "post_attention_layernorm"}}}},
    {offsetof(Layer, qkv), QKV, 'H',
     {{{'S', "attn.c_attn"}}, {{'Q', "self_attn.q_proj"}, {'K', "self_attn.k_proj"}, {'K', "self_attn.v_proj"}},
      {{'S', "self_attn.qkv_proj"}}}},
    {offsetof(Layer, q_norm), NORM | QK_NORM, 0, {{{0}}, {{'D', "self_attn.q_norm"}}, {{0}}, {{'Q', "self_attn.q_norm"}}}},
    {offsetof(Layer, k_norm), NORM | QK_NORM, 0, {{{0}}, {{'D', "self_attn.k_norm"}}, {{0}}, {{'K', "self_attn.k_norm"}}}},
    {offsetof(Layer, out), OUT | RESIDUAL, 'Q', {{{'H', "attn.c_proj"}}, {{'H', "self_attn.o_proj"}}}},
    {offsetof(Layer, norm2), NORM, 0,
     {{{'H', "ln_2"}}, {{'H', "post_attention_layernorm"}}, {{0}}, {{'H', "post_feedforward_layernorm"}}}},
    {offsetof(Layer, up), MLP, 'H',
     {{{'F', "mlp.c_fc"}}, {{'F', "mlp.gate_proj"}, {'F', "mlp.up_proj"}}, {{'G', "mlp.gate_up_proj"}}}},
    {offsetof(Layer, down), MLP | RESIDUAL, 'F', {{{'H', "mlp.c_proj"}}, {{'H', "mlp.down_proj"}}}}};

static const WeightRow last_weights[] = {
    {offsetof(Model, final_norm), NORM, 0, {{{'H', "transformer.ln_f"}}, {{'H', "model.norm"}}}},
    {offsetof(Model, head), TABLE, 'H', {{{'V', "lm_head"}}, {{'V', "lm_head"}}}}};
// clang-format on

#define COUNT(rows) ((int)(sizeof(rows) / sizeof *(rows)))

static int64_t size_of(const ModelConfig *c, char letter) {
  int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
  const int64_t sizes[] = {['V'] = c->vocab_size,
                           ['H'] = c->hidden_size,
                           ['F'] = c->intermediate_size,
                           ['G'] = 2 * c->intermediate_size,
                           ['P'] = c->max_position_embeddings,
                           ['D'] = c->head_dim,
                           ['Q'] = q,
                           ['K'] = kv,
                           ['S'] = q + 2 * kv};
  return sizes[(int)letter];
}

// Llama stores each matrix in a tensor of its own; another family's tensor as large as those packs them.
static void set_matrices(Parameter *p, const ModelConfig *c, const WeightRow *w, int64_t outputs) {
  const Part *alone = w->parts[NAMES_LLAMA];
  int64_t sizes[3] = {0}, all = 0;
  for (int i = 0; i < 3 && alone[i].name; i++) all += sizes[i] = size_of(c, alone[i].outputs);
  p->matrices[0] = outputs;
  if (all == outputs) memcpy(p->matrices, sizes, sizeof sizes);
}

// `prefix` is the layer's: "model.layers.3.".
static void add_weight(Model *m, void *owner, const char *prefix, const WeightRow *w) {
  const ModelConfig *c = &m->config;
  Weight *weight = (Weight *)((char *)owner + w->place);
  bool norm = w->kind & NORM, in_out = c->in_out_layout && w->kind & (QKV | OUT | MLP);
  bool scaled = w->kind & RESIDUAL && c->family == FAMILY_GPT2;
  bool bias = (norm && c->norm == NORM_LAYER) || (w->kind & QKV && c->qkv_bias) ||
              (w->kind & OUT && c->out_bias) || (w->kind & MLP && c->mlp_bias);
  if (w->kind & QK_NORM && !c->qk_norm) return;
  bool is_head = weight == &m->head || (weight == &m->token_embedding && c->tie_word_embeddings);
  Parameter weights[3], biases[3];
  int count = 0;
  TensorNames names = model_families[c->family].names;
  if (names > NAMES_LLAMA && !w->parts[names][0].name) names = NAMES_LLAMA;
  const Part *parts = w->parts[names];
  for (; count < 3 && parts[count].name; count++) {
    const Part *part = &parts[count];
    Parameter *p = &weights[count], *b = &biases[count];
    int64_t outputs = size_of(c, part->outputs), inputs = norm ? 0 : size_of(c, w->inputs);
    *p = (Parameter){.group = is_head                       ? GROUP_HEAD
                              : norm                        ? GROUP_VECTORS
                              : w->kind & (QKV | OUT | MLP) ? GROUP_MATRICES
                                                            : GROUP_EMBEDDINGS,
                     .rank = norm ? 1 : 2,
                     .shape = {in_out ? inputs : outputs, in_out ? outputs : inputs},
                     .outputs_in_rows = !in_out,
                     .init = norm ? INIT_ONES : INIT_NORMAL,
                     .stddev = c->initializer_range};
    set_matrices(p, c, w, outputs);
    if (scaled) p->stddev /= sqrt(2.0 * (double)c->num_hidden_layers);
    *b = (Parameter){.group = GROUP_VECTORS, .rank = 1, .shape = {outputs}, .init = INIT_ZEROS};
    snprintf(p->name, sizeof p->name, "%s%s.weight", prefix, part->name);
    if (bias) snprintf(b->name, sizeof b->name, "%s%s.bias", prefix, part->name);
  }
  if (count) parameters_add(&m->parameters, weight, weights, count);
  if (bias) parameters_add(&m->parameters, &((WeightAndBias *)weight)->bias, biases, count);
}

// The table of parameters, and which Weight each belongs to, without memory for any.
static void lay_out(Model *m, const ModelConfig *config, ParameterDtypes dtypes, int rank, int ranks) {
  *m = (Model){.config = *config};
  m->layers = host_alloc(config->num_hidden_layers, sizeof *m->layers, "layers");
  ParameterSet *p = &m->parameters;
  parameters_shard(p, dtypes, config->tie_word_embeddings, rank, ranks);
  for (int i = 0; i < COUNT(embeddings); i++) add_weight(m, m, "", &embeddings[i]);
  for (int l = 0; l < config->num_hidden_layers; l++) {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "%s%d.", model_families[config->family].layers, l);
    for (int i = 0; i < COUNT(layer_weights); i++) add_weight(m, &m->layers[l], prefix, &layer_weights[i]);
  }
  p->sharding.layer = p->group_elements[GROUP_MATRICES] / config->num_hidden_layers;
  for (int i = 0; i < COUNT(last_weights) - config->tie_word_embeddings; i++)
    add_weight(m, m, "", &last_weights[i]);
}

// Elements of all parameters, or of those that GEMMs read.
static int64_t count_elements(const ModelConfig *config, bool gemms) {
  Model m;
  lay_out(&m, config, (ParameterDtypes){0}, 0, 1);
  int64_t count = 0;
  for (const Parameter *p = m.parameters.items; p < m.parameters.items + m.parameters.count; p++)
    if (!gemms || p->group == GROUP_HEAD || p->group == GROUP_MATRICES) count += parameter_elements(p);
  model_destroy(&m);
  return count;
}

int64_t model_parameter_count(const ModelConfig *config) {
  return count_elements(config, false);
}

double model_flops_per_token(const ModelConfig *c, int64_t seq_len) {
  double attention =
      (double)c->num_hidden_layers * (double)seq_len * (double)(c->num_attention_heads * c->head_dim);
  return 6 * (double)count_elements(c, true) + 6 * attention;
}

// --- rotary positions --------------------------------------------------------------------------------------

void rope_frequencies(const ModelConfig *c, float *inv_freq) {
  const double two_pi = 6.283185307179586476925;
  const RopeScaling *s = &c->rope_scaling;
  for (int64_t i = 0; i < model_rotary_dim(c) / 2; i++) {
    double frequency = pow(c->rope_theta, -2.0 * (double)i / (double)model_rotary_dim(c));
    if (s->factor > 0) {
      // How many turns the angle makes over the original context, placed between the two bounds.
      double turns = (double)s->original_max_position_embeddings * frequency / two_pi;
      double kept = turns > 0 ? (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor) : 0;
      kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
      frequency = (1 - kept) * frequency / s->factor + kept * frequency;
    }
    inv_freq[i] = (float)frequency;
  }
}

static void make_rope_table(Model *m, Backend *backend, int64_t seq_len) {
  int64_t width = model_rotary_dim(&m->config), half = width / 2;
  Tensor angles =
      memory_reserve_1d(&backend->memory, "rotary angles", MEMORY_TABLES, DTYPE_F32, seq_len * width);
  m->rope_angles = tensor_reshape_2d(angles, seq_len, width);
  if (backend->memory.planning) return;
  float *table = host_alloc(seq_len * width, sizeof *table, "rotary angles");
  float *inv_freq = host_alloc(half, sizeof *inv_freq, "rotary angles");
  rope_frequencies(&m->config, inv_freq);
  for (int64_t t = 0; t < seq_len; t++)
    for (int64_t i = 0; i < half; i++) {
      float angle = (float)t * inv_freq[i]; // in fp32, as transformers multiplies them
      table[t * width + i] = (float)cos((double)angle);
      table[t * width + half + i] = (float)sin((double)angle);
    }
  backend_to_device(backend, m->rope_angles, table);
  free(table);
  free(inv_freq);
}

// --- the model ---------------------------------------------------------------------------------------------

void model_create(Model *m, const ModelConfig *config, Backend *backend, ParameterDtypes dtypes,
                  int64_t seq_len) {
  model_config_check(config);
  model_check_seq_len(config, seq_len);
  lay_out(m, config, dtypes, backend->rank, backend->ranks);
  parameters_allocate(&m->parameters, &backend->memory, dtypes);
  if (config->tie_word_embeddings) m->head = m->token_embedding;
  const Sharding *sharding = &m->parameters.sharding;
  if (sharding->split_head)
    m->shard = (VocabShard){.first = sharding->head_rows.offset, .vocab_size = config->vocab_size};
  matmuls_reserve(m, &backend->memory, dtypes);
  if (!config->learned_positions) make_rope_table(m, backend, seq_len);
}

Tensor model_head_shard(const Model *m) {
  if (!m->shard.vocab_size || m->parameters.sharding.split_head_weights) return m->head.value;
  return tensor_rows(m->head.value, m->shard.first, m->head.grad.shape[0]);
}

MemoryMark model_gather_head(Model *m, Backend *backend) {
  MemoryMark mark = memory_mark(&backend->memory);
  const ParameterSet *p = &m->parameters;
  if (!p->sharding.split_head_weights) return mark;
  Tensor local = p->value[GROUP_HEAD];
  Tensor whole = memory_push_1d(&backend->memory, "gathered head", MEMORY_WORKSPACE, local.dtype,
                                p->group_elements[GROUP_HEAD]);
  all_gather(backend, (Collective){.out = whole, .x = local});
  int64_t vocab_size = m->config.vocab_size, hidden_size = m->config.hidden_size;
  m->head.value = tensor_reshape_2d(tensor_rows(whole, 0, vocab_size * hidden_size), vocab_size, hidden_size);
  return mark;
}

void model_drop_head(Model *m, Backend *backend, MemoryMark mark) {
  const ParameterSet *p = &m->parameters;
  if (p->sharding.split_head_weights)
    m->head.value = p->items[p->count - 1].value; // the head's, as it is untied
  memory_pop_to(&backend->memory, mark);
}

void model_destroy(Model *m) {
  parameters_free(&m->parameters);
  free(m->layers);
  *m = (Model){0};
}
