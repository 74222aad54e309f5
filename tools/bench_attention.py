#!/usr/bin/env python3
"""Times lce.c's causal attention against PyTorch's, alternating: on a GPU cuDNN's and, where they are
installed, FlashAttention 3 (flash_attn_interface) and 4 (flash_attn.cute).

  tools/bench_attention.py [--shapes BxTxHEADSxKVxD,...]   # needs tools/bench_attention, PyTorch and a GPU
  tools/bench_attention.py --device cpu --shapes 2x64x4x2x16

Each takes its turn on normal values: both passes for 0.7 s, until the GPU is hot, then each by itself, queued.
"both" is the time of both passes over that of the first peer. Flops are those of half of each [T, T]: 2 GEMMs
forward, 5 backward.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

try:
    import torch.cuda
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    sys.exit("tools/bench_attention.py compares with PyTorch, which is not there: pip install torch")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = os.path.dirname(os.path.abspath(os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train"))))  # of this build
SHAPES = "64x1024x12x12x64,4x4096x32x32x64,4x4096x32x8x64,2x8192x32x32x128,1x32768x32x8x128"


def ours(device, shape):
    """Seconds of a forward and a backward pass."""
    sizes = zip(("--batch", "--seq-len", "--num-attention-heads", "--num-key-value-heads", "--head-dim"), map(str, shape))
    words = [os.path.join(PROGRAMS, "tools", "bench_attention"), "--device", device, *(word for pair in sizes for word in pair)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    row = json.loads(done.stdout)
    return row["forward_seconds"], row["backward_seconds"]


def by_pytorch(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def by_flash(function):
    def call(q, k, v):  # [B, T, heads, D]
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return out[0] if isinstance(out, tuple) else out
    return call


def peers(cuda):
    found = {"cuDNN" if cuda else "PyTorch": by_pytorch}
    try:
        import flash_attn_interface
        found["FlashAttention 3"] = by_flash(flash_attn_interface.flash_attn_func)
    except ImportError:
        pass
    try:
        from flash_attn.cute import flash_attn_func
        found["FlashAttention 4"] = by_flash(flash_attn_func)
    except ImportError:
        pass
    return found


def theirs(device, call, tensors, gradient):
    """Seconds of a forward and a backward pass, as in a queue of twenty; a GPU's clock is steady before."""
    def seconds(work):
        torch.cuda.synchronize() if device == "cuda" else None
        start = time.perf_counter()
        for _ in range(20):
            work()
        torch.cuda.synchronize() if device == "cuda" else None
        return (time.perf_counter() - start) / 20

    def both():
        torch.autograd.grad(call(*tensors), tensors, gradient)
    end = time.perf_counter() + (0.7 if device == "cuda" else 0)
    while time.perf_counter() < end:
        seconds(both)
    with torch.no_grad():
        call(*tensors)  # plans it: without gradients it is another kernel
        forward = seconds(lambda: call(*tensors))
    return forward, seconds(both) - forward


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", default=SHAPES, help="batch x T x query heads x key/value heads x head size (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many turns (default 3)")
    parser.add_argument("--json", action="store_true", help="a JSON object a row instead of a table")
    options = parser.parse_args()
    try:
        shapes = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
        assert all(len(shape) == 5 and min(shape) > 0 and shape[2] % shape[3] == 0 for shape in shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give BxTxHEADSxKVxD, for instance 2x8192x32x8x128")
    if not options.json:
        print("| B x T x heads x key/value heads x D | | forward | backward, TFLOP/s | both |\n| --- | --- | --- | --- | --- |")
    for shape in shapes:
        batch, length, heads, groups, size = shape
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        tensors = [torch.randn(batch, count, length, size, device=options.device, dtype=dtype, requires_grad=True)
                   for count in (heads, groups, groups)]
        gradient = torch.randn_like(tensors[0])
        times = {}
        for _ in range(options.rounds):
            times.setdefault("lce.c", []).append(ours(options.device, shape))
            for name, call in peers(options.device == "cuda").items():
                times.setdefault(name, []).append(theirs(options.device, call, tensors, gradient))
        base = sum(statistics.median(way) for way in zip(*list(times.values())[1]))
        for name, turns in times.items():
            forward, backward = (statistics.median(way) for way in zip(*turns))
            flops = 2 * batch * heads * length**2 * size  # of half of each of two GEMMs
            row = dict(event="attention", shape="x".join(map(str, shape)), peer=name, forward=1e-12 * flops / forward,
                       backward=2.5e-12 * flops / backward, both=(forward + backward) / base)
            print(json.dumps(row) if options.json else
                  f"| {row['shape']} | {name} | {row['forward']:.3g} | {row['backward']:.3g} | {row['both']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
