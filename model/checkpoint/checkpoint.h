// Checkpoints: a run continues from one to the bit, and transformers, vLLM and lm-eval open it as a model.
//
//     DIR/step-000100/    config.json, generation_config.json, model.safetensors (or shards and their index),
//                         tokenizer files if the model came with some, or the run was given some;
//                         training_state.safetensors, trainer_state.json
//     DIR/latest          a link to the newest, and links to its files: DIR itself opens as a model, too
//
// A checkpoint appears whole or not at all: its files are written into DIR/.saving-step-000100 and synced,
// which is then synced and renamed; a later run removes what a killed one left. The headers of its files show
// whether one was cut short since. Nothing in it depends on the number of ranks or on what is sharded over
// them: the data's position and every random number follow from the step and the seed.
//
// What is removed (old checkpoints, replaced ones, what was left) is a folder by one of our names that holds
// regular files by our names alone, and a trainer_state.json of that step. Links are not followed; anything
// else stays, with a warning.
#pragma once

#include "data/json.h"
#include "model/checkpoint/weights.h"

// --- folders -----------------------------------------------------------------------------------------------

// A folder in the making, to be parent/name: `parent` exists, `name` is plain. `state` is the text of its
// trainer_state.json, which comes first and marks it as ours; NULL: it has none, and replaces nothing.
Folder folder_begin(const char *parent, const char *name, const char *state);
// Puts the folder in its place (of an old checkpoint) and frees the writer. False with a reason: nothing is
// left.
bool folder_finish(Folder *folder, Reason *reason);
// Makes `parent`; fails where parent/name is there already.
void folder_require_new(const char *option, const char *parent, const char *name);

// --- writing -----------------------------------------------------------------------------------------------

// Files that are copied along unread; the store keeps their bytes.
typedef struct {
  const char *name;
  char *text;
  size_t length;
} Companion;

typedef struct {
  char *directory;
  int64_t keep;          // newest checkpoints that stay, 0: all
  Dtype dtype;           // of the stored weights
  size_t shard_bytes;    // largest file
  char *config;          // the config.json that the model came with, or NULL
  Companion *companions; // an array of stb_ds.h
  int lock;              // descriptor: one run writes here at a time
  int64_t last_step;     // newest checkpoint of this run, -1 before there is one
  bool unfinished;       // it was there already: checkpoint_store_close
} CheckpointStore;

// Hugging Face's default of many years.
#define CHECKPOINT_SHARD_BYTES ((size_t)5000000000)

// Makes `directory` if there is none, takes its lock, removes what a killed run left behind and tries to
// write. The files that the model in `origin` (NULL: none) came with are copied along; `tokenizer` replaces
// its tokenizer (a tokenizer.json by any name, or a folder with one; NULL: none) and the tokenizer's other
// files there. Fails when another run writes there, when it holds a model that is no checkpoint, or
// checkpoints beyond the one that the run resumes from (`first_step`; -1: it does not resume), unless
// `may_replace` says that those are known to be damaged.
CheckpointStore checkpoint_store_open(const char *directory, const char *origin, const char *tokenizer,
                                      int64_t first_step, bool may_replace);
// Writes the checkpoint of a step, then deletes the oldest beyond `keep`. False with a reason that names the
// last good one when it could not be written; nothing is then left behind or deleted. `trainer_state` has the
// "step". Call it on all ranks: only rank 0 has opened its store, those of the others hold the same dtype
// alone.
bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     const cJSON *trainer_state, Reason *reason);
// Where the run resumed from the store's own checkpoint and saved no other, `latest` first leads to that one,
// and the oldest beyond `keep` go, which the run that saved it may have been killed before.
void checkpoint_store_close(CheckpointStore *store);

// --- reading -----------------------------------------------------------------------------------------------

// The newest whole checkpoint or NULL, with a warning for each that is not; the caller frees it. *any: there
// is one.
char *checkpoint_newest(const char *directory, bool *any);
// Fails naming what is missing, cut short or not valid.
void checkpoint_require_whole(const char *folder);
// trainer_state.json; the caller deletes it. Fails when the folder has none.
cJSON *checkpoint_trainer_state(const char *folder);
