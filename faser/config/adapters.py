"""Names of LoRA adapters and their files, as `--lora-modules` gives them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_FORMS = 'NAME=PATH, or {"name": …, "path": …, "base_model_name": …} as JSON'
_KEYS = ("name", "path", "base_model_name")
LONGEST_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """An adapter that is served from the start.

    path: a folder, a GGUF file or a hub id. base_model_name: the parent in /v1/models; None: the served model.
    """

    name: str
    path: str
    base_model_name: str | None = None


def read_module(text: str) -> AdapterModule:
    """Read one value of --lora-modules. Raises ValueError that says what is expected."""
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        return _checked(name.strip(), path.strip(), None)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"it must be {_FORMS}") from None
    assert isinstance(fields, dict), "a text that begins with a brace is an object"
    if unknown := sorted(set(fields) - set(_KEYS)):
        raise ValueError(f"it has the key {unknown[0]!r}; known keys: {', '.join(_KEYS)}")
    return _checked(*(fields.get(key) for key in _KEYS))


def _checked(name: object, path: object, base: object) -> AdapterModule:
    if not isinstance(name, str) or not isinstance(path, str) or not (base is None or isinstance(base, str)):
        raise ValueError(f"it must be {_FORMS}")
    if (problem := name_problem(name)) or not path:
        raise ValueError(problem or f"it must be {_FORMS}")
    return AdapterModule(name=name, path=path, base_model_name=base)


def name_problem(name: str) -> str:
    """Return why an adapter cannot have a name; empty: it can."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or "," in name:
        return f"the name must have 1 to {LONGEST_NAME} printable characters, and no comma"  # metrics join with it
    return ""


def module_problems(texts: Iterable[str], served_names: Sequence[str], label: str) -> list[str]:
    """Return why values of --lora-modules cannot be served together."""
    found, names = [], set(served_names)
    for text in texts:
        try:
            module = read_module(text)
        except ValueError as error:
            found.append(f"{label} has {text[:200]}; {error}")
            continue
        if module.name in names:
            found.append(f"{label} has {text[:200]}; another adapter, or the model, has the name {module.name}")
        names.add(module.name)
    return found
