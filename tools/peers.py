"""Ways to compute the last layer, lce.c's and others', behind one call; and what it takes to compare them.

A peer is a function of (x, w, y) that gives (mean loss, dX, dW). One that is not there raises Absent, which says why.
"""
import contextlib
import math
import os
import time

import torch
import torch.nn.functional as F

import liblce


class Absent(Exception):
    """A peer that cannot run here; the sentence says why."""


@contextlib.contextmanager
def needs(packages):
    """Turns a failing import into a sentence."""
    try:
        yield
    except ImportError as error:
        raise Absent(f"needs {packages}: {error}") from None


def on_gpu(device):
    if device == "cpu":
        raise Absent("runs on GPUs only")


# --- the others -------------------------------------------------------------------------------------------------

def autograd(loss_of):
    """The gradients of loss_of(x, w, y) by PyTorch's backward pass."""
    def run(x, w, y):
        x.grad = w.grad = None
        loss = loss_of(x, w, y)
        loss.backward()
        return loss.detach(), x.grad, w.grad
    return run


def eager(_):
    return autograd(lambda x, w, y: F.cross_entropy(x @ w.T, y))


def eager_fp32(_):
    """As most trainers do: the logits' own rounding stays, that of the loss goes."""
    return autograd(lambda x, w, y: F.cross_entropy((x @ w.T).float(), y))


def compiled(device):
    if device == "cpu":
        raise Absent("needs a compiler for every shape; left out on the CPU")
    # Every shape gets kernels of its own: left to itself, the second would get slower ones for any shape.
    return autograd(torch.compile(lambda x, w, y: F.cross_entropy(x @ w.T, y), dynamic=False))


def native(_):
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent(f"PyTorch {torch.__version__} has none")
    # Without options it is the plain composition; with them, where there are any, it goes in chunks.
    chunked = hasattr(torch.nn, "LinearCrossEntropyOptions")
    options = {"options": torch.nn.LinearCrossEntropyOptions()} if chunked else {}
    return autograd(lambda x, w, y: F.linear_cross_entropy(x, w, y, **options))


def liger(device, kernels):
    with needs("liger-kernel"):
        import liger_kernel  # noqa: F401
    on_gpu(device)
    with needs("liger-kernel"):
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    try:
        import liger_kernel.backends as backends
    except ImportError:  # before 0.8 there was Triton alone
        backends = None
    there = backends.available_impls("cross_entropy_loss_and_grad") if backends else ["nvidia-triton"]
    if kernels not in there:
        raise Absent(f"Liger finds only {', '.join(there)} here; CuTe needs liger-kernel[cutedsl]")
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)

    def loss_of(x, w, y):
        if backends:
            backends.set_impl(kernels)  # left to itself it takes CuTe where it can
        return loss(w, x, y)
    return autograd(loss_of)


def cce(device, filter_eps):
    with needs("cut-cross-entropy"):
        from cut_cross_entropy import linear_cross_entropy
    on_gpu(device)
    return autograd(lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=filter_eps))


def quack(device):
    with needs("quack-kernels and nvidia-cutlass-dsl"):
        import cutlass  # noqa: F401
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    on_gpu(device)
    return autograd(lambda x, w, y: chunked_linear_cross_entropy(x, w, y))


# --- lce.c ------------------------------------------------------------------------------------------------------

class Ours:
    """lce.c through its library, on the tensors' own memory and PyTorch's stream. dW is fp32."""

    def __init__(self, device, path):
        if not os.path.exists(path):
            raise Absent(f"{path} is not there: make liblce.so")
        try:
            self.layer = liblce.Layer(path, device, "fp32" if device == "cpu" else "bf16")
        except liblce.Failure as failure:
            raise Absent(str(failure)) from None
        self.kept = {}

    def buffers(self, x, w):
        key = (x.shape, w.shape)
        if key not in self.kept:
            self.kept = {key: new_outputs(x, w)}
        return self.kept[key]

    def __call__(self, x, w, y, backward=True, chunk=4096, z_loss=0.0, outputs=None):
        """Mean loss (z-loss included) and gradients, in `outputs` or in buffers that the next call writes again."""
        loss, z, dx, dw = outputs or self.buffers(x, w)
        gradients = dict(dx=dx, dweight=dw) if backward else {}
        self.layer(x.detach(), w.detach(), y, loss, chunk=min(chunk, len(x)), scale=1, mean=1, z_loss=z_loss,
                   token_z_loss=z if z_loss else None, **gradients)
        return ((loss + z) if z_loss else loss).mean(dtype=torch.float64), dx, dw

    def held(self):
        return self.layer.held_bytes()


def new_outputs(x, w):
    """Losses, z-losses, dX, dW."""
    loss = torch.empty(len(x), dtype=torch.float32, device=x.device)
    return loss, torch.empty_like(loss), torch.empty_like(x), torch.empty(w.shape, dtype=torch.float32, device=w.device)


# --- the bare products ------------------------------------------------------------------------------------------

def forward_product(x, w, logits):
    torch.matmul(x, w.T, out=logits)


def backward_products(x, w, logits, dx, dw):
    torch.matmul(logits, w, out=dx)
    torch.matmul(logits.T, x, out=dw)


# --- measuring --------------------------------------------------------------------------------------------------

def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device, work):
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def reset_peak(device):
    if device == "cuda":
        wait(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device):
    """The most since reset_peak that PyTorch's tensors took; None where it does not count."""
    wait(device)
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def now_bytes(device):
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def problem(device, shape, seed=1):
    n, h, v = shape
    g = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(v, h, generator=g, device=device)).to(dtype).requires_grad_()
    y = torch.randint(v, (n,), generator=g, device=device)
    return x, w, y


def reason_of(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120].replace("|", "/")


# --- float64 ----------------------------------------------------------------------------------------------------

AT_ONCE = 2**30  # bytes of a block of logits


def blocks(rows, bytes_each):
    step = max(1, AT_ONCE // bytes_each)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


@torch.no_grad()
def reference(x, w, y, z_loss=0.0):
    """Mean loss (z-loss included), dX and dW in float64, a block of rows of logits at a time."""
    n, v = len(x), len(w)
    w64 = w.double()
    loss, dx, dw = 0.0, torch.empty(x.shape, dtype=torch.float64, device=x.device), torch.zeros_like(w64)
    for rows in blocks(n, 8 * v):
        x64, target = x[rows].double(), y[rows, None]
        z = x64 @ w64.T
        lse = torch.logsumexp(z, dim=1, keepdim=True)
        loss += (lse - z.gather(1, target) + z_loss * lse * lse).sum().item() / n
        p = z.sub_(lse).exp_().mul_((1 + 2 * z_loss * lse) / n)
        p.scatter_add_(1, target, torch.full_like(lse, -1 / n))
        torch.mm(p, w64, out=dx[rows])
        dw.addmm_(p.T, x64)
    return loss, dx, dw


@torch.no_grad()
def relative_error(got, want):
    """|got - want| / |want|, in float64."""
    off = size = 0.0
    for rows in blocks(len(want), 8 * want.shape[1]):
        off += (got[rows].double() - want[rows]).square().sum().item()
        size += want[rows].square().sum().item()
    return math.sqrt(off / size)


def errors_of(got, want):
    """Of a peer's (loss, dX, dW), against the reference's."""
    return dict(loss_error=abs(got[0].item() - want[0]) / want[0], dx_error=relative_error(got[1], want[1]),
                dw_error=relative_error(got[2], want[2]))
