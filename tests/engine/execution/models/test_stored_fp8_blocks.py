"""Checkpoints with scales of blocks, as DeepSeek and Qwen publish them: what is read, and what is computed.

Oracles: a checkpoint of the dequantised numbers; transformers, which reads the same files and dequantises them.

Bugs these tests have been seen to catch: the scale of the block beside and of the block below, none, gate's scales
for up, an expert's for the next one, a shard with the scales of the first one, blocks of other sizes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import checkpoint_form
from faser.engine.execution.models.shard import Shard, ShardedSource
from faser.engine.execution.models.sources import Fp8Source
from faser.errors import ModelError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.fp8 import FP8, Fp8Rows, pack_fp8, quantise_rows, stack_rows
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.fp8_checkpoints import (
    FP8_BLOCKS,
    arguments,
    compressed_tensors,
    quantised_blocks,
    stored_blocks,
    tiny_weights,
)
from tests.engine.execution.models.test_stored_fp8 import WithoutFp8, decoder, distance, logits
from tests.engine.execution.models.test_weights import DictSource

ODD: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 288, "head_dim": 48}
OF_BLOCKS = compressed_tensors(
    group={
        "weights": arguments(strategy="block", block_structure=[128, 128]),
        "input_activations": arguments(dynamic=True, strategy="group", group_size=128),
    }
)


def write_pair(
    directory: Path, quantization: dict[str, Any], block: tuple[int, int], ending: str, **fields: Any
) -> tuple[Path, Path]:
    """A checkpoint in blocks, and a plain one of what it stands for."""
    config = tiny_llama_config() | fields
    stored, plain = stored_blocks(tiny_weights(**fields), block, ending)
    write_checkpoint(directory / "fp8", config | {"quantization_config": quantization}, stored)
    write_checkpoint(directory / "plain", config, plain)
    return directory / "fp8", directory / "plain"


KINDS = [
    (FP8_BLOCKS, (128, 128), "_scale_inv"),
    (FP8_BLOCKS | {"weight_block_size": [24, 32]}, (24, 32), "_scale_inv"),
    (OF_BLOCKS, (128, 128), "_scale"),
]


@pytest.mark.parametrize("quantization, block, ending", KINDS)
def test_a_backend_without_the_products_computes_what_the_blocks_stand_for(
    quantization: dict[str, Any], block: tuple[int, int], ending: str, tmp_path: Path
) -> None:
    """Of sizes that are no multiples of a block's."""
    fp8, plain = write_pair(tmp_path, quantization, block, ending, **ODD)
    assert torch.equal(logits(fp8, WithoutFp8()), logits(plain, WithoutFp8()))


@pytest.mark.parametrize("quantization, block, ending", KINDS[:2])
def test_the_arithmetic_of_the_checkpoint_rounds_inputs_by_the_same_groups(
    quantization: dict[str, Any], block: tuple[int, int], ending: str, tmp_path: Path
) -> None:
    fp8, plain = write_pair(tmp_path, quantization, block, ending, **ODD)

    class RoundingInputs(TorchBackend):
        """Rounds what goes into the layers' products, and multiplies by dequantised weights."""

        def linear(self, x: Tensor, packed: Any, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
            is_head = len(packed.weight) == tiny_llama_config()["vocab_size"]
            rounded = x if is_head else quantise_rows(x, block[1]).dequantised()
            return super().linear(rounded, packed, out, residual=residual)

    found = logits(fp8, TorchBackend())
    assert distance(found, logits(plain, RoundingInputs())) < 0.01
    assert 0.01 < distance(found, logits(plain, TorchBackend())) < 0.2, "what quantising the inputs costs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_may_have_other_types(dtype: torch.dtype) -> None:
    values, scales = quantised_blocks(torch.randn(160, 200), (128, 128))
    if dtype is torch.float8_e8m0fnu:
        scales = torch.exp2(scales.log2().ceil())
    name = "a_proj.weight"
    found = Fp8Source(DictSource({name: values, f"{name}_scale_inv": scales.to(dtype)}), (128, 128)).get(name)
    wide = scales.to(dtype).float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :200]
    assert torch.equal(found, values.float() * wide)


def test_one_scale_for_a_tensor_may_have_the_name_of_those_of_blocks() -> None:
    """As Mistral publishes its models: weight_block_size is null, and activations have scales of their own."""
    values = torch.randn(32, 64).to(FP8)
    named = {"a_proj.weight": values, "a_proj.weight_scale_inv": torch.tensor(0.25)}
    source = Fp8Source(DictSource(named | {"a_proj.activation_scale": torch.tensor(2.0)}))
    assert source.names() == ["a_proj.weight"]
    assert torch.equal(source.get("a_proj.weight"), values.float() / 4)


