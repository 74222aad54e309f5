#!/usr/bin/env python3
"""linear_ids_log_probs of tools/torch, and what is made of it, against PyTorch's operations in float64."""
import itertools

from setting import DEVICE, all_close, close, double, gradients, raises, run, torch

if torch:
    import torch.nn.functional as F
    from lce import linear_ids_log_probs, linear_log_probs, log_mass, renormalized, topk_kl
    from lce.functional import context

N, H, V = (3, 7), 24, 301


def problem(k, bias=False):
    """x, weight, bias (leaves) and ids, some ignored, some twice, a token without any."""
    shapes = (*N, H), (V, H), (V,)
    leaves = [(0.5 * torch.randn(shape, device=DEVICE)).requires_grad_() for shape in shapes]
    ids = torch.randint(V, (*N, k), device=DEVICE)
    ids[torch.rand(ids.shape, device=DEVICE) < 0.2] = -100
    ids[..., 1:2], ids[1, 2] = ids[..., :1], -100
    return *leaves[:2], leaves[2] if bias else None, ids


def reference(x, weight, ids, temperature=1.0, bias=None, softcap=0.0):
    z = F.linear(x, weight, bias)
    v = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    lse = torch.logsumexp(v, -1)
    return torch.where(ids < 0, 0.0, v.gather(-1, ids.clamp(0)) - lse[..., None]), lse


def compare(what, function, wanted, *tensors, most=3e-6):
    """Outputs and gradients, for any upstream gradient."""
    exact = double(*tensors)
    got, want = function(*tensors), wanted(*exact)
    upstream = [torch.randn_like(t) for t in got]
    all_close(what, (*got, *gradients(got, tensors, upstream)),
              (*want, *gradients(want, exact, [u.double() for u in upstream])), most)


def values():
    for k, options in (1, {}), (8, dict(temperature=0.7)), (5, dict(softcap=3.0, temperature=1.3)), (128, {}):
        x, weight, bias, ids = problem(k, bias=k != 8)
        for integers in (torch.int32, torch.int64):
            compare(f"K {k}", lambda x, w, b, i: linear_log_probs(x, w, i.to(integers), bias=b, chunk=5, **options),
                    lambda x, w, b, i: reference(x, w, i, bias=b, **options), x, weight, bias, ids)
    other = torch.where(ids < 0, 7777, ids)
    assert torch.equal(linear_ids_log_probs(x, weight, other, bias=bias, ignore_index=7777)[0],
                       linear_ids_log_probs(x, weight, ids, bias=bias)[0])
    compare("x alone", lambda x, w, b, i: linear_ids_log_probs(x, w, i, bias=b),
            lambda x, w, b, i: reference(x, w, i, bias=b), x, weight.detach(), bias.detach(), ids)
    compare("bias alone", lambda x, w, b, i: linear_ids_log_probs(x, w, i, bias=b),
            lambda x, w, b, i: reference(x, w, i, bias=b), x.detach(), weight.detach(), bias, ids)


def entropies():
    """And None as ignore_index."""
    def both(function):
        return lambda x, w, b, i: function(x, w, i, bias=b, temperature=0.7, softcap=4.0, ignore_index=None, entropy=True)

    def wanted(x, w, b, i):
        v = 4 * torch.tanh(F.linear(x, w, b) / 4) / 0.7
        p = torch.softmax(v, -1)
        return *reference(x, w, i, 0.7, b, 4.0), -(p * torch.log_softmax(v, -1)).sum(-1)
    compare("entropies", both(linear_ids_log_probs), wanted, *problem(5, bias=True))
    compare("the same", both(linear_log_probs), wanted, *problem(5, bias=True))
    assert len(linear_log_probs(*problem(5)[:2], problem(5)[3], group=None, outputs=())) == 2


def ignored_tokens_are_skipped():
    """Gradients are the same; lse and entropy of those left out are 0."""
    for entropy, unequal in itertools.product((False, True), (False, True)):
        x, weight, bias, ids = problem(4, bias=True)
        ids[:, :3] = -100
        counts, more, shape = (ids != -100).any(-1), {}, x.shape
        if unequal:
            x, ids = x.detach().view(-1, H).requires_grad_(), ids.view(-1, 4)
            kept = torch.rand(ids.shape, device=DEVICE) < 0.7
            ids, offsets = ids[kept], F.pad(kept.sum(1).cumsum(0), (1, 0))
            counts = torch.stack([(part != -100).any() for part in ids.split(kept.sum(1).tolist())])
            more = dict(offsets=offsets)
        got, want = (linear_ids_log_probs(x, weight, ids, bias=bias, entropy=entropy, skip_ignored=skip, **more) for skip in (True, False))
        want = want[0], *(t * counts for t in want[1:])
        upstream = [torch.randn_like(t) for t in got]
        all_close(f"{entropy} {unequal}", *((*r, *torch.autograd.grad(r, (x, weight, bias), upstream)) for r in (got, want)), 2e-6)
        assert got[1].eq(0).equal(~counts) and 0 < counts.sum() < counts.numel()
    none = linear_ids_log_probs(x, weight, torch.full_like(ids, -100), skip_ignored=True, **more)
    assert all(t.eq(0).all() for t in none)


