"""Turns of templates of several kinds. Oracle: the prompt that the template renders for a conversation."""

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from faser.distill.questions import ChatTurns
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.engine.text.tokenizer_settings import read_settings
from faser.errors import ModelError, RequestError
from tests.checkpoints import CHAT_TEMPLATE, EOS_TOKEN_ID

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
