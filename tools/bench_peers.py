#!/usr/bin/env python3
"""Times lce.c's linear_cross_entropy against other implementations, at the same shapes, in one run.

  make liblce.so && tools/bench_peers.py        # on a GPU; needs PyTorch, and a peer's package for its row
  tools/bench_peers.py --z-loss                 # the loss with z-loss, beside chains of separate operations
  tools/bench_peers.py --log-probs              # log-probabilities of a policy gradient, and of several ids per token
  tools/bench_peers.py --divergence             # KL and JSD of a student from a teacher, in chunks, beside TRL's
  tools/bench_peers.py --step                   # a training step of transformers' Llama; also with --z-loss
  tools/bench_peers.py --trainer                # ./train beside transformers, torch.compile and a fused AdamW
  tools/bench_peers.py --device cpu --shapes 64x32x1000   # without a GPU

Every peer computes the mean loss and the gradients of x and W. Each measurement alternates with the three
plain GEMMs (logits, dX and dW by torch.mm); "over the GEMMs" is the ratio of the two times. On a GPU three
calls are queued and timed together, as in training; both run untimed first, until the clock is steady.
"holds" is the peak memory beyond inputs and gradients: PyTorch's count, and for lce.c also what its library
reports. With z-loss and log-probabilities the forward pass is timed by itself as well, without gradients.
Errors are relative to float64: of the mean loss, and of the gradients in the Frobenius norm, in the dtypes
of x and W. A peer that is not installed or fails gets a row with the reason.
Packages: liger-kernel[cutedsl] (its kernel for Hopper takes bf16, N a multiple of 128 and V of 256),
quack-kernels (chunk 4096, or 2048 if H is 4096: it refuses a chunk equal to H), cut-cross-entropy. PyTorch
has one of its own from 2.13 on. lce.c is measured through the PyTorch package and through liblce.h.

z-loss: mean(lse - z[y] + lambda lse^2) on fp32 logits. Log-probabilities: mean(-a log p[y] - beta H(p)), a
from -1 to 1. Divergences: the mean KL or JSD (beta 1/2) of a student from a teacher of twice its hidden size, then
of the same; the GEMMs are both heads' logits, dX and dW, in chunks of 2,048. In a step only LM head + loss differ:
compiled layers and a fused AdamW, all in bf16.
"""
import argparse
import functools
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
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
from lce.library import Args  # noqa: E402

SHAPES = "4096x4096x128256,16384x2048x131072,8192x2304x256000,32768x4096x128256"
DIVERGENCE_SHAPES = "8192x2048x128256"
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy", "trl")
LAMBDA, BETA = 1e-4, 1e-2


# --- implementations ----------------------------------------------------------------------------------------

class Peer(typing.NamedTuple):
    """make() returns loss(x, w, y), or for a `direct` peer what returns the loss, dX and dW."""
    name: str
    make: typing.Callable
    package: str = ""  # of pip; such a peer runs on GPUs only
    direct: bool = False
    gradients_in_forward: bool = False


def eager(name, loss):
    return Peer(name, lambda: loss)


def compiled(name, loss):
    """Compiles kernels for each shape: by default the second would get slower ones for any shape."""
    return Peer(name, lambda: torch.compile(loss, dynamic=False), "torch")


def imported(name, package, module, function, call):
    """call(function, x, w, y), with a function of a package."""
    return Peer(name, lambda: functools.partial(call, getattr(importlib.import_module(module), function)), package)


def ours(chunk, what="", **options):
    return Peer(f"lce.c, chunk {chunk}{what}", gradients_in_forward=True, make=lambda:
                lambda x, w, y: lce.linear_cross_entropy(x, w, y, chunk=min(chunk, len(x)), **options))


def liger():
    from liger_kernel.backends import set_impl
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    set_impl("nvidia-triton")  # by default it takes CuTe's cross-entropy where it can, which is no faster
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return lambda x, w, y: loss(w, x, y)


def liger_hopper(operation, function, call):
    """Nothing in Liger takes it by itself."""
    return imported("Liger (CuTe, Hopper)", "'liger-kernel[cutedsl]'", f"liger_kernel.ops.cutedsl.ops.{operation}_sm90",
                    f"Liger{function}SM90Function", call)


