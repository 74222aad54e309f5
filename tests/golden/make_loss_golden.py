#!/usr/bin/env python3
"""Makes loss.json in this directory: one small problem of linear_cross_entropy, and for every option of the loss, alone and
combined, what PyTorch computes in float64: per-token values, and the gradients that autograd finds.

  make_loss_golden.py

Every term is torch's own where torch has it: torch.nn.functional.cross_entropy for the loss (ignored targets, class
weights, label smoothing, reductions), torch.logsumexp, and torch.distributions.Categorical for log-probability and
entropy. z-loss and soft-cap are written as in the papers. All inputs are exact in bf16 and all options in fp32, so
that every backend starts from the same inputs. Made with torch 2.15.0; needs nothing else.
"""
import json, pathlib

import torch
import torch.nn.functional as F

ROWS, HIDDEN, VOCAB, IGNORED = 13, 5, 29, -100
OUT = pathlib.Path(__file__).resolve().parent / "loss.json"

PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=0.0, temperature=1.0, scale=1.0, reduction="sum", bias=False,
             class_weights=False, token_weights=False, entropy_weights=False, log_prob_gradient=False)

# name: what is switched on. In reduction "none" the token weights are the upstream gradient of each loss.
CASES = {
    "sum, some targets ignored": {},
    "sum, every target ignored": dict(targets=[IGNORED] * ROWS),
    "sum, scaled": dict(scale=0.375),
    "mean": dict(reduction="mean"),
    "none, upstream gradients": dict(reduction="none", token_weights=True),
    "class weights, sum": dict(class_weights=True),
    "class weights, mean": dict(class_weights=True, reduction="mean"),
    "label smoothing": dict(label_smoothing=0.125),
    "label smoothing, class weights, mean": dict(label_smoothing=0.125, class_weights=True, reduction="mean"),
    "z-loss": dict(z_loss=0.0078125),
    "soft-cap": dict(softcap=6.0),
    "temperature": dict(temperature=0.625),
    "bias": dict(bias=True),
    "log-probability's gradient": dict(log_prob_gradient=True, token_weights=True),
    "entropy's gradient": dict(entropy_weights=True),
    "policy: log-probability, entropy, temperature": dict(log_prob_gradient=True, token_weights=True,
                                                          entropy_weights=True, temperature=1.5, bias=True),
    "z-loss, smoothing, class weights, temperature, upstream gradients": dict(
        z_loss=0.0078125, label_smoothing=0.25, class_weights=True, temperature=1.5, reduction="none",
        token_weights=True),
    "z-loss, mean": dict(z_loss=0.015625, reduction="mean"),
    "soft-cap, temperature, smoothing, class weights, mean": dict(softcap=6.0, temperature=0.75, label_smoothing=0.125,
                                                                  class_weights=True, reduction="mean"),
    "all of them": dict(label_smoothing=0.125, z_loss=0.0078125, softcap=8.0, temperature=1.25, scale=0.375, bias=True,
                        class_weights=True, token_weights=True, entropy_weights=True, reduction="none"),
}


def draw(generator, *shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).bfloat16().double()


def problem():
    g = torch.Generator().manual_seed(20240524)
    p = dict(x=draw(g, ROWS, HIDDEN), weight=draw(g, VOCAB, HIDDEN), bias=draw(g, VOCAB),
             class_weights=draw(g, VOCAB).abs(), token_weights=draw(g, ROWS), entropy_weights=draw(g, ROWS, scale=0.25))
    p["x"][3] *= 4  # a row that is nearly certain of something
    p["class_weights"][7] = 0
    p["token_weights"][2] = 0
    p["targets"] = torch.randint(VOCAB, (ROWS,), generator=g)
    p["targets"][[1, 6, 12]] = IGNORED
    p["targets"][5] = 7  # the class that weighs nothing
    p["targets"][9] = p["targets"][8]
    return p


