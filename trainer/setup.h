// The set-up that train.c, tests and tools share: from a command line to resolved options, and to data.
#pragma once

#include "trainer/options.h"

// Reads the command line, finds the model or checkpoint that it names, takes what is not given from that, and resolves
// the rest but what depends on the device: machine_open and plan_resolve_chunk come next.
void setup_options(Options *options, int argc, char **argv);

typedef struct {
  Source *source, *val_source; // val_source: of --val-data, or NULL
  Loader loader;
  char text[256]; // loader_describe's
} RunData;

RunData setup_data(const Options *options);
void setup_data_close(RunData *data);
