#include "tools/curves/points.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"

Sweep sweep_named(const char *name) {
  for (int s = 0; s < SWEEP_COUNT; s++)
    if (strcmp(name, SWEEP_NAMES[s]) == 0) return (Sweep)s;
  fail("--sweep %s: give tokens, vocab, hidden or chunk", name);
}

// --- values ------------------------------------------------------------------------------------------------

enum { VALUES_MAX = 256 };

// What one entry of --values says; batch and seq_len only where it was written as BxT.
typedef struct {
  int64_t value, batch, seq_len;
} Value;

typedef struct {
  Value items[VALUES_MAX];
  int count;
} Values;

static void add_value(Values *v, const char *text, Value value) {
  if (v->count == VALUES_MAX) fail("--values %s: that is more than %d points", text, VALUES_MAX);
  v->items[v->count++] = value;
}

static int64_t whole(const char *text, const char *part, char **end) {
  errno = 0;
  long long value = strtoll(part, end, 10);
  if (errno || *end == part || value < 1 || value > INT32_MAX)
    fail("--values %s: '%s' is no whole number from 1 to %d; write a list (512,1024) or a range "
         "(256:2048:256, "
         "128:16384:x2)",
         text, part, INT32_MAX);
  return value;
}

static void add_range(Values *v, const char *text, int64_t first, const char *rest) {
  char *end;
  int64_t last = whole(text, rest, &end);
  if (*end != ':') fail("--values %s: a range is first:last:step or first:last:xfactor", text);
  bool factor = end[1] == 'x';
  int64_t step = whole(text, end + 1 + factor, &end);
  if (*end) fail("--values %s: '%s' after the range is not understood", text, end);
  if (last < first)
    fail("--values %s: the range ends at %lld, before it begins at %lld", text, (long long)last,
         (long long)first);
  if (factor && step < 2) fail("--values %s: a factor is 2 or more", text);
  for (int64_t value = first; value <= last; value = factor ? value * step : value + step)
    add_value(v, text, (Value){.value = value});
}

static Values parse_values(const char *text, bool tokens) {
  Values v = {.count = 0};
  char copy[2048];
  if (strlen(text) >= sizeof copy) fail("--values is too long; write a range such as 256:2048:256");
  strcpy(copy, text);
  if (!*copy) fail("--values is empty; write a list (512,1024) or a range (256:2048:256)");
  for (char *part = copy, *next; part; part = next) {
    next = strchr(part, ',');
    if (next) *next++ = 0;
    char *end;
    int64_t value = whole(text, part, &end);
    if (*end == ':') {
      add_range(&v, text, value, end + 1);
    } else if (*end == 'x' && tokens) {
      int64_t seq_len = whole(text, end + 1, &end);
      if (*end) fail("--values %s: '%s' is not understood; write batch x sequence as 4x20480", text, part);
      if (value * seq_len > INT32_MAX)
        fail("--values %s: %s tokens are more than %d", text, text_grouped(value * seq_len).text, INT32_MAX);
      add_value(&v, text, (Value){.value = value * seq_len, .batch = value, .seq_len = seq_len});
    } else if (*end) {
      fail("--values %s: '%s' is not understood; write a list (512,1024) or a range (256:2048:256)", text,
           part);
    } else {
      add_value(&v, text, (Value){.value = value});
    }
  }
  for (int i = 1; i < v.count; i++)
    if (v.items[i].value <= v.items[i - 1].value)
      fail("--values %s: %lld stands after %lld; give each value once, from small to large", text,
           (long long)v.items[i].value, (long long)v.items[i - 1].value);
  return v;
}

static int by_value(const void *a, const void *b) {
  int64_t x = ((const Value *)a)->value, y = ((const Value *)b)->value;
  return (x > y) - (x < y);
}

