"""The tensors of a head's directory under the names of tensors.py, and those that the target lends it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from faser.engine.checkpoints.files import TORCH_WEIGHTS
from faser.engine.execution.heads.torch_file_source import TorchFileSource
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ModelError

_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."), ("medusa_heads.", ""), ("medusa_head.", ""))
_MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")  # as the authors of Medusa call it
_MEDUSA_HEAD = re.compile(r"(\d+)\.\d+\.weight")


class RenamedSource:
    """A WeightSource over another: its names without `model.`, `midlayer.` as layer 0, Medusa's as vLLM's."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.names():
            name = _renamed(stored)
            if name in self._stored:
                raise ModelError(
                    f"the checkpoint has the tensors {self._stored[name]} and {stored}, which are one"
                )
            self._stored[name] = stored

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def get(self, name: str) -> Tensor:
        return self._source.get(self._stored[name])


class LendingSource:
    """A WeightSource over another, with tensors added. lent: by name; those of the source come first."""

    def __init__(self, source: WeightSource, lent: Mapping[str, Tensor]) -> None:
        self._source = source
        own = set(source.names())
        self._lent = {name: tensor for name, tensor in lent.items() if name not in own}

    def names(self) -> Sequence[str]:
        return [*self._source.names(), *self._lent]

    def get(self, name: str) -> Tensor:
        lent = self._lent.get(name)
        return self._source.get(name) if lent is None else lent


def open_head(directory: Path) -> WeightSource:
    """The tensors of a head's directory, from safetensors files or else from a file of torch.save.

    Raises ModelError that names the missing or damaged file.
    """
    if not any(directory.glob("*.safetensors")):
        for pickled in (directory / name for name in TORCH_WEIGHTS):
            if pickled.is_file():
                return RenamedSource(TorchFileSource(pickled))
    return RenamedSource(SafetensorsSource(directory))


def _renamed(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    if found := _MEDUSA_BLOCK.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := _MEDUSA_HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name
