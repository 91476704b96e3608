"""Engines that draft with heads from directories as users have them: found by their files, bounded, or refused.

Oracle: the engine without speculation, token for token, with preemptions, shared prefixes and chunked prompts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.errors import ConfigError, ModelError
from tests.checkpoints import VOCAB_SIZE, random_weights, write_checkpoint, write_json
from tests.engine.execution.heads.seeded import head_spec, seeded_weights
from tests.engine.execution.heads.test_eagle import CONFIGS, SPEC
from tests.engine.execution.heads.test_medusa import AUTHORS, NUM_HEADS, weights_of
from tests.engine.test_head_engine import accepted, answers, built, checkpoint


def write_head(directory: Path, kind: str) -> Path:
    directory.mkdir()
    if kind == "eagle":
        write_checkpoint(directory, CONFIGS["as vLLM writes it"][0], seeded_weights(SPEC))
    else:
        write_json(directory / "config.json", AUTHORS)
        torch.save(weights_of("", authors=True, bias=True, own_heads=True), directory / "medusa_lm_head.pt")
    return directory


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_with_auto_the_files_say_what_drafts(kind: str, tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), write_head(tmp_path / "head", kind)
    engine = built(path, {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)}).engine
    assert answers(engine, 0.9) == answers(built(path, {"policy": "off"}).engine, 0.9)
    assert accepted(engine, kind)[0] > 500


def test_a_draft_has_no_more_tokens_than_there_are_medusa_heads(tmp_path: Path) -> None:
    """With auto the bound holds for text too, so it may be larger."""
    path, head = checkpoint(tmp_path / "model", "float32"), write_head(tmp_path / "head", "medusa")
    drafting = {"policy": "fixed", "num_speculative_tokens": NUM_HEADS + 2, "model": str(head)}
    engine = built(path, drafting).engine
    answers(engine, 0.0)
    assert accepted(engine, "medusa")[0] > 100
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5; the heads in .* draft at most 3 tokens"):
        built(path, drafting | {"method": "medusa"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "dflash"}, "of kind dflash, which is not supported: it drafts a block"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel of the head is not supported: it drafts the"),
    ],
)
def test_a_head_that_is_not_computed_stops_the_start(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_checkpoint(head, config, random_weights({"fc.weight": (VOCAB_SIZE, head_spec().hidden_size)}))
    with pytest.raises(ModelError, match=message):
        built(path, {"model": str(head)})
