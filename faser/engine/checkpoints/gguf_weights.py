"""The weights of a GGUF file as those of a Hugging Face checkpoint: the hub's names, order and values.

Undoes what llama.cpp does: its row order of q and k, and the one that it adds to norms. gguf_config.py makes
a config.json of the metadata. Imports torch only in GgufSource.get: the front-end opens files without it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from faser.engine.checkpoints.families import gguf_architecture
from faser.engine.checkpoints.families.architecture import MOST_EXPERTS
from faser.engine.checkpoints.families.drafters import MTP_TENSORS
from faser.engine.checkpoints.families.family import (
    A_LOG,
    BARE,
    CONVOLUTIONS,
    DELTA_NORM,
    DRAFT_IDS,
    EXPERT,
    GATE_UP,
    VECTORS,
)
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf.rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS
from faser.errors import ModelError
from faser.types.arrays import Bytes, Floats32

if TYPE_CHECKING:
    import torch


Number = TypeVar("Number", bound=np.generic)
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_HALVES = ("gate_proj", "up_proj")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_MTP_TENSOR = re.compile(r"blk\.\d+\.(nextn\.\w+)\.weight")
_OF_ROPE = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the file. part: which of its matrices; None: it is one. half: of the rows; None: all."""

    tensor: str
    part: int | None = None
    half: int | None = None

    def rows(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        return values if self.half is None else np.split(values, 2)[self.half]


class GgufSource:
    """The weights under Hugging Face names, in float32, with rows and values as in a checkpoint of the hub."""

    def __init__(self, file: GgufFile) -> None:
        """Raises ModelError that names a tensor without a Hugging Face name."""
        self._file = file
        architecture, name = gguf_architecture(file), file.require("general.architecture", str)
        self._plus_one = architecture.plus_one
        self._as_it_is = () if architecture.plus_one_last else ("output_norm.weight",)
        num_layers = None
        if architecture.drafting_layers:
            num_layers = file.size(f"{name}.block_count") - file.get(f"{name}.nextn_predict_layers", int, 0)
        self._stored: dict[str, _Place] = {}
        for stored in file.tensor_names():
            if stored in _OF_ROPE or stored.rpartition(".")[0].rpartition(".")[2] in architecture.not_read:
                continue
            hub = architecture.outer.get(stored)
            hub = hub or hub_name(stored, architecture.tensors, num_layers, file.path)
            if EXPERT not in hub:
                self._stored[hub] = _Place(stored)
                continue
            if (num_experts := file.shape(stored)[0]) > MOST_EXPERTS:
                raise ModelError(
                    f"{file.path}: {stored} has {num_experts} experts; at most {MOST_EXPERTS} are supported"
                )
            for part in range(num_experts):
                of_expert = hub.replace(EXPERT, str(part))
                if GATE_UP in hub:
                    halves = enumerate(_HALVES)
                    self._stored |= {
                        of_expert.replace(GATE_UP, each): _Place(stored, part, i) for i, each in halves
                    }
                else:
                    self._stored[of_expert] = _Place(stored, part)
        self._heads: dict[str, int] = {}
        if architecture.permuted:
            num_heads = file.size(f"{name}.attention.head_count")
            num_kv_heads = file.size(f"{name}.attention.head_count_kv", num_heads)
            self._heads = {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that `array` gives."""
        place = self._stored[name]
        shape = self._file.shape(place.tensor)
        shape = shape if place.part is None else shape[1:]
        if name.endswith(CONVOLUTIONS):
            return (shape[0], 1, *shape[1:])
        if name.endswith(VECTORS):
            return (1, math.prod(shape))
        return shape if place.half is None else (shape[0] // 2, *shape[1:])

    def array(self, name: str) -> Floats32:
        """One tensor, dequantised."""
        place = self._stored[name]
        values = self._in_order(name, place.rows(self._file.array(place.tensor, place.part)))
        if name.endswith(A_LOG):
            return np.log(-values)
        if name.endswith(CONVOLUTIONS):
            return values[:, None]
        if name.endswith(VECTORS):
            return values.reshape(1, -1)
        is_norm = place.tensor.endswith("norm.weight") and not name.endswith(f"{DELTA_NORM}.weight")
        is_norm = is_norm and place.tensor not in self._as_it_is
        return values - np.float32(1) if self._plus_one and is_norm else values

    def format(self, name: str) -> str:
        """The name of the type that a tensor is stored in, such as Q4_K or F32."""
        return self._file.format(self._stored[name].tensor)

    def blocks(self, name: str) -> tuple[str, Bytes]:
        """The format of a quantised tensor, and its rows as they are stored: [N, bytes of a row]."""
        place = self._stored[name]
        return self.format(name), self._in_order(name, place.rows(self._file.blocks(place.tensor, place.part)))

    def _in_order(self, name: str, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        num_heads = next((heads for part, heads in self._heads.items() if part in name), None)
        if num_heads is None:
            return rows
        if len(rows) % (2 * num_heads):
            raise ModelError(f"{self._file.path}: {name} has {len(rows)} rows, which are not {num_heads} heads")
        return unpermute(rows, num_heads)

    def get(self, name: str) -> "torch.Tensor":
        """One tensor, dequantised: float32 on the CPU, in memory of its own; DRAFT_IDS: integers."""
        import torch

        if name == DRAFT_IDS:
            token_ids = self._file.integers(name)
            return torch.from_numpy(token_ids - np.arange(len(token_ids)))
        # An unquantised tensor is a view of the mapped file, which must not be written; W makes a copy.
        return torch.from_numpy(np.require(self.array(name), np.float32, ["C", "W"]))


def open_gguf(path: Path) -> GgufSource:
    """The weights of a GGUF file. Raises ModelError as GgufFile and GgufSource do."""
    return GgufSource(GgufFile(path))


def hub_name(name: str, layer_tensors: Mapping[str, str], num_layers: int | None, path: Path) -> str:
    """num_layers: of the model, where layers that draft follow them; None: there are none."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    if num_layers is not None and (match := _MTP_TENSOR.fullmatch(name)) and match[1] in MTP_TENSORS:
        return f"mtp.{MTP_TENSORS[match[1]]}.weight"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in layer_tensors:
        raise ModelError(f"{path} has a tensor {name}, which no supported model of its architecture has")
    hub, layer = layer_tensors[match[2]], int(match[1])
    prefix = f"model.layers.{layer}."
    if num_layers is not None and layer >= num_layers:
        prefix = f"mtp.layers.{layer - num_layers}."
    return f"{prefix}{hub}" + ("" if hub in BARE else f".{match[3]}")


def unpermute(rows: npt.NDArray[Number], num_heads: int) -> npt.NDArray[Number]:
    """Undo llama.cpp's row order, in which a rotated pair is two adjacent rows; here it is rows d and d + D/2.

    rows: [heads * D, ...] or a bias [heads * D]. One head of D = 4, as stored → as returned:

        stored     a0 b0 a1 b1
        returned   a0 a1 b0 b1
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
