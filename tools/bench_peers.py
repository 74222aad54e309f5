#!/usr/bin/env python3
"""Times lce.c's linear_cross_entropy against other implementations, at the same shapes, in one run.

  make liblce.so && tools/bench_peers.py                  # on a GPU; needs PyTorch, and the peers' packages for their rows
  tools/bench_peers.py --z-loss                           # the loss with z-loss, beside chains of separate operations
  tools/bench_peers.py --log-probs                        # log-probabilities of a policy gradient, alone and with entropies
  tools/bench_peers.py --step                             # a training step of transformers' Llama; with --z-loss, too
  tools/bench_peers.py --device cpu --shapes 64x32x1000   # where there is no GPU

Every peer computes the mean loss and the gradients of x and W, alternating with the three plain GEMMs (logits, dX and dW
through torch.mm); "over the GEMMs" is the ratio to them. On a GPU three calls are queued and timed together. Before that both
run untimed until the GPU reaches its steady clock. "holds" is the peak memory beyond inputs and gradients: PyTorch's own
count, for lce.c with what its library reports. With z-loss and log-probabilities the forward pass is timed by itself, too;
where it computes the gradients it is timed without them, and they count as the backward pass.
Errors are relative, against float64 at the same shape: of the mean loss as the peer returns it, and of the gradients in
the Frobenius norm, in the dtypes of x and W. A peer that is not installed, or fails, is a row with the reason. Packages:
liger-kernel[cutedsl], quack-kernels, cut-cross-entropy; PyTorch >= 2.13 has a linear_cross_entropy of its own. lce.c is
measured as PyTorch's users have it, through tools/torch, and through kernels/liblce.h. QuACK's chunk is 4096, or 2048 where
H is 4096: it refuses a chunk equal to H. Liger's kernel for Hopper takes bf16, N a multiple of 128 and V of 256.

z-loss: mean(lse - z[y] + lambda lse^2) on fp32 logits. Log-probabilities: mean(-a log p[y] - beta entropy(p)), a from -1 to 1.
In a step only LM head + loss are exchanged; the layers are compiled, the optimizer is a fused AdamW, all in bf16.
"""
import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
import typing

try:
    import torch.cuda
    import torch.nn.functional as F
except ImportError:  # without PyTorch, tools/torch/ is what is found
    sys.exit("tools/bench_peers.py measures through PyTorch, which is not there: pip install torch")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools", "torch"))
os.environ.setdefault("LCE_LIBRARY", os.path.join(ROOT, "liblce.so"))
import lce  # noqa: E402
from lce.functional import context  # noqa: E402

SHAPES = "4096x4096x128256,16384x2048x131072,8192x2304x256000,32768x4096x128256"
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy")
LAMBDA, BETA = 1e-4, 1e-2


# --- implementations --------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Peer:
    """make() returns loss(x, w, y), or for a `direct` peer what returns the loss, dX and dW."""
    name: str
    make: typing.Callable
    package: str = ""  # of pip; such a peer runs on GPUs only
    direct: bool = False
    gradients_in_forward: bool = False

    def loss(self, device):
        if self.package and device == "cpu":
            raise RuntimeError("measured on GPUs only")
        try:
            return self.make()
        except ImportError as error:
            raise RuntimeError(f"needs pip install {self.package}: {error}") from None


def native():
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise RuntimeError(f"PyTorch {torch.__version__} has none; 2.13 and later do")
    # Without options it is the plain composition; with them it goes in chunks, dW in fp32 (acc_policy "auto").
    return lambda x, w, y: F.linear_cross_entropy(x, w, y, options=torch.nn.LinearCrossEntropyOptions())


def liger():
    from liger_kernel.backends import set_impl
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    set_impl("nvidia-triton")  # by default it takes CuTe's cross-entropy where it can, which is no faster
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return lambda x, w, y: loss(w, x, y)


