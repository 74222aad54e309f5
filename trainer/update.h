// What happens to the weights when a step's gradients are there.
#ifndef LCE_TRAINER_UPDATE_H
#define LCE_TRAINER_UPDATE_H

#include "trainer/trainer.h"

// The norm over all gradients (fp32 [1], written), the clip factor, and AdamW. Each rank updates its
// part of what is spread, and the new weights are gathered. step counts from 0.
void update_weights(Trainer *trainer, Tensor norm, double learning_rate, int64_t step);

#endif
