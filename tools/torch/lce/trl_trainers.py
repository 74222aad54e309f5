"""patch_trl: TRL's trainers call _ChunkedLogProbFunction.apply in trl.trainer.utils for the log-probabilities
of tokens, and for what their metrics show. The patch takes that name's place."""
import inspect
import types

import torch

from .functional import linear_log_probs

NAMES = ["ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
         "outputs"]
OUTPUTS = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"  # in the order that TRL unpacks
OURS = {"is_top1": "correct", "log_sum_sq_probs": "log_sum_sq_probs"}  # which of linear_log_probs' outputs they are


class LogProbs:
    """In place of TRL's function, `trls`. Its logits are c tanh(s z / c) / T, with a logit_scale s."""

    def __init__(self, trls, chunk):
        self.trls, self.chunk = trls, chunk

    def apply(self, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=OUTPUTS):
        if not logit_scale > 0:
            raise ValueError(f"the model's logit_scale is {logit_scale}, and lce needs more than 0; call unpatch_trl")
        if hasattr(weight, "ds_id"):
            raise TypeError("DeepSpeed's ZeRO-3 splits the head, which lce needs whole; use ZeRO-2, FSDP2, or unpatch_trl")
        temperature, softcap = temperature / logit_scale, (softcap or 0) / logit_scale
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


def outcome(utils, softcap):
    """What TRL makes of a tiny model, with gradients."""
    from transformers import PhiConfig, PhiForCausalLM
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        model = PhiForCausalLM(PhiConfig(vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=1, final_logit_softcapping=softcap, logit_scale=0.5)).float()
        for parameter in model.lm_head.parameters():
            torch.nn.init.normal_(parameter)  # logits far apart
        tokens = torch.randint(13, (2, 17))
        utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
        output = model(input_ids=tokens, labels=torch.where(tokens < 3, -100, tokens), fused_lm_head=True)
        objective = (output.log_probs * torch.rand(2, 16) + output.entropy * torch.rand(2, 16)).sum()
        gradients = torch.autograd.grad(objective, (model.model.embed_tokens.weight, *model.lm_head.parameters()))
    return [output[name].detach().double() for name in OUTPUTS] + list(gradients)


def patch_trl(*, chunk=0):
    """Makes TRL's trainers take log-probabilities, entropies and their gradients from linear_log_probs.

    It acts on all trainers that use trl's add_fused_lm_head, also on those made before; unpatch_trl takes it
    back. chunk: as linear_log_probs has it. mean_logits is x times W's mean row, and with a soft-cap TRL's own.
    The patch compares the arguments of TRL's function, and its results and gradients for a tiny model on the CPU;
    where they are not as expected it raises TypeError and leaves TRL as it is.
    """
    import trl
    linear_log_probs(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 2]), chunk=chunk)  # has errors of its own
    before = utils = None
    try:
        from trl.trainer import utils
        before = utils._ChunkedLogProbFunction
        trls, calls = getattr(before, "trls", before), []
        names, ours = list(inspect.signature(trls.forward).parameters), LogProbs(trls, chunk)
        if names != NAMES:
            raise TypeError(f"the arguments of _ChunkedLogProbFunction are {', '.join(names)}")
        for softcap in None, 3.0:
            utils._ChunkedLogProbFunction = trls
            want = outcome(utils, softcap)
            utils._ChunkedLogProbFunction = types.SimpleNamespace(apply=lambda *a: calls.append(a) or ours.apply(*a))
            for name, w, got in zip((*OUTPUTS, *["a gradient"] * 3), want, outcome(utils, softcap)):
                if not (got - w).abs().max() <= 1e-4 * w.abs().max():
                    raise TypeError(f"{name} would change")
        if len(calls) != 2:
            raise TypeError("add_fused_lm_head does not call _ChunkedLogProbFunction")
        before = ours
    except Exception as error:
        raise TypeError(f"TRL {trl.__version__} cannot be patched: {error}; use TRL 1.16, or do without patch_trl") from error
    finally:
        if before:
            utils._ChunkedLogProbFunction = before


def unpatch_trl():
    """Gives TRL's trainers their own function again."""
    from trl.trainer import utils
    utils._ChunkedLogProbFunction = getattr(utils._ChunkedLogProbFunction, "trls", utils._ChunkedLogProbFunction)
