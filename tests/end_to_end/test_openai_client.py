"""The official client against a real server: shapes of answers, streams, usage, errors."""

import asyncio
import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.end_to_end.conftest import KEY, MODEL
from tests.end_to_end.server import Server

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the quick brown fox"}]
PROMPT = "the quick brown fox jumps over the lazy dog"
LONG = {"ignore_eos": True}


def test_a_chat_is_answered_and_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, extra_body=LONG)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.model == MODEL


def test_a_chat_without_a_limit_may_fill_the_context(client: openai.OpenAI) -> None:
    prompt = "word " * 480
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], extra_body=LONG
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, seed=5, extra_body=LONG)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=40,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=LONG,
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert len(chunks) > 4


def test_streamed_text_comes_while_it_is_made(client: openai.OpenAI) -> None:
    """The first piece is there long before the last: its token count says how far the server had come."""
    with client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=400,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={**LONG, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ) as stream:
        first = next(iter(stream))
        assert first.usage is not None
        assert first.usage.completion_tokens < 100


def test_samples_of_one_request_differ_and_share_its_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, n=4, max_tokens=16, seed=3, extra_body=LONG)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64
    assert answer.usage.prompt_tokens < 64


def test_streamed_samples_join_to_the_whole_ones(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, n=3, max_tokens=16, seed=3)
    stream = client.completions.create(model=MODEL, prompt=PROMPT, n=3, max_tokens=16, seed=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_a_list_of_prompts_is_answered_prompt_by_prompt(client: openai.OpenAI) -> None:
    prompts = ["the quick", "a model reads", "def add("]
    alone = [client.completions.create(model=MODEL, prompt=each, temperature=0) for each in prompts]
    together = client.completions.create(model=MODEL, prompt=prompts, temperature=0)
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone]


def test_token_ids_are_a_prompt_like_their_text(server: Server, client: openai.OpenAI) -> None:
    with server.http() as http:
        token_ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    of_text = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    of_ids = client.completions.create(model=MODEL, prompt=token_ids, temperature=0)
    of_lists = client.completions.create(model=MODEL, prompt=[token_ids, token_ids], temperature=0)
    assert of_ids.choices[0].text == of_text.choices[0].text
    assert {choice.text for choice in of_lists.choices} == {of_text.choices[0].text}
    assert of_ids.usage is not None
    assert of_ids.usage.prompt_tokens == len(token_ids)


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text


def test_echo_without_an_answer_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert all(each is not None and each <= 0 for each in logprobs.token_logprobs[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_logprobs_of_a_greedy_chat_name_the_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, extra_body=LONG
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for each in logprobs.content:
        values = [top.logprob for top in each.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert each.logprob == values[0]
        assert sum(math.exp(value) for value in values) <= 1 + 1e-6
    spelled = b"".join(bytes(each.bytes or ()) for each in logprobs.content)
    assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content


def test_a_repeated_prompt_comes_from_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "seven wizards quietly judge my vow of speculation " * 4
    for expected_hit in (False, True):
        salted = {"cache_salt": "mine"}
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body=salted).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) is expected_hit


def test_models_are_listed_under_all_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "tiny-alias"]
    assert client.models.retrieve("tiny-alias").id == "tiny-alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"model 'gpt-5' not found; available models: tiny, tiny-alias"):
        client.chat.completions.create(model="gpt-5", messages=HELLO)


def test_what_exceeds_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 2048 .*max_tokens is 5000"):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5000)


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], KEY + "x"])
def test_a_wrong_key_is_refused(small: Server, key: str) -> None:
    with small.client(key) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_right_key_is_taken(small: Server) -> None:
    with small.client() as client:
        assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2).usage is not None


def test_an_async_crowd_gets_what_each_would_get_alone(server: Server, client: openai.OpenAI) -> None:
    prompts = [f"number {number} and the quick brown fox" for number in range(16)]
    alone = [
        client.completions.create(model=MODEL, prompt=each, temperature=0).choices[0].text for each in prompts
    ]

    async def crowd() -> list[str]:
        async with server.async_client() as client:
            answers = await asyncio.gather(
                *(client.completions.create(model=MODEL, prompt=each, temperature=0) for each in prompts)
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(crowd()) == alone


def test_an_async_stream_joins_to_the_whole_answer(server: Server, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, temperature=0)

    async def read() -> str:
        async with server.async_client() as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=20, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(read()) == whole.choices[0].message.content
