"""LinearCrossEntropy, and patch_transformers, which puts it into Hugging Face's causal models."""
import functools
import inspect
import types
import warnings

import torch

from .functional import linear_cross_entropy

OPTIONS = [p.name for p in inspect.signature(linear_cross_entropy).parameters.values() if p.kind is p.KEYWORD_ONLY]
TERMS = "label_smoothing", "z_loss", "class_weights", "sampling"  # which act in a patched model's training alone


def known(options, names=OPTIONS, of="linear_cross_entropy"):
    for name in options:
        if name not in names:
            raise TypeError(f"{name!r} is no option of {of}; these are: {', '.join(names)}")
    return options


class LinearCrossEntropy(torch.nn.Linear):
    """A head [V, H] that returns logits, or with `target` linear_cross_entropy, which takes the options."""
    options, instead = {}, None  # instead: what returns something else than logits in a patched model's call

    def __init__(self, hidden_size, vocab_size, bias=False, *, device=None, dtype=None, **options):
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.options = known(options)

    def forward(self, x, target=None, **options):
        if target is not None:
            return linear_cross_entropy(x, self.weight, target, self.bias, **{**self.options, **options})
        return super().forward(x) if self.instead is None else self.instead(self, x)


def heads_of(model, *kinds):
    """The head, or where PEFT's modules_to_save has copied it all copies, each of one of these classes."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    for head in heads:
        if type(head) not in kinds and not isinstance(head, LinearCrossEntropy):
            raise TypeError(f"its head is a {type(head).__module__}.{type(head).__name__}, and must be an nn.Linear; let no "
                            f"adapter target it, and after resize_token_embeddings call patch_transformers again")
    return heads


def with_head(model, instead, loss, *args, **kwargs):
    """The unpatched forward, its head replaced by instead(head, x), its loss function by loss(logits,
    ...)."""
    heads = heads_of(model)
    try:
        for part in (*heads, model):
            part.instead = loss if part is model else instead
        return type(model).unpatched.forward(model, *args, **kwargs)
    finally:
        for part in (*heads, model):
            part.instead = None


class Patched:
    """What patch_transformers puts before a model's class."""
    instead = return_logits = None

    @property
    def loss_function(self):
        return super().loss_function if self.instead is None else self.instead

    def fused(self, *, labels=None, shift_labels=None, return_logits=None, **kwargs):
        labels = shift_labels if labels is None else labels
        given = {name: t for name, t in dict(labels=labels, shift_labels=shift_labels).items() if t is not None}
        evaluated = not (self.training or torch.is_grad_enabled())
        return_logits = next(r for r in (return_logits, self.return_logits, evaluated) if r is not None)
        if not given and self.training and torch.is_grad_enabled() and not (return_logits or torch.compiler.is_compiling()):
            warnings.warn("a patched model trains without labels, so on the logits of all tokens; in place of "
                          "Trainer(label_smoothing_factor=...) give patch_transformers(label_smoothing=...)")
        if not given or return_logits and not self.training:
            return type(self).unpatched.forward(self, **given, **kwargs)
        target = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        items, losses = kwargs.get("num_items_in_batch"), []

        def instead(head, x):
            options = {name: value for name, value in head.options.items() if self.training or name not in TERMS}
            loss = linear_cross_entropy(x, head.weight, target.to(x.device), head.bias, **options,
                                        reduction="mean" if items is None else "sum",
                                        ignore_index=kwargs.get("ignore_index", -100))
            losses.append(loss if items is None else loss / torch.as_tensor(items, device=loss.device))
            return torch.nn.functional.linear(x, head.weight, head.bias) if return_logits else x.new_full((1, 1, 1), torch.nan)
        as_tuple = kwargs.pop("return_dict", self.config.return_dict) is False
        outputs = with_head(self, instead, lambda *_, **__: losses.pop(), **given, **kwargs, return_dict=True)
        if not return_logits:
            outputs = type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
        return outputs.to_tuple() if as_tuple else outputs

    def __setattr__(self, name, value):
        if name == "forward" and getattr(value, "__globals__", {}).get("__name__", "").startswith("trl."):
            raise TypeError("TRL's trainers put a loss of their own into a model, and leave the patch unused: give one without, "
                            "and call lce.patch_trl")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol):  # pickle would look for the class by its name, and find the model's own
        return revived, (type(self).unpatched,), *super().__reduce_ex__(protocol)[2:]


def revived(cls):
    return patched(cls).__new__(patched(cls))


