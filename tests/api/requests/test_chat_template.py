"""Oracle: transformers, rendering the same template for the same conversation."""

import contextlib
import functools
import time
import tracemalloc
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from faser.api.requests import template_sandbox
from faser.api.requests.chat_template import ChatTemplate, choose_template
from faser.errors import ModelError, RequestError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if documents is defined %}{{ "Documents: " ~ documents }}{% endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.content %}
        {{- '<|im_start|>' + message.role }}
        {%- for part in message.content %}{{ '\\n' + part.text }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function.arguments | tojson(indent=2)) + '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
"""
LOOPS = """
{% set ns = namespace(last=-1, count=0) %}
{% for message in messages %}
    {% if message.role == 'user' %}
        {% set ns.last = loop.index0 %}
    {% endif %}
{% endfor %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if ns.count > 4 %}
        {% break %}
    {% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
[{{ loop.index0 }}|{{ message.content }}{{ eos_token }}]
        {% endgeneration %}
    {% else %}
[{{ 'last ' if loop.index0 == ns.last }}{{ message.content }}]
    {% endif %}
{% endfor %}
{{ pad_token is defined }} {{ unk_token }}
"""
TEMPLATES = {"smollm2": SMOLLM2, "headers": HEADERS, "tools": TOOLS, "loops": LOOPS}
USER = {"role": "user", "content": "  Größe <b> & 'x' 東京 🙂\n"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief. "}, USER],
    [USER, {"role": "assistant", "content": "Sure,  "}, USER, {"role": "assistant", "content": "and so"}],
]
TOOL = {"type": "function", "function": {"name": "näme", "parameters": {"x": "<&'>", "b": True, "n": None}}}


def oracle(template: str) -> PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    defaults: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "extra": {}}
    return template_of(source).render(messages, **(defaults | options))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_are_those_of_transformers(
    name: str, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    expected = oracle(TEMPLATES[name]).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert render(TEMPLATES[name], chat, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("name", ["smollm2", "headers", "tools"])
@pytest.mark.parametrize("text", ["and so", "trailing  ", "  both \n", "twice and so and so"])
def test_a_continued_message_ends_where_transformers_ends_it(name: str, text: str) -> None:
    chat = [USER, {"role": "assistant", "content": text}]
    expected = oracle(TEMPLATES[name]).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert render(TEMPLATES[name], chat, add_generation_prompt=False, continue_final_message=True) == expected
    assert chat[-1]["content"] == text


def test_a_continued_message_may_have_parts() -> None:
    chat = [{"role": "assistant", "content": [{"text": "one"}, {"text": "two"}]}]
    expected = oracle(TOOLS).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert render(TOOLS, chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_tools_and_further_variables_reach_the_template() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"ü": [1, 2]}}}]}
    chat: list[dict[str, Any]] = [USER, call, USER]
    expected = oracle(TOOLS).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, tools=[TOOL], enable_thinking=False
    )
    assert render(TOOLS, chat, tools=[TOOL], extra={"enable_thinking": False}) == expected


def test_the_time_is_todays() -> None:
    source = "{{ strftime_now('%Y-%m') }}"
    assert render(source, [USER]) == oracle(source).apply_chat_template([USER], tokenize=False)


def test_a_missing_token_is_undefined_and_not_the_word_none() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ bos_token is defined }}", bos_token=None, eos_token=None)
    text = template.render([USER], add_generation_prompt=False, continue_final_message=False, extra={})
    assert text == "|False"


def test_a_template_that_does_not_compile_is_the_operators_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        template_of("fine\n{% if %}")


def test_a_template_that_refuses_a_conversation_says_so_to_the_caller() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", [USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}{{ cycler.__init__.__globals__.os }}{{ undefined_name.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * [1] }}",
        "{{ 9 ** 999 }}",
        "{% set x = 'x' * 60000000 %}{{ x }}{{ x }}",
        "{{ '%s' % messages[3].content }}",
    ],
)
def test_the_sandbox_stops_what_a_template_must_not_do(source: str) -> None:
    chat = [dict(USER)]
    with pytest.raises(RequestError, match="chat template cannot render"):
        render(source, chat)
    assert chat == [USER]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "9999 turns"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "9999 turns"),
        ("{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}", "recursion"),
        (
            "{% macro a() %}{% endmacro %}{% for i in range(99999) %}{{ a() ~ a() ~ a() ~ a() ~ a() ~ a() ~ a()"
            " ~ a() ~ a() ~ a() ~ a() }}{% endfor %}",
            "9999 turns",
        ),
        ("{% for i in range(99999) %}{% set x = ([1] * 900) | sum %}{% endfor %}", "more than 0.1 seconds"),
        ("{{ lipsum(n=1000000) }}", "'lipsum' is undefined"),
    ],
)
def test_loops_end_when_their_budget_is_spent(monkeypatch: pytest.MonkeyPatch, source: str, what: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 9999)
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1 if "seconds" in what else 60)
    with pytest.raises(RequestError, match=f"cannot render these messages: .*{what}"):
        render(source, [USER])


_GROWING = "{% set ns = namespace(a=START, b=START) %}{% for i in range(40) %}{% set ns.a = MORE %}{% endfor %}"
_LONG = "('a' * 60000)"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.center(1000000000) ~ 'a'.ljust(1000000000) ~ 'a'.rjust(1000000000) }}",
        "{{ '1'.zfill(3000000000) }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ '%(a)1000000000s' % {'a': 1} }}",
        "{{ '%*s' % (1000000000, 'a') }}",
        "{{ '%.1000000000f' | format(1.5) }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ '{:{}}'.format('a', 1000000000) }}",
        "{{ ('{0}' * 30000).format(" + _LONG + ") }}",
        "{{ ('%(a)s' * 30000) % {'a': " + _LONG + "} }}",
        *(
            _GROWING.replace("START", start).replace("MORE", more)
            for start, more in (
                ("'aaaaaaaa'", "ns.a ~ ns.a"),
                ("'aaaaaaaa'", "ns.a + ns.a"),
                ("[1]", "ns.a + ns.a"),
                ("[1]", "[ns.a, ns.a]"),
                ("[1]", "(ns.a, ns.a)"),
                ("[1]", "{'a': ns.a, 'b': ns.a}"),
                ("[1]", "dict(a=ns.a, b=ns.a)"),
                ("[1]", "[ns.a[:], ns.a | list]"),
                ("99999999999", "ns.a * ns.a"),
            )
        ),
        "{% set ns = namespace(a=[]) %}{% for i in range(99) %}{% set ns.a = ns.a + ['a' * 999999] %}{% endfor %}",
        "{% for i in range(2000) %}{% set a = 'a' * 9999999 %}{% endfor %}",
        "{% set b = 'a' * 30000000 %}{% for i in range(99) %}{% set a = b ~ '' %}{% endfor %}",
        "{{ " + _LONG + " | replace('a', 'b' * 60000) }}",
        "{{ " + _LONG + ".replace('', 'b' * 60000) }}",
        "{{ range(99999) | join(" + _LONG + ") }}",
        "{{ " + _LONG + ".join(" + _LONG + " | list) }}",
        "{{ ('\n' * 60000) | indent(60000) }}",
        "{{ range(99999) | list | tojson(indent=60000) }}",
        "{{ ('\t' * 60000).expandtabs(60000) }}",
        "{{ " + _LONG + ".translate({97: 'b' * 60000}) }}",
        "{{ ([[1] * 1000] * 6000) | sum(start=[]) | length }}",
        "{{ range(99999) | map('center', 60000) | list | length }}",
        "{{ ('ab' * 30000000) | list | length }}",
        "{{ 9 ** 64 ** 64 }}",
    ],
)
def test_what_would_take_gigabytes_is_refused_before_it_is_made(source: str) -> None:
    """In memory and time: what one rendering may make, and half of the seconds."""
    began_s = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="cannot render these messages"):
            render(source, [USER])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * template_sandbox.MAX_MADE
    assert time.thread_time() - began_s < template_sandbox.MAX_SECONDS / 2


@pytest.mark.parametrize("name", ["urlize", "wordwrap", "xmlattr", "pprint", "slice", "batch"])
def test_filters_without_bounds_are_not_offered(name: str) -> None:
    with pytest.raises(ModelError, match=f"No filter named '{name}'"):
        template_of("{{ messages | " + name + " }}")


def test_bounds_are_no_hindrance_to_what_templates_do() -> None:
    """The same texts as from transformers, for what passes through every bounded operation."""
    source = (
        "{{ '%-8s|%5.2f' % ('ab', 1.5) }}{{ '%s=%s' | format('a', 1) }}{{ '{:>4}{}'.format('a', [1]) }}"
        "{{ messages[0].content | center(9) ~ 1 ~ none ~ [1, messages[0].role] }}{{ [1] + [messages | length] }}"
        "{{ ', '.join(['a', messages[0].role]) }}{{ ['a', 1] | join('-') }}{{ 'a\nb' | indent(2) }}"
        "{{ {'a': messages[0].content, 'b': (1, [2])} | tojson(indent=2) }}{{ [3, 4] | sum }}{{ 7 * 6 + 2 ** 10 }}"
        "{{ 'a b'.split(' ') | map('upper') | list }}{{ 'aXbX'.replace('X', '__') | replace('a', 'c') }}"
        "{% for role, text in [('a', messages[0].content), ('b', 'x')] %}{{ role }}{{ text }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ missing ~ 'x' }}{{ 'ab' * 3 }}"
    )
    assert render(source, [USER]) == oracle(source).apply_chat_template([USER], tokenize=False)


def test_a_long_chat_is_within_the_bounds() -> None:
    """2,000 messages of 600 kB together, in a text that grows message by message."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ '<' + m.role + '>' + m.content | trim | replace('x', 'y') %}{% endfor %}"
        "{{ ns.text[-20:] }}"
    )
    assert render(source, [USER | {"content": "word " * 60}] * 800).endswith("word")