def liger_hopper():
    """Nothing in Liger takes it by itself."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90
    return lambda x, w, y: sm90.LigerFusedLinearCrossEntropySM90Function.apply(x, w, y)


def cut(filter_eps):
    from cut_cross_entropy import linear_cross_entropy
    return lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=filter_eps)


def quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    return lambda x, w, y: chunked_linear_cross_entropy(x, w, y, chunk_size=2048 if x.shape[1] == 4096 else 4096)


def c_interface(chunk):
    """The call that `ours` makes in its forward pass: it writes dW in fp32."""
    def run(x, w, y):
        x, w, (n, h) = x.detach(), w.detach(), x.shape
        loss, dx, dw = x.new_empty(n, dtype=torch.float32), torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)
        context(x.device, x.dtype, "")(tokens=n, hidden_size=h, vocab_size=len(w), chunk=min(chunk, n), mean=True, scale=1,
                                       targets_int64=True, x=x, weight=w, targets=y, loss=loss, dx=dx, dweight=dw)
        return loss.mean(), dx, dw
    return run


def ours(chunk, **options):
    return Peer(f"lce.c, chunk {chunk}", gradients_in_forward=True, make=lambda:
                lambda x, w, y: lce.linear_cross_entropy(x, w, y, chunk=min(chunk, len(x)), **options))


def compiled(name, loss):
    """Every shape gets kernels of its own: by default the second would get slower ones for any shape."""
    return Peer(name, lambda: torch.compile(loss, dynamic=False), "torch")


def cross_entropy(x, w, y):
    return F.cross_entropy(x @ w.T, y)


def cross_entropy_fp32(x, w, y):
    """As most trainers do: the logits are rounded, the loss is not."""
    return F.cross_entropy((x @ w.T).float(), y)


def z_loss_twice(x, w, y):
    """As trainers write it: the loss, and the logsumexp once more."""
    logits = (x @ w.T).float()
    return F.cross_entropy(logits, y) + LAMBDA * torch.logsumexp(logits, dim=1).square().mean()


def token_z_losses(z, y, _=None):
    lse = torch.logsumexp(z, dim=1)
    return lse - z.gather(1, y[:, None])[:, 0] + LAMBDA * lse * lse


def z_loss_once(x, w, y):
    """The shortest chain: one logsumexp serves both terms."""
    return token_z_losses((x @ w.T).float(), y).mean()


def advantages_of(y):
    return torch.linspace(-1, 1, len(y), device=y.device)


class Loss(typing.NamedTuple):
    name: str
    tokens: typing.Callable  # (z, y, advantages) -> what the loss is the mean of
    peers: list
    forward: bool = True  # is timed by itself, too


CROSS_ENTROPY = Loss("cross-entropy", lambda z, y, _: F.cross_entropy(z, y, reduction="none"), forward=False, peers=[
    Peer("PyTorch eager", lambda: cross_entropy),
    Peer("PyTorch eager, fp32 logits", lambda: cross_entropy_fp32),
    compiled("torch.compile", cross_entropy),
    Peer("torch linear_cross_entropy", native),
    Peer("Liger (Triton, fp32 dW)", liger, "liger-kernel"),
    Peer("Liger (CuTe, Hopper)", liger_hopper, "'liger-kernel[cutedsl]'"),
    Peer("QuACK (CuTe)", quack, "quack-kernels"),
    Peer("Cut Cross-Entropy (filtered)", lambda: cut("high"), "cut-cross-entropy"),
    Peer("Cut Cross-Entropy (exact)", lambda: cut(None), "cut-cross-entropy"),
    Peer("lce.c, C interface, chunk 4096", lambda: c_interface(4096), direct=True),
    *map(ours, (4096, 2048, 1024))])

Z_LOSS = Loss("z-loss", token_z_losses, [
    Peer("separate operations", lambda: z_loss_twice),
    Peer("separate operations, one logsumexp", lambda: z_loss_once),
    compiled("separate operations, torch.compile", z_loss_twice),
    ours(4096, z_loss=LAMBDA)])


def log_probs(name, entropy):
    def loss_of(log_p, entropies, advantages):
        return -advantages * log_p - (0 if entropies is None else BETA * entropies)

    def tokens(z, y, advantages):
        log_p = torch.log_softmax(z, dim=1)
        return loss_of(log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1) if entropy else None, advantages)

    def chain(x, w, y):
        return tokens((x @ w.T).float(), y, advantages_of(y)).mean()

    def hopper():
        from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

        def run(x, w, y):
            found = sm90.LigerFusedScaledCrossEntropySM90Function.apply(x, w, y, 1.0, -100, 1, entropy)
            losses, entropies = found if entropy else (found, None)
            return loss_of(-losses, entropies, advantages_of(y)).mean()
        return run

    def of_lce():
        def run(x, w, y):
            found = lce.linear_log_probs(x, w, y, chunk=min(4096, len(x)), entropy=entropy)
            return loss_of(*found, advantages_of(y)).mean()
        return run
    return Loss(name, tokens, [
        Peer("separate operations", lambda: chain), compiled("separate operations, torch.compile", chain),
        Peer("Liger (CuTe, Hopper)", hopper, "'liger-kernel[cutedsl]'"),
        Peer("lce.c, chunk 4096", of_lce)])


LOG_PROBS = [log_probs("log-probabilities", False), log_probs("log-probabilities and entropies", True)]


# --- measuring --------------------------------------------------------------------------------------------------

class Device:
    def __init__(self, name):
        self.name, self.cuda = name, name == "cuda"
        self.calls = 3 if self.cuda else 1  # as in training, the GPU does not wait for the host between them

    def seconds(self, work, calls=1):
        """Of a call, among so many that are queued one after the other."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - start) / calls

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def reset_peak(self):
        self.wait()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        """Bytes of PyTorch's tensors since reset_peak; None on the CPU, where it does not count."""
        self.wait()
        return torch.cuda.max_memory_allocated() if self.cuda else None

    def peak_with(self, peer, x, peak):
        """lce.c's memory is not PyTorch's."""
        return (peak or 0) + context(x.device, x.dtype, "").held_bytes() if peer.name.startswith("lce.c") else peak

    def compare(self, makers, base, rounds):
        """A row for every (name, maker), and the base's median seconds. maker() returns what the row holds and a function
        that returns seconds; where it fails, the row has the reason. Then each alternates with the base, such a function
        or the name of the row that has it; before that both run untimed, since a GPU reaches its steady clock late."""
        rows, timers, bases = [], {}, []
        for name, maker in makers:
            rows.append(dict(peer=name))
            try:
                found, timers[name] = maker()
                rows[-1].update(found)
            except Exception as error:  # whatever it is
                text = str(error).strip() or type(error).__name__
                rows[-1]["why"] = text.splitlines()[0][:120].replace("|", "/")
            self.reset_peak()
        base = timers.get(base, base)
        for row in rows:
            if not callable(base):
                row.setdefault("why", f"{base}, which it is compared with, failed")
            if "why" in row:
                continue
            work, times, ratios = timers[row["peer"]], [], []
            warm = time.perf_counter() + (0.7 if self.cuda else 0)
            while time.perf_counter() < warm:
                base(), work()
            for _ in range(rounds):
                bases.append(base())
                times.append(bases[-1] if work is base else work())
                ratios.append(times[-1] / bases[-1])
            row.update(ms=1e3 * statistics.median(times), ratio=statistics.median(ratios))
        return rows, statistics.median(bases) if bases else None


