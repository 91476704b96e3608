"""Choosing a backend by name."""

from pathlib import Path

import pytest

from faser.errors import ConfigError
from faser.kernels.factory import make_backend


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_backend_is_made_by_name(name: str, kernel_cache: Path) -> None:
    assert make_backend(name, "cpu", num_threads=1, cache_dir=kernel_cache).name == name


def test_auto_prefers_the_native_backend_where_it_can_be_compiled(kernel_cache: Path) -> None:
    assert make_backend("auto", "cpu", num_threads=1, cache_dir=kernel_cache).name == "native"


@pytest.mark.parametrize("name, device", [("torch", "cuda"), ("magic", "cpu")])
def test_what_is_not_known_is_refused_by_name(name: str, device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{device} is not supported by this build yet|{name}; it must be auto"):
        make_backend(name, device, num_threads=1, cache_dir=tmp_path)
