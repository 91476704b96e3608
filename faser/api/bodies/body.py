"""From the bytes of a request to its checked body, and the wording of every error that a body can have.

Size and content type are checked before anything is read, and the number of JSON values before it is parsed: a
parser creates an object for each and holds the interpreter lock meanwhile, also in a thread of its own, so 32 MiB
of empty lists would block all other requests for seconds. They are counted in pieces of the body between which
other threads run; then large bodies are parsed in a thread.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError

from faser.api.bodies.errors import HttpError
from faser.errors import RequestError

MAX_VALUES = 1 << 20  # the token ids of a hundred long prompts; about 0.1 s to parse
MAX_NESTED = 1 << 17  # objects, lists and their keys cost seven times as much
MAX_BYTES_OUTSIDE = 12 << 20  # of strings: those values with seven digits each; numbers of sixty cost far more
_PIECE_BYTES = 1 << 18
_Body = TypeVar("_Body", bound=BaseModel)
_MAX_SHOWN_CHARS = 80
_MAX_DEPTH = 201  # the parser's own limit
_INLINE_BYTES = 1 << 15  # parsed in about a millisecond, whatever the content


async def read_body(request: Request, schema: type[_Body], *, max_bytes: int) -> _Body:
    """The request's JSON body.

    Raises HttpError (415, 413), and RequestError that names the field, its value and what is allowed.
    """
    return await parse_body(await read_bytes(request, max_bytes=max_bytes), schema)


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """The bytes of the request's JSON body. Raises HttpError (415, 413)."""
    _check_headers(request, max_bytes)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_bytes:
            raise _too_large("more than that", max_bytes)
    return bytes(raw)


def _check_headers(request: Request, max_bytes: int) -> None:
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        given = f"Content-Type is {content_type}" if content_type else "Content-Type is missing"
        raise HttpError(415, f"{given}; it must be application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"Content-Encoding is {encoding}; the body must be sent without one")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(announced, max_bytes)


def _too_large(size: str, max_bytes: int) -> HttpError:
    return HttpError(413, f"the body has {size} bytes; at most {max_bytes} are allowed")


async def parse_body(raw: bytes, schema: type[_Body]) -> _Body:
    """Raises RequestError that names the field, its value and what is allowed, and HttpError (413)."""
    if len(raw) <= _INLINE_BYTES:
        return _parse(raw, schema)
    return await asyncio.to_thread(_parse_large, raw, schema)


def _parse_large(raw: bytes, schema: type[_Body]) -> _Body:
    check_size(raw)
    return _parse(raw, schema)


def _parse(raw: bytes, schema: type[_Body]) -> _Body:
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False)[0]
        raise _as_request_error(first) from None


def checked(value: Any, schema: type[_Body]) -> _Body:
    """A body from a value that is no JSON text any more. Raises RequestError as read_body does."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False)[0]
        raise _as_request_error(first) from None


def parse_text(text: str, path: str) -> Any:
    """The value of JSON that a field of the body contains as text; the text if it is not JSON. path: of the field.

    Text that is nested deeper than a body may be counts as not JSON. Raises HttpError (413) for more values than a
    body may have.
    """
    raw = text.encode("utf-8", "surrogatepass")
    check_size(raw, path)
    try:
        return pydantic_core.from_json(raw)
    except ValueError:
        return text


def _as_request_error(error: Mapping[str, Any]) -> RequestError:
    """One pydantic error, reworded. What pydantic says about the expected value is kept."""
    path = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "json_invalid":
            return RequestError(f"the body is not JSON: {_json_fault(error['ctx']['error'])}")
        case "model_type" | "model_attributes_type" if not path:
            return RequestError(f"the body is {shown(error['input'])}; it must be a JSON object")
        case "missing":
            return RequestError(f"{path} is missing; it is required", param=path)
        case "extra_forbidden":
            return RequestError(f"{path} is not a known field", param=path)
    expected = error["msg"].replace("Input should be", "it must be").replace("String should", "it should")
    return RequestError(f"{path} is {shown(error['input'])}; {expected}", param=path)


def _json_fault(message: str) -> str:
    """Return the parser's message, with the nesting limit added where it omits it."""
    return message.replace(
        "recursion limit exceeded", f"lists and objects are nested deeper than {_MAX_DEPTH} levels"
    )


def shown(value: Any) -> str:
    """A value as JSON, shortened for use in an error message."""
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return f"{json.dumps(value[:_MAX_SHOWN_CHARS], ensure_ascii=False)[:-1]}… ({len(value)} characters)"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}… ({len(text)} characters)"


def check_size(raw: bytes, what: str = "the body") -> None:
    """Raises HttpError (413) for a body with more values than a request can need. A string is one value.

    raw: JSON. The counts of other bytes mean nothing; the parser then reports the error. what: its name in errors.
    """
    values, nested, outside = count(raw)
    if values > MAX_VALUES:
        raise HttpError(413, f"{what} has {values} values or more; at most {MAX_VALUES} are allowed")
    if nested > MAX_NESTED:
        raise HttpError(
            413, f"{what} has {nested} objects, lists and keys or more; at most {MAX_NESTED} are allowed"
        )
    if outside > MAX_BYTES_OUTSIDE:
        raise HttpError(
            413, f"{what} has {outside} bytes or more outside of strings; at most {MAX_BYTES_OUTSIDE} are allowed"
        )


def count(raw: bytes, *, piece_bytes: int = _PIECE_BYTES) -> tuple[int, int, int]:
    """(commas; objects, lists and keys; bytes) outside of strings. Stops counting once a limit is exceeded."""
    values = nested = num_outside = begin = 0
    in_string = False
    while begin < len(raw) and values <= MAX_VALUES and nested <= MAX_NESTED and num_outside <= MAX_BYTES_OUTSIDE:
        piece = _piece(raw, begin, piece_bytes)
        begin += len(piece)
        # Without escapes, every remaining quotation mark begins or ends a string.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        num_outside += len(outside)
        values += outside.count(b",")
        nested += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
    return values, nested, num_outside


def _piece(raw: bytes, begin: int, piece_bytes: int) -> bytes:
    """The next bytes to count in; an escape sequence is not cut in two."""
    piece = raw[begin : begin + piece_bytes]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return raw[begin : begin + len(piece) + backslashes % 2]
