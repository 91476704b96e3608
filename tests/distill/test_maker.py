"""A dataset follows from its settings, however often its making is interrupted. Oracle: an unbroken run."""

from pathlib import Path

import pytest

from faser.distill.dataset import Dataset, RecordedConversation
from faser.distill.maker import AnswerSettings, ConversationMaker, fill_from_traffic
from faser.distill.operator_files import FileQuestions
from faser.distill.questions import AskingSettings, ChatTurns, SelfAskedQuestions
from faser.engine.text.tokenizer import load_tokenizer
from tests.checkpoints import EOS_TOKEN_ID
from tests.distill.fake_source import BrokenDownError, FakeSource

WANTED = 900


def make(folder: Path, tiny_checkpoint: Path, source: FakeSource, said: list[str] | None = None) -> Dataset:
    """Fill a dataset as the command does, with small shards."""
    turns = ChatTurns(load_tokenizer(tiny_checkpoint), (EOS_TOKEN_ID,))
    dataset = Dataset(folder, {"seed": 3})
    questions = SelfAskedQuestions(source, turns, AskingSettings(seed=3, per_shard=16))
    reports: list[tuple[str, int, int]] = []
    maker = ConversationMaker(
        dataset,
        source,
        turns,
        AnswerSettings(seed=3),
        report=lambda *each: reports.append(each),
        say=(said if said is not None else []).append,
    )
    maker.fill(questions, WANTED)
    assert [each[1] for each in reports] == sorted(each[1] for each in reports)
    assert {each[2] for each in reports} == {WANTED}
    return dataset


def test_an_interrupted_making_ends_with_the_same_conversations(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Seen to catch: seeds that begin anew, questions asked again, a shard listed before it is whole."""
    said: list[str] = []
    unbroken = make(tmp_path / "unbroken", tiny_checkpoint, FakeSource(), said)
    assert unbroken.answer_tokens >= WANTED
    assert len(said) == len(unbroken.records) > 3
    assert "00000.npz: 16 of 16 questions kept" in said[0]
    for _ in range(20):
        try:
            made = make(tmp_path / "broken", tiny_checkpoint, FakeSource(batches=3))
        except BrokenDownError:
            continue
        break
    assert [list(each) for each in made.shards()] == [list(each) for each in unbroken.shards()]
    questions = [each.prompt for shard in made.shards() for each in shard]
    assert len(set(questions)) == len(questions)


def test_answers_take_turns_with_the_temperatures_and_have_seeds_of_their_own(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = FakeSource()
    dataset = make(tmp_path, tiny_checkpoint, source)
    found = [each for shard in dataset.shards() for each in shard]
    assert [each.temperature for each in found] == pytest.approx(([0.0, 0.8] * len(found))[: len(found)])
    seeds = [params.seed for _, params in source.asked]
    assert len(set(seeds)) == len(seeds)
    assert all(each.answer[-1] == EOS_TOKEN_ID and each.ended for each in found)


@pytest.mark.parametrize("texts", [["the fox", "a dog", "the wizard"], ["the fox", "a dog"]])
def test_questions_of_a_file_are_answered_at_each_temperature(
    tiny_checkpoint: Path, tmp_path: Path, texts: list[str]
) -> None:
    turns = ChatTurns(load_tokenizer(tiny_checkpoint), (EOS_TOKEN_ID,))
    questions = FileQuestions([[{"role": "user", "content": each}] for each in texts])
    dataset, source = Dataset(tmp_path, {}), FakeSource()
    maker = ConversationMaker(
        dataset, source, turns, AnswerSettings(), report=lambda *_: None, say=lambda _line: None
    )
    maker.fill(questions, 10_000)
    found = [each for shard in dataset.shards() for each in shard]
    assert len(found) == 2 * len(texts)
    for text in texts:
        prompt = tuple(turns.answer_prompt([{"role": "user", "content": text}]))
        temperatures = sorted(each.temperature for each in found if each.prompt == prompt)
        assert temperatures == pytest.approx([0.0, 0.8])


def test_an_answer_ends_where_the_context_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    turns = ChatTurns(load_tokenizer(tiny_checkpoint), (EOS_TOKEN_ID,))
    texts = ["the fox", "the fox jumps over the lazy dog " * 9]
    source = FakeSource()
    maker = ConversationMaker(
        Dataset(tmp_path, {}),
        source,
        turns,
        AnswerSettings(context=30),
        report=lambda *_: None,
        say=lambda _: None,
    )
    maker.fill(FileQuestions([[{"role": "user", "content": each}] for each in texts]), 10_000)
    assert {len(prompt) + (params.max_tokens or 0) for prompt, params in source.asked} == {30}
    assert len(source.asked) == 2  # the other question leaves no room


def test_recorded_traffic_goes_on_where_it_ended(tmp_path: Path) -> None:
    recorded = [
        RecordedConversation(prompt=(1,), answer=(at, 2), ended=True, temperature=0.0) for at in range(2500)
    ]
    fill_from_traffic(Dataset(tmp_path, {}), recorded, 1000)
    assert len(Dataset(tmp_path).records) == 1
    fill_from_traffic(Dataset(tmp_path, {}), recorded, None)
    assert [each for shard in Dataset(tmp_path).shards() for each in shard] == recorded