def problem(device, shape):
    """x [N, H] and w [V, H] (leaves that require gradients), y [N]."""
    n, h, v = shape
    g = torch.Generator(device=device).manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(v, h, generator=g, device=device)).to(dtype).requires_grad_()
    return x, w, torch.randint(v, (n,), generator=g, device=device)


def by_autograd(loss_of):
    """A function of (x, w, y) that returns the loss and its gradients."""
    def run(x, w, y):
        x.grad = w.grad = None  # a peer that failed may have left some
        loss = loss_of(x, w, y)
        loss.backward()
        result = loss.detach(), x.grad, w.grad
        x.grad = w.grad = None
        return result
    return run


def plain_gemms(x, w):
    x, w = x.detach(), w.detach()
    logits = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run():
        torch.mm(x, w.T, out=logits)
        torch.mm(logits, w, out=dx)
        torch.mm(logits.T, x, out=dw)
    return run


# --- float64 ----------------------------------------------------------------------------------------------------

ERRORS = ("loss_error", "dx_error", "dw_error")


def blocks(rows, bytes_each):
    step = max(1, 2**30 // bytes_each)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def reference(x, w, y, token_losses):
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
    off = size = 0.0
    for rows in blocks(len(want), 8 * want.shape[1]):
        off += (got[rows].double() - want[rows]).square().sum().item()
        size += want[rows].square().sum().item()
    return math.sqrt(off / size)


def errors_of(got, want):
    """Of a peer's (loss, dX, dW), against the reference's; nothing where there is none."""
    return dict(zip(ERRORS, (abs((got[0].item() - want[0]) / want[0]), relative_error(got[1], want[1]),
                             relative_error(got[2], want[2])))) if want else {}


# --- tables -----------------------------------------------------------------------------------------------------

def loss_rows(device, loss, shape, options):
    """A row for each peer, and the plain GEMMs' seconds."""
    tensors = x, w, y = problem(device.name, shape)
    want, gemms = None if options.no_errors else reference(x, w, y, loss.tokens), None

    def first(peer):
        loss_of = peer.loss(device.name)
        run = loss_of if peer.direct else by_autograd(loss_of)
        for _ in range(2):
            run(*tensors)
        device.reset_peak()
        before = device.peak()
        got = run(*tensors)
        peak = device.peak()
        if peak is not None:
            peak -= before + sum(g.numel() * g.element_size() for g in got[1:])
        row = dict(held_bytes=device.peak_with(peer, x, peak), **errors_of(got, want))
        if loss.forward:
            with torch.set_grad_enabled(not peer.gradients_in_forward):
                row["forward_ms"] = 1e3 * statistics.median(device.seconds(lambda: loss_of(*tensors)) for _ in range(options.rounds))
        return row, lambda: device.seconds(lambda: run(*tensors), device.calls)

    def makers():
        nonlocal want, gemms
        for peer in loss.peers:
            if not peer.name.startswith(tuple(options.without)):
                yield peer.name, lambda: first(peer)
        want, gemms = None, plain_gemms(x, w)  # freed, and there, before the timing
    return device.compare(makers(), lambda: device.seconds(gemms, device.calls), options.rounds)


# transformers' names. By default they are those of Llama 3.2 1B on a GPU.
LLAMA = {"cuda": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                      num_key_value_heads=8, head_dim=64, max_position_embeddings=4096),
         "cpu": dict(vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=16)}


