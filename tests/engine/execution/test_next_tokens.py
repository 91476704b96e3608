"""All ways from the rows of a forward to the next tokens find the same ones. Oracle: the largest logits."""

import pytest

from faser.engine.contract.plan import SequenceRows, SequenceStart, StepRows
from faser.engine.execution.drafting.drafter import ProposedDrafts
from faser.engine.execution.next_tokens import NextTokens
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch
from faser.kernels.torch_backend import TorchBackend
from faser.types.sampling import SamplingParams
from tests.engine.execution.greedy_sampler import GreedySampler
from tests.engine.execution.pruning_world import NUM_SLOTS, make_runner, write_pair

PROMPTS = {3: (11, 12, 13), 1: (21, 22, 23, 24), 0: (31, 32)}  # by slot, in the order of the step
UNFINISHED = 1  # the slot whose prompt goes on in the next step


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return make_runner(write_pair(tmp_path_factory.mktemp("pair"))[0], TorchBackend(), GreedySampler())


def forward(runner: Runner, drafts: dict[int, tuple[int, ...]]) -> tuple[StepRows, RowBatch]:
    """A step with the prompts and the drafts after them. drafts: by slot."""
    table = BlockTable(NUM_SLOTS, 1)
    rows = []
    for slot, prompt in PROMPTS.items():
        draft = drafts.get(slot, ())
        table.append(slot, (slot,))
        rows.append(
            SequenceRows(
                slot=slot,
                start=0,
                token_ids=(*prompt, *draft),
                new_blocks=(),
                samples=slot != UNFINISHED,
                num_drafts=len(draft),
            )
        )
    step = StepRows.of(*rows)
    batch = table.gather(step)
    runner.forward(batch)
    return step, batch


def next_tokens(runner: Runner, *, samples_in_runner: bool, **sampling: int) -> NextTokens:
    sampler = Sampler(NUM_SLOTS, runner.vocab_size, (), runner.sampling_kernels)
    for slot, prompt in PROMPTS.items():
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        start = SequenceStart(slot=slot, sampling=params, seed=0, prompt_len=len(prompt), token_ids=prompt)
        sampler.start(start)
    return NextTokens(
        runner,
        sampler,
        ProposedDrafts(),
        verifier=SampleAndMatch(sampler),
        samples_in_runner=samples_in_runner,
    )


def largest(runner: Runner, batch: RowBatch, rows: list[int]) -> list[int]:
    runner.forward(batch)
    found: list[int] = runner.logits(rows).argmax(-1).tolist()
    return found


@pytest.mark.parametrize("samples_in_runner", [True, False])
def test_without_drafts_every_sequence_gets_the_token_of_its_last_row(
    runner: Runner, samples_in_runner: bool
) -> None:
    rows, batch = forward(runner, {})
    finding = next_tokens(runner, samples_in_runner=samples_in_runner).of(rows, batch)
    found = finding.wait()
    assert finding.launches_more is not samples_in_runner
    first, second = largest(runner, batch, [2, 8])
    assert (found.counts, found.token_ids) == ([1, 0, 1], [first, second])


@pytest.mark.parametrize("samples_in_runner", [True, False])
def test_drafts_are_accepted_as_far_as_they_are_the_largest_logits(
    runner: Runner, samples_in_runner: bool
) -> None:
    _, batch = forward(runner, {})
    (right,) = largest(runner, batch, [2])
    rows, batch = forward(runner, {3: (right, right)})
    bonus, other = largest(runner, batch, [3, 10])
    assert bonus != right, "the second drafted token is meant to be wrong"
    finding = next_tokens(runner, samples_in_runner=samples_in_runner).of(rows, batch)
    found = finding.wait()
    assert finding.launches_more is not samples_in_runner
    assert (found.counts, found.token_ids) == ([2, 0, 1], [right, bonus, other])


def test_the_runner_does_not_sample_for_requests_that_report_log_probabilities(runner: Runner) -> None:
    rows, batch = forward(runner, {})
    finding = next_tokens(runner, samples_in_runner=True, logprobs=1).of(rows, batch)
    assert finding.launches_more
    assert [*finding.wait().logprobs] == [0, 2]


def test_a_step_in_which_no_sequence_samples_brings_nothing(runner: Runner) -> None:
    rows, batch = forward(runner, {})
    (unfinished,) = (each for each in rows if each.slot == UNFINISHED)
    assert next_tokens(runner, samples_in_runner=True).of(
        StepRows.of(unfinished), batch
    ).wait() == StepTokens.none(1)
