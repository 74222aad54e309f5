"""Implementations of linear_cross_entropy, lce.c's and others', behind one call; and what measures them.

A peer is a function of (x, w, y) that returns (mean loss, dX, dW). One that cannot run here raises an error that says why.
"""
import importlib
import math
import os
import statistics
import sys
import time
from collections import namedtuple

import torch
import torch.nn.functional as F

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools", "torch"))
os.environ.setdefault("LCE_LIBRARY", os.path.join(ROOT, "liblce.so"))
import lce  # noqa: E402
from lce.functional import context  # noqa: E402


# --- peers by autograd ------------------------------------------------------------------------------------------

# make() returns loss(x, w, y), or where the peer is `direct` what returns the loss, dX and dW; `package` is what pip
# installs, `modules` what must then import.
Peer = namedtuple("Peer", "name make package modules gpu_only direct", defaults=("", (), False, False))


def cross_entropy(x, w, y):
    return F.cross_entropy(x @ w.T, y)


def cross_entropy_fp32(x, w, y):
    """As most trainers do: the logits are rounded, the loss is not."""
    return F.cross_entropy((x @ w.T).float(), y)


def native():
    if not hasattr(F, "linear_cross_entropy"):
        raise RuntimeError(f"PyTorch {torch.__version__} has none; 2.13 and later do")
    # Without options it is the plain composition; with them it goes in chunks, dW in fp32 (acc_policy "auto").
    chunked = hasattr(torch.nn, "LinearCrossEntropyOptions")
    options = {"options": torch.nn.LinearCrossEntropyOptions()} if chunked else {}
    return lambda x, w, y: F.linear_cross_entropy(x, w, y, **options)


def liger(kernels):
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    try:
        import liger_kernel.backends as backends
    except ImportError:  # before 0.8 there was Triton alone
        backends = None
    there = backends.available_impls("cross_entropy_loss_and_grad") if backends else ["nvidia-triton"]
    if kernels not in there:
        raise RuntimeError(f"Liger finds only {', '.join(there)} here; CuTe needs nvidia-cutlass-dsl and apache-tvm-ffi")
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)

    def loss_of(x, w, y):
        if backends:
            backends.set_impl(kernels)  # by default it takes CuTe where it can
        return loss(w, x, y)
    return loss_of


def cut(filter_eps):
    from cut_cross_entropy import linear_cross_entropy
    return lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=filter_eps)


def quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss_of(x, w, y):
        chunk = 4096 if x.shape[1] != 4096 else 2048  # it refuses a chunk as large as H
        return chunked_linear_cross_entropy(x, w, y, chunk_size=chunk)
    return loss_of


def ours(chunk, **options):
    return lambda x, w, y: lce.linear_cross_entropy(x, w, y, chunk=min(chunk, len(x)), **options)


def c_interface(chunk):
    """The call that `ours` makes in its forward pass: it writes dW in fp32."""
    def run(x, w, y):
        x, w, (n, h) = x.detach(), w.detach(), x.shape
        loss, dx, dw = x.new_empty(n, dtype=torch.float32), torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)
        context(x.device, x.dtype, "")(tokens=n, hidden_size=h, vocab_size=len(w), chunk=min(chunk, n), mean=True, scale=1,
                                       targets_int64=True, x=x, weight=w, targets=y, loss=loss, dx=dx, dweight=dw)
        return loss.mean(), dx, dw
    return run


def ours_held(x):
    """The bytes that lce.c's last call held, in memory that is not PyTorch's."""
    return context(x.device, x.dtype, "").held_bytes()


PEERS = [
    Peer("PyTorch eager", lambda: cross_entropy),
    Peer("PyTorch eager, fp32 logits", lambda: cross_entropy_fp32),
    # Every shape gets kernels of its own: by default the second would get slower ones for any shape.
    Peer("torch.compile", lambda: torch.compile(cross_entropy, dynamic=False), gpu_only=True),
    Peer("torch linear_cross_entropy", native),
    Peer("Liger (Triton, fp32 dW)", lambda: liger("nvidia-triton"), "liger-kernel", ("liger_kernel",), True),
    Peer("Liger (CuTe, fp32 dW)", lambda: liger("nvidia-cutedsl"), "'liger-kernel[cutedsl]'",
         ("liger_kernel", "cutlass"), True),
    Peer("QuACK (CuTe)", quack, "quack-kernels", ("cutlass", "quack"), True),
    Peer("Cut Cross-Entropy (filtered)", lambda: cut("high"), "cut-cross-entropy", ("cut_cross_entropy",), True),
    Peer("Cut Cross-Entropy (exact)", lambda: cut(None), "cut-cross-entropy", ("cut_cross_entropy",), True),
    Peer("lce.c, C interface, chunk 4096", lambda: c_interface(4096), direct=True),
    *(Peer(f"lce.c, chunk {chunk}", lambda chunk=chunk: ours(chunk)) for chunk in (4096, 2048, 1024)),
]


def loss_of(peer, device):
    """The peer's loss(x, w, y) on "cpu" or "cuda"."""
    for module in peer.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RuntimeError(f"needs pip install {peer.package}: {error}") from None
    if peer.gpu_only and device == "cpu":
        raise RuntimeError("measured on GPUs only")
    return peer.make()


def autograd(loss_of):
    """A peer's function: loss_of(x, w, y) and its gradients by PyTorch's backward pass."""
    def run(x, w, y):
        x.grad = w.grad = None  # a peer that failed may have left some
        loss = loss_of(x, w, y)
        loss.backward()
        result = loss.detach(), x.grad, w.grad
        x.grad = w.grad = None
        return result
    return run


