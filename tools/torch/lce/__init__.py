"""LM head and cross-entropy as one operation, for PyTorch."""
from .functional import linear_cross_entropy, linear_log_probs
from .modules import LinearCrossEntropy, patch_transformers
from .trl import patch_trl, unpatch_trl

__all__ = ["linear_cross_entropy", "linear_log_probs", "LinearCrossEntropy", "patch_transformers",
           "patch_trl", "unpatch_trl"]
