// A set of named tensors in a folder: stem.safetensors, or several such files with an index,
//
//     stem-00001-of-00004.safetensors ...    stem.safetensors.index.json
//
// as Hugging Face lays out model weights. Files are mapped and numbers travel a few million at a time, so
// that a set as large as the disk needs no more host memory than a small one.
#ifndef LCE_MODEL_CHECKPOINT_TENSORS_H
#define LCE_MODEL_CHECKPOINT_TENSORS_H

#include "model/checkpoint/files.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/read_ahead.h"
#include "model/checkpoint/safetensors.h"
#include "model/shards.h"

// --- reading -----------------------------------------------------------------------------------------------

typedef struct {
  char *path;
  Mapping mapping;
  SafetensorsHeader header;
  ReadAhead *ahead;
} TensorFile;

typedef struct {
  char *path; // of the one file or of the index, for messages
  TensorFile *files;
  int count;
} TensorSet;

// Opens the set and checks that index and files agree; count is 0 when the folder has neither file nor index.
// Fails naming file and reason when one is not sound.
TensorSet tensor_set_open(const char *folder, const char *stem);
void tensor_set_close(TensorSet *set);

// The tensor called `name`, and its file; NULL when there is none.
const SafetensorsEntry *tensor_set_find(const TensorSet *set, const char *name, const TensorFile **file);

// Copies a stored tensor (F32, BF16 or F16) to a parameter of as many numbers, in one role of its
// (parameters->value, ...) and in another unless that is NULL; each rounds to its own dtype, which is exact
// where that is not narrower. A rank keeps what it owns.
void tensor_read(const TensorFile *file, const SafetensorsEntry *entry, Backend *backend,
                 const Parameters *parameters, const Parameter *parameter, const Tensor *role,
                 const Tensor *also_role);

// --- writing -----------------------------------------------------------------------------------------------

typedef struct {
  char name[112];
  Tensor tensor; // on the backend; of what is spread over the ranks only shape and dtype count
  Dtype dtype;   // as which it is stored: its own, or widened to fp32, or rounded to bf16
  // Where it is a parameter's, in a role that may be spread; NULL otherwise.
  const Parameters *parameters;
  const Parameter *parameter;
  const Tensor *role;
} TensorToStore;

// Writes the set into a folder in the making, in files of at most `shard_bytes` (one tensor may exceed it).
// Errors stick to the folder. All ranks call it with the same list, the others than rank 0 with a folder that
// takes nothing ({0}): what is spread comes to rank 0 a piece at a time.
void tensor_set_write(Folder *folder, const char *stem, const TensorToStore *tensors, int64_t count,
                      Backend *backend, size_t shard_bytes);

#endif
