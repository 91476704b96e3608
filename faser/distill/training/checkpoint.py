"""TrainingState: everything that training goes on from, in one file that is replaced as a whole."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faser.distill.conversations.shard import unwritable
from faser.errors import ConfigError
from faser.files import replacing


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """settings: of the training, as JSON. draft_ids: [Vd] int64. optimizer: AdamW's state.

    epoch: the one that is learned; batch: how many of its batches are done; conversations: how many it has, so
    that others that are made meanwhile wait for the next one. rows: drafting rows learned. seconds: spent.
    """

    settings: dict[str, Any]
    draft_ids: Tensor
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    conversations: int = 0

    def write(self, path: Path) -> None:
        """Raises ConfigError where the disk is full; the state that was written before is kept."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                torch.save({name: getattr(self, name) for name in self.__slots__}, new)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
            cause = error if isinstance(error, OSError) else OSError(28, str(error))
            raise unwritable(path, cause) from None

    @classmethod
    def read(cls, path: Path) -> "TrainingState":
        """Raises ConfigError that names a damaged file."""
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return cls(**found)
        except Exception as error:  # of the archive, of the pickle, or of the fields: it is damaged in any case
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{path} cannot be read: {said}; remove it to train anew") from None
