#!/usr/bin/env python3
"""linear_cross_entropy and linear_log_probs of tools/torch against PyTorch's own operations in float64."""
import array
import functools
import itertools
import os
import subprocess
import sys
import types

from setting import DEVICE, all_close, calls_of_the_operator, close, double, gradients, raises, run, torch

if torch:
    import torch.nn.functional as F
    import torch.utils.checkpoint
    import lce
    from lce import functional, linear_cross_entropy, linear_log_probs

N, H, V = (2, 3, 7), 24, 101
REDUCTIONS = "mean", "sum", "none"


def problem(dtype=None, bias=False, integers=None, ignored=0):
    """x, weight, bias (leaves) and target."""
    dtype = dtype or torch.float32

    def leaf(*shape, size=1.0):
        return (size * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()
    target = torch.randint(V, N, device=DEVICE, dtype=integers or torch.int64)
    if ignored:
        target.view(-1)[::ignored] = -100
    return leaf(*N, H), leaf(V, H, size=0.5), leaf(V) if bias else None, target


def reference(x, weight, target, bias=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
              softcap=0.0, temperature=1.0, token_weights=None, class_weights=None, chunk=0):
    """Computes linear_cross_entropy by PyTorch's operations on all logits, in the arguments' dtype."""
    z = F.linear(x, weight, bias)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / torch.as_tensor(temperature, device=z.device)[..., None]
    flat, y = z.reshape(-1, z.shape[-1]), target.reshape(-1).long()
    counts = y != ignore_index
    cw = None if class_weights is None else class_weights.to(z.dtype)
    loss = F.cross_entropy(flat, y, cw, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * torch.logsumexp(flat, -1).square() * counts
    if token_weights is not None:
        loss = loss * token_weights.reshape(-1).to(z.dtype)
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (counts if cw is None else cw[y.clamp(0)] * counts).sum()


def results(output, *inputs, upstream=None, again=False):
    """The output, and its gradients where an input wants one; `again`: the graph stays."""
    upstream = torch.ones_like(output) if upstream is None else upstream.to(output.dtype)
    return output, *gradients(output, inputs, upstream, retain_graph=again)


def compare(what, x, weight, bias, target, most, **options):
    """Compares with the reference in float64, for any upstream gradient. Returns the gradients."""
    exact = double(x, weight, bias)
    got, want = linear_cross_entropy(x, weight, target, bias, **options), reference(*exact[:2], target, exact[2], **options)
    upstream = torch.randn_like(got)
    got = results(got, x, weight, bias, upstream=upstream)
    all_close(what, got, results(want, *exact, upstream=upstream), most)
    assert [g.dtype for g in got[1:]] == [t.dtype for t in (x, weight, bias) if t is not None and t.requires_grad]
    return got[1:]


def every_option_alone_and_all_that_go_together():
    options = dict(label_smoothing=0.1, z_loss=0.01, softcap=3.0, temperature=0.7, chunk=5,
                   token_weights=torch.rand(N, device=DEVICE) + 0.5, class_weights=torch.rand(V, device=DEVICE) + 0.5)
    sets = [{}, options] + [{k: v for k, v in options.items() if k != without} for without in ("softcap", "label_smoothing")]
    sets += [{k: v} for k, v in options.items()]
    for named, reduction, bias in itertools.product(sets, REDUCTIONS, (False, True)):
        compare(f"{list(named)}, {reduction}, bias {bias}", *problem(bias=bias, ignored=5), 5e-6, reduction=reduction, **named)


def shapes_and_layouts():
    for integers in (torch.int32, torch.int64):
        compare("integers", *problem(integers=integers), 5e-6)
    x, weight, _, target = problem()
    compare("one token", x[0, 0, 0].detach().requires_grad_(), weight, None, target[0, 0, 0], 5e-6)
    compare("one axis", x[0, 0].detach().requires_grad_(), weight, None, target[0, 0], 5e-6, reduction="none")
    across = torch.randn(H, *N, device=DEVICE).permute(1, 2, 3, 0).requires_grad_()
    gaps = torch.randn(V, 2 * H, device=DEVICE)[:, ::2].requires_grad_()
    meta = [t.detach().to("meta") for t in (x, weight, target)]
    assert linear_cross_entropy(*meta, reduction="none").shape == N
    assert not across.is_contiguous() and not gaps.is_contiguous()
    compare("strides", across, gaps, None, torch.randint(V, N[::-1], device=DEVICE).permute(2, 1, 0), 5e-6)


def targets_that_do_not_count():
    x, weight, bias, target = problem(bias=True)
    target[target == 7] = 8
    target.view(-1)[::3] = 7
    dx = compare("ignore_index", x, weight, bias, target, 5e-6, ignore_index=7)[0]
    assert not dx[target == 7].any() and dx[target != 7].all(-1).all()
    target.fill_(-100)
    for tokens, reduction in itertools.product((len(x), 0), REDUCTIONS):  # 0: no token at all
        loss = linear_cross_entropy(x[:tokens], weight, target[:tokens], bias, reduction=reduction)
        assert loss.isnan() if reduction == "mean" else (loss == 0).all()
        for gradient in torch.autograd.grad(loss.sum(), (x, weight, bias)):
            assert (gradient == 0).all()
    assert linear_log_probs(x[:0], weight, target[:0])[1].shape == target[:0].shape


def ignored_tokens_are_skipped():
    """The library sees those that count alone; results and gradients are the same."""
    with calls_of_the_operator(lambda *a: len(a[3])) as counts:
        for ignored in (1, 3):  # all; a third
            x, weight, bias, target = problem(bias=True, ignored=ignored)
            upstream = torch.rand(N, device=DEVICE)
            for options in (dict(reduction="mean"), dict(reduction="sum"), dict(reduction="none", token_weights=upstream)):
                if ignored == 1 and options["reduction"] == "mean":
                    continue  # NaN
                got, want = (results(linear_cross_entropy(x, weight, target, bias, skip_ignored=skip, **options),
                                     x, weight, bias) for skip in (True, False))
                all_close(f"{options}", got, want, 1e-6)
            got, want = (linear_log_probs(x, weight, target, skip_ignored=skip) for skip in (True, False))
            all_close("log p", (*got, *results((got[0] - got[1]), x, weight)), (*want, *results(want[0] - want[1], x, weight)), 1e-6)
        assert set(counts) == {0, 28, 42}, counts
    raises(ValueError, "not for a group", lambda: functional.counted_alone((), True, "a group", N))


def any_upstream_gradient_and_twice():
    for reduction in REDUCTIONS:
        x, weight, bias, target = problem(bias=True, ignored=5)
        options, exact = dict(reduction=reduction, token_weights=torch.rand(N, device=DEVICE)), double(x, weight, bias)
        loss, want = linear_cross_entropy(x, weight, target, bias, **options), reference(*exact[:2], target, exact[2], **options)
        for factor in (1.0, -3.5, 0.0, torch.randn_like(loss)):
            upstream = factor * torch.ones_like(loss)
            all_close(f"{reduction} times {factor}", results(loss, x, weight, bias, upstream=upstream, again=True),
                      results(want, *exact, upstream=upstream, again=True), 5e-6)


def no_second_derivative():
    """Refused, and not taken for 0, for a penalty on a gradient of x, of weight, with upstream ones."""
    for reduction in REDUCTIONS:
        x, weight, _, target = problem()
        for first, factor in ((x, 1), (weight, weight.sum())):
            loss = factor * linear_cross_entropy(x, weight, target, reduction=reduction).sum()
            gradient, = torch.autograd.grad(loss, first, create_graph=True)
            raises(RuntimeError, "no second derivative", lambda: (loss + gradient.square().sum()).backward())
            raises(RuntimeError, "no second derivative", lambda: torch.autograd.grad(gradient.sum(), weight))
    loss = linear_cross_entropy(x, weight, target)
    loss.backward(create_graph=True)  # which is fine as long as nobody uses the graph
    close("create_graph", x.grad, torch.autograd.grad(reference(x, weight, target), x)[0], 5e-6)


def only_needed_gradients():
    """Keeps what the operator is asked for."""
    with calls_of_the_operator(lambda *a: (a[5] is not None, *a[-1])) as calls:
        for x_needed, weight_needed, reduction in itertools.product((True, False), (True, False), ("mean", "none")):
            x, weight, _, target = problem()
            x.requires_grad_(x_needed), weight.requires_grad_(weight_needed)
            if x_needed or weight_needed:
                compare("frozen", x, weight, None, target, 5e-6, reduction=reduction)
            else:
                assert not linear_cross_entropy(x, weight, target, reduction=reduction).requires_grad
            assert calls.pop() == (False, False, x_needed, weight_needed, False, False)
            assert calls in ([], [(False,) * 6])  # the forward pass of "none"
            calls.clear()
        for frozen in range(3):
            leaves = problem(bias=True)
            leaves[frozen].requires_grad_(False)
            compare("frozen, with a bias", *leaves, 5e-6)
        calls.clear()
        x, weight, bias, target = problem(bias=True)
        with torch.no_grad():
            linear_cross_entropy(x, weight, target, bias)
        with torch.inference_mode():
            linear_cross_entropy(x, weight, target, bias)
        log_probs, _ = linear_log_probs(x, weight, target)  # its entropy is not differentiated: no logits in the backward pass
        log_probs.sum().backward()
        linear_log_probs(x, weight, target, entropy=False)
        assert calls == [(False,) * 6, (False,) * 6, (False, True, *(False,) * 4), (False, False, True, True, False, False),
                         (False,) * 6], calls


def exponentials_are_kept():
    """Keeps exponentials if one chunk takes all tokens and a backward pass follows; the first one uses them up."""
    with calls_of_the_operator(lambda *a: (a[9] is not None, a[-1][4])) as given:
        x, weight, _, target = problem(ignored=5)
        exact = double(x, weight)
        p = torch.log_softmax(F.linear(*exact) / 0.7, -1)
        want = p.gather(-1, target.clamp(0)[..., None])[..., 0] * (target >= 0), -(p.exp() * p).sum(-1) * (target >= 0)
        for weights, again in itertools.product(((1, 0), (0, 1), (1, -0.3)), (False, True)):
            got = linear_log_probs(x, weight, target, 0.7, chunk=42)
            pair = [sum(w * t.square().sum() for w, t in zip(weights, both) if w) for both in (got, want)]
            for _ in range(1 + 2 * again):
                all_close(f"{weights}", results(pair[0], x, weight, again=again), results(pair[1], *exact, again=True), 1e-5)
            assert given == [(False, True), (True, False)] + [(False, False)] * 2 * again, given
            given.clear()
        token_weights = torch.rand(N, device=DEVICE)
        compare("none", x, weight, None, target, 5e-6, reduction="none", chunk=99, token_weights=token_weights)
        with torch.autograd.graph.save_on_cpu():
            loss = linear_cross_entropy(x, weight, target, reduction="none", chunk=42).sum()
        all_close("saved elsewhere", results(loss, x), results(reference(x, weight, target, reduction="sum"), x), 5e-6)
        assert given == [(False, True), (True, False)] * 2, given
        given.clear()
        with torch.no_grad():
            linear_log_probs(x, weight, target, chunk=42)
        for more in dict(chunk=41), dict(), dict(chunk=42, softcap=3.0):
            linear_log_probs(x, weight, target, **more)
        assert given == [(False, False)] * 4, given


def hooks_that_free():
    """Saved tensors may be unpacked once: by hooks that forget them (TRL's and torchtune's activation offloading do),
    and under a checkpoint."""
    packed = {}

    def pack(t):
        packed[len(packed)] = t
        return len(packed) - 1
    ways = [lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)]
    freeing = [lambda: torch.autograd.graph.saved_tensors_hooks(pack, packed.pop)]
    try:
        from trl.models.activation_offloading import OffloadActivations
        freeing += [lambda s=s: OffloadActivations(use_streams=s, min_offload_size=1) for s in (False, True)] * (DEVICE == "cuda")
    except ImportError:
        pass
    x, weight, bias, target = problem(bias=True, ignored=5)
    ids, offsets = torch.randint(V, (*N, 3), device=DEVICE), torch.arange(0, 85, 2, device=DEVICE)
    functions = [lambda x, r=r: linear_cross_entropy(x, weight, target, bias, reduction=r) for r in REDUCTIONS]
    functions += [lambda x, c=c: sum(linear_log_probs(x, weight, target, bias=bias, chunk=c)) for c in (0, 1000)]
    functions += [lambda x: sum(t.sum() for t in lce.linear_log_probs(x, weight, ids, bias=bias, entropy=True)),
                  lambda x: sum(t.sum() for t in lce.linear_ids_log_probs(x.view(-1, H), weight, ids.view(-1)[:84], offsets=offsets))]
    functions += [lambda x, r=r: lce.linear_divergence(x, weight, x.flip(-1), weight.flip(0), "jsd", bias=bias, reduction=r)
                  for r in REDUCTIONS]
    for i, function in enumerate(functions):
        want = results(function(2 * x).sum(), x, weight)
        for way in ways:
            all_close(f"function {i} under a checkpoint", results(way(function, 2 * x).sum(), x, weight), want, 1e-6)
        for hooks in freeing:
            with hooks():
                output = function(2 * x).sum()
            all_close(f"function {i} under hooks", results(output, x, weight), want, 1e-6)


def the_first_call():
    """It imports no torch._dynamo, which takes seconds."""
    program = ("import sys, torch, lce; x = torch.ones(2, 3, requires_grad=True); y = torch.tensor([0, 1]); "
               "lce.linear_cross_entropy(x, x, y).backward(); lce.linear_log_probs(x, x, y)[1].sum().backward(); "
               "lce.linear_log_probs(x, x, y[:, None])[0].sum().backward(); sys.exit('torch._dynamo' in sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def bf16():
    """Converted on the CPU; computed in bf16 on a GPU."""
    for reduction in ("mean", "none"):
        compare("bf16", *problem(torch.bfloat16, bias=True), 1e-2, reduction=reduction)
    x, weight, _, target = problem(torch.bfloat16)
    wide = weight.detach().float().requires_grad_()
    compare("bf16 and fp32", x, wide, None, target, 1e-2)


def autocast():
    """Parameters in fp32 get fp32 gradients that were not rounded on their way; x is of either dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias, target = problem(bias=True)
        x = x.detach().to(dtype).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            hidden = F.linear(x, torch.eye(H, device=DEVICE))
            assert hidden.dtype == torch.bfloat16
            loss = linear_cross_entropy(hidden, weight, target, bias)
        loss.backward()
        want = reference(x.detach().bfloat16().double(), weight.double(), target, bias.double())
        close("loss", loss, want, 1e-2)
        exact, = torch.autograd.grad(want, weight)
        close("dweight", weight.grad, exact, 2e-2 if DEVICE == "cuda" else 5e-6)
        assert weight.grad.dtype == torch.float32 and x.grad.dtype == dtype
    if DEVICE == "cuda":
        with torch.autocast(DEVICE, torch.float16):
            raises(TypeError, "autocast asks for torch.float16", lambda: linear_cross_entropy(x, weight, target))


def main_grad():
    for reduction in ("mean", "none"):
        x, weight, _, target = problem(torch.bfloat16)
        weight.main_grad = torch.ones(V, H, device=DEVICE)
        for turn in (1, 2):
            linear_cross_entropy(x, weight, target, reduction=reduction).sum().mul(3).backward()
        assert weight.grad is None
        double = weight.detach().double().requires_grad_()
        (6 * reference(x.detach().double(), double, target, reduction=reduction).sum()).backward()
        close("main_grad", weight.main_grad - 1, double.grad, 2e-5 if DEVICE == "cpu" else 1e-2)


def torch_compile():
    def compiled(function, backend="aot_eager", **more):
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=backend, **more)

    def loss_of(reduction):
        return lambda x, weight, target, bias, **more: linear_cross_entropy(2 * x, 1 * weight, target, bias,
                                                                            reduction=reduction, **more)
    for backend, reduction in (("aot_eager", "mean"), ("aot_eager", "sum"), ("aot_eager", "none"), ("inductor", "mean")):
        functions = compiled(loss_of(reduction), backend), loss_of(reduction)
        for _ in range(2):
            x, weight, bias, target = problem(bias=True, ignored=5)
            upstream, weights = torch.randn(N if reduction == "none" else (), device=DEVICE), torch.rand(N, device=DEVICE)
            losses = [function(x, weight, target, bias, token_weights=weights, z_loss=0.01) for function in functions]
            for again in (True, False):
                pair = [results(loss, x, weight, bias, upstream=upstream, again=again) for loss in losses]
                all_close(f"{backend}, {reduction}", *pair, 1e-6)
    x, weight, _, target = problem(ignored=5)
    pairs = [function(x, weight, target, 0.7) for function in (compiled(linear_log_probs), linear_log_probs)]
    all_close("linear_log_probs", *((*pair, *results(pair[0] - 2 * pair[1], x, weight)) for pair in pairs), 1e-6)
    for reduction in ("mean", "none"):  # any number of tokens, by one compilation
        functions = compiled(loss_of(reduction), dynamic=True), loss_of(reduction)
        for n in (5, 9):
            x, y = torch.randn(n, H, device=DEVICE, requires_grad=True), torch.randint(V, (n,), device=DEVICE)
            with torch._dynamo.config.patch(error_on_recompile=n == 9):
                all_close("dynamic", *(results(function(x, weight, y, None), x) for function in functions), 1e-6)
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")(x, weight, y).backward()


def the_operator():
    """PyTorch's own checks of schema, fake kernel and compilation."""
    x, weight, bias, target = (None if t is None else t.detach() for t in problem(bias=True))
    for b, wanted in ((None, [False] * 4), (bias, [True] * 4 + [False] + [True] * 4), (None, [False, False, True, False])):
        options = torch.float32, "", V, 0.0, 0.0, 0.0, 1.0, False, 0, 0.0, True, torch.float32, wanted
        torch.library.opcheck(functional.operator, (x.reshape(-1, H), weight, b, target.flatten(), *[None] * 6, *options))


def log_probs_and_entropy():
    cases = (1.0, 0.0, False), (0.6, None, False), (0.8, 0.0, True), (1.3, 2.0, True)
    for (temperature, softcap, bias), chunk in itertools.product(cases, (4, 1000)):  # keeping exponentials
        x, weight, bias, target = problem(bias=bias, ignored=5)
        options = dict(temperature=temperature, bias=bias, softcap=softcap)
        got = linear_log_probs(x, weight, target, chunk=chunk, **options)
        z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        p = torch.log_softmax((softcap * torch.tanh(z / softcap) if softcap else z) / temperature, -1)
        counts = target != -100
        want = p.gather(-1, target.clamp(0)[..., None])[..., 0] * counts, -(p.exp() * p).sum(-1) * counts
        all_close("log p and entropy", got, want, 5e-6)
        for weights in ((1, 0), (0, 1), (1, -0.3)):
            squares = (sum(w * t.square().sum() for w, t in zip(weights, pair) if w) for pair in (got, want))
            all_close(f"gradient of {weights} of both", *(results(s, x, weight, bias, again=True)[1:] for s in squares), 1e-5)
        alone, none = linear_log_probs(x, weight, target, entropy=False, **options)
        close("log p alone", alone, want[0], 5e-6)
        assert none is None


def a_temperature_per_token():
    x, weight, _, target = problem(ignored=5)
    temperature = torch.rand(N, device=DEVICE) + 0.5
    for reduction in REDUCTIONS:
        compare(reduction, x, weight, None, target, 5e-6, temperature=temperature, reduction=reduction, z_loss=0.01)
    want = results(-linear_cross_entropy(x, weight, target, temperature=temperature, reduction="none"), x, weight)
    temperature[target == -100] = 0  # as padding may have
    all_close("log p", results(linear_log_probs(x, weight, target, temperature)[0], x, weight), want, 5e-6)
    temperature[0, 0, 1] = 9e-7
    assert linear_log_probs(x, weight, target, temperature)[0].isnan().nonzero().tolist() == [[0, 0, 1]]


def batch_invariance():
    """A token's results have the same bits in any order, in any part of the batch, in chunks of any size."""
    n, v, dtype = 70, 500, torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, weight, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((n, H), (v, H), (v,)))
    target, weights = torch.randint(v, (n,), device=DEVICE), torch.rand(n, device=DEVICE)
    target[3] = -100

    def rows(kept, log_probs, chunk=0, **more):
        leaf, more = x[kept].requires_grad_(), dict(chunk=chunk, batch_invariant=True, outputs=("max_logit",), **more)
        got = (linear_log_probs(leaf, weight, target[kept], **more) if log_probs else
               linear_cross_entropy(leaf, weight, target[kept], reduction="none", z_loss=0.01, **more))
        return *got, *torch.autograd.grad((got[0] * weights[kept] - 0.1 * got[1] * log_probs).sum(), leaf)
    every, few = torch.arange(n, device=DEVICE), torch.arange(5, 50, 3, device=DEVICE)
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        return raises(RuntimeError, "batch_invariant needs the kernels for Hopper", lambda: rows(every, True))
    with calls_of_the_operator(lambda *a: (a[-1][4], a[9] is not None)) as exps:
        for log_probs, more in itertools.product((True, False), ({}, dict(bias=bias, softcap=3.0), dict(skip_ignored=True))):
            whole = rows(every, log_probs, **more)
            for part, chunk in itertools.product((every.flip(0), every[torch.randperm(n)], few, every[41:42]), (0, 7, 33, n)):
                for got, want in zip(rows(part, log_probs, chunk, **more), whole, strict=True):
                    assert torch.equal(got, want[part]), f"{log_probs}, {more}, {len(part)} tokens in chunks of {chunk}"
    assert set(exps) == {(False, False)}


def flops():
    """Counts by FlopCounterMode the products that a call computes, in units of 2 N H V."""
    from torch.utils.flop_counter import FlopCounterMode
    x, weight, _, target = problem()
    x.requires_grad_(False)
    for want, more in (2, {}), (3, dict(reduction="none")), (2, dict(reduction="none", chunk=99)):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(x, weight, target, **more).sum().backward()
        assert counter.get_total_flops() == want * 2 * target.numel() * H * V, (want, counter.get_total_flops())


def outputs():
    """Compares every token's entropy: beside any loss, which it does not change; with every term; and by linear_log_probs."""
    x, weight, bias, target = problem(bias=True, ignored=5)
    with torch.no_grad():  # so that some are correct
        x.view(-1, H)[::2] = 9 * weight[target.reshape(-1)[::2]] / weight[target.reshape(-1)[::2]].norm(dim=-1, keepdim=True)
    counts = target != -100
    terms = dict(softcap=3.0, temperature=0.7, token_weights=torch.rand(N, device=DEVICE), chunk=5)
    for reduction, skip, more in itertools.product(REDUCTIONS, (False, True), ({}, terms)):
        options, exact = dict(reduction=reduction, z_loss=0.01, **more), double(x, weight, bias)
        got, *pair = linear_cross_entropy(x, weight, target, bias, skip_ignored=skip, outputs=functional.OUTPUTS, **options)
        want, v = reference(*exact[:2], target, exact[2], **options), F.linear(exact[0], *exact[1:])
        v = 3 * torch.tanh(v / 3) / 0.7 if more else v
        all_close(f"{options}", results(got, x, weight, bias), results(want, *exact), 5e-6)
        wanted = (0.01 * torch.logsumexp(v, -1).square(), (v.argmax(-1) == target).float(), v.amax(-1), v.argmax(-1).int(),
                  torch.logsumexp(2 * v.log_softmax(-1), -1))
        all_close("outputs", pair, [w * counts for w in wanted], 5e-6)
        assert [t.dtype for t in pair] == [torch.float32] * 3 + [torch.int32, torch.float32]
        assert not any(t.requires_grad for t in pair) and 0 < pair[1].sum() < counts.sum()
    log_probs, none, correct = linear_log_probs(x, weight, target, bias=bias, entropy=False, outputs=("correct",))
    assert none is None and log_probs.requires_grad and correct.sum() > 0 and torch.equal(correct, correct * counts)
    alone, correct = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")(x, weight, target, bias,
                                                                                              outputs=("correct",))
    all_close("compiled", results(alone, x), results(linear_cross_entropy(x, weight, target, bias), x), 1e-6)
    assert correct.sum() > 0


