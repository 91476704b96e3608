"""Phase `cycle`: drafting a fixed number of tokens and verifying them, against the sum of the floors.

`drafting` is the wall time of the drafter's part, taken by standing before it; the rest of a step is planning,
verification and commit. Acceptance is given, so that the work is real and the tokens are not.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.common.closed_loop import ClosedLoop, greedy, made_up_prompts
from benchmarks.gpu.common.engines import (
    Opened,
    Wanted,
    close,
    draft_of,
    made_up,
    made_up_costs,
    open_engine,
    target_of,
)
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk
from benchmarks.gpu.common.shapes import floor_s
from benchmarks.gpu.common.timing import clock_of, spread_ms
from benchmarks.gpu.decoding import environment
from benchmarks.gpu.decoding.policies import synthetic
from faser.engine.checkpoints.files import read_model_config
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Drafter, Proposals

_ACCEPTANCE = 0.8


def run(plan: Plan, desk: Desk) -> None:
    sizes, target, draft = plan.sizes, target_of(plan), draft_of(plan)
    times = _DraftTimes()
    desk.say("loading both models")
    opened = open_engine(
        plan,
        Wanted(
            target=target,
            draft=draft,
            sequences=max(sizes.policy_batches),
            context=sizes.context,
            rows=sizes.rows,
            sources=made_up(plan),
            speculative=synthetic(draft, cap=sizes.cycle_gamma, acceptance=_ACCEPTANCE) | {"policy": "fixed"},
            costs=made_up_costs(),
            wrap_drafter=times.around,
        ),
    )
    loop = ClosedLoop(opened.engine, clock_of(plan.device))
    prompts = made_up_prompts(max(sizes.policy_batches), sizes.context, opened.info.vocab_size)
    for sequences in sizes.policy_batches:
        if not desk.may_begin(f"{sequences} sequences, {sizes.cycle_gamma} drafted tokens"):
            continue
        loop.start(prompts[:sequences], greedy)
        loop.warm()
        times.forget()
        steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
        loop.stop()
        desk.append(
            "cells",
            {
                "sequences": sequences,
                "gamma": sizes.cycle_gamma,
                "cycle_ms": spread_ms(steps.device_s),
                "host_ms": spread_ms(steps.host_s),
                "drafting_ms": spread_ms(times.seconds),
                "passes": times.passes / len(times.seconds),
                "tokens_per_s": round(steps.tokens_per_s, 1),
                **_floors(plan, desk, opened, draft, sequences, steps.device_s),
            },
        )
    close(opened)


def _floors(
    plan: Plan, desk: Desk, opened: Opened, draft: Path, sequences: int, taken_s: Sequence[float]
) -> dict[str, float]:
    """As many passes of the draft model as drafted tokens, and a step of the target over all rows."""
    rates = {"bytes_s": environment.bytes_s(desk.folder), "flops_s": environment.flops_s(desk.folder)}
    kv_tokens, gamma = sequences * plan.sizes.context, plan.sizes.cycle_gamma
    one_pass_s = floor_s(read_model_config(draft).spec, rows=sequences, kv_tokens=kv_tokens, **rates)
    step_s = floor_s(opened.spec, rows=sequences * (gamma + 1), kv_tokens=kv_tokens, **rates)
    least_s = gamma * one_pass_s + step_s
    return {
        "floor_ms": round(1e3 * least_s, 4),
        "times_floor": round(spread_ms(taken_s)["median"] / (1e3 * least_s), 3),
    }


class _DraftTimes:
    """How long every proposal of a drafter takes, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.passes = 0

    def around(self, drafter: Drafter) -> Drafter:
        return _Timed(drafter, self)

    def forget(self) -> None:
        self.seconds, self.passes = [], 0


class _Timed:
    """See Drafter. Says what another one says."""

    def __init__(self, drafter: Drafter, times: _DraftTimes) -> None:
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

    def commit(self, continuations: Sequence[Continuation]) -> Any:
        return self._drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)
