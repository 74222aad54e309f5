// --fit: settings that follow from the model, the data and the machine. The user's options stay; open ones
// (the micro-batch, recomputation, chunks; with `--fit offload` offloading) are chosen so that the run fits
// and is fast. It never chooses what changes the model or the precision of its numbers.
#pragma once

#include "trainer/options.h"

// Chooses for a device that can give `usable` bytes, prints the choice, the next best ones and the gain of
// other options, and writes the choice to the options. Fails if nothing fits. o->card says how fast the
// device is; its time is predicted by kernels/cost.h.
void fit_choose(Options *options, DeviceKind device, size_t usable);
// Says what to add or leave out so that the run fits: the first that helps of these, tried by planning.
Reason fit_remedy(const Options *options, DeviceKind device, size_t usable);
