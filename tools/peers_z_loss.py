"""z-loss by chains of separate framework operations and by lce.c: the layer alone, and a whole training step.

The loss is mean(lse - z[y] + lambda lse^2) on fp32 logits. lce.c computes gradients on the way forward, so what they
add to a forward pass alone stands for its backward pass. The step is that of one Llama written with PyTorch's
operations (compiled blocks, its own attention, fused AdamW, all in bf16), of which only the last layer is exchanged;
lce.c's enters as an autograd function.
"""
import statistics
import sys

import torch
import torch.nn.functional as F

import peers
from peers import Absent, now_bytes, peak_bytes, problem, reason_of, reset_peak, seconds, wait

LAMBDA = 1e-4
OURS = "lce.c, chunk 4096"


# --- the losses -------------------------------------------------------------------------------------------------

def two_operations(x, w, y):
    """As trainers write it: the loss, and beside it the logsumexp once more."""
    logits = (x @ w.T).float()
    return F.cross_entropy(logits, y) + LAMBDA * torch.logsumexp(logits, dim=1).square().mean()


def one_logsumexp(x, w, y):
    """The shortest chain: the logsumexp serves both."""
    logits = (x @ w.T).float()
    lse = torch.logsumexp(logits, dim=1)
    return (lse - logits.gather(1, y[:, None])[:, 0] + LAMBDA * lse * lse).mean()


def chains(device):
    """(name, maker of the loss) of what lce.c is compared with."""
    def compiled():
        if device == "cpu":
            raise Absent("needs a compiler for every shape; left out on the CPU")
        return torch.compile(two_operations, dynamic=False)
    yield "separate operations", lambda: two_operations
    yield "separate operations, one logsumexp", lambda: one_logsumexp
    yield "separate operations, torch.compile", compiled


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


# --- the layer --------------------------------------------------------------------------------------------------

class Chain:
    """A loss's forward pass, and then its backward pass, on one problem."""

    def __init__(self, loss_of, tensors):
        self.loss_of, self.tensors, self.loss = loss_of, tensors, None

    def forward(self):
        self.loss = self.loss_of(*self.tensors)

    def backward(self):
        self.loss.backward()

    def results(self):
        self.forward()
        self.backward()
        x, w, _ = self.tensors
        got, self.loss = (self.loss.detach(), x.grad, w.grad), None
        return got

    def forget(self):
        x, w, _ = self.tensors
        x.grad = w.grad = self.loss = None


def median_ratio(times, others, of):
    return statistics.median(of(t) / of(o) for t, o in zip(times, others))


def layer_rows(device, shape, rounds, library, errors):
    tensors = problem(device, shape)
    x, w, y = tensors
    reference = peers.reference(x, w, y, LAMBDA) if errors else None
    rows, works = [], []
    for name, make in chains(device):
        try:
            chain = Chain(make(), tensors)
            chain.results()
            chain.forget()
            reset_peak(device)
            before = now_bytes(device)
            got = chain.results()
            held = peak_bytes(device)
            if held is not None:
                held -= before + sum(g.numel() * g.element_size() for g in got[1:])
            rows.append(dict(what=name, held_bytes=held, **(peers.errors_of(got, reference) if errors else {})))
            works.append((rows[-1], chain, []))
        except Exception as error:  # a failure is a row, whatever it is
            rows.append(dict(what=name, why=reason_of(error)))
        got = chain = None
        x.grad = w.grad = None
        reset_peak(device)
    got = library(x, w, y, z_loss=LAMBDA)
    library(x, w, y, backward=False, z_loss=LAMBDA)
    ours = []
    rows.append(dict(what=OURS, **(peers.errors_of(got, reference) if errors else {})))
    got = reference = None
    reset_peak(device)
    with torch.no_grad():
        bare = (torch.empty(len(x), len(w), dtype=x.dtype, device=device), torch.empty_like(x), torch.empty_like(w))
    floors = []
    for _ in range(rounds):  # in turn: a card's speed changes with its heat
        with torch.no_grad():
            floors.append((seconds(device, lambda: peers.forward_product(x, w, bare[0])),
                           seconds(device, lambda: peers.backward_products(x, w, *bare))))
        for _, chain, times in works:
            times.append((seconds(device, chain.forward), seconds(device, chain.backward)))
            chain.forget()
        together = seconds(device, lambda: library(x, w, y, z_loss=LAMBDA))
        rows[-1]["held_bytes"] = library.held()
        alone = seconds(device, lambda: library(x, w, y, backward=False, z_loss=LAMBDA))
        ours.append((alone, together - alone))
    rows.append(dict(what="the three products alone"))
    for row, times in [(row, times) for row, _, times in works] + [(rows[-2], ours), (rows[-1], floors)]:
        for what, of in (("forward", lambda t: t[0]), ("backward", lambda t: t[1]), ("together", sum)):
            row[f"{what}_ms"] = 1e3 * statistics.median(map(of, times))
            row[f"{what}_ratio"] = median_ratio(times, ours, of)
    return rows


