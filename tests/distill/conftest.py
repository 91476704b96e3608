"""These models are so small that a second thread only waits for the first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distill.small_target import write_small_target


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_target(tmp_path_factory.mktemp("target") / "tiny-qwen")
