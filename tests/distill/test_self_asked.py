"""Questions that a model asks itself: what is kept, and what is said if nothing is."""

from pathlib import Path

import pytest

from faser.distill.dataset import Conversation, Dataset, Shard
from faser.distill.questions import AskingSettings, ChatTurns, SelfAskedQuestions
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError
from tests.checkpoints import EOS_TOKEN_ID
from tests.distill.fake_source import FakeSource

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
    stored = Conversation(prompt=prompt, answer=(5, 2), ended=True, temperature=0.0)
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
