"""A checkpoint whose tensors have the parts of all experts of a layer: gives them expert by expert.

E experts of F channels, a hidden size of H. In floats, by families/architecture.StackedExperts:

    tensor               halves         alternating    named in Granite-MoE, in halves
    gate_up_proj         [E, 2 F, H]    [E, H, 2 F]    input_linear
    down_proj            [E, H, F]      [E, F, H]      output_linear

Of products in 8-bit floats, _scale_inv has a scale for each block of an expert's matrix, [E, outputs, inputs], or
one for each expert, [E].

Of gpt-oss, whose channels of gate and up alternate, also gate_up_proj_bias [E, 2 F] and down_proj_bias [E, H]; or,
of a product of K inputs and N outputs in MXFP4, _blocks [E, N, K / 32, 16] uint8 and _scales [E, N, K / 32] uint8.
Tensors of single experts are given as they are.

A byte of blocks has two neighbours, the first in its low half. A block of MXFP4 in a GGUF file, which is what
products take, has a scale, then values i and i + 16 in a byte. Knows neither configs nor backends.

Source: transformers, integrations/mxfp4.py, models/gpt_oss and models/qwen3_5_moe.
"""

import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import MOST_EXPERTS, StackedExperts
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.low_bit.rows import LowBitRows, block_rows
from faser.types.arrays import Bytes

_STACKED = re.compile(
    r"(.*\.)experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|_scale_inv|_activation_scale|)"
)
_OF_GRANITE = re.compile(r"(.*\.block_sparse_moe\.)(input_linear|output_linear)(\.weight)")
_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "input_linear": ("w1", "w3"),
    "output_linear": ("w2",),
}
_GROUP = 32
_SCALES_OF_BLOCKS = "_scale_inv"
_Place = tuple[str, int | None, slice]  # tensor; of which expert, None: it is of none; which of its rows


class StackedSource:
    """A WeightSource over such a checkpoint: `get` dequantises, and `names` are those of single experts.

    block_rows: outputs that share scales in 8-bit floats; 1: no others than those of an expert, or none at all.
    """

    def __init__(self, source: WeightSource, order: StackedExperts, block_rows: int = 1) -> None:
        self._source, self._block_rows = source, block_rows
        self._alternates = order is StackedExperts.ALTERNATING
        self._stored: dict[str, _Place] = {}
        known = set(source.names())
        for name in source.names():
            if name.endswith("_blocks") and scales_of(name) not in known:
                raise ModelError(f"the checkpoint has tensor {name} but no {scales_of(name)}")
            self._stored |= dict(self._places(name))

    def names(self) -> list[str]:
        return list(self._stored)

    def get(self, name: str) -> Tensor:
        """The tensor: float32 if it is quantised, else in the stored dtype."""
        if (quantised := self.rows(name)) is not None:
            return torch.from_numpy(quantised.dequantised())
        stored, expert, rows = self._stored[name]
        if expert is None:
            return self._source.get(stored)
        found = self._source.get(stored)[expert]
        if found.dim() < 2 and name.endswith(_SCALES_OF_BLOCKS):
            return found.reshape(1)  # of the whole matrix
        return found.T[rows] if found.dim() == 2 and self._alternates else found[rows]

    def rows(self, name: str) -> LowBitRows | None:
        """A matrix of an expert in blocks of MXFP4; None: it is not stored so.

        Raises ModelError that names tensors whose types or shapes do not fit.
        """
        stored, expert, rows = self._stored[name]
        if expert is None or not stored.endswith("_blocks"):
            return None
        blocks, scales = self._source.get(stored), self._source.get(scales_of(stored))
        expected = (*scales.shape, _GROUP // 2)
        if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape != expected:
            raise ModelError(
                f"tensors {stored} and {scales_of(stored)} are {blocks.dtype} {list(blocks.shape)} and "
                f"{scales.dtype} {list(scales.shape)}; they must be bytes, {_GROUP // 2} for each scale"
            )
        found = in_blocks(blocks[expert, rows].numpy(), scales[expert, rows].numpy())
        try:
            return block_rows("MXFP4", found, _GROUP * scales.shape[-1])
        except ConfigError as error:
            raise ModelError(f"{name}: {error}") from None

    def _places(self, name: str) -> Iterator[tuple[str, _Place]]:
        """Names of single experts, and where each lies in a tensor."""
        match = _STACKED.fullmatch(name) or _OF_GRANITE.fullmatch(name)
        if match is None:
            yield name, (name, None, slice(None))
            return
        prefix, whole, ending = match.groups()
        if ending in ("_scales", "_activation_scale"):
            return
        shape, parts = self._source.get(name).shape, _PARTS[whole]
        if shape[0] > MOST_EXPERTS:  # an empty tensor may have any number
            raise ModelError(f"tensor {name} has shape {list(shape)}; at most {MOST_EXPERTS} experts can be read")
        if not ending and len(parts) > 1 and shape[1] // len(parts) % self._block_rows:
            raise ModelError(
                f"tensor {name} has shape {list(shape)}; a block of {self._block_rows} outputs is of gate and up "
                "at once, which cannot be read"
            )
        ending = {"_bias": "bias", _SCALES_OF_BLOCKS: f"weight{_SCALES_OF_BLOCKS}"}.get(ending, "weight")
        for expert in range(shape[0]):
            for number, part in enumerate(parts):
                size = shape[1] // len(parts) if len(shape) > 1 else 0
                halves = slice(number * size, (number + 1) * size)
                rows = slice(number, None, len(parts)) if self._alternates else halves
                yield f"{prefix}experts.{expert}.{part}.{ending}", (name, expert, rows)


def scales_of(blocks: str) -> str:
    return f"{blocks.removesuffix('_blocks')}_scales"


def in_blocks(pairs: Bytes, scales: Bytes) -> Bytes:
    """Return rows [N, bytes] in MXFP4 as GGUF has it. pairs: [N, G, 16], two neighbours a byte. scales: [N, G]."""
    found = np.empty((*scales.shape, 1 + _GROUP // 2), np.uint8)
    first, second = pairs[..., : _GROUP // 4], pairs[..., _GROUP // 4 :]
    found[..., 0] = scales
    found[..., 1::2] = first & np.uint8(15) | second << np.uint8(4)
    found[..., 2::2] = first >> np.uint8(4) | second & np.uint8(240)
    return found.reshape(len(scales), -1)
