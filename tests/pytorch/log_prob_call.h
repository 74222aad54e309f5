// The problem of loss_problem.h as calls of tools/torch/liblce/log_probs.h.
#pragma once

#include "tests/loss_problem.h"
#include "tools/torch/liblce/log_probs.h"

// Runs a's forward pass, which maybe keeps its exponentials; returns the call that makes a's gradients.
LogProbGradients log_prob_call(Harness *h, LinearCrossEntropy *a, Tensor entropy_weights, bool kept);
