"""Code shared by Responses and Messages: reading parts of a body, wording errors as chats do, writing events."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import BaseModel

from faser.api.bodies.body import checked, shown
from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import UNSUPPORTED_IN_CHATS, EngineFields, FieldChecker, UnsupportedField
from faser.errors import RequestError
from faser.optional import given

Json = dict[str, Any]

# Values of a chat's fields, in addition to null, that ask for nothing. SDKs and gateways send them to any route.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "stream_options": ({}, {"include_usage": True}),
}
_encode = msgspec.json.Encoder().encode

IGNORED_HEADER = "x-faser-ignored"
_MOST_NAMED = 16


def chat_body(fields: Mapping[str, Any], body: EngineFields) -> ChatBody:
    """The body of a chat. fields: converted; None is absent. body: of the dialect, whose EngineFields are kept."""
    kept = body.model_dump(include=set(EngineFields.model_fields), exclude_none=True, by_alias=True)
    return checked({**kept, **given(fields)}, ChatBody)


def fields_of_chats(body: type[BaseModel], instead: Mapping[str, str]) -> dict[str, UnsupportedField]:
    """The fields of chats that a dialect lacks, to be refused by name. instead: what the dialect has for some."""
    names = {*ChatBody.model_fields, *UNSUPPORTED_IN_CHATS} - set(body.model_fields)
    return {
        name: UnsupportedField(
            f"here it is {instead[name]}" if name in instead else "it is a field of /v1/chat/completions",
            _NEUTRAL.get(name, ()),
        )
        for name in names
    }


def ignored(left_out: Mapping[str, str], fields: FieldChecker) -> dict[str, str]:
    """Headers of an answer that name the parts of its request that had no effect; a kind of part is logged once.

    left_out: kind of each part, such as web_search, by its path, such as tools.3; both in printable ASCII.
    """
    for path, kind in left_out.items():
        fields.log_ignored(f"{path.partition('.')[0]} of type {kind}")
    if not left_out:
        return {}
    named = [f"{path} ({kind})" for path, kind in left_out.items()]
    more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return {IGNORED_HEADER: ", ".join(named[:_MOST_NAMED] + more)}


@contextmanager
def renamed_fields(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Within it, errors name the dialect's fields.

    names: (pattern of a chat's field, its replacement), the first that fits decides; patterns match the beginning
    of a path.
    """
    try:
        yield
    except RequestError as error:
        param = error.param
        if param is None:
            raise
        renamed = _renamed(param, names)
        if renamed == param:
            raise
        raise type(error)(str(error).replace(param, renamed, 1), param=renamed) from None


def _renamed(param: str, names: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in names:
        if found := re.match(pattern + r"(?=\.|$)", param):
            return found.expand(replacement) + param[found.end() :]
    return param


def read_texts(content: Any, path: str, kinds: Sequence[str]) -> str | list[Json]:
    """Content as a chat has it: a string, or a list of text parts. kinds: the types of a part that has a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(content, path, "a string or a list of text parts")
    return [{"type": "text", "text": read_text(part, f"{path}.{at}", kinds)} for at, part in enumerate(content)]


def read_text(part: Any, path: str, kinds: Sequence[str]) -> str:
    """The text of one part. Raises RequestError for another kind of part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise RequestError(
            f"{path}.type is {shown(kind)}; it must be {' or '.join(kinds)}: this model reads text only",
            param=f"{path}.type",
        )
    key = "refusal" if kind == "refusal" else "text"
    return read_string(part, key, path)


def read_string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        if value is None:
            raise RequestError(f"{path}.{key} is missing; it is required", param=f"{path}.{key}")
        raise wrong(value, f"{path}.{key}", "a string")
    return value


def read_optional_string(item: Mapping[str, Any], key: str, path: str) -> str | None:
    return None if item.get(key) is None else read_string(item, key, path)


def read_object(value: Any, path: str) -> Json:
    if not isinstance(value, dict):
        raise wrong(value, path, "an object")
    return value


def wrong(value: Any, path: str, expected: str) -> RequestError:
    return RequestError(f"{path} is {shown(value)}; it must be {expected}", param=path)


def typed_event(payload: dict[str, Any]) -> bytes:
    """An event with a line that names it. payload: has a `type`, which names it too."""
    kind: str = payload["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encode(payload) + b"\n\n"
