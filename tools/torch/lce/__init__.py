"""LM head and cross-entropy as one operation, for PyTorch."""
import functools

import torch

from . import functional
from .divergence import linear_divergence
from .functional import linear_cross_entropy
from .ids import linear_ids_log_probs, log_mass, renormalized, topk_kl
from .modules import LinearCrossEntropy, patch_transformers, unpatch_transformers
from .trl_trainers import patch_trl, unpatch_trl

__version__ = "0.1"

__all__ = ["linear_cross_entropy", "linear_log_probs", "linear_ids_log_probs", "linear_divergence", "log_mass",
           "renormalized", "topk_kl", "LinearCrossEntropy", "patch_transformers", "unpatch_transformers", "patch_trl", "unpatch_trl"]


@functools.wraps(functional.linear_log_probs)
def linear_log_probs(x, weight, target, *args, **options):
    if not (isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor)) or target.dim() != x.dim():
        return functional.linear_log_probs(x, weight, target, *args, **options)
    without = "group", "vocab_size", "outputs"
    if any(options.get(name) for name in without):
        raise ValueError("ids [..., K] exclude group, vocab_size and outputs")
    return linear_ids_log_probs(x, weight, target, *args, **{name: value for name, value in options.items() if name not in without})
