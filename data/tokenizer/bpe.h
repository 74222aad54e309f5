// Byte-pair encoding: the merges that a tokenizer learned, and how a piece of text is made of them.
#pragma once

#include <stdbool.h>
#include <stdint.h>

// From pairs of ids to the id that they merge into and its rank: a hash table, open addressing.
typedef struct {
  struct BpeMerge *slots;
  uint64_t mask; // slots - 1, a power of two less one
} BpeMerges;

BpeMerges bpe_merges_create(int64_t count);
void bpe_merges_free(BpeMerges *merges);
// The merge learned as number `rank`; a pair that is there already stays as it is.
void bpe_merges_add(BpeMerges *merges, int32_t left, int32_t right, int32_t rank, int32_t merged);

// Merges ids[0..count) in place, always the pair of the lowest rank and of equal ones the leftmost, until
// none is left; returns how many ids remain. Time count log count, whatever the text.
int64_t bpe_merge(const BpeMerges *merges, int32_t *ids, int64_t count);
