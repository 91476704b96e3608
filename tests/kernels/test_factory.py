"""Choosing a backend by name."""

from pathlib import Path

import pytest
import torch

from faser.errors import ConfigError
from faser.kernels.factory import make_backend


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_backend_is_made_by_name(name: str, kernel_cache: Path) -> None:
    assert make_backend(name, "cpu", num_threads=1, cache_dir=kernel_cache).name == name


def test_auto_prefers_the_native_backend_where_it_can_be_compiled(kernel_cache: Path) -> None:
    assert make_backend("auto", "cpu", num_threads=1, cache_dir=kernel_cache).name == "native"


@pytest.mark.parametrize(
    "name, device, problem",
    [
        ("magic", "cpu", "backend is magic; it must be auto, torch, native, flashinfer"),
        ("auto", "tpu", "device is tpu; it must be cpu, cuda or cuda:N"),
        ("torch", "cuda:x", "device is cuda:x; it must be cpu, cuda or cuda:N"),
        ("torch", "cpu:1", "device is cpu:1; it must be cpu, cuda or cuda:N"),
        ("native", "cuda:1", "the native backend computes on cpu; device is cuda:1"),
        ("flashinfer", "cpu", "the flashinfer backend computes on cuda; device is cpu"),
    ],
)
def test_what_is_not_known_or_does_not_go_together_is_refused(
    name: str, device: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_backend(name, device, num_threads=1, cache_dir=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["auto", "flashinfer", "torch"])
def test_without_a_cuda_device_the_error_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device is cuda; torch .*(built without CUDA|finds no CUDA device)"):
        make_backend(name, "cuda", num_threads=1, cache_dir=tmp_path)
