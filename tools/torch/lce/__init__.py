"""LM head and cross-entropy as one operation, for PyTorch."""
from .functional import linear_cross_entropy, linear_log_probs
from .ids import linear_ids_log_probs
from .modules import LinearCrossEntropy, patch_transformers, unpatch_transformers
from .trl_trainers import patch_trl, unpatch_trl

__version__ = "0.1"

__all__ = ["linear_cross_entropy", "linear_log_probs", "linear_ids_log_probs", "LinearCrossEntropy", "patch_transformers",
           "unpatch_transformers", "patch_trl", "unpatch_trl"]
