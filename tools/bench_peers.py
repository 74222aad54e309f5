#!/usr/bin/env python3
"""Times the last layer of lce.c beside what else there is, at the same shapes, in one run.

  make liblce.so && tools/bench_peers.py                       # on a GPU, needs PyTorch; liger-kernel, cut-cross-entropy
  tools/bench_peers.py --device cpu --shapes 64x32x1000        # where there is none

Every peer computes the mean loss and the gradients of x and W. Peers take turns; every time is also told as a ratio to
the three bare matrix products of the same turn (logits, dX and dW through torch.matmul). "holds" is the most memory in
use beyond inputs and gradients: PyTorch's own count, for lce.c what its library says. Errors of the gradients are
against float64 at a shape where that fits; lce.c's dW is fp32, PyTorch hands out the others' in W's own dtype. A peer that
is not there, or fails, is a row that says why.
"""
import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import ctypes  # noqa: E402
import liblce  # noqa: E402

SHAPES = "4096x4096x128256,16384x2048x131072,8192x2304x256000,32768x4096x128256"
ERROR_SHAPE = (512, 512, 8192)


class Absent(Exception):
    """A peer that cannot run here; the sentence says why."""


# --- peers: each makes a function of (x, w, y) that leaves gradients ------------------------------------------------

def autograd(loss_of):
    """The gradients of loss_of(x, w, y) by PyTorch's backward pass."""
    def run(x, w, y):
        x.grad = w.grad = None
        loss_of(x, w, y).backward()
        return x.grad, w.grad
    return run


def eager(_):
    return autograd(lambda x, w, y: F.cross_entropy(x @ w.T, y))


def compiled(device):
    if device == "cpu":
        raise Absent("needs a compiler for every shape; left out on the CPU")
    # Every shape gets kernels of its own: left to itself, the second would get slower ones for any shape.
    return autograd(torch.compile(lambda x, w, y: F.cross_entropy(x @ w.T, y), dynamic=False))


def native(_):
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent(f"PyTorch {torch.__version__} has none")
    # Without options it is the plain composition; with them, where there are any, it goes in chunks.
    options = {"options": torch.nn.LinearCrossEntropyOptions()} if hasattr(torch.nn, "LinearCrossEntropyOptions") else {}
    return autograd(lambda x, w, y: F.linear_cross_entropy(x, w, y, **options))


def liger(device, kernels):
    if device == "cpu":
        raise Absent("runs on GPUs only")
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
    if device == "cpu":
        raise Absent("runs on GPUs only")
    from cut_cross_entropy import linear_cross_entropy
    return autograd(lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=filter_eps))


def quack(device):
    if device == "cpu":
        raise Absent("runs on GPUs only")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    return autograd(lambda x, w, y: chunked_linear_cross_entropy(x, w, y))


class Ours:
    """lce.c through its library, on the tensors' own memory."""

    def __init__(self, device, path):
        if not os.path.exists(path):
            raise Absent(f"{path} is not there: make liblce.so")
        self.lce = liblce.load(path)
        self.context = self.lce.lce_create(device.encode(), 0, b"fp32" if device == "cpu" else b"bf16")
        if not self.context:
            raise Absent(self.lce.lce_last_error().decode())
        self.kept = {}

    def buffers(self, x, w):
        key = (x.shape, w.shape)
        if key not in self.kept:
            self.kept = {key: (torch.empty_like(x), torch.empty(w.shape, dtype=torch.float32, device=w.device),
                               torch.empty(len(x), dtype=torch.float32, device=x.device))}
        return self.kept[key]

    def call(self, x, w, y, backward=True, **more):
        dx, dw, loss = self.buffers(x, w)
        args = liblce.Args(tokens=len(x), hidden_size=x.shape[1], vocab_size=len(w), scale=1, mean=1,
                           x=x.data_ptr(), weight=w.data_ptr(), targets=y.data_ptr(), loss=loss.data_ptr(), **more)
        if backward:
            args.dx, args.dweight = dx.data_ptr(), dw.data_ptr()
        wait(y.device.type)  # the library's stream does not wait for PyTorch's, which may still make the inputs
        if self.lce.lce_linear_cross_entropy(self.context, ctypes.byref(args)) or \
                self.lce.lce_synchronize(self.context):
            raise RuntimeError(self.lce.lce_last_error().decode())
        return dx, dw

    def held(self):
        return self.lce.lce_held_bytes(self.context)


