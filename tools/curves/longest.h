// The longest sequence that fits a device's memory, by mode of the loss, with and without offloading: by plans alone.
#pragma once

#include "tools/curves/curve.h"

typedef struct {
  double memory_gib; // of the device
  int offload;       // 0: nothing; 1: all that --offload can
  int mode;          // LceMode
  int64_t seq_len;   // 0: not even one token fits
  size_t planned_bytes, host_bytes;
} Longest;

enum { LONGEST_MAX = 12 };

// Fills in both modes of both choices for each memory, and returns how many: for the experiment's memory or, where it is 0,
// for 24, 48 and 80 GiB. The batch is the options'.
int longest_plan(const Experiment *experiment, Longest all[LONGEST_MAX]);
void longest_print(const Experiment *experiment, const Longest *all, int count);
// As CSV; the settings are the comment on its first line.
void longest_write(const Longest *all, int count, const Curve *settings, const char *path);