def solve(p, o):
    """Per-token values and gradients of one case."""
    x, weight, bias = (p[k].clone().requires_grad_() for k in ("x", "weight", "bias"))
    targets = torch.tensor(o["targets"]) if "targets" in o else p["targets"]
    counted = targets != IGNORED
    any_class = torch.where(counted, targets, 0)
    class_weights = p["class_weights"] if o["class_weights"] else None

    z = F.linear(x, weight, bias if o["bias"] else None)
    u = o["softcap"] * torch.tanh(z / o["softcap"]) if o["softcap"] else z
    v = u / o["temperature"]
    check_maximum(z, v)

    def cross_entropy(reduction):
        return F.cross_entropy(v, targets, weight=class_weights, ignore_index=IGNORED, reduction=reduction,
                               label_smoothing=o["label_smoothing"])

    policy = torch.distributions.Categorical(logits=v)
    lse = torch.logsumexp(v, 1)
    values = dict(loss=cross_entropy("none"), token_z_loss=o["z_loss"] * lse**2, log_prob=policy.log_prob(any_class),
                  logsumexp=lse, entropy=policy.entropy(), max_logit=v.max(1).values, predicted=v.argmax(1))
    values = {k: torch.where(counted, t, torch.zeros_like(t)) for k, t in values.items()}

    token_weights = p["token_weights"] if o["token_weights"] else torch.ones(ROWS, dtype=torch.float64)
    normaliser = 1.0
    if o["log_prob_gradient"]:  # the layer's loss is the negative log-probability
        main = -(token_weights * values["log_prob"]).sum()
    elif o["reduction"] == "none":
        main = (token_weights * values["loss"]).sum()
    else:
        main = cross_entropy(o["reduction"])
        if o["reduction"] == "mean":
            normaliser = (class_weights[targets[counted]] if o["class_weights"] else counted.double()).sum()
    objective = main + (token_weights * values["token_z_loss"]).sum() / normaliser
    if o["entropy_weights"]:
        objective = objective + (p["entropy_weights"] * values["entropy"]).sum() / normaliser
    objective = o["scale"] * objective
    objective.backward()

    result = {k: elements(t) for k, t in values.items()}
    result.update(objective=objective.item(), dx=elements(x.grad), dweight=elements(weight.grad))
    if o["bias"]:
        result["dbias"] = elements(bias.grad)
    return result


def check_maximum(z, v):
    """The predicted token is beyond doubt: also for logits that were rounded to bf16."""
    for t, gap in ((z, 1 / 64), (v, 1e-5)):
        best = t.topk(2).values
        assert ((best[:, 0] - best[:, 1]) > gap * best[:, 0].abs()).all(), "draw other inputs"


def elements(t):
    return t.detach().flatten().tolist()


def main():
    p = problem()
    cases = []
    for name, options in CASES.items():
        o = {**PLAIN, **options}
        cases.append(dict(name=name, **o, mean=o["reduction"] == "mean", **solve(p, o)))
        for key in ("reduction", "log_prob_gradient"):  # the layer expresses these by token weights and `mean`
            cases[-1].pop(key)
        for key in ("bias", "class_weights", "token_weights", "entropy_weights"):
            cases[-1]["with_" + key] = cases[-1].pop(key)
    document = dict(torch=torch.__version__.split("+")[0], rows=ROWS, hidden=HIDDEN, vocab=VOCAB,
                    **{k: elements(t) for k, t in p.items()}, cases=cases)
    OUT.write_text(text(document) + "\n")
    print(f"{OUT.name}: {len(cases)} cases, {OUT.stat().st_size} bytes")


def text(document):
    """A line for each array and each case's options."""
    fields = []
    for key, value in document.items():
        if key == "cases":
            value = "[\n" + ",\n".join(text(case) for case in value) + "]"
        else:
            value = json.dumps(value, separators=(",", ":"))
        fields.append(f"{json.dumps(key)}:{value}")
    return "{" + ",\n".join(fields) + "}"


if __name__ == "__main__":
    main()