def test_a_loop_with_a_condition_has_the_turns_that_it_always_had() -> None:
    source = "{% for i in range(9) if i % 2 or i == 4 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% endfor %}"
    assert render(source, [USER]) == oracle(source).apply_chat_template([USER], tokenize=False)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "{" * 3000 + "1" + "}" * 3000 + " }}",
        "{{ " + "[" * 900 + "]" * 900 + " }}",
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "{{ faser_budget }}",
    ],
)
def test_a_template_that_python_cannot_compile_is_the_operators_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template does not compile"):
        template_of(source)


def test_a_template_that_loops_over_one_message_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 9999)
    with pytest.raises(ModelError, match="more than 9999 turns, and this was one message"):
        template_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}").check()
    template_of("{{ raise_exception('a system message must come first') }}").check()


@pytest.mark.parametrize(
    "chat", [[], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": [{"type": "image"}]}]]
)
def test_only_a_message_with_text_can_be_continued(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        render(TOOLS, chat, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="leaves out the end"):
        render("{{ messages[0].role }}", [USER], add_generation_prompt=False, continue_final_message=True)


def test_a_message_is_either_continued_or_answered() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(SMOLLM2, [USER], continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_further_variables_cannot_replace_those_of_the_request(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        render(SMOLLM2, [USER], extra={name: []})


def test_the_template_is_chosen_by_name() -> None:
    assert choose_template("only", with_tools=True) == "only"
    named = {"default": "one", "tool_use": "two"}
    assert choose_template(named, with_tools=False) == "one"
    assert choose_template(named, with_tools=True) == "two"
    assert choose_template({"default": "one"}, with_tools=True) == "one"
    with pytest.raises(RequestError, match="no chat template"):
        choose_template(None, with_tools=False)
    with pytest.raises(RequestError, match="it has rag but no default"):
        choose_template({"rag": "x"}, with_tools=False)


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001"), max_size=12)
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": _TEXT}),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), chat=_MESSAGES, add=st.booleans(), tools=st.booleans())
def test_any_messages_give_the_prompts_of_transformers(
    name: str, chat: list[dict[str, Any]], add: bool, tools: bool
) -> None:
    given_tools = [TOOL] if tools else None
    expected = _oracle(name).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add, tools=given_tools
    )
    assert render(TEMPLATES[name], chat, add_generation_prompt=add, tools=given_tools) == expected


_TAGS = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    " for m in messages ",
    " endfor ",
    " if tools ",
    " endif ",
    " set y = 1 ",
]
_PARTS = [*_TAGS, "m.content", "x", "~", "raise_exception('no')", "[1]", "loop.index", "'", "**", "(", ")"]


@settings(max_examples=80, deadline=None)
@given(source=st.lists(st.sampled_from(_PARTS), max_size=14).map("".join))
def test_any_template_compiles_or_renders_or_fails_with_an_error_of_ours(source: str) -> None:
    with contextlib.suppress(ModelError, RequestError):
        assert isinstance(render(source, [USER], tools=[TOOL]), str)


@functools.cache
def _oracle(name: str) -> PreTrainedTokenizerFast:
    return oracle(TEMPLATES[name])
