#!/usr/bin/env python3
"""tools/torch under TRL's trainers: each with patch_trl as without."""
import copy
import functools
import itertools
import os
import tempfile
import types
import warnings

from setting import DEVICE, all_close, calls_of_the_operator, close, raises, run, torch
from tap import Skip

os.environ["HF_HUB_OFFLINE"] = "1"
if torch:
    import lce
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

try:
    import datasets
    import tokenizers
    import transformers
    import trl
    from lce.trl_trainers import of_two_heads
    from trl.trainer import distillation_trainer, utils
except ImportError as error:
    trl = None
    missing = error

WORDS = [f"w{i}" for i in range(60)]
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=60, eos_token_id=61, bos_token_id=62)


def needs_trl(test):
    @functools.wraps(test)
    def tested():
        if not trl:
            raise Skip(str(missing))
        if not hasattr(utils, "_ChunkedLogProbFunction"):
            raise Skip(f"TRL is {trl.__version__}; patch_trl is for 1.16")
        try:
            test()
        finally:
            lce.unpatch_trl()
    return tested


def tokenizer():
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<pad>", "<eos>", "<bos>", "<unk>"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>",
                                                bos_token="<bos>", unk_token="<unk>")


def model_of(kind, **more):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **more}))
    model.get_output_embeddings().weight.data.normal_(0, 0.3)
    return model.to(DEVICE)


def rows(*columns):
    """Texts of a few words in these columns; `label` alternates."""
    def text(i, k):
        return " ".join(WORDS[(7 * i + (3 + k) * j + k) % 60] for j in range(4 + (i + k) % 5))
    return datasets.Dataset.from_list([{c: i % 2 == 0 if c == "label" else " " + text(i, k) for k, c in enumerate(columns)}
                                       for i in range(8)])


def history(trainer, config, model, data, *more, **options):
    """Returns what each of three steps logged, and the trained model."""
    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(os.path.join(folder, "model"))  # where trainers find the reference model
        model.config._name_or_path = os.path.join(folder, "model")
        args = config(folder, report_to=[], disable_tqdm=True, max_steps=3, logging_steps=1, learning_rate=1e-2, seed=3,
                      per_device_train_batch_size=4, use_cpu=DEVICE == "cpu", bf16=False, save_strategy="no", **options)
        made = trainer(*more, model=model, args=args, train_dataset=data, processing_class=tokenizer())
        made.train()
    logs = [{name: value for name, value in step.items() if "runtime" not in name and "per_second" not in name and
             "time" not in name} for step in made.state.log_history if "loss" in step]
    assert len(logs) == 3, logs
    return logs, [p.detach() for p in model.parameters()]


def equals_its_own(least, kind, trainer, config, *more, model=None, module="functional", most=5e-3, **options):
    """`least` calls of the module's operator, and the history and weights of the unpatched run."""
    model = model_of(kind, **(model or {}))
    want, weights = history(trainer, config, model, *more, **options)
    lce.patch_trl()
    with calls_of_the_operator(module=module) as calls:
        got, trained = history(trainer, config, model, *more, **options)
    lce.unpatch_trl()
    assert len(calls) >= least, f"{len(calls)} calls of the library"
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        assert w.keys() == g.keys(), w.keys() ^ g.keys()
        for name in w:
            assert abs(w[name] - g[name]) <= 1e-4 * max(1, abs(w[name])), f"step {i}, {name}: {w[name]}, patched {g[name]}"
    all_close("the weights", trained, weights, most)
    return want


@needs_trl
def sft():
    for loss_type in "nll", "chunked_nll", "dft":
        for kind, more in (("llama", {}), ("gemma2", dict(final_logit_softcapping=3.0)), ("cohere", dict(logit_scale=0.25))):
            logs = equals_its_own(6, kind, trl.SFTTrainer, trl.SFTConfig, rows("prompt", "completion"), model=more,
                                  loss_type=loss_type)
    assert {"entropy", "mean_token_accuracy", "grad_norm"} <= logs[0].keys()


@needs_trl
def dpo():
    for kind, more in (("llama", {}), ("gemma2", dict(final_logit_softcapping=3.0))):
        logs = equals_its_own(9, kind, trl.DPOTrainer, trl.DPOConfig, rows("prompt", "chosen", "rejected"), model=more,
                              use_weighting=True)
    assert {"logits/chosen", "rewards/margins"} <= logs[0].keys()


@needs_trl
def kto():
    logs = equals_its_own(9, "llama", trl.KTOTrainer, trl.KTOConfig, rows("prompt", "completion", "label"))
    assert "logits/chosen" in logs[0]


@needs_trl
def grpo():
    def reward(completions, **_):
        return [float(len(set(c.split()))) + c.count("w1") for c in completions]
    logs = equals_its_own(6, "llama", functools.partial(trl.GRPOTrainer, reward_funcs=reward), trl.GRPOConfig, rows("prompt"),
                          num_generations=4, max_completion_length=8, beta=0.1, temperature=0.8)
    assert "entropy" in logs[0]


