#include "tools/curves/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "trainer/speed.h"

// --- the table ---------------------------------------------------------------------------------------------

static Text bytes_cell(size_t bytes) {
  return bytes ? text_bytes(bytes) : (Text){"-"};
}

static Text time_cell(double seconds) {
  Text t = {"-"};
  if (seconds > 0)
    snprintf(t.text, sizeof t.text, seconds < 10 ? "%.1f ms" : "%.1f s",
             seconds < 10 ? 1e3 * seconds : seconds);
  return t;
}

static void print_head(FILE *out, const Experiment *e, bool errors) {
  fprintf(out, "%-17s %-13s %6s %11s %11s %11s %11s %10s %10s", "", "", "chunk", "planned", "ledger",
          "device", "LM head", e->layer_only ? "GEMMs" : "step", "LM head");
  if (errors) fprintf(out, " %9s %9s %9s", "loss err", "dX err", "dW err");
  fputc('\n', out);
}

static void print_row(FILE *out, const Experiment *e, const Reading *r, const char *left) {
  const Point *p = &r->point;
  char what[40], chunk[24] = "-";
  snprintf(what, sizeof what, "%s %s", SWEEP_NAMES[p->sweep], text_grouped((int64_t)point_value(p)).text);
  if (p->chunk) snprintf(chunk, sizeof chunk, "%lld", (long long)p->chunk);
  // The device's figure without its context and libraries: comparable with the ledger.
  size_t held = r->device_bytes > r->device_base_bytes ? r->device_bytes - r->device_base_bytes : 0;
  fprintf(out, "%-17s %-13s %6s %11s %11s %11s %11s %10s %10s", what, lce_mode_name(p->mode), chunk,
          bytes_cell(r->planned_bytes).text, bytes_cell(r->ledger_bytes).text, bytes_cell(held).text,
          bytes_cell(reading_layer_bytes(r)).text,
          time_cell(e->layer_only ? r->floor_seconds : r->step_seconds).text,
          time_cell(r->layer_seconds).text);
  if (e->errors && r->status == POINT_MEASURED)
    fprintf(out, " %9.2g %9.2g %9.2g", r->loss_error, r->dx_error, r->dweight_error);
  if (r->status == POINT_NO_MEMORY)
    fprintf(out, "  does not fit: needs %s of %s", text_bytes(r->planned_bytes).text,
            text_bytes(r->usable_bytes).text);
  else if (r->status != POINT_MEASURED)
    fprintf(out, "  %s", STATUS_NAMES[r->status]);
  fprintf(out, "%s\n", left);
  fflush(out);
}

// --- visiting ----------------------------------------------------------------------------------------------

// A guess at what a point costs, in flops: its own passes and a share for setting it up.
static double cost(const Experiment *e, const Point *p) {
  return point_flops(e, p) + 1e9;
}

// Takes the file's readings of this sweep; a file of other settings ends the program. Returns how many there were.
static int take_up(Curve *c, const char *path) {
  Curve found;
  int had = 0;
  if (!curve_read(&found, path)) return 0;
  curve_require_same(&found, c, path);
  for (int i = 0; i < c->count; i++) {
    const Reading *r = curve_find(&found, &c->readings[i].point);
    if (r && r->status != POINT_TOO_SLOW) c->readings[i] = *r, had++;
  }
  curve_free(&found);
  return had;
}

void run_points(FILE *out, const Experiment *e, const char *path, bool fresh, Curve *c) {
  int had = fresh ? 0 : take_up(c, path);
  curve_write(c, path);
  if (had)
    fprintf(out, "%d of %d points are in %s already (--fresh measures them again)\n", had, c->count, path);
  double ahead = 0, done = 0, started = now_seconds();
  for (int i = 0; i < c->count; i++)
    if (!reading_known(&c->readings[i])) ahead += cost(e, &c->readings[i].point);
  print_head(out, e, e->errors);
  bool terminal = isatty(fileno(out));
  for (int i = 0; i < c->count; i++) {
    Reading *r = &c->readings[i];
    const Point *p = &r->point;
    if (reading_known(r)) {
      print_row(out, e, r, "");
      continue;
    }
    if (terminal)
      fprintf(out, "%s %s, %s ...\r", SWEEP_NAMES[p->sweep], text_grouped((int64_t)point_value(p)).text,
              lce_mode_name(p->mode));
    fflush(out);
    *r = point_read(e, p);
    curve_append(r, path);
    // What was only planned took no time: it says nothing about the rest.
    if (r->status == POINT_MEASURED)
      done += cost(e, p);
    else
      ahead -= cost(e, p);
    char left[40] = "";
    double spent = now_seconds() - started;
    if (done > 0 && ahead - done > 1e-6 * ahead)
      snprintf(left, sizeof left, "  %s left", text_duration(spent / done * (ahead - done)).text);
    print_row(out, e, r, left);
  }
}

