#include "trainer/schedule.h"

#include <math.h>

const char *schedule_name(ScheduleKind kind) {
  static const char *const names[SCHEDULE_COUNT] = {"cosine", "linear", "constant", "wsd"};
  return names[kind];
}

// From 1 at `progress` 0 to `floor` at 1, in a straight line.
static double decay(double progress, double floor) {
  return 1 - (1 - floor) * progress;
}

double schedule_rate(const Schedule *s, int64_t step) {
  const double pi = 3.14159265358979323846;
  if (step < s->warmup_steps) return s->peak * (double)(step + 1) / (double)s->warmup_steps;
  int64_t span = s->total_steps - s->warmup_steps;
  double progress = span > 0 ? (double)(step - s->warmup_steps) / (double)span : 1;
  if (progress > 1) progress = 1;
  double stable = 1 - s->decay_share;
  switch (s->kind) {
  case SCHEDULE_COSINE:
    return s->peak * decay(0.5 * (1 - cos(pi * progress)), s->floor);
  case SCHEDULE_LINEAR:
    return s->peak * decay(progress, s->floor);
  case SCHEDULE_WSD:
    return s->peak * decay(progress > stable ? (progress - stable) / s->decay_share : 0, s->floor);
  default:
    return s->peak;
  }
}
