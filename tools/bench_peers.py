#!/usr/bin/env python3
"""Times lce.c's linear_cross_entropy against other implementations, at the same shapes, in one run.

  make liblce.so && tools/bench_peers.py                  # on a GPU; needs PyTorch, and the peers' packages for their rows
  tools/bench_peers.py --z-loss                           # z-loss instead: the loss alone, and a whole training step
  tools/bench_peers.py --log-probs                        # instead: log-probabilities of a policy gradient, and entropies
  tools/bench_peers.py --device cpu --shapes 64x32x1000   # where there is no GPU

Every peer computes the mean loss and the gradients of x and W, alternating with the three plain GEMMs (logits, dX and dW
through torch.mm); "over the GEMMs" is the ratio to them. On a GPU three calls are queued and timed together. Before that both
run untimed until the GPU reaches its steady clock. "holds" is the peak memory beyond inputs and gradients: PyTorch's own
count, for lce.c with what its library reports.
Errors are relative, against float64 at the same shape: of the mean loss as the peer returns it, and of the gradients in
the Frobenius norm, in the dtypes of x and W. A peer that is not installed, or fails, is a row with the reason. Packages:
liger-kernel[cutedsl], quack-kernels, cut-cross-entropy; PyTorch >= 2.13 has a linear_cross_entropy of its own. lce.c is
measured as PyTorch's users have it, through tools/torch, and through kernels/liblce.h. QuACK's chunk is 4096, or 2048 where
H is 4096: it refuses a chunk equal to H.
"""
import argparse
import importlib.metadata
import os
import statistics
import sys

try:
    import torch.cuda
except ImportError:  # without PyTorch, tools/torch/ is what is found
    sys.exit("tools/bench_peers.py measures through PyTorch, which is not there: pip install torch")

import peers
import peers_chains

SHAPES = "4096x4096x128256,16384x2048x131072,8192x2304x256000,32768x4096x128256"
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy")


def versions():
    """Of PyTorch and every peer that is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def bench_shape(device, shape, options):
    """The plain GEMMs' milliseconds (None: nothing was timed), and a row for every peer."""
    tensors = x, w, y = peers.problem(device, shape)
    reference, gemms = None if options.no_errors else peers.reference(x, w, y), None
    calls = 3 if device == "cuda" else 1  # as in training, the GPU does not wait for the host between them

    def first(peer):
        run = peers.loss_of(peer, device)
        run = run if peer.direct else peers.autograd(run)
        for _ in range(2):
            run(*tensors)
        return (peers.measured(device, peer, run, tensors, reference),
                lambda: peers.seconds(device, lambda: run(*tensors), calls))

    def makers():
        nonlocal reference, gemms
        for peer in peers.PEERS:
            if not peer.name.startswith(tuple(options.without)):
                yield peer.name, lambda: first(peer)
        reference, gemms = None, peers.gemms(x, w)  # freed, and there, before the timing

    rows, gemm_times = peers.compare(device, makers(),
                                     lambda: peers.seconds(device, lambda: [gemm() for gemm in gemms], calls), options.rounds)
    return 1e3 * statistics.median(gemm_times) if gemm_times else None, rows


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", default=SHAPES, help="NxHxV, separated by commas (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="the median of so many (default 7)")
    parser.add_argument("--without", action="append", default=[], metavar="NAME",
                        help="leave out the peers whose names start so; may be given again")
    parser.add_argument("--no-errors", action="store_true", help="leave out the comparison with float64")
    parser.add_argument("--z-loss", action="store_true",
                        help="instead: z-loss against chains of separate operations, the loss and a training step")
    parser.add_argument("--log-probs", action="store_true",
                        help="instead: log-probabilities, alone and with entropies, against chains of separate operations")
    options = parser.parse_args()
    try:
        options.shapes = [tuple(int(part) for part in text.split("x")) for text in options.shapes.split(",")]
        assert all(len(shape) == 3 and min(shape) > 0 for shape in options.shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give NxHxV, for instance 4096x4096x128256")
    return options


def main():
    options = parse_options()
    if not os.path.exists(os.environ["LCE_LIBRARY"]):
        sys.exit(f"{os.environ['LCE_LIBRARY']}, which peers are compared with, does not exist: make liblce.so")
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, median of {options.rounds}; " + ", ".join(f"{name} {v}" for name, v in versions().items()))
    losses = [peers_chains.Z_LOSS] * options.z_loss + [*peers_chains.LOG_PROBS] * options.log_probs
    if losses:
        peers_chains.bench(options.device, options.shapes, options.rounds, not options.no_errors, losses)
        return
    for shape in options.shapes:
        gemms_ms, rows = bench_shape(options.device, shape, options)
        peers.show("N {}, H {}, V {}".format(*shape) + (f": the plain GEMMs take {gemms_ms:.2f} ms" if gemms_ms else ""),
                   ("peer", "ms", "over the GEMMs", "holds", *peers.ERROR_COLUMNS), rows,
                   lambda row: [f"{row['ms']:.2f}", f"{row['ratio']:.3f}",
                                peers.size_cell(row["held_bytes"], "MiB", 2**20, 0), *peers.error_cells(row)])


if __name__ == "__main__":
    main()
