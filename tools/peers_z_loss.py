"""z-loss by chains of separate framework operations and by lce.c: the loss alone, and a whole training step.

The loss is mean(lse - z[y] + lambda lse^2) on fp32 logits. lce.c computes gradients in the forward pass, so what they
add to a forward pass alone counts as its backward pass. The step is that of one Llama written with PyTorch's operations
(compiled blocks, PyTorch's attention, fused AdamW, all in bf16), in which only LM head + loss are exchanged; lce.c's
enters as an autograd function.
"""
import statistics

import torch
import torch.nn.functional as F

import peers
from peers import reason_of, reset_peak, seconds

LAMBDA = 1e-4
OURS = "lce.c, chunk 4096"


# --- the losses -------------------------------------------------------------------------------------------------

def two_operations(x, w, y):
    """As trainers write it: the loss, and the logsumexp once more."""
    logits = (x @ w.T).float()
    return F.cross_entropy(logits, y) + LAMBDA * torch.logsumexp(logits, dim=1).square().mean()


def one_logsumexp(x, w, y):
    """The shortest chain: one logsumexp serves both terms."""
    logits = (x @ w.T).float()
    lse = torch.logsumexp(logits, dim=1)
    return (lse - logits.gather(1, y[:, None])[:, 0] + LAMBDA * lse * lse).mean()


CHAINS = [peers.Peer("separate operations", lambda: two_operations),
          peers.Peer("separate operations, one logsumexp", lambda: one_logsumexp),
          peers.Peer("separate operations, torch.compile", lambda: torch.compile(two_operations, dynamic=False),
                     gpu_only=True)]


class OurLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, y, library):
        outputs = peers.new_outputs(x, w)
        loss, dx, dw = library(x, w, y, z_loss=LAMBDA, outputs=outputs)
        ctx.save_for_backward(dx, dw)
        ctx.dtype = w.dtype
        return loss.float()

    @staticmethod
    def backward(ctx, upstream):
        dx, dw = ctx.saved_tensors
        rounded = torch.empty(dw.shape, dtype=ctx.dtype, device=dw.device)
        return dx * upstream.to(dx.dtype), torch.mul(dw, upstream, out=rounded), None, None


# --- the loss alone ---------------------------------------------------------------------------------------------

def time_chain(device, loss_of, tensors):
    """Seconds of the forward pass, and of the backward pass."""
    kept = []
    forward = seconds(device, lambda: kept.append(loss_of(*tensors)))
    backward = seconds(device, lambda: kept[0].backward())
    tensors[0].grad = tensors[1].grad = None
    return forward, backward


def time_ours(device, library, tensors):
    together = seconds(device, lambda: library(*tensors, z_loss=LAMBDA))
    alone = seconds(device, lambda: library(*tensors, backward=False, z_loss=LAMBDA))
    return alone, together - alone


def loss_rows(device, shape, rounds, library, errors):
    tensors = x, w, y = peers.problem(device, shape)
    reference = peers.reference(x, w, y, LAMBDA) if errors else None
    rows, timers = [], []  # timers: a row, its function of no arguments, its (forward, backward) seconds
    for chain in CHAINS:
        rows.append(dict(what=chain.name))
        try:
            loss_of = peers.loss_of(chain, device)
            run = peers.autograd(loss_of)
            run(*tensors)
            x.grad = w.grad = None
            rows[-1].update(peers.measured(device, run, tensors, reference))
            timers.append((rows[-1], lambda loss_of=loss_of: time_chain(device, loss_of, tensors), []))
        except Exception as error:  # a failure is a row, whatever it is
            rows[-1]["why"] = reason_of(error)
        x.grad = w.grad = None
        reset_peak(device)
    rows.append(dict(what=OURS, **peers.errors_of(library(x, w, y, z_loss=LAMBDA), reference)))
    library(x, w, y, backward=False, z_loss=LAMBDA)
    ours = (rows[-1], lambda: time_ours(device, library, tensors), [])
    del reference
    reset_peak(device)
    gemms = peers.Gemms(x, w)
    rows.append(dict(what="the plain GEMMs alone"))
    timers += [ours, (rows[-1], lambda: (seconds(device, gemms.forward), seconds(device, gemms.backward)), [])]
    for _ in range(rounds):  # alternating: a GPU's speed changes with its heat
        for _, timer, times in timers:
            times.append(timer())
    ours[0]["held_bytes"] = library.held()
    for row, _, times in timers:
        for part, of in (("forward", lambda t: t[0]), ("backward", lambda t: t[1]), ("together", sum)):
            row[f"{part}_ms"] = 1e3 * statistics.median(map(of, times))
            row[f"{part}_ratio"] = statistics.median(of(t) / of(o) for t, o in zip(times, ours[2]))
    return rows


def show_loss(shape, rows):
    parts = ("forward", "backward", "together")
    peers.show("z-loss, N {}, H {}, V {}: ms, and ratio to lce.c".format(*shape),
               ("loss", *parts, "holds", *peers.ERROR_COLUMNS), rows,
               lambda row: [*(f"{row[f'{part}_ms']:.2f}, {row[f'{part}_ratio']:.2f}" for part in parts),
                            peers.size_cell(row.get("held_bytes"), "MiB", 2**20, 0), *peers.error_cells(row)])


# --- a training step --------------------------------------------------------------------------------------------

