"""Reads the config.json of a head's directory, in any layout, for one target.

A `speculators` directory names its kind. The others are found by their architecture; where that is the target's
(`LlamaForCausalLM`), by the method that the operator names, else by the fields that only one kind has.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.heads import flat, medusa, speculators
from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.errors import ModelError


def read_head_spec(directory: Path, target: DecoderSpec, *, method: str | None = None) -> HeadSpec:
    """The head in a directory. method: what the operator calls it (a HeadKind's value); None: the files say it.

    Raises ModelError that names the file or the field; the reason why a kind of head is refused; or both values
    where the head does not fit the target.
    """
    config = _read(directory / "config.json")
    kind = head_kind(config, method=method)
    if kind is None:
        raise ModelError(
            f"{directory} does not say which kind of head it is; name it: "
            f'"method": {" or ".join(each.value for each in HeadKind)}'
        )
    if kind is HeadKind.MEDUSA:
        return medusa.head_spec(config, target)
    to_spec = speculators.head_spec if speculators.is_speculators(config) else flat.head_spec
    return to_spec(config, kind, target)


def head_kind(config: Mapping[str, Any], *, method: str | None = None) -> HeadKind | None:
    """The kind of head that a config.json describes; None: that of no head, or it does not say which.

    Raises ModelError for a kind that is refused, with the reason, and if the config is of another than `method`.
    """
    if speculators.is_speculators(config):
        found: HeadKind | None = speculators.head_kind(config)
    else:
        found = HeadKind.MEDUSA if medusa.is_medusa(config) else flat.head_kind(config)
    if method is None:
        return found
    asked = HeadKind(method)
    if found not in (None, asked):
        raise ModelError(f"method is {method}; the config.json of the head describes {found}")
    return asked


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
