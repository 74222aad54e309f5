// config.json, Hugging Face's description of a model, to and from ours.
//
// Read are GPT2LMHeadModel, and with rotary positions plain or scaled as "linear" or "llama3", in the
// spelling of transformers 4 or 5, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and
// Qwen3ForCausalLM. What such a file requires and this program does not compute is refused by name. Dropout
// is left out: it only concerns training, and there is none here.
#pragma once

#include <stddef.h>

#include "kernels/fail.h"
#include "model/config.h"

// False with a reason when the text describes no model that can be computed here.
bool hf_config_parse(const char *text, size_t length, ModelConfig *config, Reason *reason);

// The model in `directory`, called so unless the file has a name. False with a reason, "" where there is no
// such file; hf_config_read fails with it.
bool hf_config_try_read(const char *directory, ModelConfig *config, Reason *reason);
ModelConfig hf_config_read(const char *directory);

// The text of a config.json for a model whose weights are stored as `dtype`. `original` is the file that the
// model came with, whose other members (token ids among them) are kept, or NULL. The caller frees it.
char *hf_config_write(const ModelConfig *config, Dtype dtype, const char *original);
