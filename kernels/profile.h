// Where the time of a step goes: every operation runs between two events on its stream (on the CPU: readings of the clock).
#pragma once

#include "kernels/kernels.h"

// What operations are summed by: the third column of OPERATIONS. LM head + loss is all that runs in PHASE_LOSS, the GEMMs
// too, except for communication and copies.
typedef enum {
  PROFILE_GEMMS,
  PROFILE_ATTENTION,
  PROFILE_HEAD_LOSS,
  PROFILE_ELEMENTWISE,
  PROFILE_EMBEDDING,
  PROFILE_OPTIMIZER,
  PROFILE_COMMUNICATION,
  PROFILE_COPIES,
  PROFILE_IDLE, // of the compute stream
  PROFILE_GROUPS
} ProfileGroup;

const char *profile_group_name(ProfileGroup group);

enum { PROFILE_WARM_UP = 2 }; // the first steps, which are not counted

// Sums over the steps that were counted.
typedef struct {
  int64_t steps;
  double step_seconds; // the sum of all groups' seconds
  struct {
    int64_t calls;
    double seconds; // on the compute stream: for communication and copies on a GPU, those for which it waits
    double
        own_seconds; // on streams of their own, concurrently. The CPU has none; it copies where copies are joined
  } groups[PROFILE_GROUPS];
} ProfileTotals;

// Replaces the backend's table of operations by one that times them, until profile_end, which backend_destroy calls.
// The functions below do nothing without. Where there is NVTX steps, phases and operations are ranges of it.
void profile_begin(Backend *backend);
void profile_end(Backend *backend);

// What runs from here on. A step begins at PHASE_STEP and ends at PHASE_NONE; the phases after it are parts of a step.
typedef enum {
  PHASE_NONE,
  PHASE_VALIDATION,
  PHASE_STEP,
  PHASE_FORWARD,
  PHASE_LOSS,
  PHASE_BACKWARD,
  PHASE_UPDATE
} ProfilePhase;
void profile_phase(Backend *backend, ProfilePhase phase);

// Between steps: waits for them, and adds up those since the last call. NULL without profile_begin.
const ProfileTotals *profile_collect(Backend *backend);
