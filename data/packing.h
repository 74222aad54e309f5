// Documents packed into windows by best fit, so that few are cut and little of a window is padding.
//
// A document of n tokens gives n - 1 pairs of an input and its target, the next token; its last one, the token that ends
// it, is predicted and not read. A document with more than T pairs is cut into pieces of T and a rest, all others stay
// whole. The longest pieces come first, each into the fullest window that has space for it (best-fit decreasing; Ding et
// al. 2024, "Fewer Truncations Improve Language Modeling"). Every pair is in exactly one window, and what is left of a
// window is padding. The windows depend on the data and T alone; the seed orders them, as it does others (loader.h).
#pragma once

#include "data/source.h"

typedef struct {
  int64_t first, length, window; // pairs from a position of the source on
} PackedPiece;

typedef struct {
  int64_t windows, documents, pairs;
  PackedPiece *pieces; // by window, and within one in the order of the stream
  int64_t *starts;     // [windows + 1]: where the pieces of a window begin
} Packing;

// end_of_text as in source_document_ends. Takes 24 bytes of memory for each piece. The caller frees it.
Packing *packing_create(const Source *source, int64_t seq_len, int64_t end_of_text);
void packing_free(Packing *packing); // NULL is fine