def products(x, w, logits, dx, dw):
    torch.matmul(x, w.T, out=logits)
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


def problem(device, shape, seed=1):
    n, h, v = shape
    g = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(v, h, generator=g, device=device)).to(dtype).requires_grad_()
    y = torch.randint(v, (n,), generator=g, device=device)
    return x, w, y


def peers(device, library):
    """(name, maker of the function, whether its targets are int32 and its memory its own)."""
    yield "PyTorch eager", lambda: eager(device), None
    yield "torch.compile", lambda: compiled(device), None
    yield "torch linear_cross_entropy", lambda: native(device), None
    yield "Liger (Triton, fp32 dW)", lambda: liger(device, "nvidia-triton"), None
    yield "Liger (CuTe, fp32 dW)", lambda: liger(device, "nvidia-cutedsl"), None
    yield "QuACK (CuTe)", lambda: quack(device), None
    yield "Cut Cross-Entropy (filtered)", lambda: cce(device, "high"), None
    yield "Cut Cross-Entropy (exact)", lambda: cce(device, None), None
    for chunk in (4096, 2048, 1024):
        yield f"lce.c, chunk {chunk}", lambda chunk=chunk: chunk, library


def prepare(device, name, make, library, tensors):
    """The peer's function of no arguments and what it holds, warmed up."""
    x, w, y = tensors
    if library:
        chunk, y32 = make(), y.to(torch.int32)
        work = lambda: library.call(x.detach(), w.detach(), y32, chunk=min(chunk, len(x)))  # noqa: E731
        work()
        return work, library.held()
    run = make()
    work = lambda: run(x, w, y)  # noqa: E731
    for _ in range(2):
        work()
    if device == "cpu":
        return work, None
    x.grad = w.grad = None
    wait(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = work()
    wait(device)
    return work, torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in gradients)