def c_interface(x, w, y):
    """The call that `ours` makes in its forward pass: it writes dW in fp32."""
    x, w, (n, h) = x.detach(), w.detach(), x.shape
    loss, dx, dw = x.new_empty(n, dtype=torch.float32), torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)
    context(x.device, x.dtype, "")("lce_linear_cross_entropy", Args, tokens=n, hidden_size=h, vocab_size=len(w),
                                   chunk=min(4096, n), mean=True, scale=1, targets_int64=True, x=x, weight=w, targets=y,
                                   loss=loss, dx=dx, dweight=dw)
    return loss.mean(), dx, dw


def advantages_of(tokens):
    return torch.linspace(-1, 1, len(tokens), device=tokens.device)


def chain(token_losses):
    """A loss of separate operations on fp32 logits."""
    return lambda x, w, y: token_losses((x @ w.T).float(), y, advantages_of(x)).mean()


class Loss(typing.NamedTuple):
    name: str
    token_losses: typing.Callable  # (z, y, advantages) -> what the loss is the mean of; None: the peers' losses differ
    peers: list
    forward: bool = True  # is timed by itself, too
    teacher: bool = False  # y is a Teacher


def cross_entropy(x, w, y):
    return F.cross_entropy(x @ w.T, y)


CROSS_ENTROPY = Loss("cross-entropy", lambda z, y, _: F.cross_entropy(z, y, reduction="none"), forward=False, peers=[
    eager("PyTorch eager", cross_entropy),
    # As most trainers do: the logits are rounded, the loss is not.
    eager("PyTorch eager, fp32 logits", lambda x, w, y: F.cross_entropy((x @ w.T).float(), y)),
    compiled("torch.compile", cross_entropy),
    # Without options it is the plain composition; with them it uses chunks, dW in fp32 (acc_policy "auto").
    eager("torch linear_cross_entropy",
          lambda x, w, y: F.linear_cross_entropy(x, w, y, options=torch.nn.LinearCrossEntropyOptions())),
    Peer("Liger (Triton, fp32 dW)", liger, "liger-kernel"),
    liger_hopper("fused_linear_cross_entropy", "FusedLinearCrossEntropy", lambda f, x, w, y: f.apply(x, w, y)),
    imported("QuACK (CuTe)", "quack-kernels", "quack.linear_cross_entropy", "chunked_linear_cross_entropy",
             lambda f, x, w, y: f(x, w, y, chunk_size=2048 if x.shape[1] == 4096 else 4096)),
    *(imported(f"Cut Cross-Entropy ({kind})", "cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy",
               lambda f, x, w, y, eps=eps: f(x, w, y, filter_eps=eps)) for kind, eps in (("filtered", "high"), ("exact", None))),
    Peer("lce.c, C interface, chunk 4096", lambda: c_interface, direct=True),
    ours(4096, ", batch invariant", batch_invariant=True),
    *map(ours, (4096, 2048, 1024))])


def z_loss_twice(x, w, y):
    """Computes it as trainers write it: the loss, and the logsumexp once more."""
    logits = (x @ w.T).float()
    return F.cross_entropy(logits, y) + LAMBDA * torch.logsumexp(logits, dim=1).square().mean()


def token_z_losses(z, y, _):
    """The shortest chain: one logsumexp serves both terms."""
    lse = torch.logsumexp(z, dim=1)
    return lse - z.gather(1, y[:, None])[:, 0] + LAMBDA * lse * lse


Z_LOSS = Loss("z-loss", token_z_losses, [
    eager("separate operations", z_loss_twice),
    eager("separate operations, one logsumexp", chain(token_z_losses)),
    compiled("separate operations, torch.compile", z_loss_twice),
    ours(4096, z_loss=LAMBDA)])


