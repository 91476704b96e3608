"""Efforts and budgets that agents send, of any model: none is refused, on a model that thinks or on another."""

from typing import Any

import pytest

from tests.api.server import http_client, serving
from tests.fake_engine import FakeEngine, byte_tokenizer, saying

_MESSAGES = [{"role": "user", "content": "Hi"}]
_THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}<think>\n</think>"
_PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "of a later model")
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", {"messages": _MESSAGES, "reasoning_effort": each}) for each in EFFORTS),
    *(
        (
            "/v1/responses",
            {"input": "Hi", "reasoning": {"effort": each, "summary": "auto"}, "max_output_tokens": 9},
        )
        for each in EFFORTS
    ),
    *(
        ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 32_000, "output_config": {"effort": each}})
        for each in EFFORTS
    ),
    *(
        ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 32_000, "thinking": each})
        for each in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31_999}, {"type": "disabled"})
    ),
]


@pytest.mark.parametrize("template", [_THINKS, _PLAIN])
def test_no_effort_is_refused(template: str) -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(template))
    with serving(engine) as url, http_client(url) as http:
        for path, body in BODIES:
            engine.script = saying("Done.")
            answer = http.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, (path, body, answer.text)
