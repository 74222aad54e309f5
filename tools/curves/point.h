// One point of a memory curve: a shape and a mode of the LM head + loss, its plan and its measurement.
#pragma once

#include "data/loader.h"
#include "kernels/linear_cross_entropy.h"
#include "trainer/trainer.h"

typedef enum { SWEEP_TOKENS, SWEEP_VOCAB, SWEEP_HIDDEN, SWEEP_CHUNK, SWEEP_COUNT } Sweep;
extern const char *const SWEEP_NAMES[]; // "tokens", "vocab", "hidden", "chunk", NULL
extern const char *const MODE_NAMES[];  // by LceMode, then NULL

typedef struct {
  Sweep sweep; // the curve it belongs to
  LceMode mode;
  int64_t batch, seq_len; // tokens = batch * seq_len
  int64_t vocab_size, hidden_size;
  int64_t chunk; // 0 when materialized
} Point;

int64_t point_tokens(const Point *point);
double point_value(const Point *point); // of what is swept

typedef enum {
  POINT_PLANNED,   // not to be measured
  POINT_MEASURED,  // on the device
  POINT_NO_MEMORY, // planned: the device has too little memory
  POINT_TOO_SLOW   // planned: it would take longer than the patience given
} PointStatus;
extern const char *const STATUS_NAMES[]; // "planned", "measured", "does not fit", "too slow", NULL

// Bytes and seconds; 0 where nothing was measured.
typedef struct {
  Point point;
  PointStatus status;
  size_t planned_bytes, planned_layer_bytes;
  size_t ledger_bytes; // peak in use: of the step, or with --layer-only of the LM head + loss and its tensors
  size_t layer_bytes;  // what the LM head + loss pushed beyond its tensors, its operations' scratch included
  // What the device counts at the peak, and with everything freed: the context and the libraries.
  size_t device_bytes, device_base_bytes;
  size_t usable_bytes; // what the device had to give; 0 when unknown
  double step_seconds, layer_seconds;
  double floor_seconds; // of its three GEMMs alone, timed alternately with it
  double loss_error, dx_error, dweight_error;
  int64_t tokens; // on disk, for other programs
} Reading;

bool reading_known(const Reading *reading); // whether its point was planned or measured
// The better figures of a reading: measured where there is a measurement.
size_t reading_bytes(const Reading *reading);
size_t reading_layer_bytes(const Reading *reading);
// What the device counts without its context and libraries: comparable with the ledger.
double reading_device_bytes(const Reading *reading);

// What is done with every point.
typedef struct {
  const Options *options; // model and job; dtypes resolved, sizes replaced by the point's
  DeviceKind device;
  bool layer_only; // the LM head + loss on random data, no model around it
  bool plan_only;
  bool errors;      // compare the gradients with float64 (layer_only)
  size_t memory;    // bytes the device is taken to have; 0: those it reports
  double patience;  // seconds a point may take
  double gemm_rate; // flops a second, to estimate how long a point takes; 0 when planning
} Experiment;

// The options with a point's sizes in place, its chunk too. Fails when they make no model.
Options point_options(const Experiment *experiment, const Point *point);
LceShape point_shape(const Experiment *experiment, const Point *point); // of its LM head + loss
// Flops of one step (or layer) of a point, and a share for setting it up: what its time is guessed from.
double point_flops(const Experiment *experiment, const Point *point);

// Steps of a trainer on the options' data, or on the built-in corpus; on a plan without any. The options must outlive it.
typedef struct {
  Trainer trainer;
  Source *source;
  Loader loader;
  int64_t step; // the next
} Steps;
void steps_begin(Steps *steps, const Options *options, Backend *backend, LceMode mode);
void steps_run(Steps *steps); // one
void steps_end(Steps *steps);

// Plans the point and, if it fits and patience lasts, measures it on a new backend.
Reading point_read(const Experiment *experiment, const Point *point);
