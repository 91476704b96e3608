"""Which n-gram model drafts: the one named, the one that comes with the package, or none."""

from pathlib import Path

import pytest

from faser.config.speculation import NONE, SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel, count, save
from faser.engine.execution.startup.executor import find_ngram_model
from faser.errors import ConfigError
from tests.engine.text.vocabularies import qwen_like_core, write_tokenizer_files

ANOTHER = Path("/models/another")


def found_for(config: SpeculationConfig, tokenizer: Path = ANOTHER, vocab_size: int = 49152) -> NgramModel | None:
    return find_ngram_model(
        config, vocab_size, tokenizer=tokenizer, kept_in=tokenizer / "ngrams", report=lambda *_: None
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_files(tmp_path_factory.mktemp("tokenizer"), qwen_like_core())


@pytest.mark.parametrize("config", [SpeculationConfig(), SpeculationConfig(method="ngram_model")])
def test_it_is_counted_with_the_tokenizer(config: SpeculationConfig, tokenizer: Path) -> None:
    assert found_for(config, tokenizer) is not None


@pytest.mark.parametrize(
    "config",
    [
        SpeculationConfig(policy="off"),
        SpeculationConfig(method="suffix"),
        SpeculationConfig(ngram_model=NONE),
    ],
)
def test_none_is_loaded_where_none_drafts(config: SpeculationConfig, tokenizer: Path) -> None:
    assert found_for(config, tokenizer) is None


def test_without_a_tokenizer_there_is_none() -> None:
    assert found_for(SpeculationConfig()) is None


def test_the_one_named_is_loaded_whatever_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    save(count([(1, 2, 1, 2)], about={"mine": True}), tmp_path / "mine.npz")
    config = SpeculationConfig(ngram_model=str(tmp_path / "mine.npz"))
    for each in (tokenizer, ANOTHER):
        found = found_for(config, each, 3)
        assert found is not None
        assert found.about == {"mine": True}


@pytest.mark.parametrize("named", [None, NONE])
def test_the_method_without_a_table_is_refused(named: str | None) -> None:
    with pytest.raises(ConfigError, match="a file: none is counted with the tokenizer of /models/another"):
        found_for(SpeculationConfig(method="ngram_model", ngram_model=named))
