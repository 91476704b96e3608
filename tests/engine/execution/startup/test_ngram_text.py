"""The n-gram model that is counted with a tokenizer: which texts, which file, and what damaged files do.

Planted bugs that these tests have caught: all tokenizers share a file; a damaged file is kept; the file gets
another name; another text is counted; a folder that cannot be written ends the start.
"""

import logging
from pathlib import Path

import pytest

from faser.engine.checkpoints.ngram_model import count, shipped_answers
from faser.engine.execution.startup.ngram_text import LEAST_VOCABULARY, counted_ngram_model
from faser.engine.text.tokenizer import load_tokenizer
from tests.engine.text.vocabularies import qwen_like_core, sentencepiece_core, write_tokenizer_files


class Counting:
    """Counts with tokenizers of a folder, and hears what is reported."""

    def __init__(self, folder: Path) -> None:
        self.qwen = write_tokenizer_files(folder / "qwen", qwen_like_core())
        self.llama = write_tokenizer_files(folder / "llama", sentencepiece_core())
        self.kept_in = folder / "cache" / "ngrams"
        self.stages: list[str] = []

    def __call__(self, tokenizer: Path, vocab_size: int = LEAST_VOCABULARY) -> object:
        found = counted_ngram_model(
            tokenizer, vocab_size, self.kept_in, lambda stage, *_: self.stages.append(stage)
        )
        if found is None:
            return None
        return found.contexts.tolist(), found.following.tolist(), found.chances.tolist()


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    return Counting(tmp_path_factory.mktemp("tokenizers"))


def test_it_is_counted_once_a_tokenizer_and_kept(counting: Counting) -> None:
    counting.stages.clear()
    first = counting(counting.qwen)
    encode = load_tokenizer(counting.qwen).encode
    expected = count([encode(each, add_special_tokens=False) for each in shipped_answers()])
    assert first == (expected.contexts.tolist(), expected.following.tolist(), expected.chances.tolist())
    assert counting(counting.qwen) == first
    assert counting.stages == ["counting n-grams"]
    assert counting(counting.llama) != first
    assert len(list(counting.kept_in.glob("*.npz"))) == 2


def test_a_damaged_file_is_counted_again(counting: Counting) -> None:
    first = counting(counting.qwen)
    for each in counting.kept_in.glob("*.npz"):
        each.write_bytes(b"damaged")
    assert counting(counting.qwen) == first
    counting.stages.clear()
    assert counting(counting.qwen) == first
    assert counting.stages == []


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    counting: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING, "faser"):
        found = counted_ngram_model(counting.qwen, LEAST_VOCABULARY, tmp_path / "file", lambda *_: None)
    assert found is not None
    assert "counted again at every start" in caplog.text


def test_a_small_vocabulary_has_none(counting: Counting) -> None:
    assert counting(counting.qwen, LEAST_VOCABULARY - 1) is None


def test_a_model_without_a_tokenizer_has_none_and_that_is_said(
    counting: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "faser"):
        assert counting(tmp_path) is None
    assert "no n-gram model drafts" in caplog.text


def test_the_answers_are_many_and_of_words() -> None:
    answers = shipped_answers()
    assert len(answers) > 500
    assert sum(map(len, answers)) > 400_000
    assert all(answers)
