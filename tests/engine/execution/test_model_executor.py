"""An executor over a small model, plan by plan. Oracle: one token at a time, by the largest logit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from faser.engine.contract.plan import (
    PLACEHOLDER,
    DraftPlan,
    DraftRequest,
    SequenceRows,
    SequenceStart,
    StepPlan,
    StepResult,
    StepRows,
)
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.pruning import PlainForward, VerificationForward
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch
from faser.kernels.torch_backend import TorchBackend
from faser.types.sampling import SamplingParams
from faser.types.statistics import PruneStats
from tests.engine.execution.draft_lines import DraftLine, lines_of, table_with
from tests.engine.execution.greedy_sampler import GreedySampler
from tests.engine.execution.pruning_world import NUM_SLOTS, make_runner, write_pair

PROMPT = (11, 12, 13, 14, 15)
SLOT = 2


class GivenDrafter:
    """Proposes given tokens, and remembers what sequences went on with."""

    drafts_overlapped = False

    def __init__(self, token_ids: tuple[int, ...] = ()) -> None:
        self.token_ids = token_ids
        self.plans: list[DraftPlan] = []
        self.committed: list[tuple[int, ...]] = []
        self.num_commits = 0
        self.released: list[int] = []

    def start(self, start: SequenceStart) -> None: ...

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        self.plans.append(plan)
        drafts = tuple(
            DraftLine(slot=each.slot, method="draft_model", token_ids=self.token_ids) for each in plan.requests
        )
        return Proposals(table=table_with(drafts, plan.width), passes=1)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        self.committed += [tokens for _, tokens in by_slot(slots, counts, token_ids)]
        self.num_commits += 1

    def release(self, slot: int) -> None:
        self.released.append(slot)


class LastTokenCutter:
    """Cuts the last token of every draft before the forward, and remembers what it was called with."""

    def __init__(self) -> None:
        self.stats = PruneStats(drafted_rows=1)
        self.num_steps = 0
        self.learned: list[tuple[int, ...]] = []

    def run(self, runner: Runner, rows: StepRows, batch: RowBatch, /) -> tuple[StepRows, RowBatch]:
        self.num_steps += 1
        shorter = StepRows.of(
            *(
                replace(each, token_ids=each.token_ids[:-1], num_drafts=each.num_drafts - 1)
                if each.num_drafts
                else each
                for each in rows
            )
        )
        batch, _ = batch.compact(np.array(shorter.counts, dtype=np.int32))
        runner.forward(batch)
        return shorter, batch

    def learn(self, tokens: StepTokens) -> None:
        assert len(self.learned) < self.num_steps, "a step is learned from before it has run"
        self.learned.append(tuple(tokens.token_ids))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return make_runner(write_pair(tmp_path_factory.mktemp("pair"))[0], TorchBackend(), GreedySampler())


@pytest.fixture(scope="module")
def expected(runner: Runner) -> list[int]:
    """Six greedy tokens after the prompt, each from a forward over everything before it."""
    table, token_ids = BlockTable(1, 2), list(PROMPT)
    table.append(0, (20, 21))
    for _ in range(6):
        rows = SequenceRows(slot=0, start=0, token_ids=tuple(token_ids), new_blocks=(), samples=True)
        runner.forward(table.gather(StepRows.of(rows)))
        token_ids.append(int(runner.logits([len(token_ids) - 1]).argmax()))
    return token_ids[len(PROMPT) :]


def make_executor(
    runner: Runner,
    drafter: GivenDrafter | None = None,
    forward: VerificationForward | None = None,
    *,
    samples_in_runner: bool = False,
) -> ModelExecutor:
    sampler = Sampler(NUM_SLOTS, runner.vocab_size, (), runner.sampling_kernels)
    speculation = None
    if drafter is not None:
        speculation = SpeculativeExecution(
            drafter=drafter, verifier=SampleAndMatch(sampler), forward=forward or PlainForward()
        )
    table = BlockTable(NUM_SLOTS, 2)
    return ModelExecutor(
        runner,
        sampler,
        table,
        max_logit_rows=16,
        speculation=speculation,
        samples_in_runner=samples_in_runner,
    )


def prompt_plan() -> StepPlan:
    start = SequenceStart(
        slot=SLOT, sampling=SamplingParams(temperature=0.0), seed=0, prompt_len=len(PROMPT), token_ids=PROMPT
    )
    rows = SequenceRows(slot=SLOT, start=0, token_ids=PROMPT, new_blocks=(0, 1), samples=True)
    return StepPlan(step=1, released=(), started=(start,), rows=StepRows.of(rows))


def verifying_plan(pending: int, draft: tuple[int, ...]) -> StepPlan:
    rows = SequenceRows(
        slot=SLOT,
        start=len(PROMPT),
        token_ids=(pending, *draft),
        new_blocks=(),
        samples=True,
        num_drafts=len(draft),
    )
    return StepPlan(step=2, released=(), started=(), rows=StepRows.of(rows))


def verify(executor: ModelExecutor, drafter: GivenDrafter, pending: int) -> StepResult:
    """Compute the prompt, draft, and verify the whole draft."""
    executor.run(prompt_plan())
    request = DraftRequest(slot=SLOT, max_tokens=len(drafter.token_ids), new_blocks=())
    (draft,) = lines_of(executor.draft(DraftPlan(step=2, width=16, requests=(request,))).table)
    return executor.run(verifying_plan(pending, draft.token_ids))


def test_a_prompt_yields_its_first_token_with_and_without_a_drafter(runner: Runner, expected: list[int]) -> None:
    for drafter in (None, GivenDrafter()):
        assert make_executor(runner, drafter).run(prompt_plan()).token_ids == [expected[0]]


def test_the_drafter_hears_of_every_chunk_of_a_prompt(runner: Runner, expected: list[int]) -> None:
    """It may read the prompt bit by bit, as the target does."""
    drafter, plan = GivenDrafter(), prompt_plan()
    executor = make_executor(runner, drafter)
    (whole,) = plan.rows
    executor.run(replace(plan, rows=StepRows.of(replace(whole, token_ids=PROMPT[:3], samples=False))))
    assert (drafter.num_commits, drafter.committed) == (1, [])
    last = replace(whole, start=3, token_ids=PROMPT[3:], new_blocks=())
    executor.run(replace(plan, step=2, started=(), rows=StepRows.of(last)))
    assert drafter.num_commits == 2
    assert drafter.committed == [(expected[0],)]


def test_a_draft_is_accepted_as_far_as_it_is_what_the_model_says(runner: Runner, expected: list[int]) -> None:
    wrong = (expected[3] + 1) % runner.vocab_size
    drafter = GivenDrafter((expected[1], expected[2], wrong))
    found = verify(make_executor(runner, drafter), drafter, expected[0])
    assert found.token_ids == expected[1:4]
    assert found.num_cut == {}
    assert drafter.committed == [(expected[0],), tuple(expected[1:4])]


def test_the_plain_forward_cuts_nothing(runner: Runner, expected: list[int]) -> None:
    drafter = GivenDrafter((expected[1],))
    result = verify(make_executor(runner, drafter), drafter, expected[0])
    assert (result.num_cut, result.pruning) == ({}, None)


def test_a_forward_that_cuts_drafts_is_reported_and_learns_the_tokens(runner: Runner, expected: list[int]) -> None:
    """The cut token is the bonus token all the same; without it no token would be another one."""
    drafter = GivenDrafter((expected[1], expected[2]))
    cutter = LastTokenCutter()
    result = verify(make_executor(runner, drafter, cutter), drafter, expected[0])
    assert result.token_ids == expected[1:3]
    assert result.num_cut == {0: 1}
    assert result.pruning == cutter.stats
    assert cutter.learned == [(expected[0],), tuple(expected[1:3])]


def test_released_slots_are_released_everywhere(runner: Runner) -> None:
    drafter = GivenDrafter()
    executor = make_executor(runner, drafter)
    executor.run(prompt_plan())
    executor.draft(DraftPlan(step=2, width=16, requests=(), released=(SLOT,)))
    assert drafter.released == [SLOT]


def test_an_engine_without_a_drafter_does_not_draft(runner: Runner) -> None:
    with pytest.raises(AssertionError, match="no drafter"):
        make_executor(runner).draft(DraftPlan(step=1, width=16, requests=()))


def test_launched_steps_bring_the_same_tokens_one_after_the_other(runner: Runner, expected: list[int]) -> None:
    executor = make_executor(runner)
    found, launched = [], executor.launch(prompt_plan())
    for at in range(3):
        rows = SequenceRows(
            slot=SLOT, start=len(PROMPT) + at, token_ids=(PLACEHOLDER,), new_blocks=(), samples=True
        )
        following = executor.launch(StepPlan(step=2 + at, released=(), started=(), rows=StepRows.of(rows)))
        found.append(executor.collect(launched).by_sequence()[0])
        launched = following
    found.append(executor.collect(launched).by_sequence()[0])
    assert found == [(token_id,) for token_id in expected[:4]]


@pytest.mark.parametrize("on_device", [False, True])
def test_only_where_a_device_computes_is_a_part_of_the_step_preparation(runner: Runner, on_device: bool) -> None:
    result = make_executor(runner, samples_in_runner=on_device).run(prompt_plan())
    assert (0.0 < result.prepared_s < result.run_s) == on_device
    assert result.prepared_s >= 0.0
