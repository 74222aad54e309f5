#include "trainer/plan.h"
#include "tools/curves/curve.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "tools/curves/table.h"

void curve_add(Curve *c, const Reading *reading) {
  c->readings = host_grow(c->readings, c->count, &c->capacity, sizeof *reading, "a curve");
  c->readings[c->count++] = *reading;
}

void curve_free(Curve *c) {
  free(c->readings);
  *c = (Curve){0};
}

const Reading *curve_find(const Curve *c, const Point *point) {
  for (int i = 0; i < c->count; i++)
    if (memcmp(&c->readings[i].point, point, sizeof *point) == 0) return &c->readings[i];
  return NULL;
}

// --- the points of a sweep ---------------------------------------------------------------------------------

enum { VALUES_MAX = 256 };

// One of --values; batch and seq_len only where it is written as BxT.
typedef struct {
  int64_t value, batch, seq_len;
} Value;

static int64_t whole(const char *text, const char *part, char **end) {
  errno = 0;
  long long value = strtoll(part, end, 10);
  if (errno || *end == part || value < 1 || value > INT32_MAX)
    fail("--values %s: '%s' is no whole number from 1 to %d; write a list (512,1024) or a range "
         "(256:2048:256, 128:16384:x2)",
         text, part, INT32_MAX);
  return value;
}

static int parse_values(const char *text, bool tokens, Value values[VALUES_MAX]) {
  int count = 0;
  char copy[2048];
  if (strlen(text) >= sizeof copy) fail("--values is too long; write a range such as 256:2048:256");
  strcpy(copy, text);
  if (!*copy) fail("--values is empty; write a list (512,1024) or a range (256:2048:256)");
  for (char *part = copy, *next, *end; part; part = next) {
    next = strchr(part, ',');
    if (next) *next++ = 0;
    int64_t first = whole(text, part, &end), last = first, step = 1, seq_len = 0;
    bool factor = false;
    if (*end == ':') {
      last = whole(text, end + 1, &end);
      if (*end != ':') fail("--values %s: a range is first:last:step or first:last:xfactor", text);
      factor = end[1] == 'x';
      step = whole(text, end + 1 + factor, &end);
    } else if (*end == 'x' && tokens) {
      seq_len = whole(text, end + 1, &end);
    }
    if (*end)
      fail("--values %s: '%s' is not understood; write a list (512,1024), a range (256:2048:256, "
           "128:16384:x2) or, of tokens, batch x sequence (4x20480)",
           text, part);
    if (last < first)
      fail("--values %s: the range ends at %lld, before it begins at %lld", text, (long long)last,
           (long long)first);
    if (factor && step < 2) fail("--values %s: a factor is 2 or more", text);
    if (first * seq_len > INT32_MAX)
      fail("--values %s: %s tokens are more than %d", text, text_grouped(first * seq_len).text, INT32_MAX);
    for (int64_t size = first; size <= last; size = factor ? size * step : size + step) {
      Value v = seq_len ? (Value){size * seq_len, size, seq_len} : (Value){.value = size};
      if (count == VALUES_MAX) fail("--values %s: that is more than %d points", text, VALUES_MAX);
      if (count && v.value <= values[count - 1].value)
        fail("--values %s: %lld stands after %lld; give each value once, from small to large", text,
             (long long)v.value, (long long)values[count - 1].value);
      values[count++] = v;
    }
  }
  return count;
}

