"""What a bug report says of CUDA, on machines with and without it."""

from pathlib import Path

from faser.kernels.cuda.device import CudaFacts
from faser.kernels.cuda.flashinfer.build import Module, modules_dir
from faser.kernels.report import Gpu, cuda_report, driver_version

NOTHING = CudaFacts(build=None, capabilities=())
TWO = CudaFacts(build="13.0", capabilities=((9, 0), (8, 6)))

# As the driver writes it: with the compiler's version below, which is not the driver's.
DRIVER = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2)
"""


def ask(index: int) -> Gpu:
    if index:
        raise RuntimeError("CUDA error: device is busy\nmore of it")
    return Gpu(name="NVIDIA H200", total_bytes=150 << 30, free_bytes=149 << 30)


def test_every_line_says_that_there_is_nothing(tmp_path: Path) -> None:
    found = cuda_report(NOTHING, tmp_path, tmp_path, ask=ask, driver=tmp_path / "none")
    assert found["cuda"] == "none: torch is built without CUDA"
    assert found["gpu driver"] == "none found"
    assert found["gpus"] == "none that torch can use"
    assert found["gpu kernels"] == "none compiled"


def test_every_gpu_has_a_line_and_one_that_is_silent_says_why(tmp_path: Path) -> None:
    found = cuda_report(TWO, tmp_path, tmp_path, ask=ask, driver=tmp_path / "none")
    assert found["cuda"] == "13.0, of torch"
    assert found["cuda:0"] == "NVIDIA H200, compute capability 9.0, 150GiB, 149GiB free"
    assert found["cuda:1"] == "compute capability 8.6; it does not answer: CUDA error: device is busy"
    assert found["gpu kernels 8.6"] == "none compiled; faser env --build-kernels --arch 8.6"


def test_modules_that_were_compiled_here_are_listed_also_for_other_machines(tmp_path: Path) -> None:
    for name in ("prefill_64", "decode_64"):
        own = Module(name=name).own_name
        folder = modules_dir(tmp_path, "9.0a") / own
        folder.mkdir(parents=True)
        (folder / f"{own}.so").touch()
    found = cuda_report(NOTHING, tmp_path, tmp_path, ask=ask, driver=tmp_path / "none")
    assert found["gpu kernels 9.0a"] == "decode_64, prefill_64"


def test_the_driver_is_known_by_its_kernel_module(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(DRIVER)
    assert driver_version(file) == "580.95.05"
    file.write_text("something else\n")
    assert driver_version(file) == "unknown"
