// Checkpoints: a run continues from one to the bit, and transformers, vLLM and lm-eval open it as a model.
//
//     DIR/step-000100/    config.json, generation_config.json, model.safetensors (or shards and their index),
//                         tokenizer files if the model came with some, or the run was given some;
//                         training_state.safetensors, trainer_state.json; checksums.json
//     DIR/latest          a link to the newest, and links to its files: DIR itself opens as a model, too
//
// A checkpoint appears whole or not at all (folder.h) and nothing in it depends on the number of ranks or on
// what is spread over them: the data's position and every random number follow from the step and the seed.
#pragma once

#include "model/checkpoint/folder.h"
#include "model/model.h"

// --- writing -----------------------------------------------------------------------------------------------

// Files that are copied along unread; the store keeps their bytes.
typedef struct {
  const char *name;
  char *text;
  size_t length;
} Companion;

typedef struct {
  char *directory;
  int64_t keep;       // newest ones that stay, 0: all
  Dtype dtype;        // of the stored weights
  size_t shard_bytes; // largest file
  char *config;       // the config.json that the model came with, or NULL
  Companion *companions;
  int companion_count;
  int lock;          // descriptor: one run writes here at a time
  int64_t last_step; // newest checkpoint of this run, -1 before there is one
} CheckpointStore;

// Hugging Face's default of many years.
#define CHECKPOINT_SHARD_BYTES ((size_t)5000000000)

// Makes `directory` if there is none, takes its lock and removes what a killed run left behind. The files that the
// model in `origin` (NULL: none) came with are copied along; `tokenizer` replaces its tokenizer (a tokenizer.json by
// any name, or a folder with one; NULL: none) and the tokenizer's other files there. Fails when another run writes
// there, when it holds a model that is no checkpoint, or checkpoints beyond the one that the run resumes from
// (`first_step`; -1: it does not resume), unless `may_replace` says that those are known to be damaged.
CheckpointStore checkpoint_store_open(const char *directory, const char *origin, const char *tokenizer,
                                      int64_t first_step, bool may_replace);
// Writes the checkpoint of a step, then deletes the oldest beyond `keep`. False with a reason that names the
// last good one when it could not be written; nothing is then left behind or deleted. Call it on all ranks: only
// rank 0 has opened its store, those of the others hold the same dtype alone.
bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     const cJSON *trainer_state, Reason *reason);
void checkpoint_store_close(CheckpointStore *store);

// --- reading -----------------------------------------------------------------------------------------------

// The newest intact checkpoint or NULL, with a warning for each damaged one; the caller frees it. *any: there is one.
char *checkpoint_newest(const char *directory, FolderCheck check, bool *any);
// Fails naming the damaged file of a checkpoint; `whole` includes the training state, otherwise only the model
// is looked at. A model without checksums.json (not written here) passes unless `whole`.
void checkpoint_require_intact(const char *folder, FolderCheck check, bool whole);
// trainer_state.json; the caller deletes it. Fails when the folder has none.
cJSON *checkpoint_trainer_state(const char *folder);
// Fills weights, master weights and, with `state`, the moments.
void checkpoint_load(const char *folder, Model *model, Backend *backend, bool state);
