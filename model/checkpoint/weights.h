// A model's numbers on disk: the weights as Hugging Face stores them, and beside them what the optimizer knows.
#ifndef LCE_MODEL_CHECKPOINT_WEIGHTS_H
#define LCE_MODEL_CHECKPOINT_WEIGHTS_H

#include "model/checkpoint/tensors.h"
#include "model/model.h"

// Reads model.safetensors or its shards into the weights and, where they are kept, the master weights. Every
// tensor of the model must be there with its shape, and nothing else but what is known to mean nothing (buffers
// of old files, a copy of a tied head): what is missing, left over or misshapen is named in one sentence with
// its file. Names may lack the base model's prefix (transformer. or model.), as in files of the bare model.
void weights_load(Model *model, Backend *backend, const char *folder);
// Writes them, as fp32 from the master weights where there are any, or as bf16.
void weights_store(const Model *model, Backend *backend, Folder *folder, Dtype dtype, size_t shard_bytes);

// The moments ("m.NAME", "v.NAME") in their own dtype and, unless the stored weights are fp32 already, the
// master weights ("master.NAME"), in training_state.safetensors or its shards.
void optimizer_store(const Model *model, Backend *backend, Folder *folder, Dtype weights_dtype,
                     size_t shard_bytes);
// Call after weights_load. Fails like it.
void optimizer_load(Model *model, Backend *backend, const char *folder);

bool is_optimizer_file(const char *name);

#endif
