// The choices and sizes by which model families differ, with Hugging Face's names.
#pragma once

#include "kernels/base/fail.h"
#include "kernels/kernels.h"

// Limits on values, from the command line as from a file.
enum { MAX_LAYERS = 10000 };
#define MIN_ROPE_THETA 1.
#define MAX_ROPE_THETA 1e12
#define MAX_SOFTCAP    1e6
#define MIN_EPSILON    1e-30

typedef enum {
  FAMILY_GPT2,
  FAMILY_LLAMA,
  FAMILY_MISTRAL,
  FAMILY_QWEN2,
  FAMILY_QWEN3,
  FAMILY_PHI3,
  FAMILY_OLMO2,
  FAMILY_COUNT
} ModelFamily;

// How rotary frequencies are scaled: as Llama 3 does (rope_type "llama3" of transformers), all alike
// ("linear"; Chen et al. 2023) if original_max_position_embeddings is 0, or not at all if factor is 0.
typedef struct {
  double factor;                            // long wavelengths turn this much slower
  double low_freq_factor, high_freq_factor; // wavelengths between original/high and original/low are blended
  int64_t original_max_position_embeddings;
} RopeScaling;

typedef struct {
  char name[32];      // the preset it started from
  ModelFamily family; // names of the tensors, initialisation
  // sizes
  int64_t vocab_size;              // V
  int64_t hidden_size;             // H
  int64_t intermediate_size;       // F
  int64_t num_hidden_layers;       // L
  int64_t num_attention_heads;     // Q
  int64_t num_key_value_heads;     // K, divides Q
  int64_t head_dim;                // D
  int64_t max_position_embeddings; // the longest sequence
  int64_t sliding_window;          // tokens that a token sees, with itself; 0: all. No sequence may be longer
  // choices
  NormKind norm;            // LayerNorm with bias, or RMSNorm
  bool learned_positions;   // a table added to the embedding; otherwise rotary
  Activation activation;    // of the MLP
  bool qk_norm;             // RMSNorm of q and k before their rotation: of each head, or of all (OLMo 2)
  bool post_norm;           // norms of attention's and the MLP's outputs, not of their inputs: norms.c
  bool qkv_bias, out_bias;  // biases on the projections of attention
  bool mlp_bias;            // and on the MLP's
  bool in_out_layout;       // projections stored [in, out] (GPT-2's Conv1D); otherwise [out, in]
  bool tie_word_embeddings; // the head is the token embedding
  double final_logit_softcapping; // c of c tanh(logit / c), as Gemma 2 has it; 0: none
  double norm_epsilon;
  double rope_theta;
  double partial_rotary_factor; // the share of a head's elements that rotate, the first; 0: all do
  RopeScaling rope_scaling;
  double initializer_range; // standard deviation of the initial weights
} ModelConfig;

// The columns of model.c's tables of tensors. Empty entries of those after Llama's are as Llama's.
typedef enum { NAMES_GPT2, NAMES_LLAMA, NAMES_PHI3, NAMES_OLMO2, NAMES_COUNT } TensorNames;

// A family, as transformers knows it.
typedef struct {
  TensorNames names;
  const char *model_type, *architecture; // in config.json
  const char *prefix, *layers;           // of the names of all tensors but the head's, and of a layer's
  const char *buffers[2];                // how tensors end that old files have besides the weights
  ModelConfig config;                    // its models' common choices, and transformers' defaults
} Family;

extern const Family model_families[FAMILY_COUNT];
#define FAMILY_NAMES "gpt2, llama, mistral, qwen2, qwen3, phi3 and olmo2" // the model_types, for messages

// The published shapes; fails with the list of names on an unknown one. GPT-2's and Llama's learning rates
// are the papers' (Brown et al. 2020, table 2.1; Grattafiori et al. 2024), the others were chosen here.
ModelConfig model_preset(const char *name);
// After a change of a preset's width or heads: sets the sizes that follow from these, unless `given` has them
// (0: not given).
void model_resize(ModelConfig *config, const ModelConfig *given);
double model_preset_learning_rate(const char *name);
int64_t model_default_seq_len(const ModelConfig *config); // --seq-len's default
const char *model_preset_names(const char *begin); // names with this beginning: "gpt2-tiny, gpt2-124m, ..."

// The longest sequence: all positions, or the sliding window, within which attention is full.
int64_t model_max_seq_len(const ModelConfig *config);
int64_t model_rotary_dim(const ModelConfig *config); // a head's elements that rotate
// Fails if seq_len is longer.
void model_check_seq_len(const ModelConfig *config, int64_t seq_len);

// False with the reason if the sizes make no model; model_config_check fails with it.
bool model_config_possible(const ModelConfig *config, Reason *reason);
void model_config_check(const ModelConfig *config);
