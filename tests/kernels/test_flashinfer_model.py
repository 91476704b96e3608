"""A whole small model on the flashinfer backend, its kernels emulated, through the steps of an engine.

Oracle: the reference backend in float32. What float16 costs is measured on the reference backend too, so that the
bound is no guess. Bugs this has been seen to catch: a residual stream that is not added to, the head's product
rounded to 16 bits.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.engine.models.loader import load_decoder
from faser.kernels.backend import Backend
from faser.kernels.flashinfer_backend import FlashInferBackend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.models.paged import MAX_POSITIONS, PagedModel, Rows, prompt
from tests.kernels.fake_flashinfer import FakeAccelerator, FakeFlashInfer


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of 64 channels over two KV heads."""
    config = tiny_llama_config() | {"hidden_size": 256, "intermediate_size": 320}
    shapes = llama_shapes(config)
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, config, {name: each / 2 for name, each in random_weights(shapes).items()})
    return directory


def fake() -> FlashInferBackend:
    accelerator = FakeAccelerator()
    return FlashInferBackend(accelerator, FakeFlashInfer(accelerator))


def logits(backend: Backend, checkpoint: Path, dtype: torch.dtype) -> Tensor:
    """Of two sequences that read in pieces, verify drafts of different lengths, lose some, and decode."""
    decoder = load_decoder(
        checkpoint, backend, dtype, max_model_len=MAX_POSITIONS, max_rows=MAX_POSITIONS, progress=lambda *_: None
    )
    model = PagedModel(decoder, backend, num_sequences=2)
    first, second = prompt(40, VOCAB_SIZE, seed=1), prompt(40, VOCAB_SIZE, seed=2)
    steps = [
        [Rows(0, 0, first[:17])],
        [Rows(1, 0, second[:20]), Rows(0, 17, first[17:18])],
        [Rows(0, 18, first[18:23]), Rows(1, 20, second[20:22])],
        [Rows(0, 20, second[20:21]), Rows(1, 22, second[22:23])],
        [Rows(1, 23, second[23:27]), Rows(0, 21, first[21:22])],
    ]
    return torch.cat([model.step(batch) for batch in steps])


def test_a_model_says_what_it_says_on_the_reference_backend(checkpoint: Path) -> None:
    wanted = logits(TorchBackend(), checkpoint, torch.float32)

    def error(backend: Backend) -> float:
        return float((logits(backend, checkpoint, torch.float16) - wanted).square().mean().sqrt())

    assert error(fake()) <= 1.1 * error(TorchBackend()) < 0.01 * float(wanted.std())


def test_logits_of_the_head_are_not_rounded_to_its_type(checkpoint: Path) -> None:
    found = logits(fake(), checkpoint, torch.float16)
    assert found.dtype is torch.float32
    assert (found != found.half()).float().mean() > 0.5
