// A model: its configuration, its weights, and the layers as operations see them.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"
#include "model/config.h"
#include "model/parameters.h"

// The weights of a matmul or a norm. The bias is absent if the model has none, as in Llama.
typedef struct {
  Weight weight, bias;
} WeightAndBias;

// One transformer block.
typedef struct {
  WeightAndBias norm1;          // before attention or, with config.post_norm, after it
  WeightAndBias qkv;            // [(Q + 2K) D, H]: q, k and v as one GEMM
  WeightAndBias q_norm, k_norm; // with config.qk_norm: [D] each or, of all heads at once, [Q D] and [K D]
  WeightAndBias out;            // [H, Q D]
  WeightAndBias norm2;          // before the MLP or after it
  WeightAndBias up;             // [F, H], or [2F, H] with the gate's rows first
  WeightAndBias down;           // [H, F]
} Layer;                        // GPT-2 stores the four matrices transposed (config.in_out_layout)

typedef struct {
  ModelConfig config;
  ParameterSet parameters;
  Weight token_embedding;    // [V, H]
  Weight position_embedding; // [P, H], GPT-2 only
  Layer *layers;
  WeightAndBias final_norm;
  Weight head;              // [V, H]: the token embedding itself if tied; the local rows if split
  QuantizedRows head_codes; // of the rows that the loss reads, or absent
  VocabShard shard;         // the local rows; {0, 0}: the head is whole
  Tensor rope_angles;       // fp32 [seq_len, A], not GPT-2: cosines, then sines, of what rotates
} Model;

// Lays out the parameters and reserves their slabs and the rotary table for sequences up to seq_len. The
// model owns its tables on the host, the backend's memory the tensors. Fails if the sizes make no model. The
// model must not move.
void model_create(Model *model, const ModelConfig *config, Backend *backend, ParameterDtypes dtypes,
                  int64_t seq_len);
// A part of model_create: reserves what the matmuls of training read besides the weights (matmuls_enter).
void matmuls_reserve(Model *model, Memory *memory, ParameterDtypes dtypes);
// The rows of the head [., H] that this rank computes the training loss with.
Tensor model_head_shard(const Model *model);
void model_destroy(Model *model);

// For evaluation and text: a split head is whole until model_drop_head. Call both on all ranks.
MemoryMark model_gather_head(Model *model, Backend *backend);
void model_drop_head(Model *model, Backend *backend, MemoryMark mark);

int64_t model_parameter_count(const ModelConfig *config);

// Floating-point operations of a training step per token, as MFU counts them (PaLM, Chowdhery et al. 2022,
// appendix B): 6 for each weight of a GEMM (2 forward, 4 backward), the head's included, and for attention 6
// L T Q D, half of PaLM's 12, as it is causal. Norms, optimizer and recomputation are not counted.
double model_flops_per_token(const ModelConfig *config, int64_t seq_len);

// inv_freq[i] = theta^(-2i/A) for i < A/2, with A = model_rotary_dim; linear scaling divides it by the
// factor; Llama 3.1 (_compute_llama3_parameters of transformers) divides it where the wavelength is beyond
// original/low_freq_factor, not where it is under original/high_freq_factor, and blended linearly between.
void rope_frequencies(const ModelConfig *config, float *inv_freq);
