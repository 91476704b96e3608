"""A head for a tiny target of another family, from answers to files. Oracle: the engine's own reader and head."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.config.engine import EngineConfig
from faser.distill.acceptance import HeldOutAcceptance
from faser.distill.batch import make_batch
from faser.distill.dataset import Dataset, RecordedConversation, Shard, held_out
from faser.distill.distillation import Distillation, HeadSettings, faster_dtype, state_layers
from faser.distill.drafters import head_spec
from faser.distill.head import TrainableHead
from faser.distill.target import FrozenTarget, Passage
from faser.distill.trainer import TrainingProgress, TrainingSettings
from faser.engine.checkpoints.blocks import read_block_spec
from faser.engine.checkpoints.families.architecture import DenseSpec
from faser.engine.execution.drafting.blocks.loop import BlockRunner
from faser.engine.execution.drafting.blocks.weights import load_block
from faser.engine.execution.drafting.heads.weights import load_head
from faser.errors import ConfigError
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from tests.distill.block_reference import BlockReference
from tests.distill.small_target import load_small_target
from tests.engine.execution.drafting.seeded_heads import MAX_POSITIONS, PagedHead

SETTINGS = TrainingSettings(epochs=4, rows=256, steps=3, rate=5e-3, warm_up=2)
HEAD = HeadSettings(draft_vocab_size=96, int8=False, dtype="float32")
BLOCK = replace(HEAD, block=True)


@pytest.fixture(scope="module")
def target(small_target: Path) -> FrozenTarget:
    return load_small_target(small_target)


def answers(folder: Path, target: FrozenTarget) -> Dataset:
    """Conversations whose answers are the target's own, greedy; half of them are said to be sampled."""
    dataset = Dataset(folder, {})
    if dataset.records:
        return dataset
    rng = np.random.default_rng(7)
    states = target.states((1,), top=1)
    conversations = []
    for at in range(80):
        prompt = rng.integers(3, 300, 6 + at % 5).tolist()
        tokens = [*prompt]
        for _ in range(18):
            logits_of = torch.tensor([*tokens, 0])
            (found,) = states.compute([_passage(logits_of, len(tokens) - 1)])
            tokens.append(int(found.top_ids[0, 0]))
        answer = tuple(tokens[len(prompt) :])
        conversations.append(
            RecordedConversation(prompt=tuple(prompt), answer=answer, ended=True, temperature=0.8 * (at % 2))
        )
    dataset.add(Shard.of(conversations))
    return dataset


def _passage(token_ids: torch.Tensor, first_row: int) -> Passage:
    return Passage(token_ids=token_ids, first_row=first_row)


