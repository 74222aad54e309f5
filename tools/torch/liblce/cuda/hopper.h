#pragma once

#include "kernels/torch_operations.h"

// LceLogitsGradient in bf16 with rows that start on 16 bytes; false, touching nothing, where it cannot run.
bool hopper_logits_gradient(Backend *backend, const LceLogitsGradient *a, float inv_temperature);
