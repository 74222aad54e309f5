#pragma once

#include "kernels/torch_operations.h"

// LceLogitsGradient on Hopper, in bf16 with rows that start on 16 bytes; false, with nothing touched, where
// it does not run.
bool hopper_logits_gradient(Backend *backend, const LceLogitsGradient *a, float inv_temperature);