// Eight values that show the curve of this model, as --values has them.
static Label usual_values(const Options *o, Sweep sweep) {
  long long tokens = o->batch * o->seq_len, size = o->model.vocab_size;
  Label list = {""};
  if (sweep == SWEEP_TOKENS) { // up to four times the job's, in whole sequences
    long long unit = o->batch > 1 ? o->batch / 2 * o->seq_len : o->seq_len;
    return label("%lld:%lld:%lld", unit, 8 * unit, unit);
  }
  if (sweep == SWEEP_CHUNK) // from 128 to all tokens
    return tokens > 128 ? label("128:%lld:x2,%lld", tokens - 1, tokens) : label("%lld", tokens);
  if (sweep == SWEEP_HIDDEN) {
    for (int64_t k = 1; k <= 8; k++)
      list = label("%s%s%lld", list.text, k > 1 ? "," : "", (long long)(o->model.hidden_size * k + 3) / 4);
    return list;
  }
  bool listed = false; // vocabularies: the sizes in use, and the model's
  for (long long usual = 4096; usual <= 524288; usual *= 2) {
    if (!listed && size < usual) list = label("%s%lld,", list.text, size), listed = true;
    if (llabs(usual - size) > usual / 8) list = label("%s%lld,", list.text, usual);
  }
  return listed ? label("%.*s", (int)strlen(list.text) - 1, list.text) : label("%s%lld", list.text, size);
}

// The chunk that the options give for a point.
static int64_t chunk_of(const Experiment *e, const Point *p) {
  Options at = point_options(e, p);
  at.lce_chunk = e->options->lce_chunk;
  at.lce_memory = e->options->lce_memory;
  if (!e->layer_only || !at.lce_memory) {
    plan_resolve_chunk(&at, e->device);
    return at.lce_chunk;
  }
  // By --lce-memory, of the layer alone: without the validation that a run has.
  Backend *plan = plan_backend_create(e->device, at.dtype);
  int64_t chunk = lce_chunk_within(plan, (size_t)at.lce_memory << 20, point_shape(e, p));
  backend_destroy(plan);
  if (!chunk)
    fail("--lce-memory %lld: even a chunk of one token needs more at a vocabulary of %s; give more",
         (long long)at.lce_memory, text_grouped(p->vocab_size).text);
  return chunk;
}

static void set_tokens(Point *p, const Value *v, bool layer_only) {
  int64_t seq_len = p->seq_len;
  p->batch = v->batch ? v->batch : layer_only ? 1 : v->value / seq_len;
  p->seq_len = v->batch ? v->seq_len : layer_only ? v->value : seq_len;
  if (point_tokens(p) != v->value)
    fail("--values: %s tokens are not whole sequences of %s; give multiples of --seq-len, or batch x "
         "sequence (2x%lld)",
         text_grouped(v->value).text, text_grouped(seq_len).text, (long long)seq_len);
}

void curve_add_sweep(Curve *c, const Experiment *e, Sweep sweep, const char *values) {
  const Options *o = e->options;
  Value list[VALUES_MAX];
  int count = parse_values(strcmp(values, VALUES_USUAL) ? values : usual_values(o, sweep).text,
                           sweep == SWEEP_TOKENS, list);
  for (int i = 0; i < count; i++) {
    Point p = {.sweep = sweep,
               .mode = LCE_FUSED,
               .batch = o->batch,
               .seq_len = o->seq_len,
               .vocab_size = o->model.vocab_size,
               .hidden_size = o->model.hidden_size};
    int64_t value = list[i].value;
    if (sweep == SWEEP_TOKENS) set_tokens(&p, &list[i], e->layer_only);
    if (sweep == SWEEP_VOCAB) p.vocab_size = value;
    if (sweep == SWEEP_HIDDEN) p.hidden_size = value;
    if (sweep == SWEEP_CHUNK && value > point_tokens(&p))
      fail("--values: a chunk of %s is more than the %s tokens there are", text_grouped(value).text,
           text_grouped(point_tokens(&p)).text);
    p.chunk = sweep == SWEEP_CHUNK ? value : chunk_of(e, &p);
    curve_add(c, &(Reading){.point = p});
    p.mode = LCE_MATERIALIZED;
    p.chunk = 0;
    if (sweep != SWEEP_CHUNK || i == count - 1) curve_add(c, &(Reading){.point = p});
  }
}

// --- settings ----------------------------------------------------------------------------------------------

