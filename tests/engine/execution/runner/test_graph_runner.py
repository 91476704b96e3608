"""A runner that replays CUDA graphs gives what an eager one gives, step by step, for sizes in any order.

Nothing here runs on a GPU. The device is an emulation (fake_graph) that notes every tensor operation of a capture
and repeats exactly these, on the very tensors it noted. So a value baked into a graph stays baked in, and an input
that the host forgot to write in place shows. Oracle: the eager runner on the same emulation, with a cache of its
own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.layers import mixer_shapes
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable, RowBatch, TokenFeedback
from faser.engine.execution.runner.graph_runner import STAGE, GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.mixers import StateShape
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import DeviceLane
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.family_models import write_family_model
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.flashinfer.test_model import write_gemma4

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS, SLOTS, WIDTH = 2, 16, 24, 6, 4
MAX_ROWS, MAX_LOGIT_ROWS = 48, 16
MOST_DRAFTS = 7
NEAR = 2.0**-5  # a product of another number of rows may round differently
SIZES = GraphSizes(rows=(1, 2, 4, 8, 16), max_sequences=4, max_blocks_each=WIDTH)


def write_heads_of_64(directory: Path, *, noise: float = 0.0) -> Path:
    """A checkpoint of the tiny Llama with heads of 64 channels. noise: relative to each matrix."""
    config = tiny_llama_config() | {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    weights, generator = random_weights(llama_shapes(config), seed=1), torch.Generator().manual_seed(5)
    noisy = {
        name: each + noise * each.std(correction=0) * torch.randn(each.shape, generator=generator)
        for name, each in weights.items()
    }
    write_checkpoint(directory, config, noisy)
    return directory


def write_recurrent(directory: Path) -> Path:
    """Gated delta nets, and attention in every fourth layer. States do not fade within a few tokens."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    write_family_model(directory, "qwen3_5_text", fields)
    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file({name: each - 4 if name.endswith("A_log") else each for name, each in weights.items()}, path)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


class Side:
    """A backend (None: a new one) and the parts of a runner on it."""

    def __init__(
        self,
        checkpoint: Path,
        backend: FlashInferBackend | None = None,
        state_layers: tuple[int, ...] = (),
        max_model_len: int = BLOCK_SIZE * WIDTH,
        adapters: AdapterSizes | None = None,
    ) -> None:
        self.backend: FlashInferBackend = backend or fake_backend()
        self.decoder: Decoder = load_decoder(
            checkpoint,
            self.backend,
            torch.bfloat16,
            max_model_len=max_model_len,
            max_rows=MAX_ROWS,
            max_logit_rows=MAX_LOGIT_ROWS,
            state_layers=state_layers,
            progress=lambda *_: None,
            adapters=adapters,
        )
        self.kv = KvShape(
            heads=self.decoder.spec.kv_heads,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
        )
        self.states = StateShape(
            layers=mixer_shapes(self.decoder.spec),
            num_slots=SLOTS,
            most_drafts=MOST_DRAFTS,
            dtype=torch.bfloat16,
        )
        choice = self.backend.device_sampling_kernels(MAX_LOGIT_ROWS, VOCAB_SIZE)
        assert choice is not None
        self.token_sampler = DeviceTokenSampler(
            choice, self.backend.graph_capture, self.backend.device, MAX_LOGIT_ROWS
        )

    def eager(self) -> Runner:
        return Runner(self.decoder, self.backend, self.kv, self.token_sampler, self._own_states)

    def graph_runner(
        self,
        sizes: GraphSizes,
        *,
        drafts: bool = False,
        lane_captures: Mapping[DeviceLane, GraphCapture] | None = None,
        report: Callable[[str, int, int], None] = lambda *_: None,
    ) -> GraphRunner:
        return GraphRunner(
            self.decoder,
            self.backend,
            self.kv,
            self.token_sampler,
            self.backend.graph_capture,
            sizes=sizes,
            max_logit_rows=MAX_LOGIT_ROWS,
            drafts=drafts,
            lane_captures=lane_captures,
            states=self._own_states,
            report=report,
        )

    @property
    def _own_states(self) -> StateShape | None:
        return self.states if self.decoder.spec.has_states else None


