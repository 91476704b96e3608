"""From processed logits to a token: the order of a vocabulary, temperature, min_p, top_k, top_p, and the draw.

Pure functions of rows. Each takes rows [R, V] and parameters [R], all on one device; a row's result depends on
that row only, bit for bit. Two design choices ensure it. Probabilities are fixed-point numbers, whole numbers of
units of 2**-52: their sums stay below 2**53, hence are exact in float64, and the order of summation cannot
matter. Every truncation keeps a prefix of one order: larger value first, among equal values lower token id
first. A third choice keeps a seeded token where other kernels round otherwise: tokens race, each with a random
number of its own, so that none stands at a border that the probabilities of others move.

    order                        | 0 ........ n - 1 | n ............ V - 1 |
    fixed-point probabilities    |      kept        |         zero         |   n >= 1: the most likely token stays

Values must not be NaN. Knows nothing of slots, requests and penalties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from faser.kernels.interface.sampling import RACE_BLOCK

_BLOCK = 256  # columns of a block, where one entry is searched for
_SMALL_BLOCK = 64  # columns of a block, where several entries are searched for: each entry costs a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """The first W entries of the order.

    values: [R, W]; token_ids: [R, W] int64; num_sure: [R] int64, how many leading entries are certain: the
    others are tied with the last one, and a tied token with a lower id may be missing.
    """

    values: Tensor
    token_ids: Tensor
    num_sure: Tensor


def best(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the order and its value: [R] int64, [R]. The value is NaN where the row has a NaN."""
    num_rows, width = values.shape
    if width % _BLOCK:
        token_ids = values.argmax(-1, keepdim=True)
        return token_ids[:, 0], values.gather(-1, token_ids)[:, 0]
    blocks = values.reshape(num_rows, width // _BLOCK, _BLOCK)
    largest, block = blocks.amax(-1).max(-1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).argmax(-1)
    return block * _BLOCK + inside[:, 0], largest


def first_and_margin(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the order, and its value minus the next largest one (0 in a tie): [R] int64, [R]. V >= 2."""
    num_rows, width = values.shape
    each = torch.arange(num_rows, device=values.device)
    if width % _BLOCK:
        token_ids = values.argmax(-1)
        rest = values.index_put((each, token_ids), values.new_tensor(-torch.inf))
        return token_ids, values[each, token_ids] - rest.amax(-1)
    blocks = values.reshape(num_rows, width // _BLOCK, _BLOCK)
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1)
    inside = blocks[each, block]
    column = inside.argmax(-1)
    best = inside[each, column]
    inside[each, column] = -torch.inf
    maxima[each, block] = inside.amax(-1)
    return block * _BLOCK + column, best - maxima.amax(-1)


def leading(values: Tensor, width: int) -> Leading:
    """The first `width` entries of the order (all V if there are fewer). values: [R, V] float."""
    if width >= values.shape[-1]:
        ordered, token_ids = values.sort(dim=-1, descending=True, stable=True)
        return Leading(values=ordered, token_ids=token_ids, num_sure=_full(values))
    token_ids = _largest(values, width).sort(-1).values
    ordered, order = values.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    num_sure = (ordered > ordered[:, -1:]).sum(-1)
    return Leading(values=ordered, token_ids=token_ids.gather(-1, order), num_sure=num_sure)


def _largest(values: Tensor, width: int) -> Tensor:
    """Token ids [R, width] of largest values; at the edge of a tie, any of those tied.

    The `width` blocks with the largest maxima hold `width` values that nothing outside them exceeds.
    """
    num_rows, num_columns = values.shape
    if num_columns % _SMALL_BLOCK or num_columns < 2 * width * _SMALL_BLOCK:
        return values.topk(width, -1, sorted=False).indices
    blocks = values.reshape(num_rows, -1, _SMALL_BLOCK)
    chosen = blocks.amax(-1).topk(width, -1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _SMALL_BLOCK)).flatten(1)
    found = inside.topk(width, -1, sorted=False).indices
    return chosen.gather(-1, found // _SMALL_BLOCK) * _SMALL_BLOCK + found % _SMALL_BLOCK


def _full(values: Tensor) -> Tensor:
    return torch.full(values.shape[:1], values.shape[-1], device=values.device)


PROB_ONE = 2.0**52
_LOWEST = -60.0  # nats; a token that far below the most likely one has a probability of 0
_LOG2_E = 1.44269504
_LN2_HIGH = 0.693145751953125  # ln 2 in two parts of 16 bits: their products with an exponent are exact
_LN2_LOW = 49087 * 2.0**-35
_WEIGHT_TERMS = (8.312521e-3, 4.189016e-2, 0.16667114, 0.4999923, 1.0, 1.0)  # least relative error, 1.1e-7
_WEIGHT_ONE = 2.0**32  # units in which weights are summed: whole numbers, so this sum is exact too
_NUM_LEADING = 64  # a typical nucleus fits; taking them costs less than two passes over the vocabulary
_BUCKETS_PER_NAT = 64.0
_NUM_BUCKETS = 2048  # the last one takes all that is more than 32 nats below the most likely token
_CACHED_ELEMENTS = 2**18  # 1 MiB of float32; beyond, temporaries are mapped afresh each time: 4 times as slow
_DEVICE_ELEMENTS = 2**25  # 128 MiB of float32; a dozen such tensors may exist, half of them float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The truncation of SamplingMetadata as tensors [R]: min_p and top_p float64, top_k int64."""

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    def rows(self, chosen: Tensor | slice) -> "Truncation":
        return Truncation(min_p=self.min_p[chosen], top_k=self.top_k[chosen], top_p=self.top_p[chosen])


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - their maximum) / temperature, in place: 0 at the most likely token, below elsewhere.

    logits: [R, V] float32, finite maximum, overwritten. temperature: [R] float32 above 0.
    """
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def draw(fixed_probs: Tensor, arrivals: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Column [R] int64 that wins the race (`arrivals` of kernels/interface/sampling.py); its entry is above 0.

    fixed_probs: [R, W] whole numbers of any float type, a positive total below 2**53. arrivals: [R, ...] float64.
    token_ids: [W] ascending, by which columns race; None: by their own numbers.
    """
    columns, blocks = _racers(arrivals)
    width = blocks.shape[-1] * columns.shape[-1]
    if token_ids is not None:
        whole = fixed_probs.new_zeros(len(fixed_probs), width).index_copy_(1, token_ids, fixed_probs)
        return torch.searchsorted(token_ids, draw(whole, arrivals))
    each = pad(fixed_probs, (0, width - fixed_probs.shape[-1])).view(*blocks.shape, columns.shape[-1])
    won = (blocks / each.sum(-1, dtype=torch.float64)).argmin(-1)
    inside = each[torch.arange(len(each), device=each.device), won]
    return won * RACE_BLOCK + (columns / inside).argmin(-1)


def _draw_among(token_ids: Tensor, fixed_probs: Tensor, arrivals: Tensor) -> Tensor:
    """Return what `draw` does where only these tokens, [R, W] ascending in a row, have probabilities, [R, W]."""
    columns, blocks = _racers(arrivals)
    block = token_ids // RACE_BLOCK
    sums = torch.zeros_like(blocks).scatter_add_(-1, block, fixed_probs.double())
    won = (blocks / sums).argmin(-1, keepdim=True)
    times = columns.gather(-1, token_ids % RACE_BLOCK) / fixed_probs
    column = times.masked_fill_(block != won, torch.inf).argmin(-1, keepdim=True)
    return token_ids.gather(-1, column)[:, 0]


def _racers(arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the columns of a block, and those of the blocks."""
    num_blocks = max(1, arrivals.shape[-1] - RACE_BLOCK)
    return arrivals[:, :-num_blocks], arrivals[:, -num_blocks:]


def fixed_point_probs(scaled: Tensor) -> Tensor:
    """Probabilities [R, V] float32 in units of 2**-52, rounded down to whole numbers. scaled: from `scale`."""
    weights = _weights(scaled)
    total = (weights * _WEIGHT_ONE).floor_().sum(-1, dtype=torch.float64)
    return weights.mul_((PROB_ONE * _WEIGHT_ONE / total).float()[:, None]).floor_()


def _weights(scaled: Tensor) -> Tensor:
    """exp(scaled) [R, V] float32, the same bits on every machine and in the native kernels (kernels/cpu/native).

    Multiplications and additions that are rounded one by one, in this order: the exponentials of libraries differ.
    """
    nats = scaled.clamp(min=_LOWEST)
    exponent = (nats * _LOG2_E).round_()
    nats.sub_(exponent, alpha=_LN2_HIGH).sub_(exponent, alpha=_LN2_LOW)
    first, *others = _WEIGHT_TERMS
    powers = nats * first
    for term in others[:-1]:
        powers.add_(term).mul_(nats)
    powers.add_(others[-1])
    bits = powers.view(torch.int32)
    bits.add_(exponent.int(), alpha=1 << 23)
    return powers


def kept_probs(scaled: Tensor, cut: Truncation) -> Tensor:
    """The final distribution: `fixed_point_probs` where the truncation keeps a token, else 0. Not normalised."""
    fixed_probs = fixed_point_probs(scaled)
    if (cut.min_p > 0).any():
        fixed_probs = fixed_probs * _likely_enough(scaled, cut)
    if (cut.top_k > 0).any():
        fixed_probs = fixed_probs * _shortest_prefix(
            scaled, torch.ones_like(fixed_probs), _num_wanted(cut, scaled.shape[-1])
        )
    if (cut.top_p < 1).any():
        nucleus = _shortest_prefix(scaled, fixed_probs, cut.top_p * fixed_probs.sum(-1, dtype=torch.float64))
        fixed_probs = fixed_probs * (nucleus | (cut.top_p >= 1)[:, None])
    return fixed_probs


def choose(scaled: Tensor, cut: Truncation, arrivals: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """draw(kept_probs(scaled, cut), arrivals, token_ids), the same columns, faster where few tokens are kept."""
    chosen = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    rest = torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    short = _shortened(cut) if token_ids is None else chosen[:0]
    if len(short):
        kept = _keep_leading(_pick(scaled, short), cut.rows(short))
        in_order, order = kept.token_ids.sort(-1)
        chosen[short] = _draw_among(in_order, kept.fixed_probs.gather(-1, order), arrivals[short])
        rest[short] = ~kept.settled
    left = rest.nonzero()[:, 0]
    if len(left):
        fixed_probs = kept_probs(_pick(scaled, left), cut.rows(left))
        chosen[left] = draw(fixed_probs, arrivals[left], token_ids)
    return chosen


def final_probs(scaled: Tensor, cut: Truncation) -> Tensor:
    """kept_probs(scaled, cut), the same numbers, faster where few tokens are kept."""
    fixed_probs = torch.zeros_like(scaled)
    rest = torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    short = _shortened(cut)
    if len(short):
        kept = _keep_leading(_pick(scaled, short), cut.rows(short))
        fixed_probs[short] = fixed_probs[short].scatter_(-1, kept.token_ids, kept.fixed_probs)
        rest[short] = ~kept.settled
    left = rest.nonzero()[:, 0]
    if len(left):
        fixed_probs[left] = kept_probs(_pick(scaled, left), cut.rows(left))
    return fixed_probs


def rows_at_once(values: Tensor) -> int:
    """Return how many rows to process in one pass: on a CPU they fit its caches, elsewhere they bound memory."""
    if values.device.type != "cpu":
        return max(1, _DEVICE_ELEMENTS // values.shape[-1])
    return max(1, _CACHED_ELEMENTS // max(values.shape[-1], 2 * _NUM_BUCKETS))


def parts(num_rows: int, step: int) -> list[slice]:
    """Rows 0 … num_rows - 1 in pieces of `step`."""
    return [slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step)]


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows], without a copy where that is all of them. rows: ascending, distinct."""
    return values if len(rows) == len(values) else values[rows]


def _shortened(cut: Truncation) -> Tensor:
    """Rows in which the truncation may keep few tokens."""
    return ((cut.top_k > 0) | (cut.top_p < 1)).nonzero()[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptLeading:
    """token_ids: [R, W] int64, the most likely first. fixed_probs: [R, W] float32, 0 where truncated.

    settled: [R] bool, no other token is kept; else fixed_probs is meaningless.
    """

    token_ids: Tensor
    fixed_probs: Tensor
    settled: Tensor


def _keep_leading(scaled: Tensor, cut: Truncation) -> _KeptLeading:
    """The truncation, computed from the most likely tokens alone."""
    fixed_probs = fixed_point_probs(scaled)
    found = leading(scaled, _NUM_LEADING)
    ordered = fixed_probs.gather(-1, found.token_ids)
    running = ordered.cumsum(-1, dtype=torch.float64)
    width = running.shape[-1]

    everything = (cut.min_p == 0) & (cut.top_k == 0)
    num_likely = _likely_enough(found.values, cut).sum(-1)
    num_before_top_p = torch.minimum(num_likely, _num_wanted(cut, width + 1).long())
    sum_before_top_p = running.gather(-1, num_before_top_p.clamp(max=width)[:, None] - 1)[:, 0]
    target = cut.top_p * torch.where(everything, fixed_probs.sum(-1, dtype=torch.float64), sum_before_top_p)
    num_kept = (running < target[:, None]).sum(-1) + 1
    num_kept = torch.where(cut.top_p < 1, torch.minimum(num_kept, num_before_top_p), num_before_top_p)

    whole = found.num_sure == scaled.shape[-1]
    settled = whole | ((num_kept <= found.num_sure) & (everything | (num_before_top_p <= found.num_sure)))
    beyond = torch.arange(width, device=scaled.device) >= num_kept[:, None]
    return _KeptLeading(token_ids=found.token_ids, fixed_probs=ordered.masked_fill(beyond, 0.0), settled=settled)


def _likely_enough(scaled: Tensor, cut: Truncation) -> Tensor:
    """Return which tokens min_p keeps. Compares logits: the exponential might bend the order of neighbours."""
    return scaled >= cut.min_p.log().float()[:, None]


def _num_wanted(cut: Truncation, num_all: int) -> Tensor:
    """top_k as float64, `num_all` where it is off or larger."""
    return torch.where(cut.top_k > 0, cut.top_k.clamp(max=num_all), num_all).double()


def _shortest_prefix(scaled: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Mask [R, V] of the fewest first tokens of the order whose weights add up to at least `target`.

    weights: [R, V] float64 whole numbers whose sums are exact. target: [R] float64, above 0, at most the sum.
    The vocabulary is not sorted: bucket sums find the bucket of the last kept token, and only that one is sorted.
    """
    bucket = scaled.mul(-_BUCKETS_PER_NAT).clamp_(max=_NUM_BUCKETS - 1).long()  # grows along the order
    sums = torch.zeros(len(scaled), _NUM_BUCKETS, dtype=torch.float64, device=scaled.device)
    sums = sums.scatter_add_(-1, bucket, weights.double()).cumsum(-1)
    edge = torch.searchsorted(sums, target[:, None])
    before = torch.where(edge > 0, sums.gather(-1, (edge - 1).clamp(min=0)), 0.0)

    inside = bucket == edge
    found = leading(torch.where(inside, scaled, -torch.inf), int(inside.sum(-1).max()))
    entry = weights.gather(-1, found.token_ids) * inside.gather(-1, found.token_ids)
    num_short = ((before + entry.cumsum(-1, dtype=torch.float64)) < target[:, None]).sum(-1, keepdim=True)
    kept = bucket < edge
    wanted = torch.arange(entry.shape[-1], device=scaled.device) <= num_short
    return kept.scatter_(-1, found.token_ids, wanted | kept.gather(-1, found.token_ids))
