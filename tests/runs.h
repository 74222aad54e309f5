// A training run inside a test's process, made from a command line as train.c makes it, on the CPU or a GPU.
#pragma once

#include "tests/data_files.h"
#include "tests/harness.h"
#include "trainer/data.h"
#include "trainer/plan.h"
#include "trainer/resume.h"
#include "trainer/trainer.h"

// Options of a line, resolved for a device. They point into one of 8 buffers; options_free gives them back.
Options options_on(DeviceKind device, const char *format, ...) __attribute__((format(printf, 2, 3)));

typedef struct {
  Options options;
  Harness *h; // its backend; every push is filled with NaN first
  RunData data;
  Trainer trainer;
} Run;

// On a backend by its name in harness_open, or NULL where there is none. Without --data the run reads the
// source tree.
Run *run_open_on(const char *backend, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define run_open(...) run_open_on("cpu", __VA_ARGS__)
void run_close(Run *run);

// Weights that make every path matter: activations of about 1, norms and biases off their defaults. On a CPU.
void draw_weights(Harness *h, Model *model);

// The logits [N, V] of batch * seq_len tokens, and their losses by those logits (reference_cross_entropy)
// [N], 0 where the target is IGNORE_INDEX. They are host values of the harness, whose backend has the model.
double *model_logits(Harness *h, Model *model, const int32_t *tokens, int64_t batch, int64_t seq_len);
double *model_losses(Harness *h, Model *model, const int32_t *tokens, const int32_t *targets, int64_t batch,
                     int64_t seq_len);

// One step, and its result at once.
StepResult run_step(Run *run, int64_t step);

// Checks that the run's peak, and its holders, equal the plan's byte for byte.
void assert_planned(const Run *run);
