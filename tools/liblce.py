"""liblce.so for Python: the structs of library/lce.h in ctypes, and a context that takes tensors.

  layer = liblce.Layer("liblce.so", "cuda", "bf16")
  layer(x, weight, y, loss, dx=dx, dweight=dw, scale=1, mean=1)      # PyTorch's tensors, on PyTorch's stream

Needs nothing but Python; tensors are whatever has PyTorch's methods.
"""
import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p


class Args(ctypes.Structure):
    """lce_args; pointers are plain addresses (torch: tensor.data_ptr())."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "vocab_size", "chunk")] +
                [(name, c_int32) for name in ("materialized", "mean", "accumulate", "targets_int64")] +
                [(name, c_float) for name in ("scale", "label_smoothing", "z_loss", "softcap", "temperature")] +
                [(name, c_void_p) for name in ("x", "weight", "bias", "targets", "class_weights", "token_weights",
                                               "entropy_weights", "loss", "dx", "dweight", "dbias", "token_z_loss",
                                               "log_prob", "logsumexp", "entropy", "max_logit", "correct",
                                               "predicted", "stream")])


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


class Failure(RuntimeError):
    """What lce_last_error said."""


def address(tensor):
    if not tensor.is_contiguous():
        raise ValueError("the library reads and writes dense tensors: call contiguous() first")
    return tensor.data_ptr()


class Layer:
    """A context. A call takes its place on the stream that is PyTorch's current one, so nobody waits."""

    def __init__(self, path, device, dtype, ordinal=0):
        self.lce = load(path)
        self.context = self.lce.lce_create(device.encode(), ordinal, dtype.encode())
        if not self.context:
            raise Failure(self.lce.lce_last_error().decode())

    def __call__(self, x, weight, targets, loss, **more):
        """Targets are int32 or int64; `more` names other fields of lce_args: numbers, or tensors (None: absent)."""
        tensors = dict(x=x, weight=weight, targets=targets, loss=loss)
        tensors.update((name, more.pop(name)) for name in list(more) if hasattr(more[name], "data_ptr"))
        args = Args(tokens=x.shape[0], hidden_size=x.shape[1], vocab_size=weight.shape[0],
                    targets_int64=targets.element_size() == 8,
                    **{name: address(tensor) for name, tensor in tensors.items()}, **more)
        if x.is_cuda:
            import torch
            args.stream = torch.cuda.current_stream(x.device).cuda_stream
        if self.lce.lce_linear_cross_entropy(self.context, ctypes.byref(args)):
            raise Failure(self.lce.lce_last_error().decode())

    def held_bytes(self):
        return self.lce.lce_held_bytes(self.context)

    def close(self):
        self.lce.lce_destroy(self.context)
        self.context = None
