// The choices and sizes by which GPT-2 and Llama differ, with Hugging Face's names.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/fail.h"
#include "kernels/kernels.h"

// What is accepted, from the command line as from a file.
enum { MAX_LAYERS = 10000 };
#define MIN_ROPE_THETA 1.
#define MAX_ROPE_THETA 1e12
#define MAX_SOFTCAP    1e6

typedef enum { FAMILY_GPT2, FAMILY_LLAMA } ModelFamily;

// Llama 3's stretching of the rotary frequencies (transformers: rope_type "llama3"); factor 0 means none.
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
  // choices
  NormKind norm;                  // LayerNorm with bias, or RMSNorm
  bool learned_positions;         // a table added to the embedding; otherwise rotary
  bool gated_mlp;                 // SwiGLU; otherwise GELU (tanh)
  bool attention_bias;            // biases on the projections of attention (q, k, v and out)
  bool mlp_bias;                  // and on those of the MLP
  bool in_out_layout;             // projections stored [in, out] (GPT-2's Conv1D); otherwise [out, in]
  bool tie_word_embeddings;       // the head is the token embedding
  double final_logit_softcapping; // c of c tanh(logit / c), as Gemma 2 has it; 0: none
  double norm_epsilon;
  double rope_theta;
  RopeScaling rope_scaling;
  double initializer_range; // standard deviation of the initial weights
} ModelConfig;

// The published shapes; fails with the list of names when there is none called `name`. A preset's learning rate is its
// paper's (GPT-2 sizes: Brown et al. 2020, table 2.1; Llama: Grattafiori et al. 2024), the tiny ones' chosen here.
ModelConfig model_preset(const char *name);
double model_preset_learning_rate(const char *name);
int64_t model_default_seq_len(const ModelConfig *config); // what --seq-len is when not given
const char *model_preset_names(void);                     // "gpt2-tiny, gpt2-124m, ..."

// False with the reason when the sizes do not make a model (heads that do not divide, an odd rotary head, ...).
bool model_config_possible(const ModelConfig *config, Reason *reason);
// Fails with it.
void model_config_check(const ModelConfig *config);