def log_probs(name, entropy):
    def loss_of(log_p, entropies, advantages):
        return -advantages * log_p - (BETA * entropies if entropy else 0)

    def tokens(z, y, advantages):
        log_p = torch.log_softmax(z, dim=1)
        return loss_of(log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1) if entropy else None, advantages)

    def hopper(f, x, w, y):
        found = f.apply(x, w, y, 1.0, -100, 1, entropy)
        losses, entropies = found if entropy else (found, None)
        return loss_of(-losses, entropies, advantages_of(y)).mean()

    def trl(f, x, w, y):  # as its trainers call it, without lce.patch_trl
        log_p, entropies, *_ = f.apply(x, w, None, y, 1.0, 256, None, 1.0, ["log_probs", *["entropy"] * entropy])
        return loss_of(log_p, entropies, advantages_of(y)).mean()

    def ours(chunk):
        return eager(f"lce.c, chunk {chunk or 'N'}", lambda x, w, y: loss_of(
            *lce.linear_log_probs(x, w, y, chunk=min(chunk or len(x), len(x)), entropy=entropy), advantages_of(y)).mean())

    return Loss(name, tokens, [
        eager("separate operations", chain(tokens)), compiled("separate operations, torch.compile", chain(tokens)),
        liger_hopper("fused_scaled_cross_entropy", "FusedScaledCrossEntropy", hopper),
        imported("TRL (chunked)", "trl", "trl.trainer.utils", "_ChunkedLogProbFunction", trl), *map(ours, (0, 4096, 2048))])


def ours_of_ids(k):
    def loss_of(x, w, y):
        ids = (y[:, None] + 7919 * torch.arange(k, device=y.device)) % len(w)
        log_p, lse = lce.linear_log_probs(x, w, ids, chunk=min(2048, len(x)))
        return -(advantages_of(y)[:, None] * log_p).mean() + LAMBDA * lse.square().mean()
    return eager(f"lce.c, chunk 2048, K {k}", loss_of)


LOG_PROBS = [log_probs("log-probabilities", False), log_probs("log-probabilities and entropies", True),
             Loss("log-probabilities of K ids and lse", None, [*map(ours_of_ids, (1, 8, 128))])]


class Teacher(typing.NamedTuple):
    """Stands in the targets' place: hidden states [N, H'] and a head [V, H']."""
    x: torch.Tensor
    w: torch.Tensor

    def split(self, rows):
        return [Teacher(part, self.w) for part in self.x.split(rows)]

    def log_probs(self, dtype):
        """From logits in the dtype of the tensors, or in float64."""
        x, w = (t.double() if dtype == torch.float64 else t for t in self)
        return torch.log_softmax((x @ w.T).to(dtype), dim=1)


def divergence(kind, beta):
    def kl(a, b):
        return (a.exp() * (a - b)).sum(1)

    def tokens(z, teacher, _):
        p, q = torch.log_softmax(z, dim=1), teacher.log_probs(z.dtype)
        if kind != "jsd":
            return kl(q, p) if kind == "forward_kl" else kl(p, q)
        mixed = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
        return beta * kl(q, mixed) + (1 - beta) * kl(p, mixed)

    def ours(chunk):
        return eager(f"lce.c, chunk {chunk}", lambda x, w, teacher: lce.linear_divergence(
            x, w, *teacher, kind, beta=beta, chunk=min(chunk, len(x))))

    def trl(f, x, w, y):  # beta says which divergence it is
        return f.apply(x, w, None, *y, None, beta)[0].mean()

    return Loss(kind, tokens, forward=False, teacher=True, peers=[
        eager("separate operations", chain(tokens)), compiled("separate operations, torch.compile", chain(tokens)),
        imported("TRL (chunked)", "trl", "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", trl), *map(ours, (2048, 1024))])


DIVERGENCES = [divergence("forward_kl", 0.0), divergence("reverse_kl", 1.0), divergence("jsd", 0.5)]


# --- measuring ----------------------------------------------------------------------------------------------

def wait(cuda):
    if cuda:
        torch.cuda.synchronize()


def reset_peak(cuda):
    wait(cuda)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def library_bytes(peer, tensor):
    """Returns what lce.c's library holds; it keeps what the larger of a peer's calls took."""
    return context(tensor.device, tensor.dtype, "").held_bytes() if peer.name.startswith("lce.c") else 0


