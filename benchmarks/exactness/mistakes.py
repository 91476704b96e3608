"""Mistakes that a speculating engine could make, planted to see that they are noticed.

Each looks harmless and passes every test of shapes and ranges; each changes the distribution of the answers. They
stand where the right parts stand: as a verifier, a choice of drafted tokens, a cut of drafts, a sampler.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.drafter import Proposals
from faser.engine.execution.drafting.samplers import DraftRows, DraftTokens, ProbabilisticDraftSampler
from faser.engine.execution.sampling.distribution import PROB_ONE, draw
from faser.engine.execution.sampling.edits import LogitsEdit, LogitsProcessor, ProcessedRows
from faser.engine.execution.sampling.parameters import Purpose
from faser.engine.execution.sampling.processors import make_logits_processors
from faser.engine.execution.sampling.rejection import (
    Trial,
    accept_probs,
    recovered_probs,
    residual_probs,
    row_totals,
)
from faser.engine.execution.sampling.rows import DraftLayout, LogitRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.types.arrays import Ints

LOW = 0.3  # a probability that a rule calls low
STAIRS = (1.0, 1.8, 1.85, 1.9)  # cost of a step by γ: once the edge is crossed, more tokens cost next to nothing

Pairwise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Tokenwise:
    """Rejection sampling with exchangeable parts; as it stands it is right.

    accept: probability from target's and drafter's of the tokens. replace: masses [S, V] from both distributions.
    replace_purpose: of the noise that a replacement is drawn with.
    """

    sampler: Sampler
    accept: Pairwise = accept_probs
    replace: Pairwise = recovered_probs
    replace_purpose: Purpose = Purpose.REPLACE

    @torch.inference_mode()
    def verify(self, logits: Tensor, layout: DraftLayout, draft_probs: Tensor | None) -> StepTokens:
        rows = self.sampler.rows(logits, layout)
        trial = Trial(rows, draft_probs)
        accept = self.accept(trial.target_probs, trial.draft_probs)
        last = layout.last_reached((trial.noise < accept).numpy())
        whole = torch.from_numpy(last == layout.first + layout.num_drafts)
        fixed_probs = trial.fixed_probs[torch.from_numpy(last)]
        target_probs = fixed_probs.double() / row_totals(fixed_probs)[:, None]
        draft = trial.draft_distribution.of_rows(torch.from_numpy(last))
        left = torch.where(whole[:, None], fixed_probs.double(), self.replace(target_probs, draft))
        starts = rows.positions[layout.first] if self.replace_purpose is Purpose.DRAFT else None
        others = rows.arrivals(last, self.replace_purpose, starts)
        arrivals = torch.where(whole[:, None], rows.arrivals(last, Purpose.TOKEN), others)
        return rows.results(last, draw(left, arrivals).numpy())


def target_instead_of_residual(target_probs: Tensor, _draft_probs: Tensor) -> Tensor:
    """The refused token is drawn again from the target as it is."""
    return (target_probs * PROB_ONE).floor_()


def residual_not_renormalised(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Give what the residual lacks of 1 to its last token."""
    fixed_probs = residual_probs(target_probs, draft_probs)
    fixed_probs[:, -1] += PROB_ONE - fixed_probs.sum(-1)
    return fixed_probs


def accept_too_often(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """One per cent more often than it may be; never what the target cannot say."""
    return torch.where(target_probs > 0, accept_probs(target_probs, draft_probs) + 0.01, 0.0)


class StaleChoice(ProbabilisticDraftSampler):
    """A position that is drafted again gets the same noise again."""

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        return super().choose(logits, replace(rows, draft_starts=rows.positions), ids)


class MisstatedChoice(ProbabilisticDraftSampler):
    """Sampler that states its distribution a little flatter than it was."""

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        chosen = super().choose(logits, rows, ids)
        assert chosen.probs is not None
        flatter = chosen.probs.sqrt()
        return replace(chosen, probs=flatter / flatter.sum(-1, keepdim=True))


class Blind(LogitsProcessor[object]):
    """Another processor that does not see the drafted tokens before a row."""

    def __init__(self, processor: LogitsProcessor[Any]) -> None:
        super().__init__()
        self._processor = processor
        self.reads_output = processor.reads_output

    @property
    def slots(self) -> Collection[int]:
        return self._processor.slots

    def start(self, start: SequenceStart) -> None:
        self._processor.start(start)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        self._processor.accept(slots, token_ids)

    def release(self, slot: int) -> None:
        self._processor.release(slot)

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        return self._processor.edit(replace(rows, drafts=[()] * len(rows.slots)))


class BlindSampler(Sampler):
    """Penalties of a row do not see the drafted tokens before it."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        processors = [Blind(each) for each in make_logits_processors(vocab_size, eos_token_ids)]
        super().__init__(num_slots, vocab_size, eos_token_ids, processors=processors)


class OneNumberSampler(Sampler):
    """All rows of a sequence in a step are drawn with one number."""

    def rows(self, logits: Tensor, layout: DraftLayout) -> LogitRows:
        rows = super().rows(logits, layout)
        rows.positions = rows.positions[rows.layout.first][rows.layout.sequence]
        return rows


def trimmed(proposals: Proposals, lengths: Sequence[int]) -> Proposals:
    """The first tokens of each draft, so many of them, with what they were drawn from."""
    table, shorter = proposals.table, np.array(lengths, dtype=np.int64)
    probs = proposals.probs
    if probs is not None:
        places = np.arange(table.width)
        drafted = places < table.lengths[:, None]
        probs = probs[torch.from_numpy((places < shorter[:, None])[drafted])]
    return replace(proposals, table=table.cut(shorter), probs=probs)


def cut_low_tokens(proposals: Proposals) -> Proposals:
    """A draft ends before the first token that was drawn although it was unlikely."""
    assert proposals.probs is not None
    lengths, begin = [], 0
    for at, length in enumerate(proposals.table.lengths.tolist()):
        end = begin + length
        drafted = torch.tensor(proposals.table.tokens(at), dtype=torch.int64)
        final_ids = proposals.probs[begin:end].gather(-1, drafted[:, None])[:, 0]
        low = (final_ids < LOW).tolist()
        lengths.append(low.index(True) if True in low else len(low))
        begin = end
    return trimmed(proposals, lengths)


def cut_to_the_best_rate(proposals: Proposals) -> Proposals:
    """A draft is as long as yields most tokens per cost, by confidences that depend on the drawn tokens."""
    assert proposals.probs is not None
    lengths, begin = [], 0
    for length in proposals.table.lengths.tolist():
        end = begin + length
        survival = proposals.probs[begin:end].amax(-1).cumprod(0).tolist()
        rates = [(1.0 + sum(survival[:num])) / STAIRS[num] for num in range(end - begin + 1)]
        lengths.append(rates.index(max(rates)))
        begin = end
    return trimmed(proposals, lengths)
