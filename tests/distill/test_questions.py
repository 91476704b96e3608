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
from faser.engine.checkpoints.tokenizer_settings import read_settings
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
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


PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] | trim }}\n{% endfor %}"
    "### Answer:\n"
)


def tokenizer_with(directory: Path, template: str | None) -> Tokenizer:
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Tokenizer(core, replace(read_settings(directory), chat_template=template))


ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("template, follows", [(CHAT_TEMPLATE, True), (PLAIN, True), (ONE_TURN, False)])
def test_a_quarter_of_the_questions_is_about_an_earlier_answer(
    tiny_checkpoint: Path, tmp_path: Path, template: str, follows: bool
) -> None:
    """In turn one that follows its conversation and one with it as a document; the latter only without history.

    Seen to catch: answers of conversations that were cut off or follow others; prompts with the question's end.
    """
    tokenizer = tokenizer_with(tiny_checkpoint, template)
    turns = ChatTurns(tokenizer, (EOS_TOKEN_ID,))
    question = {"role": "user", "content": "why is it so?"}
    answer = {"role": "assistant", "content": "it is so."}
    ended = (*tokenizer.encode(answer["content"], add_special_tokens=False), EOS_TOKEN_ID)
    conversations = [([question], True), ([question], False)]
    if follows:
        conversations.append(([question, answer, question], True))
    Dataset(tmp_path, {}).add(
        Shard.of(
            [
                RecordedConversation(
                    prompt=tuple(turns.answer_prompt(messages)),
                    answer=ended if whole else ended[:-2],
                    ended=whole,
                    temperature=0.0,
                )
                for messages, whole in conversations
            ]
        ),
        asked=16,
    )
    source = FakeSource(questions=[f" the question {name} is this" for name in "abcdefgh"])
    questions = SelfAskedQuestions(source, turns, AskingSettings(per_shard=8))
    batch = questions.next_batch(Dataset(tmp_path), lambda: None)
    third, last = batch.conversations[3], batch.conversations[7]
    assert [len(each) for each in batch.conversations] == [1, 1, 1, 3 if follows else 1, 1, 1, 1, 1]
    if follows:
        assert list(third[:2]) == [question, answer]
        assert third[2]["content"] == "the question d is this"
        asked_prompt = tokenizer.decode(source.asked[3][0], skip_special_tokens=False)
        whole = tokenizer.decode(turns.answer_prompt(third), skip_special_tokens=False)
        assert whole.startswith(asked_prompt)
        assert turns.question_of(turns.answer_prompt(third)) == "the question d is this"
    assert answer["content"] in last[0]["content"]
    assert last[0]["content"].endswith(" the question h is this")


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
    turns = ChatTurns(tokenizer_with(tiny_checkpoint, ONE_TURN), (EOS_TOKEN_ID,))
    with pytest.raises(RequestError, match="one only"):
        turns.answer_prompt([{"role": "user", "content": "a"}] * 2)
