"""LinearCrossEntropy, and patch_transformers, which puts it into Hugging Face's causal models."""
import functools
import inspect
import threading
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


def tried(options, vocab_size, bias):
    """Raises where options have a wrong value: a loss of one token on the CPU, with a head [V, 1]."""
    x, weight = torch.zeros(1, 1, device="cpu"), torch.zeros(vocab_size, 1, device="cpu", requires_grad=True)
    options = {name: torch.ones_like(v, device="cpu") if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    with torch.enable_grad(), torch.random.fork_rng(devices=()):  # sampling draws
        linear_cross_entropy(x, weight, x[0].long(), weight[:, 0] if bias else None, **options)


def transformed(z, softcap, temperature):
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return z if temperature is None else z / temperature


class LinearCrossEntropy(torch.nn.Linear):
    """A head [V, H]: logits, or with `target` linear_cross_entropy, which takes the options.

    The logits are those of the loss: softcap tanh(z / softcap) / temperature of z = x weight^T + bias.
    """
    options = {}

    def __init__(self, hidden_size, vocab_size, bias=False, *, device=None, dtype=None, **options):
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.options = known(options, [name for name in OPTIONS if name != "token_weights"], "LinearCrossEntropy")
        if options.get("group") is None:
            tried(options, vocab_size, bias)

    def forward(self, x, target=None, **options):
        options = {**self.options, **known(options)}
        if target is not None:
            return linear_cross_entropy(x, self.weight, target, self.bias, **options)
        temperature = options.get("temperature")
        if isinstance(temperature, torch.Tensor) and temperature.dim():
            temperature = temperature.unsqueeze(-1)
        return transformed(super().forward(x), options.get("softcap"), temperature)

    def extra_repr(self):
        shown = [f", {name}={list(v.shape) if isinstance(v, torch.Tensor) else repr(v)}" for name, v in self.options.items()]
        return super().extra_repr() + "".join(shown)


def caller():
    """The thread, whose call of a model is not another thread's; compiled code has one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class Head(torch.nn.Linear):
    """A patched model's head. instead: by caller, what returns something else than logits in the model's call."""
    instead = {}

    def forward(self, x):
        instead = self.instead.get(caller())
        return super().forward(x) if instead is None else instead(self, x)


def heads_of(model):
    """The head, or where PEFT's modules_to_save has copied it all copies."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    for head in heads:
        if type(head) is not torch.nn.Linear and not isinstance(head, Head):
            raise TypeError(f"its head is a {type(head).__module__}.{type(head).__name__}, and must be an nn.Linear that no "
                            f"adapter targets")
    return heads


def with_head(model, instead, loss, *args, **kwargs):
    """The unpatched forward, its head replaced by instead(head, x), its loss function by loss(logits,
    ...)."""
    heads = heads_of(model)
    for head in heads:
        if not isinstance(head, Head):  # a new one, as of resize_token_embeddings
            become(Head, head)
    try:
        for part in (*heads, model):
            if "instead" not in vars(part):
                part.instead = {}
            part.instead[caller()] = loss if part is model else instead
        return type(model).unpatched.forward(model, *args, **kwargs)
    finally:
        for part in (*heads, model):
            part.instead.pop(caller(), None)


def target_of(labels, shift_labels):
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100) if shift_labels is None else shift_labels


def placeholder(x, head):
    """What a patched head returns, [1, 1, V]: numbers that a soft-cap or a scale changes in a known way."""
    return (0.125 * (-8.0) ** (torch.arange(head.out_features, device=x.device) % 5)).to(x.dtype).expand(1, 1, -1)


