"""The divergence of a student's head from a teacher's, by an operator over lce_linear_divergence."""
import torch
from torch.utils.flop_counter import register_flop_formula

from .functional import (check_options, gradients_wanted, narrowest, once, operator_of_heads, prepared, returned,
                         rows_that_count)
from .library import DivergenceArgs

KINDS = "forward_kl", "reverse_kl", "jsd"  # in the order of the library's numbers
CHUNK = 2048  # the library's default on a GPU; on the CPU all dtypes are one
NARROW_CHUNKS = 4  # as many as may be summed in bf16: their roundings come to 1.6 to 1.9 times one


def further_fields(x, teacher_x, mask, **_):
    """dweight is a sum of all rows of x, times 0 where masked, so these are finite."""
    return dict(teacher_hidden_size=teacher_x.shape[1], x=x if mask is None else x.masked_fill(mask[:, None] == 0, 0))


operator = operator_of_heads("linear_divergence", DivergenceArgs, (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor teacher_x, Tensor teacher_weight, Tensor? teacher_bias, Tensor? mask, "
    "Tensor? token_weights, ScalarType dtype, int kind, float beta, float softcap, float temperature, float teacher_softcap, "
    "float teacher_temperature, SymInt chunk, ScalarType dweight_dtype, bool[] wanted)"),
    ("loss", "entropy", "dx", "dweight", "dbias"), further_fields, "cudagraph_unsafe")


@register_flop_formula(operator.overloadpacket)
def flops(x_shape, weight_shape, bias, teacher_x_shape, *more, **_):
    """Counts the GEMMs: both heads' logits, dx, dweight."""
    _, _, dx, dweight, _ = more[-1]
    return 2 * x_shape[0] * weight_shape[0] * (x_shape[1] * (1 + dx + dweight) + teacher_x_shape[1])


def dweight_dtype(x, weight, options):
    return narrowest(weight, options[0], NARROW_CHUNKS * (options[-1] or CHUNK) >= x.shape[0])


class Divergence(torch.autograd.Function):
    """A weighted sum and, at once, the gradients; or the loss of each token, and gradients by one more call."""

    @staticmethod
    def forward(ctx, x, weight, bias, teacher_x, teacher_weight, teacher_bias, mask, token_weights, options, entropy, reduce, needs):
        tensors = x, weight, bias, teacher_x, teacher_weight, teacher_bias, mask, token_weights
        wanted = gradients_wanted(needs, bias, 0) if reduce else [False] * 3
        loss, entropies, *gradients = operator(*tensors, *options, dweight_dtype(x, weight, options), [True, entropy, *wanted])
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.options, ctx.reduce, ctx.gradients = options, (options[0], ""), reduce, gradients if reduce else None
        weighted = loss if token_weights is None else loss * token_weights
        return weighted.sum() if reduce else weighted, entropies

    @staticmethod
    @once
    def backward(ctx, saved, upstream, _):
        *tensors, weights = saved
        gradients = ctx.gradients
        if gradients is None:
            if not ctx.reduce:
                weights = upstream if weights is None else weights * upstream
            wanted = gradients_wanted(ctx.needs_input_grad, tensors[2], 0)
            gradients = operator(*tensors, weights, *ctx.call, dweight_dtype(*tensors[:2], ctx.call), [True, False, *wanted])[2:]
        if not torch.compiler.is_compiling():
            ctx.gradients = None
        return returned(ctx, saved[:3], gradients, upstream if ctx.reduce else None)


def prepared_head(name, x, weight, bias, temperature, softcap, scale, chunk):
    """A head's tensors and options, as linear_cross_entropy checks them; a scale of its logits divides both options."""
    check_options({}, {f"{name}scale": scale}, {})
    if not scale > 0:
        raise ValueError(f"{name}scale is {float(scale)}; it must be above 0")
    stand_in = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.shape[:-1])
    try:
        (x, weight, bias, *_), (dtype, *_, softcap, temperature, _, chunk, _), _ = prepared(
            x, weight, bias, stand_in, None, None, None, (), temperature / scale, (softcap or 0.0) / scale, chunk, False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}{error}") from None
    return (x, weight, bias), (softcap, temperature), dtype