def names_of_pytorchs_function():
    """Takes the values of torch.nn.functional.linear_cross_entropy, or in an older PyTorch of cross_entropy."""
    x, weight, bias, target = problem(bias=True, ignored=4)
    x, target, classes = x.detach().flatten(0, -2), target.flatten(), torch.rand(V, device=DEVICE)
    pytorchs = getattr(F, "linear_cross_entropy", lambda x, w, y, *, linear_bias, weight, ignore_index, **more:
                       F.cross_entropy(F.linear(x, w, linear_bias), y, weight, **more))
    for reduction in REDUCTIONS:
        named = dict(linear_bias=bias, weight=classes, ignore_index=None, label_smoothing=0.1, reduction=reduction)
        want = pytorchs(x, weight, target, **named)
        close("by position", linear_cross_entropy(x, weight, target, **named), want, 5e-6)
        close("by name", linear_cross_entropy(input=x, linear_weight=weight, target=target, **named), want, 5e-6)
    close("ours", linear_cross_entropy(x=x, weight=weight, target=target), F.cross_entropy(F.linear(x, weight), target), 5e-6)
    raises(TypeError, "of input, x, target two are names of one",
           lambda: linear_cross_entropy(input=x, x=x, target=target, options=None))


def sampling():
    """The exact loss; gradients that a seed repeats, and whose mean is the exact one."""
    x, weight, _, target = problem()

    def gradients(seed, **more):
        torch.manual_seed(seed)
        loss = linear_cross_entropy(x, weight, target, **more)
        return loss, *torch.autograd.grad(loss, (x, weight))
    exact, turns, tiles = gradients(0, chunk=4), 300, dict(sampling=8.0, chunk=4)
    if DEVICE == "cuda":  # there only chunks of 128 tokens and more are sampled
        assert all(torch.equal(a, b) for a, b in zip(gradients(3, **tiles), gradients(3, chunk=4)))
        return
    draws = [gradients(seed, **tiles) for seed in range(turns)]
    for a, b in zip(gradients(3, **tiles), draws[3]):
        assert torch.equal(a, b)
    for i in (1, 2):
        apart = sum((draw[i] - exact[i]).square().sum() for draw in draws) / turns
        assert apart.sqrt() > 0.1 * exact[i].norm()
        assert (sum(draw[i] for draw in draws) / turns - exact[i]).norm() < 2 * (apart / turns).sqrt()
    assert all(draw[0] == exact[0] for draw in draws)
    x.requires_grad_(False)
    linear_cross_entropy(x, weight, target, **tiles).backward()