@pytest.fixture(scope="module")
def dataset(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return answers(tmp_path_factory.mktemp("answers"), target)


def distillation(
    folder: Path, target: FrozenTarget, settings: TrainingSettings = SETTINGS, head: HeadSettings = HEAD
) -> Distillation:
    config = EngineConfig(backend="torch", num_threads=1)
    return Distillation(folder, target, "tiny-qwen", config, settings, head)


def made(folder: Path, target: FrozenTarget, dataset: Dataset, head: HeadSettings = HEAD) -> HeldOutAcceptance:
    work = distillation(folder, target, head=head)
    work.record(dataset, lambda *_: None)
    shown: list[TrainingProgress] = []
    assert work.train(dataset, shown.append, lambda: False)
    found = work.measure(temperature=0.8, on_batch=lambda *_: None)
    work.write({"acceptance": found.greedy})
    assert shown[-1].loss < shown[0].loss
    return found


@pytest.fixture(scope="module")
def head_folder(target: FrozenTarget, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    made(folder, target, dataset)
    return folder


def served(folder: Path, target: FrozenTarget) -> PagedHead:
    head = load_head(folder, target.decoder, target.backend, max_positions=MAX_POSITIONS, max_rows=64)
    return PagedHead(head, target.backend, torch.float32)


@pytest.mark.full
def test_the_written_head_drafts_what_the_trained_one_does(head_folder: Path, target: FrozenTarget) -> None:
    """Logits of a draft from each row: of the unrolled steps, and of the engine's head over its paged cache."""
    work = distillation(head_folder, target)
    state, store = work._trained(), work._store(held_out)
    trained = work._head(state)
    assert isinstance(trained, TrainableHead)
    compared = 0
    for index in range(len(store)):
        one = store.sample(index)
        for row in range(one.prompt_tokens, len(one.token_ids) - SETTINGS.steps, 4):
            drafted, logits = served(head_folder, target).draft(
                one.token_ids[1 : row + 1].tolist(), one.states[:row].float(), SETTINGS.steps, chunk=5
            )
            ahead = torch.tensor(drafted)
            changed = torch.cat((one.token_ids[: row + 1], ahead, one.token_ids[row + 1 + len(ahead) :]))
            with torch.inference_mode():
                outputs = trained.outputs(
                    make_batch([replace(one, token_ids=changed)], SETTINGS.steps), SETTINGS.steps
                )
                for step, output in enumerate(outputs):
                    own = trained.logits_input(output[row - one.prompt_tokens][None]) @ trained.head().T
                    torch.testing.assert_close(own[0], logits[step], rtol=3e-2, atol=3e-2)  # stored in bfloat16
                    compared += 1
    assert compared > 20


@pytest.mark.full
def test_measured_acceptance_is_that_of_served_drafts(head_folder: Path, target: FrozenTarget) -> None:
    """Seen to catch: a step of the training that sees a later state, whose drafts are served far worse."""
    work = distillation(head_folder, target)
    found = work.measure(temperature=0.8, on_batch=lambda *_: None)
    store = work._store(held_out)
    steps = len(found.greedy)
    assert steps > SETTINGS.steps
    accepted = np.zeros(steps)
    rows = 0
    for index in range(len(store)):
        one = store.sample(index)
        if not one.greedy:
            continue
        for row in range(one.prompt_tokens, len(one.token_ids) - steps):
            drafted, _ = served(head_folder, target).draft(
                one.token_ids[1 : row + 1].tolist(), one.states[:row].float(), steps, chunk=64
            )
            said = one.token_ids[row + 1 : row + 1 + steps].tolist()
            accepted += [drafted[: at + 1] == said[: at + 1] for at in range(steps)]
            rows += 1
    assert rows == found.greedy_rows
    assert found.greedy == pytest.approx((accepted / rows).tolist(), abs=1.5 / rows)


@pytest.fixture(scope="module")
def block_folder(target: FrozenTarget, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block")
    assert len(made(folder, target, dataset, BLOCK).greedy) == SETTINGS.steps, "a block drafts no more"
    return folder


def test_a_block_learns_from_every_second_position(block_folder: Path, target: FrozenTarget) -> None:
    work = distillation(block_folder, target, head=BLOCK)
    anchors = [-(-rows // 2) for rows in work._store(lambda at: not held_out(at)).drafting_rows]
    assert work._trained().rows == SETTINGS.epochs * sum(anchors)


@pytest.mark.parametrize("kind", [HEAD, BLOCK], ids=["head", "block"])
def test_a_stopped_training_ends_with_the_same_head(
    kind: HeadSettings, request: pytest.FixtureRequest, target: FrozenTarget, dataset: Dataset, tmp_path: Path
) -> None:
    head_folder = request.getfixturevalue("block_folder" if kind.block else "head_folder")
    stopped = 0
    while True:
        work = distillation(tmp_path, target, head=kind)
        work.record(dataset, lambda *_: None)
        if work.train(dataset, lambda _found: None, lambda: True):
            break
        stopped += 1
    work.write({})
    assert stopped > 4
    names = ("config.json", "model.safetensors")
    assert [(tmp_path / name).read_bytes() for name in names] == [
        (head_folder / name).read_bytes() for name in names
    ]


def test_a_head_of_eight_bits_is_half_as_large_and_drafts_nearly_the_same(
    head_folder: Path, target: FrozenTarget, dataset: Dataset, tmp_path: Path
) -> None:
    made(tmp_path, target, dataset, replace(HEAD, int8=True))
    small, large = ((path / "model.safetensors").stat().st_size for path in (tmp_path, head_folder))
    assert small < 0.7 * large
    work = distillation(tmp_path, target)
    one = work._store(held_out).sample(0)
    drafts = [
        served(folder, target).draft(
            one.token_ids[1 : one.prompt_tokens + 1].tolist(), one.states[: one.prompt_tokens].float(), 1, chunk=9
        )[1]
        for folder in (tmp_path, head_folder)
    ]
    torch.testing.assert_close(drafts[0], drafts[1], rtol=0.1, atol=0.1 * float(drafts[1].std()))


def test_a_written_block_drafts_what_the_trained_one_does(block_folder: Path, target: FrozenTarget) -> None:
    work = distillation(block_folder, target, head=BLOCK)
    one = work._store(held_out).sample(0)
    trained = work._head(work._trained())
    with torch.inference_mode():
        batch = make_batch([one], SETTINGS.steps, every=2)
        logits = torch.stack(list(trained.logits(batch, SETTINGS.steps)), 1)
    anchors = list(range(one.prompt_tokens, len(one.token_ids) - SETTINGS.steps, 2))
    found = BlockReference(block_folder, target.embedding()).draft(one.token_ids, one.states, anchors)
    torch.testing.assert_close(logits[: len(anchors)].double(), found.logits, rtol=3e-2, atol=3e-2)  # in bfloat16


def test_the_engine_drafts_from_a_written_block(block_folder: Path, target: FrozenTarget) -> None:
    """Seen to catch: layers counted by their outputs, whose states are those of other layers."""
    trained = distillation(block_folder, target, head=BLOCK)
    one = trained._store(held_out).sample(0)
    spec = read_block_spec(block_folder, target.config.spec, "dspark")
    assert spec.state_layers == trained._layers
    assert (spec.most_tokens, spec.causal, spec.confidence) == (SETTINGS.steps, (False, False), True)
    model = load_block(
        block_folder, spec, target.decoder, target.backend, max_positions=64, max_rows=64, max_logit_rows=4
    )
    kv = KvShape(heads=spec.decoder.kv_heads, num_blocks=4, block_size=16, dtype=torch.float32)
    vocab_size = target.config.spec.vocab_size
    runner = BlockRunner(
        model, target.backend, kv, states=torch.zeros(64, spec.states_size), vocab_size=vocab_size
    )
    anchor, rows = one.prompt_tokens + 3, SETTINGS.steps
    total = anchor + rows
    layout = RowLayout(
        query_start=torch.tensor([0, total], dtype=torch.int32),
        seq_len=torch.tensor([total], dtype=torch.int32),
        positions=torch.arange(total, dtype=torch.int32),
        block_table=torch.arange(4, dtype=torch.int32)[None],
    )
    before = one.token_ids[anchor : anchor + rows].numpy()
    with torch.inference_mode():
        block_ids = np.array([before[0], *[0] * (rows - 1)])
        hidden = runner.run(layout, [anchor], block_ids, one.states[:anchor].float())
        found = model.candidates(hidden, torch.from_numpy(before))  # each row as the first one, behind its token
    assert found.pairs is not None
    assert found.confidences is not None
    wanted = BlockReference(block_folder, target.embedding())
    drafted = wanted.draft(one.token_ids, one.states, [anchor])
    own_rows = torch.searchsorted(wanted.draft_ids, found.token_ids)
    scores = (found.scores + found.pairs[:, :, 0]).double()
    torch.testing.assert_close(scores, drafted.logits[0].gather(1, own_rows), rtol=1e-3, atol=1e-3)
    chances = found.confidences[:, 0].double().sigmoid()
    torch.testing.assert_close(chances, drafted.confidence[0], rtol=1e-3, atol=1e-3)


def test_other_settings_are_refused_by_name(head_folder: Path, target: FrozenTarget) -> None:
    with pytest.raises(ConfigError, match=r"training\.safetensors was begun with draft_vocab_size 96, not 64"):
        distillation(head_folder, target, head=replace(HEAD, draft_vocab_size=64))
    with pytest.raises(ConfigError, match="was begun with steps 3, not 2"):
        distillation(head_folder, target, settings=replace(SETTINGS, steps=2))
    with pytest.raises(ConfigError, match='was begun with drafter "eagle3", not "dspark"'):
        distillation(head_folder, target, head=BLOCK)
    distillation(head_folder, target, settings=replace(SETTINGS, epochs=9))


def test_a_folder_without_a_head_has_none_to_measure(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.safetensors is missing; there is no head yet"):
        distillation(tmp_path, target).measure(temperature=0.8, on_batch=lambda *_: None)


@pytest.mark.parametrize("layers, expected", [(30, (2, 15, 27)), (8, (2, 4, 5)), (2, (0, 1, 2)), (1, (0, 1))])
def test_states_are_read_early_in_the_middle_and_late(layers: int, expected: tuple[int, ...]) -> None:
    assert state_layers(layers) == expected


def test_the_faster_type_is_one_that_computes() -> None:
    assert faster_dtype(torch.device("cpu")) in ("bfloat16", "float32")
    assert faster_dtype(torch.device("cuda")) == "bfloat16"


def test_a_head_has_a_feed_forward_of_at_most_three_widths(target: FrozenTarget) -> None:
    decoder = target.config.spec
    for size, expected in ((2, 2), (3, 3), (6, 3)):
        layer = replace(decoder.layers[0], feed_forward=DenseSpec(size=size * decoder.hidden_size))
        wide = replace(decoder, layers=(layer,) * decoder.num_layers)
        spec = head_spec(wide, state_layers(decoder.num_layers), 96, "wide")
        assert spec.decoder.feed_forward.size == expected * decoder.hidden_size
