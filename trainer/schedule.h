// The learning rate of a step.
#pragma once

#include <stdint.h>

typedef enum {
  SCHEDULE_COSINE,   // warm-up, then half a cosine down to the floor (Loshchilov, Hutter 2017)
  SCHEDULE_LINEAR,   // warm-up, then a straight line down to the floor
  SCHEDULE_CONSTANT, // warm-up, then no change
  SCHEDULE_WSD,      // warm-up, stable, then a straight line down at the end (Hu et al. 2024)
  SCHEDULE_COUNT
} ScheduleKind;

const char *schedule_name(ScheduleKind kind);

typedef struct {
  ScheduleKind kind;
  double peak;          // learning rate after the warm-up
  double floor;         // share of the peak that is left at the end, 0 to 1
  double decay_share;   // of the steps after the warm-up: wsd's line down, 0 to 1
  int64_t warmup_steps; // steps over which the rate rises from peak / warmup_steps to the peak
  int64_t total_steps;
} Schedule;

// The rate of step `step`, counted from 0. Past total_steps it stays at its end.
double schedule_rate(const Schedule *schedule, int64_t step);
