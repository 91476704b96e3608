"""Steps that start before the host has the tokens of the step before: what they are fed, and when they began."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from faser.engine.contract.plan import PLACEHOLDER, LaunchedStep, SequenceRows, StepPlan, StepRows
from faser.engine.execution.async_steps import AsyncSteps
from faser.engine.execution.pooling import Pooler
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import DraftLayout, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import SampledTokens
from faser.engine.execution.sampling.verify import SampleAndMatch


@dataclass
class Pending:
    """Tokens that become known only when they are waited for."""

    token_ids: list[int]

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor(self.token_ids)

    def wait(self) -> SampledTokens:
        return SampledTokens(token_ids=np.array(self.token_ids))


@dataclass
class CountingRunner:
    """Runs nothing; the n-th row that it samples in all gets token n."""

    batches: list[RowBatch] = field(default_factory=list)
    sampled_rows: list[list[int]] = field(default_factory=list)
    num_sampled: int = 0
    calls: list[str] = field(default_factory=list)

    def forward(self, batch: RowBatch) -> None:
        self.calls.append("forward")
        self.batches.append(batch)

    def count_experts(self) -> Callable[[], int]:
        return lambda: 0

    def logits(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        self.calls.append("logits")
        return rows.tolist()

    def read_back(self, _values: object) -> None: ...

    def sample_from(self, rows: list[int], metadata: object) -> Pending:
        self.calls.append("sample")
        return self.sample(np.array(rows), metadata)

    def sample(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], _metadata: object) -> Pending:
        self.sampled_rows.append(rows.tolist())
        first, self.num_sampled = self.num_sampled, self.num_sampled + len(rows)
        return Pending([*range(first, self.num_sampled)])


@dataclass
class Edited:
    """Logits that were edited. without_token: slots that get no token."""

    layout: DraftLayout
    without_token: set[int]
    scored: list[object] = field(default_factory=list)

    def score(self, tokens: object, _read_back: object) -> None:
        self.scored.append(tokens)

    def given(self, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> StepTokens:
        kept = [slot not in self.without_token for slot in self.layout.slots.tolist()]
        return StepTokens(counts=[*map(int, kept)], token_ids=token_ids[kept].tolist())


@dataclass
class NoSampler:
    """editing: slots that edit their logits. following: those that do it by their output. late: without a mask."""

    editing: set[int] = field(default_factory=set)
    following: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def needs_only_logits(self, slots: list[int]) -> bool:
        return (self.editing | self.following).isdisjoint(slots)

    def follows_output(self, slots: list[int]) -> bool:
        return not self.following.isdisjoint(slots)

    def is_late(self, slot: int) -> bool:
        return slot in self.late

    def rows(self, _logits: list[int], layout: DraftLayout) -> Edited:
        return Edited(layout, self.late & set(layout.slots.tolist()))

    def metadata(self, slots: list[int], positions: list[int]) -> None: ...


def plan_of(*rows: tuple[int, tuple[int, ...], bool]) -> StepPlan:
    """rows: slot, inputs, whether the last of them yields a token."""
    made = tuple(
        SequenceRows(slot=slot, start=3, token_ids=token_ids, new_blocks=(), samples=samples)
        for slot, token_ids, samples in rows
    )
    return StepPlan(step=1, released=(), started=(), rows=StepRows.of(*made))


def make(given: NoSampler | None = None) -> tuple[AsyncSteps, CountingRunner]:
    runner = CountingRunner()
    sampler = cast("Sampler", given or NoSampler())
    pooler = Pooler(cast("Runner", runner), max_logit_rows=1)
    return AsyncSteps(cast("Runner", runner), sampler, SampleAndMatch(sampler), pooler), runner


def launch(steps: AsyncSteps, plan: StepPlan, began_s: float = 0.0) -> LaunchedStep:
    table = BlockTable(4, 1)
    for slot in range(4):
        table.append(slot, (slot,))
    return steps.launch(plan, table.gather(plan.rows), began_s)


def test_placeholders_are_fed_with_the_tokens_that_the_step_in_flight_chooses_for_the_same_slots() -> None:
    steps, runner = make()
    launch(steps, plan_of((2, (7, 7), True), (0, (7,), False), (1, (7,), True)))
    launch(steps, plan_of((1, (PLACEHOLDER,), True), (2, (PLACEHOLDER,), True)))
    first, second = (batch.feedback for batch in runner.batches)
    assert first is None
    assert second is not None
    assert (second.rows.tolist(), second.sources.tolist()) == ([0, 1], [1, 0])
    assert second.tokens.tolist() == [0, 1]


def test_a_placeholder_is_fed_at_its_row_among_the_rows_of_prompts() -> None:
    steps, runner = make()
    launch(steps, plan_of((2, (7, 7), True), (1, (7,), True)))
    launch(steps, plan_of((3, (7, 7, 7), True), (1, (PLACEHOLDER,), True), (0, (7, 7), False)))
    feedback = runner.batches[1].feedback
    assert feedback is not None
    assert (feedback.rows.tolist(), feedback.sources.tolist()) == ([3], [1])


def test_rows_that_yield_a_token_are_sampled_and_x() -> None:
    steps, runner = make()
    launched = launch(steps, plan_of((2, (7, 7), True), (0, (7,), False), (1, (7,), True)))
    assert runner.sampled_rows == [[1, 3]]
    tokens = steps.collect(launched).tokens
    assert (tokens.counts, tokens.token_ids) == ([1, 0, 1], [0, 1])


def test_a_step_in_which_no_row_yields_a_token_brings_none() -> None:
    steps, runner = make()
    tokens = steps.collect(launch(steps, plan_of((0, (7,), False)))).tokens
    assert tokens == StepTokens.none(1)
    assert runner.sampled_rows == []


def test_a_step_that_was_launched_during_another_one_begins_when_that_one_ends() -> None:
    steps, _ = make()
    began_s = time.perf_counter()
    first = launch(steps, plan_of((0, (7,), True)), began_s)
    second = launch(steps, plan_of((0, (PLACEHOLDER,), True)), began_s)
    one, two = steps.collect(first), steps.collect(second)
    assert one.began_s == began_s
    assert began_s <= one.ended_s == two.began_s <= two.ended_s


def test_inputs_that_are_prepared_during_another_step_take_no_time_of_their_own() -> None:
    steps, _ = make()
    began_s = time.perf_counter() - 1.0
    first = launch(steps, plan_of((0, (7,), True)), began_s)
    second = launch(steps, plan_of((0, (PLACEHOLDER,), True)), time.perf_counter())
    one, two = steps.collect(first), steps.collect(second)
    assert 1.0 < one.prepared_s <= one.ended_s - one.began_s
    assert two.prepared_s == 0.0


def test_tokens_that_follow_the_output_are_chosen_during_the_forward_once_the_step_before_is_known() -> None:
    steps, runner = make(NoSampler(following={1}))
    first = launch(steps, plan_of((1, (7,), True), (2, (7,), True)))
    assert runner.calls == ["forward", "logits", "sample"]
    second = launch(steps, plan_of((1, (PLACEHOLDER,), True), (2, (PLACEHOLDER,), True)))
    assert runner.calls[3:] == ["forward"]
    steps.collect(first)
    steps.choose_next()
    assert runner.calls[4:] == ["logits", "sample"]
    steps.choose_next()
    assert len(runner.calls) == 6, "chosen twice"
    third = launch(steps, plan_of((2, (PLACEHOLDER,), True)))
    assert len(runner.batches) == 3, "launched ahead of the second step's tokens"
    assert steps.collect(second).tokens.token_ids == [2, 3]
    assert steps.collect(third).tokens.token_ids == [4]


def test_edits_that_do_not_follow_the_output_wait_for_no_token() -> None:
    steps, runner = make(NoSampler(editing={1}))
    launch(steps, plan_of((1, (7,), True)))
    launch(steps, plan_of((1, (PLACEHOLDER,), True)))
    assert runner.calls == ["forward", "logits", "sample"] * 2


def test_a_slot_is_late_from_the_step_that_brings_it_no_token_until_its_mask_is_there() -> None:
    sampler = NoSampler(following={1, 3}, late={1, 3})
    steps, _ = make(sampler)
    step = launch(steps, plan_of((1, (7,), True), (2, (7,), True), (3, (7,), True)))
    sampler.late = set()
    assert [*step.late] == [1, 3], "this step brings them no token, though their masks have come since"
    sampler.late = {1, 3}
    found = []
    for there in ({1}, {1}, {1, 3}, {1, 3}):
        following = launch(steps, plan_of((2, (PLACEHOLDER,), True)))
        found.append([*step.late])
        sampler.late = {1, 3} - there
        assert steps.collect(step).tokens.token_ids
        steps.choose_next()
        step = following
    assert found == [[1, 3], [3], [3], []]
    assert not step.late


def test_whose_mask_is_late_is_unknown_before_the_step_before_is_collected() -> None:
    steps, _ = make(NoSampler(following={1}))
    launch(steps, plan_of((1, (7,), True)))
    second = launch(steps, plan_of((1, (PLACEHOLDER,), True)))
    with pytest.raises(AssertionError, match="has not been collected"):
        _ = second.late


def test_a_step_of_another_executor_is_not_collected() -> None:
    steps, _ = make()
    with pytest.raises(AssertionError, match="another executor"):
        steps.collect(LaunchedStep(plan=plan_of((0, (7,), True)), began_s=0.0))