def memory():
    """A chunk, not the logits of all tokens: those would take 4 N V bytes."""
    n, h, v = 2048, 16, 4000
    x, weight = torch.randn(n, h, device=DEVICE, requires_grad=True), torch.randn(v, h, device=DEVICE, requires_grad=True)
    target = torch.randint(v, (n,), device=DEVICE)
    linear_cross_entropy(x, weight, target, chunk=32).backward()
    held = functional.context(x.device, torch.float32, "").held_bytes
    assert 4 * 32 * v < held() < 4 * n * v / 4, held()
    linear_cross_entropy(x, weight, target, chunk=n, reduction="none").sum().backward()  # it is PyTorch's tensor that is kept
    assert held() < 64 * n, held()


def wrong_arguments():
    x, weight, bias, target = problem(bias=True)
    wrong = ((ValueError, "reduction is 'all'", dict(reduction="all")),
             (ValueError, "x has the shape", dict(x=x[..., 1:])),
             (ValueError, "target has the shape", dict(target=target.flatten())),
             (ValueError, "bias has the shape", dict(bias=bias[1:])),
             (ValueError, "token_weights has the shape", dict(token_weights=torch.ones(3, device=DEVICE))),
             (ValueError, "class_weights has the shape", dict(class_weights=torch.ones(3, device=DEVICE))),
             (ValueError, f"vocab_size is {V + 1} and weight has {V} rows", dict(vocab_size=V + 1)),
             (TypeError, "x is of type NoneType, where a torch.Tensor is needed", dict(x=None)),
             (TypeError, "weight is of type list", dict(weight=weight.tolist())),
             (TypeError, "target is of type array", dict(target=array.array("i", [1]))),  # as numpy's, which need not be there
             (TypeError, "bias is of type float", dict(bias=0.0)),
             (ValueError, "weight is on meta", dict(weight=weight.detach().to("meta"))),
             (TypeError, "x is torch.float64, where torch.bfloat16 or torch.float32 is needed", dict(x=x.double())),
             (TypeError, "target is torch.float32", dict(target=target.float())),
             (RuntimeError, "label_smoothing is 7", dict(label_smoothing=7.0)),
             (RuntimeError, "temperature is -1", dict(temperature=-1.0)),
             (ValueError, "temperature is 0.0; it can be any number from 1e-06 on", dict(temperature=0)),
             (RuntimeError, "label smoothing under a softcap excludes", dict(softcap=3.0, label_smoothing=0.1, sampling=1.0)),
             (RuntimeError, "a chunk of -1", dict(chunk=-1)),
             (RuntimeError, "sampling knows only the rows' sums", dict(sampling=1.0, softcap=3.0)),
             (ValueError, "outputs is ('accuracy',); it can have z_loss, correct", dict(outputs=("accuracy",))),
             (ValueError, "outputs is 'correct'; it can have", dict(outputs="correct")),
             (ValueError, "outputs is None; it can have", dict(outputs=None)),
             (TypeError, "group is 'all', where a ProcessGroup", dict(group="all")),
             (ValueError, "temperature has the shape [1], where", dict(temperature=torch.ones(1, device=DEVICE), bias=None)),
             (TypeError, "z_loss is tensor([1.]), where a number", dict(z_loss=torch.ones(1))),
             (ValueError, "temperature per token goes with neither bias nor", dict(temperature=torch.ones(N, device=DEVICE))),
             (ValueError, "batch_invariant goes with neither sampling", dict(batch_invariant=True, sampling=1.0)),
             (ValueError, "batch_invariant goes", dict(batch_invariant=True, group=types.SimpleNamespace(group_name=""))),
             (ValueError, "skip_ignored is not for a group", dict(skip_ignored=True, group=types.SimpleNamespace(
                 group_name="", size=lambda: 1, rank=lambda: 0))),
             (TypeError, "softcap is '3', where a number is needed", dict(softcap="3")),
             (TypeError, "chunk is None, where an integer is needed", dict(chunk=None)),
             *((TypeError, f"{name} is {value!r}, where a number is needed", {name: value})
               for value in (None, "0.1", [0.1], 1j) for name in ("label_smoothing", "z_loss", "sampling", "temperature")),
             *((TypeError, f"{name} is {value!r}, where an integer is needed", {name: value}) for value in ("3", 3.0)
               for name in ("chunk", "ignore_index", "vocab_size")),
             *((TypeError, f"{name} is a tensor of layout torch.sparse_coo; give {name}.to_dense()", {name: t.detach().to_sparse()})
               for name, t in dict(x=x, weight=weight, bias=bias, target=target, token_weights=x[..., 0]).items()),
             *((ValueError, f"{name} requires a gradient, but is a constant here; give {name}.detach()", {name: t.requires_grad_()})
               for name, t in dict(token_weights=torch.ones(N), class_weights=torch.ones(V), temperature=torch.tensor(1.0),
                                   softcap=torch.tensor(3.0), z_loss=torch.tensor(0.1)).items()),
             (ValueError, "temperature requires a gradient", dict(temperature=torch.ones(N, requires_grad=True), bias=None)))
    for kind, part, more in wrong:
        given = {**dict(x=x, weight=weight, target=target, bias=bias), **more}
        raises(kind, part, lambda: linear_cross_entropy(**given))
    with torch.no_grad():  # what a gradient misses nobody asks for
        linear_cross_entropy(x, weight, target, token_weights=torch.ones(N, device=DEVICE, requires_grad=True),
                             temperature=torch.tensor(0.5, requires_grad=True))
    for transform in torch.func.grad, functools.partial(torch.func.vmap, in_dims=(0, None, 0)):
        raises(RuntimeError, "torch.func's transforms do not know", lambda: transform(linear_cross_entropy)(x, weight, target))
    target[0, 0, 3] = V
    if DEVICE == "cpu":
        raises(RuntimeError, f"targets[3] is {V}", lambda: linear_cross_entropy(x, weight, target))
    else:
        assert linear_cross_entropy(x, weight, target).isnan()


