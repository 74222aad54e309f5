#!/usr/bin/env python3
"""The ladder of kernels/lce/LCE.md in PyTorch: seven versions of LM head + cross-entropy, one idea each.

  tools/ladder/ladder.py                                # on the GPU, if there is one
  OMP_NUM_THREADS=1 tools/ladder/ladder.py --device cpu # on one core
  make liblce.so && tools/ladder/ladder.py              # with lce.c itself as the last row

Each takes x [N, H], W [V, H], targets y [N] (all count) and the chunk C, and returns the loss [N] with the gradients
dX [N, H] and dW [V, H] of its sum. Rung 6 is a kernel (hopper.cu); a row that overflows is repaired by the C rungs
alone (rows_cpu.c). Prints, for each: its time, alternating with the three plain matmuls; the memory it holds beyond
inputs and gradients; and the errors against float64, in the Frobenius norm. x[0] is chosen so that its target leads by
about 30, a probability of 1 - 1e-8; the column "certain" is the error of its gradient, relative to the target's part
of it, c W[y]. Needs PyTorch 2.8 or later.
"""
import argparse
import itertools
import os
import pathlib
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("tools/ladder/ladder.py needs PyTorch: pip install torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "torch"))
os.environ.setdefault("LCE_LIBRARY", str(ROOT / "liblce.so"))
TILE = 1024  # of the vocabulary, in rung 5


def mm(a, b):
    """a @ b. On a GPU of operands in bf16, with the result in fp32; on a CPU all is fp32."""
    return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32) if a.is_cuda else a @ b


def add_mm(out, a, b):
    """out += a @ b, in place."""
    if a.is_cuda:
        torch.addmm(out, a.bfloat16(), b.bfloat16(), out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a, b)


def results(x, W):
    return [torch.zeros(shape, device=x.device) for shape in (len(x), x.shape, W.shape)]


# --- the rungs ----------------------------------------------------------------------------------------------

def matmuls(x, W, y, C):
    z = x @ W.T  # no loss: the three products that no version can do without
    return None, z @ W, z.T @ x


def materialized(x, W, y, C):
    N = len(x)
    z = mm(x, W.T)
    lse = z.logsumexp(-1)
    loss = lse - z.gather(1, y[:, None])[:, 0]
    g = (z - lse[:, None]).exp()
    g[torch.arange(N), y] -= 1
    dX, dW = mm(g, W), mm(g.T, x)
    return loss, dX, dW


def recomputed(x, W, y, C):
    loss, dX, dW = results(x, W)
    lse = torch.empty_like(loss)
    for i in torch.arange(len(x)).split(C):  # forward: the logits are thrown away
        z = mm(x[i], W.T)
        lse[i] = z.logsumexp(-1)
        loss[i] = lse[i] - z.gather(1, y[i, None])[:, 0]
    for i in torch.arange(len(x)).split(C):  # backward: a fourth matmul computes them again
        g = mm(x[i], W.T).sub_(lse[i, None]).exp_()
        g[torch.arange(len(g)), y[i]] -= 1
        dX[i] = mm(g, W)
        add_mm(dW, g.T, x[i])
    return loss, dX, dW


def gradient_in_forward(x, W, y, C):
    loss, dX, dW = results(x, W)
    for i in torch.arange(len(x)).split(C):
        z = mm(x[i], W.T)
        lse = z.logsumexp(-1)
        loss[i] = lse - z.gather(1, y[i, None])[:, 0]
        g = z.sub_(lse[:, None]).exp_()  # in the logits' place
        g[torch.arange(len(g)), y[i]] -= 1
        dX[i] = mm(g, W)
        add_mm(dW, g.T, x[i])
    return loss, dX, dW


def anchored(x, W, y, C):
    loss, dX, dW = results(x, W)
    for i in torch.arange(len(x)).split(C):
        a = (x[i].float() * W[y[i]]).sum(-1)
        E = mm(x[i], W.T).sub_(a[:, None]).exp_()
        E.scatter_(1, y[i, None], 0)
        R = E.sum(-1);  r = 1 / (1 + R);  c = -R * r  # noqa: E702
        loss[i] = R.log1p()
        dX[i] = r[:, None] * mm(E, W) + c[:, None] * W[y[i]]
        add_mm(dW, E.T, r[:, None] * x[i])
        dW.index_add_(0, y[i], c[:, None] * x[i])
    return loss, dX, dW


def in_epilogue(x, W, y, C):
    loss, dX, dW = results(x, W)
    for xc, yc, at, dx in zip(x.split(C), y.split(C), loss.split(C), dX.split(C)):
        a, R, E = (xc.float() * W[yc]).sum(-1), torch.zeros(len(xc)), torch.empty(len(xc), len(W), dtype=x.dtype)
        for w, e, j in zip(W.split(TILE), E.split(TILE, 1), torch.arange(len(W)).split(TILE)):
            exps = mm(xc, w.T).sub_(a[:, None]).exp_().masked_fill_(yc[:, None] == j, 0)
            R += exps.sum(-1)  # in fp32, before it is rounded
            e.copy_(exps)
        r = 1 / (1 + R);  c = -R * r  # noqa: E702
        at.copy_(R.log1p())
        dx.copy_(r[:, None] * mm(E, W) + c[:, None] * W[yc])
        add_mm(dW, E.T, r[:, None] * xc)
        dW.index_add_(0, yc, c[:, None] * xc)
    return loss, dX, dW


