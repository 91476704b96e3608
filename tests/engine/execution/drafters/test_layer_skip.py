"""Drafts of the target's own first layers: what a model made of these layers alone would say.

Planted bugs that these tests have caught: the draft rows run all layers; a commit that counts the accepted tokens
only.
"""

import random
from pathlib import Path

import pytest

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.drafters.draft_samplers import GreedyDraftSampler
from faser.engine.execution.drafters.layer_skip import METHOD, LayerSkip, draft_layers
from faser.engine.execution.drafters.passes import PassLoop
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.errors import ConfigError
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.drafters.drafting import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_SLOTS,
    Oracle,
    World,
    check_drafts,
    make_runner,
)

NUM_LAYERS, DRAFT_LAYERS = 4, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layer-skip") / "target"
    config = tiny_llama_config() | {"num_hidden_layers": NUM_LAYERS}
    write_checkpoint(directory, config, random_weights(llama_shapes(config)))
    return directory


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A checkpoint that has the target's first layers only."""
    directory = tmp_path_factory.mktemp("layer-skip") / "first-layers"
    config = tiny_llama_config() | {"num_hidden_layers": NUM_LAYERS}
    weights = random_weights(llama_shapes(config))
    shallow = config | {"num_hidden_layers": DRAFT_LAYERS}
    write_checkpoint(directory, shallow, {name: weights[name] for name in llama_shapes(shallow)})
    return Oracle(directory)


def compute(runner: Runner, world: World, slot: int, start: int, token_ids: list[int]) -> None:
    """The target runs rows, as many a step as it may."""
    for at in range(0, len(token_ids), MAX_ROWS):
        part = tuple(token_ids[at : at + MAX_ROWS])
        rows = SequenceRows(slot=slot, start=start + at, token_ids=part, new_blocks=(), samples=False)
        runner.forward(world.table.gather((rows,)))


@pytest.mark.parametrize("seed", range(2))
def test_drafts_are_those_of_the_first_layers_alone(target: Path, oracle: Oracle, seed: int) -> None:
    """Oracle: greedy decoding from the first token on, with a checkpoint of the first layers."""
    runner = make_runner(target)
    table = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE))
    choice = GreedyDraftSampler()
    loop = PassLoop(runner, table, choice, max_rows=MAX_ROWS, num_layers=DRAFT_LAYERS)
    world = World(LayerSkip(loop), table, random.Random(seed))
    rng = world.rng
    for _ in range(25):
        for slot in range(NUM_SLOTS):
            line = world.lines.get(slot)
            if line is None and rng.random() < 0.7:
                prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
                world.start(slot, prompt)
                compute(runner, world, slot, 0, prompt[:-1])
            elif line is not None and (rng.random() < 0.05 or len(line.token_ids) > MAX_LEN - 16):
                world.release(slot)
        requests = {slot: rng.randrange(1, 6) for slot in world.lines if rng.random() < 0.7}
        found = world.propose(requests)
        assert [len(draft.token_ids) for draft in found.drafts] == list(requests.values())
        assert {draft.method for draft in found.drafts} <= {METHOD}
        assert found.catchup_tokens == 0
        check_drafts(world, found.drafts, oracle)
        for slot, line in list(world.lines.items()):
            kept = line.draft[: rng.randint(0, len(line.draft))]
            compute(runner, world, slot, len(line.token_ids) - 1, [line.token_ids[-1], *kept])
            world.commit({slot: world.accept(slot, rng.randint(0, len(kept)))})


def test_unverified_tokens_are_not_continued_by_the_layers_that_verify_them(target: Path) -> None:
    table = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE))
    choice = GreedyDraftSampler()
    loop = PassLoop(make_runner(target), table, choice, max_rows=MAX_ROWS, num_layers=DRAFT_LAYERS)
    world = World(LayerSkip(loop), table, random.Random(0))
    world.start(0, [1, 2, 3])

    assert not world.drafter.drafts_overlapped
    with pytest.raises(AssertionError, match="slot 0: layer_skip continues no unverified tokens"):
        world.propose({0: 2}, unverified={0: (4,)})


@pytest.mark.parametrize("num_layers, expected", [(2, 1), (7, 1), (30, 7)])
def test_a_quarter_of_the_layers_drafts_unless_told_otherwise(num_layers: int, expected: int) -> None:
    assert draft_layers(None, num_layers) == expected


@pytest.mark.parametrize("asked", [0, 4, 5])
def test_layers_that_would_draft_nothing_or_everything_are_refused(asked: int) -> None:
    with pytest.raises(ConfigError, match=f"draft_layers is {asked}; the target has 4 layers.*at most 3"):
        draft_layers(asked, 4)


def test_a_target_of_one_layer_cannot_skip_any() -> None:
    with pytest.raises(ConfigError, match="at least 2 layers; this one has 1"):
        draft_layers(None, 1)
