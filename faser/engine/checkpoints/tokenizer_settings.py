"""Settings of a checkpoint's tokenizer in addition to the vocabulary: special tokens and chat templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from faser.engine.checkpoints.files import TEMPLATES
from faser.errors import ModelError
from faser.files import parse_json

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Special tokens and chat templates of one checkpoint.

    chat_template: one template, named templates, or None. special_tokens: tokens that are special even if
    the vocabulary file does not mark them so. Which tokens an encoded text begins and ends with is not here:
    the vocabulary file has that rule.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | dict[str, str] | None = None
    special_tokens: tuple[AddedToken, ...] = ()


def read_settings(directory: Path) -> TokenizerSettings:
    """The settings in tokenizer_config.json; special_tokens_map.json provides those that it lacks."""
    merged = _read_object(directory / "special_tokens_map.json") | _read_object(
        directory / "tokenizer_config.json"
    )
    declared: dict[str, AddedToken] = {}
    for entry in _declared_tokens(directory, merged):
        if (token := _added_token(entry)) is not None:
            declared.setdefault(token.content, token)
    return TokenizerSettings(
        bos_token=_content(merged.get("bos_token")),
        eos_token=_content(merged.get("eos_token")),
        chat_template=_read_chat_template(directory, merged.get("chat_template")),
        special_tokens=tuple(declared.values()),
    )


def _declared_tokens(directory: Path, merged: dict[str, Any]) -> list[Any]:
    """The tokens that the settings declare. Tokens new to the vocabulary get their ids in this order.

    Raises ModelError that names a field of another type.
    """
    decoder = merged.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(token_id.isdecimal() for token_id in decoder):
        raise ModelError(f"{directory}: added_tokens_decoder must be an object of tokens by id")
    by_id = sorted(decoder.items(), key=lambda entry: int(entry[0]))
    extra = merged.get("additional_special_tokens") or merged.get("extra_special_tokens") or []
    if not isinstance(extra, dict | list):
        raise ModelError(f"{directory}: additional_special_tokens is {extra!r}; it must be a list or an object")
    return [
        *(token for _, token in by_id),
        *(merged.get(f"{role}_token") for role in _ROLES),
        *(extra.values() if isinstance(extra, dict) else extra),
    ]


def _added_token(entry: Any) -> AddedToken | None:
    """A token declared as a string or as an object with flags; None for anything else."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    flags = {
        name: bool(entry[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry
    }
    return AddedToken(entry["content"], special=bool(entry.get("special", True)), **flags)


def _content(entry: Any) -> str | None:
    token = _added_token(entry)
    return None if token is None else token.content


def _read_chat_template(directory: Path, configured: Any) -> str | dict[str, str] | None:
    """The template file if it exists, else the configured template or named templates."""
    named = _named_templates(directory, configured) if isinstance(configured, list) else {}
    named |= {path.stem: _read_text(path) for path in sorted(directory.glob(TEMPLATES))}
    default = configured if isinstance(configured, str) else named.get("default")
    if (path := directory / "chat_template.jinja").is_file():
        default = _read_text(path)
    if not named:
        return default
    return named if default is None else named | {"default": default}


def _named_templates(directory: Path, configured: list[Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in configured:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f"{directory}: chat_template must be a text, or a list of names and templates")
        named[name] = template
    return named


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except ValueError as error:
        raise ModelError(f"{path} is not UTF-8: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} contains a {type(content).__name__}; it must be a JSON object")
    return content
