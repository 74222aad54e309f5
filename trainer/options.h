// The options of the command line.
#pragma once

#include "data/loader.h"
#include "kernels/base/text.h"
#include "model/generate.h"
#include "model/transformer.h"
#include "trainer/option_table.h"

struct cJSON;

// The learning rate, by schedule_rate of train.c: up to the peak in a straight line, then half a cosine down to
// the floor (Loshchilov, Hutter 2017), a straight line down to it, no change, or stable and then a straight
// line down at the end (WSD, Hu et al. 2024).
typedef struct {
  enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } kind;
  double peak, floor, decay_share; // shares from 0 to 1: the floor of the peak, wsd's line of the steps
  int64_t warmup_steps, total_steps;
} Schedule;

typedef struct {
  bool trains;                 // false: tools/evaluate, which has weights alone
  bool given[OPTION_ROWS_MAX]; // by row of options_rows: on the command line or by the checkpoint
  const char *preset;          // of a new model
  ModelConfig model;
  char changes[192]; // of the model in `origin`: "--rope-theta 1000000 in place of 10000", or ""
  // job
  int64_t batch, seq_len;                  // of a micro-batch on one rank: sequences, and tokens in each
  int64_t total_batch, steps, micro_steps; // a step has total_batch / (ranks * batch * seq_len) micro-batches
  uint64_t seed;
  Schedule schedule;
  Update update; // all but tensors, rate and step
  double max_grad_norm;
  TransformerOptions pass; // all but tensors and last; chunk: the maximum, 0 until plan_resolve
  bool metrics;            // accuracy, entropy and largest logit of every step
  // data
  const char **data, **val_data; // paths, arrays of stb_ds.h
  DataOrder data_order;
  enum { PACK_NONE, PACK_DOCUMENTS } pack;
  int64_t end_of_text; // the token that ends a document; -1: see source_document_ends
  double val_fraction;
  bool other_tokenizer;    // the data may have another tokenizer than the model
  bool masked;             // some of the data has a mask, or windows are padded: targets may be ignored
  int64_t data_vocab_size; // of the data's tokenizer; 0: unknown, or the model has its own
  // validation, samples and checkpoints
  int64_t eval_every, eval_batches, sample_every, verify_every, save_every, keep;
  Generation generation;            // all but prompt, window and seed
  const char *prompt, *tokenizer;   // tokenizer: a file or directory, or NULL
  const char *init, *resume, *save; // as given; save: NULL, or where; DIR of --resume DIR by default
  Dtype save_dtype;                 // of the stored weights
  char *origin;                     // the folder whose weights the run begins with; NULL: they are random
  struct cJSON *resumed_from;       // its trainer_state.json when the run resumes; NULL otherwise
  int64_t first_step;               // 0 unless the run resumes
  // ranks and machine
  int rank, ranks; // 0 of 1 without a launcher; for a plan those of --ranks
  double timeout;  // seconds without progress that end a job of several ranks
  enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } device;
  Dtype dtype; // of weights and activations
  ParameterDtypes dtypes;
  bool dtypes_from_gpu;       // all dtypes are those of a checkpoint from a GPU; none was given
  bool no_sampling, no_codes; // the GPU does not run the Hopper kernels, or no GEMMs of codes (Backend)
  const struct Card *card;    // its speed (kernels/cost.h); NULL: unknown
  size_t host_bytes;          // that all ranks' hosts can give; 0: not agreed on
  // output
  const char *log, *timeline, *dump;
  bool plan, compare_modes, profile;
  enum { FIT_NONE, FIT_DEVICE, FIT_OFFLOAD } fit; // the last may keep things on the host
  double device_memory;                           // GiB that the device is taken to have; 0: all that it has
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
// Returns the dtypes asked for, less what the device or the mode of the loss does not have.
ParameterDtypes options_used_dtypes(const Options *options);
Text options_words(const Options *options, const char *name); // a choice or a set as the command line has it
Text options_recompute(const Options *options);               // "none", "layer", "mlp in 8 layers", ...
