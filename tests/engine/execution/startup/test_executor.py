"""Which n-gram model drafts: the one named, the one that comes with the package, or none."""

from pathlib import Path

import pytest

from faser.config.speculation import NONE, SpeculationConfig
from faser.engine.checkpoints.embedded import SMOLLM2
from faser.engine.checkpoints.ngram_model import count, save
from faser.engine.execution.startup.executor import find_ngram_model
from faser.errors import ConfigError

DEFAULT_MODEL, ANOTHER = Path("/models") / SMOLLM2.name, Path("/models/another")


def test_the_default_model_has_its_own_and_others_have_none() -> None:
    assert find_ngram_model(SpeculationConfig(), DEFAULT_MODEL, 49152) is not None
    assert find_ngram_model(SpeculationConfig(), ANOTHER, 49152) is None
    assert find_ngram_model(SpeculationConfig(), DEFAULT_MODEL, 512) is None


@pytest.mark.parametrize(
    "config",
    [
        SpeculationConfig(policy="off"),
        SpeculationConfig(method="suffix"),
        SpeculationConfig(ngram_model=NONE),
    ],
)
def test_none_is_loaded_where_none_drafts(config: SpeculationConfig) -> None:
    assert find_ngram_model(config, DEFAULT_MODEL, 49152) is None


def test_the_one_named_is_loaded_whatever_the_model(tmp_path: Path) -> None:
    save(count([(1, 2, 1, 2)], about={"mine": True}), tmp_path / "mine.npz")
    config = SpeculationConfig(ngram_model=str(tmp_path / "mine.npz"))
    for directory in (DEFAULT_MODEL, ANOTHER):
        found = find_ngram_model(config, directory, 3)
        assert found is not None
        assert found.about == {"mine": True}


def test_the_method_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 'ngram_model', a file: none comes with this package for another"):
        find_ngram_model(SpeculationConfig(method="ngram_model"), ANOTHER, 49152)