def show_layer(shape, rows):
    print(f"\nz-loss, N {shape[0]}, H {shape[1]}, V {shape[2]}: ms, and times what lce.c takes\n")
    print("| loss | forward | backward | together | holds | loss off by | dX | dW |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "why" in row:
            print(f"| {row['what']} | not measured: {row['why']} | | | | | | |")
            continue
        held = "" if row.get("held_bytes") is None else f"{row['held_bytes'] / 2**20:.0f} MiB"
        times = " | ".join(f"{row[f'{part}_ms']:.2f}, {row[f'{part}_ratio']:.2f}"
                           for part in ("forward", "backward", "together"))
        off = " | ".join(f"{row[of]:.1e}" if of in row else "" for of in ("loss_error", "dx_error", "dw_error"))
        print(f"| {row['what']} | {times} | {held} | {off} |")
    sys.stdout.flush()


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
    rows, works = [], []
    ours = (OURS, lambda: lambda x, w, y: OurLoss.apply(x, w, y, library))
    for name, make in (*chains(device), ours):
        rows.append(dict(what=name))
        try:
            loss_of = make()
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
            row["peak_bytes"] = peak_bytes(device)
            if row["peak_bytes"] and row["what"] == OURS:
                row["peak_bytes"] += library.held()
        except Exception as error:
            row["why"] = reason_of(error)
        model.optimizer.zero_grad(set_to_none=True)
        reset_peak(device)
    works = [work for work in works if "why" not in work[0]]
    for _ in range(rounds):
        for _, loss_of, times in works:
            times.append(seconds(device, lambda loss_of=loss_of: model.step(loss_of)))
    for row, _, times in works:
        row["ms"] = 1e3 * statistics.median(times)
        if works[-1][0]["what"] == OURS:
            row["ratio"] = statistics.median(t / o for t, o in zip(times, works[-1][2]))
    return rows


def show_step(device, rows):
    m = MODELS[device]
    print(f"\nz-loss in a training step of {m['name']} in PyTorch, batch {m['batch']} x {m['length']}\n")
    print("| loss | ms a step | times the step with lce.c | memory at the peak | the loss at first |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        if "why" in row:
            print(f"| {row['what']} | not measured: {row['why']} | | | |")
            continue
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB"
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
        print(f"| {row['what']} | {row['ms']:.2f} | {ratio} | {peak} | {row['loss']:.5f} |")
    sys.stdout.flush()


def bench(device, shapes, rounds, library, errors, tell):
    """Both tables; tell(**row) keeps each row."""
    for shape in shapes:
        rows = layer_rows(device, shape, rounds, library, errors)
        show_layer(shape, rows)
        for row in rows:
            tell(event="z-loss layer", shape=shape, **row)
    rows = step_rows(device, rounds, library)
    show_step(device, rows)
    for row in rows:
        tell(event="z-loss step", model=MODELS[device], **row)
    wait(device)
