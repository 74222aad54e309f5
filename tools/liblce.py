"""liblce.so for Python: the structs of library/lce.h in ctypes. Needs nothing but Python."""
import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p


class Args(ctypes.Structure):
    """lce_args; pointers are plain addresses (torch: tensor.data_ptr())."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "vocab_size", "chunk")] +
                [(name, c_int32) for name in ("materialized", "mean", "accumulate")] +
                [(name, c_float) for name in ("scale", "label_smoothing", "z_loss", "softcap", "temperature")] +
                [(name, c_void_p) for name in ("x", "weight", "bias", "targets", "class_weights", "token_weights",
                                               "entropy_weights", "loss", "dx", "dweight", "dbias", "token_z_loss",
                                               "log_prob", "logsumexp", "entropy", "max_logit", "correct",
                                               "predicted")])


def load(path):
    """The library with its functions declared."""
    lce = ctypes.CDLL(path)
    lce.lce_create.restype, lce.lce_create.argtypes = c_void_p, [c_char_p, c_int, c_char_p]
    lce.lce_destroy.restype, lce.lce_destroy.argtypes = None, [c_void_p]
    lce.lce_linear_cross_entropy.restype = c_int
    lce.lce_linear_cross_entropy.argtypes = [c_void_p, POINTER(Args)]
    lce.lce_synchronize.restype, lce.lce_synchronize.argtypes = c_int, [c_void_p]
    lce.lce_held_bytes.restype, lce.lce_held_bytes.argtypes = c_int64, [c_void_p]
    lce.lce_last_error.restype, lce.lce_last_error.argtypes = c_char_p, []
    return lce