// Eight values that show the curve of this model.
static Values usual_values(const Options *o, Sweep sweep) {
  Values v = {.count = 0};
  int64_t tokens = o->batch * o->seq_len, unit;
  switch (sweep) {
  case SWEEP_TOKENS: // up to four times the job's, in whole sequences
    unit = tokens / 2 / o->seq_len * o->seq_len;
    if (unit < o->seq_len) unit = o->seq_len;
    for (int64_t k = 1; k <= 8; k++) add_value(&v, "", (Value){.value = k * unit});
    break;
  case SWEEP_VOCAB: // the sizes in use, and the model's
    for (long long size = 4096; size <= 524288; size *= 2)
      if (llabs(size - o->model.vocab_size) > size / 8) add_value(&v, "", (Value){.value = size});
    add_value(&v, "", (Value){.value = o->model.vocab_size});
    break;
  case SWEEP_HIDDEN:
    for (int64_t k = 1; k <= 8; k++) add_value(&v, "", (Value){.value = (o->model.hidden_size * k + 3) / 4});
    break;
  default: // chunks from 128 to all tokens
    for (int64_t chunk = 128; chunk < tokens; chunk *= 2) add_value(&v, "", (Value){.value = chunk});
    add_value(&v, "", (Value){.value = tokens});
  }
  qsort(v.items, (size_t)v.count, sizeof *v.items, by_value);
  return v;
}

// --- points ------------------------------------------------------------------------------------------------

// By --lce-memory, of the layer alone: without the validation that a run has.
static int64_t layer_chunk(const Experiment *e, const Backend *plan, const Point *p) {
  const Options *o = e->options;
  int64_t chunk = lce_chunk_within(plan, (size_t)o->lce_memory << 20, point_shape(e, p));
  if (!chunk)
    fail("--lce-memory %lld: even a chunk of one token needs more at a vocabulary of %s; give more",
         (long long)o->lce_memory, text_grouped(p->vocab_size).text);
  return chunk;
}

// The chunk that a point's options give.
static int64_t chunk_of(const Options *o, DeviceKind device, bool layer_only, const Point *p) {
  Experiment e = {.options = o, .layer_only = layer_only};
  Options at = point_options(&e, p);
  at.lce_chunk = o->lce_chunk;
  at.lce_memory = o->lce_memory;
  Backend *plan = plan_backend_create(device, o->dtype);
  if (layer_only && o->lce_memory)
    at.lce_chunk = layer_chunk(&e, plan, p);
  else
    options_resolve_chunk(&at, device);
  backend_destroy(plan);
  return at.lce_chunk;
}

static void set_tokens(Point *p, const Value *v, const Options *o, bool layer_only) {
  p->batch = v->batch ? v->batch : layer_only ? 1 : v->value / o->seq_len;
  p->seq_len = v->batch ? v->seq_len : layer_only ? v->value : o->seq_len;
  if (p->batch * p->seq_len != v->value)
    fail(
        "--values: %s tokens are not whole sequences of %s; give multiples of --seq-len, or batch x sequence "
        "(2x%lld)",
        text_grouped(v->value).text, text_grouped(o->seq_len).text, (long long)o->seq_len);
}

void points_add_sweep(Curve *points, const Options *o, DeviceKind device, bool layer_only, Sweep sweep,
                      const char *values) {
  Values v = values ? parse_values(values, sweep == SWEEP_TOKENS) : usual_values(o, sweep);
  for (int i = 0; i < v.count; i++) {
    Point p = {.sweep = sweep,
               .batch = o->batch,
               .seq_len = o->seq_len,
               .vocab_size = o->model.vocab_size,
               .hidden_size = o->model.hidden_size};
    int64_t value = v.items[i].value;
    if (sweep == SWEEP_TOKENS) set_tokens(&p, &v.items[i], o, layer_only);
    if (sweep == SWEEP_VOCAB) p.vocab_size = value;
    if (sweep == SWEEP_HIDDEN) p.hidden_size = value;
    if (sweep == SWEEP_CHUNK && value > point_tokens(&p))
      fail("--values: a chunk of %s is more than the %s tokens there are", text_grouped(value).text,
           text_grouped(point_tokens(&p)).text);
    p.mode = LCE_FUSED;
    p.chunk = sweep == SWEEP_CHUNK ? value : chunk_of(o, device, layer_only, &p);
    curve_add(points, &(Reading){.point = p});
    p.mode = LCE_MATERIALIZED;
    p.chunk = 0;
    if (sweep != SWEEP_CHUNK || i == v.count - 1) curve_add(points, &(Reading){.point = p});
  }
}
