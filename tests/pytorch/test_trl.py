#!/usr/bin/env python3
"""tools/torch under TRL's trainers: each with patch_trl as without."""
import copy
import functools
import os
import tempfile
import types
import warnings

from setting import DEVICE, all_close, calls_of_the_operator, close, raises, run, torch
from tap import Skip

os.environ["HF_HUB_OFFLINE"] = "1"
if torch:
    import lce

try:
    import datasets
    import tokenizers
    import transformers
    import trl
    from trl.trainer import utils
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
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **more))
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


def equals_its_own(least, kind, trainer, config, *more, model=None, **options):
    """`least` calls of the library, and the history and weights of the unpatched run."""
    model = model_of(kind, **(model or {}))
    want, weights = history(trainer, config, model, *more, **options)
    lce.patch_trl()
    with calls_of_the_operator() as calls:
        got, trained = history(trainer, config, model, *more, **options)
    lce.unpatch_trl()
    assert len(calls) >= least, f"{len(calls)} calls of the library"
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        assert w.keys() == g.keys(), w.keys() ^ g.keys()
        for name in w:
            assert abs(w[name] - g[name]) <= 1e-4 * max(1, abs(w[name])), f"step {i}, {name}: {w[name]}, patched {g[name]}"
    all_close("the weights", trained, weights, 5e-3)
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
    lce.unpatch_trl()
    own, add = utils._ChunkedLogProbFunction, utils.add_fused_lm_head
    others = (("the arguments of _ChunkedLogProbFunction are ctx, logits", "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=lambda ctx, logits: logits)),
              ("entropy would change", "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=own.forward, apply=lambda *a: [2 * t if i == 1 else t for i, t in enumerate(own.apply(*a))])),
              ("a gradient would change", "_ChunkedLogProbFunction",
               types.SimpleNamespace(forward=own.forward, apply=lambda hidden, *a: own.apply(2 * hidden - hidden.detach(), *a))),
              ("does not call _ChunkedLogProbFunction", "add_fused_lm_head",
               types.FunctionType(add.__code__, dict(vars(utils)), add.__name__, add.__defaults__)))
    for told, name, other in others:
        before = getattr(utils, name)
        setattr(utils, name, other)
        try:
            said = raises(TypeError, told, lce.patch_trl)
            assert said.startswith(f"TRL {trl.__version__} cannot be patched: ") and "or do without patch_trl" in said, said
            assert getattr(utils, name) is other and (name != "add_fused_lm_head" or utils._ChunkedLogProbFunction is own)
        finally:
            setattr(utils, name, before)
    lce.patch_trl(chunk=5)
    lce.patch_trl(chunk=7)  # in place of the one before
    ours, w = utils._ChunkedLogProbFunction, torch.ones(3, 8, device=DEVICE)
    with calls_of_the_operator(lambda *a: a[18]) as chunks:
        ours.apply(w, w, None, torch.arange(3, device=DEVICE), 1.0, 256)
    assert ours.trls is own and set(chunks) == {7}, (ours.trls, chunks)
    lce.unpatch_trl()


if __name__ == "__main__":
    run(dict(sft=sft, dpo=dpo, kto=kto, grpo=grpo, what_is_refused=what_is_refused))
