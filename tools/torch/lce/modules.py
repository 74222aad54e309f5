"""LinearCrossEntropy, and patch_transformers, which puts it into Hugging Face's causal models."""
import functools
import inspect
import types

import torch

from .functional import linear_cross_entropy

# model_type of the models whose logits are lm_head(base_model(...).last_hidden_state), and whose loss is their mean: those
# of model_families[] in model/config.c.
MODELS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


OPTIONS = [p.name for p in inspect.signature(linear_cross_entropy).parameters.values() if p.kind is p.KEYWORD_ONLY]


def known(options):
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{name!r} is no option of linear_cross_entropy; these are: {', '.join(OPTIONS)}")
    return options


class LinearCrossEntropy(torch.nn.Linear):
    """A head [V, H] that returns logits, or with `target` the loss of linear_cross_entropy, whose keywords `options` are."""
    options = {}

    def __init__(self, hidden_size, vocab_size, bias=False, *, device=None, dtype=None, **options):
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.options = known(options)

    def forward(self, x, target=None, **options):
        if target is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, target, self.bias, **{**self.options, **options})


def patch_transformers(model, **options):
    """Makes a causal language model compute the loss of `labels` without logits, and returns it.

    A call with labels (or shift_labels) returns loss, and logits=None: return_logits=True asks for them. The loss is the
    mean over the labels that count, or with num_items_in_batch their sum over that, as transformers has it. A call without
    labels is as before. The head's parameters, names and hooks stay, so checkpoints, DDP and FSDP are as before; patch
    before fully_shard. options: keywords of linear_cross_entropy.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a {type(model).__name__} is no model of transformers; patch the one inside it (of a PeftModel: "
                        f"get_base_model())")
    kind, head = getattr(model.config, "model_type", None), model.get_output_embeddings()
    if kind not in MODELS or type(head) is not torch.nn.Linear:
        raise TypeError(f"a {kind} model whose head is {type(head).__name__} cannot be patched; {', '.join(MODELS)} with "
                        f"an nn.Linear can")
    original = type(model).forward

    @functools.wraps(original)  # whose signature trainers look at
    def forward(self, *args, labels=None, shift_labels=None, num_items_in_batch=None, return_logits=False, **kwargs):
        if labels is None and shift_labels is None:
            return original(self, *args, **kwargs)
        as_tuple = kwargs.pop("return_dict", None) is False
        head = self.get_output_embeddings()
        if not isinstance(head, LinearCrossEntropy):  # resize_token_embeddings or an adapter made another
            raise TypeError("the model has a new head since patch_transformers; call that again")
        outputs = self.base_model(*args, **kwargs)
        hidden = outputs.last_hidden_state
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        loss = head(hidden, shift_labels.to(hidden.device), reduction="mean" if num_items_in_batch is None else "sum")
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        outputs = CausalLMOutputWithPast(loss=loss, logits=head(hidden) if return_logits else None,
                                         past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
                                         attentions=outputs.attentions)
        return outputs.to_tuple() if as_tuple else outputs

    head.__class__, head.options = LinearCrossEntropy, known(options)
    model.forward = types.MethodType(forward, model)
    return model
