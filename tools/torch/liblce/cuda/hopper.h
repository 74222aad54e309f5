#pragma once

#include "tools/torch/liblce/operations.h"

// LceLogitsGradient in bf16 with rows that start on 16 bytes; false, touching nothing, where it cannot run.
bool hopper_logits_gradient(Backend *backend, const LceLogitsGradient *a, float inv_temperature);
// Fails for a backend whose batches may not matter, where `runs` is false.
void require_hopper(const Backend *backend, bool runs);
