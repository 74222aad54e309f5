"""linear_cross_entropy, and linear_log_probs of one target a token: an operator over liblce.so and two ways to
differentiate it.

A scalar loss computes its gradients in the forward pass; the backward pass scales them. A loss per token
keeps O(N), and its backward pass is one more call with the tokens' weights, since dW cannot be scaled
afterwards. Where the chunk covers all tokens, the exponentials are kept for that call.
"""
import ctypes
import functools
import itertools
import threading
import traceback
import zlib
from numbers import Integral, Real

import torch
import torch.distributed as dist

from torch.utils.flop_counter import register_flop_formula

from .library import KINDS, Args, Collective, load

IGNORED = -100  # the library's
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
CODES = (torch.float32, torch.bfloat16, torch.int32)  # dtypes in the order of the library's numbers
OUTPUTS = "z_loss", "correct", "max_logit", "predicted", "log_sum_sq_probs"  # of each token, as asked for


class Context:
    """The library's context of a device, dtype and process group. One thread at a time may use it."""

    def __init__(self, device, dtype, group_name):
        self.library, self.lock, self.device = load(), threading.Lock(), device
        with torch.cuda.device(device.index if device.type == "cuda" else -1):
            self.handle = self.library.lce_create(device.type.encode(), device.index or 0, DTYPES[dtype].encode())
        self.require(self.handle)
        self.group_name = group_name
        if group_name:
            self.collective = Collective(self.exchange)  # kept: the library calls it
            self.require(self.library.lce_join(self.handle, self.group.rank(), self.group.size(), self.collective, None) == 0)

    @property
    def group(self):  # not kept: a group that outlives its program's end may abort it
        return dist.distributed_c10d._resolve_process_group(self.group_name)

    def part(self, *sizes):
        """This rank's part of the head, from all ranks' numbers of tokens, rows and vocabulary entries. All ranks
        fail, and none waits, where these do not fit together."""
        gathered = torch.empty(self.group.size(), 3, dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(gathered, torch.tensor([sizes], device=self.device), group=self.group)
        tokens, rows, vocabularies = gathered.t().tolist()
        if len(set(tokens)) > 1:
            raise ValueError(f"the group's ranks give {tokens} tokens, but need as many each: add some with a target of -100")
        if set(vocabularies) != {sum(rows)} or rows != sorted(rows, key=bool, reverse=True):
            raise ValueError(f"the group's ranks have {rows} rows of weight, which make no vocab_size of {vocabularies}; "
                             f"ranks without rows come last")
        return dict(first_row=sum(rows[:self.group.rank()]), rows=sizes[1])

    def exchange(self, _, kind, out, x, count, dtype):
        """The library's collectives, by torch.distributed."""
        try:
            dtype, ranks, kind = CODES[dtype], self.group.size(), KINDS[kind]
            shares = dict(all_reduce=count, reduce_scatter=count // ranks, all_gather=count * ranks)
            out, x = self.tensor_at(out, shares[kind], dtype), self.tensor_at(x, count, dtype)
            if kind == "all_reduce":
                dist.all_reduce(out.copy_(x), group=self.group)
            elif kind == "reduce_scatter":
                dist.reduce_scatter_tensor(out, x, group=self.group)
            else:
                dist.all_gather_into_tensor(out, x, group=self.group)
            return 0
        except Exception:
            traceback.print_exc()
            return 1

    def tensor_at(self, address, count, dtype):
        size = count * dtype.itemsize
        if self.device.type == "cpu":
            return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
        memory = dict(shape=(size,), typestr="|u1", data=(address, False), version=3)
        return torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": memory})(), device=self.device).view(dtype)

    def require(self, succeeded):
        if not succeeded:
            raise RuntimeError(self.library.lce_last_error().decode())

    def __call__(self, function, args_type, **fields):
        args = args_type(**{name: f.data_ptr() if isinstance(f, torch.Tensor) else f for name, f in fields.items()})
        with self.lock, torch.cuda.device(self.device.index if self.device.type == "cuda" else -1):
            args.stream = self.stream()
            self.require(getattr(self.library, function)(self.handle, args) == 0)

    def scale(self, out, x, factor):
        """out = factor x, a third of PyTorch's time to bf16; no pass where out is x and the factor 1."""
        with self.lock, torch.cuda.device(self.device.index):
            self.require(self.library.lce_scale(self.handle, out.data_ptr(), CODES.index(out.dtype), x.data_ptr(),
                                                CODES.index(x.dtype), x.numel(), factor.data_ptr(), self.stream()) == 0)

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None

    def held_bytes(self):
        """What the last call held at its peak, besides the caller's tensors."""
        return self.library.lce_held_bytes(self.handle)


context = functools.lru_cache(None)(Context)


# --- the operator -------------------------------------------------------------------------------------------

def dense(t, dtype=torch.float32):
    """As the library reads it. A tensor without elements has no address, and gets one."""
    return t if t is None else t.detach().to(dtype).contiguous() if t.numel() else t.new_empty(1, dtype=dtype)


def call(x, weight, bias, target, token_weights, entropy_weights, class_weights, log_prob, entropy, exps, dtype, group,
         vocab_size, label_smoothing, z_loss, softcap, temperature, invariant, chunk, sampling, mean, dweight_dtype, wanted):
    """The tensors of `empty`, filled by lce_linear_cross_entropy in `dtype`. With an earlier call's log_prob
    (and entropy, if entropy_weights are given) gradients alone; exps may be those that call kept."""
    results = empty(x, weight, dtype, dweight_dtype, wanted)
    lce, vocab_size = context(x.device, dtype, group), vocab_size or weight.shape[0]
    part = lce.part(x.shape[0], weight.shape[0], vocab_size) if group else {}
    if not x.shape[0]:
        return tuple(t.zero_() for t in results)
    loss, *rest = results
    wanted_entropy, dx, dweight, dbias, kept, token_z_loss, correct, max_logit, predicted, log_sum_sq_probs = (
        t if w else None for t, w in itertools.zip_longest(rest, wanted))
    token_z_loss = torch.empty_like(loss) if z_loss and token_z_loss is None else token_z_loss
    seed = int(torch.randint(2**63 - 1, ())) if sampling else 0
    lce("lce_linear_cross_entropy", Args, tokens=x.shape[0], hidden_size=x.shape[1], vocab_size=vocab_size, **part,
        chunk=chunk, mean=mean, scale=1,
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, temperature=temperature, sample=sampling,
        sample_seed=seed, batch_invariant=invariant, narrow_dweight=dweight_dtype != torch.float32,
        targets_int64=target.dtype == torch.int64,
        x=dense(x, dtype), weight=dense(weight, dtype), bias=dense(bias, dtype), targets=target.contiguous(),
        class_weights=dense(class_weights), token_weights=dense(token_weights), entropy_weights=dense(entropy_weights),
        known_log_prob=dense(log_prob), known_entropy=dense(entropy), exps=kept if exps is None else exps,
        loss=loss if log_prob is None else None, token_z_loss=token_z_loss, correct=correct, predicted=predicted,
        max_logit=max_logit, log_sum_sq_probs=log_sum_sq_probs, entropy=wanted_entropy, dx=dx, dweight=dweight, dbias=dbias)
    if z_loss:
        loss += token_z_loss
    return results


def empty(x, weight, dtype, dweight_dtype, wanted):
    """Per token the loss with z-loss, and what is wanted of entropy, dx, dweight, dbias, exps and OUTPUTS."""
    (n, h), v, wide = x.shape, weight.shape[0], torch.float32
    per_token, gradients = ((n,), wide), (((n, h), dtype), ((v, h), dweight_dtype), ((v,), wide))
    exps = (n, -(-v * dtype.itemsize // 128) * 128 + 4), torch.uint8
    shapes = per_token, per_token, *gradients, exps, *[per_token] * 3, ((n,), torch.int32), per_token
    return tuple(x.new_empty(shape if w else 0, dtype=d) for (shape, d), w in itertools.zip_longest(shapes, (True, *wanted)))


OPERATORS = torch.library.Library("lce", "FRAGMENT")  # a custom_op would import torch._dynamo at its first call


def operator_of(name, call, fake, schema, *tags):
    """An operator opaque to torch.compile. Its name changes with the schema: Inductor's cache on disk would call the
    operator of an earlier version by its schema. PyTorch 2.6 lacks some tags."""
    name = f"{name}_{zlib.crc32(schema.encode()):08x}"
    known = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", *tags) if hasattr(torch.Tag, tag)]
    OPERATORS.define(name + schema, tags=known)
    OPERATORS.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lce::{name}", fake, lib=OPERATORS)
    return getattr(torch.ops.lce, name).default


def operator_of_heads(name, args_type, schema, results, more, *tags):
    """An operator over lce_`name`. The schema's arguments are fields of args_type, but for dtype, dweight_dtype and `wanted`,
    a flag for each of the results; one that is not wanted has no elements. `more` computes further fields."""
    kinds, names = zip(*(argument.split() for argument in schema[1:-1].split(", ")))
    tensor_names = [name for kind, name in zip(kinds, names) if kind.startswith("Tensor")]
    operands = [name for name in tensor_names if name.endswith(("x", "weight", "bias"))]

    def empty(x, weight, dtype, dweight_dtype, wanted, ids=None, **_):
        per_token, wide = x.shape[:1], torch.float32
        shapes = dict(dx=(x.shape, dtype), dweight=(weight.shape, dweight_dtype), dbias=(weight.shape[:1], wide),
                      log_probs=(per_token if ids is None else ids.shape, wide))
        shapes = [shapes.get(result, (per_token, wide)) for result in results]
        return tuple(x.new_empty(shape if w else 0, dtype=d) for (shape, d), w in zip(shapes, wanted))

    def call(*given):
        args = dict(zip(names, given))
        tensors, (tokens, hidden_size) = empty(**args), args["x"].shape
        if not tokens:
            return tuple(t.zero_() for t in tensors)
        args |= more(**args)
        dtype, dweight_dtype, wanted = map(args.pop, ("dtype", "dweight_dtype", "wanted"))
        for key in tensor_names:
            if (t := args[key]) is not None:
                args[key] = dense(t, dtype if key in operands else torch.float32 if t.is_floating_point() else t.dtype)
        args |= {result: t for result, t, w in zip(results, tensors, wanted) if w}
        context(args["x"].device, dtype, "")(f"lce_{name}", args_type, tokens=tokens, hidden_size=hidden_size,
                                             vocab_size=len(args["weight"]), narrow_dweight=dweight_dtype == dtype, **args)
        return tensors
    schema = f"{schema} -> ({', '.join(['Tensor'] * len(results))})"
    return operator_of(name, call, lambda *given: empty(**dict(zip(names, given))), schema, *tags)


SCHEMA = ("(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weights, Tensor? entropy_weights, "
          "Tensor? class_weights, Tensor? log_prob, Tensor? entropy, Tensor(a!)? exps, ScalarType dtype, str group, "
          "SymInt vocab_size, float label_smoothing, float z_loss, float softcap, float temperature, bool invariant, "
          "SymInt chunk, float sampling, bool mean, ScalarType dweight_dtype, bool[] wanted) -> (" + ", ".join(["Tensor"] * 11) + ")")
# The tags: calls that sample differ, and the host draws their seed and may allocate.
operator = operator_of("linear_cross_entropy", call, lambda x, weight, *more: empty(x, weight, more[8], *more[-2:]), SCHEMA,
                       "nondeterministic_seeded", "cudagraph_unsafe")


@register_flop_formula(operator.overloadpacket)
def flops(x_shape, weight_shape, *more, **_):
    """Of the GEMMs: logits, unless given exponentials, dx, dweight."""
    exps, vocab_size, (_, dx, dweight, *_) = more[7], more[10], more[-1]
    return 2 * x_shape[0] * x_shape[1] * vocab_size * ((exps is None) + dx + dweight)


# --- gradients ----------------------------------------------------------------------------------------------

def gradients_wanted(needs, bias, sampling):
    """Which of dx, dweight and dbias a call makes: the library makes no dbias or sampled dweight alone."""
    dweight = needs[1] or needs[2]
    return [needs[0] or bool(sampling and dweight), dweight, dweight and bias is not None]


def narrowest(weight, dtype, once):
    """The dtype of dweight: that of weight, where the library writes dweight once, what one GEMM sums. Else fp32."""
    return dtype if once and dtype == weight.dtype and not hasattr(weight, "main_grad") else torch.float32


def dweight_dtype(x, weight, options, known=False):
    dtype, group, _, label_smoothing, *_, chunk, sampling = options
    once = known or (chunk or 1024) >= x.shape[0]  # a GPU's default chunk is no smaller; on the CPU both are fp32
    return narrowest(weight, dtype, once and not (group or label_smoothing or sampling))


def gradients_of(ctx, saved, token_weights, entropy_weights=None, mean=False, log_prob=None, entropy=None, exps=None):
    x, weight, bias, target, _, class_weights = saved[:6]
    wanted = gradients_wanted(ctx.needs_input_grad, bias, ctx.options[-1])
    return operator(x, weight, bias, target, token_weights, entropy_weights, class_weights, log_prob, entropy, exps, *ctx.options,
                    mean, dweight_dtype(x, weight, ctx.options, log_prob is not None), [False, *wanted, False])[2:5]


def returned(ctx, parameters, gradients, factor=None):
    """What backward() returns: factor times the gradients, in the parameters' dtypes. Eager mode overwrites
    the gradients, and adds to a parameter's main_grad (Megatron's) instead of returning one."""
    functional, results = torch.compiler.is_compiling(), [None] * len(ctx.needs_input_grad)
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        if not ctx.needs_input_grad[i]:
            continue
        main_grad = None if functional else getattr(parameter, "main_grad", None)
        dtype = parameter.dtype if main_grad is None else main_grad.dtype
        if factor is not None and functional:
            gradient = gradient * factor
        elif factor is not None:
            out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
            if out.is_cuda and dtype in DTYPES:
                context(out.device, *ctx.options[:2]).scale(out, gradient, factor)
            else:
                torch.mul(gradient, factor, out=out)
            gradient = out
        if main_grad is None:
            results[i] = gradient.to(dtype)
        else:
            main_grad.add_(gradient)
    return tuple(results)


class Constant(torch.autograd.Function):
    """The first `count` tensors, which cannot be differentiated, though they depend on the others, too."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("linear_cross_entropy has no second derivative")


def once(backward):
    """backward(ctx, saved, *upstream), whose saved tensors are read once: hooks may free what they have handed out.
    PyTorch's once_differentiable would return a constant where nothing upstream needs a gradient."""
    def refusing(ctx, *upstream):
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # grad mode: create_graph=True
            return gradients
        return Constant.apply(len(gradients), *gradients, *saved[:3], *upstream)
    return refusing


class Reduced(torch.autograd.Function):
    """Sum or mean, outputs and, at once, the gradients; a second backward pass makes them again."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, token_weights, class_weights, options, outputs, mean, needs):
        wanted = gradients_wanted(needs, bias, options[-1])
        loss, _, dx, dweight, dbias, _, *more = operator(
            x, weight, bias, target, token_weights, None, class_weights, None, None, None, *options, mean,
            dweight_dtype(x, weight, options), [False, *wanted, False, *outputs])
        ctx.save_for_backward(x, weight, bias, target, token_weights, class_weights)
        ctx.options, ctx.mean, ctx.gradients = options, mean, (dx, dweight, dbias)
        total = (loss if token_weights is None else loss * token_weights).sum()
        if not mean:
            return total, *more
        counted = target != IGNORED
        if class_weights is not None:
            counted = counted * class_weights[target.clamp(0, len(class_weights) - 1)]
        count = counted.sum()
        for term in (total, count) if options[1] else ():  # a group's mean is over all ranks' tokens
            dist.all_reduce(term, group=context(x.device, *options[:2]).group)
        return total / count, *more

    @staticmethod
    @once
    def backward(ctx, saved, upstream, *_):
        gradients = ctx.gradients or gradients_of(ctx, saved, saved[4], None, ctx.mean)
        if not torch.compiler.is_compiling():
            ctx.gradients = None
        return returned(ctx, saved[:3], gradients, upstream)


class PerToken(torch.autograd.Function):
    """Loss, entropy and outputs of each token, in O(N), or with exponentials kept for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, token_weights, class_weights, options, outputs, want_entropy, differentiated):
        _, group, _, label_smoothing, z_loss, softcap, _, invariant, chunk, sampling = options
        known = not (label_smoothing or z_loss or sampling) and class_weights is None
        ctx.kept = known and differentiated and len(x) <= chunk and not (
            group or softcap or invariant or torch.compiler.is_compiling())
        loss, entropy, _, _, _, exps, *more = operator(
            x, weight, bias, target, None, None, class_weights, None, None, None, *options, False, torch.float32,
            [want_entropy, False, False, False, ctx.kept, *outputs])
        ctx.save_for_backward(x, weight, bias, target, token_weights, class_weights, -loss if known else None,
                              entropy.clone() if known and want_entropy else None, exps if ctx.kept else None)
        ctx.options, ctx.want_entropy = options, want_entropy
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # an entropy that is not differentiated costs nothing
        return loss if token_weights is None else loss * token_weights, entropy, *more

    @staticmethod
    @once
    def backward(ctx, saved, dloss, dentropy, *_):
        if dloss is None and dentropy is None:
            return (None,) * len(ctx.needs_input_grad)
        if dloss is None:
            dloss = torch.zeros_like(dentropy)
        weights, _, log_prob, entropy, exps = saved[4:]
        dloss = dloss if weights is None else dloss * weights
        if not ctx.want_entropy or dentropy is None:
            dentropy = entropy = None
        # They serve once; a second backward pass makes them again. `data` has a version of its own.
        exps, ctx.kept = exps.data if ctx.kept else None, False
        return returned(ctx, saved[:3], gradients_of(ctx, saved, dloss, dentropy, False, log_prob, entropy, exps))


# --- functions ----------------------------------------------------------------------------------------------

def check_options(weights, numbers, integers):
    """Raises where one of these options is of a wrong type or wants a gradient."""
    for name, value in itertools.chain(weights.items(), numbers.items()):
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, but is a constant here; give {name}.detach()")
    for name, value in numbers.items():
        number = value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, (Real, torch.SymFloat, torch.SymInt))
        if not number:
            raise TypeError(f"{name} is {value!r}, where a number is needed")
    for name, value in integers.items():
        if not isinstance(value, (Integral, torch.SymInt)) and (value is not None or name == "chunk"):
            raise TypeError(f"{name} is {value!r}, where an integer is needed")


def prepared(x, weight, bias, target, ignore_index, group, vocab_size, outputs, temperature, softcap, chunk, invariant,
             token_weights=None, class_weights=None, label_smoothing=0.0, z_loss=0.0, sampling=0.0):
    """The tensors with one axis of tokens, the options, and flags of outputs; wrong arguments raise."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError("torch.func's transforms do not know this function; use torch.autograd.grad or backward()")
    if not isinstance(outputs, (tuple, list)) or not all(name in OUTPUTS for name in outputs):
        raise ValueError(f"outputs is {outputs!r}; it can have {', '.join(OUTPUTS)}, in a tuple")
    if group is not None and not hasattr(group, "group_name"):
        raise TypeError(f"group is {group!r}, where a ProcessGroup of torch.distributed is needed")
    if invariant and (group is not None or sampling):
        raise ValueError("batch_invariant goes with neither sampling nor group")
    softcap, per_token = 0.0 if softcap is None else softcap, None
    if isinstance(temperature, torch.Tensor) and temperature.dim():
        temperature, per_token = 1.0, temperature
        if bias is not None or softcap:
            raise ValueError("a temperature per token goes with neither bias nor softcap")
    weights = dict(token_weights=token_weights, class_weights=class_weights, temperature=per_token)
    check_options(weights, dict(label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, temperature=temperature,
                                sampling=sampling), dict(chunk=chunk, ignore_index=ignore_index, vocab_size=vocab_size))
    if 0 <= temperature < 1e-6:
        raise ValueError(f"temperature is {float(temperature)}; it can be any number from 1e-06 on")  # the library's 0 is none
    given = dict(x=x, weight=weight, target=target, bias=bias, **weights)
    for name, t in given.items():
        if not isinstance(t, torch.Tensor) and (t is not None or name in ("x", "weight", "target")):
            raise TypeError(f"{name} is of type {type(t).__name__}, where a torch.Tensor is needed")
        if hasattr(t, "to_local"):
            raise TypeError(f"{name} is a DTensor; call the module whose hooks gather it, or give to_local() with its group")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has the shape {list(x.shape)} and weight {list(weight.shape)}; [..., H] and [V, H] are needed")
    tokens, vocab, rows = x.shape[:-1], weight.shape[:1], weight.shape[0]
    if group is not None:
        vocab = (vocab_size or rows * group.size(),)
    elif vocab_size not in (None, rows):
        raise ValueError(f"vocab_size is {vocab_size} and weight has {rows} rows, which without a group are all")
    floats, integers = {torch.float32, torch.bfloat16}, {torch.int32, torch.int64}
    shapes = dict(x=x.shape, weight=(rows, x.shape[-1]), bias=(rows,), class_weights=vocab)
    for name, t in given.items():
        shape, dtypes = shapes.get(name, tokens), integers if name == "target" else floats
        if t is None:
            continue
        if t.layout is not torch.strided:
            raise TypeError(f"{name} is a tensor of layout {t.layout}; give {name}.to_dense()")
        if t.shape != shape:
            raise ValueError(f"{name} has the shape {list(t.shape)}, where {list(shape)} is needed")
        if t.dtype not in dtypes:
            raise TypeError(f"{name} is {t.dtype}, where {' or '.join(sorted(map(str, dtypes)))} is needed")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}; move one of them")
    kind, dtype = x.device.type, x.dtype
    if kind != "cuda":
        dtype = torch.float32
    elif torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in floats:
            raise TypeError(f"autocast asks for {dtype}, where torch.bfloat16 is needed: torch.autocast(dtype=torch.bfloat16)")
    if ignore_index not in (None, IGNORED):
        target = torch.where(target == ignore_index, IGNORED, target)
    if per_token is not None:
        per_token = torch.where(target == IGNORED, 1.0, torch.where(per_token >= 1e-6, per_token, torch.nan))
        x = (x / per_token.unsqueeze(-1)).to(x.dtype)
    flat = None if token_weights is None else token_weights.reshape(-1)
    tensors = (x.reshape(-1, x.shape[-1]), weight, bias, target.reshape(-1), flat, class_weights)
    options = (dtype, group.group_name if group is not None else "", vocab[0], label_smoothing, z_loss, softcap, temperature,
               bool(invariant), chunk, sampling)
    return tensors, options, [name in outputs for name in OUTPUTS if outputs]


def rows_that_count(counts, tensors, shape):
    """Their rows where counts, None: all, is true; and what scatters a result per token over all."""
    if counts is None:
        return tensors, lambda result: result.view(shape)
    kept = counts.nonzero()[:, 0]  # on a GPU the host waits for it
    return [t if t is None else t.index_select(0, kept) for t in tensors], lambda result: (
        result.new_zeros(len(counts)).index_copy(0, kept, result).view(shape))


def counted_alone(tensors, skip_ignored, group, shape):
    """The tensors of the tokens to compute, and what scatters a result per token over all."""
    if skip_ignored and group is not None:
        raise ValueError("skip_ignored is not for a group, whose ranks must give equal numbers of tokens")
    x, weight, bias, target, token_weights, class_weights = tensors
    (x, target, token_weights), in_place = rows_that_count(target != IGNORED if skip_ignored else None,
                                                           (x, target, token_weights), shape)
    return (x, weight, bias, target, token_weights, class_weights), in_place


def pytorchs_names(function):
    """Takes those of torch.nn.functional.linear_cross_entropy, too, whose `weight` is that of classes."""
    @functools.wraps(function)
    def renamed(*args, options=None, **given):  # options: PyTorch's own chunks
        weight = "class_weights" if len(args) > 1 or "linear_weight" in given else "weight"
        ours = dict(input="x", linear_weight="weight", linear_bias="bias", weight=weight)
        named = [(ours.get(name, name), value) for name, value in given.items()]
        if len(dict(named)) < len(named):
            raise TypeError(f"of {', '.join(given)} two are names of one argument")
        return function(*args, **dict(named))
    return renamed


@pytorchs_names
def linear_cross_entropy(x, weight, target, bias=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0,
                         z_loss=0.0, softcap=0.0, temperature=1.0, token_weights=None, class_weights=None, chunk=0,
                         sampling=0.0, skip_ignored=False, batch_invariant=False, group=None, vocab_size=None, outputs=()):
    """cross_entropy(x @ weight.T + bias, target) without the logits of all tokens.

    With z = x weight^T + bias of a token, v = softcap tanh(z / softcap) / temperature (softcap 0 or None: z /
    temperature), and lse = logsumexp(v):
      loss = (PyTorch's cross_entropy of v, class_weights, label_smoothing, + z_loss lse^2) token_weights
    x: [..., H]; weight: [V, H]; bias: [V]; target: int32 or int64 of x's leading shape, where ignore_index
    and -100 are not counted; token_weights: of target's shape; class_weights: [V]. label_smoothing under a
    softcap stores a chunk's logits in x's dtype, and goes with none of sampling, batch_invariant, group and the
    output log_sum_sq_probs. All options are constants: one that requires a gradient is refused.
    temperature: a number, or without bias and softcap a tensor of target's shape. x is then divided by it,
    and rounded to x's dtype; below 1e-6 the token's loss is NaN.
    reduction: "sum", "none" (of target's shape), or "mean": the sum over the class weights of the tokens that
    count, as in PyTorch, which no token_weights change; without tokens NaN, with gradient 0. Results are
    fp32.
    chunk: tokens at a time; 0 lets the library choose. sampling: the mass from which a tile of the gradient
    is always kept (liblce.h); 0: exact; torch.manual_seed repeats the draws. skip_ignored: tokens that do not
    count take no time; on a GPU the host then waits to learn how many do.
    batch_invariant: a token's loss, outputs and, but for "mean", gradient of x have the same bits wherever it
    stands, whatever tokens are beside it, in chunks of any size. On the CPU, slower, and in bf16 on Hopper
    with H a multiple of 8; with neither sampling nor group, and no exponentials are kept.
    outputs: names of what is returned after the loss, per token, without gradient, 0 where it does not count:
    "z_loss" (its part of the loss, before token_weights), "correct" (1 where "predicted" is the target, else
    0), "predicted" (the first j of max v, int32), "max_logit" (max v), "log_sum_sq_probs" (the log of the sum of
    softmax(v)'s squares). Sampling has z_loss alone.

    group: a process group over whose ranks the head is split: weight and bias are this rank's part, of
    vocab_size rows in all (None: all parts are equal). The parts follow one another in the order of the ranks
    and may differ in size, as those of torch.chunk, DTensor's Shard(0) and torch.tensor_split do; the last ones
    may be empty. Every rank gives its own tokens, as many as the others, and gets their losses, their "sum" and
    dx; dweight and a "mean" are over all ranks' tokens. All ranks make the same calls, backward passes too, a
    "sum" or "mean" with the same upstream gradient. Ranks whose numbers of tokens or rows do not fit together
    all raise ValueError; on a GPU the host waits for that.

    The names of torch.nn.functional.linear_cross_entropy work as well: input, linear_weight, linear_bias, and
    weight for class_weights where the head's is linear_weight or given by position; its `options` (its own
    chunks) do nothing.

    Computes in fp32 on the CPU, and on a GPU in x's dtype or autocast's, fp32 or bf16; sums are fp32. A
    gradient has its parameter's dtype, or is added to weight.main_grad if present. Only needed gradients are
    computed, those of "mean" and "sum" in the forward pass, those of "none" by one more call in the backward
    pass. dweight is summed in fp32 over chunks; in one chunk, or for "none" without label_smoothing, z_loss,
    class_weights, sampling and group, it is written in weight's dtype at once. Where `chunk` is given and
    covers all tokens, "none" without these and a softcap keeps the logits' exponentials, N V elements, for
    the first backward pass, which otherwise computes the logits again; not in compiled code. Wrong arguments
    raise ValueError, TypeError or, by the library, RuntimeError. On a GPU a target out of range makes the
    loss NaN.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it can be 'mean', 'sum' or 'none'")
    tensors, options, flags = prepared(x, weight, bias, target, ignore_index, group, vocab_size, outputs, temperature, softcap,
                                       chunk, batch_invariant, token_weights, class_weights, label_smoothing, z_loss, sampling)
    tensors, in_place = counted_alone(tensors, skip_ignored, group, target.shape)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors[:3])
    if reduction == "none":
        loss, _, *more = PerToken.apply(*tensors, options, flags, False, any(needs))
        loss = in_place(loss)
    else:
        loss, *more = Reduced.apply(*tensors, options, flags, reduction == "mean", needs)
    return (loss, *(in_place(more[OUTPUTS.index(name)].detach()) for name in outputs)) if outputs else loss


def linear_log_probs(x, weight, target, temperature=1.0, *, bias=None, softcap=0.0, ignore_index=-100, chunk=0, entropy=True,
                     skip_ignored=False, batch_invariant=False, group=None, vocab_size=None, outputs=()):
    """log p[target] and the entropy of p = softmax((x @ weight.T + bias) / temperature) per token, in fp32.

    Both can be differentiated, for GRPO, PPO or DPO: the forward pass keeps O(N), the backward pass is one
    more call. They are 0 where the target is ignore_index. entropy=False returns None for entropies. Without
    group the backward pass takes weight in blocks of rows and holds no fp32 sum of dweight. A chunk of all
    tokens keeps N V elements of x's dtype for the backward pass, which then takes two GEMMs instead of three.
    The other arguments: linear_cross_entropy.

    With ids [..., K] in place of a target: log p of each and lse, and entropies where they are asked for, as
    linear_ids_log_probs.
    """
    tensors, options, flags = prepared(x, weight, bias, target, ignore_index, group, vocab_size, outputs, temperature, softcap,
                                       chunk, batch_invariant)
    tensors, in_place = counted_alone(tensors, skip_ignored, group, target.shape)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:3])
    loss, entropies, *more = PerToken.apply(*tensors, options, flags, entropy, differentiated)
    return (-in_place(loss), in_place(entropies) if entropy else None,
            *(in_place(more[OUTPUTS.index(name)].detach()) for name in outputs))
