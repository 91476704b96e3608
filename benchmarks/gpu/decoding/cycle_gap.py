"""Phase `cycle`: drafting and verifying, and how long a device has nothing to do between the two.

Cycles of a fixed number of drafted tokens at given acceptance, at each number of sequences, against the sum of
their floors: with steps that are read before anything follows them (`--no-async-scheduling`) and with drafts that
are launched behind them. The
device marks when it is done with what a verification samples, and when it could begin the first pass; between
these marks there is only what it finds out about the step, or nothing.

Predicted for Qwen3-8B and 0.6B on an H200, from the launches of both: 2.25, 2.8 and 2.6 ms at 1, 8 and 32
sequences where steps are read, below .3 ms behind them, and cycles that are as much shorter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.decoding.policies import synthetic
from benchmarks.gpu.engines import (
    Opened,
    Wanted,
    draft_of,
    made_up,
    made_up_costs,
    target_of,
    with_engine,
)
from benchmarks.gpu.models import floor_s
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import ClosedLoop, DeviceClock, clock_of, greedy, made_up_prompts, spread_ms
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.runner.runner import Runner

_ACCEPTANCE = 0.8
_PREDICTED_MS = {"read": {1: 2.25, 8: 2.8, 32: 2.6}, "followed": {1: 0.3, 8: 0.3, 32: 0.3}}


class GapMarks:
    """Marks of a device between one runner's samples and the next pass of another, while both go on as they do."""

    def __init__(self, clock: DeviceClock, target: Runner, drafter: Runner) -> None:
        self._clock = clock
        self._pairs: list[tuple[Any, Any]] = []
        self._sampled: Any = None
        for name in ("forward", "sample"):  # where steps are read, the host samples behind the forward pass
            _around(target, name, after=self._has_sampled)
        for name in ("forward", "follow"):
            if hasattr(drafter, name):
                _around(drafter, name, before=self._begins)

    def forget(self) -> None:
        self._pairs, self._sampled = [], None

    def seconds(self) -> list[float]:
        """Return the length of every gap since `forget`. Waits for the device."""
        return [self._clock.between_s(pair)[0] for pair in self._pairs]

    def _has_sampled(self) -> None:
        self._sampled = self._clock.mark()

    def _begins(self) -> None:
        if self._sampled is not None:
            self._pairs.append((self._sampled, self._clock.mark()))
            self._sampled = None


def _around(
    runner: Runner,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Have a runner's method call these, before and after it does its work."""
    method = getattr(runner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        found = method(*arguments, **options)
        after()
        return found

    setattr(runner, name, call)


def run(plan: Plan, desk: Desk) -> None:
    sizes, target, draft = plan.sizes, target_of(plan), draft_of(plan)
    for name, synchronous in (("read", True), ("followed", False)):
        if not desk.may_begin(f"steps that are {name}: loading both models"):
            continue
        wanted = Wanted(
            target=target,
            draft=draft,
            sequences=max(sizes.policy_batches),
            context=sizes.context,
            rows=sizes.rows,
            sources=made_up(plan),
            speculative=synthetic(draft, cap=sizes.cycle_gamma, acceptance=_ACCEPTANCE) | {"policy": "fixed"},
            costs=made_up_costs(),
            synchronous=synchronous,
        )
        with_engine(plan, wanted, partial(_cells, plan, desk, name))


def _cells(plan: Plan, desk: Desk, name: str, opened: Opened) -> None:
    sizes, clock = plan.sizes, clock_of(plan.device)
    assert opened.draft_runner is not None, "the engine has a draft model"
    marks, loop = GapMarks(clock, opened.runner, opened.draft_runner), ClosedLoop(opened.engine, clock)
    prompts = made_up_prompts(max(sizes.policy_batches), sizes.context, opened.info.vocab_size)
    for sequences in sizes.policy_batches:
        if not desk.may_begin(f"steps that are {name}, {sequences} sequences"):
            continue
        loop.start(prompts[:sequences], greedy)
        loop.warm()
        marks.forget()
        steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
        gaps_s = marks.seconds()
        loop.stop()
        if not gaps_s:
            desk.say(f"no gap in {len(steps.host_s)} steps, which are too few")
            continue
        desk.append(
            "cells",
            {
                "steps": name,
                "sequences": sequences,
                "gamma": sizes.cycle_gamma,
                "gap_ms": spread_ms(gaps_s),
                "predicted_gap_ms": _PREDICTED_MS[name].get(sequences),
                "cycle_ms": spread_ms(steps.device_s),
                "host_ms": spread_ms(steps.host_s),
                "tokens_per_s": round(steps.tokens_per_s, 1),
                **_floors(plan, desk, opened, draft_of(plan), sequences, steps.device_s),
            },
        )


def _floors(
    plan: Plan, desk: Desk, opened: Opened, draft: Path, sequences: int, taken_s: Sequence[float]
) -> dict[str, float]:
    """Return the least times: as many passes of the draft model as drafted tokens, and a step over all rows."""
    bytes_s, flops_s = environment.bytes_s(desk.folder), environment.flops_s(desk.folder)
    kv_tokens, gamma = sequences * plan.sizes.context, plan.sizes.cycle_gamma
    one_pass_s = floor_s(
        read_model_config(draft).spec, rows=sequences, kv_tokens=kv_tokens, bytes_s=bytes_s, flops_s=flops_s
    )
    step_s = floor_s(
        opened.spec, rows=sequences * (gamma + 1), kv_tokens=kv_tokens, bytes_s=bytes_s, flops_s=flops_s
    )
    least_s = gamma * one_pass_s + step_s
    return {
        "floor_ms": round(1e3 * least_s, 4),
        "times_floor": round(spread_ms(taken_s)["median"] / (1e3 * least_s), 3),
    }
