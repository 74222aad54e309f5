#include "data/tokenizer/bpe.h"

#include <stdlib.h>

#include "base/alloc.h"

// --- the table ---------------------------------------------------------------------------------------------

struct BpeMerge {
  int32_t left, right; // left -1: the slot is empty
  int32_t rank, merged;
};

BpeMerges bpe_merges_create(int64_t count) {
  uint64_t slots = 16;
  while (slots < 2 * (uint64_t)count) slots *= 2;
  BpeMerges merges = {.slots = host_alloc((int64_t)slots, sizeof *merges.slots, "the merges of a tokenizer"),
                      .mask = slots - 1};
  for (uint64_t i = 0; i < slots; i++) merges.slots[i].left = -1;
  return merges;
}

void bpe_merges_free(BpeMerges *merges) {
  free(merges->slots);
  *merges = (BpeMerges){0};
}

// The pair's slot, or the empty one where it would be.
static struct BpeMerge *find(const BpeMerges *merges, int32_t left, int32_t right) {
  uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
  for (uint64_t i = hash >> 32;; i++) {
    struct BpeMerge *slot = &merges->slots[i & merges->mask];
    if (slot->left < 0 || (slot->left == left && slot->right == right)) return slot;
  }
}

void bpe_merges_add(BpeMerges *merges, int32_t left, int32_t right, int32_t rank, int32_t merged) {
  struct BpeMerge *slot = find(merges, left, right);
  if (slot->left < 0) *slot = (struct BpeMerge){left, right, rank, merged};
}

// --- merging -----------------------------------------------------------------------------------------------

// The ids are a doubly linked list in an array. What could be merged waits in a heap; a candidate whose
// tokens have changed in the meantime is passed over when its turn comes.
typedef struct {
  int32_t id;            // -1: merged into its left neighbour
  int32_t before, after; // places, or -1
} Symbol;

typedef struct {
  int32_t rank, place, left, right, merged;
} Candidate;

typedef struct {
  Symbol *symbols;
  Candidate *heap;
  int64_t waiting;
} Work;

static bool precedes(const Candidate *a, const Candidate *b) {
  return a->rank < b->rank || (a->rank == b->rank && a->place < b->place);
}

static void push(Work *w, Candidate c) {
  int64_t at = w->waiting++;
  for (; at > 0 && precedes(&c, &w->heap[(at - 1) / 2]); at = (at - 1) / 2)
    w->heap[at] = w->heap[(at - 1) / 2];
  w->heap[at] = c;
}

static Candidate pop(Work *w) {
  Candidate first = w->heap[0], moved = w->heap[--w->waiting];
  int64_t at = 0;
  for (int64_t child; (child = 2 * at + 1) < w->waiting; at = child) {
    if (child + 1 < w->waiting && precedes(&w->heap[child + 1], &w->heap[child])) child++;
    if (!precedes(&w->heap[child], &moved)) break;
    w->heap[at] = w->heap[child];
  }
  w->heap[at] = moved;
  return first;
}

// The pair whose left half is at `place`, if it can be merged.
static void consider(Work *w, const BpeMerges *merges, int32_t place) {
  if (place < 0 || w->symbols[place].after < 0) return;
  int32_t left = w->symbols[place].id, right = w->symbols[w->symbols[place].after].id;
  const struct BpeMerge *merge = find(merges, left, right);
  if (merge->left >= 0) push(w, (Candidate){merge->rank, place, left, right, merge->merged});
}

int64_t bpe_merge(const BpeMerges *merges, int32_t *ids, int64_t count) {
  if (count < 2) return count;
  // Every merge takes one candidate away and adds at most two to the count - 1 of the beginning.
  Work w = {.symbols = host_alloc(count, sizeof *w.symbols, "a piece of text"),
            .heap = host_alloc(2 * count, sizeof *w.heap, "a piece of text")};
  for (int32_t i = 0; i < count; i++) w.symbols[i] = (Symbol){ids[i], i - 1, i + 1 < count ? i + 1 : -1};
  for (int32_t i = 0; i + 1 < count; i++) consider(&w, merges, i);
  while (w.waiting > 0) {
    Candidate c = pop(&w);
    Symbol *left = &w.symbols[c.place];
    if (left->id != c.left || left->after < 0 || w.symbols[left->after].id != c.right) continue;
    Symbol *right = &w.symbols[left->after];
    left->id = c.merged;
    right->id = -1;
    left->after = right->after;
    if (left->after >= 0) w.symbols[left->after].before = c.place;
    consider(&w, merges, left->before);
    consider(&w, merges, c.place);
  }
  int64_t kept = 0;
  for (int32_t at = 0; at >= 0; at = w.symbols[at].after) ids[kept++] = w.symbols[at].id;
  free(w.symbols);
  free(w.heap);
  return kept;
}
