"""Chats that strict templates raise on or shorten: merged text, or an error that names the message."""

from typing import Any

import pytest

from faser.api.requests.chat_renderer import ChatRenderer
from faser.errors import RequestError
from tests.fake_engine import byte_tokenizer

TURN = "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
# Raises as Qwen3.5's does: a system message behind the first, a chat without a user, a role that it does not know.
QWEN = (
    "{% set ns = namespace(user=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}"
    "{% endif %}{% endfor %}{% if not ns.user %}{{ raise_exception('no user query') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unexpected role') }}"
    "{% endif %}" + TURN + "{% endfor %}"
)
# Raises as Gemma 2's and Mixtral's do: any system message, and turns that do not alternate.
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
# Leaves out, as Phi-3's first one does, whatever is neither of the user nor of the assistant.
SILENT = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]


def said(role: str, content: Any, **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


def rendered(template: str, *messages: dict[str, Any], tools: Any = (), **fields: Any) -> str:
    renderer = ChatRenderer(byte_tokenizer(template), None)
    return renderer.render(
        [*messages],
        add_generation_prompt=None,
        continue_final_message=fields.get("continue_final_message"),
        template_kwargs=None,
        template_fields={},
        tools=tools,
    )


BE, HI, SO, GO = said("system", "be"), said("user", "hi"), said("assistant", "so"), said("user", "go")


@pytest.mark.parametrize(
    "template, messages, prompt",
    [
        (QWEN, (BE, HI), "[system]be[user]hi"),
        (QWEN, (HI, SO, BE, GO), "[system]be[user]hi[assistant]so[user]go"),
        (QWEN, (BE, HI, said("system", "more"), SO), "[system]be\n\nmore[user]hi[assistant]so"),
        (QWEN, (said("developer", "be"), HI), "[system]be[user]hi"),
        (QWEN, (BE, said("developer", "more"), HI), "[system]be\n\nmore[user]hi"),
        (QWEN, (HI, GO), "[user]hi[user]go"),
        (
            QWEN,
            (HI, said("assistant", None, tool_calls=CALLS), said("tool", "3")),
            "[user]hi[assistant](now)[tool]3",
        ),
        (QWEN, (HI, said("assistant", "so", tool_calls=[]), GO), "[user]hi[assistant]so[user]go"),
        (GEMMA, (BE, HI), "[user]be\n\nhi"),
        (GEMMA, (HI, GO, SO), "[user]hi\n\ngo[assistant]so"),
        (GEMMA, (BE, HI, GO, SO, said("system", "more")), "[user]be\n\nmore\n\nhi\n\ngo[assistant]so"),
        (GEMMA, (HI, said("assistant", None, tool_calls=CALLS), said("tool", "3"), GO), None),
        (SILENT, (BE, HI), "[user]be\n\nhi"),
        (SILENT, (HI, SO, BE, GO), "[user]be\n\nhi[assistant]so[user]go"),
    ],
)
def test_text_is_merged_where_the_template_wants_it(
    template: str, messages: tuple[dict[str, Any], ...], prompt: str | None
) -> None:
    found = rendered(template, *messages)
    if prompt is not None:
        assert found == prompt
    for message in messages:
        assert (message["content"] or "") in found


def test_an_assistant_that_is_continued_is_merged_too() -> None:
    assert rendered(GEMMA, BE, HI, SO, continue_final_message=True) == "[user]be\n\nhi[assistant]so"


def test_calls_of_turns_that_are_joined_are_all_kept() -> None:
    first = said("assistant", None, tool_calls=CALLS)
    found = rendered(QWEN, HI, first, said("assistant", "so", tool_calls=CALLS), BE)
    assert found == "[system]be[user]hi[assistant]so(now)(now)"


@pytest.mark.parametrize(
    "template, messages, at, reason",
    [
        (QWEN, (HI, SO, said("critic", "no"), GO), 2, "unexpected role"),
        (QWEN, (said("assistant", None, tool_calls=CALLS), said("tool", "3")), 0, "no user query"),
        (GEMMA, (SO, HI), 0, "roles must alternate"),
        (SILENT, (HI, said("critic", "no")), 1, "leaves its content out"),
    ],
)
def test_what_no_order_helps_is_an_error_that_names_the_message(
    template: str, messages: tuple[dict[str, Any], ...], at: int, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        rendered(template, *messages)
    assert caught.value.param == f"messages.{at}"
    assert f"messages.{at}" in str(caught.value)


def test_a_role_that_nobody_declared_goes_to_the_template() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert rendered(template, HI, said("critic", "no")) == "[user]hi[critic]no"


@pytest.mark.parametrize(
    "template, content",
    [
        ("{{ messages[0].content | trim }}", " a\n"),
        ("{{ messages[0].content | tojson }}", 'a\n"ü"'),
        ("{{ messages[0].content.split() | join(' ') }}", "a\n\n b"),
        ("{{ messages[0].content.replace('/no_think', '') }}", "be brief /no_think"),
        ("{{ messages[0].content.replace('/no_think', '') }}.", "/no_think"),
    ],
)
def test_a_text_that_is_rewritten_is_not_lost(template: str, content: str) -> None:
    role = "system" if "no_think" in content else "user"
    assert rendered(template, said(role, content))


def test_earlier_answers_and_results_may_be_left_out() -> None:
    assert rendered("{{ messages[0].content }}", HI, SO, said("tool", "3")) == "hi"


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def test_a_template_that_has_tools_in_a_message_gets_them_there() -> None:
    template = (
        "{% for m in messages %}{% set message = m %}{{ message['content'] }}{{ message['tools'] }}{% endfor %}"
    )
    assert rendered(template, BE, HI, tools=[TOOL]) == 'be[{"name": "now", "parameters": {"type": "object"}}]hi'
    assert rendered(template, HI, tools=[TOOL]) == '[{"name": "now", "parameters": {"type": "object"}}]hi'


def test_a_template_that_calls_tools_xml_tools_gets_them() -> None:
    template = "{% for t in xml_tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert rendered(template, HI, tools=[TOOL]) == "nowhi"
