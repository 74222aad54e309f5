"""Log-probabilities of the ids that each token names, beside its lse and entropy; and what losses are made of."""
import torch
from torch.utils.flop_counter import register_flop_formula

from .functional import IGNORED, gradients_wanted, narrowest, once, operator_of_heads, prepared, returned
from .library import IdsArgs

operator = operator_of_heads("ids_log_probs", IdsArgs, (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor ids, Tensor? offsets, Tensor? log_probs, Tensor? lse, Tensor? entropy, "
    "Tensor? dlog_probs, Tensor? dlse, Tensor? dentropy, ScalarType dtype, float softcap, float temperature, SymInt chunk, "
    "bool batch_invariant, ScalarType dweight_dtype, bool[] wanted)"), ("log_probs", "lse", "entropy", "dx", "dweight", "dbias"),
    lambda ids, **_: dict(id_count=ids.numel(), ids_int64=ids.dtype == torch.int64))  # with log_probs to dentropy gradients alone


@register_flop_formula(operator.overloadpacket)
def flops(x_shape, weight_shape, bias, ids_shape, *more, **_):
    """Of the GEMMs, and forward of one dot product for each id."""
    forward, _, _, dx, dweight, _ = more[-1]
    tokens, hidden_size = x_shape
    return 2 * hidden_size * (tokens * weight_shape[0] * (1 + dx + dweight) + forward * ids_shape[0])


class IdsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ids, offsets, entropy, *options):
        log_probs, lse, entropies, *_ = operator(x, weight, bias, ids, offsets, *[None] * 6, *options, torch.float32,
                                                 [True, True, entropy, False, False, False])
        ctx.save_for_backward(x, weight, bias, ids, offsets, log_probs.clone(), lse.clone(), entropies.clone() if entropy else None)
        ctx.options = options
        return log_probs, lse, entropies

    @staticmethod
    @once
    def backward(ctx, saved, dlog_probs, dlse, dentropy):
        weight, bias, entropies = saved[1], saved[2], saved[7]
        wanted = [False] * 3 + gradients_wanted(ctx.needs_input_grad, bias, 0)
        return returned(ctx, saved[:3], operator(*saved, dlog_probs, dlse, None if entropies is None else dentropy, *ctx.options,
                                                 narrowest(weight, ctx.options[0], True), wanted)[3:])


def rows_of(offsets):
    """The token of each id."""
    return torch.repeat_interleave(offsets.diff())


def tokens_with_ids(x, ids, offsets):
    """x, ids and offsets of the tokens with an id that counts, and which tokens and ids these are."""
    counts = ids != IGNORED
    if offsets is None:
        kept = counts.any(-1)  # on a GPU the host waits for it
        return x[kept], ids[kept], None, kept, kept.unsqueeze(-1).expand(ids.shape)
    rows, sizes = rows_of(offsets), offsets.diff()
    kept = torch.zeros_like(sizes, dtype=torch.bool).index_put((rows[counts],), counts.new_ones(()))
    of_kept = kept[rows]
    return x[kept], ids[of_kept], torch.nn.functional.pad(sizes[kept].cumsum(0), (1, 0)), kept, of_kept