// --- the summary -------------------------------------------------------------------------------------------

static void agreement(FILE *out, const Curve *c) {
  int measured = 0, exact = 0;
  double least = INFINITY, most = -INFINITY, base = 0;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->status != POINT_MEASURED) continue;
    measured++;
    exact += r->planned_bytes == r->ledger_bytes && r->planned_layer_bytes == r->layer_bytes;
    double apart = (double)r->device_bytes - (double)r->device_base_bytes - (double)r->ledger_bytes;
    least = fmin(least, apart);
    most = fmax(most, apart);
    base = fmax(base, (double)r->device_base_bytes);
  }
  if (!measured) {
    fprintf(out, "\nevery figure is planned: nothing was allocated\n");
    return;
  }
  fprintf(out, "\nplanned and ledger agree to the byte at %d of %d measured points\n", exact, measured);
  fprintf(out,
          "the device counts from %s less to %s more than the ledger, and up to %s for its context and "
          "libraries\n",
          text_bytes((uint64_t)fmax(0, -least)).text, text_bytes((uint64_t)fmax(0, most)).text,
          text_bytes((uint64_t)base).text);
}

// The materialized reading that a fused one is to be compared with.
static const Reading *partner(const Curve *c, const Reading *fused) {
  Point p = fused->point;
  for (int i = 0; i < c->count; i++) {
    const Point *q = &c->readings[i].point;
    if (q->mode == LCE_MATERIALIZED && q->sweep == p.sweep && point_tokens(q) == point_tokens(&p) &&
        q->vocab_size == p.vocab_size && q->hidden_size == p.hidden_size)
      return &c->readings[i];
  }
  return NULL;
}

static void saving(FILE *out, const Experiment *e, const Reading *fused, const Reading *logits) {
  const Point *p = &fused->point;
  double less = (double)reading_layer_bytes(logits) / (double)reading_layer_bytes(fused);
  bool measured = fused->layer_bytes && logits->layer_bytes;
  fprintf(out,
          "at N %s, H %s, V %s the peak of the LM head + loss beyond its gradients falls %.1f times, from %s "
          "materialized to "
          "%s fused at chunk %s (%s, %s)\n",
          text_grouped(point_tokens(p)).text, text_grouped(p->hidden_size).text,
          text_grouped(p->vocab_size).text, less, text_bytes(reading_layer_bytes(logits)).text,
          text_bytes(reading_layer_bytes(fused)).text, text_grouped(p->chunk).text,
          dtype_name(e->options->dtype), measured ? "measured" : "planned");
  if (e->layer_only) return;
  double planned = (double)logits->planned_bytes - (double)fused->planned_bytes;
  fprintf(out, "the whole step's peak falls from %s to %s", text_bytes(reading_bytes(logits)).text,
          text_bytes(reading_bytes(fused)).text);
  if (fused->ledger_bytes && logits->ledger_bytes) {
    double ledger = (double)logits->ledger_bytes - (double)fused->ledger_bytes;
    double device = (double)logits->device_bytes - (double)logits->device_base_bytes -
                    (double)fused->device_bytes + (double)fused->device_base_bytes;
    fprintf(out, ": by %s, where the plan says %s and the device %s\n",
            text_bytes((uint64_t)fmax(0, ledger)).text, text_bytes((uint64_t)fmax(0, planned)).text,
            text_bytes((uint64_t)fmax(0, device)).text);
  } else {
    fprintf(out, ", planned\n");
  }
}

void run_summary(FILE *out, const Experiment *e, const Curve *c) {
  agreement(out, c);
  // One sentence for the largest point of each curve, the measured one where there is one.
  for (int s = 0; s < SWEEP_COUNT; s++) {
    const Reading *best = NULL;
    for (int i = 0; i < c->count; i++) {
      const Reading *r = &c->readings[i], *other = partner(c, r);
      if (r->point.sweep != (Sweep)s || r->point.mode != LCE_FUSED || !other) continue;
      bool measured = r->layer_bytes && other->layer_bytes;
      bool had = best && best->layer_bytes && partner(c, best)->layer_bytes;
      // Of chunks, the first says most; of the rest, the last.
      if (!best || (measured && !had) || (measured == had && s != SWEEP_CHUNK)) best = r;
    }
    if (best) saving(out, e, best, partner(c, best));
  }
}
