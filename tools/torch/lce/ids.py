"""Log-probabilities of the ids that each token names, beside its lse. The README makes a KL to a top-k teacher of
them, log-probabilities over a kept set, and a loss of several targets a token."""
import zlib

import torch

from .functional import IGNORED, context, dense, gradients_wanted, once, prepared, returned
from .library import IdsArgs


def call(x, weight, bias, ids, offsets, log_probs, lse, dlog_probs, dlse, dtype, softcap, temperature, chunk, invariant,
         dweight_dtype, wanted):
    """The tensors of `empty`, filled by lce_ids_log_probs in `dtype`; with log_probs to dlse gradients alone."""
    results = empty(x, weight, ids, dtype, dweight_dtype, wanted)
    if not len(x):
        return tuple(t.zero_() for t in results)
    given = dict(log_probs=log_probs, lse=lse, dlog_probs=dlog_probs, dlse=dlse)
    written = {name: t for name, t in zip(RESULTS, results) if t.numel()}
    context(x.device, dtype, "")(
        "lce_ids_log_probs", IdsArgs, tokens=len(x), hidden_size=x.shape[1], vocab_size=len(weight), chunk=chunk,
        id_count=ids.numel(), ids_int64=ids.dtype == torch.int64, narrow_dweight=dweight_dtype == dtype,
        batch_invariant=invariant, softcap=softcap, temperature=temperature, x=dense(x, dtype), weight=dense(weight, dtype),
        bias=dense(bias, dtype), ids=ids.contiguous(), offsets=dense(offsets, torch.int64),
        **{**{name: dense(t) for name, t in given.items()}, **written})
    return results


def empty(x, weight, ids, dtype, dweight_dtype, wanted):
    shapes = ids.shape, x.shape[:1], x.shape, weight.shape, weight.shape[:1]
    dtypes = torch.float32, torch.float32, dtype, dweight_dtype, torch.float32
    return tuple(x.new_empty(shape if w else 0, dtype=d) for shape, d, w in zip(shapes, dtypes, wanted))


RESULTS = "log_probs", "lse", "dx", "dweight", "dbias"
SCHEMA = ("(Tensor x, Tensor weight, Tensor? bias, Tensor ids, Tensor? offsets, Tensor? log_probs, Tensor? lse, "
          "Tensor? dlog_probs, Tensor? dlse, ScalarType dtype, float softcap, float temperature, SymInt chunk, bool invariant, "
          "ScalarType dweight_dtype, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
operator = torch.library.custom_op(
    f"lce::ids_log_probs_{zlib.crc32(SCHEMA.encode()):08x}", call, mutates_args=(), schema=SCHEMA)
operator.register_fake(lambda x, weight, bias, ids, *more: empty(x, weight, ids, more[5], *more[-2:]))


class IdsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ids, offsets, *options):
        outputs = [True] * 2 + [False] * 3
        log_probs, lse, *_ = operator(x, weight, bias, ids, offsets, *[None] * 4, *options, torch.float32, outputs)
        ctx.save_for_backward(x, weight, bias, ids, offsets, log_probs.clone(), lse.clone())
        ctx.options = options
        return log_probs, lse

    @staticmethod
    @once
    def backward(ctx, *upstream):
        _, weight, bias, *_ = ctx.saved_tensors
        narrow = weight.dtype == ctx.options[0] and not hasattr(weight, "main_grad")
        return returned(ctx, operator(*ctx.saved_tensors, *upstream, *ctx.options, weight.dtype if narrow else torch.float32,
                                      [False] * 2 + gradients_wanted(ctx.needs_input_grad, bias, 0))[2:])


def linear_ids_log_probs(x, weight, ids, temperature=1.0, *, bias=None, softcap=0.0, ignore_index=IGNORED, chunk=0,
                         offsets=None, batch_invariant=False):
    """log p[ids] and lse = logsumexp(v) per token, in fp32, both differentiable in x, weight and bias.

    p = softmax(v), v = logits / temperature, under a soft-cap as in linear_cross_entropy, which says more of the
    arguments. ids: int32 or int64 [..., K], with x's leading shape; or [M] with offsets [N + 1], int64 and
    rising from 0 to M, where token n's ids are ids[offsets[n]:offsets[n + 1]]. log p has ids' shape, and is 0 for
    ids that are ignore_index or -100; a token needs none. Ids may repeat. The logits themselves: log p + lse.
    batch_invariant: a token's results and dx do not depend, to the bit, on the other tokens (on the CPU, and in
    bf16 on Hopper GPUs). Memory is O(N K) and a chunk; the backward pass compares all pairs of a token's ids.
    """
    tokens = x.shape[:-1]
    stand_in = torch.zeros((), dtype=torch.int64, device=x.device).expand(tokens)
    (x, weight, bias, *_), (dtype, *_, softcap, temperature, invariant, chunk, _), _ = prepared(
        x, weight, bias, stand_in, None, None, None, (), temperature, softcap, chunk, batch_invariant)
    for name, t, kinds in ("ids", ids, (torch.int32, torch.int64)), ("offsets", offsets, (torch.int64,)):
        if (name == "ids" or t is not None) and (getattr(t, "dtype", 0) not in kinds or t.device != x.device):
            raise TypeError(f"{name} is {getattr(t, 'dtype', type(t).__name__)}; a tensor of {' or '.join(map(str, kinds))} on "
                            f"{x.device} is needed")
    fits = ids.shape[:-1] == tokens if offsets is None else ids.dim() == 1 and offsets.shape == (len(x) + 1,)
    if not fits or ids.dim() < 1:
        raise ValueError(f"ids has the shape {list(ids.shape)}; [..., K] with x's leading shape {list(tokens)} is needed, "
                         f"or [M] with offsets of the shape {[len(x) + 1]}")
    if ignore_index != IGNORED:
        ids = torch.where(ids == ignore_index, IGNORED, ids)
    given, shape = ids.reshape(-1), ids.shape
    if not ids.numel():  # one that does not count
        given, offsets = ids.new_full((1,), IGNORED), torch.arange(len(x) + 1, device=x.device).clamp(max=1)
    log_probs, lse = IdsLogProbs.apply(x, weight, bias, given, offsets, dtype, softcap, temperature, chunk, invariant)
    return log_probs[:ids.numel()].view(shape), lse.view(tokens)
