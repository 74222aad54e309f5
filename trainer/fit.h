// --fit: settings that follow from the model, the data and the machine. What the user gave stays; what is open
// (the micro-batch, what is recomputed, the chunks; with `--fit offload` what lies on the host) is chosen so
// that the run fits and is fast. Nothing is chosen that changes the model or the precision of its numbers.
#pragma once

#include "trainer/options.h"

// Chooses for a device that can give `usable` bytes, prints the choice, the next best ones and what other
// options would bring, and writes it to the options. Fails where nothing fits. o->card says how fast the
// device is; its time is predicted by kernels/cost.h.
void fit_choose(Options *options, DeviceKind device, size_t usable);
