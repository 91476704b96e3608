"""A body is counted before it is parsed, and a large one is not parsed where other requests wait."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from faser.api.bodies import body as body_size
from faser.api.bodies.body import MAX_BYTES_OUTSIDE, MAX_NESTED, MAX_VALUES, check_size, read_body
from faser.api.bodies.errors import HttpError
from tests.fake_engine import MAX_MODEL_LEN

TEXT, JSON = "/v1/completions", {"content-type": "application/json"}


def structure(text: str) -> tuple[int, int]:
    """Oracle: commas, and brackets with colons, outside of texts; a character at a time."""
    values = nested = 0
    in_text = escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif in_text and char == "\\":
            escaped = True
        elif char == '"':
            in_text = not in_text
        elif not in_text:
            values += char == ","
            nested += char in "[{:"
    return values, nested


_TEXTS = st.text(alphabet='\\",[{:}]nu\u00e9', max_size=12)
_DOCUMENTS = st.recursive(
    st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(document=_DOCUMENTS, piece_bytes=st.integers(1, 9), compact=st.booleans())
def test_values_are_counted_where_they_are_and_not_in_texts(
    document: Any, piece_bytes: int, compact: bool
) -> None:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":") if compact else None)
    values, nested = structure(text)
    assert body_size.count(text.encode(), piece_bytes=piece_bytes)[:2] == (values, nested)


@pytest.mark.parametrize(
    "part, most, words",
    [
        (b"1", MAX_VALUES, f"at most {MAX_VALUES} are allowed"),
        (b"[]", MAX_NESTED, f"at most {MAX_NESTED} are allowed"),
        (b'{"a":1}', MAX_NESTED // 2, f"at most {MAX_NESTED} are allowed"),
        (b"7" * 2047, MAX_BYTES_OUTSIDE // 2048, f"bytes or more outside of strings; at most {MAX_BYTES_OUTSIDE}"),
    ],
)
def test_a_body_of_too_many_values_is_refused_with_the_limit(part: bytes, most: int, words: str) -> None:
    def of(count: int) -> bytes:
        return b'"' + b",[{:" * MAX_VALUES + b'",' + b",".join([part] * count)

    check_size(of(most))
    with pytest.raises(HttpError, match=words) as refused:
        check_size(of(most + 2))
    assert refused.value.status == 413


@pytest.mark.parametrize("text", ["a, b [c]: " * 900_000, '"\\"' * 900_000])
def test_a_long_text_is_one_value(http: httpx.Client, text: str) -> None:
    answer = http.post(TEXT, content=json.dumps({"prompt": text}).encode(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert str(MAX_MODEL_LEN) in answer.json()["error"]["message"]


class Where(BaseModel):
    """Notes which thread read it."""

    prompt: str
    thread: int = 0

    @model_validator(mode="after")
    def note(self) -> "Where":
        self.thread = threading.get_ident()
        return self


def request_of(content: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


@pytest.mark.parametrize("length, here", [(100, True), (1_000_000, False)])
def test_a_large_body_is_parsed_in_a_thread_and_a_small_one_at_once(length: int, here: bool) -> None:
    content = json.dumps({"prompt": "x" * length}).encode()
    body = asyncio.run(read_body(request_of(content), Where, max_bytes=len(content)))
    assert (body.thread == threading.get_ident()) == here


def test_others_go_on_while_a_hostile_body_is_refused() -> None:
    """Eight MiB of empty lists took about two seconds to parse, during which no other request was served."""
    content = b'{"prompt":[' + b"[]," * ((8 << 20) // 3) + b"[]]}"

    async def longest_silence() -> float:
        longest = 0.0
        reading = asyncio.create_task(read_body(request_of(content), Where, max_bytes=len(content)))
        heard = time.process_time()  # others' work does not count
        while not reading.done():
            await asyncio.sleep(0.001)
            longest, heard = max(longest, time.process_time() - heard), time.process_time()
        assert isinstance(reading.exception(), HttpError)
        return longest

    assert asyncio.run(longest_silence()) < 0.5
