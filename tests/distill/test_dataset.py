"""Shards: read as written; damaged files and full disks are named.

A dataset on disk: what it lists is whole, and what was made otherwise is refused.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from faser.distill.dataset import Dataset, RecordedConversation, Shard, held_out
from faser.errors import ConfigError
from tests.disks import filling_up

CONVERSATIONS = [
    RecordedConversation(prompt=(1, 2, 3), answer=(4, 5), ended=True, temperature=0.0),
    RecordedConversation(prompt=(6,), answer=(), ended=False, temperature=0.5),
    RecordedConversation(prompt=(7, 8), answer=(49_000,), ended=False, temperature=0.5),
]


def test_conversations_are_read_as_they_are_written(tmp_path: Path) -> None:
    Shard.of(CONVERSATIONS).write(tmp_path / "a.npz")
    shard = Shard.read(tmp_path / "a.npz")
    assert list(shard) == CONVERSATIONS
    assert shard.tokens.dtype == np.int32


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"no archive"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.npz is not a file of conversations"):
        Shard.read(tmp_path / "a.npz")


def test_lengths_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    whole = Shard.of(CONVERSATIONS)
    arrays = {name: getattr(whole, name) for name in Shard.__slots__}
    np.savez(tmp_path / "a.npz", **(arrays | {"tokens": whole.tokens[:-1]}))
    with pytest.raises(ConfigError, match="has 8 tokens; its conversations have 9"):
        Shard.read(tmp_path / "a.npz")


def test_a_full_disk_is_said_and_leaves_no_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, 49_000, 100_000).tolist())
    large = Shard.of([RecordedConversation(prompt=(1,), answer=tokens, ended=True, temperature=0.0)])
    with filling_up(tmp_path / "small", kib=64) as folder:
        with pytest.raises(ConfigError, match="no space is left on the disk; free some"):
            large.write(folder / "a.npz")
        assert list(folder.iterdir()) == []


def shard(first: int, count: int) -> Shard:
    answers = [(at, 2) for at in range(first, first + count)]
    return Shard.of(
        [RecordedConversation(prompt=(1,), answer=each, ended=True, temperature=0.0) for each in answers]
    )


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
