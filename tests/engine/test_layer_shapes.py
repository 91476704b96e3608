"""A model whose layers have heads of several shapes, with the keys and values of all of them in one cache.

Oracle: the forward of tests/engine/checkpoints/shapes_model.py, which has no cache.

Bugs these tests have been seen to catch: a layer that reads the place of another one; room of all layers as large
as the first one's; bytes of the first shape alone; one table of angles for heads of two sizes; room for queries,
keys and values as wide as the first layer's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.engine.checkpoints import families
from faser.engine.checkpoints.families import FAMILIES
from faser.engine.engine import Engine
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers
from faser.types.request import Request
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.shapes_model import FAMILY, Reference, write_shapes_model
from tests.engine.execution.drafting.seeded_heads import head_spec, write_seeded
from tests.engine.execution.models.paged import load, prompt
from tests.engine.losslessness.equality import add_noise, answers, build, build_with_parts, requests

NUM_TOKENS = 64
NUM_REQUESTS = 4
POOL_TOKENS = 256
# Keys and values of 16 tokens in all layers, and how many scales they have in int8.
BLOCK_VALUES, BLOCK_SCALES = (2 * 16 * each for each in (2 * 1 * 128 + 2 * 2 * 64 + 4 * 32, 2 * 1 + 2 * 2 + 4))
INT8_BLOCK_BYTES = BLOCK_VALUES + 2 * BLOCK_SCALES


@pytest.fixture(scope="module", autouse=True)
def _one_more_family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "FAMILIES", (*FAMILIES, FAMILY))
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The model, itself with noise on its weights, and a seeded head for it."""
    target, drafter, head = (tmp_path_factory.mktemp(name) for name in ("target", "drafter", "head"))
    write_shapes_model(target)
    write_shapes_model(drafter)
    add_noise(drafter)
    write_seeded(head, head_spec(state_layers=(0, 2, 4)))
    return target, drafter, head


@pytest.mark.parametrize("kind", ["torch", "native", "separate"])
@pytest.mark.full(but=("native", "separate"))
def test_logits_of_a_paged_cache_are_those_of_no_cache(
    kind: str, checkpoints: tuple[Path, Path, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """native: layers in one call each; separate: operation by operation on the same kernels."""
    target, token_ids = checkpoints[0], prompt(90, VOCAB_SIZE)
    backend = None
    if kind != "torch":
        backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
        if kind == "separate":
            separate = SeparateLayers(backend, SeparateBlocks(backend))
            monkeypatch.setattr(backend, "layers", separate)
    found = load(target, backend=backend).prefill(token_ids, (1, 33, 20))
    torch.testing.assert_close(found, Reference(target).logits(token_ids), atol=1e-4, rtol=0)


def asked() -> list[Request]:
    found = requests(temperature=0.0, max_tokens=NUM_TOKENS)
    return [found[i] for i in (3, 6, 7, 12)]


def crowded(checkpoints: tuple[Path, Path, Path], speculation: dict[str, Any], **settings: Any) -> Engine:
    """An engine with too few blocks, which cuts prompts and shares blocks."""
    method = speculation.get("method")
    if method in ("draft_model", "eagle3"):
        speculation = speculation | {"model": str(checkpoints[1 if method == "draft_model" else 2])}
    engine = build(
        checkpoints[:2],
        speculation or None,
        max_model_len=224,
        max_num_batched_tokens=24,
        **{
            "max_num_seqs": NUM_REQUESTS,
            "kv_cache_memory": POOL_TOKENS // 16 * BLOCK_VALUES * 4 * (2 if method == "draft_model" else 1),
        }
        | settings,
    )
    if speculation:
        engine.use_policy("fixed", 4)
    return engine


@pytest.mark.full(but=("eagle3",))
@pytest.mark.parametrize("method", ["off", "suffix", "ngram", "draft_model", "eagle3"])
def test_a_whole_engine_answers_as_no_cache_does(method: str, checkpoints: tuple[Path, Path, Path]) -> None:
    """Twice: the second time prompts are in the prefix cache."""
    engine, reference = (
        crowded(checkpoints, {} if method == "off" else {"method": method}),
        Reference(checkpoints[0]),
    )
    for _ in range(2):
        found = answers(engine, asked())
        for each in asked():
            answer = list(found[each.request_id, 0][0])
            assert len(answer) == NUM_TOKENS
            assert reference.follows(list(each.prompt_token_ids), answer)
    stats = engine.stats()
    assert stats.prefix_cache_hits > 0
    if method != "eagle3":  # whose sequences hold blocks of the head too: fewer start at once
        assert stats.num_preemptions > 0, "the pool is meant to be too small"
    if method != "off":
        assert stats.speculation is not None
        assert sum(each.verified for each in stats.speculation.methods) > 0


def test_an_engine_with_an_int8_cache_answers_as_each_request_alone(checkpoints: tuple[Path, Path, Path]) -> None:
    some = requests(temperature=0.0, max_tokens=NUM_TOKENS)[:9]
    alone = build(checkpoints[:2], None, max_num_seqs=1, max_model_len=224, kv_cache_dtype="int8")
    expected = {key: found for each in some for key, found in answers(alone, [each]).items()}
    engine = crowded(
        checkpoints, {"method": "suffix"}, kv_cache_dtype="int8", kv_cache_memory=1 << 20, max_num_seqs=16
    )
    assert answers(engine, some) == expected
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(("kv_dtype", "block_bytes"), [("auto", 4 * BLOCK_VALUES), ("int8", INT8_BLOCK_BYTES)])
def test_a_block_costs_the_bytes_of_every_layer(
    kv_dtype: str, block_bytes: int, checkpoints: tuple[Path, Path, Path]
) -> None:
    """Of the memory that was given, and as the engine reports it."""
    info = build_with_parts(
        checkpoints[:2], None, max_model_len=224, kv_cache_dtype=kv_dtype, kv_cache_memory=61 * block_bytes - 1
    ).info
    assert (info.num_blocks, info.kv_cache_bytes) == (60, 60 * block_bytes)
