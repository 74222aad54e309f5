// Published experiments, each one command.
#pragma once

#include "tools/curves/curve.h"
#include "tools/curves/timeline.h"

// A figure of the source. In a picture whose x axis is the swept size it stands at `value`; in one of time
// against memory, at (bytes, ratio). Neighbours with the same label are a line.
typedef struct {
  double value; // of the recipe's first sweep; 0: at any size
  double bytes; // that the LM head + loss holds beyond its inputs and gradients
  double
      ratio; // a library's time over that of its three GEMMs, as measured for this project; 0: no library's figure
  const char *label;
} Mark;

typedef struct {
  const char *name;
  const char *title;  // of the picture
  const char *source; // whose experiment it is, in words
  const char *says;   // what the source found
  const char *grey;   // what the grey marks in the picture are, apart from libraries; NULL: there are none
  double claim;       // how many times less memory the source says, or its setting gives; 0: it does not
  const char *const *arguments; // ./train's options that set it up; what the user gives comes after and wins
  bool layer_only, errors, timeline, loss_alone;
  bool longest; // longest.h, in place of a sweep
  bool gpu;     // planned for a GPU in bf16 where there is none
  struct {
    Sweep sweep;
    const char *values; // NULL after the last; with `timeline` or `longest` there may be none
  } sweeps[SWEEP_COUNT + 1];
  const Mark *marks; // label NULL after the last
} Recipe;

extern const Recipe RECIPES[]; // name NULL after the last

// The recipe called `name`; fails with the names there are.
const Recipe *recipe_named(const char *name);
// The one that a curve's settings name, or NULL.
const Recipe *recipe_of(const Curve *settings);
void recipes_list(void);

// After a sweep: the source's figures in one column, ours in the next.
void recipe_compare(const Recipe *recipe, const Experiment *experiment, const Curve *curve);
// After a timeline: the peaks of its modes and their ratios, with what its recipe's source says.
void timeline_compare(const Timeline *timeline, const Curve *settings);