@functools.lru_cache(None)
def patched(cls):
    names = list(inspect.signature(cls.forward).parameters)[1:]

    def forward(self, *args, **kwargs):
        return self.fused(**dict(zip(names, args)), **kwargs)
    functools.update_wrapper(forward, cls.forward).__signature__ = inspect.signature(cls.forward)  # trainers look at it
    del forward.__wrapped__  # accelerate's unwrap_model would go through to it
    return type(cls.__name__, (Patched, cls), dict(unpatched=cls, forward=forward, __module__=cls.__module__))


def become(cls, module):
    module.__class__ = cls
    if "_old_forward" in vars(module):  # which accelerate's hooks call
        module._old_forward = types.MethodType(cls.forward, module)


def transform_of(model, tokens):
    """How the model scales and soft-caps logits, seen on known ones, as options of linear_cross_entropy."""
    seen = []

    def instead(head, x):
        z = torch.logspace(-4, 6, head.out_features, dtype=torch.float64, device="cpu" if x.is_meta else x.device)
        z[1::2] *= -1
        seen.append(z.expand(1, 2, -1))
        return seen[0].clone()
    with_head(model, instead, lambda logits, labels, *_, **__: seen.append(logits) or labels.new_zeros((), dtype=torch.float32),
              tokens, labels=tokens)
    if len(seen) != 2 or seen[0].shape != seen[1].shape:
        raise TypeError("its forward does not give the head's logits to its loss_function")
    z, logits = (t.double() for t in seen)
    scale, most = (logits[0, 0, 0] / z[0, 0, 0]).item(), logits.abs().max().item()
    for softcap, curve in (0, scale * z), (most, most * torch.tanh(scale / most * z)):
        if scale > 0 and torch.allclose(logits, curve, 1e-5, 0):
            return dict(temperature=1 / scale, softcap=softcap / scale)
    raise TypeError("it does more to its logits than to scale and soft-cap them")


def check(model, options):
    """Gives the heads their options, and compares the loss of two tokens with the unpatched one."""
    tokens = torch.tensor([[1, 2]], device=model.get_input_embeddings().weight.device)
    transform = transform_of(model, tokens)
    for head in heads_of(model):
        head.options = {**options, **transform}
    if tokens.is_meta:
        return
    head(head.weight.new_zeros(2, head.in_features), tokens[0])  # fails where an option has a wrong value
    want, got = type(model).unpatched.forward(model, tokens, labels=tokens), model(tokens, labels=tokens, return_logits=False)
    if got.logits is not None:
        raise TypeError("something has replaced its forward; patch it before")
    most = 1e-3 + torch.finfo(want.logits.dtype).eps * want.logits.abs().max()
    if not abs(want.loss - got.loss) <= most:
        raise TypeError(f"of two tokens its loss is {want.loss.item():.4f}, and the patched one {got.loss.item():.4f}")


def patch_transformers(model, *, return_logits=None, **options):
    """Makes a causal language model compute the loss of `labels` without logits, and returns it.

    A call with labels (or shift_labels) returns loss, and logits=None; one without is as before.
    return_logits (here or in a call): True returns logits, too, False does not, None does in evaluation
    without gradients.
    options: linear_cross_entropy's chunk, skip_ignored, and for training alone label_smoothing, z_loss,
    class_weights, sampling. The head's parameters, names and hooks stay, so checkpoints, DDP and FSDP are as
    before; patch before fully_shard. Of a PeftModel it patches the inside.

    The forward must be base model, head (an nn.Linear), scale and soft-cap of logits, loss_function. The
    patch checks what the model makes of known logits, and compares the losses of two tokens before and after
    (not on meta); else it raises TypeError.
    """
    from transformers import PreTrainedModel
    known(options, ("chunk", "skip_ignored", *TERMS), "patch_transformers")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"a {type(inner).__name__} is no model of transformers; patch the one inside it")
    modes, before = [(m, m.training) for m in inner.modules()], {}
    try:
        before = {part: type(part) for part in (inner, *heads_of(inner, torch.nn.Linear))}
        for part in before:
            become(patched(getattr(inner, "unpatched", type(inner))) if part is inner else LinearCrossEntropy, part)
        with torch.no_grad():
            check(inner.eval(), options)
    except Exception as error:
        for part, cls in before.items():
            become(cls, part)
        raise TypeError(f"a {type(inner).__name__} cannot be patched: {error}") from error
    finally:
        for module, training in modes:
            module.training = training
    inner.return_logits = return_logits
    return model
