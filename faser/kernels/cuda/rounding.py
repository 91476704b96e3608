"""Weights rounded to 4 and 8 bits on a device, with the bits that interface/low_bit/rows.py defines.

On one core of the host that takes over a minute for a billion values in 4 bits. Every operation is one of torch's,
and rounds by itself. torch divides by a number, and a number by a tensor, with an inverse, which rounds once more:
so both are tensors here.
"""

import torch
from torch import Tensor

from faser.kernels.interface.low_bit.rows import INT8, SMALLEST_SPAN, STEPS, Scheme

_VALUES_AT_ONCE = 1 << 24  # temporary memory is about ten times as much in float32

Rounded = tuple[Tensor, Tensor, Tensor]


def rounded(weight: Tensor, scheme: Scheme) -> Rounded:
    """Return codes [N, K] uint8, and half floats [N, groups]: scales, and minimums, 0 where a scheme has none.

    weight: [N, K] of floats, K a multiple of the groups' size.
    """
    at_once = max(1, _VALUES_AT_ONCE // weight.shape[1])
    of_groups = _int8 if scheme is INT8 else _int4
    parts = [weight[first : first + at_once] for first in range(0, len(weight), at_once)]
    some = [of_groups(each.float().reshape(-1, scheme.group_size)) for each in parts]
    codes, scales, minimums = (torch.cat(each).view(len(weight), -1) for each in zip(*some, strict=True))
    return codes, scales.half(), minimums.half()


def _int8(groups: Tensor) -> Rounded:
    """groups: [G, values]."""
    scales = _half(_quotient(groups.abs().amax(1), 127))
    codes = (groups * _inverse(scales)[:, None]).round().clamp(-127, 127) + 128
    return codes.to(torch.uint8), scales, torch.zeros_like(scales)


def _int4(groups: Tensor) -> Rounded:
    """groups: [G, values]."""
    values = groups.t().contiguous()  # [values, G]: sums run over the values
    count = len(values)
    low, high = values.amin(0), values.amax(0)
    span = high - low
    flat = span < float(SMALLEST_SPAN)
    total = _sum(values)
    best, scales, minimums = torch.full_like(low, torch.inf), torch.zeros_like(low), torch.zeros_like(low)
    for steps in map(float, STEPS):
        inverse = torch.full_like(low, steps) / torch.where(flat, 1.0, span)
        codes = ((values - low) * torch.where(flat, 0.0, inverse)).round().clamp(0, 15)
        sum_of_codes, sum_of_squares = _sum(codes), _sum(codes * codes)
        spread = count * sum_of_squares - sum_of_codes * sum_of_codes
        slope = (count * _sum(values * codes) - sum_of_codes * total) / spread.clamp(min=1)
        scale = _half(slope)
        minimum = _half(_quotient(total - scale * sum_of_codes, count))
        misses = scale * _codes(values, scale, minimum) + minimum - values
        error = _sum(misses * misses)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        minimums = torch.where(better, minimum, minimums)
    return _codes(values, scales, minimums).t().to(torch.uint8), scales, minimums


def _codes(values: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    return ((values - minimums) * _inverse(scales)).round().clamp(0, 15)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 where that is 0."""
    none = scales == 0
    return torch.where(none, 0.0, torch.ones_like(scales) / torch.where(none, 1.0, scales))


def _quotient(values: Tensor, number: int) -> Tensor:
    return values / torch.full_like(values, number)


def _sum(values: Tensor) -> Tensor:
    """Add up values [values, G] to [G], one after the other."""
    total = torch.zeros_like(values[0])
    for each in values:
        total += each
    return total


def _half(values: Tensor) -> Tensor:
    return values.half().float()