def flops():
    x, weight, bias, ids = problem(4)
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counted:
        log_probs, lse = linear_log_probs(x, weight, ids)
    tokens, gemm = len(ids.view(-1, 4)), 2 * H * V * len(ids.view(-1, 4))
    assert counted.get_total_flops() == gemm + 2 * H * 4 * tokens, counted.get_total_flops()
    with FlopCounterMode(display=False) as counted:
        (log_probs.sum() + lse.sum()).backward()
    assert counted.get_total_flops() == 3 * gemm, counted.get_total_flops()


def by_offsets():
    x, weight, bias, ids = problem(6, bias=True)
    x, ids = x.detach().view(-1, H).requires_grad_(), ids.view(-1, 6)
    kept = torch.rand(ids.shape, device=DEVICE) < 0.5
    kept[4] = False
    offsets = F.pad(kept.sum(1).cumsum(0), (1, 0))

    def ragged(x, w, b):
        log_probs, lse = linear_ids_log_probs(x, w, ids[kept], bias=b, offsets=offsets)
        return log_probs, lse, renormalized(log_probs, ids[kept], offsets)

    def dense(x, w, b):
        log_probs, lse = reference(x, w, ids, bias=b)
        return log_probs[kept], lse, renormalized(log_probs, torch.where(kept, ids, -100))[kept]
    compare("offsets", ragged, dense, x, weight, bias)
    for more in dict(), dict(offsets=torch.zeros(len(x) + 1, dtype=torch.int64, device=DEVICE)):
        none = ids.new_empty(0) if more else ids[:, :0]
        log_probs, lse = linear_ids_log_probs(x, weight, none, **more)
        assert log_probs.shape == none.shape
        close("lse alone", lse, reference(x.double(), weight.double(), ids)[1], 1e-6)
        lse.sum().backward()
    masked = x.detach().clone().requires_grad_()
    masked.data[9], ids[9] = torch.nan, -100  # a token without ids or a gradient of its lse
    linear_ids_log_probs(masked, weight, ids)[0].sum().backward()
    assert masked.grad.isfinite().all()
    none, lse = linear_ids_log_probs(x[:0], weight, ids[:0])
    assert none.shape == (0, 6) and lse.shape == (0,)
    assert not torch.autograd.grad(none.sum() + lse.sum(), weight)[0].any()
    one = linear_log_probs(x[5], weight, ids[5])
    all_close("one token", one, reference(x[5].double(), weight.double(), ids[5]), 1e-6)


def what_is_made_of_it():
    x, weight, _, _ = problem(1)
    ids = torch.rand(*N, V, device=DEVICE).topk(6).indices
    ids[0, 1, 4:], ids[1, 1] = -100, -100
    teacher = torch.log_softmax(torch.randn(*N, V, device=DEVICE), -1).gather(-1, ids.clamp(0))
    p = torch.softmax(x.double() @ weight.double().T, -1)
    for n in torch.cartesian_prod(*map(torch.arange, N)).tolist():
        kept = ids[*n][ids[*n] >= 0]
        q, s = teacher[*n].double()[:len(kept)].exp(), p[*n][kept]
        q, s = torch.cat([q, 1 - q.sum()[None]]), torch.cat([s, 1 - s.sum()[None]])
        log_probs, _ = linear_log_probs(x[*n], weight, ids[*n])
        for reverse, (a, b) in (False, (q, s)), (True, (s, q)):
            for classes in len(q), len(q) - 1:
                got = topk_kl(log_probs, teacher[*n], ids[*n], reverse=reverse, rest=classes == len(q))
                want = (a * (a / b).log())[:classes].sum()
                wants = torch.autograd.grad(want, x, retain_graph=True)[0] if len(kept) else torch.zeros_like(x)
                close("KL", got + 1, want + 1, 1e-5)
                close("its gradient", 1 + torch.autograd.grad(got, x, retain_graph=True)[0], 1 + wants, 1e-5)
        if len(kept):
            close("renormalized", renormalized(log_probs, ids[*n])[:len(kept)].exp(), s[:-1] / s[:-1].sum(), 1e-5)
            assert renormalized(log_probs, ids[*n])[len(kept):].eq(0).all()
            close("mass", log_mass(log_probs, ids[*n]).exp(), s[:-1].sum(), 1e-5)
    certain, ids = torch.tensor([0.0, -60.0], device=DEVICE).requires_grad_(), torch.tensor([3, 4], device=DEVICE)
    value = topk_kl(certain, certain.detach(), ids)  # without a rest
    assert value == 0 and torch.autograd.grad(value, certain)[0].isfinite().all()
    few, offsets = torch.tensor([5, -100, -100], device=DEVICE), torch.tensor([0, 1, 3, 3], device=DEVICE)
    mass = log_mass(torch.tensor([-1.0, 0.0, 0.0], device=DEVICE), few, offsets)  # of ids that count, that do not, and of none
    assert mass.tolist() == [-1, -torch.inf, -torch.inf], mass