MODELS = {"cuda": dict(name="llama-1b", vocab=128256, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8,
                       head=64, batch=4, length=4096),
          "cpu": dict(name="a tiny Llama", vocab=1000, hidden=32, inner=64, layers=2, heads=4, kv_heads=2,
                      head=8, batch=2, length=16)}


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def block(x, norm1, qkv, out, norm2, gate_up, down, cos, sin, m):
    """One layer: x [B, T, H]."""
    batch, length, hidden = x.shape
    heads, kv_heads = m["heads"], m["kv_heads"]
    packed = (F.rms_norm(x, (hidden,), norm1) @ qkv.T).view(batch, length, heads + 2 * kv_heads, m["head"])
    q, k, v = packed.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True,
                                           enable_gqa=True)
    x = x + mixed.transpose(1, 2).reshape(batch, length, heads * m["head"]) @ out.T
    gate, up = (F.rms_norm(x, (hidden,), norm2) @ gate_up.T).chunk(2, dim=-1)
    return x + (F.silu(gate) * up) @ down.T


class Model:
    """A Llama with a tied head, and its optimizer."""

    def __init__(self, device):
        m = self.m = MODELS[device]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device=device).manual_seed(1)

        def matrix(rows, columns):
            draws = torch.randn(rows, columns, generator=generator, device=device)
            return (0.02 * draws).to(dtype).requires_grad_()

        def ones():
            return torch.ones(m["hidden"], dtype=dtype, device=device, requires_grad=True)

        hidden, inner, width = m["hidden"], m["inner"], m["heads"] * m["head"]
        self.table = matrix(m["vocab"], hidden)
        self.blocks = [(ones(), matrix(width + 2 * m["kv_heads"] * m["head"], hidden), matrix(hidden, width), ones(),
                        matrix(2 * inner, hidden), matrix(hidden, inner)) for _ in range(m["layers"])]
        self.norm = ones()
        place = torch.arange(m["length"], device=device, dtype=torch.float32)
        speed = 10000.0 ** (-torch.arange(0, m["head"], 2, device=device, dtype=torch.float32) / m["head"])
        angle = place[:, None] * speed
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.block = torch.compile(block, dynamic=False) if device == "cuda" else block
        ids = torch.randint(m["vocab"], (m["batch"], m["length"] + 1), generator=generator, device=device)
        self.tokens, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)
        parameters = [self.table, self.norm] + [p for layer in self.blocks for p in layer]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device == "cuda")

    def loss(self, loss_of):
        x = F.embedding(self.tokens, self.table)
        for parameters in self.blocks:
            x = self.block(x, *parameters, self.cos, self.sin, self.m)
        x = F.rms_norm(x, (self.m["hidden"],), self.norm)
        return loss_of(x.view(-1, self.m["hidden"]), self.table, self.targets)

    def step(self, loss_of):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(loss_of).backward()
        self.optimizer.step()


def step_rows(device, rounds, library):
    model = Model(device)
    rows, works = [], []  # works: a row, its loss(x, w, y), its seconds
    for chain in CHAINS + [peers.Peer(OURS, lambda: lambda x, w, y: OurLoss.apply(x, w, y, library))]:
        rows.append(dict(what=chain.name))
        try:
            loss_of = peers.loss_of(chain, device)
            rows[-1]["loss"] = model.loss(loss_of).item()  # all at the same weights
            works.append((rows[-1], loss_of, []))
        except Exception as error:  # a failure is a row, whatever it is
            rows[-1]["why"] = reason_of(error)
        reset_peak(device)
    for row, loss_of, _ in works:
        try:
            for _ in range(2):
                model.step(loss_of)
            reset_peak(device)
            model.step(loss_of)
            row["peak_bytes"] = peers.peak_bytes(device)
            if row["peak_bytes"] and row["what"] == OURS:
                row["peak_bytes"] += library.held()
        except Exception as error:
            row["why"] = reason_of(error)
        model.optimizer.zero_grad(set_to_none=True)
        reset_peak(device)
    works = [work for work in works if "why" not in work[0]]
    for _ in range(rounds):
        for _, loss_of, times in works:
            times.append(seconds(device, lambda: model.step(loss_of)))
    for row, _, times in works:
        row["ms"] = 1e3 * statistics.median(times)
        if works[-1][0]["what"] == OURS:
            row["ratio"] = statistics.median(t / o for t, o in zip(times, works[-1][2]))
    return rows


def show_step(device, rows):
    m = MODELS[device]
    peers.show(f"z-loss in a training step of {m['name']} in PyTorch, batch {m['batch']} x {m['length']}",
               ("loss", "ms per step", "ratio to lce.c", "peak memory", "first loss"), rows,
               lambda row: [f"{row['ms']:.2f}", f"{row['ratio']:.3f}" if "ratio" in row else "",
                            peers.size_cell(row["peak_bytes"], "GiB", 2**30, 1), f"{row['loss']:.5f}"])


def bench(device, shapes, rounds, library, errors, log):
    """Both tables; log(**row) keeps each row."""
    for shape in shapes:
        rows = loss_rows(device, shape, rounds, library, errors)
        show_loss(shape, rows)
        for row in rows:
            log(event="z-loss layer", shape=shape, **row)
    rows = step_rows(device, rounds, library)
    show_step(device, rows)
    for row in rows:
        log(event="z-loss step", model=MODELS[device], **row)
