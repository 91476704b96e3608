"""One row a sequence, sampled as in a step without drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from faser.engine.execution.sampling.rows import DraftLayout, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch
from faser.types.answer import PositionLogprobs, SequenceError
from faser.types.arrays import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """The outcome of one row. token_id is NO_TOKEN where error says why no token could be sampled."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: SequenceError | None = None


class Drafted(NamedTuple):
    """One sequence that verifies a draft. position: of the token that its first row samples."""

    slot: int
    position: int
    draft: tuple[int, ...] = ()


def layout(sequences: Sequence[Drafted]) -> DraftLayout:
    return DraftLayout.of(
        np.array([each.slot for each in sequences], dtype=np.int64),
        np.array([each.position for each in sequences], dtype=np.int64),
        np.array([len(each.draft) for each in sequences], dtype=np.int64),
        np.array([token_id for each in sequences for token_id in each.draft], dtype=np.int64),
    )


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


def plain_rows(slots: Sequence[int], positions: Sequence[int]) -> DraftLayout:
    return DraftLayout.plain(np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64))
