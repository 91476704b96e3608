"""A dataset on disk: what it lists is whole, and what was made otherwise is refused."""

import json
from pathlib import Path

import pytest

from faser.distill.dataset import Conversation, Dataset, Shard, held_out
from faser.errors import ConfigError


def shard(first: int, count: int) -> Shard:
    answers = [(at, 2) for at in range(first, first + count)]
    return Shard.of([Conversation(prompt=(1,), answer=each, ended=True, temperature=0.0) for each in answers])


def test_a_shard_counts_once_it_is_listed(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path, {"seed": 1})
    dataset.add(shard(0, 3), asked=4, dropped={"empty": 1}, seconds=1.5)
    shard(50, 2).write(tmp_path / "00001.npz")  # by a writer that was killed before it listed this
    again = Dataset(tmp_path, {"seed": 1})
    assert (again.conversations, again.answer_tokens, again.asked) == (3, 6, 4)
    again.add(shard(3, 2))
    answers = [each.answer[0] for found in Dataset(tmp_path).shards() for each in found]
    assert answers == [0, 1, 2, 3, 4]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Dataset(tmp_path, {"seed": 1, "model": "a"}).add(shard(0, 1))
    with pytest.raises(ConfigError, match=r'made with model "a", not "b": give another folder with -o'):
        Dataset(tmp_path, {"seed": 1, "model": "b"})


@pytest.mark.parametrize("content", ["", "[]", '{"settings": {}}', json.dumps({"settings": 1, "shards": []})])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(ConfigError, match=r"dataset\.json cannot be read"):
        Dataset(tmp_path)


def test_a_folder_without_conversations_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.json is missing; there are no conversations"):
        Dataset(tmp_path)


def test_few_places_are_held_out() -> None:
    assert [place for place in range(70) if held_out(place)] == [0, 33, 66]
