"""Chat completions as the official client sees them."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from faser.errors import RequestError
from faser.types.answer import FinishReason, RequestOutput
from faser.types.request import Request
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import END, FakeEngine, Step, byte_tokenizer, delta, saying

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def prompt_of(engine: FakeEngine, at: int = -1) -> str:
    return bytes(engine.requests[at].prompt_token_ids).decode()


def test_answer_has_what_openai_sends(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", cached=4)
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_body={"cache_salt": "mine"})
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.system_fingerprint == "faser-1.2.3"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert choice.message.refusal is None
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (19, 6, 25)
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_messages_go_through_the_models_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ],
    )
    assert prompt_of(engine) == "[system]be brief[user]one\ntwo[assistant]three[user]four[assistant]"


def test_operators_template_replaces_the_models() -> None:
    engine = FakeEngine()
    template = "{{ messages[0].content | upper }}"
    with serving(engine, settings(chat_template=template)) as url, openai_client(url) as client:
        client.chat.completions.create(model="tiny", messages=HI)
    assert prompt_of(engine) == "HI"


def test_model_without_template_refuses_chats_and_serves_completions() -> None:
    with serving(FakeEngine(tokenizer=byte_tokenizer(None))) as url, openai_client(url) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=HI)
        assert client.completions.create(model="tiny", prompt="hi").choices[0].text == "Hello!"


def test_final_message_can_be_continued(http: httpx.Client, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    http.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert prompt_of(engine) == "[user]hi[assistant]Well,"


def test_template_gets_extra_arguments_and_fields_it_knows() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer("{{ mood }} {{ reasoning_effort }} {{ messages[0].content }}"))
    with serving(engine) as url, openai_client(url) as client:
        client.chat.completions.create(
            model="tiny",
            messages=HI,
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"mood": "calm"}},
        )
    assert prompt_of(engine) == "calm low hi"


def test_tool_calls_of_earlier_turns_reach_the_template_as_objects() -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    engine = FakeEngine(tokenizer=byte_tokenizer(template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with serving(engine) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert prompt_of(engine) == "Oslo"


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=HI,
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        max_completion_tokens=50,
        max_tokens=3,
        stop=["a", "b"],
        logit_bias={"65": -100},
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "allowed_token_ids": [65, 66],
            "stop_token_ids": [10],
            "ignore_eos": True,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "mine",
        },
    )
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        2,
        0.5,
        0.9,
        5,
        0.05,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (7, 50, 2)
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("a", "b"), (10,), ((65, -100.0),))
    assert sampling.allowed_token_ids == (65, 66)
    assert (sampling.ignore_eos, sampling.include_stop_str_in_output, sampling.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert request.cache_salt is not None
    assert "mine" not in request.cache_salt
    assert not request.shares_cache


def test_defaults_are_openais(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model="tiny", messages=HI)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.max_tokens) == (1.0, 1.0, 1, None)


def test_generation_defaults_fill_what_the_body_leaves_out() -> None:
    engine = FakeEngine()
    defaults = {"temperature": 0.2, "top_k": 40.0, "top_p": 0.5, "max_tokens": 9.0}
    with serving(engine, settings(generation_defaults=defaults)) as url, openai_client(url) as client:
        client.chat.completions.create(model="tiny", messages=HI, top_p=0.8)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.2, 40, 0.8, 9)


@pytest.mark.parametrize("off", [-1, 0, None])
def test_top_k_is_off_in_every_spelling(http: httpx.Client, engine: FakeEngine, off: int | None) -> None:
    assert http.post("/v1/chat/completions", json={"messages": HI, "top_k": off}).status_code == 200
    assert engine.requests[0].sampling.top_k == 0


def test_an_answer_longer_than_the_context_is_refused_by_the_name_that_the_body_has(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "max_completion_tokens": 4078})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "max_completion_tokens"
    assert " 19 tokens and max_completion_tokens is 4078: together 4097. Ask for at most 4077" in error["message"]
    body = {"messages": HI, "max_completion_tokens": 4077}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_every_sample_is_a_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "Hello!"),
        (1, "Hello!"),
        (2, "Hello!"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 18)


@pytest.mark.parametrize("stop_reason", ["END", END, None])
def test_stop_reason_says_what_hit(http: httpx.Client, engine: FakeEngine, stop_reason: int | str | None) -> None:
    engine.script = lambda request: [
        RequestOutput(
            request_id=request.request_id,
            deltas=(delta(request, 0, b"x", finish_reason=FinishReason.STOP, stop_reason=stop_reason),),
        )
    ]
    choice = http.post("/v1/chat/completions", json={"messages": HI}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_reason)


def test_limit_ends_an_answer_with_length(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, max_tokens=2).choices
    assert (choice.message.content, choice.finish_reason) == ("He", "length")


def test_logprobs_have_token_bytes_and_alternatives(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("é")
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first, second = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("\ufffd", [0xC3], -0.5)
    assert second.bytes == [0xA9]
    assert [(top.bytes, top.logprob) for top in first.top_logprobs] == [([0xC3], -0.5), ([0xC4], -1.5)]


def test_logprobs_alone_bring_no_alternatives(client: openai.OpenAI, engine: FakeEngine) -> None:
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, logprobs=True).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].top_logprobs == []
    assert engine.requests[0].sampling.logprobs == 0


def test_impossible_tokens_have_a_finite_logprob(http: httpx.Client, engine: FakeEngine) -> None:
    """JSON has no infinity."""

    def script(request: Request) -> list[RequestOutput]:
        said = delta(request, 0, b"x", finish_reason=FinishReason.STOP)
        assert said.logprobs is not None
        lost = replace(said.logprobs[0], top=((1, -math.inf),))
        return [RequestOutput(request_id=request.request_id, deltas=(replace(said, logprobs=(lost,)),))]

    engine.script = script
    answer = http.post("/v1/chat/completions", json={"messages": HI, "logprobs": True, "top_logprobs": 1}).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_token_ids_come_back_when_asked_for(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "return_token_ids": True}).json()
    assert bytes(answer["prompt_token_ids"]) == b"[user]hi[assistant]"
    assert bytes(answer["choices"][0]["token_ids"]) == b"Hello!"
    plain = http.post("/v1/chat/completions", json={"messages": HI}).json()
    assert not {"prompt_token_ids", "prompt_logprobs", "prompt_text"} & plain.keys()
    assert "token_ids" not in plain["choices"][0]


def test_the_rendered_prompt_comes_back_when_asked_for(http: httpx.Client) -> None:
    body = {"messages": HI, "return_prompt_text": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_text"] == "[user]hi[assistant]"


def test_tokens_can_be_written_as_ids(http: httpx.Client) -> None:
    body = {"messages": HI, "logprobs": True, "return_tokens_as_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ord('H')}"


def test_prompt_logprobs_stand_next_to_the_choices(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 1}).json()
    table = answer["prompt_logprobs"]
    assert table[0] is None
    assert table[1] == {str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    assert len(table) == answer["usage"]["prompt_tokens"]


def test_prompt_can_be_cut_from_the_left(http: httpx.Client, engine: FakeEngine) -> None:
    http.post("/v1/chat/completions", json={"messages": HI, "truncate_prompt_tokens": 3})
    assert prompt_of(engine) == "nt]"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_message_that_the_answer_continues(http: httpx.Client, stream: bool) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "stream": stream}
    answer = http.post("/v1/chat/completions", json=body)
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"] == "Well, Hello!"
        return
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and "[DONE]" not in line]
    said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(said) == "Well, Hello!"


def test_an_echo_of_what_another_said_is_empty(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello!"


@pytest.mark.parametrize(
    "message, rendered",
    [
        ({"role": "assistant", "content": None}, "[assistant]"),
        ({"role": "assistant"}, "[assistant]"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "[assistant]no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "[assistant]no"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "[user]a"),
        ({"role": "function", "name": "f", "content": "5"}, "[user]<tool_response>\n5\n</tool_response>"),
    ],
)
def test_messages_of_other_dialects_and_times_are_read(
    http: httpx.Client, engine: FakeEngine, message: dict[str, Any], rendered: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [*HI, message, *HI]})
    assert answer.status_code == 200, answer.text
    assert bytes(engine.requests[0].prompt_token_ids).decode() == f"[user]hi{rendered}[user]hi[assistant]"


def test_a_role_that_nobody_declared_is_the_templates_business() -> None:
    """One that the template leaves out is refused by its place: the model would not see the message."""
    messages = [*HI, {"role": "narrator", "content": "x"}]
    written = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    dropped = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    raising = written + "{% if messages[-1].role == 'narrator' %}{{ raise_exception('who?') }}{% endif %}"
    for template, said in ((written, None), (dropped, "leaves its content out"), (raising, "who?")):
        engine = FakeEngine(tokenizer=byte_tokenizer(template))
        with serving(engine) as url, http_client(url) as http:
            answer = http.post("/v1/chat/completions", json={"messages": messages})
        if said is None:
            assert prompt_of(engine) == "[user]hi[narrator]x"
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages.1"
            assert said in answer.json()["error"]["message"]


def test_thoughts_and_calls_of_the_past_reach_the_template() -> None:
    call = "{{ m.tool_calls | tojson if m.tool_calls }}"
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|" + call + "{% endfor %}"
    engine = FakeEngine(tokenizer=byte_tokenizer(template))
    thoughtful = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
    called = {"name": "f", "arguments": '{"a": 1}'}
    messages = [{"role": "assistant", "content": thoughtful}, {"role": "assistant", "function_call": called}]
    with serving(engine) as url, http_client(url) as http:
        http.post("/v1/chat/completions", json={"messages": messages})
    call = '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'
    assert bytes(engine.requests[0].prompt_token_ids).decode() == f"hm||{call}"


@pytest.mark.parametrize("side, kept", [(None, "er]y"), ("left", "er]y"), ("right", "[use")])
def test_the_side_that_is_cut_off_can_be_chosen(
    http: httpx.Client, engine: FakeEngine, side: str | None, kept: str
) -> None:
    messages = [{"role": "user", "content": "y"}]
    body = {"messages": messages, "truncate_prompt_tokens": 4, "truncation_side": side}
    http.post("/v1/chat/completions", json=body | {"add_generation_prompt": False})
    assert bytes(engine.requests[0].prompt_token_ids).decode() == kept


def test_errors_about_the_prompt_name_the_messages(http: httpx.Client, engine: FakeEngine) -> None:
    def refused(_: Request) -> Iterator[Step]:
        yield RequestError("the prompt does not fit into the KV cache", param="prompt")

    engine.script = refused
    answer = http.post("/v1/chat/completions", json={"messages": HI})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("said, contents", [(b"\xff", ["", "x", ""]), (b"y", ["", "x", "y", None])])
def test_a_token_that_ends_a_stream_has_content_even_without_text(
    http: httpx.Client, engine: FakeEngine, said: bytes, contents: list[str | None]
) -> None:
    """Load generators measure the time of tokens by chunks that have content. The byte ff has no text."""
    engine.script = lambda request: [
        RequestOutput(request_id=request.request_id, deltas=(delta(request, 0, b"x"),)),
        RequestOutput(
            request_id=request.request_id, deltas=(delta(request, 0, said, finish_reason=FinishReason.STOP),)
        ),
    ]
    answer = http.post("/v1/chat/completions", json={"messages": HI, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == contents
