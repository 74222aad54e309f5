"""Losses that frameworks leave to chains of separate operations, by such chains and by lce.c.

z-loss:            mean(lse - z[y] + lambda lse^2) on fp32 logits, alone and in a whole training step. lce.c computes
                   gradients in the forward pass, so what they add to a forward pass alone counts as its backward pass. The
                   step is that of one Llama written with PyTorch's operations (compiled blocks, PyTorch's attention, fused
                   AdamW, all in bf16), in which only LM head + loss are exchanged.
log-probabilities: of a policy gradient, mean(-a log p[y] - beta entropy(p)) with a from -1 to 1, with and without entropies.
"""
from collections import namedtuple

import torch
import torch.nn.functional as F

import peers
from peers import advantages_of, lce, reset_peak, seconds

LAMBDA, BETA = 1e-4, 1e-2


# --- the losses -------------------------------------------------------------------------------------------------

# All of (x, w, y). token_losses(z, y, advantages) is what they are the mean of.
Loss = namedtuple("Loss", "name token_losses chains ours in_forward")


def compiled(loss):
    return peers.Peer("separate operations, torch.compile", lambda: torch.compile(loss, dynamic=False), gpu_only=True)


def two_operations(x, w, y):
    """As trainers write it: the loss, and the logsumexp once more."""
    logits = (x @ w.T).float()
    return F.cross_entropy(logits, y) + LAMBDA * torch.logsumexp(logits, dim=1).square().mean()


def token_z_losses(z, y, advantages=None):
    lse = torch.logsumexp(z, dim=1)
    return lse - z.gather(1, y[:, None])[:, 0] + LAMBDA * lse * lse


def one_logsumexp(x, w, y):
    """The shortest chain: one logsumexp serves both terms."""
    return token_z_losses((x @ w.T).float(), y).mean()


Z_LOSS = Loss("z-loss", token_z_losses,
              [peers.Peer("separate operations", lambda: two_operations),
               peers.Peer("separate operations, one logsumexp", lambda: one_logsumexp), compiled(two_operations)],
              peers.Peer("lce.c, chunk 4096", lambda: peers.ours(4096, z_loss=LAMBDA)), True)


def policy_losses(log_probs, entropies, advantages):
    return -advantages * log_probs - (0 if entropies is None else BETA * entropies)


def log_probs_loss(name, entropy):
    def token_losses(z, y, advantages):
        log_p = torch.log_softmax(z, dim=1)
        return policy_losses(log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1) if entropy else None, advantages)

    def chain(x, w, y):
        return token_losses((x @ w.T).float(), y, advantages_of(y)).mean()

    def ours(x, w, y):
        found = lce.linear_log_probs(x, w, y, chunk=min(4096, len(x)), entropy=entropy)
        return policy_losses(*found, advantages_of(y)).mean()
    return Loss(name, token_losses, [peers.Peer("separate operations", lambda: chain), compiled(chain)],
                peers.Peer("lce.c, chunk 4096", lambda: ours), False)


LOG_PROBS = (log_probs_loss("log-probabilities", False), log_probs_loss("log-probabilities and entropies", True))


# --- the loss alone ---------------------------------------------------------------------------------------------

def time_chain(device, loss_of, tensors):
    """Seconds of the forward pass, and of the backward pass."""
    kept = []
    forward = seconds(device, lambda: kept.append(loss_of(*tensors)))
    backward = seconds(device, lambda: kept[0].backward())
    tensors[0].grad = tensors[1].grad = None
    return forward, backward


PARTS = (("forward_", lambda seconds: seconds[0]), ("backward_", lambda seconds: seconds[1]), ("together_", sum))


def loss_rows(loss, device, shape, rounds, errors):
    tensors = x, w, y = peers.problem(device, shape)
    reference = peers.reference(x, w, y, loss.token_losses) if errors else None

    def row(peer):
        loss_of = peers.loss_of(peer, device)
        run = peers.autograd(loss_of)

        def with_gradients():
            together = seconds(device, lambda: run(*tensors))
            with torch.no_grad():
                alone = seconds(device, lambda: loss_of(*tensors))
            return alone, together - alone
        run(*tensors)
        found, ours = peers.measured(device, peer, run, tensors, reference), peer is loss.ours
        return found, with_gradients if ours and loss.in_forward else lambda: time_chain(device, loss_of, tensors)

    def gemms():
        passes = peers.gemms(x, w)
        return {}, lambda: tuple(seconds(device, one) for one in passes)

    def makers():
        nonlocal reference
        for peer in [*loss.chains, loss.ours]:
            yield peer.name, lambda: row(peer)
        reference = None  # freed before the timing
        yield "the plain GEMMs alone", gemms

    return peers.compare(device, makers(), loss.ours.name, rounds, PARTS)[0]


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
        self.optimizer = torch.optim.AdamW(parameters, lr=0, fused=device == "cuda")  # the same weights for all losses

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


def step_rows(device, rounds):
    model = Model(device)

    def chain(peer):
        loss_of = peers.loss_of(peer, device)
        loss = model.loss(loss_of).item()
        for _ in range(2):
            model.step(loss_of)
        reset_peak(device)
        model.step(loss_of)
        peak = peers.peak_bytes(device)
        if peak and peer is Z_LOSS.ours:
            peak += peers.ours_held(model.table)
        return (dict(loss=loss, peak_bytes=peak),
                lambda: seconds(device, lambda: model.step(loss_of)))

    return peers.compare(device, [(peer.name, lambda peer=peer: chain(peer)) for peer in [*Z_LOSS.chains, Z_LOSS.ours]],
                         Z_LOSS.ours.name, rounds)[0]


def bench(device, shapes, rounds, errors, losses):
    """A table for each loss and shape, and with z-loss that of the step."""
    for loss in losses:
        for shape in shapes:
            peers.show("{}, N {}, H {}, V {}: ms, and ratio to lce.c".format(loss.name, *shape),
                       ("loss", "forward", "backward", "together", "holds", *peers.ERROR_COLUMNS),
                       loss_rows(loss, device, shape, rounds, errors),
                       lambda row: [*(f"{row[f'{part}ms']:.2f}, {row[f'{part}ratio']:.2f}" for part, _ in PARTS),
                                    peers.size_cell(row.get("held_bytes"), "MiB", 2**20, 0), *peers.error_cells(row)])
    if Z_LOSS in losses:
        m = MODELS[device]
        peers.show(f"z-loss in a training step of {m['name']} in PyTorch, batch {m['batch']} x {m['length']}",
                   ("loss", "ms per step", "ratio to lce.c", "peak memory", "first loss"), step_rows(device, rounds),
                   lambda row: [f"{row['ms']:.2f}", f"{row['ratio']:.3f}",
                                peers.size_cell(row["peak_bytes"], "GiB", 2**30, 1), f"{row['loss']:.5f}"])
