// config.json, Hugging Face's description of a model, to and from ours.
//
// Reads GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM in the
// spelling of transformers 4 or 5, with rotary positions plain or scaled as "linear", "llama3" or "dynamic",
// which is plain within max_position_embeddings. Features that a file requires and this program lacks are
// refused by name. Dropout is ignored.
#pragma once

#include "model/config.h"

// False with a reason if the text describes no model that can be computed here.
bool hf_config_parse(const char *text, size_t length, ModelConfig *config, Reason *reason);

// The model in `directory`, named after it unless the file has a name. The reason is "" without a file.
bool hf_config_try_read(const char *directory, ModelConfig *config, Reason *reason);
ModelConfig hf_config_read(const char *directory);

// The text of a config.json for weights stored as `dtype`; the caller frees it. It keeps the other members of
// `original`, the file that the model came with, or NULL.
char *hf_config_write(const ModelConfig *config, Dtype dtype, const char *original);
