"""Recorded states: shard by shard, as the target gives them, and resumed where they end."""

from pathlib import Path

import numpy as np
import pytest
import torch

from faser.distill.dataset import Dataset, RecordedConversation, Shard
from faser.distill.states import StateFolder, record
from faser.distill.target import Passage
from faser.errors import ConfigError
from tests.disks import filling_up
from tests.distill.small_target import load_small_target

WIDTH = 2 * 32


def dataset(folder: Path, shards: int) -> Dataset:
    found = Dataset(folder, {})
    rng = np.random.default_rng(5)
    for shard in range(len(found.records), shards):
        lengths = [(3 + shard, 5), (40, 300), (280, 20), (2, 1)]
        found.add(
            Shard.of(
                [
                    RecordedConversation(
                        prompt=tuple(rng.integers(3, 500, prompt).tolist()),
                        answer=tuple(rng.integers(3, 500, answer).tolist()),
                        ended=True,
                        temperature=0.8 * (at % 2),
                    )
                    for at, (prompt, answer) in enumerate(lengths)
                ]
            )
        )
    return found


def test_states_are_found_again_by_conversation(small_target: Path, tmp_path: Path) -> None:
    target = load_small_target(small_target).states((1, 4), top=5)
    folder = StateFolder(tmp_path / "states", {"layers": [1, 4]}, WIDTH)
    said: list[tuple[str, int, int]] = []
    record(dataset(tmp_path / "data", 1), target, folder, lambda *each: said.append(each))
    assert (said[-1][1], said[-1][2]) == (said[-1][1], 651)
    made = dataset(tmp_path / "data", 2)
    folder = StateFolder(tmp_path / "states", {"layers": [1, 4]}, WIDTH)
    record(made, target, folder, lambda *_: None)
    assert folder.num_shards == 2
    place = 0
    for index in range(2):
        shard, conversations = folder.shard(index), list(made.shard(index))
        assert shard.greedy.tolist() == [True, False, True, False]
        for at, one in enumerate(conversations):
            answer = one.answer[:255]
            prompt = one.prompt[max(0, len(one.prompt) + len(answer) - 256) :]
            tokens = torch.tensor((*prompt, *answer))
            first, last = int(shard.starts[at]), int(shard.starts[at + 1])
            assert shard.token_ids[first:last].tolist() == tokens.tolist()
            assert (shard.prompts[at], shard.places[at]) == (len(prompt), place)
            (expected,) = target.compute([Passage(token_ids=tokens, first_row=len(prompt))])
            torch.testing.assert_close(shard.states[first:last], expected.states, rtol=2e-2, atol=2e-2)
            part = slice(int(shard.tops[at]), int(shard.tops[at + 1]))
            assert np.array_equal(shard.top_ids[part], expected.top_ids.numpy())
            place += 1


def test_other_settings_are_refused_by_name(small_target: Path, tmp_path: Path) -> None:
    target = load_small_target(small_target).states((1, 4), top=5)
    record(dataset(tmp_path / "data", 1), target, StateFolder(tmp_path / "s", {"top": 5}, WIDTH), lambda *_: None)
    with pytest.raises(ConfigError, match=r"states\.json was made with top 5, not 6"):
        StateFolder(tmp_path / "s", {"top": 6}, WIDTH)


def test_a_damaged_file_is_named(small_target: Path, tmp_path: Path) -> None:
    target = load_small_target(small_target).states((1, 4), top=5)
    folder = StateFolder(tmp_path / "s", {}, WIDTH)
    record(dataset(tmp_path / "data", 1), target, folder, lambda *_: None)
    states = tmp_path / "s" / "00000.states"
    states.write_bytes(states.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"00000\.states has \d+ bytes; \d+ rows of 64 need"):
        folder.shard(0)
    (tmp_path / "s" / "00000.npz").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"00000\.npz cannot be read"):
        folder.shard(0)


def test_a_disk_without_room_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with filling_up(tmp_path / "small", kib=512) as place:
        folder = StateFolder(place / "states", {}, 1728)
        with pytest.raises(
            ConfigError, match=r"needs .* for the states of 1000000 tokens, and the disk has .* left"
        ):
            folder.check_room(1_000_000)
