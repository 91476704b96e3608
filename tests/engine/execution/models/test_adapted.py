"""A decoder whose rows have adapters gives what a model with merged weights, W + B A, gives.

Planted bugs that these tests have caught: the neighbour's rows; columns of a part one panel off; orders of rows
ignored; a scale of twice its size; rates of delta nets swapped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import open_source
from faser.engine.execution.models.weights import WeightSource
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.test_families import CASES, Case
from tests.engine.execution.models.paged import Rows, load, prompt

LoraWeights = Mapping[str, tuple[Tensor, Tensor]]  # A [r, K] and B [N, r], with the scale, by the tensor's name
SIZES = AdapterSizes(slots=4, max_rank=8)


@dataclass(frozen=True, slots=True)
class Merged:
    """A checkpoint whose tensors W are W + B A."""

    source: WeightSource
    lora: LoraWeights

    def names(self) -> list[str]:
        return [*self.source.names()]

    def get(self, name: str) -> Tensor:
        found = self.source.get(name)
        pair = self.lora.get(name.removesuffix(".weight"))
        return found if pair is None else (found.double() + pair[1].double() @ pair[0].double()).float()


def some_lora(decoder: Decoder, seed: int, rank: int = 4, only: str = "") -> LoraWeights:
    """Weights for all tensors that can be adapted, or those whose name contains `only`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {part.name: part.shape for product in decoder.adapted for part in product.parts if only in part.name}

    def random(*size: int) -> Tensor:
        found: Tensor = torch.randn(size, generator=generator) * (0.5 / size[-1] ** 0.5)
        return found

    return {name: (random(rank, depth), random(rows, rank)) for name, (rows, depth) in sorted(shapes.items())}


def put(decoder: Decoder, backend: Backend, slot: int, lora: LoraWeights) -> None:
    for product in decoder.adapted:
        parts = tuple(part.low_rank(*lora[part.name]) if part.name in lora else None for part in product.parts)
        backend.adapters.set(product.room, slot, backend.adapters.pack(product.room, parts))


FITTING = [each for each in CASES if each.fields.get("head_dim", 32) % 16 == 0]  # the native cache needs that


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
@pytest.mark.full(but=[f"{('torch', 'native')[at % 2]}-{case.name}" for at, case in enumerate(FITTING)])
def test_rows_get_what_their_merged_model_gives(case: Case, backend: Backend, tmp_path: Path) -> None:
    """Three sequences with two adapters and none; one adapter leaves out most products."""
    write_family_model(tmp_path, case.model_type, case.fields)
    model = load(tmp_path, num_sequences=3, backend=backend, adapters=SIZES)
    decoder, source = model.decoder, open_source(tmp_path)
    loras: dict[int, LoraWeights] = {
        0: some_lora(decoder, 1),
        3: some_lora(decoder, 2, rank=7, only="layers.1."),
        -1: {},
    }
    for slot, lora in loras.items():
        if slot >= 0:
            put(decoder, backend, slot, lora)
    wanted = [
        load(tmp_path, backend=backend, source=Merged(source, lora)).prefill(
            prompt(20, decoder.spec.vocab_size, seed=seed), (7, 1)
        )
        for seed, lora in enumerate(loras.values())
    ]
    found = [
        model.step(
            [
                Rows(
                    seed,
                    start,
                    prompt(20, decoder.spec.vocab_size, seed=seed)[start : start + count],
                    adapter=slot,
                )
                for seed, slot in enumerate(loras)
            ]
        ).view(3, count, -1)
        for start, count in ((0, 7), (7, 1), (8, 12))
    ]
    torch.testing.assert_close(torch.cat(found, 1), torch.stack(wanted), rtol=0, atol=2e-4)
