"""The cases: combinations of verifier, drafter, γ and sampling, and the planted mistakes that must be seen.

Drafters are the engine's: n-grams of the text, the drafting loop over a table with each of its choices, and the
chooser between both. So are the stop rule and the policy that trims drafts. The whole product takes hours. Of it
stand here so many that every verifier meets every drafter, γ and sampling, and every drafter every γ but the
longest. Trimming of sampled drafts, which no policy does because it is wrong, is among the mistakes.
"""

import gc
import multiprocessing
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.exactness import mistakes
from benchmarks.exactness.distributions import (
    DEEP,
    WIDE,
    Ints,
    Tables,
    exact_distribution,
    holm,
    joint_and_single,
    samplings,
    uniform_p_value,
)
from benchmarks.exactness.table_models import CAP, NUM_SLOTS, Cut, Lengths, Scenario, TableModel, play
from benchmarks.simulator.selected_drafter import SelectedDrafter
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
from faser.engine.execution.sampling.parameters import Purpose
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch, Verifier
from faser.kernels.cpu.text_index import TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Pattern of drafts' lengths. cut, stop: as in Scenario."""

    lengths: Lengths
    tables: Tables = WIDE
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
    table = proposals.table
    lengths = table.lengths
    if not len(lengths):
        return proposals
    rates = np.where(np.arange(CAP) < lengths[:, None], 1.0 / (1.0 + np.exp(-table.confidences)), 0.0)
    survival = np.concatenate((np.ones((len(lengths), 1)), rates.cumprod(-1)), axis=-1)
    candidates = Candidates.alike(np.arange(len(lengths)), lengths, survival)
    costs = CostModel(StepTimes.proportional(step_s=0.05, row_s=1e-5, pass_s=1e-4))
    return mistakes.trimmed(proposals, Survival(costs).keep(candidates, lengths).tolist())


STOP = StopRule(
    row_price=0.35, pass_prices=tuple(0.12 * m for m in range(1, NUM_SLOTS + 1)), intercept=0.0, slope=1.0
)
PATTERNS: Mapping[str, Pattern] = {
    "0": Pattern(lengths=always(0)),
    "1": Pattern(lengths=always(1)),
    "3": Pattern(lengths=always(3)),
    "7": Pattern(lengths=always(7), tables=DEEP),
    "ragged": Pattern(lengths=by_slot),
    "changing by step": Pattern(lengths=by_step),
    "stop rule": Pattern(lengths=always(4), stop=STOP),
    "keep trimming": Pattern(lengths=always(4), cut=keep_what_pays),
}
SAMPLINGS = tuple(samplings(WIDE.vocab))


def text(_world: Tables) -> Drafter:
    return LookupDrafter(load_index(), TextRules(cap=CAP, min_n=1, max_n=3))


def greedy(tables: Tables) -> Drafter:
    return TableModel(tables, lambda _state: GreedyDraftSampler())


def coupled(tables: Tables) -> Drafter:
    return TableModel(tables, SampleAndMatchDraftSampler)


def sampled(tables: Tables) -> Drafter:
    return TableModel(tables, ProbabilisticDraftSampler)


def mixed(tables: Tables) -> Drafter:
    """Text or sampled drafts, by which was accepted more before."""
    both = TextAndModel([text(tables)], sampled(tables))
    return SelectedDrafter(both, num_slots=NUM_SLOTS, cap=CAP, model_cap=CAP)


def stale(tables: Tables) -> Drafter:
    return TableModel(tables, mistakes.StaleChoice)


