"""ChatRenderer.tail: what a prompt ends with that later turns lack, by the template's own marks."""

import pytest

from faser.api.requests.chat_renderer import ChatRenderer
from tests.fake_engine import byte_tokenizer

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_CLOSED = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
THINKING = _TURNS + _ASKS + _CLOSED + "{% endif %}"
PLAIN = _TURNS + _ASKS + "{% endif %}"
_MARKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
MARKED = _MARKS + "{% if add_generation_prompt %}[bot]{% endif %}"
STRICT = PLAIN + "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"


@pytest.mark.parametrize(
    "template, kwargs, tail",
    [
        (THINKING, None, "<think>\n"),
        (THINKING, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (PLAIN, None, ""),
        (MARKED, None, "bot]"),
        (STRICT, None, None),
    ],
)
def test_the_tail_is_what_the_next_turn_does_not_have(
    template: str, kwargs: dict[str, object] | None, tail: str | None
) -> None:
    renderer = ChatRenderer(byte_tokenizer(template), None)
    assert renderer.tail(kwargs, tools=False) == tail
    assert renderer.tail(kwargs, tools=False) == tail
