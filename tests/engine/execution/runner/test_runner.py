"""Arrays reach the device through pinned buffers, which are not filled again before they were copied.

Bugs these tests have been seen to catch: arrays that begin at the same place or come in another order, numbers of
other arrays at the end, a buffer for every step, a buffer that is not sent.

A forward in parts, from which rows leave between two layers, gives the rest what the whole one gives them.

Oracle: the forward of all rows through all layers; bits on the native kernels, a tolerance on the reference.
Planted bugs that these tests have caught: positions not compact; the old attention plan kept; the last rows of a
sequence kept instead of the first ones.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner, StagedNumbers
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.family_models import write_family_model
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend


def arrays(count: int, seed: int) -> list[NDArray[np.int64]]:
    return [
        np.random.default_rng(seed + at).integers(0, 99, length) for at, length in enumerate((count, 3, count))
    ]


@pytest.mark.parametrize("count", [0, 1, 64, 70])
def test_arrays_arrive_apart(count: int) -> None:
    staged = StagedNumbers(fake_backend())
    for seed in range(3):
        wanted = arrays(count, seed)
        found = staged.send(*wanted)
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    (nothing,) = staged.send(np.zeros(0, dtype=np.int64))
    assert len(nothing) == 0


def test_no_buffer_is_filled_while_it_may_be_copied_and_none_is_made_in_later_steps() -> None:
    accelerator = FakeAccelerator()
    staged = StagedNumbers(fake_backend(accelerator))
    addresses = {staged.send(*arrays(5, seed))[0].data_ptr() for seed in range(6)}
    accelerator.wait()  # which compares every copy with what it was given
    assert len(addresses) == 1


def test_a_device_without_pinned_memory_gets_plain_copies() -> None:
    wanted = arrays(4, 0)
    found = StagedNumbers(TorchBackend()).send(*wanted)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    assert all(each.dtype is torch.int64 for each in found)


NUM_LAYERS = 5
BLOCK_SIZE = 16
GEMMA4 = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 13,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
}
CONTEXT = 21  # tokens of every sequence that are computed before
COUNTS = (4, 1, 6)


@pytest.fixture(scope="module", params=["llama", "gemma4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama; a Gemma 4 whose tokens give to every layer, and whose last layers read keys of earlier ones."""
    directory = tmp_path_factory.mktemp("five-layers")
    if request.param == "gemma4":
        write_family_model(directory, "gemma4_text", GEMMA4)
    else:
        config = tiny_llama_config() | {"num_hidden_layers": NUM_LAYERS}
        write_checkpoint(directory, config, random_weights(llama_shapes(config), seed=1))
    return directory


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)


class Line:
    """Three sequences on one runner, their contexts computed."""

    def __init__(self, checkpoint: Path, backend: Backend) -> None:
        decoder = load_decoder(
            checkpoint, backend, torch.float32, max_model_len=64, max_rows=96, progress=lambda *_: None
        )
        shape = KvShape(
            heads=decoder.spec.kv_heads,
            num_blocks=16,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )
        self.runner = Runner(decoder, backend, shape)
        self.table = BlockTable(3, 4)
        for slot in range(3):
            self.table.append(slot, (3 * slot + 2, 3 * slot + 1, 3 * slot))
        self.runner.forward(self.batch((CONTEXT,) * 3, start=0))

    def batch(self, counts: tuple[int, ...], *, start: int = CONTEXT) -> RowBatch:
        rows = [
            SequenceRows(slot=slot, start=start, token_ids=tokens(slot, start, count), samples=True)
            for slot, count in enumerate(counts)
        ]
        return self.table.gather(StepRows.of(*rows))

    def logits(self, rows: range) -> torch.Tensor:
        return self.runner.logits(rows).clone()


def tokens(slot: int, start: int, count: int, *, seed: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng([slot, seed])
    return tuple(rng.integers(0, VOCAB_SIZE, start + count).tolist()[start:])


@pytest.fixture
def line(checkpoint: Path, backend: Backend) -> Line:
    return Line(checkpoint, backend)


def same(found: torch.Tensor, expected: torch.Tensor, backend: Backend) -> None:
    if backend.name == "native":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", range(NUM_LAYERS + 1))
@pytest.mark.parametrize("left", [(4, 1, 6), (1, 1, 1), (2, 1, 6), (4, 1, 3)])
def test_rows_that_stay_get_what_they_get_with_all_the_others(
    line: Line, backend: Backend, layer: int, left: tuple[int, ...]
) -> None:
    line.runner.forward(line.batch(COUNTS))
    all_logits = line.logits(range(sum(COUNTS)))
    line.runner.begin(line.batch(COUNTS))
    line.runner.advance(layer)
    compact = line.runner.compact(np.array(left, dtype=np.int32))
    line.runner.advance()
    kept = [sum(COUNTS[:s]) + i for s, count in enumerate(left) for i in range(count)]
    same(line.logits(range(sum(left))), all_logits[kept], backend)
    assert compact.last_rows.tolist() == (np.cumsum(left) - 1).tolist()
    assert compact.token_ids.tolist() == [t for s, n in enumerate(left) for t in tokens(s, CONTEXT, n)]


def test_what_left_is_forgotten_once_its_positions_are_fed_again(line: Line, backend: Backend) -> None:
    """Other tokens take their positions, as after a rejected draft."""
    line.runner.begin(line.batch(COUNTS))
    line.runner.advance(2)
    line.runner.compact(np.array((2, 1, 3), dtype=np.int32))
    line.runner.advance()
    again = StepRows.of(
        *(
            SequenceRows(slot=slot, start=CONTEXT + left, token_ids=tokens(slot, 9, 5, seed=7), samples=True)
            for slot, left in enumerate((2, 1, 3))
        )
    )
    line.runner.forward(line.table.gather(again))
    found = line.logits(range(15))
    line.runner.forward(line.batch((CONTEXT,) * 3, start=0))
    line.runner.forward(line.batch((2, 1, 3)))
    line.runner.forward(line.table.gather(again))
    same(found, line.logits(range(15)), backend)


@pytest.mark.parametrize("cuts", [(0,), (1, 2, 4), (5,)])
def test_a_forward_in_parts_is_the_whole_one(line: Line, backend: Backend, cuts: tuple[int, ...]) -> None:
    line.runner.forward(line.batch(COUNTS))
    expected = line.logits(range(sum(COUNTS)))
    line.runner.begin(line.batch(COUNTS))
    for layer in cuts:
        line.runner.advance(layer)
        line.runner.logits([0, 3])
    line.runner.advance()
    same(line.logits(range(sum(COUNTS))), expected, backend)


def test_every_sequence_keeps_a_row(line: Line) -> None:
    line.runner.begin(line.batch(COUNTS))
    with pytest.raises(AssertionError, match="are to be kept"):
        line.runner.compact(np.array((0, 1, 6), dtype=np.int32))
    with pytest.raises(AssertionError, match="are to be kept"):
        line.runner.compact(np.array((5, 1, 6), dtype=np.int32))