def versions():
    """Of PyTorch and every peer that is there."""
    found = {"torch": torch.__version__}
    for package in ("triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def reason_of(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:90].replace("|", "/")


def bench_shape(device, shape, rounds, library, absent):
    tensors = problem(device, shape)
    x, w, _ = tensors
    n, h, v = shape
    rows, works = [], []
    for name, make, lib in peers(device, library):
        if name in absent:
            continue
        try:
            if name.startswith("lce.c") and isinstance(library, Exception):
                raise library
            works.append((name, *prepare(device, name, make, lib, tensors)))
        except Exception as error:  # a peer's failure is a row, whatever it is
            rows.append(dict(peer=name, why=reason_of(error)))
        x.grad = w.grad = None
    with torch.no_grad():
        floor_tensors = (torch.empty(n, v, dtype=x.dtype, device=device), torch.empty_like(x), torch.empty_like(w))
        floor = lambda: products(x, w, *floor_tensors)  # noqa: E731
        floor()
        times, ratios, floors = {name: [] for name, *_ in works}, {name: [] for name, *_ in works}, []
    for _ in range(rounds):
        for name, work, _held in works:
            with torch.no_grad():
                floors.append(seconds(device, floor))
            times[name].append(seconds(device, work))
            ratios[name].append(times[name][-1] / floors[-1])
            x.grad = w.grad = None
    for name, _work, held in works:
        rows.append(dict(peer=name, ms=1e3 * statistics.median(times[name]), ratio=statistics.median(ratios[name]),
                         held_bytes=held))
    return dict(shape=shape, floor_ms=1e3 * statistics.median(floors), rows=rows)


def bench_errors(device, library):
    """Relative errors of dX and dW against float64."""
    tensors = problem(device, ERROR_SHAPE if device == "cuda" else (32, 16, 300), seed=2)
    x, w, y = tensors
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    F.cross_entropy(x64 @ w64.T, y).backward()
    errors = {}
    for name, make, lib in peers(device, library):
        try:
            if lib is not None and isinstance(lib, Exception):
                raise lib
            got = lib.call(x.detach(), w.detach(), y.to(torch.int32), chunk=256) if lib else make()(x, w, y)
            wait(device)
            errors[name] = [((g.double() - want).norm() / want.norm()).item()
                            for g, want in zip(got, (x64.grad, w64.grad))]
        except Exception:  # its row among the times says why
            pass
        x.grad = w.grad = None
    return errors


def bench_z_loss(device, shape, rounds, library):
    """z-loss by a chain of operations, and by ours: milliseconds forward, backward, together. Ours computes gradients
    on the way forward; what they add to the forward pass alone stands for its backward."""
    x, w, y = problem(device, shape)
    y32 = y.to(torch.int32)

    def chain():
        logits = (x @ w.T).float()
        lse = torch.logsumexp(logits, dim=1)
        target = logits.gather(1, y[:, None])[:, 0]
        return (lse - target + 1e-4 * lse * lse).mean()

    ours = lambda backward: library.call(x.detach(), w.detach(), y32, backward, chunk=min(4096, len(x)),  # noqa: E731
                                         z_loss=1e-4)
    chain().backward()
    ours(True), ours(False)
    forward, backward, together, alone = [], [], [], []
    for _ in range(rounds):
        x.grad = w.grad = None
        kept = []
        forward.append(seconds(device, lambda: kept.append(chain())))
        backward.append(seconds(device, lambda: kept.pop().backward()))
        together.append(seconds(device, lambda: ours(True)))
        alone.append(seconds(device, lambda: ours(False)))
    added = [t - a for t, a in zip(together, alone)]
    middle = lambda values: 1e3 * statistics.median(values)  # noqa: E731
    return dict(shape=shape, chain_forward_ms=middle(forward), chain_backward_ms=middle(backward),
                ours_forward_ms=middle(alone), ours_backward_ms=middle(added), ours_together_ms=middle(together),
                together_ratio=statistics.median((f + b) / t for f, b, t in zip(forward, backward, together)),
                forward_ratio=statistics.median(f / a for f, a in zip(forward, alone)),
                backward_ratio=statistics.median(b / a for b, a in zip(backward, added)))


# --- showing ----------------------------------------------------------------------------------------------------

def show(result, errors):
    n, h, v = result["shape"]
    print(f"\nN {n}, H {h}, V {v}: the three products take {result['floor_ms']:.2f} ms\n")
    print("| peer | ms | over the products | holds | dX, dW off by |")
    print("| --- | --- | --- | --- | --- |")
    for row in result["rows"]:
        if "why" in row:
            print(f"| {row['peer']} | not measured: {row['why']} | | | |")
            continue
        held = "" if row["held_bytes"] is None else f"{row['held_bytes'] / 2**20:.0f} MiB"
        off = ", ".join(f"{e:.1e}" for e in errors.get(row["peer"], []))
        print(f"| {row['peer']} | {row['ms']:.2f} | {row['ratio']:.2f} | {held} | {off} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", default=SHAPES, help="NxHxV, parted by commas (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts (default 7)")
    parser.add_argument("--library", default=os.path.join(ROOT, "liblce.so"))
    parser.add_argument("--without", default="", help="peers to leave out, parted by commas")
    parser.add_argument("--z-loss", action="store_true", help="also z-loss against a chain of operations")
    parser.add_argument("--out", help="write everything as JSON, too")
    options = parser.parse_args()
    try:
        shapes = [tuple(int(part) for part in text.split("x")) for text in options.shapes.split(",")]
        assert all(len(shape) == 3 and min(shape) > 0 for shape in shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give NxHxV, for instance 4096x4096x128256")
    try:
        library = Ours(options.device, options.library)
    except Absent as absent:
        library = absent
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, median of {options.rounds}; " + ", ".join(f"{name} {v}" for name, v in versions().items()))
    errors = bench_errors(options.device, library)
    results, z_loss = [], []
    for shape in shapes:
        results.append(bench_shape(options.device, shape, options.rounds, library, options.without.split(",")))
        show(results[-1], errors)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.z_loss and not isinstance(library, Exception):
        for shape in shapes[:2]:
            z = bench_z_loss(options.device, shape, options.rounds, library)
            z_loss.append(z)
            print(f"\nz-loss, N {shape[0]}, H {shape[1]}, V {shape[2]}: a chain of operations on fp32 logits takes "
                  f"{z['chain_forward_ms']:.1f} ms forward and {z['chain_backward_ms']:.1f} backward; lce.c "
                  f"{z['ours_forward_ms']:.1f} forward alone ({z['forward_ratio']:.1f} times as fast), its gradients "
                  f"{z['ours_backward_ms']:.1f} more ({z['backward_ratio']:.1f} times), together "
                  f"{z['ours_together_ms']:.1f} ({z['together_ratio']:.1f} times)")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(dict(device=device, versions=versions(), results=results, errors=errors, z_loss=z_loss),
                      file, indent=1)


if __name__ == "__main__":
    main()
