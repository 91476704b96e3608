"""Engines whose drafter is damaged while they serve: it is found, compared and put right, and no answer changes.

The keys and values of a draft model are overwritten, and those of a head and of an MTP layer. Where only the text
changes, the same alarm ends with a comparison.

Oracle: an engine without drafts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.build import Built
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.heads.head import HeadDrafter
from faser.types.request import Request
from faser.types.statistics import SpeculationStats
from tests.engine.checkpoints.mtp_models import write_mtp_model
from tests.engine.execution.drafting.seeded_heads import head_spec, write_seeded
from tests.engine.losslessness.equality import answers, requests, write_pair
from tests.engine.test_head_engine import STATE_LAYERS, built, checkpoint

FIXED = {"policy": "fixed", "num_speculative_tokens": 3}
LOGGER = "faser.drafters"
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder / "target", folder / "drafter")


def with_draft_model(pair: Pair) -> Built:
    drafting = FIXED | {"model": str(pair[1]), "method": "draft_model"}
    return built(pair[0], drafting, kv_cache_memory=8 << 20, max_model_len=512, dtype="float32")


def scramble(memory: Sequence[Tensor] | None) -> None:
    assert memory is not None
    for part in memory:
        part.view(torch.float32).normal_(generator=torch.Generator().manual_seed(1))


def statistics(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


def asked(first: int | None = None, **sampling: Any) -> list[Request]:
    """first: the first token of all prompts, so that they begin as no others do."""
    found = requests(**{"temperature": 0.0, "max_tokens": 60} | sampling)
    if first is None:
        return found
    return [
        replace(each, request_id=f"{first} {each.request_id}", prompt_token_ids=(first, *each.prompt_token_ids))
        for each in found
    ]


def share_accepted(engine: Engine, asked: list[Request]) -> float:
    """Of the draft tokens that these requests verify."""
    before = statistics(engine).methods
    answers(engine, asked)
    after = statistics(engine).methods
    verified, accepted = (
        sum(getattr(each, field) for each in after) - sum(getattr(each, field) for each in before)
        for field in ("verified", "accepted")
    )
    return float(accepted / verified)


def test_kv_that_is_scrambled_after_prefix_hits_is_found_and_put_right(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = with_draft_model(pair)
    wanted = answers(built(pair[0], {"policy": "off"}, max_model_len=512, dtype="float32").engine, asked())
    usual = share_accepted(damaged.engine, asked())
    assert damaged.draft_runner is not None
    scramble(damaged.draft_runner.repeatable_memory())
    with caplog.at_level(logging.INFO, LOGGER):
        # Prompts that were there before, whose first blocks are found, between others.
        said = answers(damaged.engine, [*chain(*zip(asked(), asked(first=9), strict=True))])
    assert {key: each for key, each in said.items() if key in wanted} == wanted
    ((drafter, cause, count),) = statistics(damaged.engine).rebuilds
    assert (drafter, cause) == ("draft_model", "prefix_hit")
    assert count >= 1
    (message,) = caplog.messages
    assert "(prefix_hit)" in message
    assert f"rebuilt {count} of" in message
    assert share_accepted(damaged.engine, asked()) > 0.85 * usual


def test_a_change_of_traffic_rebuilds_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The drafter is right more often at a high temperature, when it draws as the target does."""
    each = with_draft_model(pair)
    usual = share_accepted(each.engine, asked(temperature=2.0))
    with caplog.at_level(logging.INFO, LOGGER):
        assert share_accepted(each.engine, asked()) < usual / 2
        (message,) = caplog.messages
        assert "no damaged state was found" in message
        answers(each.engine, asked(first=9))
    assert not statistics(each.engine).rebuilds
    assert len(caplog.messages) == 1, "the records have moved on"


class Kept:
    """Wraps nothing, and keeps the drafter."""

    def __call__(self, drafter: Drafter) -> Drafter:
        assert isinstance(drafter, HeadDrafter)
        self.drafter = drafter
        return drafter


def write_head(folder: Path) -> tuple[Path, dict[str, Any]]:
    write_seeded(folder / "head", head_spec(state_layers=STATE_LAYERS))
    return checkpoint(folder / "model", "float32"), {"method": "eagle3", "model": str(folder / "head")}


def write_layer(folder: Path) -> tuple[Path, dict[str, Any]]:
    write_mtp_model(folder / "model")
    return folder / "model", {"method": "mtp"}


@pytest.mark.parametrize("write", [write_head, write_layer])
def test_what_a_head_has_computed_is_compared_bit_for_bit(
    tmp_path: Path, write: Callable[[Path], tuple[Path, dict[str, Any]]]
) -> None:
    path, drafting = write(tmp_path)
    kept = Kept()
    engine = built(path, FIXED | drafting, kv_cache_memory=8 << 20, dtype="float32", wrap_drafter=kept).engine
    method = drafting["method"]
    for request in asked(max_tokens=40)[:6]:
        engine.add(replace(request, prompt_token_ids=request.prompt_token_ids[:40]))
    for _ in range(24):
        engine.step()
    assert [kept.drafter.rebuild(method, slot) for slot in range(6)] == [False] * 6
    scramble(kept.drafter.loop.memory)
    assert not kept.drafter.rebuild("draft_model", 0)
    assert [kept.drafter.rebuild(method, slot) for slot in range(8)] == [True] * 6 + [False] * 2
    assert [kept.drafter.rebuild(method, slot) for slot in range(6)] == [False] * 6
