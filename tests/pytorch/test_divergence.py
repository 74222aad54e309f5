#!/usr/bin/env python3
"""linear_divergence of tools/torch against PyTorch's operations in float64."""
import itertools
import math

from setting import DEVICE, all_close, close, double, gradients, raises, run, torch

if torch:
    import torch.nn.functional as F
    from lce import linear_divergence

N, H, TEACHER_H, V = (4, 9), 24, 40, 301
KINDS = ("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)


def problem(vocab=V, weights=0.5):
    """x, weight, bias (leaves) and the teacher's."""
    shapes = (*N, H), (vocab, H), (vocab,), (*N, TEACHER_H), (vocab, TEACHER_H), (vocab,)
    tensors = [torch.randn(shape, device=DEVICE) * (weights if len(shape) == 2 else 1) for shape in shapes]
    return [t.requires_grad_(i < 3) for i, t in enumerate(tensors)]


def reference(x, weight, bias, teacher_x, teacher_weight, teacher_bias, kind, beta, temperature=1.0, teacher_temperature=None,
              softcap=0.0, teacher_softcap=0.0, scale=1.0, teacher_scale=1.0):
    def log_probs(x, weight, bias, temperature, cap, scale):
        z = scale * F.linear(x, weight, bias)
        return torch.log_softmax((cap * torch.tanh(z / cap) if cap else z) / temperature, -1)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)
    p = log_probs(x, weight, bias, temperature, softcap, scale)
    q = log_probs(teacher_x, teacher_weight, teacher_bias, teacher_temperature or temperature, teacher_softcap, teacher_scale)
    m = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
    return dict(forward_kl=kl(q, p), reverse_kl=kl(p, q), jsd=beta * kl(q, m) + (1 - beta) * kl(p, m))[kind]


def ours(x, weight, bias, teacher_x, teacher_weight, teacher_bias, kind, beta, **options):
    return linear_divergence(x, weight, teacher_x, teacher_weight, kind, beta=beta, bias=bias, teacher_bias=teacher_bias, **options)


def compare(what, tensors, kind, beta, most=2e-6, chunk=10, **options):
    """Losses and gradients of each token, and of weighted sums, also where these are made in the forward pass."""
    exact, upstream = double(*tensors), torch.randn(N, device=DEVICE)
    want = reference(*exact, kind, beta, **options)
    wants = gradients(want, exact, upstream.double())
    for reduction, weights, factor in ("none", None, upstream), ("none", upstream / 2, 2), ("sum", upstream / 2, 2):
        loss = ours(*tensors, kind, beta, chunk=chunk, reduction=reduction, token_weights=weights, **options)
        if weights is None:
            close(f"{what}, {kind} {beta}", loss, want, 1e-6)
        all_close(f"{what}, {kind} {beta}, gradients by {reduction}", gradients(loss, tensors, factor * torch.ones_like(loss)), wants, most)


def values():
    more = (dict(), dict(temperature=0.5), dict(temperature=4.0), dict(temperature=0.7, teacher_temperature=2.0),
            dict(softcap=5.0, teacher_softcap=8.0, scale=0.5, teacher_scale=2.0))
    for (kind, beta), options in itertools.product(KINDS, more):
        tensors, most = problem(), 2e-6 / min(1, options.get("temperature", 1))  # a logit's rounding is divided by T
        compare(str(options), tensors, kind, beta, most, **options)
        compare(f"{options} without bias", [*tensors[:2], None, *tensors[3:5], None], kind, beta, most, chunk=36, **options)
    for (kind, beta), i in itertools.product(KINDS[:4], range(3)):
        compare(f"leaf {i} alone", [t.detach().requires_grad_(j == i) for j, t in enumerate(problem())], kind, beta)
    for (kind, beta), vocab in itertools.product((KINDS[0], KINDS[3]), (65537, 200003)):
        compare(f"V {vocab}", problem(vocab), kind, beta)


def near_and_far():
    for kind, beta in KINDS:
        leaves = problem()[:3]
        same = [*leaves, *(t.detach() for t in leaves)]
        loss = ours(*same, kind, beta, reduction="none")
        assert loss.abs().max() < 1e-6 and gradients(loss.mean(), leaves)[0].abs().max() < 1e-6
        near = [*same[:4], same[4] + 1e-2 * torch.randn_like(same[4]), same[5]]
        want = reference(*double(*near), kind, beta)
        off = (ours(*near, kind, beta, reduction="none") - want).abs().max()
        assert off < (1e-5 if DEVICE == "cuda" else 1.5e-7), (kind, beta, off, want.max())
        far = problem()  # each is nearly certain of another entry, whose probability underflows in the other head
        far[2].data[3] += 200
        far[5][7] += 150
        compare("far", far, kind, beta, most=4e-6)
        masked = problem()
        exact = [torch.cat([t[:5], t[6:]]) if len(t) == V else t for t in double(*masked)]
        masked[2].data[5] = masked[5][5] = -torch.inf
        wants = gradients(reference(*exact, kind, beta).mean(), exact[:1])
        all_close("masked in both heads", gradients(ours(*masked, kind, beta), masked[:1]), wants, 2e-6)


