"""Thinking budgets, from the fields of each dialect to what the engine is asked."""

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from faser.types.engine import ModelInfo
from faser.types.sampling import ThinkingBudget
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


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
TAKES_ALL = BASE + "{{ reasoning_effort }}"
TAKES_TWO = BASE + (
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('reasoning_effort must be none or high') }}{% endif %}"
)
HARMONY = BASE + "<|start|>assistant{# <|channel|>final #}Reasoning: {{ reasoning_effort }}"
TEMPLATES = {
    "plain": BASE,
    "free": FREE,
    "open": OPEN,
    "switch": FREE + SWITCH,
    "takes all": TAKES_ALL,
    "takes two": TAKES_TWO,
    "harmony": HARMONY,
}
AGENTS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"reasoning_effort": effort}) for effort in EFFORTS),
    *((RESPONSES, {"reasoning": {"effort": effort, "summary": "auto"}}) for effort in EFFORTS),
    *((MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": each}}) for each in EFFORTS),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 31999}, "max_tokens": 32000}),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}}),
    (MESSAGES, {"thinking": {"type": "between_tools"}}),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.full(but=("plain", "switch", "harmony"))
def test_no_effort_of_an_agent_is_refused(template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template], special_tokens=MARKS)
    with serving(Thinker(saying("Hello!"), tokenizer=tokenizer)) as url:
        for route, fields in AGENTS:
            answer = httpx.post(url + route, json={"model": "tiny", **NEEDED[route], **fields})
            assert answer.status_code == 200, (fields, answer.text)


@pytest.mark.parametrize(
    "template, efforts",
    [
        (TAKES_ALL, {"minimal": "minimal", "max": "max", "ultra": ""}),
        (TAKES_ALL + "{# ultra #}", {"ultra": "ultra"}),
        (
            TAKES_TWO + "{{ reasoning_effort }}",
            {"none": "none", "minimal": "none", "low": "high", "medium": "high", "max": "high", "ultra": ""},
        ),
        (
            HARMONY,
            {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "xhigh": "high", "max": "high"},
        ),
        ("{{ raise_exception('system first') if messages | length < 2 }}" + TAKES_ALL, {"xhigh": "xhigh"}),
    ],
)
def test_a_template_gets_the_nearest_effort_that_its_model_knows(template: str, efforts: dict[str, str]) -> None:
    engine = Thinker(saying("Hello!"), tokenizer=byte_tokenizer(template))
    with serving(engine) as url:
        for effort in efforts:
            body = {"messages": [{"role": "system", "content": "x"}, *HI], "reasoning_effort": effort}
            answer = httpx.post(url + CHAT, json=body)
            assert answer.status_code == 200, answer.text
    prompts = [bytes(request.prompt_token_ids).decode() for request in engine.requests]
    found = [re.split(r"\[user\]hi|Reasoning: ", prompt)[-1] for prompt in prompts]
    assert dict(zip(efforts, found, strict=True)) == efforts


def test_an_effort_that_is_not_known_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert asked(FREE, CHAT, reasoning_effort="gigantic") is None
    assert [each.message for each in caplog.records if "gigantic" in each.message] == [
        'the model does not know reasoning_effort "gigantic"; ignoring it'
    ]
