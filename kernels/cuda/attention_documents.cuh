// The documents of packed sequences (AttentionForward.documents), for the attention kernels.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

namespace attention {

// Bounds of documents in the sequence of T tokens from row `first` on. Neither bound falls as t grows.
struct Documents {
  const int32_t *before, *after; // [N]; NULL: a sequence is one document

  // The first token of t's document, which is the first key that query t sees.
  DEVICE int start(int64_t first, int64_t t) const { return before ? (int)t - before[first + t] : 0; }
  // The document's end: queries [t, end) see key t.
  DEVICE int end(int64_t first, int64_t t, int64_t T) const {
    return after ? (int)t + 1 + after[first + t] : (int)T;
  }
};

static __host__ DEVICE Documents documents_of(const Tensor &documents) {
  const int32_t *before = data_of<const int32_t>(documents);
  return {before, before ? before + documents.shape[1] : nullptr};
}

} // namespace attention