def linear_divergence(x, weight, teacher_x, teacher_weight, kind="forward_kl", *, beta=0.5, bias=None, teacher_bias=None,
                      temperature=1.0, teacher_temperature=None, softcap=0.0, teacher_softcap=0.0, scale=1.0,
                      teacher_scale=1.0, mask=None, token_weights=None, reduction="mean", chunk=0, skip_ignored=False,
                      entropy=False, group=None):
    """How far a student's next-token distribution p is from a teacher's, q, without either's logits of all tokens.

    With z = scale (x weight^T + bias) of a head, p = softmax(softcap tanh(z / softcap) / temperature) (softcap 0 or
    None: softmax(z / temperature)), each head with options of its own, teacher_temperature None: the student's:
      "forward_kl": KL(q || p)   "reverse_kl": KL(p || q)
      "jsd": beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q, for 0 < beta < 1
    There is no factor of temperature^2: multiply by it where distillation wants one.
    x: [..., H]; weight: [V, H]; teacher_x: [..., H'] and teacher_weight: [V, H'], with a hidden size of their own. The
    teacher's tensors get no gradient. mask: bool or integers of x's leading shape, where 0 does not count;
    token_weights: of that shape. reduction: "sum", "none", or "mean": the sum over the number of tokens that count
    (without any NaN, with gradient 0). entropy=True: also the student's entropy per token, without gradient.
    "mean" and "sum" make the gradients in the forward pass, in four GEMMs; "none" takes six. chunk: tokens at a time; 0
    lets the library choose (2,048 on a GPU). Computes, and stores a chunk's logits [chunk, V] of both heads, in fp32 on the CPU,
    and on a GPU in x's dtype or autocast's, whatever the other tensors have; statistics are fp32, and a gradient has its
    parameter's dtype. dweight is summed over chunks in fp32, or in W's dtype where there are at most four. skip_ignored:
    masked tokens take no time; on a GPU the host then waits to learn how many there are.
    """
    if group is not None:
        raise ValueError("linear_divergence needs both heads whole; gather them, or leave out group")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it can be 'forward_kl', 'reverse_kl' or 'jsd'")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it can be 'mean', 'sum' or 'none'")
    check_options(dict(token_weights=token_weights), dict(beta=beta), dict(chunk=chunk))
    tokens = x.shape[:-1]
    if teacher_x.shape[:-1] != tokens or len(teacher_weight) != len(weight) or teacher_x.device != x.device:
        raise ValueError(f"x has the shape {list(x.shape)} on {x.device} and teacher_x {list(teacher_x.shape)} on {teacher_x.device}, "
                         f"weight {list(weight.shape)} and teacher_weight {list(teacher_weight.shape)}; they need the same tokens, "
                         f"vocabulary and device")
    teacher_temperature = temperature if teacher_temperature is None else teacher_temperature
    (x, *head), own, dtype = prepared_head("", x, weight, bias, temperature, softcap, scale, chunk)
    teacher = (t if t is None else t.detach() for t in (teacher_x, teacher_weight, teacher_bias))
    (teacher_x, *teacher), teachers, _ = prepared_head("teacher_", *teacher, teacher_temperature, teacher_softcap, teacher_scale, chunk)
    for name, t in dict(mask=mask, token_weights=token_weights).items():
        if t is not None and (t.shape != tokens or t.device != x.device or (t is mask and t.is_floating_point())):
            raise ValueError(f"{name} is {t.dtype} of the shape {list(t.shape)} on {t.device}, where {list(tokens)} on "
                             f"{x.device} is needed, and of mask bool or integers")
    mask, token_weights = (t if t is None else t.reshape(-1) for t in (mask, token_weights))
    mask = None if mask is None else (mask != 0).int()
    (x, teacher_x, token_weights), in_place = rows_that_count(mask if skip_ignored else None, (x, teacher_x, token_weights), tokens)
    mask, reduce = None if skip_ignored else mask, reduction != "none"
    if reduction == "mean":
        count = len(x) if mask is None else mask.sum()
        token_weights = (x.new_ones(len(x), dtype=torch.float32) if token_weights is None else token_weights) / count
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, *head))
    options = dtype, KINDS.index(kind), beta, *own, *teachers, chunk
    loss, entropies = Divergence.apply(x, *head, teacher_x, *teacher, mask, token_weights, options, entropy, reduce, needs)
    loss = loss if reduce else in_place(loss)
    if reduction == "mean" and not len(x):
        loss = loss + torch.nan  # gradients stay 0
    return (loss, in_place(entropies.detach())) if entropy else loss
