"""Reads the config.json of a head's directory, in any layout, for one target.

A `speculators` directory names its kind. The others are found by their architecture and fields; where these are a
target's (`LlamaForCausalLM`), by the method that the operator names, else by the names of the tensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import tensor_names
from faser.engine.checkpoints.heads import flat, medusa, speculators
from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.errors import ModelError


def read_head_spec(directory: Path, target: DecoderSpec, *, method: str | None = None) -> HeadSpec:
    """The head in a directory. method: what the operator calls it (a HeadKind's value); None: the files say it.

    Raises ModelError that names the file or the field; the reason why a kind of head is refused; or both values
    where the head does not fit the target.
    """
    config = _read(directory / "config.json")
    kind = _checked(head_kind(config), method) or _kind_by_tensors(directory)
    if kind is None:
        raise ModelError(
            f"{directory} does not say which kind of head it is; name it: "
            f'"method": {" or ".join(each.value for each in HeadKind)}'
        )
    if kind is HeadKind.MEDUSA:
        return medusa.head_spec(config, target)
    to_spec = speculators.head_spec if speculators.is_speculators(config) else flat.head_spec
    return to_spec(config, kind, target)


def kind_of_directory(directory: Path) -> HeadKind | None:
    """The kind of head that lies in a directory; None: a model does, or something else.

    Raises ModelError for a kind that is refused, with the reason.
    """
    path = directory / "config.json"
    return None if not path.is_file() else head_kind(_read(path)) or _kind_by_tensors(directory)


def head_kind(config: Mapping[str, Any]) -> HeadKind | None:
    """The kind of head that a config.json describes; None: that of no head, or it does not say which.

    Raises ModelError for a kind that is refused, with the reason.
    """
    if speculators.is_speculators(config):
        return speculators.head_kind(config)
    return HeadKind.MEDUSA if medusa.is_medusa(config) else flat.head_kind(config)


def _checked(found: HeadKind | None, method: str | None) -> HeadKind | None:
    """What the operator calls the head, or else what was found. Raises ModelError if they differ."""
    if method is not None and found not in (None, method):
        raise ModelError(f"method is {method}; the config.json of the head describes {found}")
    return found if method is None else HeadKind(method)


def _kind_by_tensors(directory: Path) -> HeadKind | None:
    """EAGLE's authors describe their heads like models; no model has a tensor fc."""
    names = tensor_names(directory)
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return None
    return HeadKind.EAGLE3 if any(name.endswith(".hidden_norm.weight") for name in names) else HeadKind.EAGLE


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; the directory of a head must have one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains {type(value).__name__}; it must contain an object")
    return value