def linear_ids_log_probs(x, weight, ids, temperature=1.0, *, bias=None, softcap=0.0, ignore_index=IGNORED, chunk=0,
                         offsets=None, entropy=False, skip_ignored=False, batch_invariant=False):
    """log p[ids] and lse = logsumexp(v) per token, in fp32, both differentiable in x, weight and bias.

    p = softmax(v), v = logits / temperature, under a soft-cap as in linear_cross_entropy, which says more of the
    arguments. ids: int32 or int64 [..., K], with x's leading shape; or [M] with offsets [N + 1], int64 and
    rising from 0 to M, where token n's ids are ids[offsets[n]:offsets[n + 1]]. log p has ids' shape, and is 0 for
    ids that are ignore_index or -100; a token needs none. Ids may repeat. The logits themselves: log p + lse.
    entropy=True: the entropy of p comes third, differentiable as well.
    skip_ignored: tokens without an id that counts take no time, and their lse and entropy are 0; on a GPU the host
    then waits to learn which they are.
    batch_invariant: a token's results and dx do not depend, to the bit, on the other tokens (on the CPU, and in
    bf16 on Hopper GPUs). Memory is O(N K) and a chunk; the backward pass compares all pairs of a token's ids.
    """
    tokens = x.shape[:-1]
    stand_in = torch.zeros((), dtype=torch.int64, device=x.device).expand(tokens)
    (x, weight, bias, *_), (dtype, *_, softcap, temperature, invariant, chunk, _), _ = prepared(
        x, weight, bias, stand_in, ignore_index, None, None, (), temperature, softcap, chunk, batch_invariant)
    for name, t, kinds in ("ids", ids, (torch.int32, torch.int64)), ("offsets", offsets, (torch.int64,)):
        if (name == "ids" or t is not None) and (getattr(t, "dtype", 0) not in kinds or t.device != x.device):
            raise TypeError(f"{name} is {getattr(t, 'dtype', type(t).__name__)}; a tensor of {' or '.join(map(str, kinds))} on "
                            f"{x.device} is needed")
    fits = ids.shape[:-1] == tokens if offsets is None else ids.dim() == 1 and offsets.shape == (len(x) + 1,)
    if not fits or ids.dim() < 1:
        raise ValueError(f"ids has the shape {list(ids.shape)}; [..., K] with x's leading shape {list(tokens)} is needed, "
                         f"or [M] with offsets of the shape {[len(x) + 1]}")
    if ignore_index not in (None, IGNORED):
        ids = torch.where(ids == ignore_index, IGNORED, ids)
    shape = ids.shape
    if offsets is None:
        ids = ids.reshape(len(x), -1) if ids.numel() else ids.new_empty(len(x), 0)
    whole = x
    if skip_ignored:
        x, ids, offsets, kept, of_kept = tokens_with_ids(x, ids, offsets)
    given = ids.reshape(-1)
    if not ids.numel():  # one that does not count
        given, offsets = ids.new_full((1,), IGNORED), torch.arange(len(x) + 1, device=x.device).clamp(max=1)
    log_probs, *per_token = IdsLogProbs.apply(x, weight, bias, given, offsets, bool(entropy), dtype, softcap, temperature, chunk,
                                              invariant)
    log_probs, per_token = log_probs[:ids.numel()], per_token[:1 + bool(entropy)]
    if skip_ignored:
        log_probs = log_probs.new_zeros(of_kept.shape).masked_scatter(of_kept, log_probs)
        per_token = [t.new_zeros(len(whole)).masked_scatter(kept, t) for t in per_token]
    return log_probs.view(shape), *(t.view(tokens) for t in per_token)


# --- what losses are made of: the ids of a token must differ ------------------------------------------------

def log_mass(log_probs, ids, offsets=None):
    """The log of what the probabilities of a token's ids add up to; minus infinity without ids.

    log_probs, ids, offsets: as linear_ids_log_probs returns and takes them; ids of -100 do not count.
    """
    kept = torch.where(ids == IGNORED, -torch.inf, log_probs)
    if offsets is None:
        return torch.logsumexp(kept, -1)
    rows = rows_of(offsets)
    most = kept.new_full((len(offsets) - 1,), -torch.inf).scatter_reduce(0, rows, kept.detach(), "amax")
    most = most.nan_to_num(neginf=0.0)
    return torch.zeros_like(most).index_add(0, rows, (kept - most[rows]).exp()).log() + most


def renormalized(log_probs, ids, offsets=None):
    """Log-probabilities among a token's ids alone, as top-k or top-p sampling draws from them; 0 for -100."""
    mass = log_mass(log_probs, ids, offsets)
    mass = mass[..., None] if offsets is None else mass[rows_of(offsets)]
    return torch.where(ids == IGNORED, 0.0, log_probs - mass)


def topk_kl(log_probs, teacher, ids, *, reverse=False, rest=True):
    """Per token KL(teacher || student), or reversed, from both's log-probabilities of the same ids [..., K].

    rest: what mass is left to other ids is one more class, of at least 1e-6, where fp32 no longer tells it from
    rounding; else the ids' terms alone, which are a KL if both are renormalized.
    """
    terms = [[torch.where(ids == IGNORED, 0.0, t)] for t in (teacher, log_probs)]
    for term, t in zip(terms, (teacher, log_probs)) if rest else ():
        term.append(torch.log(-torch.expm1(log_mass(t, ids).clamp(max=-1e-6)))[..., None])
    p, q = (torch.cat(term, -1) for term in (reversed(terms) if reverse else terms))
    return (p.exp() * (p - q)).sum(-1)
