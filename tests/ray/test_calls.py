"""What the router knows of a prompt. Needs no Ray."""

from typing import Any

import msgspec
import pytest

from faser.ray.calls import Headers, prompt_digests

LONG = "Some sentences that many prompts begin with. " * 20
TURNS = [{"role": "system", "content": LONG}, {"role": "user", "content": "And now?"}]


def digests(headers: Headers = (), **fields: Any) -> tuple[bytes, ...]:
    return prompt_digests(headers, msgspec.json.encode(fields))


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_a_chat_that_goes_on_has_the_pieces_of_the_chat_before() -> None:
    before = digests(messages=TURNS)
    after = digests(messages=[*TURNS, {"role": "assistant", "content": LONG}])
    assert 3 <= len(before) < len(after)
    assert after[: len(before)] == before


def test_what_stands_before_the_first_difference_is_shared() -> None:
    other = [TURNS[0], {"role": "user", "content": LONG}]
    assert common(digests(messages=TURNS), digests(messages=other)) == len(LONG) // 256


@pytest.mark.parametrize("field", ["prompt", "input", "system"])
def test_each_dialects_prompt_is_read(field: str) -> None:
    assert len(prompt_digests((), msgspec.json.encode({field: LONG}))) == len(msgspec.json.encode(LONG)) // 256


def test_tools_come_first_as_in_a_template() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": LONG}}]
    assert common(digests(messages=TURNS, tools=tools), digests(messages=[], tools=tools)) >= 3
    assert common(digests(messages=TURNS, tools=tools), digests(messages=TURNS)) == 0


@pytest.mark.parametrize(
    "headers, fields",
    [
        (((b"authorization", b"Bearer one"),), {}),
        (((b"x-api-key", b"one"),), {}),
        ((), {"cache_salt": "salt"}),
        ((), {"model": "other"}),
    ],
)
def test_what_does_not_share_a_cache_shares_no_piece(headers: Headers, fields: dict[str, Any]) -> None:
    assert common(digests(prompt=LONG), digests(headers, prompt=LONG, **fields)) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"messages": 5}', b"[" * 100_000])
def test_a_body_without_a_prompt_has_no_pieces(body: bytes) -> None:
    assert prompt_digests((), body) == ()
