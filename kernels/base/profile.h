// Measures a step's time: every operation runs between two events on its stream (CPU: clock readings).
#pragma once

#include "kernels/cost.h"

// The third column of OPERATIONS. LM head + loss is all that runs in PHASE_LOSS but communication and copies;
// idle the compute stream between operations.
#define PROFILE_GROUPS(X)                                                                                    \
  X(GEMMS, "GEMMs")                                                                                          \
  X(ATTENTION_FORWARD, "attention forward")                                                                  \
  X(ATTENTION_BACKWARD, "attention backward")                                                                \
  X(HEAD_LOSS, "LM head + loss")                                                                             \
  X(ELEMENTWISE, "norms, elementwise")                                                                       \
  X(EMBEDDING, "embedding")                                                                                  \
  X(OPTIMIZER, "optimizer")                                                                                  \
  X(COMMUNICATION, "communication")                                                                          \
  X(COPIES, "copies")                                                                                        \
  X(QUANTIZING, "quantizing")                                                                                \
  X(IDLE, "idle")
#define GROUP(group, name) PROFILE_##group,
typedef enum { PROFILE_GROUPS(GROUP) PROFILE_GROUP_COUNT } ProfileGroup;
#undef GROUP

// Sums over steps.
typedef struct {
  int64_t steps;
  double step_seconds; // the sum of all groups' seconds
  struct {
    const char *name;
    int64_t calls;
    double seconds;      // of the compute stream, with its waits for other streams
    double own_seconds;  // on streams of their own, concurrently; the CPU has none, and copies at copies_join
    double flops, bytes; // as in Amount
  } groups[PROFILE_GROUP_COUNT];
} ProfileTotals;

// Replaces the backend's table of operations by one that times them, until profile_end (backend_destroy calls
// it). Without it the functions below do nothing. Steps, phases and operations become NVTX ranges.
void profile_begin(Backend *backend);
void profile_end(Backend *backend);

// Begins a phase. A step begins at PHASE_STEP, has the phases after it, and ends at PHASE_NONE.
enum { PHASE_NONE, PHASE_EVAL, PHASE_STEP, PHASE_FORWARD, PHASE_LOSS, PHASE_BACKWARD, PHASE_UPDATE };
void profile_phase(Backend *backend, int phase);

// Between steps: waits for them, and adds up those since the last call. NULL without profile_begin.
const ProfileTotals *profile_collect(Backend *backend);