@pytest.fixture(scope="module")
def replaying(checkpoint: Path) -> tuple[GraphRunner, list[tuple[str, int, int]]]:
    reports: list[tuple[str, int, int]] = []
    runner = Side(checkpoint).graph_runner(SIZES, drafts=True, report=lambda *each: reports.append(each))
    return runner, reports


@pytest.fixture
def table() -> BlockTable:
    found = BlockTable(SLOTS, WIDTH)
    blocks = random.Random(3).sample(range(NUM_BLOCKS), SLOTS * WIDTH)
    for slot in range(SLOTS):
        found.append(slot, tuple(blocks[slot * WIDTH : (slot + 1) * WIDTH]))
    return found


def rows_of(table: BlockTable, slots: list[int], starts: list[int], counts: list[int], seed: int) -> RowBatch:
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, sum(counts))
    return table.lay_out(slots, np.array(starts, np.int32), np.array(counts, np.int32), token_ids)


def asked(count: int, seed: int, *, random_share: float = 0.5) -> SamplingMetadata:
    rng = np.random.default_rng(seed)
    return SamplingMetadata(
        temperature=np.where(rng.random(count) < random_share, 0.8, 0).astype(np.float32),
        min_p=np.where(rng.random(count) < 0.3, 0.02, 0.0),
        top_k=np.where(rng.random(count) < 0.3, 20, 0),
        top_p=np.where(rng.random(count) < 0.3, 0.9, 1.0),
        seeds=rng.integers(0, 2**63, count, dtype=np.uint64),
        positions=rng.integers(0, 1000, count),
    )