def arguments(logits, labels=None, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """What a call of transformers' ForCausalLMLoss computes with."""
    return dict(logits=logits, labels=target_of(labels, shift_labels), vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch, ignore_index=ignore_index)


KEYWORDS = {*inspect.signature(arguments).parameters, "return_dict"}  # the last is the patch's


def verified(loss, used, received):
    """The loss, if loss_function receives what it was made of. Else it raises TypeError; where the host would
    have to wait to learn of other logits and labels, on a GPU and in compiled code, the loss becomes NaN."""
    for name, value in used.items():
        got = received[name]
        if isinstance(got, torch.Tensor) and isinstance(value, torch.Tensor) and got.shape == value.shape:
            most = 1e-5 + 2 * torch.finfo(value.dtype).eps if name == "logits" else 0
            equal = got is value or ((got.to(value.device) - value).abs() <= most * value.abs()).all()
            if got.requires_grad:
                raise TypeError(f"a parameter of its forward acts on {name} after the head, which the patch does not know; "
                                f"call lce.unpatch_transformers(model)")
            if equal is not True and (torch.compiler.is_compiling() or value.device.type != "cpu"):
                loss, equal = loss * torch.where(equal, 1.0, torch.nan).to(loss.device), True
        else:
            equal = type(got) is type(value) and got == value
        if not equal:
            raise TypeError(f"its forward gives its loss_function other {name} than the patch expects; call "
                            f"patch_transformers again, or lce.unpatch_transformers(model) computes that loss")
    return loss


class Patched:
    """What patch_transformers puts before a model's class. lce_patch: what it has found and been given."""
    instead = {}

    @property
    def loss_function(self):
        return self.instead.get(caller(), super().loss_function)

    def fused(self, *, labels=None, shift_labels=None, return_logits=None, **kwargs):
        labels = shift_labels if labels is None else labels
        given = {name: t for name, t in dict(labels=labels, shift_labels=shift_labels).items() if t is not None}
        patch, evaluated = self.lce_patch, not (self.training or torch.is_grad_enabled())
        return_logits = next(r for r in (return_logits, patch.return_logits, evaluated) if r is not None)
        if not given and self.training and torch.is_grad_enabled() and not (return_logits or torch.compiler.is_compiling()):
            warnings.warn("a patched model trains without labels, so on the logits of all tokens; in place of "
                          "Trainer(label_smoothing_factor=...) give patch_transformers(label_smoothing=...)")
        if not given or return_logits and not self.training:
            return type(self).unpatched.forward(self, **given, **kwargs)
        if not torch.compiler.is_compiling() and self.loss_function != patch.loss_function:
            raise TypeError("its loss_function is not the one that was patched; call patch_transformers again")
        items = kwargs.get("num_items_in_batch") if patch.divides else None
        ignore_index, made = kwargs.get("ignore_index", patch.ignore_index), []

        def instead(head, x):
            options = {name: value for name, value in patch.options.items() if self.training or name not in TERMS}
            target = target_of(labels, shift_labels)
            loss = linear_cross_entropy(x, head.weight, target.to(x.device), head.bias, **options, ignore_index=ignore_index,
                                        reduction="mean" if items is None else "sum")
            loss = loss if items is None else loss / torch.as_tensor(items, device=loss.device)
            made.append((loss, dict(labels=target.clone(), num_items_in_batch=items, ignore_index=ignore_index,
                                    vocab_size=head.out_features)))
            if return_logits:
                return torch.nn.functional.linear(x, head.weight, head.bias)
            z = placeholder(x, head)
            made[0][1]["logits"] = transformed(z.float(), patch.options["softcap"], patch.options["temperature"]).to(x.dtype)
            return z

        def loss(*args, **received):
            (loss, used), = made
            unknown = received.keys() - patch.keywords - KEYWORDS
            if unknown and not patch.ignores_keywords:
                raise TypeError(f"its forward gives its loss_function {', '.join(sorted(unknown))}, which the patch does not know; "
                                f"call lce.unpatch_transformers(model)")
            return verified(loss, used, arguments(*args, **received))
        as_tuple = kwargs.pop("return_dict", self.config.return_dict) is False
        outputs = with_head(self, instead, loss, **given, **kwargs, return_dict=True)
        values = {name: None if name == "logits" and not return_logits else value for name, value in outputs.items()}
        return tuple(values.values()) if as_tuple else type(outputs)(**values)

    def __setattr__(self, name, value):
        if name == "loss_function":
            raise TypeError("a patched model has a loss_function of its own; call lce.unpatch_transformers(model) before")
        module = getattr(value, "__globals__", {}).get("__name__", "") if name == "forward" else ""
        if module.startswith("trl."):
            raise TypeError("TRL's trainers put a loss of their own into a model, and leave the patch unused: give one without, "
                            "and call lce.patch_trl")
        if module.startswith("liger_kernel."):
            raise TypeError("Liger puts a loss of its own into a model, and leaves the patch unused: choose one of "
                            "Trainer(use_liger_kernel=True) and lce.patch_transformers")
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


def transform_of(z, logits):
    """How the model scales and soft-caps logits, seen on known ones, as options of linear_cross_entropy."""
    z, logits = z.double(), logits.double()
    scale, most = (logits[0, 0, 0] / z[0, 0, 0]).item(), logits.abs().max().item()
    for softcap, curve in (0, scale * z), (most, most * torch.tanh(scale / most * z)):
        if scale > 0 and torch.allclose(logits, curve, 1e-5, 0):
            return dict(temperature=1 / scale, softcap=softcap / scale)
    raise TypeError("it does more to its logits than to scale and soft-cap them")


def check(model, options, return_logits):
    """Finds what the model does to logits and with what it calls loss_function, and compares, with and
    without num_items_in_batch: what that makes of logits that are far apart, and the model's loss."""
    tokens = torch.tensor([[1, 2, 1, 1, 2], [2, 1, 2, 2, 1]], device=model.get_input_embeddings().weight.device)
    labels = torch.tensor([[2, 0, 0, 1, 2], [1, 2, 1, 0, 0]], device=tokens.device)
    names = inspect.signature(type(model).unpatched.forward).parameters.values()
    items = dict(num_items_in_batch=7) if any(p.name == "num_items_in_batch" or p.kind is p.VAR_KEYWORD for p in names) else {}
    loss_function, given, calls = super(Patched, model).loss_function, [], []

    def instead(head, x):
        z = torch.logspace(-4, 6, head.out_features, dtype=torch.float64, device="cpu" if x.is_meta else x.device)
        z[1::2] *= -1
        given.append(z.expand(*x.shape[:-1], -1))
        return given[-1].clone()

    def loss(logits, *args, **kwargs):
        calls.append((logits, args, kwargs))
        return logits.new_zeros((), dtype=torch.float32)
    found = []
    for training in (True, False):
        given.clear(), calls.clear()
        cuda = {t.device.index for t in model.parameters() if t.is_cuda}
        with torch.random.fork_rng(devices=sorted(cuda)):  # dropout draws
            with_head(model.train(training), instead, loss, tokens, labels=labels, **items)
        if len(given) != 1 or len(calls) != 1 or given[0].shape != calls[0][0].shape:
            raise TypeError("its forward does not give the head's logits to its loss_function")
        found.append((transform_of(given[0], calls[0][0]), calls[0][2].keys()))
    if found[0] != found[1]:
        raise TypeError("its forward does something else to its logits, or gives its loss_function other keywords, in training")
    logits, args, kwargs = calls[0]
    received, options = arguments(logits, *args, **kwargs), {**options, **found[1][0]}
    divides, ignored = received["num_items_in_batch"] is not None, received["ignore_index"]
    for head in heads_of(model):
        tried(options, head.out_features, head.bias is not None)
    from transformers.loss.loss_utils import ForCausalLMLoss  # ignores what it does not know
    model.lce_patch = types.SimpleNamespace(
        options=options, return_logits=return_logits, loss_function=loss_function, divides=divides, ignore_index=ignored,
        keywords=set(kwargs), ignores_keywords=loss_function is ForCausalLMLoss)
    if tokens.is_meta:
        return
    labels[:, 2] = ignored
    z = 5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.device)
    target = target_of(labels, None).flatten().to(z.device)
    counts = (target != ignored) & (target >= 0)
    losses = torch.nn.functional.cross_entropy(z.flatten(0, -2)[counts], target[counts], reduction="none")
    for more, want in ({}, losses.mean()), (items, losses.sum() / 7 if divides else losses.mean()):
        with_head(model, instead, loss, tokens, labels=labels, **more)
        got = loss_function(z, *calls[-1][1], **calls[-1][2])
        if not torch.allclose(got.float(), want, 1e-3):
            raise TypeError(f"its loss_function makes {got.item():.4f} of known logits, not {want.item():.4f}, the cross-entropy "
                            f"of the next labels")
        whole = type(model).unpatched.forward(model, tokens, labels=labels, **more)
        got = model(tokens, labels=labels, return_logits=False, **more)
        if got.logits is not None:
            raise TypeError("something has replaced its forward; patch it before")
        most = 1e-3 + torch.finfo(whole.logits.dtype).eps * whole.logits.abs().max()
        if not abs(whole.loss - got.loss) <= most:
            raise TypeError(f"of known tokens its loss is {whole.loss.item():.4f}, and the patched one {got.loss.item():.4f}")


