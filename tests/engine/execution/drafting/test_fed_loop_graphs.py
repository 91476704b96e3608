"""Passes that are fed, over a runner that replays recordings, on the emulated device of test_graphs.

Oracle: the loop that waits, over the same runner. Its passes have the same rows, so the drafts are the same, bit
for bit. Planted bugs that this test has caught: the tokens of who went on before; rows one position on.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from faser.engine.contract.plan import SequenceStart, StopRule
from faser.engine.execution.drafting.fed_loop import FedPassLoop
from faser.engine.execution.drafting.loop import DraftInput, ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import (
    GreedyDraftSampler,
    PointMassSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.draft_lines import margins_of, same, tokens_of
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_ROWS,
    NUM_BLOCKS,
    SIZES,
    WIDTH,
    Side,
    write_heads_of_64,
)
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

SLOTS, MOST_TOKENS = NUM_BLOCKS // WIDTH, 6


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    return Side(write_heads_of_64(tmp_path_factory.mktemp("heads-of-64")))


@dataclass
class Counting(FakeAccelerator):
    """sends: copies to the device, from pinned memory."""

    sends: int = 0

    def transfer(self, source: Tensor, target: Tensor) -> None:
        self.sends += self.is_pinned(source)
        super().transfer(source, target)


@pytest.fixture(scope="module")
def runner(side: Side) -> GraphRunner:
    return recorded(side)


def recorded(side: Side) -> GraphRunner:
    return side.graph_runner(SIZES, drafts=True)


def random_inputs(rng: random.Random, texts: list[list[int]], computed: list[int]) -> list[DraftInput]:
    """All fit into one pass: then both loops have the same rows in it."""
    found, room = [], MAX_ROWS
    for slot in sorted(rng.sample(range(SLOTS), rng.randint(1, SLOTS))):
        start = rng.randint(0, computed[slot])
        left = BLOCK_SIZE * WIDTH - MOST_TOKENS - start
        count = max(1, min(rng.choice((1, 1, 2, 9)), room - SLOTS, left))
        room -= count
        token_ids = tuple(texts[slot][start : start + count])
        found.append(
            DraftInput(slot=slot, start=start, token_ids=token_ids, max_tokens=rng.randint(1, MOST_TOKENS))
        )
        computed[slot] = start + count
    return found


@pytest.mark.parametrize("coupled", [False, True])
def test_recorded_passes_draft_what_passes_that_wait_draft(side: Side, runner: GraphRunner, coupled: bool) -> None:
    """Of more sequences than recordings take, too; with a rule for rows that ends some drafts early."""
    rng, table = random.Random(6), BlockTable(SLOTS, WIDTH)
    for slot in range(SLOTS):
        table.append(slot, tuple(range(slot * WIDTH, (slot + 1) * WIDTH)))
    arithmetic = side.backend.sampling_kernels
    state = SamplingState(SLOTS)
    choice: PointMassSampler = (
        SampleAndMatchDraftSampler(state, kernels=arithmetic) if coupled else GreedyDraftSampler(arithmetic)
    )
    for slot in range(SLOTS):
        sampling = SamplingParams(temperature=0.8 * (slot % 2), top_p=0.9)
        state.start(SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(1,)))
    waiting = PassLoop(ModelPasses(runner, table, max_rows=MAX_ROWS), choice)
    fed = FedPassLoop(ModelPasses(runner, table, max_rows=MAX_ROWS), choice)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE * WIDTH)] for _ in range(SLOTS)]
    computed = [0] * SLOTS
    num_drafted = 0
    for _ in range(12):
        asked = random_inputs(rng, texts, computed)
        expected = waiting.draft(asked, None)
        assert same(fed.draft(asked, None), expected)
        num_drafted += expected.lengths.sum()
    assert num_drafted > 100
    rule = StopRule(row_price=0.3, pass_prices=(-1.0,) * SLOTS, intercept=0.0, slope=2.0)
    alone = [DraftInput(slot=3, start=0, token_ids=tuple(texts[3][:5]), max_tokens=MOST_TOKENS)]
    found, kept = (loop.draft(alone, rule) for loop in (fed, waiting))
    assert (tokens_of(found), margins_of(found)) == (tokens_of(kept), margins_of(kept))


@pytest.mark.parametrize("most_tokens", [3, MOST_TOKENS])
def test_passes_after_the_second_send_nothing(tmp_path: Path, most_tokens: int) -> None:
    """The first two send inputs, layout and the rows of their logits; the second one also where the device begins.

    Greedy rows ask for nothing.
    """
    accelerator = Counting()
    side, table = Side(write_heads_of_64(tmp_path), fake_backend(accelerator)), BlockTable(SLOTS, WIDTH)
    for slot in (0, 1):
        table.append(slot, tuple(range(slot * WIDTH, (slot + 1) * WIDTH)))
    choice, looping = GreedyDraftSampler(side.backend.sampling_kernels), recorded(side)
    fed = FedPassLoop(ModelPasses(looping, table, max_rows=MAX_ROWS), choice)
    inputs = [DraftInput(slot=slot, start=0, token_ids=(1, 2, 3), max_tokens=most_tokens) for slot in (0, 1)]
    sends = accelerator.sends
    assert fed.draft(inputs, None).passes == most_tokens
    assert accelerator.sends - sends == 3 + 4
