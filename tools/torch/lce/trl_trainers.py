"""patch_trl: TRL's trainers call _ChunkedLogProbFunction.apply in trl.trainer.utils for the log-probabilities
of tokens, and for what their metrics show; DistillationTrainer calls _chunked_divergence_loss. The patch takes the places
of these two."""
import importlib
import inspect
import sys
import types

import torch

from .divergence import linear_divergence
from .functional import linear_log_probs

OUTPUTS = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"  # in the order that TRL unpacks
OURS = {"is_top1": "correct", "log_sum_sq_probs": "log_sum_sq_probs"}  # which of linear_log_probs' outputs they are


def whole_head(x, weight, bias, scale):
    if not scale > 0:
        raise ValueError(f"the model's logit_scale is {scale}, and lce needs more than 0; call unpatch_trl")
    if hasattr(weight, "ds_id"):
        raise TypeError("DeepSpeed's ZeRO-3 splits the head, which lce needs whole; use ZeRO-2, FSDP2, or unpatch_trl")
    if hasattr(weight, "full_tensor"):  # a DTensor of FSDP2
        weight, bias = weight.full_tensor().to(x.dtype), bias if bias is None else bias.full_tensor()
    return weight, bias


class InPlace:
    """Stands in the place of TRL's function `trls`."""

    def __init__(self, trls, chunk):
        self.trls, self.chunk = trls, chunk


class LogProbs(InPlace):
    """Log-probabilities of logits c tanh(s z / c) / T, with a logit_scale s."""

    def apply(self, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
              outputs=OUTPUTS):
        weight, bias = whole_head(hidden, weight, bias, logit_scale)
        temperature, softcap = temperature / logit_scale, (final_logit_softcapping or 0) / logit_scale
        ours = [OURS[name] for name in OURS if name in outputs]
        log_probs, entropy, *more = linear_log_probs(hidden, weight, targets, temperature, bias=bias, softcap=softcap,
                                                     chunk=self.chunk, entropy="entropy" in outputs, outputs=ours)
        more, mean_logits = dict(zip(ours, more)), None
        with torch.no_grad():
            if "mean_logits" in outputs and softcap:
                mean_logits = self.trls.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, 1.0,
                                              ["mean_logits"])[3]
            elif "mean_logits" in outputs:
                row, shift = weight.mean(0, dtype=torch.float32), 0 if bias is None else bias.mean(dtype=torch.float32)
                mean_logits = torch.cat([((x * row).sum(-1) + shift) / temperature for x in hidden.split(1024)])
        is_top1 = more["correct"].bool() if "correct" in more else None
        return log_probs, entropy, more.get("log_sum_sq_probs"), mean_logits, is_top1

    def check(self, module):
        require_names("_ChunkedLogProbFunction", self.trls.forward, self.apply, "ctx")
        calls = []
        counted = types.SimpleNamespace(apply=lambda *a: calls.append(a) or self.apply(*a))
        for softcap in None, 3.0:
            compare(lambda function: of_a_tiny_model(module, function, softcap), self.trls, counted)
        if len(calls) != 2:
            raise TypeError("add_fused_lm_head does not call _ChunkedLogProbFunction")


class DivergenceLoss(InPlace):
    """The loss, the sum of the student's entropies, and the number of tokens."""

    def __call__(self, student_hidden_states, teacher_hidden_states, student_lm_head_weight, teacher_lm_head_weight,
                 completion_mask, beta, num_items_in_batch=None, student_lm_head_bias=None, teacher_lm_head_bias=None,
                 student_logit_scale=1.0, teacher_logit_scale=1.0, student_final_logit_softcapping=None,
                 teacher_final_logit_softcapping=None, temperature=1.0):
        weight, bias = whole_head(student_hidden_states, student_lm_head_weight, student_lm_head_bias, student_logit_scale)
        teacher, teacher_bias = whole_head(teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias, teacher_logit_scale)
        counts = completion_mask != 0
        total, entropies = linear_divergence(
            student_hidden_states, weight, teacher_hidden_states, teacher, {0: "forward_kl", 1: "reverse_kl"}.get(beta, "jsd"),
            beta=beta, bias=bias, teacher_bias=teacher_bias, temperature=temperature, scale=student_logit_scale,
            teacher_scale=teacher_logit_scale, softcap=student_final_logit_softcapping,
            teacher_softcap=teacher_final_logit_softcapping, mask=counts, reduction="sum", chunk=self.chunk, skip_ignored=True,
            entropy=True)
        items = counts.sum().clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=total.device)
        return total / items, entropies.sum(), counts.sum()

    def check(self, module):
        require_names("_chunked_divergence_loss", self.trls, self)
        if "_chunked_divergence_loss" not in module.DistillationTrainer._compute_loss.__code__.co_names:
            raise TypeError("DistillationTrainer does not call _chunked_divergence_loss")
        for beta, items, softcap in (0.0, None, None), (1.0, 7, 3.0), (0.3, 7, None):
            compare(lambda loss: of_two_heads(loss, beta, items, softcap), self.trls, self)


