"""Weights in a file of torch.save (`pytorch_model.bin`), as the authors of EAGLE and Medusa publish theirs."""

from pathlib import Path

import torch
from torch import Tensor

from faser.errors import ModelError


class TorchFileSource:
    """A WeightSource over one file. The file stays mapped as long as this object lives; no code in it is run.

    Raises ModelError that names a damaged file, or one that holds something other than tensors by name.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of the disk, the archive, or its index: it cannot be read in any case
            reason = str(error).partition("\n")[0]
            raise ModelError(f"{path} cannot be read as a file of tensors: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
            raise ModelError(f"{path} holds something other than tensors by name")
        self._tensors: dict[str, Tensor] = found

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]
