"""Fixtures shared by the whole test tree."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.checkpoints import write_tiny_checkpoint

# The same examples every time, however slow the machine is at the moment.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a complete seeded two-layer Llama with a tokenizer of 512 tokens; read-only by convention."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")
