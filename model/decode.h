// The next token's logits, from a cache of the keys and values of those before it.
#pragma once

#include "model/transformer.h"

// The keys and values of a text's tokens so far, of every layer: what the next token's attention reads.
typedef struct {
  int64_t batch, capacity; // B sequences of up to P tokens
  Tensor data;             // fp32/bf16 [2 L B K, P D]: layer by layer the keys, then the values
} KeyValueCache;

// A cache on top of the backend's stack, uninitialised.
KeyValueCache key_value_cache_push(Backend *backend, const ModelConfig *config, int64_t batch,
                                   int64_t capacity);

// The logits (fp32 [R, V], the caller's) of the rows `rows` (int32 [R]) of the batch, for sampling. With a cache the
// batch's tokens follow `past` others in it and are added to it; rows and logits may then be absent together, to
// fill the cache alone. Without one (NULL) past is 0.
void transformer_logits(Backend *backend, Model *model, const Batch *batch, const KeyValueCache *cache,
                        int64_t past, Tensor rows, Tensor logits);
