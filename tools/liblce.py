"""liblce.so for Python: the structs of kernels/liblce.h in ctypes, and a context that takes tensors.

  layer = liblce.Layer("liblce.so", "cuda", "bf16")
  layer(x, weight, y, loss, dx=dx, dweight=dw, mean=1)               # PyTorch's tensors, on PyTorch's stream

Needs nothing but Python, and PyTorch for tensors on a GPU; on the CPU anything with PyTorch's methods is one.
"""
import contextlib
import ctypes
import numbers
import operator
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# The fields of lce_args, in its order. The tensors' shapes, by the sizes N, H and V, and their dtypes; "dtype" is the
# context's dtype.
ROW = ("N", "float32")
TENSORS = dict(x=("NH", "dtype"), weight=("VH", "dtype"), bias=("V", "dtype"), targets=("N", "int32 or int64"),
               class_weights=("V", "float32"), token_weights=ROW, entropy_weights=ROW, loss=ROW, dx=("NH", "dtype"),
               dweight=("VH", "float32"), dbias=("V", "float32"), token_z_loss=ROW, log_prob=ROW, logsumexp=ROW,
               entropy=ROW, max_logit=ROW, correct=ROW, predicted=("N", "int32"))
FLAGS = ("materialized", "mean", "accumulate")
NUMBERS = ("scale", "label_smoothing", "z_loss", "softcap", "temperature", "sample")
INTEGERS = {"chunk": (-2**63, 2**63), "sample_seed": (0, 2**64)}  # and their ranges


class Args(ctypes.Structure):
    """lce_args; pointers are plain addresses (torch: tensor.data_ptr())."""
    _fields_ = ([(name, c_int64) for name in ("tokens", "hidden_size", "vocab_size", "chunk")] +
                [(name, c_int32) for name in (*FLAGS, "targets_int64", "check_targets")] +
                [(name, c_float) for name in NUMBERS] +
                [("sample_seed", c_uint64)] +
                [(name, c_void_p) for name in (*TENSORS, "stream")])


FUNCTIONS = dict(lce_create=(c_void_p, c_char_p, c_int, c_char_p), lce_destroy=(None, c_void_p),
                 lce_linear_cross_entropy=(c_int, c_void_p, POINTER(Args)), lce_synchronize=(c_int, c_void_p),
                 lce_held_bytes=(c_int64, c_void_p), lce_last_error=(c_char_p,))


def load(path):
    """The library with its functions declared."""
    lce = ctypes.CDLL(path)
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(lce, name)
        function.restype, function.argtypes = result, arguments
    return lce


class Failure(RuntimeError):
    """The message of lce_last_error."""


def dtype_of(tensor):
    return str(tensor.dtype).replace("torch.", "")


