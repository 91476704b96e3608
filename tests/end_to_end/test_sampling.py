"""What requests ask of sampling, seen from outside: seeds, biases, penalties, stops and lengths."""

from typing import Any

import openai
import pytest

from tests.end_to_end.conftest import MODEL
from tests.end_to_end.server import Server
from tests.waiting import until

PROMPT = "a model reads a prompt and answers token by token"
EOS_TOKEN_ID = 2


def say(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """One text completion's only choice. extra: fields that the OpenAI API lacks."""
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, **fields}
    return client.completions.create(**fields, extra_body=extra).choices[0]


def token_ids(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **fields: Any) -> list[int]:
    """Token ids of the answer; it ends at max_tokens."""
    choice = say(client, extra={"ignore_eos": True, "return_token_ids": True, **(extra or {})}, **fields)
    found: list[int] = choice.token_ids
    return found


def test_a_seed_gives_the_same_text_alone_and_among_15_others(server: Server, client: openai.OpenAI) -> None:
    """Temperature 1.5: the text depends on every draw."""
    asked: dict[str, Any] = {"seed": 77, "temperature": 1.5, "top_p": 1.0, "max_tokens": 30}
    alone = say(client, **asked).text
    with client.completions.create(
        model=MODEL, prompt="others", n=15, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ):
        until(lambda: server.metric("num_requests_running") == 15)
        for _ in range(3):
            assert say(client, **asked).text == alone
        until(lambda: server.metric("num_requests_running") == 15)  # the answer just given has left
    assert say(client, **asked | {"seed": 78}).text != alone


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    texts = {say(client, temperature=1.5, top_p=1.0).text for _ in range(4)}
    assert len(texts) == 4


def test_greedy_answers_are_the_same_every_time(client: openai.OpenAI) -> None:
    assert len({say(client, temperature=0).text for _ in range(3)}) == 1


def test_top_k_of_one_is_greedy(client: openai.OpenAI) -> None:
    greedy = token_ids(client, temperature=0)
    assert token_ids(client, temperature=1.9, extra={"top_k": 1}) == greedy
    assert token_ids(client, temperature=1.9, extra={"min_p": 1.0}) == greedy
    assert token_ids(client, temperature=1.9, top_p=1e-9) == greedy


def test_a_bias_forces_a_token_and_bans_one(client: openai.OpenAI) -> None:
    greedy = token_ids(client, temperature=0)
    assert token_ids(client, logit_bias={"70": 100}) == [70] * 24
    assert greedy[0] not in token_ids(client, temperature=0, logit_bias={str(greedy[0]): -100})


def test_only_allowed_tokens_are_chosen(client: openai.OpenAI) -> None:
    assert set(token_ids(client, temperature=2, extra={"allowed_token_ids": [70, 71, 72]})) == {70, 71, 72}


def test_bad_words_do_not_occur_whatever_is_drafted(server: Server, client: openai.OpenAI) -> None:
    """The words are pieces of the answer without the ban, so it would contain them again."""
    greedy = token_ids(client, temperature=0, max_tokens=48)
    with server.http() as http:

        def ids_of(text: str) -> list[int]:
            found: list[int] = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
                "tokens"
            ]
            return found

        pairs = {tuple(greedy[at : at + 2]) for at in range(47)}
        texts = [http.post("/detokenize", json={"tokens": list(pair)}).json()["prompt"] for pair in pairs]
        words = [each for each in texts if each.strip() == each and tuple(ids_of(each)) in pairs]
        banned = {tuple(ids_of(spelled)) for each in words for spelled in (each, f" {each}")}
    assert words
    varied = tuple(token_ids(client, temperature=0, max_tokens=48, extra={"bad_words": words}))
    assert not any(varied[at : at + len(word)] == word for word in banned for at in range(48))
    assert varied != tuple(greedy)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_make_a_repeating_answer_vary(client: openai.OpenAI, penalty: str) -> None:
    """Two tokens are allowed, one far more likely: without a penalty it repeats, with one the other occurs too."""
    asked: dict[str, Any] = {"temperature": 0, "logit_bias": {"70": 51, "71": 50}, "max_tokens": 60}
    extra = {"allowed_token_ids": [70, 71]}
    plain = token_ids(client, extra=extra, **asked)
    varied = token_ids(client, extra=extra, **asked, **{penalty: 2.0})
    assert varied != plain


def test_a_repetition_penalty_counts_the_prompt_too(client: openai.OpenAI) -> None:
    greedy = token_ids(client, temperature=0, max_tokens=64)
    varied = token_ids(client, temperature=0, max_tokens=64, extra={"repetition_penalty": 5.0})
    assert len(set(varied)) > len(set(greedy))


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = say(client, temperature=0, max_tokens=40, extra={"ignore_eos": True}).text
    stop = whole[11:14]
    for given in (stop, ["never in it", stop]):
        choice = say(client, temperature=0, max_tokens=40, stop=given, extra={"ignore_eos": True})
        assert choice.text == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == stop
    kept = say(
        client,
        temperature=0,
        max_tokens=40,
        stop=stop,
        extra={"ignore_eos": True, "include_stop_str_in_output": True},
    )
    assert kept.text == whole[: whole.index(stop)] + stop


def test_a_stop_string_ends_a_stream_without_showing_its_beginning(client: openai.OpenAI) -> None:
    whole = say(client, temperature=0, max_tokens=40, extra={"ignore_eos": True}).text
    stop = whole[11:16]
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=40,
        stop=stop,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole[: whole.index(stop)]


def test_a_stop_token_ends_the_answer_and_is_named(client: openai.OpenAI) -> None:
    greedy = token_ids(client, temperature=0)
    stop = greedy[5]
    choice = say(client, temperature=0, extra={"stop_token_ids": [stop], "return_token_ids": True})
    assert choice.token_ids == greedy[: greedy.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_the_end_of_sequence_ends_an_answer_unless_ignored_or_too_early(client: openai.OpenAI) -> None:
    """A bias makes the end-of-sequence the likeliest token at every position."""
    eager: dict[str, Any] = {"temperature": 0, "logit_bias": {str(EOS_TOKEN_ID): 100}}
    usage = {"return_token_ids": True}
    at_once = say(client, **eager, extra=usage)
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ([EOS_TOKEN_ID], "", "stop")
    late = say(client, **eager, extra={**usage, "min_tokens": 7})
    assert len(late.token_ids) == 8
    assert EOS_TOKEN_ID not in late.token_ids[:7]
    ignored = say(client, **eager, extra={**usage, "ignore_eos": True})
    assert ignored.token_ids == [EOS_TOKEN_ID] * 24
    assert ignored.finish_reason == "length"


def test_an_answer_is_as_long_as_max_tokens_says(client: openai.OpenAI) -> None:
    for limit in (1, 2, 17):
        assert len(token_ids(client, max_tokens=limit)) == limit