def require_names(name, trls, ours, *before):
    names = [*inspect.signature(trls).parameters]
    if names != [*before, *inspect.signature(ours).parameters]:
        raise TypeError(f"the arguments of {name} are {', '.join(names)}")


def compare(outcome, trls, ours):
    """Raises where outcome(ours), names and tensors made of random numbers on the CPU, is not that of TRL's."""
    found = []
    for function in trls, ours:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(0)
            found.append(outcome(function))
    for (name, want), (_, got) in zip(*found):
        if not (got - want).abs().max() <= 1e-4 * want.abs().max():
            raise TypeError(f"{name} would change")


def of_a_tiny_model(utils, function, softcap):
    """Returns what TRL makes of it by the function, with gradients."""
    from transformers import PhiConfig, PhiForCausalLM
    utils._ChunkedLogProbFunction = function
    model = PhiForCausalLM(PhiConfig(vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=1, final_logit_softcapping=softcap, logit_scale=0.5)).float()
    for parameter in model.lm_head.parameters():
        torch.nn.init.normal_(parameter)  # logits far apart
    tokens = torch.randint(13, (2, 17))
    utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    output = model(input_ids=tokens, labels=torch.where(tokens < 3, -100, tokens), fused_lm_head=True)
    objective = (output.log_probs * torch.rand(2, 16) + output.entropy * torch.rand(2, 16)).sum()
    gradients = torch.autograd.grad(objective, (model.model.embed_tokens.weight, *model.lm_head.parameters()))
    return [(name, output[name].detach().double()) for name in OUTPUTS] + [("a gradient", g) for g in gradients]


def of_two_heads(loss, beta, items, softcap):
    """Returns the loss of random tokens of a student and a teacher, with the student's gradients."""
    x, weight, bias = leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 9, 6), (13, 6), (13,))]
    teacher_x, teacher_weight, teacher_bias = torch.randn(2, 9, 4), torch.randn(13, 4), torch.randn(13)
    found = loss(x, teacher_x, weight, teacher_weight, torch.randint(2, (2, 9)), beta, items, bias, teacher_bias, 0.5, 2.0,
                 softcap, softcap and 2 * softcap, 0.7)
    gradients = torch.autograd.grad(found[0], leaves)
    return [*zip(("the loss", "the entropy", "the number of tokens"), found), *(("a gradient", g) for g in gradients)]


SEAMS = (("trl.trainer.utils", "_ChunkedLogProbFunction", LogProbs),
         ("trl.trainer.distillation_trainer", "_chunked_divergence_loss", DivergenceLoss))


def patch_trl(*, chunk=0):
    """Makes TRL's trainers take log-probabilities, entropies and their gradients from linear_log_probs, and
    DistillationTrainer its loss from linear_divergence.

    It acts on all trainers that use trl's add_fused_lm_head, and on DistillationTrainer, also on those made before;
    unpatch_trl takes it back. chunk: as linear_log_probs has it. mean_logits is x times W's mean row, and with a
    soft-cap TRL's own. The patch compares the arguments of TRL's functions, and their results and gradients for tiny
    heads on the CPU; where they are not as expected it raises TypeError and leaves TRL as it is.
    """
    import trl
    linear_log_probs(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 2]), chunk=chunk)  # has errors of its own
    try:
        patched = []
        for path, name, replacement in SEAMS:
            module = importlib.import_module(path)
            before = getattr(module, name)
            ours = replacement(getattr(before, "trls", before), chunk)
            try:
                ours.check(module)
            finally:
                setattr(module, name, before)
            patched.append((module, name, ours))
    except Exception as error:
        raise TypeError(f"TRL {trl.__version__} cannot be patched: {error}; use TRL 1.16, or do without patch_trl") from error
    for seam in patched:
        setattr(*seam)


def unpatch_trl():
    """Gives TRL's trainers their own functions again."""
    for path, name, _ in SEAMS:
        if module := sys.modules.get(path):
            setattr(module, name, getattr(getattr(module, name), "trls", getattr(module, name)))
