"""Tests write nothing into the cache folder of the user who runs them."""

import os
import subprocess
import sys
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build_engine

# Few rows: there is little to measure.
CONFIG = EngineConfig(
    backend="torch",
    dtype="float32",
    max_model_len=48,
    max_num_seqs=1,
    max_num_batched_tokens=8,
    kv_cache_memory=1 << 20,
    speculative_config={"method": "ngram", "num_speculative_tokens": 2},
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_step_times_are_kept_in_the_cache_of_the_run_and_not_in_the_users(
    tiny_checkpoint: Path, own_cache: Path, user_cache: Path
) -> None:
    assert cache_dir() == own_cache != user_cache
    users, known = names(user_cache / "cost"), names(own_cache / "cost")
    build_engine(CONFIG, tiny_checkpoint, lambda _stage, _done, _total: None)
    assert len(names(own_cache / "cost") - known) == 1, "no other test has an engine of this size"
    assert names(user_cache / "cost") == users


def test_a_process_that_a_test_starts_has_the_cache_of_the_run(own_cache: Path) -> None:
    asking = [sys.executable, "-c", "from faser.config.environment import cache_dir; print(cache_dir())"]
    found = subprocess.run(asking, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(own_cache)


def test_compiled_kernels_outlive_the_run(own_cache: Path, kernel_cache: Path) -> None:
    assert os.path.samefile(own_cache / "kernels", kernel_cache)
