// Checkpoints: a run continues from one bit for bit, and transformers, vLLM and lm-eval open it as a model.
//
//     DIR/step-000100/    config.json, generation_config.json, model.safetensors (or shards and their index),
//                         tokenizer files where given; training_state.safetensors, trainer_state.json
//     DIR/latest          a link to the newest, and links to its files: DIR itself opens as a model, too
//
// A checkpoint appears whole or not at all: its files are written into DIR/.saving-step-000100 and synced,
// and the folder is synced and renamed; a later run removes what a killed one left. Nothing in it depends on
// the number of ranks: every random number follows from the step and the seed; the place in the data is kept.
//
// An old DIR/step-000100 is renamed to DIR/.removing-step-000100 before its files go. It is removed only if
// it holds nothing but regular files with these names and a trainer_state.json of that step; a hidden folder
// only if it holds no other files. Links are not followed; anything else stays, with a warning.
//
// trainer_state.json has zlib's CRC-32 of every file, and of itself without them: a changed file is named.
#pragma once

#include "data/json.h"
#include "model/checkpoint/companions.h"

// Begins the folder parent/name: `parent` exists, `name` is plain. Removes a killed run's remains of it.
Folder folder_begin(const char *parent, const char *name);
// Puts the folder in its place; a checkpoint replaces an old one. False with a reason: nothing is left.
bool folder_finish(Folder *folder, Reason *reason);
// Makes `parent`; fails if parent/name exists.
void folder_require_new(const char *option, const char *parent, const char *name);

typedef struct {
  char *directory;
  int64_t keep;       // newest checkpoints that stay, 0: all
  Dtype dtype;        // of the stored weights
  size_t shard_bytes; // largest file
  Companions companions;
  int lock;          // descriptor: one run writes here at a time
  int64_t last_step; // newest checkpoint of this run, -1 before there is one
} CheckpointStore;

// Hugging Face's default of many years.
#define CHECKPOINT_SHARD_BYTES ((size_t)5000000000)

// Makes `directory`, takes its lock, removes a killed run's remains and tries to write; companions_read says
// what checkpoints get from `origin` and `tokenizer`. Fails if another run writes there, if it holds a model
// that is no checkpoint, checkpoints after `first_step`, which the run resumes from (-1: none), unless
// `may_replace`: they are damaged; or older ones while `origin` is not one of them: they are another run's.
// Applies `latest` and `keep` to `origin` if it is one of them: the run that saved it may have been killed
// before that.
CheckpointStore checkpoint_store_open(const char *directory, const char *origin, const char *tokenizer,
                                      int64_t keep, int64_t first_step, bool may_replace);
// Writes the checkpoint of a step, then deletes the oldest beyond `keep`. False with a reason that names the
// last good one; nothing is then left or deleted. `trainer_state` has the "step". Call it on all ranks: rank
// 0 has opened its store, the others' have only the same dtype.
bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     cJSON *trainer_state, Reason *reason);
void checkpoint_store_close(CheckpointStore *store);

// The newest whole checkpoint, which the caller frees, or NULL; warns of damaged ones. *any: one exists.
// `contents`: reads all files, and compares their checksums.
char *checkpoint_newest(const char *directory, bool contents, bool *any);
// Fails, naming the missing or damaged file.
void checkpoint_require_whole(const char *folder, bool contents);
// Fails if the model's weights differ from the checksums in trainer_state.json. Without one, as in most
// folders that --init names, and in older checkpoints nothing is checked.
void checkpoint_require_weights(const char *folder);
// A checksum of the model's weights, to compare: from the stored checksums, taken as right, if any.
uint32_t checkpoint_weights_checksum(const char *folder);
// trainer_state.json; the caller deletes it. Fails if the folder has none.
cJSON *checkpoint_trainer_state(const char *folder);
