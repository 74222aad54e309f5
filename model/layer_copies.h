// Copies between the host's memory and the device's (--offload) while other layers compute: a layer's weights arrive during
// the layer before it, and its gradients and its input leave during the layer after it, by way of double buffers.
// Each function does nothing for what stays on the device.
#pragma once

#include "model/pass.h"

// Before any layer's forward pass: the first layer's weights.
void copies_begin(const Pass *p);
// Before layer l's forward pass: the next one's weights, updated where that was deferred; in training also l's input.
void copies_before_forward(const Pass *p, int64_t l);
// Whether layer l's input leaves the device, so that its memory is free after the layer.
bool copies_take_input(const Pass *p);
// Between the passes: gradients that are added to.
void copies_turn(const Pass *p);
// Before layer l's backward pass: what the layer below reads.
int64_t copies_before_backward(const Pass *p, int64_t l);
// After it: its gradients leave, after their squares were summed. `begun`: what copies_before_backward returned.
void copies_after_backward(const Pass *p, int64_t l, int64_t begun);
// After all layers.
void copies_end(const Pass *p);
