"""Phase `policies`: what speculation gains at given acceptance.

Policies take turns within a round on the same prompts: off first and last, the others between them, each round
beginning with another one. A turn starts its sequences anew from the prefix cache, so that all see the same
contexts, and notes the device's clocks. Ratios are to the mean of both turns of off in the same round, so that a
drift within the round cancels; what counts is their median. Acceptance is given: the work is real and the tokens
are not.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.decoding.clocks import Clocks, nvml
from benchmarks.gpu.engines import (
    Opened,
    Wanted,
    draft_of,
    made_up,
    target_of,
    with_engine,
)
from benchmarks.gpu.plan import Plan, Sizes
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import ClosedLoop, Steps, Tokens, clock_of, greedy, made_up_prompts
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.speculation.statistics import PLAIN, SERIAL
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.types.sampling import SamplingParams
from faser.types.statistics import SpeculationStats

OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A policy and, of `fixed`, its length. overlap: as use_policy takes it; label: instead of a name of these."""

    policy: str
    gamma: int | None = None
    overlap: str | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return self.label or (self.policy if self.gamma is None else f"{self.policy}:{self.gamma}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Setting of a contest. prompts: of the most sequences; about: stands in every row of the result.

    seen: what somebody saw since it was asked last; asked before a turn's steps and after, it stands in the turn.
    goes_on: asked after every round of a batch, with its turns; False ends the contest.
    """

    arms: tuple[Arm, ...]
    batches: tuple[int, ...]
    prompts: Sequence[Tokens]
    sampling: Callable[[int], SamplingParams]
    about: Mapping[str, Any]
    seen: Callable[[], Mapping[str, Any]] = dict
    goes_on: Callable[[Sequence[Json]], bool] = lambda _: True


def arms_of(sizes: Sizes) -> tuple[Arm, ...]:
    fixed = (Arm(policy="fixed", gamma=gamma) for gamma in sizes.caps)
    return (Arm(policy=OFF), *fixed, Arm(policy="goodput"), Arm(policy="faser"))


def synthetic(draft: Path, *, cap: int, acceptance: float) -> dict[str, Any]:
    """speculative_config of a draft model whose tokens pass one after the other with the same probability."""
    return {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": cap,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [acceptance**depth for depth in range(1, cap + 1)],
    }


def run(plan: Plan, desk: Desk) -> None:
    """One engine at a time, each from the times that the first one has measured."""
    sizes, target, draft = plan.sizes, target_of(plan), draft_of(plan)
    costs: StepTimes | None = None
    for place, acceptance in enumerate(sizes.acceptances):
        if not desk.may_begin(f"acceptance {acceptance:g}: loading both models"):
            continue
        wanted = Wanted(
            target=target,
            draft=draft,
            sequences=max(sizes.policy_batches),
            context=sizes.context,
            rows=sizes.rows,
            sources=made_up(plan),
            speculative=synthetic(draft, cap=sizes.cap, acceptance=acceptance),
            costs=costs,
        )
        share = 1 / (len(sizes.acceptances) - place)
        costs = with_engine(plan, wanted, partial(_turns, plan, desk, acceptance, share))
    desk.keep("rows", rows_of(desk.result.get("turns", [])))


def _turns(plan: Plan, desk: Desk, acceptance: float, share: float, opened: Opened) -> StepTimes:
    """share: of the time that is left. What steps and passes of this engine take."""
    sizes = plan.sizes
    turns = Turns(
        arms=arms_of(sizes),
        batches=sizes.policy_batches,
        prompts=made_up_prompts(max(sizes.policy_batches), sizes.context, opened.info.vocab_size),
        sampling=greedy,
        about={"acceptance": acceptance},
    )
    contest(plan, desk, opened.engine, turns, ends_s=desk.left_s * share)
    assert opened.costs is not None, "an engine that drafts knows what that costs"
    return StepTimes(tables=opened.costs.tables)


def contest(plan: Plan, desk: Desk, engine: Engine, turns: Turns, *, ends_s: float) -> None:
    """Round after round over all batches and policies, for about ends_s seconds; the first round in any case."""
    sizes, loop = plan.sizes, ClosedLoop(engine, clock_of(plan.device))
    clocks = Clocks(None if plan.dry_run else nvml())
    arms, stop_at_s = turns.arms, desk.left_s - ends_s
    for round_ in range(sizes.rounds):
        for sequences in turns.batches:
            if round_ and desk.left_s < stop_at_s:
                return
            if not desk.may_begin(f"{dict(turns.about)}, {sequences} sequences, round {round_ + 1}"):
                continue
            taken = []
            for arm in in_order(arms, round_):
                about = {**turns.about, "sequences": sequences, "round": round_, "policy": arm.name}
                turn = _turn(engine, loop, arm, turns, sequences, sizes.window_s)
                taken.append({**about, **turn, "clocks": clocks.read()})
                desk.append("turns", taken[-1])
            if not turns.goes_on(taken):
                return


def in_order(arms: Sequence[Arm], round_: int) -> list[Arm]:
    """Return the arms of a round: off first and last, between them the others from another one on."""
    off = [arm for arm in arms if arm.name == OFF]
    others = [arm for arm in arms if arm.name != OFF]
    by = round_ % max(len(others), 1)
    return [*off, *others[by:], *others[:by], *off]


def rows_of(turns: Sequence[Json]) -> list[Json]:
    """One row a cell and policy: medians over its rounds. Ratios are within a round, so that drifts cancel."""
    measured = ("sequences", "round", "policy", "tokens_per_s", "gamma", "accepted", "ahead", "clocks")
    by_cell: dict[tuple[Any, ...], list[Json]] = {}
    off: dict[tuple[Any, ...], list[float]] = {}
    for turn in turns:
        about = tuple((name, value) for name, value in turn.items() if name not in measured)
        cell = (*about, ("sequences", turn["sequences"]))
        by_cell.setdefault((*cell, ("policy", turn["policy"])), []).append(turn)
        if turn["policy"] == OFF:
            off.setdefault((*cell, turn["round"]), []).append(turn["tokens_per_s"])
    rows = []
    for key, found in by_cell.items():
        ratios = [
            turn["tokens_per_s"] / statistics.mean(off[(*key[:-1], turn["round"])])
            for turn in found
            if (*key[:-1], turn["round"]) in off
        ]
        rows.append(
            {
                **dict(key),
                "rounds": len({turn["round"] for turn in found}),
                "tokens_per_s": statistics.median(turn["tokens_per_s"] for turn in found),
                "times_off": round(statistics.median(ratios), 4) if ratios else None,
                "gamma": statistics.median(turn["gamma"] for turn in found),
                "accepted": statistics.median(turn["accepted"] for turn in found),
            }
        )
    return rows


def _turn(
    engine: Engine, loop: ClosedLoop, arm: Arm, turns: Turns, sequences: int, seconds: float
) -> dict[str, Any]:
    """Measure a turn. What was learned about acceptance stays, as in a server that has run for a while."""
    engine.use_policy(arm.policy, arm.gamma, forget=False, overlap=arm.overlap)
    loop.start(turns.prompts[:sequences], turns.sampling)
    loop.warm()
    turns.seen()
    before = _speculation(engine)
    steps = loop.look(seconds=seconds)
    after, seen = _speculation(engine), turns.seen()
    loop.stop()
    return {"tokens_per_s": round(steps.tokens_per_s, 1), **_drafted(before, after, steps, sequences), **seen}


def _drafted(before: SpeculationStats, after: SpeculationStats, steps: Steps, sequences: int) -> dict[str, float]:
    """gamma: verified tokens of a sequence in a step; accepted: share of these.

    ahead: share of the steps that drafted ahead.
    """
    verified, accepted = (
        sum(getattr(each, name) for each in after.methods) - sum(getattr(each, name) for each in before.methods)
        for name in ("verified", "accepted")
    )
    return {
        "gamma": round(verified / (len(steps.host_s) * sequences), 3),
        "accepted": round(accepted / max(verified, 1), 4),
        "ahead": round((_ahead(after) - _ahead(before)) / len(steps.host_s), 3),
    }


def _ahead(stats: SpeculationStats) -> int:
    """Steps that drafted ahead, on whatever partition."""
    return sum(steps for mode, steps in stats.mode_steps if mode not in (PLAIN, SERIAL))


def _speculation(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None, "the engine was built to speculate"
    return stats


class DraftTimes:
    """Seconds that every proposal of a drafter takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.passes = 0

    def around(self, drafter: Drafter) -> Drafter:
        return _Timed(drafter, self)

    def forget(self) -> None:
        self.seconds, self.passes = [], 0


class _Timed:
    """Drafter that wraps another one and times it."""

    def __init__(self, drafter: Drafter, times: DraftTimes) -> None:
        self._drafter = drafter
        self._times = times

    @property
    def drafts_overlapped(self) -> bool:
        return self._drafter.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        began_s = time.perf_counter()
        found = self._drafter.propose(plan, until)
        self._times.seconds.append(time.perf_counter() - began_s)
        self._times.passes += found.passes
        return found

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> Any:
        return self._drafter.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)
