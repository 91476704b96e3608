"""One row a sequence, sampled as in a step without drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from faser.engine.execution.sampling.rows import DraftedRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch
from faser.kernels.interface.sampling import NO_TOKEN
from faser.types import PositionLogprobs, SequenceError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """The outcome of one row. token_id is NO_TOKEN where error says why no token could be sampled."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: SequenceError | None = None


class Outcome(NamedTuple):
    """What one sequence gets from a step."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    error: SequenceError | None = None


def outcomes(tokens: StepTokens) -> list[Outcome]:
    """Of every sequence."""
    ends = accumulate(tokens.counts)
    return [
        Outcome(tuple(tokens.token_ids[end - count : end]), tokens.logprobs.get(at), tokens.errors.get(at))
        for at, (count, end) in enumerate(zip(tokens.counts, ends, strict=True))
    ]


def sample(sampler: Sampler, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[SampledRow]:
    """May overwrite the logits."""
    return [
        SampledRow(
            token_id=each.token_ids[0] if each.token_ids else NO_TOKEN,
            logprobs=None if each.logprobs is None else each.logprobs[0],
            error=each.error,
        )
        for each in outcomes(SampleAndMatch(sampler).verify(logits, plain_rows(slots, positions), None))
    ]


def plain_rows(slots: Sequence[int], positions: Sequence[int]) -> list[DraftedRows]:
    return [DraftedRows(slot=slot, position=position) for slot, position in zip(slots, positions, strict=True)]