def masks_and_reductions():
    *tensors, mask = *problem(), torch.rand(N, device=DEVICE) < 0.6
    exact = double(*tensors)
    log_p = torch.log_softmax(F.linear(*exact[:3]), -1)
    for t in tensors[0], tensors[3]:
        t.data[~mask] = torch.nan
    for (kind, beta), skip in itertools.product(KINDS[:4], (False, True)):
        want = torch.where(mask, reference(*exact, kind, beta), 0)
        loss, entropy = ours(*tensors, kind, beta, mask=mask, chunk=7, reduction="none", entropy=True, skip_ignored=skip)
        close("loss", loss, want, 1e-6)
        close("entropy", entropy, torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0), 1e-6)
        assert loss[~mask].eq(0).all() and entropy[~mask].eq(0).all() and not entropy.requires_grad
        for reduction, total in ("mean", want.sum() / mask.sum()), ("sum", want.sum()):
            got = ours(*tensors, kind, beta, mask=3 * mask, chunk=7, reduction=reduction, skip_ignored=skip)
            close(reduction, got, total, 1e-6)
            wants = gradients(2 * total, exact, retain_graph=True)
            for which in "a first pass", "a second":
                all_gradients = gradients(2 * got, tensors, retain_graph=True)
                all_close(f"{reduction}, {which}", all_gradients, wants, 2e-6)
            assert all_gradients[0][~mask].eq(0).all()
        none = ours(*tensors, kind, beta, mask=torch.zeros_like(mask), skip_ignored=skip)
        assert none.isnan() and all(g.eq(0).all() for g in gradients(none, tensors))


def dtypes():
    """The CPU computes in fp32, and a GPU in x's dtype or autocast's, as for linear_cross_entropy."""
    for x_dtype, head_dtype, teacher_dtype, autocast in itertools.product(*[(torch.float32, torch.bfloat16)] * 3, (False, True)):
        wanted = x_dtype, head_dtype, head_dtype, teacher_dtype, teacher_dtype, head_dtype
        tensors = [t.detach().to(d).requires_grad_(t.requires_grad) for t, d in zip(problem(), wanted)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = ours(*tensors, "jsd", 0.5)
        exact = double(*tensors)
        want = reference(*exact, "jsd", 0.5).mean()
        close("loss", loss, want, 1e-6 if DEVICE == "cpu" else 1e-2)
        for got, exact_gradient, dtype in zip(gradients(loss, tensors), gradients(want, exact), wanted):
            assert got.dtype == dtype
            close("gradient", got, exact_gradient, 2e-6 if DEVICE == "cpu" and dtype == torch.float32 else 1e-2)


def compiled():
    tensors = problem()
    for reduction in "mean", "none":
        def function(x):
            return ours(2 * x, *tensors[1:], "jsd", 0.5, reduction=reduction).sum()
        want = gradients(function(tensors[0]), tensors)
        all_close(reduction, gradients(torch.compile(function, fullgraph=True)(tensors[0]), tensors), want, 1e-6)
    first, = torch.autograd.grad(function(tensors[0]), tensors[0], create_graph=True)
    raises(RuntimeError, "no second derivative", lambda: first.sum().backward())


def flops():
    """Counts by FlopCounterMode the GEMMs: both heads' logits, and two gradients of x's width."""
    from torch.utils.flop_counter import FlopCounterMode
    x, weight, _, *teacher = problem()
    for differentiable, widths in (False, H + TEACHER_H), (True, 3 * H + TEACHER_H):
        leaves = [t.detach().requires_grad_(differentiable) for t in (x, weight)]
        with FlopCounterMode(display=False) as counted:
            ours(*leaves, None, *teacher[:2], None, "jsd", 0.5)
        assert counted.get_total_flops() == 2 * math.prod(N) * V * widths, (widths, counted.get_total_flops())


def wrong_arguments():
    x, weight, bias, teacher_x, teacher_weight, teacher_bias = problem()
    given = dict(x=x, weight=weight, teacher_x=teacher_x, teacher_weight=teacher_weight, bias=bias)
    wrong = ((ValueError, "kind is 'kl'", dict(kind="kl")), (ValueError, "reduction is 'all'", dict(reduction="all")),
             (ValueError, "needs both heads whole", dict(group=0)), (ValueError, "scale is 0", dict(scale=0)),
             (ValueError, "the same tokens, vocabulary and device", dict(teacher_x=teacher_x[:2])),
             (ValueError, "the same tokens, vocabulary and device", dict(teacher_weight=teacher_weight[:9])),
             (ValueError, "teacher_x has the shape", dict(teacher_weight=teacher_weight[:, :9])),
             (ValueError, "mask is torch.float32", dict(mask=teacher_x[..., 0])),
             (ValueError, "token_weights is torch.float32 of the shape [2, 9]", dict(token_weights=torch.ones(2, 9, device=DEVICE))),
             (RuntimeError, "beta is 1; the JSD needs one between 0 and 1", dict(kind="jsd", beta=1)),
             (RuntimeError, "softcap is -1", dict(softcap=-1.0)), (RuntimeError, "a chunk of -1", dict(chunk=-1)))
    for kind, part, more in wrong:
        raises(kind, part, lambda: linear_divergence(**{**given, **more}))


if __name__ == "__main__":
    tests = values, near_and_far, masks_and_reductions, dtypes, compiled, flops, wrong_arguments
    run({test.__name__: test for test in tests})