def step_rows(device, loss, options):
    """The step's rows, against the last peer's, and what was trained."""
    from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(1)
    config = LlamaConfig(**LLAMA[device.name], use_cache=False)
    with torch.device(device.name):
        model = LlamaModel(config).to(torch.bfloat16 if device.cuda else torch.float32)
        head, batch, length = model.embed_tokens.weight, 4 if device.cuda else 2, config.max_position_embeddings
        ids = torch.randint(config.vocab_size, (batch, length + 1))
    if device.cuda:
        for layer in model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, fused=device.cuda)  # the same weights for all losses

    def step(loss_of):
        optimizer.zero_grad(set_to_none=True)
        x = model(input_ids=ids[:, :-1]).last_hidden_state
        value = loss_of(x.reshape(-1, config.hidden_size), head, ids[:, 1:].reshape(-1))
        value.backward()
        optimizer.step()
        return value

    def first(peer):
        loss_of = peer.loss(device.name)
        value = step(loss_of).item()
        step(loss_of)
        device.reset_peak()
        step(loss_of)
        return (dict(first_loss=value, held_bytes=device.peak_with(peer, head, device.peak())),
                lambda: device.seconds(lambda: step(loss_of)))

    peers = [peer for peer in loss.peers if not peer.direct and not peer.name.startswith(tuple(options.without))]
    rows, _ = device.compare([(peer.name, lambda peer=peer: first(peer)) for peer in peers], peers[-1].name, options.rounds)
    return rows, f"a step of Llama ({model.num_parameters() / 1e9:.2f}B) by transformers, batch {batch} x {length}"