class Layer:
    """A context on "cpu" or CUDA device `ordinal`, for tensors of that device.

    A call takes its place on the stream that is PyTorch's current one of the device, so neither side waits. What
    the library refuses raises Failure, what is wrong with an argument itself TypeError or ValueError. One
    thread at a time.
    """

    def __init__(self, path, device, dtype, ordinal=0):
        self.context = None
        self.lce = load(path)
        self.device, self.ordinal = device, ordinal if device == "cuda" else None
        self.dtype = DTYPES.get(dtype)
        with self.on_device():
            self.context = self.lce.lce_create(device.encode(), ordinal, dtype.encode())
        self.require(self.context)

    def require(self, succeeded):
        if not succeeded:
            raise Failure(self.lce.lce_last_error().decode())

    def on_device(self):
        """For a `with`: the context's device is the thread's current one, and afterwards what it was."""
        if self.device == "cuda":
            import torch
            if self.ordinal < torch.cuda.device_count():  # else the library says why there is no such device
                return torch.cuda.device(self.ordinal)
        return contextlib.nullcontext()

    def __call__(self, x, weight, targets, loss, *, scale=1.0, check_targets=None, sample=0.0, sample_seed=0, **more):
        """Targets are int32 or int64; `more` names other fields of lce_args: numbers, or tensors (None: absent).

        scale multiplies the gradients. Targets out of range raise Failure on the CPU, and with check_targets=True on a
        GPU, for which the call waits; with False their losses are NaN.

        sample above 0 samples the tiles of the softmax gradient: dx and dweight keep their expectation and gain
        noise, the loss stays as it is (kernels/liblce.h). Change sample_seed from call to call: the same seed draws
        the same way.
        """
        if not self.context:
            raise ValueError("the layer is closed")
        given = dict(x=x, weight=weight, targets=targets, loss=loss, scale=scale, sample=sample, sample_seed=sample_seed, **more)
        tensors = {name: given.pop(name) for name in TENSORS if name in given}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.check_kinds(tensors)
        sizes = dict(N=x.shape[0], H=x.shape[1], V=weight.shape[0])
        for name, tensor in tensors.items():
            self.check_tensor(name, tensor, sizes)
        args = Args(tokens=sizes["N"], hidden_size=sizes["H"], vocab_size=sizes["V"],
                    targets_int64=dtype_of(targets) == "int64",
                    check_targets=0 if check_targets is None else 1 if check_targets else -1, **numbers_of(given),
                    **{name: tensor.data_ptr() for name, tensor in tensors.items()})
        with self.on_device():
            if self.device == "cuda":
                import torch
                args.stream = torch.cuda.current_stream().cuda_stream
            self.require(self.lce.lce_linear_cross_entropy(self.context, ctypes.byref(args)) == 0)

    def check_kinds(self, tensors):
        for name in ("x", "weight", "targets", "loss"):
            if name not in tensors:
                raise TypeError(f"{name} is None, and a tensor is needed")
        for name, tensor in tensors.items():
            if not hasattr(tensor, "data_ptr"):
                raise TypeError(f"{name} is {type(tensor).__name__}, where a tensor is needed")
        for name in ("x", "weight"):
            if len(tensors[name].shape) != 2:
                raise ValueError(f"{name} has the shape {list(tensors[name].shape)}, where 2 axes are "
                                 f"needed: reshape(-1, hidden_size) makes them")

    def check_tensor(self, name, tensor, sizes):
        axes, dtypes = TENSORS[name]
        dtypes = dtypes.replace("dtype", self.dtype)
        if dtype_of(tensor) not in dtypes.split(" or "):
            raise TypeError(f"{name} is {dtype_of(tensor)}, where {dtypes} is needed")
        shape = [sizes[axis] for axis in axes]
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, where {shape}, that is "
                             f"[{', '.join(axes)}], is needed")
        elsewhere = self.device == "cuda" and tensor.device.index != self.ordinal
        if tensor.device.type != self.device or elsewhere:
            expected = self.device if self.ordinal is None else f"{self.device}:{self.ordinal}"
            raise ValueError(f"{name} is on {tensor.device}, and the layer is on {expected}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has gaps or another order between its rows, and the library reads and "
                             f"writes dense tensors: call contiguous() first")

    def synchronize(self):
        """Waits until the calls are done; Failure when one failed on the device."""
        self.require(self.lce.lce_synchronize(self.context) == 0)

    def held_bytes(self):
        return self.lce.lce_held_bytes(self.context)

    def close(self):
        with self.on_device():
            self.lce.lce_destroy(self.context)
        self.context = None


KINDS = {**dict.fromkeys(INTEGERS, operator.index), **dict.fromkeys(FLAGS, bool), **dict.fromkeys(NUMBERS, float)}


def numbers_of(given):
    """The fields that are no tensors; ctypes itself would take any name, and cut numbers off."""
    values = {}
    for name, value in given.items():
        if name not in KINDS:
            raise TypeError(f"there is no argument {name}")
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is {type(value).__name__}, where a number is needed")
        values[name] = KINDS[name](value)
        low, end = INTEGERS.get(name, (None, None))
        if name in INTEGERS and not low <= values[name] < end:
            raise ValueError(f"{name} is {value}, where 64 bits hold {low} to {end - 1}")
    return values
