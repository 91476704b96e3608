"""Engines whose keys and values are int8, on the native kernels: drafts, hits and preemptions change no answer.

Oracle: the same engine without speculation, token for token. Forty prompts at once, in chunks; a KV pool
that is too small for all, so that sequences are preempted and computed again; prefix caching on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.cli.server import ready_line
from faser.engine.engine import Engine
from tests.engine.losslessness.equality import CAP, Answer, answers, build_with_parts, requests, write_pair
from tests.fake_engine import model_info

MEMORY = 1 << 20
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "draft_sample_method": "coupled"},
    "auto": {"method": "auto"},
}
WITH_MODEL = ("draft_model", "auto")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def built(checkpoints: tuple[Path, Path], speculation: dict[str, Any] | None, dtype: str) -> Engine:
    with_model = speculation is not None and "model" in speculation
    parts = build_with_parts(
        checkpoints,
        speculation,
        backend="native",
        device="cpu",
        dtype=dtype,
        kv_cache_dtype="int8",
        max_num_seqs=40,
        kv_cache_memory=MEMORY * (2 if with_model else 1),
    )
    assert parts.info.kv_cache_dtype == "int8"
    return parts.engine


Wanted = dict[tuple[str, float], dict[tuple[str, int], Answer]]


@pytest.fixture(scope="module")
def wanted(checkpoints: tuple[Path, Path]) -> Wanted:
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = built(checkpoints, None, dtype)
        for temperature in (0.0, 0.9):
            found[dtype, temperature] = answers(engine, requests(temperature=temperature, max_tokens=180))
        assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"
        assert engine.stats().prefix_cache_hits > 0
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.full(but=("suffix-bfloat16",))
def test_answers_are_those_without_speculation(
    checkpoints: tuple[Path, Path], drafter: str, dtype: str, wanted: Wanted
) -> None:
    given = DRAFTERS[drafter] | ({"model": str(checkpoints[1])} if drafter in WITH_MODEL else {})
    engine = built(checkpoints, given, dtype)
    engine.use_policy("fixed", CAP)
    for temperature in (0.0, 0.9):
        assert answers(engine, requests(temperature=temperature, max_tokens=180)) == wanted[dtype, temperature]
    speculated = engine.stats().speculation
    assert speculated is not None
    assert sum(each.accepted for each in speculated.methods) > 0
    assert engine.stats().num_preemptions > 0


def test_a_quarter_of_float32_is_nearly_four_times_the_blocks(checkpoints: tuple[Path, Path]) -> None:
    """Both models' caches; heads of 16 need 18 bytes instead of 64."""
    given = {"method": "draft_model", "model": str(checkpoints[1])}
    wide, narrow = (
        build_with_parts(checkpoints, given, backend="native", device="cpu", kv_cache_dtype=dtype).info
        for dtype in ("auto", "int8")
    )
    assert narrow.num_blocks / wide.num_blocks == pytest.approx(64 / 18, rel=0.02)
    assert wide.kv_cache_dtype == "float32"
    assert narrow.kv_cache_bytes <= 1 << 20


def test_the_ready_line_names_the_type_of_keys_and_values_where_it_is_another() -> None:
    info = model_info()
    assert "KV tokens · " in ready_line("http://u", "m", info, 1, 0.0)
    assert "KV tokens in int8 · " in ready_line("http://u", "m", replace(info, kv_cache_dtype="int8"), 1, 0.0)