def gemms(x, w):
    """The three GEMMs of the loss alone, through torch.mm: what computes the logits, and what computes dX and dW."""
    x, w = x.detach(), w.detach()
    logits = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def backward():
        torch.mm(logits, w, out=dx)
        torch.mm(logits.T, x, out=dw)
    return lambda: torch.mm(x, w.T, out=logits), backward


# --- measuring --------------------------------------------------------------------------------------------------

def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device, work, calls=1):
    """Of a call, among so many that are queued one after the other."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return (time.perf_counter() - start) / calls


def compare(device, makers, base, rounds, parts=(("", lambda seconds: seconds),)):
    """A row for every (name, maker), and the base's seconds in all rounds. maker() returns what the row holds and a
    function of no arguments that returns seconds, of one run or of its parts (`parts` takes figures from them); a maker
    that fails leaves the reason in its row. Then each alternates with the base, such a function or the name of the row
    that has it; before that both run untimed, since a GPU reaches its steady clock only after a while."""
    rows, timers, bases, median = [], {}, [], statistics.median
    for name, maker in makers:
        rows.append(dict(what=name))
        try:
            found, timers[name] = maker()
            rows[-1].update(found)
        except Exception as error:  # whatever it is
            text = str(error).strip() or type(error).__name__
            rows[-1]["why"] = text.splitlines()[0][:120].replace("|", "/")
        reset_peak(device)
    base = timers.get(base, base)
    for row in rows:
        if not callable(base):
            row.setdefault("why", f"{base}, which it is compared with, failed")
        if "why" in row:
            continue
        work, times = timers[row["what"]], []
        warm = time.perf_counter() + (0.7 if device == "cuda" else 0)
        while time.perf_counter() < warm:
            base(), work()
        for _ in range(rounds):
            bases.append(base())
            times.append((bases[-1], bases[-1] if work is base else work()))
        for part, of in parts:
            row[f"{part}ms"] = 1e3 * median(of(work) for _, work in times)
            row[f"{part}ratio"] = median(of(work) / of(base) for base, work in times)
    return rows, bases


def reset_peak(device):
    if device == "cuda":
        wait(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device):
    """The peak of PyTorch's tensors since reset_peak; None on the CPU, where it does not count."""
    wait(device)
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def measured(device, peer, run, tensors, reference):
    """run(x, w, y) of a peer once: the bytes that it holds beyond inputs and gradients, and its errors."""
    reset_peak(device)
    before = peak_bytes(device)
    got = run(*tensors)
    held = peak_bytes(device)
    if held is not None:
        held -= before + sum(g.numel() * g.element_size() for g in got[1:])
    if peer.name.startswith("lce.c"):
        held = (held or 0) + ours_held(tensors[0])
    return dict(held_bytes=held, **errors_of(got, reference))


def problem(device, shape):
    """x [N, H] and w [V, H] (leaves that require gradients), y [N]."""
    n, h, v = shape
    g = torch.Generator(device=device).manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(v, h, generator=g, device=device)).to(dtype).requires_grad_()
    y = torch.randint(v, (n,), generator=g, device=device)
    return x, w, y


# --- tables -----------------------------------------------------------------------------------------------------

ERRORS = ("loss_error", "dx_error", "dw_error")
ERROR_COLUMNS = ("loss error", "dX error", "dW error")


def error_cells(row):
    return [f"{row[error]:.1e}" if error in row else "" for error in ERRORS]


def size_cell(count, unit, scale, digits):
    return "" if count is None else f"{count / scale:.{digits}f} {unit}"


def show(title, columns, rows, cells):
    """A Markdown table: a row's name, then cells(row); a row with "why" was not measured."""
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        texts = [f"not measured: {row['why']}"] + [""] * (len(columns) - 2) if "why" in row else cells(row)
        print(f"| {row['what']} | " + " | ".join(texts) + " |", flush=True)


# --- float64 ----------------------------------------------------------------------------------------------------

BLOCK_BYTES = 2**30  # of a block of logits


def blocks(rows, bytes_each):
    step = max(1, BLOCK_BYTES // bytes_each)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def advantages_of(y):
    """From -1 to 1, for a loss that weights its tokens."""
    return torch.linspace(-1, 1, len(y), device=y.device)


def token_cross_entropy(z, y, advantages):
    return F.cross_entropy(z, y, reduction="none")


def reference(x, w, y, token_losses=token_cross_entropy):
    """The mean of token_losses(z, y, advantages), dX and dW in float64, a block of rows of logits z at a time."""
    w64, advantages = w.detach().double().requires_grad_(), advantages_of(y)
    loss, dx = 0.0, torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for rows in blocks(len(x), 8 * len(w)):
        x64 = x[rows].detach().double().requires_grad_()
        part = token_losses(x64 @ w64.T, y[rows], advantages[rows]).sum() / len(x)
        part.backward()
        loss += part.item()
        dx[rows] = x64.grad
    return loss, dx, w64.grad


@torch.no_grad()
def relative_error(got, want):
    """|got - want| / |want|, in float64."""
    off = size = 0.0
    for rows in blocks(len(want), 8 * want.shape[1]):
        off += (got[rows].double() - want[rows]).square().sum().item()
        size += want[rows].square().sum().item()
    return math.sqrt(off / size)


def errors_of(got, want):
    """Of a peer's (loss, dX, dW), against the reference's; nothing where there is none."""
    if not want:
        return {}
    return dict(zip(ERRORS, (abs((got[0].item() - want[0]) / want[0]), relative_error(got[1], want[1]),
                             relative_error(got[2], want[2]))))
