"""What an n-gram model counts, and which files are refused. Oracle: counting by brute force.

Planted bugs that these tests have caught: contexts reach into the next text; the rarest token follows; contexts
that are too rare stay; a file of another model is loaded.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.engine.checkpoints.ngram_model import NgramModel, count, load, save
from faser.errors import ConfigError
from faser.types.arrays import NO_TOKEN

TEXTS = ((1, 2, 3, 1, 2, 3, 1, 2, 4), (3, 1, 2, 3), (7,), ())


def entries(model: NgramModel) -> dict[tuple[int, ...], tuple[int, float]]:
    return {
        tuple(token for token in context if token != NO_TOKEN): (following, chance)
        for context, following, chance in zip(
            model.contexts.tolist(), model.following.tolist(), model.chances.tolist(), strict=True
        )
    }


@pytest.mark.parametrize("fewest", [1, 2, 4])
def test_the_token_that_followed_most_often_follows(fewest: int) -> None:
    rng = random.Random(fewest)
    texts = [[rng.randrange(5) for _ in range(rng.randrange(30))] for _ in range(8)]
    expected = {}
    for length in (1, 2, 3):
        found = [(tuple(text[at - length : at]), text[at]) for text in texts for at in range(length, len(text))]
        for context in {context for context, _ in found}:
            followed = Counter(token for other, token in found if other == context)
            if followed.total() >= fewest:
                times = max(followed.values())
                token = min(token for token, count in followed.items() if count == times)
                expected[context] = (token, times / (followed.total() + 2 / length))
    model = entries(count(texts, longest=3, fewest=fewest))
    assert model.keys() == expected.keys()
    for context, (token, chance) in expected.items():
        assert model[context][0] == token
        assert model[context][1] == pytest.approx(chance, abs=1 / 255)


def test_with_a_context_all_that_it_ends_with_are_there() -> None:
    model = entries(count(TEXTS))
    assert all(context[1:] in model for context in model if len(context) > 1)
    assert model[2, 3, 1][0] == 2
    assert model[2, 3, 1][1] == pytest.approx(2 / (2 + 2 / 3), abs=1 / 255)


def test_a_file_gives_the_same_model(tmp_path: Path) -> None:
    model = count(TEXTS, about={"tokens": 13})
    save(model, tmp_path / "some.npz")
    again = load(tmp_path / "some.npz", vocab_size=5)
    assert entries(again) == entries(model)
    assert again.about == {"tokens": 13}


def test_texts_without_a_repetition_make_no_model() -> None:
    with pytest.raises(ConfigError, match="no context occurs 2 times"):
        count([(1, 2, 3)])


def test_a_model_of_another_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    save(count(TEXTS), tmp_path / "some.npz")
    with pytest.raises(ConfigError, match="has token id 3; the model's vocabulary has 3 tokens"):
        load(tmp_path / "some.npz", vocab_size=3)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"following": np.array([1, -123456], np.int32)}, "has token id -123456; the model's vocabulary has 9"),
        ({"contexts": np.array([[-1, 1], [-7, 2]], np.int32)}, "has token id -7; the model's vocabulary has 9"),
        ({"contexts": np.array([[-1, 1], [-1, -1]], np.int32)}, "has a context that is empty, or that has a gap"),
        ({"contexts": np.array([[-1, 1], [2, -1]], np.int32)}, "has a context that is empty, or that has a gap"),
        ({"shares": np.array([200], np.uint8)}, "is no n-gram model of format 1"),
        ({"following": np.array([1.5, 2.5])}, "is no n-gram model of format 1"),
    ],
)
def test_a_table_that_drafts_would_read_past_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    arrays: dict[str, Any] = {
        "contexts": np.array([[-1, 1], [1, 2]], np.int32),
        "following": np.array([2, 3], np.int32),
        "shares": np.array([200, 100], np.uint8),
    }
    path = tmp_path / "some.npz"
    np.savez(path, about=np.array('{"format": 1}'), **arrays)
    assert len(load(path, vocab_size=9).following) == 2
    np.savez(path, about=np.array('{"format": 1}'), **(arrays | change))
    with pytest.raises(ConfigError, match=said):
        load(path, vocab_size=9)


@pytest.mark.parametrize("kind", ["absent", "text", "cut off", "other arrays", "other format"])
def test_what_is_no_n_gram_model_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "some.npz"
    if kind == "text":
        path.write_text("hello")
    elif kind == "cut off":
        save(count(TEXTS), path)
        path.write_bytes(path.read_bytes()[:200])
    elif kind == "other arrays":
        np.savez(path, weights=np.zeros(3))
    elif kind == "other format":
        save(count(TEXTS, about={"format": 99}), path)
    with pytest.raises(ConfigError, match="is no n-gram model"):
        load(path, vocab_size=100)
