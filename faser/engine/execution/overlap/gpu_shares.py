"""Which shares of a GPU the lanes are offered, by what its parts were measured to do. Plain arithmetic.

A pass of a draft model is bound by memory, on any part: a processor of an H200 is expected to compute about a
hundred operations while it moves a byte (780 TFLOP/s over 132 processors, some 60 GB/s for one alone), and a pass
does one with each byte of 16-bit weights for each sequence. So a draft lane is worth the bytes that it moves; and
verification, beside which drafting pays only where it computes without pause, the products that it keeps. Rates
are of parts that were alone: what lanes cost each other at the same time is measured later, with the models, and
decides among these shares.
"""

from collections.abc import Sequence

from faser.kernels.cuda.device_rates import DeviceRates, SplitRates

_WORTH = (1 / 8, 1 / 4, 1 / 2)  # of the device's bytes per second: draft models differ in what they need
# Of the device's operations per second: with much less, turns on everything win whatever is drafted beside. Below
# two thirds, which 88 of 132 processors are to the digit, and 72 of 108: whether those will do is not up to noise.
_KEPT = 0.65


def shares_for(rates: DeviceRates) -> tuple[SplitRates, ...]:
    """One to three of the measured splits, ascending by the draft lane.

    For each worth the smallest draft lane that reaches it beside verification that keeps its part. Where none
    reaches any, the one that moves most; where verification cannot keep its part, the split that leaves it most.
    """
    kept = [each for each in rates.splits if each.operations_per_s >= _KEPT * rates.operations_per_s]
    if not kept:
        return (max(rates.splits, key=lambda each: each.operations_per_s),)
    smallest = {
        each.draft: each
        for worth in _WORTH
        if (each := _first_that_moves(kept, worth * rates.bytes_per_s)) is not None
    }
    if not smallest:
        return (max(kept, key=lambda each: each.bytes_per_s),)
    return tuple(smallest[draft] for draft in sorted(smallest))


def describe(rates: DeviceRates, splits: Sequence[SplitRates]) -> str:
    """One line: "draft 12 of 132 processors, 750 of 4300 GB/s, verify 120, 709 of 780 TFLOP/s; …"."""
    return "; ".join(
        f"draft {each.draft} of {rates.num_processors} processors, {_of(each.bytes_per_s, rates.bytes_per_s, 1e9)}"
        f" GB/s, verify {each.verify}, {_of(each.operations_per_s, rates.operations_per_s, 1e12)} TFLOP/s"
        for each in splits
    )


def _of(part: float, whole: float, unit: float) -> str:
    return f"{part / unit:.0f} of {whole / unit:.0f}"


def _first_that_moves(splits: Sequence[SplitRates], bytes_per_s: float) -> SplitRates | None:
    """splits: ascending by the draft lane."""
    return next((each for each in splits if each.bytes_per_s >= bytes_per_s), None)
