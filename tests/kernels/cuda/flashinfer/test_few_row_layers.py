"""A model whose attention of few rows is one launch says what it says otherwise, kernel by kernel and as graphs.

The kernel runs in Triton's interpreter, everything around them is emulated. Bugs these tests have been seen to
catch: the cache of another layer, a counter that is not reset between replays, several rows of one sequence taken
for one row of several, more rows than the kernel takes.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.engine.execution.models.loader import load_decoder
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.cuda.flashinfer.few_row_blocks import MOST_ROWS
from faser.kernels.cuda.flashinfer.few_row_layers import FewRowLayers
from faser.kernels.cuda.flashinfer.paged_layout import PagedLayout
from faser.kernels.interface.blocks import DecoderLayer
from faser.kernels.interface.shapes import AttentionShape
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.models.paged import MAX_POSITIONS, PagedModel, Rows, prompt
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.flashinfer.test_model import GraphModel, logits, steps


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of two heads of 64 channels over one KV head."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_llama_config() | heads | {"hidden_size": 128, "intermediate_size": 96}
    directory = tmp_path_factory.mktemp("checkpoint")
    weights = random_weights(llama_shapes(config))
    write_checkpoint(directory, config, {name: each / 2 for name, each in weights.items()})
    return directory


class Attention:
    """The kernel, as one launch of the emulated device. rows: of each launch."""

    def __init__(self, device: FakeAccelerator) -> None:
        made = triton_kernels(device.device).few_row_attention
        assert made is not None
        self._attention, self._device = made(), device
        self.rows: list[int] = []

    def takes(self, shape: AttentionShape, rows_each: int) -> bool:
        return self._attention.takes(shape, rows_each)

    def __call__(
        self, layer: DecoderLayer, shape: AttentionShape, qkv: Tensor, pages: tuple[Tensor, Tensor],
        layout: PagedLayout, rows_each: int, out: Tensor,
    ) -> None:  # fmt: skip
        self.rows.append(len(qkv))
        self._device.launch(partial(self._attention, layer, shape, qkv, pages, layout, rows_each, out))


def backend_of(chosen: Chosen) -> tuple[FlashInferBackend, FakeFlashInfer, Attention]:
    device = FakeAccelerator()
    library, attention = FakeFlashInfer(device), Attention(device)
    kernels = replace(fake_kernels(device), few_row_attention=lambda: attention)
    return FlashInferBackend(device, library, kernels, choices=chosen), library, attention


@pytest.mark.full
def test_a_model_says_what_it_says_on_the_reference_backend(checkpoint: Path) -> None:
    """Kernel by kernel. Steps of more than eight rows launch as always, and each shape is asked for once."""
    reference = TorchBackend()
    wanted = logits(reference, checkpoint, torch.float32)

    def error(found: Tensor) -> float:
        return float((found - wanted).square().mean().sqrt())

    bound = 1.1 * error(logits(reference, checkpoint, torch.float16))
    chosen = Chosen("one launch", "separate", computes="attention")
    backend, _, attention = backend_of(chosen)
    assert error(logits(backend, checkpoint, torch.float16)) <= bound
    assert len(chosen.keys) == len(set(chosen.keys))
    assert attention.rows == [7, 7, 7, 2, 2, 2, 5, 5, 5], "each is measured once, then of both layers"


def test_a_replayed_model_says_what_it_says_on_the_reference_backend(checkpoint: Path) -> None:
    """Every step of few rows twice: what a launch leaves behind is ready for the next one. Nothing is planned."""
    wanted = logits(TorchBackend(), checkpoint, torch.float32)
    bound = 1.1 * float((logits(TorchBackend(), checkpoint, torch.float16) - wanted).square().mean().sqrt())
    backend, library, _ = backend_of(Chosen("one launch", "separate", computes="nothing"))
    model = GraphModel(checkpoint, torch.float16, backend)
    found = []
    for batch in steps():
        before = library.calls.total()
        found.append(model.step(batch))
        if sum(len(rows.token_ids) for rows in batch) <= 8:
            found[-1] = model.step(batch)
            assert library.calls.total() == before, batch
    assert float((torch.cat(found) - wanted).square().mean().sqrt()) <= bound


def test_a_row_more_than_the_kernel_takes_has_separate_launches(checkpoint: Path) -> None:
    backend, _, attention = backend_of(Chosen("one launch", "separate", computes="nothing"))
    decoder = load_decoder(
        checkpoint, backend, torch.float16, max_model_len=MAX_POSITIONS, max_rows=16, progress=lambda *_: None
    )
    tokens = prompt(MOST_ROWS + 1, VOCAB_SIZE)
    PagedModel(decoder, backend, num_sequences=2).step([Rows(0, 0, tokens)])
    assert not attention.rows
    PagedModel(decoder, backend, num_sequences=2).step([Rows(0, 0, tokens[:MOST_ROWS])])
    assert attention.rows == [MOST_ROWS] * 2, "of each layer"


def test_what_the_kernel_does_not_compute_keeps_separate_launches() -> None:
    attention = Attention(FakeAccelerator())
    shape = AttentionShape(num_heads=16, num_kv_heads=2, head_dim=128, scale=1.0)
    assert attention.takes(shape, 4)
    assert not attention.takes(shape, 5), "40 queries of a KV head"
    assert not attention.takes(replace(shape, head_dim=512), 1)
    assert isinstance(backend_of(Chosen("separate"))[0].layers, FewRowLayers)
