// What happens to the weights when a step's gradients are there.
#ifndef LCE_TRAINER_UPDATE_H
#define LCE_TRAINER_UPDATE_H

#include "trainer/trainer.h"

// The norm over all gradients (fp32 [1], written), the clip factor, and AdamW. What is spread over the ranks
// each one updates its part of, and the new weights go around. step counts from 0.
void update_weights(Trainer *trainer, Tensor norm, double learning_rate, int64_t step);

#endif
