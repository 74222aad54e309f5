#include "data/packing.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "base/integers.h"

// Windows with free space: stacks by their free tokens, and a bit for each stack that is not empty.
typedef struct {
  int64_t seq_len, windows, capacity;
  int64_t *next;  // [windows]: the window below
  int64_t *top;   // [seq_len + 1]: a window, or -1
  uint64_t *some; // [seq_len / 64 + 1]
} FreeSpace;

static void push(FreeSpace *s, int64_t window, int64_t space) {
  s->next[window] = s->top[space];
  s->top[space] = window;
  s->some[space / 64] |= (uint64_t)1 << space % 64;
}

static int64_t pop(FreeSpace *s, int64_t space) {
  int64_t window = s->top[space];
  s->top[space] = s->next[window];
  if (s->top[space] < 0) s->some[space / 64] &= ~((uint64_t)1 << space % 64);
  return window;
}

// The least space of any window that is `length` or more; more than seq_len: there is none.
static int64_t best_space(const FreeSpace *s, int64_t length) {
  int64_t word = length / 64;
  uint64_t bits = s->some[word] >> length % 64 << length % 64;
  while (!bits && ++word <= s->seq_len / 64) bits = s->some[word];
  return bits ? word * 64 + __builtin_ctzll(bits) : s->seq_len + 1;
}

static int64_t best_fit(FreeSpace *s, int64_t length) {
  int64_t space = best_space(s, length), window = s->windows;
  if (space <= s->seq_len) {
    window = pop(s, space);
  } else {
    s->next = host_grow(s->next, s->windows++, &s->capacity, sizeof *s->next, "windows of documents");
    space = s->seq_len;
  }
  push(s, window, space - length);
  return window;
}

// By a key each, then in the order of the stream.
static int compare(int64_t key, int64_t other_key, const PackedPiece *x, const PackedPiece *y) {
  return key != other_key ? (key > other_key) - (key < other_key)
                          : (x->first > y->first) - (x->first < y->first);
}

static int longest_first(const void *a, const void *b) {
  const PackedPiece *x = a, *y = b;
  return compare(y->length, x->length, x, y);
}

static int by_window(const void *a, const void *b) {
  const PackedPiece *x = a, *y = b;
  return compare(x->window, y->window, x, y);
}

Packing *packing_create(const Source *source, int64_t seq_len, int64_t end_of_text) {
  static const char what[] = "packed documents";
  Packing *p = host_alloc(1, sizeof *p, what);
  int64_t *ends = source_document_ends(source, end_of_text, &p->documents), count = 0, capacity = 0;
  for (int64_t i = 0, first = 0; i < p->documents; first = ends[i++])
    for (int64_t length; first < ends[i] - 1; first += length) {
      length = min_i64(seq_len, ends[i] - 1 - first);
      p->pieces = host_grow(p->pieces, count, &capacity, sizeof *p->pieces, what);
      p->pieces[count++] = (PackedPiece){.first = first, .length = length};
      p->pairs += length;
    }
  free(ends);
  FreeSpace space = {.seq_len = seq_len,
                     .top = host_alloc(seq_len + 1, sizeof *space.top, what),
                     .some = host_alloc(seq_len / 64 + 1, sizeof *space.some, what)};
  for (int64_t i = 0; i <= seq_len; i++) space.top[i] = -1;
  if (count) qsort(p->pieces, (size_t)count, sizeof *p->pieces, longest_first);
  for (int64_t i = 0; i < count; i++) p->pieces[i].window = best_fit(&space, p->pieces[i].length);
  if (count) qsort(p->pieces, (size_t)count, sizeof *p->pieces, by_window);
  p->windows = space.windows;
  p->starts = host_alloc(p->windows + 1, sizeof *p->starts, what);
  for (int64_t i = 0; i < count; i++) p->starts[p->pieces[i].window + 1] = i + 1;
  free(space.next);
  free(space.top);
  free(space.some);
  return p;
}

void packing_free(Packing *p) {
  if (!p) return;
  free(p->pieces);
  free(p->starts);
  free(p);
}
