"""Which n-gram model drafts: the one named, the one that comes with the package, or none."""

from pathlib import Path

import pytest

from faser.config.speculation import NONE, SpeculationConfig
from faser.engine.checkpoints.embedded import SMOLLM2
from faser.engine.checkpoints.ngram_model import NgramModel, count, save
from faser.engine.execution.startup.executor import find_ngram_model
from faser.errors import ConfigError
from tests.engine.text.vocabularies import qwen_like_core, write_tokenizer_files

DEFAULT_MODEL, ANOTHER = Path("/models") / SMOLLM2.name, Path("/models/another")


def found_for(
    config: SpeculationConfig, directory: Path, vocab_size: int = 49152, tokenizer: Path = ANOTHER
) -> NgramModel | None:
    return find_ngram_model(
        config, directory, vocab_size, tokenizer=tokenizer, kept_in=tokenizer / "ngrams", report=lambda *_: None
    )


def test_the_default_model_has_its_own_and_others_without_a_tokenizer_have_none() -> None:
    assert found_for(SpeculationConfig(), DEFAULT_MODEL) is not None
    assert found_for(SpeculationConfig(), ANOTHER) is None
    assert found_for(SpeculationConfig(), DEFAULT_MODEL, 512) is None


@pytest.mark.parametrize(
    "config",
    [
        SpeculationConfig(policy="off"),
        SpeculationConfig(method="suffix"),
        SpeculationConfig(ngram_model=NONE),
    ],
)
def test_none_is_loaded_where_none_drafts(config: SpeculationConfig) -> None:
    assert found_for(config, DEFAULT_MODEL) is None


def test_the_one_named_is_loaded_whatever_the_model(tmp_path: Path) -> None:
    save(count([(1, 2, 1, 2)], about={"mine": True}), tmp_path / "mine.npz")
    config = SpeculationConfig(ngram_model=str(tmp_path / "mine.npz"))
    for directory in (DEFAULT_MODEL, ANOTHER):
        found = found_for(config, directory, 3)
        assert found is not None
        assert found.about == {"mine": True}


def test_the_method_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 'ngram_model', a file: none comes with this package for another"):
        found_for(SpeculationConfig(method="ngram_model"), ANOTHER)


def test_others_have_one_that_their_tokenizer_counts(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_files(tmp_path, qwen_like_core())
    assert found_for(SpeculationConfig(), ANOTHER, tokenizer=tokenizer) is not None
    assert found_for(SpeculationConfig(method="ngram_model"), ANOTHER, tokenizer=tokenizer) is not None
    assert found_for(SpeculationConfig(ngram_model=NONE), ANOTHER, tokenizer=tokenizer) is None
