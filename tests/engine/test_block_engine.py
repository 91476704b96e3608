"""Engines whose drafter drafts whole blocks from the model's hidden states.

Oracle: the engine without speculation, token for token, with sequences that are preempted and prompts that begin
alike; see test_head_engine.py, whose models and conversations these are.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from faser.engine.contract.plan import DraftPlan
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.errors import ConfigError, ModelError
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.execution.drafting.seeded_blocks import BlockShape, block_path, write_block
from tests.engine.test_head_engine import STATE_LAYERS, accepted, answers, built, checkpoint

SHAPE = BlockShape(vocab_size=VOCAB_SIZE, state_layers=STATE_LAYERS, block_size=5)
BARE = BlockShape(
    vocab_size=VOCAB_SIZE,
    state_layers=STATE_LAYERS,
    block_size=5,
    markov_rank=0,
    confidence=False,
    from_anchor=False,
)
SECOND = replace(BARE, selector_rank=8)


@pytest.mark.parametrize(
    ("method", "layout", "shape"),
    [
        ("dspark", "speculators", SHAPE),
        ("dflash", "dflash", BARE),
        ("dspark", "gguf", SHAPE),
        ("dflash", "dflash", SECOND),
        ("dspark", "dspark", replace(SHAPE, gemma=True)),
    ],
    ids=["speculators", "dflash", "gguf", "dflash 2", "gemma 4"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.full(but=("0.8-gguf", "0.0-dflash 2"))
def test_drafts_of_blocks_change_no_answer(
    tmp_path: Path, method: str, layout: str, shape: BlockShape, temperature: float
) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_block(head, shape, layout)
    head = block_path(head, layout)
    wanted = answers(built(path, {"policy": "off"}).engine, temperature)
    for asked in ({"method": method}, {}):
        drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)} | asked
        engine = built(path, drafting).engine
        assert answers(engine, temperature) == wanted
        assert accepted(engine, method)[0] > 500
        assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"


def test_model_and_drafter_may_both_be_gguf_files(tmp_path: Path) -> None:
    """Embedding and head are the model's, in its blocks."""
    path = tmp_path / "model.gguf"
    write_gguf(path, quantization=GGMLQuantizationType.Q8_0)
    shape = replace(SHAPE, state_layers=(0, 1, 2), markov_rank=32)
    write_block(tmp_path, shape, "gguf", quantization=GGMLQuantizationType.Q8_0)
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(block_path(tmp_path, "gguf"))}
    engine = built(path, drafting).engine
    assert answers(engine, 0.8) == answers(built(path, {"policy": "off"}).engine, 0.8)
    assert accepted(engine, "dspark")[0] > 500


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 10.5), ("Q4_0", 10.5), ("F32", 16)])
@pytest.mark.full(but=("Q4_0-10.5", "F32-16"))
def test_a_drafter_in_floats_is_rounded_to_bytes_where_its_model_has_few_bits(
    tmp_path: Path, kind: str, bits: float
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, quantization=GGMLQuantizationType[kind])
    shape = replace(BARE, state_layers=(0, 1, 2))
    write_block(tmp_path / "head", shape, "dflash")
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(tmp_path / "head")}
    engine, without = built(path, drafting), built(path, {"policy": "off"})
    values = sum(prod(each) for each in shape.tensors().values())
    assert 8 * (engine.info.weight_bytes - without.info.weight_bytes) / values == pytest.approx(bits, rel=0.1)
    assert answers(engine.engine, 0.8) == answers(without.engine, 0.8)
    assert accepted(engine.engine, "dflash")[0] > 500


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.full(but=("bfloat16",))
def test_a_policy_that_decides_by_measured_times_changes_no_answer(tmp_path: Path, dtype: str) -> None:
    path, head = checkpoint(tmp_path / "model", dtype), tmp_path / "head"
    write_block(head, SHAPE, "speculators", dtype=getattr(torch, dtype))
    wanted = answers(built(path, {"policy": "off"}).engine, 0.0)
    assert answers(built(path, {"model": str(head)}).engine, 0.0) == wanted


class WatchedDrafter:
    """A drafter, and how many tokens a model was asked for in each request."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.requested: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        self.requested += [each.max_tokens for each in plan.requests if not plan.from_text]
        return self._drafter.propose(plan, until)


@pytest.mark.parametrize("asked", [{"method": "dspark"}, {}])
@pytest.mark.full(but=("asked1",))
def test_no_more_tokens_are_asked_for_than_a_block_has(tmp_path: Path, asked: dict[str, str]) -> None:
    """The default is 8 tokens of a model, and the drafter was trained for blocks of 3."""
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_block(head, replace(SHAPE, block_size=3), "speculators")
    watched: list[WatchedDrafter] = []

    def watch(drafter: Drafter) -> WatchedDrafter:
        watched.append(WatchedDrafter(drafter))
        return watched[0]

    asked = {"model": str(head), "policy": "fixed"} | asked
    answers(built(path, asked, wrap_drafter=watch).engine, 0.0)
    assert max(watched[0].requested) == 3


def test_of_a_large_vocabulary_the_drafter_chooses_from_the_first_tokens(tmp_path: Path) -> None:
    size = 70_000
    config = tiny_llama_config() | {"num_hidden_layers": 6, "vocab_size": size}
    path, head = tmp_path / "model", tmp_path / "head"
    write_checkpoint(path, config, random_weights(llama_shapes(config)))
    write_block(head, replace(BARE, vocab_size=size), "dflash")
    asked = {"method": "dflash", "model": str(head)}
    whole = built(path, asked | {"draft_vocab_size": size}).info.weight_bytes
    least, found = (built(path, asked | chosen).info.weight_bytes for chosen in ({"draft_vocab_size": 1000}, {}))
    assert (found - least) % (64 * 4) == 0
    assert (found - least) // (64 * 4) == 32_768 - 1000
    assert whole < least, "all rows are the model's own"


def test_another_method_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_block(head, BARE, "dflash")
    with pytest.raises(ModelError, match=r"method is dspark; .* is a drafter of the method dflash"):
        built(path, {"method": "dspark", "model": str(head)})
    with pytest.raises(ConfigError, match=r"method is eagle3; .* has a head of method dflash"):
        built(path, {"method": "eagle3", "model": str(head)})
    with pytest.raises(ModelError, match=r"method is dflash; .* has no block drafter"):
        built(path, {"method": "dflash", "model": str(path)})


def test_more_tokens_than_the_drafter_was_trained_for_are_refused(tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_block(head, BARE, "dflash")
    asked = {"method": "dflash", "model": str(head), "num_speculative_tokens": 5}
    with pytest.raises(
        ConfigError, match=r"num_speculative_tokens is 5; .* blocks of 5 rows, which draft 4 tokens"
    ):
        built(path, asked)


def test_a_block_drafter_that_is_not_computed_stops_the_start(tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    for config, message in (
        ({"architectures": ["XPressDraftModel"]}, "XPressDraftModel of the head is not supported: of drafters of"),
        ({"speculators_model_type": "dflash2"}, "of kind dflash2, which is not supported: .* DFlash2DraftModel"),
    ):
        write_checkpoint(head, config, random_weights({"fc.weight": (VOCAB_SIZE, 64)}))
        with pytest.raises(ModelError, match=message):
            built(path, {"model": str(head)})