def peak(cuda, peer, tensor, without=0):
    """Peak bytes since reset_peak: PyTorch's tensors, not counted on the CPU, and lce.c's library."""
    wait(cuda)
    return (torch.cuda.max_memory_allocated() - without if cuda else 0) + library_bytes(peer, tensor) or None


def seconds(cuda, work, calls=1):
    """Returns a call's seconds, among so many that are queued one after the other."""
    wait(cuda)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait(cuda)
    return (time.perf_counter() - start) / calls


def reason_of(error, package=""):
    text = f"needs pip install {package}: {error}" if package and isinstance(error, ImportError) else str(error).strip()
    return (text or type(error).__name__).splitlines()[0][:120].replace("|", "/")


def measure(options, peers, first, make_base=None, calls=1):
    """A row for every peer, and the base's median seconds. first(peer, its function) returns what the row
    holds and the work that is timed; where it fails, the row has the reason. Then each alternates with the
    base (make_base()'s or the last peer's work), after both ran untimed until the GPU's clock is steady."""
    rows, works, bases, cuda = [], {}, [], options.cuda
    peers = [peer for peer in peers if not peer.name.startswith(tuple(options.without))]
    for peer in peers:
        rows.append(dict(peer=peer.name))
        try:
            if peer.package and not cuda:
                raise RuntimeError("measured on GPUs only")
            found, works[peer.name] = first(peer, peer.make())
            rows[-1].update(found)
        except Exception as error:  # whatever it is
            rows[-1]["why"] = reason_of(error, peer.package)
        reset_peak(cuda)
    base = make_base() if make_base else works.get(peers[-1].name)
    for row in rows:
        if not base:
            row.setdefault("why", f"{peers[-1].name}, which it is compared with, failed")
        if "why" in row:
            continue
        work, times, ratios = works[row["peer"]], [], []
        warm = time.perf_counter() + (0.7 if cuda else 0)
        while time.perf_counter() < warm:
            seconds(cuda, base, calls), seconds(cuda, work, calls)
        for _ in range(options.rounds):
            bases.append(seconds(cuda, base, calls))
            times.append(bases[-1] if work is base else seconds(cuda, work, calls))
            ratios.append(times[-1] / bases[-1])
        row.update(ms=1e3 * statistics.median(times), ratio=statistics.median(ratios))
    return rows, statistics.median(bases) if bases else None


# --- the loss -----------------------------------------------------------------------------------------------

def problem(device, shape, teacher_h=0):
    """x [N, H] and w [V, H] (leaves that require gradients), and y [N] or a Teacher."""
    n, h, v = shape
    g = torch.Generator(device=device).manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape, size=1):
        return (size * torch.randn(shape, generator=g, device=device)).to(dtype)

    x, w = normal(n, h).requires_grad_(), normal(v, h, size=0.02).requires_grad_()
    if teacher_h:  # its logits are as far apart as the student's
        return x, w, Teacher(normal(n, teacher_h), normal(v, teacher_h, size=0.02 * (h / teacher_h) ** 0.5))
    return x, w, torch.randint(v, (n,), generator=g, device=device)


def gradients(loss_of, x, w, y):
    """The loss and its gradients."""
    x.grad = w.grad = None  # a peer that failed may have left some
    loss = loss_of(x, w, y)
    loss.backward()
    result = loss.detach(), x.grad, w.grad
    x.grad = w.grad = None
    return result