@needs_trl
def distillation():
    """Steps of SGD, so that the weights show the gradients."""
    kinds = ("llama", {}), ("gemma2", dict(final_logit_softcapping=3.0)), ("cohere", dict(logit_scale=0.25))
    for (kind, more), (other, others), beta in zip(kinds, kinds[1:] + kinds[:1], (0.0, 0.5, 1.0)):
        teacher = model_of(other, hidden_size=48, **others)
        logs = equals_its_own(3, kind, functools.partial(trl.DistillationTrainer, teacher_model=teacher), trl.DistillationConfig,
                              rows("prompt"), model=more, module="divergence", most=1e-6, optim="sgd", max_completion_length=8,
                              beta=beta, temperature=0.8)
    assert "entropy" in logs[0]


@needs_trl
def distillations_loss():
    """The loss alone, also of heads that are DTensors."""
    own = distillation_trainer._chunked_divergence_loss
    lce.patch_trl()
    ours = distillation_trainer._chunked_divergence_loss
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def of_shards(x, teacher_x, *more):
        heads = 0, 1, 5, 6  # weights and biases
        return ours(x, teacher_x, *(DTensor.from_local(t, mesh, [Shard(0)]) if i in heads else t for i, t in enumerate(more)))
    for beta, items, softcap in itertools.product((0.0, 0.3, 1.0), (None, 7), (None, 3.0)):
        found = []
        for loss in own, ours, of_shards:
            torch.manual_seed(3)
            found.append([t for _, t in of_two_heads(loss, beta, items, softcap)])
        for got in found[1:]:
            all_close(f"beta {beta}", got, found[0], 2e-6)
    dist.destroy_process_group()
    lce.unpatch_trl()
    assert distillation_trainer._chunked_divergence_loss is own


@needs_trl
def what_is_refused():
    """A call of what lce cannot compute; and a TRL that is not as expected, which the patch leaves as it is."""
    def call(change=lambda model: None, **more):
        model, tokens = model_of("cohere", **more), torch.arange(9, device=DEVICE)[None]
        change(model)
        utils.add_fused_lm_head(model)
        return model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    lce.patch_trl()
    assert call().log_probs.isfinite().all()
    raises(ValueError, "the model's logit_scale is -0.25, and lce needs more than 0; call unpatch_trl",
           lambda: call(logit_scale=-0.25))
    raises(TypeError, "DeepSpeed's ZeRO-3 splits the head, which lce needs whole",
           lambda: call(lambda model: setattr(model.lm_head.weight, "ds_id", 0)))
    x, w, mask, split = torch.ones(1, 3, 8), torch.ones(5, 8), torch.ones(1, 3), torch.nn.Parameter(torch.ones(5, 8))
    split.ds_id = 0
    for kind, told, weight, more in ((TypeError, "DeepSpeed's ZeRO-3 splits the head", split, {}),
                                     (ValueError, "the model's logit_scale is 0", w, dict(teacher_logit_scale=0))):
        raises(kind, told, lambda: distillation_trainer._chunked_divergence_loss(x, x, w, weight, mask, 0.5, **more))
    lce.unpatch_trl()
    own, add, loss = utils._ChunkedLogProbFunction, utils.add_fused_lm_head, distillation_trainer._chunked_divergence_loss

    def now():
        return utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss

    @functools.wraps(loss)
    def other_loss(*a, **more):
        total, *rest = loss(*a, **more)
        return 1.01 * total, *rest
    others = (("the arguments of _ChunkedLogProbFunction are ctx, logits", utils, "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=lambda ctx, logits: logits)),
              ("entropy would change", utils, "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=own.forward, apply=lambda *a: [2 * t if i == 1 else t for i, t in enumerate(own.apply(*a))])),
              ("a gradient would change", utils, "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=own.forward, apply=lambda hidden, *a: own.apply(2 * hidden - hidden.detach(), *a))),
              ("does not call _ChunkedLogProbFunction", utils, "add_fused_lm_head",
               types.FunctionType(add.__code__, dict(vars(utils)), add.__name__, add.__defaults__)),
              ("the arguments of _chunked_divergence_loss are logits", distillation_trainer, "_chunked_divergence_loss",
               lambda logits: logits),
              ("the loss would change", distillation_trainer, "_chunked_divergence_loss", other_loss),
              ("does not call _chunked_divergence_loss", distillation_trainer, "DistillationTrainer",
               types.SimpleNamespace(_compute_loss=raises)))
    for told, module, name, other in others:
        before = getattr(module, name)
        setattr(module, name, other)
        left = now()
        try:
            said = raises(TypeError, told, lce.patch_trl)
            assert said.startswith(f"TRL {trl.__version__} cannot be patched: ") and "or do without patch_trl" in said, said
            assert now() == left
        finally:
            setattr(module, name, before)
    lce.patch_trl(chunk=5)
    lce.patch_trl(chunk=7)  # in place of the one before
    ours, w = utils._ChunkedLogProbFunction, torch.ones(3, 8, device=DEVICE)
    with calls_of_the_operator(lambda *a: a[18]) as chunks:
        ours.apply(w, w, None, torch.arange(3, device=DEVICE), 1.0, 256)
    assert ours.trls is own and set(chunks) == {7}, (ours.trls, chunks)
    lce.unpatch_trl()


if __name__ == "__main__":
    run(dict(sft=sft, dpo=dpo, kto=kto, grpo=grpo, distillation=distillation,
             distillations_loss=distillations_loss, what_is_refused=what_is_refused))
