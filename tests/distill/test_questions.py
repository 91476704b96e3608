"""Which questions are dropped, and for which reason.

Questions that a model asks itself: what is kept, and what is said if nothing is.

Turns of templates of several kinds. Oracle: the prompt that the template renders for a conversation.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from faser.distill.dataset import Dataset, RecordedConversation, Shard
from faser.distill.questions import AskingSettings, ChatTurns, QuestionFilter, SelfAskedQuestions
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.engine.text.tokenizer_settings import read_settings
from faser.errors import ConfigError, ModelError, RequestError
from tests.checkpoints import CHAT_TEMPLATE, EOS_TOKEN_ID
from tests.distill.fake_source import FakeSource


@pytest.mark.parametrize(
    "text, ended, reason",
    [
        ("Why is the sky blue?", True, None),
        ("为什么天空是蓝色的?", True, None),
        ("Why is the sky", False, "too long"),
        ("  \n", True, "empty"),
        ("Hi", True, "empty"),
        ("1, 2, 3, 4, 5, 6, 7, 8", True, "degenerate"),
        ("a \ufffd sign that is no sign", True, "degenerate"),
        ("again and " * 20, True, "degenerate"),
        ("what is the SKY, then", True, "duplicate"),
    ],
)
def test_a_question_is_dropped_for_one_reason(text: str, ended: bool, reason: str | None) -> None:
    known = QuestionFilter(["What is the sky then?"])
    assert known.takes(text, ended=ended) == (reason is None)
    assert dict(known.dropped) == ({} if reason is None else {reason: 1})


def test_a_question_passes_once() -> None:
    known = QuestionFilter()
    assert [known.takes("Why is the sky blue?", ended=True) for _ in range(2)] == [True, False]


ASKING = AskingSettings(per_shard=4)


def asked(tiny_checkpoint: Path, source: FakeSource) -> SelfAskedQuestions:
    return SelfAskedQuestions(source, ChatTurns(load_tokenizer(tiny_checkpoint), (EOS_TOKEN_ID,)), ASKING)


def test_half_of_the_questions_begin_as_the_model_likes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    source = FakeSource(
        questions=["How old is the river?", " is the sea salty?", "Why do cats sleep?", " may it be so?"]
    )
    batch = asked(tiny_checkpoint, source).next_batch(Dataset(tmp_path, {}), lambda: None)
    prompts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt, _ in source.asked]
    assert prompts[0] == prompts[2] == "<|im_start|>user\n"
    beginnings = [each.removeprefix("<|im_start|>user\n") for each in prompts]
    texts = [each[0]["content"] for each in batch.conversations]
    assert beginnings[1]
    assert texts[0] == "How old is the river?"
    assert texts[1] == beginnings[1] + " is the sea salty?"
    assert all(EOS_TOKEN_ID in params.stop_token_ids for _, params in source.asked)


def test_no_question_is_asked_twice_even_after_a_new_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    turns = ChatTurns(load_tokenizer(tiny_checkpoint), (EOS_TOKEN_ID,))
    prompt = tuple(turns.answer_prompt([{"role": "user", "content": "Why is rain wet?"}]))
    stored = RecordedConversation(prompt=prompt, answer=(5, 2), ended=True, temperature=0.0)
    Dataset(tmp_path, {}).add(Shard.of([stored]), asked=4)
    source = FakeSource(questions=["why is RAIN wet", " it so?", "Where is the sea?", " it so?"])
    batch = asked(tiny_checkpoint, source).next_batch(Dataset(tmp_path), lambda: None)
    texts = [each[0]["content"] for each in batch.conversations]
    assert batch.dropped == {"duplicate": 1}
    assert (len(texts), texts[1]) == (3, "Where is the sea?")


def test_a_model_that_does_not_ask_is_refused_with_what_to_do(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = FakeSource(ended=False)
    with pytest.raises(ConfigError, match=r"of 4 questions .* 0 can be used .*'too long': 4.*--prompts"):
        asked(tiny_checkpoint, source).next_batch(Dataset(tmp_path, {}), lambda: None)


PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] | trim }}\n{% endfor %}"
    "### Answer:\n"
)


def tokenizer_with(directory: Path, template: str | None) -> Tokenizer:
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Tokenizer(core, replace(read_settings(directory), chat_template=template))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN])
def test_a_question_with_what_its_turn_begins_with_is_the_prompt_of_its_answer(
    tiny_checkpoint: Path, template: str
) -> None:
    tokenizer = tokenizer_with(tiny_checkpoint, template)
    turns = ChatTurns(tokenizer, (EOS_TOKEN_ID,))
    prompt = turns.answer_prompt([{"role": "user", "content": "why is it so?"}])
    opening = tokenizer.decode(turns.question_prompt("why"), skip_special_tokens=False)
    assert opening.endswith("user" + (":" if template == PLAIN else "") + "\nwhy")
    assert tokenizer.decode(prompt, skip_special_tokens=False).startswith(opening)
    assert turns.question_of(prompt) == "why is it so?"


def test_a_question_ends_with_the_token_that_ends_its_turn(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    turns = ChatTurns(tokenizer, (7,))
    assert turns.question_ends == (2, 7)
    assert turns.stop_texts == ()


def test_without_such_a_token_a_question_ends_with_the_text_that_follows_it(tiny_checkpoint: Path) -> None:
    turns = ChatTurns(tokenizer_with(tiny_checkpoint, PLAIN), (EOS_TOKEN_ID,))
    assert turns.question_ends == (EOS_TOKEN_ID,)
    assert turns.stop_texts == ("### Answer:",)


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "the model has no chat template"),
        ("Ask me!", "the chat template leaves out what a user says"),
        ("{% if", "does not compile"),
    ],
)
def test_a_model_without_usable_turns_is_refused(
    tiny_checkpoint: Path, template: str | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTurns(tokenizer_with(tiny_checkpoint, template), (EOS_TOKEN_ID,))


def test_a_conversation_that_the_template_refuses_is_an_error_of_its_own(tiny_checkpoint: Path) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}" + CHAT_TEMPLATE
    turns = ChatTurns(tokenizer_with(tiny_checkpoint, template), (EOS_TOKEN_ID,))
    with pytest.raises(RequestError, match="one only"):
        turns.answer_prompt([{"role": "user", "content": "a"}] * 2)