def inside(model):
    from transformers import PreTrainedModel
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"a {type(inner).__name__} is no model of transformers; patch the one inside it")
    return inner


def patch_transformers(model, *, return_logits=None, **options):
    """Makes a causal language model compute the loss of `labels` without logits, and returns it.

    A call with labels (or shift_labels) returns loss, and logits=None; one without is as before.
    return_logits (here or in a call): True returns logits, too, False does not, None does in evaluation
    without gradients.
    options: linear_cross_entropy's chunk, skip_ignored, batch_invariant, and for training alone
    label_smoothing, z_loss, class_weights, sampling. The head's parameters, names and hooks stay, so
    checkpoints, DDP and FSDP are as before; patch before fully_shard. Of a PeftModel it patches the inside.

    The forward must be base model, head (an nn.Linear), scale and soft-cap of logits, loss_function. The
    patch checks what the model makes of known logits, also in training, what its loss_function makes of them, and
    the model's loss before and after (not on meta); else it raises TypeError. Every call checks that loss_function
    receives what it did then of known numbers in the logits' place, without a gradient, no other keywords, and the
    call's labels, num_items_in_batch and ignore_index, and raises TypeError if not; on a GPU and in compiled code
    other logits and labels make the loss NaN, so that the host need not wait.
    """
    known(options, ("chunk", "skip_ignored", "batch_invariant", *TERMS), "patch_transformers")
    inner = inside(model)
    modes, before, patch = [(m, m.training) for m in inner.modules()], {}, getattr(inner, "lce_patch", None)
    try:
        before = {part: type(part) for part in (inner, *heads_of(inner))}
        become(patched(getattr(inner, "unpatched", type(inner))), inner)
        with torch.no_grad():
            check(inner, options, return_logits)
    except Exception as error:
        for part, cls in before.items():
            become(cls, part)
        if vars(inner).pop("lce_patch", None) and patch:
            inner.lce_patch = patch
        raise TypeError(f"a {type(inner).__name__} cannot be patched: {error}") from error
    finally:
        for module, training in modes:
            module.training = training
    return model


def unpatch_transformers(model):
    """The model as it was before patch_transformers, which it returns; call it before fully_shard."""
    inner = inside(model)
    if isinstance(inner, Patched):
        for part in inner.modules():
            if isinstance(part, (Head, Patched)):
                become(getattr(part, "unpatched", torch.nn.Linear), part)
                vars(part).pop("instead", None)
                vars(part).pop("lce_patch", None)
    return model