def the_module():
    head = lce.LinearCrossEntropy(H, V, bias=True, device=DEVICE, label_smoothing=0.1)
    x, _, _, target = problem()
    for more in {}, dict(reduction="sum"):
        close(f"{more}", head(x, target, **more), reference(x, head.weight, target, head.bias, label_smoothing=0.1, **more), 5e-6)
    assert torch.equal(head(x), F.linear(x, head.weight, head.bias))
    assert list(head.state_dict()) == ["weight", "bias"]
    for kind, told, more in ((TypeError, "'label_smothing' is no option", dict(label_smothing=0.1)),
                             (TypeError, "'token_weights' is no option", dict(token_weights=torch.ones(N))),
                             (RuntimeError, "label_smoothing is 7", dict(label_smoothing=7.0)),
                             (RuntimeError, "label smoothing under a softcap excludes", dict(label_smoothing=0.1, softcap=3.0, sampling=1.0)),
                             (TypeError, "z_loss is None, where a number", dict(z_loss=None)),
                             (ValueError, "reduction is 'all'", dict(reduction="all")),
                             (ValueError, "class_weights has the shape", dict(class_weights=torch.ones(3)))):
        raises(kind, told, lambda: lce.LinearCrossEntropy(H, V, device="meta", **more))
    raises(TypeError, "'foo' is no option", lambda: head(x, foo=1))
    capped, hot = lce.LinearCrossEntropy(H, V, device=DEVICE, softcap=2.0, temperature=0.5), torch.rand(N, device=DEVICE) + 0.5
    assert repr(capped) == f"LinearCrossEntropy(in_features={H}, out_features={V}, bias=False, softcap=2.0, temperature=0.5)"
    for module, more in ((capped, {}), (capped, dict(softcap=None)), (head, dict(temperature=0.7)),
                         (capped, dict(softcap=0, temperature=hot))):
        logits = module(x, **more).flatten(0, -2)
        close("its logits", F.cross_entropy(logits, target.flatten()), module(x, target, **{**more, "label_smoothing": 0}), 5e-6)
    again = torch.utils.checkpoint.checkpoint(lambda x: head(2 * x, target), x, use_reentrant=False)
    close("checkpoint", torch.autograd.grad(again, x)[0], torch.autograd.grad(head(2 * x, target), x)[0], 1e-6)


if __name__ == "__main__":
    tests = (every_option_alone_and_all_that_go_together, shapes_and_layouts, targets_that_do_not_count,
             any_upstream_gradient_and_twice, ignored_tokens_are_skipped, no_second_derivative,
             only_needed_gradients, exponentials_are_kept, hooks_that_free, the_first_call, bf16, autocast, main_grad,
             torch_compile, the_operator, log_probs_and_entropy, a_temperature_per_token, batch_invariance, flops, outputs,
             names_of_pytorchs_function, sampling, memory, wrong_arguments, the_module)
    run({test.__name__: test for test in tests})
