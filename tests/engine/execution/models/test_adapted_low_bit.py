"""Adapters over weights of few bits: what an adapter adds comes from inputs that are not rounded.

Oracle: the dequantised weights, every product with inputs rounded to 8 bits as low-bit products round them, and
what adapters add to it in float64.

Planted bugs that this test has caught: adapters left out over low-bit weights; their inputs rounded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from faser.engine.execution.models.sources import rounded_rows
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.adapters import AdapterRun, LowRank, TorchAdapters
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.gguf.gguf_files import BIASES, write_gguf
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair
from tests.engine.execution.models.paged import Rows, load, prompt
from tests.engine.execution.models.test_adapted import SIZES, put, some_lora
from tests.engine.execution.models.test_stored_blocks import RoundingInputs, mixed
from tests.engine.execution.models.test_stored_codes import RoundingLayers
from tests.engine.execution.models.test_weights import DictSource

LENGTH = 20


class ExactAdapters(TorchAdapters):
    """Adds in float64, part after part."""

    def add(self, x: Tensor, room: Any, out: Tensor, rows: Sequence[AdapterRun]) -> None:
        for slot, begin, end in rows:
            first = 0
            widths = [last - first for first, last in zip(room.firsts, room.firsts[1:], strict=False)]
            for width, part in zip(widths, room.slots[slot] or (None,) * len(widths), strict=True):
                if isinstance(part, LowRank):
                    weight = part.up.double() @ part.down.double()
                    out[begin:end, first : first + width] += (x[begin:end].double() @ weight.T).float()
                first += width


def low_bit_and_dense(kind: str, folder: Path) -> tuple[Path, str | None, Path, TorchBackend]:
    """A checkpoint of few bits, how it is computed, one of what it stands for, and the oracle's products."""
    if kind == "gguf":
        path = folder / "m.gguf"
        raw = mixed("blk.1.ffn_gate.weight", Type.Q8_0) | mixed("blk.0.attn_v.weight", Type.Q5_1)
        write_gguf(path, "qwen2", quantization=Type.Q4_1, raw=raw, more=BIASES)
        return path, "gguf", path, RoundingInputs()
    if kind == "awq":
        low_bit, plain = write_pair(folder, KINDS["awq"])
        return low_bit, None, plain, RoundingLayers()
    weights = random_weights(llama_shapes(tiny_llama_config()))
    dense = {}
    for name, tensor in weights.items():
        rows = rounded_rows(DictSource(weights), kind, name)
        dense[name] = tensor if rows is None else torch.from_numpy(rows.dequantised())
    write_checkpoint(folder / "plain", tiny_llama_config(), weights)
    write_checkpoint(folder / "dense", tiny_llama_config(), dense)
    return folder / "plain", kind, folder / "dense", RoundingInputs()


def logits(path: Path, backend: Backend, quantization: str | None, slots: Sequence[int]) -> Tensor:
    """Of a prompt with each adapter slot, [S, LENGTH, V]; slots 0 and 3 have adapters."""
    model = load(path, num_sequences=len(slots), backend=backend, quantization=quantization, adapters=SIZES)
    for slot, only in ((0, ""), (3, "layers.1.")):
        put(model.decoder, backend, slot, some_lora(model.decoder, slot + 1, only=only))
    token_ids = prompt(LENGTH, VOCAB_SIZE)
    rows = [Rows(number, 0, token_ids, adapter=slot) for number, slot in enumerate(slots)]
    return model.step(rows).view(len(slots), LENGTH, -1)


@pytest.mark.parametrize("backend_name", ["torch", "native"])
@pytest.mark.parametrize("kind", ["int8", "int4", "gguf", "awq"])
def test_adapters_add_to_products_of_few_bits(
    kind: str, backend_name: str, tmp_path: Path, kernel_cache: Path
) -> None:
    """Where a value lies between two steps, the last bit of a float decides: few rows may differ."""
    backend: Backend = TorchBackend()
    if backend_name == "native":
        backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    path, quantization, dense, oracle = low_bit_and_dense(kind, tmp_path)
    oracle.adapters = ExactAdapters(oracle.device)
    found, wanted = logits(path, backend, quantization, (0, -1, 3)), logits(dense, oracle, "none", (0, -1, 3))
    near = torch.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(2)
    assert near.float().mean() >= 0.75, near
    assert (wanted[0] - wanted[1]).abs().mean() > 0.1 * wanted[1].abs().mean()
    assert torch.equal(found[1:2], logits(path, backend, quantization, (-1,))), "a row without knows of no other"
