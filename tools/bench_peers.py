#!/usr/bin/env python3
"""Times the last layer of lce.c beside what else there is, at the same shapes, in one run.

  make liblce.so && tools/bench_peers.py                  # on a GPU, needs PyTorch; liger-kernel, cut-cross-entropy
  tools/bench_peers.py --z-loss                           # z-loss instead: the layer, and a whole training step
  tools/bench_peers.py --device cpu --shapes 64x32x1000   # where there is no GPU

Every peer computes the mean loss and the gradients of x and W, in turn with the three bare matrix products (logits, dX
and dW through torch.matmul), and is also told as a ratio to them. Before that both run untimed until the GPU has settled
at its power limit. "holds" is the most memory in use beyond inputs and gradients: PyTorch's own count, for lce.c what
its library says. Errors are relative, against float64 at the same shape: of the mean loss as the peer hands it out, and
of the gradients in the Frobenius norm; lce.c's dW is fp32, PyTorch hands out the others' in W's own dtype. A peer that
is not there, or fails, is a row that says why.
"""
import argparse
import importlib.metadata
import json
import os
import statistics
import sys

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import peers  # noqa: E402
import peers_z_loss  # noqa: E402
from peers import Absent, now_bytes, peak_bytes, problem, reason_of, reset_peak, seconds, wait  # noqa: E402

SETTLING = 0.7  # seconds
SHAPES = "4096x4096x128256,16384x2048x131072,8192x2304x256000,32768x4096x128256"


def rows_of(device, library):
    """(name, maker of the peer's function) of every row."""
    yield "PyTorch eager, bf16 logits" if device == "cuda" else "PyTorch eager", lambda: peers.eager(device)
    yield "PyTorch eager, fp32 logits", lambda: peers.eager_fp32(device)
    yield "torch.compile", lambda: peers.compiled(device)
    yield "torch linear_cross_entropy", lambda: peers.native(device)
    yield "Liger (Triton, fp32 dW)", lambda: peers.liger(device, "nvidia-triton")
    yield "Liger (CuTe, fp32 dW)", lambda: peers.liger(device, "nvidia-cutedsl")
    yield "QuACK (CuTe)", lambda: peers.quack(device)
    yield "Cut Cross-Entropy (filtered)", lambda: peers.cce(device, "high")
    yield "Cut Cross-Entropy (exact)", lambda: peers.cce(device, None)
    for chunk in (4096, 2048, 1024):
        yield f"lce.c, chunk {chunk}", lambda chunk=chunk: ours(library, chunk)


def ours(library, chunk):
    if isinstance(library, Absent):
        raise library
    return lambda x, w, y: library(x, w, y, chunk=chunk)


def prepare(device, name, make, library, tensors, reference):
    """The peer's function of no arguments, warmed up, and its row as far as it is known before it is timed."""
    x, w, y = tensors
    run = make()
    work = lambda: run(x, w, y)  # noqa: E731
    for _ in range(2):
        work()
    if name.startswith("lce.c"):
        held = library.held()
    else:
        x.grad = w.grad = None
        reset_peak(device)
        before = now_bytes(device)
        _, dx, dw = work()
        held = peak_bytes(device)
        if held is not None:
            held -= before + sum(g.numel() * g.element_size() for g in (dx, dw))
    errors = peers.errors_of(work(), reference) if reference else {}
    x.grad = w.grad = None
    return work, dict(peer=name, held_bytes=held, **errors)


def versions():
    """Of PyTorch and every peer that is there."""
    found = {"torch": torch.__version__}
    for package in ("triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def bench_shape(device, shape, options, library):
    tensors = problem(device, shape)
    x, w, y = tensors
    n, _, v = shape
    reference = None if options.no_errors else peers.reference(x, w, y)
    rows, works = [], []
    for name, make in rows_of(device, library):
        if any(name.startswith(start) for start in options.without):
            continue
        try:
            work, row = prepare(device, name, make, library, tensors, reference)
            rows.append(row)
            works.append((work, row))
        except Exception as error:  # a peer's failure is a row, whatever it is
            rows.append(dict(peer=name, why=reason_of(error)))
        x.grad = w.grad = None
        reset_peak(device)
    del reference
    reset_peak(device)
    with torch.no_grad():
        floor_tensors = (torch.empty(n, v, dtype=x.dtype, device=device), torch.empty_like(x), torch.empty_like(w))

        def floor():
            peers.forward_product(x, w, floor_tensors[0])
            peers.backward_products(x, w, *floor_tensors)
        floor()
    floors = []

    def pair(work):
        with torch.no_grad():
            before = seconds(device, floor)
        taken = seconds(device, work)
        x.grad = w.grad = None
        return taken, before

    for work, row in works:
        settled = SETTLING if device == "cuda" else 0
        while settled > 0:
            settled -= sum(pair(work))
        times = [pair(work) for _ in range(options.rounds)]
        floors += [f for _, f in times]
        row.update(ms=1e3 * statistics.median(t for t, _ in times), ratio=statistics.median(t / f for t, f in times))
    return dict(shape=shape, floor_ms=1e3 * statistics.median(floors) if floors else None), rows


def show(shape, rows):
    n, h, v = shape["shape"]
    floor = "" if shape["floor_ms"] is None else f": the three products take {shape['floor_ms']:.2f} ms"
    print(f"\nN {n}, H {h}, V {v}{floor}\n")
    print("| peer | ms | over the products | holds | loss off by | dX | dW |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "why" in row:
            print(f"| {row['peer']} | not measured: {row['why']} | | | | | |")
            continue
        held = "" if row["held_bytes"] is None else f"{row['held_bytes'] / 2**20:.0f} MiB"
        off = " | ".join(f"{row[of]:.1e}" if of in row else "" for of in ("loss_error", "dx_error", "dw_error"))
        print(f"| {row['peer']} | {row['ms']:.2f} | {row['ratio']:.3f} | {held} | {off} |")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", default=SHAPES, help="NxHxV, parted by commas (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts (default 7)")
    parser.add_argument("--library", default=os.path.join(ROOT, "liblce.so"))
    parser.add_argument("--without", action="append", default=[], metavar="NAME",
                        help="leave out the peers whose names start so; may be given again")
    parser.add_argument("--no-errors", action="store_true", help="leave out the comparison with float64")
    parser.add_argument("--z-loss", action="store_true",
                        help="instead: z-loss against chains of separate operations, the layer and a training step")
    parser.add_argument("--json", metavar="FILE", help="write every row as a line of JSON, too")
    options = parser.parse_args()
    try:
        shapes = [tuple(int(part) for part in text.split("x")) for text in options.shapes.split(",")]
        assert all(len(shape) == 3 and min(shape) > 0 for shape in shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give NxHxV, for instance 4096x4096x128256")
    try:
        library = peers.Ours(options.device, options.library)
    except Absent as absent:
        library = absent
    file = open(options.json, "w") if options.json else None

    def tell(**row):
        if file:
            print(json.dumps(row), file=file, flush=True)

    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, median of {options.rounds}; " + ", ".join(f"{name} {v}" for name, v in versions().items()))
    tell(event="run", device=device, rounds=options.rounds, versions=versions())
    if options.z_loss:
        if isinstance(library, Absent):
            sys.exit(f"--z-loss compares with lce.c: {library}")
        peers_z_loss.bench(options.device, shapes, options.rounds, library, not options.no_errors, tell)
        return
    for number in shapes:
        shape, rows = bench_shape(options.device, number, options, library)
        show(shape, rows)
        for row in rows:
            tell(event="peer", **shape, **row)
        wait(options.device)


if __name__ == "__main__":
    main()