@pytest.mark.parametrize(
    "scales, message",
    [
        (torch.ones(2, 1), r"_scale_inv has shape \[2, 1\]; for .*\[160, 200\] in blocks of 128 x 128 .*\[2, 2\]"),
        (torch.ones(4), r"_scale_inv has shape \[4\]"),
        (torch.ones(1, 4), r"_scale_inv has shape \[1, 4\]"),
        (torch.ones(2, 2).int(), "_scale_inv is int32; scales are floats"),
        (torch.tensor([[1.0, 1.0], [float("nan"), 1.0]]), "_scale_inv has scales that are not finite"),
    ],
)
def test_scales_that_do_not_fit_are_named(scales: Tensor, message: str) -> None:
    values = torch.randn(160, 200).to(FP8)
    source = Fp8Source(DictSource({"a_proj.weight": values, "a_proj.weight_scale_inv": scales}), (128, 128))
    with pytest.raises(ModelError, match=message):
        source.fp8("a_proj.weight")


def random_rows(rows: int, width: int, block: tuple[int, int], seed: int = 0) -> Fp8Rows:
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    values, scales = quantised_blocks(drawn, block)
    by_row = scales.repeat_interleave(block[0], 0)[:rows]
    return Fp8Rows(values=values, scales=by_row, group=block[1])


def test_packing_joins_the_rows_of_a_block_and_changes_no_number() -> None:
    for rows, width, block, lines in ((300, 200, (128, 128), 128), (96, 64, (32, 32), 32), (50, 64, (5, 64), 1)):
        found = random_rows(rows, width, block)
        packed = pack_fp8(found, None, torch.device("cpu")).weight
        assert packed.lines == lines
        assert packed.scales.shape == (-(-rows // lines), -(-width // block[1]))
        assert torch.equal(packed.dequantised(), found.dequantised())


def test_parts_and_sums_of_matrices_keep_the_scales_of_each_value() -> None:
    """Columns cut within a block, rows in another order, and matrices of several kinds on top of each other."""
    first, second = random_rows(96, 256, (32, 128)), random_rows(40, 256, (8, 64), seed=1)
    third = quantise_rows(torch.randn(16, 256))
    for start, end in ((0, 256), (64, 256), (128, 192), (96, 200)):
        assert torch.equal(first.take_columns(start, end).dequantised(), first.dequantised()[:, start:end])
    order = np.random.default_rng(0).permutation(96)
    assert torch.equal(first.take(order).dequantised(), first.dequantised()[torch.from_numpy(order)])
    parts = [first, second, third]
    assert torch.equal(stack_rows(parts).dequantised(), torch.cat([each.dequantised() for each in parts]))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_scales_of_their_parts(size: int, tmp_path: Path) -> None:
    """Heads of 48 channels and networks of 288 end within blocks. Oracle: parts of the dequantised tensors."""
    fields = ODD | {"hidden_size": 576, "num_attention_heads": 12, "num_key_value_heads": 6}
    fp8, plain = write_pair(tmp_path, FP8_BLOCKS, (128, 128), "_scale_inv", **fields)
    spec = read_model_config(fp8).spec
    forms = [checkpoint_form(each, TorchBackend(), torch.float32, quantization=None) for each in (fp8, plain)]
    for rank in range(size):
        shard = Shard(rank=rank, size=size)
        stored, whole = (ShardedSource(form.source, spec, shard) for form in forms)
        cut = stored.cut(forms[0].stored)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.1.{name}.weight"
            found = cut(name)
            assert found is not None
            assert torch.equal(found.dequantised(), whole.get(name)), (rank, name)


def test_the_native_backend_is_nearer_to_the_weights_than_the_arithmetic_of_the_checkpoint(
    tmp_path: Path, kernel_cache: Path
) -> None:
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    fp8, plain = write_pair(tmp_path, FP8_BLOCKS, (128, 128), "_scale_inv", **ODD)
    wanted = logits(plain, WithoutFp8())
    assert 0.001 < distance(logits(fp8, native), wanted) < distance(logits(fp8, TorchBackend()), wanted) / 2
    sizes = [decoder(fp8, native, quantization=each).weight_bytes for each in ("none", None)]
    products = 2 * (192 * (4 + 2 * 2) * 48 + 4 * 48 * 192 + 3 * 192 * 288)
    assert sizes[0] - sizes[1] == pytest.approx((4 - 1.0625) * products, rel=0.05)