# A row's field, its column's title, and how it is shown.
COLUMNS = [("ms", "ms", lambda v: f"{v:.2f}"), ("ratio", "", lambda v: f"{v:.3f}"),
           ("forward_ms", "forward, ms", lambda v: f"{v:.2f}"), ("first_loss", "first loss", lambda v: f"{v:.5f}"),
           ("held_bytes", "holds", lambda v: f"{v / 2**20:.0f} MiB"),
           *((error, error.replace("_", " "), lambda v: f"{v:.1e}") for error in ERRORS)]


def show(options, title, ratio, rows, **fields):
    """A Markdown table, or with --json an object for each row; a row with "why" was not measured."""
    if options.json:
        for row in rows:
            print(json.dumps(dict(event="peer", title=title, **fields, **row)), flush=True)
        return
    columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    print(f"\n{title}\n\n| peer | " + " | ".join(text or ratio for _, text, _ in columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for row in rows:
        cells = [text(row[field]) if row.get(field) is not None else "" for field, _, text in columns]
        print(f"| {row['peer']} | " + (f"not measured: {row['why']}" if "why" in row else " | ".join(cells)) + " |", flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", default=SHAPES, help="NxHxV, separated by commas (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="the median of so many (default 7)")
    parser.add_argument("--without", action="append", default=[], metavar="NAME",
                        help="leave out the peers whose names start so; may be given again")
    parser.add_argument("--no-errors", action="store_true", help="leave out the comparison with float64")
    parser.add_argument("--z-loss", action="store_true", help="the loss with z-loss, against chains of separate operations")
    parser.add_argument("--log-probs", action="store_true", help="log-probabilities, alone and with entropies, likewise")
    parser.add_argument("--step", action="store_true", help="a training step instead of the loss alone; needs transformers")
    parser.add_argument("--json", action="store_true", help="a JSON object a row instead of tables")
    options = parser.parse_args()
    try:
        options.shapes = [tuple(int(part) for part in text.split("x")) for text in options.shapes.split(",")]
        assert all(len(shape) == 3 and min(shape) > 0 for shape in options.shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give NxHxV, for instance 4096x4096x128256")
    if not os.path.exists(os.environ["LCE_LIBRARY"]):
        sys.exit(f"{os.environ['LCE_LIBRARY']}, which peers are compared with, does not exist: make liblce.so")
    return options


def versions():
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            pass


def main():
    options = parse_options()
    device = Device(options.device)
    gpu = torch.cuda.get_device_name() if device.cuda else "CPU"
    if not options.json:
        print(f"{gpu}, median of {options.rounds}; " + ", ".join(versions()))
    for loss in [Z_LOSS] * options.z_loss + LOG_PROBS * options.log_probs or [CROSS_ENTROPY]:
        if options.step:
            rows, title = step_rows(device, loss, options)
            show(options, f"{loss.name}: {title}", "over lce.c", rows, loss=loss.name, gpu=gpu, step=True)
            continue
        for shape in options.shapes:
            rows, gemms = loss_rows(device, loss, shape, options)
            took = f": the plain GEMMs take {1e3 * gemms:.2f} ms" if gemms else ""
            show(options, "{}, N {}, H {}, V {}{}".format(loss.name, *shape, took), "over the GEMMs", rows, loss=loss.name,
                 gpu=gpu, **dict(zip(("tokens", "hidden_size", "vocab_size"), shape)))


if __name__ == "__main__":
    main()
