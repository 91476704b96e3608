"""Which head drafts where the config names no model: the one that comes with the package, or none."""

from pathlib import Path
from typing import Any

import pytest

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.embedded import SMOLLM2
from faser.engine.execution.startup.head_loading import with_shipped_head

DEFAULT_MODEL, ANOTHER = Path("/models") / SMOLLM2.name, Path("/models/another")
VOCAB_SIZE = 49152


@pytest.mark.parametrize(
    "settings, target, vocab_size",
    [
        ({}, ANOTHER, VOCAB_SIZE),
        ({}, DEFAULT_MODEL, 512),
        ({"speculative_config": {"model": "none"}}, DEFAULT_MODEL, VOCAB_SIZE),
        ({"speculative_config": {"model": "another"}}, DEFAULT_MODEL, VOCAB_SIZE),
        ({"speculative_config": {"method": "ngram"}}, DEFAULT_MODEL, VOCAB_SIZE),
        ({"speculative_policy": "off"}, DEFAULT_MODEL, VOCAB_SIZE),
        ({"device": "cuda"}, DEFAULT_MODEL, VOCAB_SIZE),
    ],
)
def test_what_is_stated_stays_and_others_have_none(
    settings: dict[str, Any], target: Path, vocab_size: int
) -> None:
    config = EngineConfig(**settings)
    assert with_shipped_head(config, target, vocab_size) is config


def test_no_model_drafts_from_text_alone() -> None:
    speculation = EngineConfig(speculative_config={"model": "none"}).speculation
    assert not speculation.needs_passes
    assert speculation.drafts_from_text