void curve_set(Curve *c, const char *name, const char *format, ...) {
  size_t length = strlen(c->settings);
  char value[sizeof c->settings];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(value, sizeof value, format, arguments);
  va_end(arguments);
  // Separators and line ends inside a value would be read as the next setting.
  for (char *at = value; *at; at++)
    if (*at == ';' || *at == '\n') *at = ',';
  int space = (int)(sizeof c->settings - length);
  if (snprintf(c->settings + length, (size_t)space, "%s%s=%s", length ? "; " : "", name, value) >= space)
    fail("the settings of this sweep are too long to write down; give --values as a range");
}

Label curve_setting(const Curve *c, const char *name) {
  size_t length = strlen(name);
  for (const char *at = c->settings; at; at = strstr(at, "; ")) {
    if (at[0] == ';') at += 2;
    if (strncmp(at, name, length) || at[length] != '=') continue;
    const char *value = at + length + 1, *end = strstr(value, "; ");
    return label("%.*s", (int)(end ? (size_t)(end - value) : strlen(value)), value);
  }
  return (Label){""};
}

bool curve_is(const Curve *c, const char *name, const char *value) {
  return strcmp(curve_setting(c, name).text, value) == 0;
}

void curve_require_same(const Curve *on_disk, const Curve *wanted, const char *path) {
  if (strcmp(on_disk->settings, wanted->settings) == 0) return;
  char names[sizeof wanted->settings];
  strcpy(names, wanted->settings);
  for (char *name = names, *next; name; name = next) {
    next = strstr(name, "; ");
    if (next) *next = 0, next += 2;
    *strchr(name, '=') = 0;
    Label have = curve_setting(on_disk, name), want = curve_setting(wanted, name);
    if (strcmp(have.text, want.text))
      fail("%s holds a sweep with %s %s, and this one has %s; give another --out, or --fresh to start over",
           path, name, have.text[0] ? have.text : "(none)", want.text);
  }
  fail("%s holds a sweep with other settings; give another --out, or --fresh to start over", path);
}

// --- on disk -----------------------------------------------------------------------------------------------

#define SIZE(field)   .name = #field, .offset = offsetof(Reading, point.field)
#define BYTES(field)  COLUMN(Reading, field), .optional = true
#define NUMBER(field) BYTES(field), .number = true

static const Column columns[] = {
    {SIZE(sweep), .values = SWEEP_NAMES},
    {SIZE(mode), .values = MODE_NAMES},
    {SIZE(batch)},
    {SIZE(seq_len)},
    {COLUMN(Reading, tokens)},
    {SIZE(vocab_size)},
    {SIZE(hidden_size)},
    {SIZE(chunk)},
    {COLUMN(Reading, status), .values = STATUS_NAMES},
    {BYTES(planned_bytes)},
    {BYTES(planned_layer_bytes)},
    {BYTES(ledger_bytes)},
    {BYTES(layer_bytes)},
    {BYTES(device_bytes)},
    {BYTES(device_base_bytes)},
    {BYTES(usable_bytes)},
    {NUMBER(step_seconds)},
    {NUMBER(layer_seconds)},
    {NUMBER(floor_seconds)},
    {NUMBER(loss_error)},
    {NUMBER(dx_error)},
    {NUMBER(dweight_error)},
};
static const Table table = {"memory curve", columns, sizeof columns / sizeof *columns, sizeof(Reading)};

void curve_write(const Curve *c, const char *path) {
  Reading *known = host_alloc(c->count, sizeof *known, "a curve");
  int count = 0;
  for (int i = 0; i < c->count; i++) {
    if (!reading_known(&c->readings[i])) continue;
    known[count] = c->readings[i];
    known[count++].tokens = point_tokens(&c->readings[i].point);
  }
  table_write(&table, path, c->settings, known, count);
  free(known);
}

bool curve_read(Curve *c, const char *path) {
  *c = (Curve){0};
  c->readings = table_read(&table, path, c->settings, sizeof c->settings, &c->count, &c->capacity);
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->tokens != point_tokens(&r->point) || r->tokens <= 0 || !reading_known(r))
      fail("%s:%d is no row of this table; remove the line, or give --fresh", path, i + 3);
  }
  return c->readings != NULL;
}
