// What the user asks for on the command line.
#ifndef LCE_TRAINER_OPTIONS_H
#define LCE_TRAINER_OPTIONS_H

#include "model/transformer.h"
#include "trainer/schedule.h"

typedef enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } DeviceChoice;

typedef struct {
  // model
  ModelConfig model;
  // job
  int64_t batch;       // sequences in a micro-batch, per rank
  int64_t seq_len;     // tokens in a sequence
  int64_t total_batch; // tokens in an optimizer step, over micro-batches and ranks
  int64_t micro_steps; // total_batch / (batch * seq_len)
  int64_t steps;
  uint64_t seed;
  // optimizer
  Schedule schedule;
  double beta1, beta2, epsilon, weight_decay, max_grad_norm;
  // the last layer
  LceMode mode;
  int64_t lce_chunk;  // tokens; 0 until options_settle has chosen
  int64_t lce_memory; // MiB the last layer may hold; 0 when --lce-chunk or the default rules
  // data
  const char **data, **val_data; // paths, in the order given
  int64_t data_count, val_data_count;
  double val_fraction;
  // what is watched
  int64_t eval_every, eval_batches, sample_every, sample_tokens;
  double temperature;
  const char *prompt;
  // machine
  DeviceChoice device;
  bool plain_products; // CPU products by plain loops, to compare with
  const char *attention;
  Dtype dtype; // of weights and activations
  ParameterDtypes dtypes;
  Recompute recompute;
  // output
  const char *log, *timeline;
  bool plan, compare_modes, fit;
} Options;

// Reads the command line (argp: --help lists everything). Wrong values end the program with one sentence.
void options_parse(Options *options, int argc, char **argv);

// What depends on the device: dtypes left open, the chunk from --lce-memory or the default. `backend` may be
// a plan.
void options_settle_dtypes(Options *options, bool cuda);
void options_settle_chunk(Options *options, const Backend *backend);

void options_free(Options *options);

#endif