def linear_cross_entropy(x, W, y, C):
    from lce.functional import Args, context
    loss, dX, dW = results(x, W)
    dX = dX.to(x.dtype)
    sizes = dict(tokens=len(x), hidden_size=x.shape[1], vocab_size=len(W), chunk=C, scale=1, targets_int64=True)
    tensors = dict(x=x, weight=W, targets=y, loss=loss, dx=dX, dweight=dW)
    context(x.device, x.dtype, "")("lce_linear_cross_entropy", Args, **sizes, **tensors)
    return loss, dX, dW


RUNGS = {1: materialized, 2: recomputed, 3: gradient_in_forward, 4: anchored, 5: in_epilogue, 7: linear_cross_entropy}


# --- measurements -------------------------------------------------------------------------------------------

def exact(x, W, y, C):
    """Returns loss, dX and dW by autograd, in float64."""
    x, W, loss = x.double().requires_grad_(), W.double().requires_grad_(), []
    for xc, yc in zip(x.split(C), y.split(C)):
        loss.append(torch.nn.functional.cross_entropy(xc @ W.T, yc, reduction="none"))
        loss[-1].sum().backward()
    return torch.cat(loss).detach(), x.grad, W.grad


def seconds(rung, *problem):
    """Times a call: on one thread by the process's own clock, which other programs disturb less."""
    clock = time.process_time if torch.get_num_threads() == 1 and not problem[0].is_cuda else time.perf_counter
    began = clock()
    rung(*problem)
    if problem[0].is_cuda:
        torch.cuda.synchronize()
    return clock() - began


def peak_bytes(rung, *problem):
    """Returns what PyTorch had allocated at the most while the rung ran."""
    if problem[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        rung(*problem)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        rung(*problem)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return max(itertools.accumulate(event.self_cpu_memory_usage for event in events))


def off(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def measured(rung, problem, wanted, repeat):
    """Returns a row of the table."""
    loss, dX, dW = rung(*problem)
    targets_part = torch.expm1(-wanted[0][0]) * problem[1][problem[2][0]].double()  # c W[y], where c = p[y] - 1
    certain = ((dX[0].double() - wanted[1][0]).norm() / targets_part.norm()).item()
    errors = [off(loss, wanted[0]), off(dX, wanted[1]), off(dW, wanted[2]), certain]
    # Rung 1 allocates its results after its peak, the others before.
    held = peak_bytes(rung, *problem) - (0 if rung is materialized else loss.nbytes + dX.nbytes + dW.nbytes)
    if rung is linear_cross_entropy:
        from lce.functional import context
        held += context(problem[0].device, problem[0].dtype, "").held_bytes()
    del loss, dX, dW
    pairs = [(seconds(matmuls, *problem), seconds(rung, *problem)) for _ in range(repeat + 1)][1:]  # the first warms up
    time_, ratio = statistics.median(t for _, t in pairs), statistics.median(t / gemms for gemms, t in pairs)
    return f"{1e3 * time_:7.1f} ms{ratio:9.2f}{held / 2**20:9.1f} MiB   " + " ".join(f"{error:9.1e}" for error in errors)


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    sizes = (8192, 4096, 128256, 1024) if cuda else (1024, 256, 32768, 128)
    for name, value in zip(("tokens", "hidden-size", "vocab", "chunk", "repeat"), (*sizes, 9)):
        parser.add_argument("--" + name, type=int, default=value, help=f"default {value}")
    o = parser.parse_args()
    torch.set_default_device(o.device)
    torch.manual_seed(1)
    dtype = torch.bfloat16 if o.device == "cuda" else torch.float32
    x, W, y = torch.randn(o.tokens, o.hidden_size), 0.02 * torch.randn(o.vocab, o.hidden_size), torch.randint(o.vocab, (o.tokens,))
    x[0] = 30 * W[y[0]] / W[y[0]].square().sum()
    problem = x.to(dtype), W.to(dtype), y, o.chunk
    del x, W
    wanted = exact(*problem)
    what = torch.cuda.get_device_name() if o.device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    print(f"N {o.tokens:,}, H {o.hidden_size:,}, V {o.vocab:,}, chunks of {o.chunk:,}; {what}, PyTorch {torch.__version__}")
    print(f"{'':24}{'time':>10}{'/ GEMMs':>9}{'holds':>13}   errors: loss{'dX':>9}{'dW':>10}{'certain':>10}")
    for number, rung in RUNGS.items():
        try:
            row = measured(rung, problem, wanted, o.repeat)
        except (ImportError, OSError) as error:
            row = f"is left out: {error}"
        print(f"{number} {rung.__name__:22}{row}", flush=True)


if __name__ == "__main__":
    main()
