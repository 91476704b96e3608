"""Engines whose drafter is damaged while they serve: it is found, compared, put right and counted; no answer changes.

A draft model's and a head's keys and values are overwritten after prefix hits; the index of texts no longer fits its
keys. Where only the text changes, the same alarm ends with a comparison.

Planted bugs that these tests have caught: none yet.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.build import Built
from faser.types import Request
from tests.engine.losslessness.equality import answers, requests, write_pair
from tests.engine.test_head_engine import built as build

FIXED = {"policy": "fixed", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder / "target", folder / "drafter")


def scramble(memory: Sequence[Tensor]) -> None:
    for part in memory:
        part.view(torch.float32).normal_(generator=torch.Generator().manual_seed(1))


def acceptance(built: Built, method: str) -> tuple[int, int]:
    stats = built.engine.stats().speculation
    assert stats is not None
    (found,) = (each for each in stats.methods if each.method == method)
    return found.verified, found.accepted


def rebuilds(built: Built) -> tuple[tuple[str, str, int], ...]:
    stats = built.engine.stats().speculation
    assert stats is not None
    return stats.rebuilds


def asked(turn: int, **sampling: Any) -> list[Request]:
    return [r for r in requests(**{"temperature": 0.0} | sampling)]


def test_a_draft_models_scrambled_kv_is_found(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    built = build(
        pair[0], FIXED | {"model": str(pair[1]), "method": "draft_model"}, kv_cache_memory=8 << 20, max_model_len=512, dtype="float32"
    )
    assert built.draft_runner is not None
    with caplog.at_level(logging.INFO, "faser.drafters"):
        for turn in range(6):
            before = acceptance(built, "draft_model")
            if turn == 3:
                scramble(built.draft_runner.repeatable_memory())
            said = answers(built.engine, asked(turn))
            after = acceptance(built, "draft_model")
            print(turn, (after[1] - before[1]) / (after[0] - before[0]), after, rebuilds(built), caplog.messages)
    assert rebuilds(built)