def misstated(tables: Tables) -> Drafter:
    return TableModel(tables, mistakes.MisstatedChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: what a mistake is; empty for a right combination. at_least: samples without which it is not seen."""

    verifier: Callable[[Sampler], Verifier]
    drafter: Callable[[Tables], Drafter]
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

        def make_sampler(tables: Tables) -> Sampler:
            return self.sampler(NUM_SLOTS, tables.vocab, ())

        return Scenario(
            tables=pattern.tables,
            sampling=samplings(pattern.tables.vocab)[self.sampling],
            make_sampler=make_sampler,
            make_drafter=self.drafter,
            make_verifier=self.verifier,
            lengths=pattern.lengths,
            cut=self.cut or pattern.cut,
            stop=pattern.stop,
        )


FAMILY_ALPHA = 0.01  # chance that any right combination is flagged, over all of them
SEEN = 1e-6  # p-value below which a mistake counts as seen
PAIRS: tuple[tuple[Callable[[Sampler], Verifier], Callable[[Tables], Drafter]], ...] = (
    (SampleAndMatch, text),
    (SampleAndMatch, greedy),
    (SampleAndMatch, coupled),
    (Rejection, text),
    (Rejection, sampled),
    (Rejection, mixed),
    (Block, sampled),
    (Block, greedy),
)
DRAWN = (sampled, mixed)
NO_DRAFTS, DEEPEST, TRIMMED = "0", "7", "keep trimming"
ROWS = {"0": 3, "1": 5, "3": 7, DEEPEST: 18, "ragged": 6, "changing by step": 6, "stop rule": 8, TRIMMED: 8}
COSTLY_ROWS = ("penalties", "all")  # they cost thrice as much


def product() -> list[Case]:
    """All combinations that an engine could be made of, but for the slowest."""
    return [
        Case(verifier=verifier, drafter=drafter, pattern=pattern, sampling=sampling)
        for verifier, drafter in PAIRS
        for pattern in PATTERNS
        for sampling in SAMPLINGS
        if not (pattern == TRIMMED and drafter in DRAWN)
        and not (pattern == DEEPEST and (drafter is text or sampling in COSTLY_ROWS))
    ]


def meetings(case: Case) -> frozenset[tuple[str, str]]:
    """The pairs of values of which every one has to occur somewhere. Without drafts only the verifier matters."""
    verifier, drafter = (
        f"{part} {role}" for part, role in zip(case.title.split(", "), ("by", "of"), strict=False)
    )
    found = {(verifier, case.pattern)}
    if case.pattern != NO_DRAFTS:
        found |= {(verifier, case.sampling), (verifier, drafter)}
        if case.pattern != DEEPEST:
            found.add((drafter, case.pattern))
    return frozenset(found)


def chosen(cases: Sequence[Case]) -> tuple[Case, ...]:
    """So many of the cases that all their meetings occur, the cheapest for what they add first."""
    missing, found = set[tuple[str, str]]().union(*map(meetings, cases)), list[Case]()

    def worth(case: Case) -> tuple[float, int]:
        cost = ROWS[case.pattern] * (3 if case.sampling in COSTLY_ROWS else 1)
        return len(meetings(case) & missing) ** 2 / cost, -sum(each.sampling == case.sampling for each in found)

    while missing:
        best = max(cases, key=worth)
        missing -= meetings(best)
        found.append(best)
    return tuple(found)


RIGHT = (
    *chosen(product()),
    Case(verifier=mistakes.Tokenwise, drafter=sampled, pattern="3", sampling="T 1"),  # with nothing planted
)
WRONG = (
    Case(
        name="target instead of residual",
        verifier=partial(mistakes.Tokenwise, replace=mistakes.target_instead_of_residual),
        drafter=sampled,
        pattern="3",
        sampling="T 1",
    ),
    Case(
        name="target instead of residual",
        verifier=partial(mistakes.Tokenwise, replace=mistakes.target_instead_of_residual),
        drafter=text,
        pattern="1",
        sampling="all",
    ),
    Case(
        name="residual not renormalised",
        verifier=partial(mistakes.Tokenwise, replace=mistakes.residual_not_renormalised),
        drafter=sampled,
        pattern="1",
        sampling="T 0.7",
    ),
    Case(
        name="accepted 0.01 too often",
        verifier=partial(mistakes.Tokenwise, accept=mistakes.accept_too_often),
        drafter=sampled,
        pattern="3",
        sampling="logit_bias",
        at_least=200_000,
    ),
    Case(
        name="one number for the draft and its replacement",
        verifier=partial(mistakes.Tokenwise, replace_purpose=Purpose.DRAFT),
        drafter=sampled,
        pattern="3",
        sampling="T 1",
    ),
    Case(
        name="drafted again with the old noise",
        verifier=Block,
        drafter=stale,
        pattern="7",
        sampling="T 1",
        at_least=30_000,
    ),
    Case(
        name="draft distribution misstated",
        verifier=Rejection,
        drafter=misstated,
        pattern="stop rule",
        sampling="top_k",
    ),
    Case(name="draft distribution misstated", verifier=Block, drafter=misstated, pattern="3", sampling="T 1"),
    Case(
        name="dropped by own probability",
        verifier=Rejection,
        drafter=sampled,
        pattern="3",
        sampling="T 1",
        cut=mistakes.cut_low_tokens,
    ),
    Case(
        name="trimmed by fresh confidences",
        verifier=Rejection,
        drafter=sampled,
        pattern="3",
        sampling="T 1",
        cut=mistakes.cut_to_the_best_rate,
    ),
    Case(
        name="penalties blind to the draft",
        verifier=SampleAndMatch,
        drafter=greedy,
        pattern="3",
        sampling="penalties",
        sampler=mistakes.BlindSampler,
    ),
    Case(
        name="one number for all rows of a step",
        verifier=SampleAndMatch,
        drafter=greedy,
        pattern="changing by step",
        sampling="T 1",
        sampler=mistakes.OneNumberSampler,
    ),
)


def measure(case: Case, num_samples: int) -> dict[str, Any]:
    """One line of the report: p_value and what it was computed from."""
    began_s = time.perf_counter()
    scenario = case.scenario()
    played = play(scenario, num_samples, case.seed)
    distribution = exact_distribution(scenario.tables, scenario.sampling)
    return {
        "case": case.title,
        "p_value": joint_and_single(played.answers, distribution, scenario.tables),
        "samples": len(played.answers),
        "outcomes": int((distribution > 0).sum()),
        "verified": played.verified,
        "accepted": played.accepted,
        "seconds": round(time.perf_counter() - began_s, 2),
    }


def _prepare() -> None:
    """A process of its own core. Nothing here makes circles, and looking for them takes a third of the time."""
    torch.set_num_threads(1)
    gc.disable()


def compare_all(num_samples: int, jobs: int, done: Callable[[], None]) -> dict[str, Any]:
    """All combinations, on so many processes. done: called after each."""
    found: dict[Case, dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare) as pool:
        asked = {pool.submit(measure, case, num_samples): case for case in RIGHT}
        asked |= {pool.submit(measure, case, max(num_samples // 4, case.at_least)): case for case in WRONG}
        for future in as_completed(asked):
            found[asked[future]] = future.result()
            done()
    right, planted = [found[case] for case in RIGHT], [found[case] for case in WRONG]
    values = [each["p_value"] for each in right]
    for each, adjusted in zip(right, holm(values), strict=True):
        each["holm"] = adjusted
    return {
        "passed": min(each["holm"] for each in right) >= FAMILY_ALPHA
        and max(each["p_value"] for each in planted) < SEEN,
        "samples": num_samples,
        "combinations": len(right),
        "product": len(product()),
        "thinned": "every verifier with every gamma and every sampling, every drafter with every gamma but 7",
        "family_alpha": FAMILY_ALPHA,
        "smallest_holm": min(each["holm"] for each in right),
        "p_values_uniform": uniform_p_value(values),
        "seen_below": SEEN,
        "right": right,
        "planted": planted,
    }
