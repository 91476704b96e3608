"""Text completions as the official client sees them."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from faser.errors import OverloadError
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs, RequestOutput
from faser.types.request import Request
from tests.fake_engine import END, FakeEngine, Step, delta, prompt_logprobs_of, saying

URL = "/v1/completions"


def test_answer_has_what_openai_sends(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Say")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello!", "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)


def test_limit_is_16_tokens_if_none_is_given(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("x" * 20)
    (choice,) = client.completions.create(model="tiny", prompt="Say").choices
    assert (choice.text, choice.finish_reason) == ("x" * 16, "length")


@pytest.mark.parametrize(
    "prompt, token_ids",
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_prompt_takes_four_forms(
    client: openai.OpenAI, engine: FakeEngine, prompt: Any, token_ids: list[tuple[int, ...]]
) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt)
    assert [request.prompt_token_ids for request in engine.requests] == token_ids
    assert len(answer.choices) == len(token_ids)


def repeating(request: Request) -> list[RequestOutput]:
    """Says the prompt's last character and the sample's number."""
    return [
        RequestOutput(
            request_id=request.request_id,
            deltas=tuple(
                delta(
                    request,
                    index,
                    bytes([request.prompt_token_ids[-1]]) + str(index).encode(),
                    finish_reason=FinishReason.STOP,
                )
                for index in range(request.sampling.n)
            ),
        )
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_prompt_major(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    engine.script = repeating
    expected = {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    if stream:
        texts: dict[int, str] = {}
        for chunk in client.completions.create(model="tiny", prompt=["a", "b"], n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
    assert texts == expected


def test_if_one_prompt_is_refused_all_are(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusals = [None, OverloadError("the queue is full")]
    answer = http.post(URL, json={"prompt": ["a", "b"]})
    assert answer.status_code == 503
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.num_open == 0


def test_cached_tokens_of_all_prompts_add_up(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("ok", cached=3)
    body = {"prompt": ["aaaa", "bbbb"], "cache_salt": "mine"}
    assert http.post(URL, json=body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_logprobs_have_four_arrays_of_one_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("aé!")
    (choice,) = client.completions.create(model="tiny", prompt="Say", logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert choice.logprobs.text_offset == [0, 1, 2, 2]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


def test_zero_logprobs_tell_the_chosen_token_alone(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="tiny", prompt="Say", logprobs=0, max_tokens=1).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"H": -0.5}]


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="Say ", echo=True).choices[0].text == "Say Hello!"
    ids: list[int] = list(b"Say ")
    assert client.completions.create(model="tiny", prompt=ids, echo=True).choices[0].text == "Say Hello!"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_reports_the_prompt_too(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    answers = (
        client.completions.create(model="tiny", prompt="Say ", echo=True, logprobs=1, stream=True)
        if stream
        else [client.completions.create(model="tiny", prompt="Say ", echo=True, logprobs=1)]
    )
    text = ""
    for answer in answers:
        report = answer.choices[0].logprobs
        assert report is not None
        text += answer.choices[0].text
        tokens += report.tokens or []
        offsets += report.text_offset or []
        logprobs += report.token_logprobs or []
    assert engine.requests[0].sampling.prompt_logprobs == 1
    assert text == "Say Hello!"
    assert "".join(tokens) == text
    assert [text[at] for at in offsets] == tokens
    assert logprobs == [None] + [-0.5] * 9


def test_echo_without_new_tokens_scores_the_prompt(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda request: [
        RequestOutput(
            request_id=request.request_id,
            deltas=(delta(request, 0, b"", finish_reason=FinishReason.LENGTH),),
            prompt_logprobs=prompt_logprobs_of(request),
        )
    ]
    answer = client.completions.create(model="tiny", prompt="Say", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert (choice.text, choice.finish_reason) == ("Say", "length")
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert engine.requests[0].sampling.max_tokens == 0


def test_prompt_logprobs_stand_in_every_choice(http: httpx.Client) -> None:
    answer = http.post(URL, json={"prompt": ["ab", "cd"], "prompt_logprobs": 0}).json()
    assert [sorted(choice["prompt_logprobs"][1]) for choice in answer["choices"]] == [["98"], ["100"]]
    assert "prompt_logprobs" not in http.post(URL, json={"prompt": "ab"}).json()["choices"][0]


def test_token_ids_come_back_when_asked_for(http: httpx.Client) -> None:
    (choice,) = http.post(URL, json={"prompt": "ab", "return_token_ids": True}).json()["choices"]
    assert (choice["prompt_token_ids"], bytes(choice["token_ids"])) == ([97, 98], b"Hello!")


@pytest.mark.parametrize("prompt", ["Say<|end|>it", [83, 97, 121, END, 105, 116]])
def test_special_tokens_of_an_echoed_prompt_are_in_its_text_and_offsets(http: httpx.Client, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = http.post(URL, json=body).json()["choices"]
    assert choice["text"] == "Say<|end|>itH"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 10, 11, 12]


def test_the_chosen_token_comes_first_among_the_alternatives(http: httpx.Client, engine: FakeEngine) -> None:
    def script(request: Request) -> Iterator[Step]:
        chosen = PositionLogprobs(token_id=65, logprob=-3.0, rank=3, top=((66, -0.5), (67, -1.0)))
        yield RequestOutput(
            request_id=request.request_id,
            deltas=(
                OutputDelta(
                    index=0, text="A", token_ids=(65,), logprobs=(chosen,), finish_reason=FinishReason.STOP
                ),
            ),
        )

    engine.script = script
    (choice,) = http.post(URL, json={"prompt": "x", "logprobs": 2}).json()["choices"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["A", "B", "C"]


def test_what_was_not_asked_for_is_null(http: httpx.Client) -> None:
    (choice,) = http.post(URL, json={"prompt": "ab"}).json()["choices"]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & choice.keys()
