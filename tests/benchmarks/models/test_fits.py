"""The table of models that fit on GPUs is the one of its result file, and that is what the estimator says."""

import json
from pathlib import Path

import pytest

from benchmarks.models.fits import MODELS, fits, table

ROOT = Path(__file__).parents[3]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "gpu-memory.json").read_text("utf-8"))["models"]


def test_the_page_has_the_table_of_the_result() -> None:
    """If this fails: python -m benchmarks models.fits, and its table into docs/gpu.md."""
    assert table(RESULT) in (ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert len(RESULT) >= 30


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-32B-AWQ", "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "openai/gpt-oss-20b"],
)
def test_the_result_is_what_is_estimated_now(name: str) -> None:
    assert fits(MODELS[name]) == RESULT[name]
