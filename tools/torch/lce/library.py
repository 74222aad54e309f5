"""liblce.so in ctypes: lce_args and the functions of tools/torch/liblce/liblce.h. Needs only Python."""
import ctypes
import os
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

TENSORS = ("x", "weight", "bias", "targets", "class_weights", "token_weights", "entropy_weights", "known_log_prob",
           "known_entropy", "exps", "loss", "dx", "dweight", "dbias", "token_z_loss", "log_prob", "logsumexp", "entropy",
           "max_logit", "correct", "log_sum_sq_probs", "predicted")


class Args(ctypes.Structure):
    """lce_args; pointers are plain addresses (torch: tensor.data_ptr())."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "vocab_size", "chunk")] +
                [(name, c_int32) for name in ("materialized", "mean", "accumulate", "targets_int64", "narrow_dweight",
                                              "batch_invariant", "check_targets")] +
                [(name, c_float) for name in ("scale", "label_smoothing", "z_loss", "softcap", "temperature", "sample")] +
                [("sample_seed", c_uint64), ("first_row", c_int64), ("rows", c_int64)] +
                [(name, c_void_p) for name in (*TENSORS, "stream")])


class IdsArgs(ctypes.Structure):
    """lce_ids_args."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "vocab_size", "chunk", "id_count")] +
                [(name, c_int32) for name in ("ids_int64", "narrow_dweight", "batch_invariant", "check_ids")] +
                [(name, c_float) for name in ("softcap", "temperature")] +
                [(name, c_void_p) for name in ("x", "weight", "bias", "ids", "offsets", "log_probs", "lse", "entropy",
                                               "dlog_probs", "dlse", "dentropy", "dx", "dweight", "dbias", "stream")])


class DivergenceArgs(ctypes.Structure):
    """lce_divergence_args."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "teacher_hidden_size", "vocab_size", "chunk")] +
                [(name, c_int32) for name in ("kind", "narrow_dweight")] +
                [(name, c_float) for name in ("beta", "softcap", "temperature", "teacher_softcap", "teacher_temperature")] +
                [(name, c_void_p) for name in ("x", "weight", "bias", "teacher_x", "teacher_weight", "teacher_bias", "mask",
                                               "token_weights", "loss", "entropy", "dx", "dweight", "dbias", "stream")])


# int collective(user, kind, out, x, count, dtype), and the names of its kinds.
Collective = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int)
KINDS = ("all_reduce", "reduce_scatter", "all_gather")

FUNCTIONS = dict(lce_create=(c_void_p, c_char_p, c_int, c_char_p), lce_destroy=(None, c_void_p),
                 lce_join=(c_int, c_void_p, c_int, c_int, Collective, c_void_p),
                 lce_linear_cross_entropy=(c_int, c_void_p, POINTER(Args)),
                 lce_ids_log_probs=(c_int, c_void_p, POINTER(IdsArgs)),
                 lce_linear_divergence=(c_int, c_void_p, POINTER(DivergenceArgs)),
                 lce_scale=(c_int, c_void_p, c_void_p, c_int, c_void_p, c_int, c_int64, c_void_p, c_void_p),
                 lce_synchronize=(c_int, c_void_p),
                 lce_held_bytes=(c_int64, c_void_p), lce_last_error=(c_char_p,))


def load(path: str | None = None) -> ctypes.CDLL:
    """The library with its functions declared: `path`, else LCE_LIBRARY, else the one beside this file.

    What it needs, OpenMP and for a GPU libcudart and libcublasLt, is there once PyTorch is imported.
    """
    path = path or os.environ.get("LCE_LIBRARY") or os.path.join(os.path.dirname(__file__), "liblce.so")
    try:
        lce = ctypes.CDLL(path)
    except OSError as error:
        missing = ", which comes with a PyTorch for that version of CUDA" if "libcu" in str(error) else ""
        raise OSError(f"{error}{missing}; pip install ./tools/torch builds the library, and LCE_LIBRARY names one") from None
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(lce, name)
        function.restype, function.argtypes = result, arguments
    return lce
