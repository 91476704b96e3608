"""A case: which verifier judges which drafts of which length for which request, and the world it happens in.

Drafters are the engine's: n-grams of the text, the drafting loop over a table with each of its choices, and the
chooser between both. So are the stop rule and the policy that trims drafts.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.losslessness import wrong
from benchmarks.losslessness.law import DEEP, WIDE, Ints, World, samplings
from benchmarks.losslessness.play import NUM_SLOTS, Cut, Lengths, Scenario, TableModel
from benchmarks.selected_drafter import SelectedDrafter
from faser.engine.contract.plan import StopRule
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.speculation.policies import Survival
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.engine.execution.drafting.registry import load_index
from faser.engine.execution.drafting.samplers import (
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import Verifier
from faser.kernels.cpu.text_index import TextRules

CAP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How long drafts are. cut, stop: as in Scenario."""

    lengths: Lengths
    world: World = WIDE
    cut: Cut | None = None
    stop: StopRule | None = None


def always(num: int) -> Lengths:
    def lengths(slots: NDArray[np.int64], _step: int) -> Ints:
        return np.full(len(slots), num, dtype=np.int64)

    return lengths


def by_slot(slots: NDArray[np.int64], _step: int) -> Ints:
    return slots % 5


def by_step(slots: NDArray[np.int64], step: int) -> Ints:
    return np.full(len(slots), (3, 0, 1, 2)[step % 4], dtype=np.int64)


def keep_what_pays(proposals: Proposals) -> Proposals:
    """The policy `survival` cuts all drafts of a batch together, by their own confidences."""
    if not proposals.drafts:
        return proposals
    lengths = np.array([len(draft.token_ids) for draft in proposals.drafts])
    survival = np.ones((len(lengths), CAP + 1))
    for line, draft in zip(survival, proposals.drafts, strict=True):
        rates = 1.0 / (1.0 + np.exp(-np.array(draft.confidences)))
        line[1:] = 0.0
        line[1 : 1 + len(rates)] = rates.cumprod()
    candidates = Candidates(
        slots=np.arange(len(lengths)),
        limit=lengths,
        survival=survival,
        weight=np.ones(len(lengths)),
        missing_kv=np.zeros(len(lengths), dtype=np.int64),
        other_rows=0,
        kv_tokens=0,
    )
    costs = CostModel(StepTimes.proportional(step_s=0.05, row_s=1e-5, pass_s=1e-4))
    return wrong.trimmed(proposals, Survival(costs).keep(candidates, lengths).tolist())


STOP = StopRule(
    row_price=0.35, pass_prices=tuple(0.12 * m for m in range(1, NUM_SLOTS + 1)), intercept=0.0, slope=1.0
)
PATTERNS: Mapping[str, Pattern] = {
    "0": Pattern(lengths=always(0)),
    "1": Pattern(lengths=always(1)),
    "3": Pattern(lengths=always(3)),
    "7": Pattern(lengths=always(7), world=DEEP),
    "ragged": Pattern(lengths=by_slot),
    "changing by step": Pattern(lengths=by_step),
    "stop rule": Pattern(lengths=always(4), stop=STOP),
    "keep trimming": Pattern(lengths=always(4), cut=keep_what_pays),
}
SAMPLINGS = tuple(samplings(WIDE.vocab))


def text(_world: World) -> Drafter:
    return LookupDrafter(load_index(), TextRules(cap=CAP, min_n=1, max_n=3))


def greedy(world: World) -> Drafter:
    return TableModel(world, lambda _state: GreedyDraftSampler())


def coupled(world: World) -> Drafter:
    return TableModel(world, SampleAndMatchDraftSampler)


def sampled(world: World) -> Drafter:
    return TableModel(world, ProbabilisticDraftSampler)


def mixed(world: World) -> Drafter:
    """Text or sampled drafts, by what did better before."""
    both = TextAndModel([text(world)], sampled(world))
    return SelectedDrafter(both, num_slots=NUM_SLOTS, cap=CAP, model_cap=CAP)


def stale(world: World) -> Drafter:
    return TableModel(world, wrong.StaleChoice)


def misstated(world: World) -> Drafter:
    return TableModel(world, wrong.MisstatedChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: what a mistake is; empty for a right combination. at_least: samples without which it is not seen."""

    verifier: Callable[[Sampler], Verifier]
    drafter: Callable[[World], Drafter]
    pattern: str
    sampling: str
    name: str = ""
    cut: Cut | None = None
    sampler: type[Sampler] = Sampler
    at_least: int = 0

    @property
    def title(self) -> str:
        made_by = self.verifier.func if isinstance(self.verifier, partial) else self.verifier
        verifier = getattr(made_by, "__name__", "")
        said = f"{verifier.lower()}, {self.drafter.__name__}, gamma {self.pattern}, {self.sampling}"
        return f"{self.name}: {said}" if self.name else said

    @property
    def seed(self) -> int:
        return zlib.crc32(self.title.encode())

    def scenario(self) -> Scenario:
        pattern = PATTERNS[self.pattern]

        def make_sampler(world: World) -> Sampler:
            return self.sampler(NUM_SLOTS, world.vocab, ())

        return Scenario(
            world=pattern.world,
            sampling=samplings(pattern.world.vocab)[self.sampling],
            make_sampler=make_sampler,
            make_drafter=self.drafter,
            make_verifier=self.verifier,
            lengths=pattern.lengths,
            cut=self.cut or pattern.cut,
            stop=pattern.stop,
        )