def test_capturing_reports_its_progress(replaying: tuple[GraphRunner, list[tuple[str, int, int]]]) -> None:
    runner, reports = replaying
    assert {stage for stage, _, _ in reports} == {STAGE}
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert reports[-1][1] == reports[-1][2] == runner.num_graphs
    assert runner.num_graphs == len(SIZES.batch_sizes) + len(SIZES.rows) * (1 + 5 + 5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.full(but=("0", "3"))
def test_random_steps_give_what_eager_ones_give(
    checkpoint: Path, replaying: tuple[GraphRunner, list[tuple[str, int, int]]], table: BlockTable, seed: int
) -> None:
    assert_replays_are_eager_steps(Side(checkpoint).eager(), replaying[0], table, seed)


def test_random_steps_of_a_gemma_4_give_what_eager_ones_give(tmp_path: Path, table: BlockTable) -> None:
    """Its tokens give to every layer, layers read keys of others, and heads have two sizes."""
    write_gemma4(tmp_path, "as E2B")
    assert_replays_are_eager_steps(Side(tmp_path).eager(), Side(tmp_path).graph_runner(SIZES), table, seed=6)


def assert_replays_are_eager_steps(eager: Runner, replayed: GraphRunner, table: BlockTable, seed: int) -> None:
    """Some steps are too large for any graph; rejected drafts are computed again."""
    rng = random.Random(seed)
    lengths = [0] * SLOTS
    for number in range(12):
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        starts = [max(0, lengths[slot] - rng.randint(0, 2)) for slot in slots]
        most = rng.choice([1, 1, 3, 9])
        counts = [min(rng.randint(1, most), BLOCK_SIZE * WIDTH - start) for start in starts]
        counts = [max(1, count) for count in counts]
        batch = rows_of(table, slots, starts, counts, seed=100 * seed + number)
        for slot, start, count in zip(slots, starts, counts, strict=True):
            lengths[slot] = start + count
        for runner in (eager, replayed):
            runner.forward(batch)
        wanted = np.sort(np.random.default_rng(number).permutation(sum(counts))[: rng.randint(1, 16)])
        ours, theirs = replayed.logits(wanted).clone(), eager.logits(wanted).clone()
        assert_close(ours, theirs, rtol=NEAR, atol=NEAR)


def test_a_replay_leaves_the_states_that_an_eager_step_leaves(checkpoint: Path, table: BlockTable) -> None:
    """Of steps of several sizes, padded and not, in any order; the last ones are too large for any graph."""
    layers = (0, 1, NUM_LAYERS)
    eager = Side(checkpoint, state_layers=layers).eager()
    replayed = Side(checkpoint, state_layers=layers).graph_runner(SIZES)
    address = replayed.states(1).data_ptr()
    for number, counts in enumerate(([1], [1, 1, 1], [4, 2], [1, 1], [7, 6], [1] * 4, [3, 1], [9, 9])):
        slots, starts = [*range(len(counts))], [number] * len(counts)
        batch = replace(rows_of(table, slots, starts, counts, seed=number), captures=True)
        for runner in (eager, replayed):
            runner.forward(batch)
        states = replayed.states(sum(counts))
        assert_close(states, eager.states(sum(counts)), rtol=NEAR, atol=NEAR)
        assert states.data_ptr() == address, "graphs write to the same buffer"
        assert states[:, : states.shape[1] // 3].float().abs().max() > 0


def test_sequences_with_recurrent_states_go_on_behind_what_was_accepted(
    tmp_path: Path, table: BlockTable, full: bool
) -> None:
    """Steps with drafts, of which some are refused, in sizes that are padded, and prompts too large for any graph.

    Sequences begin, end and begin anew in their slots. Planted: numbers of the step before; a padding sequence
    that has the last one's rows; drafts that count as known.
    """
    write_recurrent(tmp_path)
    rng, eager, replayed = random.Random(5), Side(tmp_path).eager(), Side(tmp_path).graph_runner(SIZES)
    known = [0] * SLOTS
    num_replayed, num_steps = 0, 150 if full else 60
    for number in range(num_steps):
        slots = rng.sample(range(SLOTS), rng.randint(1, 4))
        starts = [known[slot] if known[slot] < 40 else 0 for slot in slots]
        new = [rng.choice([1, 1, 20]) if start == 0 else 1 for start in starts]
        drafts = [rng.randint(0, 3) if start else 0 for start in starts]
        counts = [one + other for one, other in zip(new, drafts, strict=True)]
        token_ids = np.random.default_rng(number).integers(0, VOCAB_SIZE, sum(counts))
        batch = table.lay_out(
            slots, np.array(starts, np.int32), np.array(counts, np.int32), token_ids, num_drafts=drafts
        )
        for slot, start, count, drafted in zip(slots, starts, new, drafts, strict=True):
            known[slot] = start + count + rng.randint(0, drafted)
        num_replayed += replayed.rows_replayed(batch) is not None
        for runner in (eager, replayed):
            runner.forward(batch)
        rows = np.arange(min(sum(counts), MAX_LOGIT_ROWS))
        assert_close(replayed.logits(rows).clone(), eager.logits(rows).clone(), rtol=NEAR, atol=NEAR)
    assert num_steps / 3 < num_replayed < num_steps


def test_steps_of_more_blocks_than_the_graphs_have_room_for_are_not_replayed(checkpoint: Path) -> None:
    """Four sequences that share three blocks: there is room for ten blocks, twice those there are and one each."""
    accelerator = FakeAccelerator()
    side, table, replays = Side(checkpoint, fake_backend(accelerator)), BlockTable(SLOTS, WIDTH), [0]
    side.kv = replace(side.kv, num_blocks=3)
    runner = side.graph_runner(SIZES)
    accelerator.on_replay = lambda _: replays.append(replays.pop() + 1)
    for slot in range(4):
        table.append(slot, (0, 1, 2))
    for starts, wanted in (
        ([40, 41, 42, 43], 0),
        ([40, 41, 42], 1),
        ([17, 18, 19, 20], 2),
        ([40, 41, 19, 20], 3),
        ([40, 41, 42, 20], 3),
    ):
        count = len(starts)
        runner.forward(rows_of(table, [*range(count)], starts, [1] * count, seed=1))
        assert replays == [wanted], starts


def test_more_single_rows_than_sizes_for_them_take_one_for_several_rows(
    checkpoint: Path, table: BlockTable
) -> None:
    accelerator = FakeAccelerator()
    side, replays = Side(checkpoint, fake_backend(accelerator)), [0]
    runner = side.graph_runner(GraphSizes(rows=(2, 8), max_sequences=4, max_blocks_each=WIDTH))
    accelerator.on_replay = lambda _: replays.append(replays.pop() + 1)
    runner.forward(rows_of(table, [0, 1, 2], [3, 0, 5], [1, 1, 1], seed=1))
    assert replays == [1]


def test_a_long_prompt_is_not_computed_in_the_narrow_tiles_of_a_graph(checkpoint: Path) -> None:
    """Of tiles for four rows: 34 rows take nine. Verification has them at any length, as have short prompts."""
    accelerator, replays, page = FakeAccelerator(), [0], 1024
    side = Side(checkpoint, fake_backend(accelerator), max_model_len=16 * page)
    side.kv = replace(side.kv, block_size=page)
    runner = side.graph_runner(GraphSizes(rows=(36,), max_sequences=4, max_blocks_each=16, tile_rows=(4,)))
    accelerator.on_replay = lambda _: replays.append(replays.pop() + 1)
    table = BlockTable(2, 16)
    table.append(0, tuple(range(16)))
    table.append(1, (16,))
    for start, rows, wanted in ((15000, 34, 0), (14000, 34, 1), (16000, 33, 2), (100, 35, 3)):
        runner.forward(rows_of(table, [0, 1], [start, 0], [rows, 1], seed=1))
        assert replays == [wanted], (start, rows)


@pytest.mark.parametrize("random_share", [0.0, 0.5])
def test_tokens_and_draft_tokens_are_those_of_the_eager_sampler(
    replaying: tuple[GraphRunner, list[tuple[str, int, int]]], table: BlockTable, random_share: float
) -> None:
    """From the very same logits; sampling may overwrite them, so they are computed anew for each."""
    runner, _ = replaying
    for count in (1, 3, 4, 7, 16):
        slots = [i % SLOTS for i in range(min(count, SLOTS))]
        batch = rows_of(table, slots, [0] * len(slots), [-(-count // len(slots))] * len(slots), seed=count)
        runner.forward(batch)
        rows, requests = np.arange(count), asked(count, seed=count, random_share=random_share)
        sampled = runner.sample(rows, requests).wait().token_ids
        drafted = runner.sample_drafts(rows, requests).wait()
        eager = Runner.sample(runner, rows, requests), Runner.sample_drafts(runner, rows, requests)
        theirs, their_draft = (each.wait() for each in eager)
        assert sampled.tolist() == theirs.token_ids.tolist()
        assert drafted.token_ids.tolist() == their_draft.token_ids.tolist()
        assert drafted.margins is not None
        assert their_draft.margins is not None
        assert drafted.margins.tolist() == their_draft.margins.tolist()


def test_a_token_is_fed_back_on_the_device(
    replaying: tuple[GraphRunner, list[tuple[str, int, int]]], table: BlockTable
) -> None:
    runner, _ = replaying
    slots, count = [3, 0, 5], 3
    first = rows_of(table, slots, [0] * 3, [4] * 3, seed=1)
    after = rows_of(table, slots[:2], [4] * 2, [1] * 2, seed=2)
    runner.forward(first)
    pending = runner.sample(first.last_rows, asked(count, seed=5))
    feedback = TokenFeedback(tokens=pending.tokens, rows=np.arange(2), sources=np.array([2, 0]))
    fed_back = RowBatch(
        token_ids=after.token_ids, layout=after.layout, last_rows=after.last_rows, feedback=feedback
    )

    runner.forward(fed_back)
    found = runner.logits(fed_back.last_rows).clone()

    known = torch.from_numpy(pending.wait().token_ids[[2, 0]])
    runner.forward(RowBatch(token_ids=known, layout=after.layout, last_rows=after.last_rows))
    assert torch.equal(found, runner.logits(after.last_rows))