def plain_gemms(x, w, y):
    """The logits, dX and dW at once; beside a Teacher both heads' logits, dX and dW in chunks."""
    x, w, chunk = x.detach(), w.detach(), min(2048, len(x)) if isinstance(y, Teacher) else len(x)
    logits = torch.empty(chunk, len(w), dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run():
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            z = logits[:len(x[rows])]
            if isinstance(y, Teacher):
                torch.mm(y.x[rows], y.w.T, out=z)
            torch.mm(x[rows], w.T, out=z)
            torch.mm(z, w, out=dx[rows])
            torch.addmm(dw, z.T, x[rows], beta=min(start, 1), out=dw)
    return run


def reference(x, w, y, token_losses):
    """The mean of token_losses(z, y, advantages), dX and dW in float64, in blocks of 1 GiB of logits z."""
    w64, loss, dxs, rows = w.detach().double().requires_grad_(), 0, [], max(1, 2**30 // (8 * len(w)))
    for x_part, y_part, advantages in zip(x.detach().split(rows), y.split(rows), advantages_of(x).split(rows)):
        x64 = x_part.double().requires_grad_()
        part = token_losses(x64 @ w64.T, y_part, advantages).sum() / len(x)
        part.backward()
        loss += part.detach()
        dxs.append(x64.grad)
    return loss, torch.cat(dxs), w64.grad


def relative_error(got, want):
    parts = zip(got.split(4096), want.split(4096)) if got.dim() else [(got, want)]  # in float64 dW is large
    return (sum((g.double() - w).square().sum() for g, w in parts).sqrt() / want.norm()).item()


def loss_rows(options, loss, shape, teacher_h):
    """A row for each peer, and the plain GEMMs' seconds."""
    tensors = x, w, y = problem(options.device, shape, teacher_h)
    want = [] if options.no_errors or not loss.token_losses else [*reference(*tensors, loss.token_losses)]

    def first(peer, loss_of):
        def work():
            return loss_of(*tensors) if peer.direct else gradients(loss_of, *tensors)

        for _ in range(2):
            work()
        reset_peak(options.cuda)
        before = torch.cuda.max_memory_allocated()
        got = work()
        row = dict(held_bytes=peak(options.cuda, peer, x, before + sum(g.nbytes for g in got[1:])))
        row.update((f"{name}_error", relative_error(*pair)) for name, *pair in zip(("loss", "dx", "dw"), got, want))
        if loss.forward:
            before = library_bytes(peer, x)
            with torch.set_grad_enabled(not peer.gradients_in_forward):
                times = [seconds(options.cuda, lambda: loss_of(*tensors)) for _ in range(options.rounds)]
            row["forward_ms"] = 1e3 * statistics.median(times)
            if library_bytes(peer, x) > before:
                row["held_bytes"] += library_bytes(peer, x) - before
        return row, work

    def make_base():
        want.clear()  # before the timing, for which the GEMMs' tensors are there
        return plain_gemms(*tensors)
    return measure(options, loss.peers, first, make_base, 3 if options.cuda else 1)


# --- a step -------------------------------------------------------------------------------------------------

# transformers' names; on a GPU it is Llama 3.2 1B.
LLAMA = {"cuda": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                      num_key_value_heads=8, head_dim=64, max_position_embeddings=4096),
         "cpu": dict(vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=16)}


def step_rows(options, loss):
    """The step's rows, against the last peer's, and what was trained."""
    from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(1)
    cuda, config = options.cuda, LlamaConfig(**LLAMA[options.device], use_cache=False)
    with torch.device(options.device):
        model = LlamaModel(config).to(torch.bfloat16 if cuda else torch.float32)
        head, batch, length = model.embed_tokens.weight, 4 if cuda else 2, config.max_position_embeddings
        ids = torch.randint(config.vocab_size, (batch, length + 1))
    if cuda:
        for layer in model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, fused=cuda)  # the same weights for all losses

    def first(peer, loss_of):
        def step():
            optimizer.zero_grad(set_to_none=True)
            x = model(input_ids=ids[:, :-1]).last_hidden_state
            value = loss_of(x.reshape(-1, config.hidden_size), head, ids[:, 1:].reshape(-1))
            value.backward()
            optimizer.step()
            return value

        value = step().item()
        step()
        reset_peak(cuda)
        step()
        return dict(first_loss=value, held_bytes=peak(cuda, peer, head)), step

    rows, _ = measure(options, [peer for peer in loss.peers if not peer.direct], first)
    return rows, f"a step of Llama ({model.num_parameters() / 1e9:.2f}B) by transformers, batch {batch} x {length}"


# --- the trainer --------------------------------------------------------------------------------------------

