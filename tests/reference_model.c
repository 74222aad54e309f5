#include "tests/reference_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "tests/reference.h"

static double *array(int64_t count) {
  double *values = calloc((size_t)count + 1, sizeof *values);
  if (!values) fail("out of host memory for a reference model");
  return values;
}

// --- the weights -------------------------------------------------------------------------------------------

ReferenceModel reference_model_read(const Model *model, Backend *backend) {
  const ParameterSet *p = &model->parameters;
  ReferenceModel m = {.config = &model->config, .table = p->items, .count = p->count};
  m.values = calloc((size_t)p->count, sizeof *m.values);
  if (!m.values) fail("out of host memory for a reference model");
  for (int64_t i = 0; i < p->count; i++) {
    Tensor t = p->items[i].value;
    int64_t count = tensor_count(t);
    m.values[i] = array(count);
    void *raw = malloc(tensor_bytes(t));
    if (!raw) fail("out of host memory for a reference model");
    backend_to_host(backend, raw, t);
    const float *floats = raw;
    const uint16_t *halves = raw;
    for (int64_t k = 0; k < count; k++)
      m.values[i][k] = (double)(t.dtype == DTYPE_F32 ? floats[k] : bf16_to_f32(halves[k]));
    free(raw);
  }
  return m;
}

void reference_model_free(ReferenceModel *m) {
  for (int64_t i = 0; i < m->count; i++) free(m->values[i]);
  free(m->values);
  *m = (ReferenceModel){0};
}

// Whether `name` is the pattern with this layer's number for %d.
static bool is_called(const char *name, const char *pattern, int64_t layer) {
  const char *number = strstr(pattern, "%d");
  if (!number) return strcmp(name, pattern) == 0;
  size_t before = (size_t)(number - pattern);
  char *rest;
  return strncmp(name, pattern, before) == 0 && strtoll(name + before, &rest, 10) == layer &&
         strcmp(rest, number + 2) == 0;
}

// The tensor of this name; its shape must be [d0, d1], or [d0] where d1 is 0.
static const double *weight(const ReferenceModel *m, const char *pattern, int64_t layer, int64_t d0,
                            int64_t d1) {
  for (int64_t i = 0; i < m->count; i++) {
    const Parameter *p = &m->table[i];
    if (!is_called(p->name, pattern, layer)) continue;
    if (p->shape[0] != d0 || p->shape[1] != d1)
      fail("%s is [%lld, %lld] and should be [%lld, %lld]", p->name, (long long)p->shape[0],
           (long long)p->shape[1], (long long)d0, (long long)d1);
    return m->values[i];
  }
  fail("the model has no tensor %s of layer %lld", pattern, (long long)layer);
}

// --- the pieces --------------------------------------------------------------------------------------------

void reference_rotary_frequencies(const ModelConfig *c, double *inv_freq) {
  const double two_pi = 2 * acos(-1);
  const RopeScaling *s = &c->rope_scaling;
  for (int64_t i = 0; i < c->head_dim / 2; i++) {
    double plain = 1 / pow(c->rope_theta, 2 * (double)i / (double)c->head_dim);
    inv_freq[i] = s->factor > 0 && !s->original_max_position_embeddings ? plain / s->factor : plain;
    if (!s->original_max_position_embeddings) continue;
    double context = (double)s->original_max_position_embeddings, wavelength = two_pi / plain;
    double longest_kept = context / s->high_freq_factor, shortest_stretched = context / s->low_freq_factor;
    if (wavelength > shortest_stretched) {
      inv_freq[i] = plain / s->factor;
    } else if (wavelength >= longest_kept) {
      double smooth =
          (context / wavelength - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
      inv_freq[i] = (1 - smooth) * plain / s->factor + smooth * plain;
    }
  }
}

// x [N, heads * D] turned by its positions: Hugging Face's x * cos + rotate_half(x) * sin, where rotate_half
// is (-second half, first half).
static void rotate(const ModelConfig *c, double *x, int64_t rows, int64_t heads, int64_t seq_len) {
  int64_t dim = c->head_dim, half = dim / 2;
  double *inv_freq = array(half), *turned = array(dim);
  reference_rotary_frequencies(c, inv_freq);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t h = 0; h < heads; h++) {
      double *head = x + (n * heads + h) * dim;
      for (int64_t i = 0; i < dim; i++) {
        double angle = (double)(n % seq_len) * inv_freq[i % half];
        double rotated = i < half ? -head[i + half] : head[i - half];
        turned[i] = head[i] * cos(angle) + rotated * sin(angle);
      }
      memcpy(head, turned, (size_t)dim * sizeof *head);
    }
  free(inv_freq);
  free(turned);
}