def compiled_narrow_and_invariant():
    x, weight, bias, ids = problem(4, bias=True)
    compare("compiled", torch.compile(lambda x, w, b: linear_log_probs(x, w, ids, bias=b), fullgraph=True),
            lambda x, w, b: reference(x, w, ids, bias=b), x, weight, bias)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    linear_ids_log_probs(x, weight, ids)[0].sum().backward()
    assert weight.grad is None and weight.main_grad.abs().max() > 0
    if DEVICE == "cpu":
        flat, ids = x.detach().view(-1, H).requires_grad_(), ids.view(-1, 4)
        order = torch.randperm(len(flat))[:11]
        rows = []
        for which, chunk in (slice(None), 0), (order, 3):
            part = flat.detach()[which].requires_grad_()
            results = linear_ids_log_probs(part, weight, ids[which], chunk=chunk, batch_invariant=True)
            rows.append([*results, torch.autograd.grad(sum(r.sum() for r in results), part)[0]])
        assert all(torch.equal(whole[order], part) for whole, part in zip(*rows))
    held = []
    for k in 1, 64:
        ids = torch.randint(V, (*N, k), device=DEVICE)
        linear_ids_log_probs(x, weight, ids)[0].sum().backward()
        held.append(context(x.device, x.dtype, "").held_bytes())
    assert held[1] - held[0] <= 8 * ids.numel() + 4096, held


def wrong_arguments():
    x, weight, bias, ids = problem(4, bias=True)
    flat, offsets = ids.view(-1)[:9], torch.tensor([0, 2, 1, 9], device=DEVICE)
    wrong = ((ValueError, "ids has the shape [3, 7, 4]; [..., K] with", dict(x=x[:2])),
             (ValueError, "or [M] with offsets of the shape [4]", dict(x=x[:, 0], offsets=offsets)),
             (TypeError, "ids is torch.float32", dict(ids=ids.float())),
             (TypeError, "ids is list; a tensor of torch.int32 or", dict(ids=[1])),
             (TypeError, "offsets is torch.int32", dict(offsets=ids.int())),
             (ValueError, "bias has the shape", dict(bias=bias[:5])), (ValueError, "temperature is 0.0", dict(temperature=0.0)),
             (RuntimeError, "lce_ids_log_probs: a chunk of -1", dict(chunk=-1)),
             (RuntimeError, "softcap is -1", dict(softcap=-1.0)))
    for kind, part, more in wrong:
        raises(kind, part, lambda: linear_ids_log_probs(**{**dict(x=x, weight=weight, ids=ids, bias=bias), **more}))
    raises(ValueError, "exclude group", lambda: linear_log_probs(x, weight, ids, outputs=["correct"]))
    log_probs, lse = linear_ids_log_probs(x, weight, ids)
    first, = torch.autograd.grad(log_probs.sum(), x, create_graph=True)
    raises(RuntimeError, "no second derivative", lambda: first.sum().backward())
    ids[0, 0, 3] = V
    if DEVICE == "cpu":
        raises(RuntimeError, f"ids[3] is {V}", lambda: linear_ids_log_probs(x, weight, ids))
        raises(RuntimeError, "offsets[2] is 1; they must rise from 0 to id_count, which is 9",
               lambda: linear_ids_log_probs(x[:, 0], weight, flat.clamp(max=0), offsets=offsets))
        raises(RuntimeError, "offsets[0] is 1; they must rise from 0", lambda: linear_ids_log_probs(
            x[:, 0], weight, flat.clamp(max=0), offsets=torch.tensor([1, 2, 4, 9])))
        raises(RuntimeError, "offsets[3] is 8; they must rise from 0 to id_count", lambda: linear_ids_log_probs(
            x[:, 0], weight, flat.clamp(max=0), offsets=torch.tensor([0, 2, 4, 8])))
    else:
        assert linear_ids_log_probs(x, weight, ids)[0].isnan().nonzero().tolist() == [[0, 0, 3]]


if __name__ == "__main__":
    tests = values, entropies, ignored_tokens_are_skipped, flops, by_offsets, what_is_made_of_it, compiled_narrow_and_invariant, wrong_arguments
    run({test.__name__: test for test in tests})