STEPS, WARM = 14, 4  # of a measurement, and how many of them do not count
MODELS = {"cuda": "llama-1b:4x4096,gpt2-124m:64x1024", "cpu": "gpt2-124m:4x64"}


def train(options, model, steps, *more):
    words = [os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train")), "--device", options.device, "--model", model, "--steps", str(steps),
             "--sample-every", "0", "--eval-batches", "1", *more]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def trained_by_lce(options, model, batch, length, more, folder):
    """Each step's seconds that counts, and the device's peak."""
    log = os.path.join(folder, "log.jsonl")
    train(options, model, STEPS, "--batch", str(batch), "--seq-len", str(length), "--log", log, *more)
    with open(log) as lines:
        events = [json.loads(line) for line in lines]
    steps = [event["tokens"] / event["tokens_per_second"] for event in events if event["event"] == "step"]
    return steps[WARM:], events[-1]["device_peak_bytes"]


def trained_by_transformers(options, model, batch, length, dtype):
    """The same for a training loop as users write it; fp32 weights compute in bf16 by autocast."""
    import transformers
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(options.device).train()
    compiled = torch.compile(net) if options.cuda else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=options.cuda)
    times = []
    reset_peak(options.cuda)
    for _ in range(STEPS):
        ids = torch.randint(net.config.vocab_size, (batch, length), device=options.device)
        begin = time.perf_counter()
        with torch.autocast(options.device, torch.bfloat16, enabled=options.cuda and dtype == torch.float32):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - begin)
    return times[WARM:], torch.cuda.max_memory_allocated() if options.cuda else None


def trainer_rows(options, model, batch, length):
    """Before each of the others' rows lce.c's is measured again, in a process of its own."""
    ours, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        train(options, model, 0, "--batch", "1", "--seq-len", str(length), "--val-fraction", "0", "--save", folder)
        for name, dtype, more in (("transformers, fp32 weights" + ", autocast" * options.cuda, torch.float32, ()),
                                  *[("transformers, bf16 weights", torch.bfloat16, ()), ("lce.c --fp8", None, ("--fp8",))] * options.cuda):
            times, peak_bytes = trained_by_lce(options, model, batch, length, (), folder)
            ours += times
            rows[:1] = [dict(peer="lce.c", times=ours, held_bytes=peak_bytes)]
            try:
                times, peak_bytes = (trained_by_transformers(options, folder, batch, length, dtype) if dtype else
                                     trained_by_lce(options, model, batch, length, more, folder))
                rows.append(dict(peer=name, times=times, held_bytes=peak_bytes))
            except Exception as error:  # as of a version that cannot compile it
                rows.append(dict(peer=name, why=reason_of(error)))
            if options.cuda:
                torch._dynamo.reset()
                torch.cuda.empty_cache()
    for row in rows:
        if "why" in row:
            continue
        took = statistics.median(row.pop("times"))
        row.update(ms=1e3 * took, tokens_per_second=batch * length / took, ratio=took / statistics.median(ours))
    return rows


# --- tables -------------------------------------------------------------------------------------------------

# A row's field, its column's title, and how it is shown.
COLUMNS = [("tokens_per_second", "tokens/s", lambda v: f"{v:,.0f}"), ("ms", "ms", lambda v: f"{v:.2f}"), ("ratio", "", lambda v: f"{v:.3f}"),
           ("forward_ms", "forward, ms", lambda v: f"{v:.2f}"), ("first_loss", "first loss", lambda v: f"{v:.5f}"),
           ("held_bytes", "holds", lambda v: f"{v / 2**20:.0f} MiB"),
           *((error, error.replace("_", " "), lambda v: f"{v:.1e}") for error in ("loss_error", "dx_error", "dw_error"))]