// out [N, Q D] from q [N, Q D], k and v [N, K D]; a key/value head serves Q / K query heads in a row.
static void attend(const ModelConfig *c, double *out, const double *q, const double *k, const double *v,
                   int64_t batch, int64_t seq_len) {
  int64_t heads = c->num_attention_heads, shared = c->num_key_value_heads, dim = c->head_dim;
  double *weights = array(seq_len);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = 0; t < seq_len; t++) {
        int64_t kv = h * shared / heads, row = b * seq_len + t;
        double sum = 0;
        for (int64_t u = 0; u <= t; u++) {
          double score = 0;
          for (int64_t d = 0; d < dim; d++)
            score += q[(row * heads + h) * dim + d] * k[((b * seq_len + u) * shared + kv) * dim + d];
          weights[u] = exp(score / sqrt((double)dim));
          sum += weights[u];
        }
        for (int64_t d = 0; d < dim; d++) {
          double mixed = 0;
          for (int64_t u = 0; u <= t; u++)
            mixed += weights[u] / sum * v[((b * seq_len + u) * shared + kv) * dim + d];
          out[(row * heads + h) * dim + d] = mixed;
        }
      }
  free(weights);
}

static void add(double *to, const double *from, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

static void layer_norm(const ReferenceModel *m, double *out, const double *x, const char *weight_name,
                       const char *bias_name, int64_t layer, int64_t rows) {
  int64_t hidden = m->config->hidden_size;
  double *rstd = array(rows);
  reference_norm(m->config->norm, out, NULL, rstd, x, weight(m, weight_name, layer, hidden, 0),
                 bias_name ? weight(m, bias_name, layer, hidden, 0) : NULL, rows, hidden,
                 m->config->norm_epsilon);
  free(rstd);
}

// --- GPT-2 (Radford et al. 2019): matrices stored [in, out] ------------------------------------------------

static void gpt2_linear(const ReferenceModel *m, double *out, const double *x, const char *weight_name,
                        const char *bias_name, int64_t layer, int64_t rows, int64_t inputs, int64_t outputs) {
  reference_linear(out, x, weight(m, weight_name, layer, inputs, outputs), true,
                   weight(m, bias_name, layer, outputs, 0), NULL, rows, inputs, outputs);
}

static void gpt2_attention(const ReferenceModel *m, double *out, const double *x, int64_t layer,
                           int64_t batch, int64_t seq_len) {
  int64_t rows = batch * seq_len, hidden = m->config->hidden_size;
  double *all = array(rows * 3 * hidden), *mixed = array(rows * hidden);
  double *parts[3] = {array(rows * hidden), array(rows * hidden), array(rows * hidden)};
  gpt2_linear(m, all, x, "transformer.h.%d.attn.c_attn.weight", "transformer.h.%d.attn.c_attn.bias", layer,
              rows, hidden, 3 * hidden);
  for (int64_t n = 0; n < rows; n++)
    for (int part = 0; part < 3; part++)
      for (int64_t i = 0; i < hidden; i++) parts[part][n * hidden + i] = all[(n * 3 + part) * hidden + i];
  attend(m->config, mixed, parts[0], parts[1], parts[2], batch, seq_len);
  gpt2_linear(m, out, mixed, "transformer.h.%d.attn.c_proj.weight", "transformer.h.%d.attn.c_proj.bias",
              layer, rows, hidden, hidden);
  for (int part = 0; part < 3; part++) free(parts[part]);
  free(all);
  free(mixed);
}

static void gpt2_mlp(const ReferenceModel *m, double *out, const double *x, int64_t layer, int64_t rows) {
  int64_t hidden = m->config->hidden_size, wide = m->config->intermediate_size;
  double *inner = array(rows * wide);
  gpt2_linear(m, inner, x, "transformer.h.%d.mlp.c_fc.weight", "transformer.h.%d.mlp.c_fc.bias", layer, rows,
              hidden, wide);
  for (int64_t i = 0; i < rows * wide; i++) inner[i] = reference_gelu(inner[i]);
  gpt2_linear(m, out, inner, "transformer.h.%d.mlp.c_proj.weight", "transformer.h.%d.mlp.c_proj.bias", layer,
              rows, wide, hidden);
  free(inner);
}

// --- Llama (Touvron et al. 2023; Grattafiori et al. 2024) and those after it: matrices stored [out, in] -----

static void llama_linear(const ReferenceModel *m, double *out, const double *x, const char *name,
                         int64_t layer, int64_t rows, int64_t inputs, int64_t outputs) {
  reference_linear(out, x, weight(m, name, layer, outputs, inputs), false, NULL, NULL, rows, inputs, outputs);
}

static void add_bias(const ReferenceModel *m, double *x, const char *name, int64_t layer, int64_t rows,
                     int64_t outputs) {
  const double *bias = weight(m, name, layer, outputs, 0);
  for (int64_t i = 0; i < rows * outputs; i++) x[i] += bias[i % outputs];
}

// Every head of x [rows, heads * D] on its own (Qwen3).
static void head_norm(const ReferenceModel *m, double *x, const char *name, int64_t layer, int64_t rows,
                      int64_t heads) {
  const double *scale = weight(m, name, layer, m->config->head_dim, 0);
  int64_t size = m->config->head_dim;
  for (double *head = x; head < x + rows * heads * size; head += size) {
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
    double root = sqrt(squares / (double)size + m->config->norm_epsilon);
    for (int64_t i = 0; i < size; i++) head[i] *= scale[i] / root;
  }
}

static void llama_attention(const ReferenceModel *m, double *out, const double *x, int64_t layer,
                            int64_t batch, int64_t seq_len) {
  const ModelConfig *c = m->config;
  int64_t rows = batch * seq_len, hidden = c->hidden_size;
  int64_t wide = c->num_attention_heads * c->head_dim, narrow = c->num_key_value_heads * c->head_dim;
  double *q = array(rows * wide), *k = array(rows * narrow), *v = array(rows * narrow);
  double *mixed = array(rows * wide);
  llama_linear(m, q, x, "model.layers.%d.self_attn.q_proj.weight", layer, rows, hidden, wide);
  llama_linear(m, k, x, "model.layers.%d.self_attn.k_proj.weight", layer, rows, hidden, narrow);
  llama_linear(m, v, x, "model.layers.%d.self_attn.v_proj.weight", layer, rows, hidden, narrow);
  if (c->qkv_bias) {
    add_bias(m, q, "model.layers.%d.self_attn.q_proj.bias", layer, rows, wide);
    add_bias(m, k, "model.layers.%d.self_attn.k_proj.bias", layer, rows, narrow);
    add_bias(m, v, "model.layers.%d.self_attn.v_proj.bias", layer, rows, narrow);
  }
  if (c->qk_norm) {
    head_norm(m, q, "model.layers.%d.self_attn.q_norm.weight", layer, rows, c->num_attention_heads);
    head_norm(m, k, "model.layers.%d.self_attn.k_norm.weight", layer, rows, c->num_key_value_heads);
  }
  rotate(c, q, rows, c->num_attention_heads, seq_len);
  rotate(c, k, rows, c->num_key_value_heads, seq_len);
  attend(c, mixed, q, k, v, batch, seq_len);
  llama_linear(m, out, mixed, "model.layers.%d.self_attn.o_proj.weight", layer, rows, wide, hidden);
  free(q);
  free(k);
  free(v);
  free(mixed);
}

static void llama_mlp(const ReferenceModel *m, double *out, const double *x, int64_t layer, int64_t rows) {
  int64_t hidden = m->config->hidden_size, wide = m->config->intermediate_size;
  double *gate = array(rows * wide), *up = array(rows * wide);
  llama_linear(m, gate, x, "model.layers.%d.mlp.gate_proj.weight", layer, rows, hidden, wide);
  llama_linear(m, up, x, "model.layers.%d.mlp.up_proj.weight", layer, rows, hidden, wide);
  for (int64_t i = 0; i < rows * wide; i++) up[i] *= gate[i] / (1 + exp(-gate[i]));
  llama_linear(m, out, up, "model.layers.%d.mlp.down_proj.weight", layer, rows, wide, hidden);
  free(gate);
  free(up);
}

// --- the whole ---------------------------------------------------------------------------------------------

static void layer(const ReferenceModel *m, double *stream, int64_t l, int64_t batch, int64_t seq_len) {
  bool gpt2 = m->config->family == FAMILY_GPT2;
  int64_t rows = batch * seq_len, count = rows * m->config->hidden_size;
  double *normed = array(count), *change = array(count);
  layer_norm(m, normed, stream,
             gpt2 ? "transformer.h.%d.ln_1.weight" : "model.layers.%d.input_layernorm.weight",
             gpt2 ? "transformer.h.%d.ln_1.bias" : NULL, l, rows);
  (gpt2 ? gpt2_attention : llama_attention)(m, change, normed, l, batch, seq_len);
  add(stream, change, count);
  layer_norm(m, normed, stream,
             gpt2 ? "transformer.h.%d.ln_2.weight" : "model.layers.%d.post_attention_layernorm.weight",
             gpt2 ? "transformer.h.%d.ln_2.bias" : NULL, l, rows);
  (gpt2 ? gpt2_mlp : llama_mlp)(m, change, normed, l, rows);
  add(stream, change, count);
  free(normed);
  free(change);
}

void reference_model_logits(const ReferenceModel *m, const int32_t *tokens, int64_t batch, int64_t seq_len,
                            double *logits) {
  const ModelConfig *c = m->config;
  bool gpt2 = c->family == FAMILY_GPT2;
  int64_t rows = batch * seq_len, hidden = c->hidden_size, vocab = c->vocab_size;
  const char *table = gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
  double *stream = array(rows * hidden), *normed = array(rows * hidden);
  reference_embedding(stream, tokens, weight(m, table, 0, vocab, hidden),
                      gpt2 ? weight(m, "transformer.wpe.weight", 0, c->max_position_embeddings, hidden)
                           : NULL,
                      rows, hidden, seq_len);
  for (int64_t l = 0; l < c->num_hidden_layers; l++) layer(m, stream, l, batch, seq_len);
  layer_norm(m, normed, stream, gpt2 ? "transformer.ln_f.weight" : "model.norm.weight",
             gpt2 ? "transformer.ln_f.bias" : NULL, 0, rows);
  const char *head = c->tie_word_embeddings ? table : "lm_head.weight";
  reference_linear(logits, normed, weight(m, head, 0, vocab, hidden), false, NULL, NULL, rows, hidden, vocab);
  free(stream);
  free(normed);
}

void reference_model_losses(const ReferenceModel *m, const int32_t *tokens, const int32_t *targets,
                            int64_t batch, int64_t seq_len, double *loss) {
  int64_t count = batch * seq_len * m->config->vocab_size;
  double *logits = array(count), cap = m->config->final_logit_softcapping;
  reference_model_logits(m, tokens, batch, seq_len, logits);
  for (int64_t i = 0; i < count && cap > 0; i++) logits[i] = cap * tanh(logits[i] / cap);
  reference_cross_entropy(loss, logits, targets, batch * seq_len, m->config->vocab_size);
  free(logits);
}
