// Named tensors on disk: the model's weights as Hugging Face stores them, and the optimizer's state.
//
// A set of tensors is stem.safetensors or, without that, stem-00001-of-00004.safetensors ... and
// stem.safetensors.index.json. Files are mapped, and copied a few million elements at a time.
#pragma once

#include "data/file.h"
#include "model/checkpoint/safetensors.h"
#include "model/model.h"

// A folder in the making (checkpoint.h): its files are written one after the other, each synced. After the
// first error, which folder_finish returns, calls do nothing.
typedef struct {
  bool ok;
  Reason reason;
  Path parent, hidden; // parent/name: its final place; hidden: its place while written
  char name[256];
  FILE *out; // the file being written, at the path `file`; NULL between files
  Path file;
  uint32_t crc;     // of the bytes written so far
  cJSON *checksums; // {"NAME": crc} of finished files; NULL: none are computed
} Folder;

bool is_plain_name(const char *name); // no path, not "." or ".."
// The next file, or its beginning, with the permissions of `mode` less the umask; ends the one before.
void folder_add(Folder *folder, const char *name, mode_t mode, const void *bytes, size_t count);
void folder_end_file(Folder *folder);
void folder_give_up(Folder *folder, const char *path); // "cannot write PATH: " and errno's text

typedef struct {
  char *path;
  Mapping mapping;
  SafetensorsHeader header;
} TensorFile;

typedef struct {
  Path path;         // of the one file or of the index, for messages
  TensorFile *files; // an array of stb_ds.h
  int64_t count;
} TensorSet;

// Opens the set (count 0: neither file nor index exists). Fails, naming the file, if one is damaged or
// disagrees with the index.
TensorSet tensor_set_open(const char *folder, const char *stem);
bool tensor_set_try_open(TensorSet *set, const char *folder, const char *stem, Reason *reason);
void tensor_set_close(TensorSet *set);

typedef struct {
  const TensorFile *file;
  const SafetensorsEntry *entry; // NULL: absent
} StoredTensor;

StoredTensor tensor_set_find(const TensorSet *set, const char *name);

typedef struct {
  char name[112];
  Tensor tensor; // on the backend; of a parameter only shape and dtype count
  Dtype dtype;   // as stored: unchanged, widened to fp32 or rounded to bf16
  // Set for a parameter in a role that may be sharded; NULL otherwise.
  const ParameterSet *parameters;
  const Parameter *parameter;
  const Tensor *role;
} TensorToStore;

// A parameter in one role (parameters->value, ...), called "PREFIX.name", or "name" without a prefix.
TensorToStore parameter_to_store(const char *prefix, const ParameterSet *parameters,
                                 const Parameter *parameter, const Tensor *role, Dtype dtype);

// Writes the set into a folder in the making, in files of at most `shard_bytes`, or of one larger tensor.
// Call it on all ranks with the same list, and on all but rank 0 with the folder {0}.
void tensor_set_write(Folder *folder, const char *stem, const TensorToStore *tensors, int64_t count,
                      Backend *backend, size_t shard_bytes);

#define MODEL_STEM "model"
#define STATE_STEM "training_state"

// Reads model.safetensors or its shards into the weights and, if kept, the master weights; with `state` also
// the optimizer's states. Fails, naming the tensor, if one is missing, misshapen or foreign, but for old
// files' buffers and a tied head beside the embedding or in its place. Names may lack the prefix transformer.
// or model.
void weights_load(Model *model, Backend *backend, const char *folder, bool state);
// Writes them, as fp32 from the master weights if given, or as bf16; and to training_state.safetensors or its
// shards the optimizer's states ("m.NAME", ...) and, beside bf16 weights, "master.NAME" in fp32.
void weights_store(const Model *model, Backend *backend, Folder *folder, Dtype dtype, size_t shard_bytes);