def show(options, title, ratio, rows, **fields):
    """A Markdown table, or with --json an object for each row; a row with "why" was not measured."""
    if options.json:
        return print(*(json.dumps(dict(event="peer", title=title, **fields, **row)) for row in rows), sep="\n", flush=True)
    columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    titles = " | ".join(text or ratio for _, text, _ in columns)
    print(f"\n{title}\n\n| peer | {titles} |\n|" + " --- |" * (len(columns) + 1))
    for row in rows:
        cells = [text(row[field]) if row.get(field) is not None else "" for field, _, text in columns]
        print(f"| {row['peer']} | " + (f"not measured: {row['why']}" if "why" in row else " | ".join(cells)) + " |", flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--shapes", help=f"NxHxV, separated by commas (default {SHAPES}, of --divergence {DIVERGENCE_SHAPES})")
    add("--models", help="of --trainer: MODEL:BxT, separated by commas (default {cuda} on a GPU, else {cpu})".format(**MODELS))
    add("--rounds", type=int, default=7, help="the median of so many (default 7)")
    add("--without", action="append", default=[], metavar="NAME", help="leave out peers whose names start so; may be repeated")
    for name, text in [("no-errors", "leave out the comparison with float64"),
                       ("z-loss", "the loss with z-loss, against chains of separate operations"),
                       ("log-probs", "log-probabilities, alone and with entropies, likewise, and of 1, 8 and 128 ids per token"),
                       ("divergence", "KL and JSD of a student's head from a teacher's, likewise"),
                       ("step", "a training step instead of the loss alone; needs transformers"),
                       ("trainer", "./train beside a training loop of transformers; needs ./train and transformers"),
                       ("json", "a JSON object a row instead of tables")]:
        add("--" + name, action="store_true", help=text)
    options = parser.parse_args()
    options.cuda = options.device == "cuda"
    options.shapes = options.shapes or (DIVERGENCE_SHAPES if options.divergence else SHAPES)
    if options.step and options.divergence:
        sys.exit("--step trains on targets, without the teacher that --divergence needs; leave out one of the two")
    try:
        options.shapes = [(int(n), int(h), int(v)) for n, h, v in (text.split("x") for text in options.shapes.split(","))]
        assert all(min(shape) > 0 for shape in options.shapes)
    except (ValueError, AssertionError):
        sys.exit(f"--shapes {options.shapes}: give NxHxV, for instance 4096x4096x128256")
    try:
        split = (text.replace(":", "x").rsplit("x", 2) for text in (options.models or MODELS[options.device]).split(","))
        options.models = [(model, int(batch), int(length)) for model, batch, length in split]
    except ValueError:
        sys.exit(f"--models {options.models}: give MODEL:BxT, for instance gpt2-124m:4x64")
    if not os.path.exists(os.environ["LCE_LIBRARY"]):
        sys.exit(f"{os.environ['LCE_LIBRARY']}, which peers are compared with, does not exist: make liblce.so")
    return options


def main():
    options = parse_options()
    gpu = torch.cuda.get_device_name() if options.cuda else "CPU"
    if not options.json:
        installed = {package.name.replace("_", "-"): package.version for package in importlib.metadata.distributions()}
        versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
        print(f"{gpu}, median of {f'{STEPS - WARM} steps' if options.trainer else options.rounds}; {', '.join(versions)}")
    if options.trainer:
        for model, batch, length in options.models:
            show(options, f"{model}, batch {batch} x {length}", "over lce.c", trainer_rows(options, model, batch, length), gpu=gpu)
        return
    for loss in [Z_LOSS] * options.z_loss + LOG_PROBS * options.log_probs + DIVERGENCES * options.divergence or [CROSS_ENTROPY]:
        if options.step:
            rows, title = step_rows(options, loss)
            show(options, f"{loss.name}: {title}", "over lce.c", rows, loss=loss.name, gpu=gpu, step=True)
            continue
        for (n, h, v), factor in itertools.product(options.shapes, (2, 1) if loss.teacher else (0,)):
            rows, gemms = loss_rows(options, loss, (n, h, v), factor * h)
            teacher = f", the teacher's H {factor * h}" if factor else ""
            took = f": the plain GEMMs take {1e3 * gemms:.2f} ms" if gemms else ""
            show(options, f"{loss.name}, N {n}, H {h}{teacher}, V {v}{took}", "over the GEMMs", rows, loss=loss.name, gpu=gpu,
                 tokens=n, hidden_size=h, vocab_size=v)


if __name__ == "__main__":
    main()
