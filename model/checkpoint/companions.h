// The files of each checkpoint beside its tensors: config.json, generation_config.json and the tokenizer's
// files, as they were beside the model that a run begins with, or beside its data.
#pragma once

#include "model/checkpoint/weights.h"

#define CONFIG            "config.json"
#define GENERATION_CONFIG "generation_config.json"
#define TOKENIZER         "tokenizer.json"

// The files that lie beside TOKENIZER and go with it.
enum { TOKENIZER_FILES = 8 };
extern const char *const tokenizer_files[TOKENIZER_FILES];

typedef struct {
  const char *name;
  char *text; // NULL: absent
  size_t length;
  mode_t mode; // the original's permissions
} Companion;

typedef struct {
  Companion config; // the config.json that the model came with
  Companion *files; // an array of stb_ds.h
} Companions;

// Copies of the files beside the model in `origin` (or NULL); `tokenizer` (a tokenizer.json by any name, or a
// folder with one; or NULL) replaces its tokenizer. Fails if a JSON file is none. The caller frees them.
Companions companions_read(const char *origin, const char *tokenizer);
void companions_write(const Companions *companions, Folder *folder, const ModelConfig *config, Dtype dtype);
void companions_free(Companions *companions);
