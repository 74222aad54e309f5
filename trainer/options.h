// The options of the command line.
#pragma once

#include "data/loader.h"
#include "kernels/base/text.h"
#include "model/generate.h"
#include "model/transformer.h"
#include "trainer/option_table.h"

struct cJSON;

typedef struct {
  // Values of the rows: --help tells what each means.
  const char *preset;
  ModelConfig model;
  int64_t steps, batch, seq_len, total_batch; // batch, seq_len: of a micro-batch on one rank
  uint64_t seed;
  double lr, min_lr, decay_share; // see schedule_rate
  int64_t warmup;
  enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } schedule;
  Update update; // all but tensors, rate and step
  double max_grad_norm;
  TransformerOptions pass; // all but tensors and last; chunk: the maximum, 0 until plan_resolve
  bool metrics;
  const char **data, **val_data; // arrays of stb_ds.h
  double val_fraction;
  int64_t eval_every, eval_batches, end_of_text, sample_every;
  DataOrder data_order;
  enum { PACK_NONE, PACK_DOCUMENTS } pack;
  bool other_tokenizer;
  const char *prompt, *tokenizer; // tokenizer: a file or directory, or NULL
  Generation generation;          // all but prompt, window and seed
  const char *save, *resume, *init;
  int64_t save_every, keep, verify_every;
  enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } device;
  ParameterDtypes dtypes; // DTYPE_COUNT: not given, until the device is known
  Dtype save_dtype;
  double timeout, device_memory;
  int ranks; // 1 without a launcher; for a plan those of --ranks
  const char *log, *timeline, *dump;
  bool plan, compare_modes, profile;
  enum { FIT_NONE, FIT_DEVICE, FIT_OFFLOAD } fit;

  // Values that follow from them, from a checkpoint, the data and the machine.
  bool trains;                 // false: tools/evaluate, which has weights alone
  bool given[OPTION_ROWS_MAX]; // by row of options_rows: on the command line or by the checkpoint
  char *origin;                // the folder whose weights the run begins with; NULL: they are random
  char changes[192];           // of the model in `origin`: "--rope-theta 1000000 in place of 10000", or ""
  struct cJSON *resumed_from;  // its trainer_state.json when the run resumes; NULL otherwise
  int64_t first_step;          // 0 unless the run resumes
  bool dtypes_from_gpu;        // all dtypes are those of a checkpoint from a GPU; none was given
  int64_t micro_steps;         // a step has total_batch / (ranks * batch * seq_len) micro-batches
  bool masked;                 // some of the data has a mask, or windows are padded: targets may be ignored
  int64_t data_vocab_size;     // of the data's tokenizer; 0: unknown, or the model has its own
  bool no_sampling, no_codes;  // the GPU does not run the Hopper kernels, or no GEMMs of codes (Backend)
  const struct Card *card;     // its speed (kernels/cost.h); NULL: unknown
  size_t host_bytes;           // that all ranks' hosts can give; 0: not agreed on
} Options;

// Flags of the rows. A checkpoint's settings have those of the first three; a resumed run takes GPU_SETTINGs
// from a run on a GPU only, and changes OUTPUT_SETTINGs, when to validate, sample and save, without a warning.
// All ranks have one value of settings and SAME rows. --fit chooses FITTED ones again when a run resumes.
// ADAPTS rows may change a folder's model; others that describe the model must agree with it.
enum { SETTING = 1, GPU_SETTING = 2, OUTPUT_SETTING = 4, SAME = 8, FITTED = 16, ADAPTS = 32 };
extern const Option options_rows[];
extern const OptionTable options_table; // ./train's

// In this order. Wrong values end the program with one sentence. options_free gives back what they allocate.
// The command line of a program that has some of the rows; resume_find comes next. Without validation options,
// --data directories with a manifest of validation shards are --val-data, too.
void options_read(Options *options, const OptionTable *table, int argc, char **argv);
void options_resolve(Options *options); // all but what depends on the device
// Dtypes left open, and what the device lacks; plan_resolve comes next.
void options_resolve_device(Options *options, const Backend *backend);
// False with the reason why the sizes or the device allow no GEMMs of codes.
bool options_allow_codes(const Options *options, Reason *reason);
void options_free(Options *options);

// True if --name was given, on the command line or by the checkpoint.
bool options_given(const Options *options, const char *name);
Text options_precision(const Options *options);     // for the plan's first line
int64_t options_used_chunk(const Options *options); // the steps'; --lce-chunk is the maximum
// Returns the dtypes asked for, less what the device or the mode of the loss does not have.
ParameterDtypes options_used_dtypes(const Options *options);
Text options_words(const Options *options, const char *name); // a value as the command line has it
Text options_recompute(const Options *options);               // "none", "layer", "mlp in 8 layers", ...
