"""TrainingState: everything that training goes on from, in one safetensors file that is replaced as a whole.

Numbers and settings are JSON in the header. A file of torch.save would be a pickle, which FASER never reads here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from faser.distill.conversations.shard import unwritable
from faser.errors import ConfigError
from faser.files import replacing

_WEIGHT, _DRAFT_IDS = "weights/", "draft_ids"
_NUMBERS = ("epoch", "batch", "steps", "rows", "seconds", "conversations")


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """settings: of the training, as JSON. draft_ids: [Vd] int64. optimizers: their state_dict(); {}: none yet.

    epoch: the one that is learned; batch: how many of its batches are done; conversations: how many it has, so
    that others that are made meanwhile wait for the next one. rows: drafting rows learned. seconds: spent.
    """

    settings: dict[str, Any]
    draft_ids: Tensor
    weights: dict[str, Tensor]
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    conversations: int = 0

    def write(self, path: Path) -> None:
        """Raises ConfigError where the disk is full; the state that was written before is kept."""
        tensors = {_WEIGHT + name: weight.detach() for name, weight in self.weights.items()}
        for optimizer, state in self.optimizers.items():
            for index, moments in state["state"].items():
                tensors |= {f"{optimizer}/{index}/{name}": each for name, each in moments.items()}
        tensors[_DRAFT_IDS] = self.draft_ids
        about = {name: getattr(self, name) for name in _NUMBERS} | {"settings": self.settings}
        about["groups"] = {name: state["param_groups"] for name, state in self.optimizers.items()}
        about["weights"] = list(self.weights)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, new, _header(about))
        except (OSError, SafetensorError) as error:  # the latter where a disk is full
            cause = error if isinstance(error, OSError) else OSError(28, str(error))
            raise unwritable(path, cause) from None

    @classmethod
    def read(cls, path: Path) -> "TrainingState":
        """Raises ConfigError that names a damaged file."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["training"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(
                settings=dict(about["settings"]),
                draft_ids=tensors.pop(_DRAFT_IDS),
                weights={name: tensors[_WEIGHT + name] for name in about["weights"]},  # groups name them by place
                optimizers={name: _optimizer(name, groups, tensors) for name, groups in about["groups"].items()},
                **{name: about[name] for name in _NUMBERS},
            )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{path} cannot be read: {said}; remove it to train anew") from None


def _header(about: dict[str, Any]) -> dict[str, str]:
    return {"training": json.dumps(about)}


def _optimizer(optimizer: str, groups: list[dict[str, Any]], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, each in tensors.items():
        if name.startswith(f"{optimizer}/"):
            _, index, moment = name.split("/")
            state.setdefault(int(index), {})[moment] = each
    return {"state": state, "param_groups": groups}
