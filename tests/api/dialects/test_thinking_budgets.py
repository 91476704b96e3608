"""Thinking budgets, from the fields of each dialect to what the engine is asked."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from faser.types import ModelInfo, ThinkingBudget
from tests.api.server import serving
from tests.fake_engine import FakeEngine, byte_tokenizer, saying

THINK, END_THINK = 257, 258  # the first ids behind the bytes and the end of an answer
MARKS = ("<think>", "</think>")
BASE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
FREE, OPEN = f"{BASE}{{# </think> #}}", f"{BASE}{{# </think> #}}<think>\n"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    RESPONSES: {"input": HI},
    MESSAGES: {"messages": HI, "max_tokens": 40},
}


class Thinker(FakeEngine):
    """An engine whose model has the marks of thinking."""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, vocab_size=260)


def budget(max_tokens: int, *, is_open: bool = False) -> ThinkingBudget:
    return ThinkingBudget(max_tokens=max_tokens, begin=(THINK,), end=END_THINK, is_open=is_open)


def asked(template: str, route: str, marks: tuple[str, ...] = MARKS, **fields: Any) -> Any:
    """The budget that reaches the engine; the prompt; or the refused request's error."""
    engine = Thinker(saying("Hello!"), tokenizer=byte_tokenizer(template, special_tokens=marks))
    with serving(engine) as url:
        answer = httpx.post(url + route, json={"model": "tiny", **NEEDED[route], **fields})
    if answer.status_code == 200:
        return engine.requests[-1].sampling.thinking_budget
    return answer.status_code, answer.json()["error"].get("param"), answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "route, fields, max_tokens",
    [
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"thinking_token_budget": 0}, 0),
        (CHAT, {"thinking_token_budget": -1}, None),
        (CHAT, {"reasoning_effort": "low"}, 1024),
        (CHAT, {"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
        (CHAT, {"reasoning_effort": "xhigh"}, None),
        (CHAT, {}, None),
        (RESPONSES, {"reasoning": {"effort": "medium"}}, 8192),
        (RESPONSES, {"reasoning": {"effort": "none"}}, 0),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
        (MESSAGES, {"output_config": {"effort": "high"}}, 24576),
    ],
)
@pytest.mark.parametrize("template", [FREE, OPEN])
def test_every_dialect_sets_a_budget(
    route: str, fields: dict[str, Any], max_tokens: int | None, template: str
) -> None:
    expected = None if max_tokens is None else budget(max_tokens, is_open=template == OPEN)
    assert asked(template, route, **fields) == expected


def test_an_effort_is_for_a_template_that_uses_it() -> None:
    assert asked(FREE + "{{ reasoning_effort }}", CHAT, reasoning_effort="low") is None
    assert asked(FREE + "{{ reasoning_effort }}", CHAT, thinking_token_budget=7) == budget(7)


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_no_effort_is_the_switch_of_a_template_that_has_one(effort: str) -> None:
    engine = Thinker(tokenizer=byte_tokenizer(FREE + SWITCH, special_tokens=MARKS))
    with serving(engine) as url:
        for kwargs in (None, {"enable_thinking": True}):
            body = {"messages": HI, "reasoning_effort": effort, "chat_template_kwargs": kwargs}
            assert httpx.post(url + CHAT, json=body).status_code == 200
    closed, wanted = engine.requests
    assert closed.prompt_token_ids[-4:] == (ord("\n"), END_THINK, ord("\n"), ord("\n"))
    assert closed.sampling.thinking_budget is None
    assert wanted.sampling.thinking_budget == budget(0)


def test_the_marks_of_other_formats_bind_too() -> None:
    gemma = BASE + "{{ '<|channel>thought\\n<channel|>' if false }}"
    found = asked(gemma, CHAT, ("<|channel>", "<channel|>"), thinking_token_budget=5)
    assert found == ThinkingBudget(max_tokens=5, begin=(257,), end=258, is_open=False)
    harmony = BASE + "<|start|>assistant{# <|channel|>final #}"
    found = asked(harmony, CHAT, ("<|start|>", "<|channel|>", "<|message|>"), thinking_token_budget=5)
    begin = (258, *b"analysis", 259)
    assert found == ThinkingBudget(max_tokens=5, begin=begin, end=256, is_open=False, repeats=True)


@pytest.mark.parametrize("template, marks", [(BASE, MARKS), (FREE, ())])
def test_a_budget_that_cannot_bind_is_ignored(template: str, marks: tuple[str, ...]) -> None:
    assert asked(template, CHAT, marks, thinking_token_budget=7) is None


@pytest.mark.parametrize(
    "route, fields, param",
    [
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
    ],
)
def test_a_negative_budget_is_refused_by_its_own_name(route: str, fields: dict[str, Any], param: str) -> None:
    status, _, message = asked(FREE, route, **fields)
    assert status == 400
    assert message.startswith(f"{param} is -2; it must be")
