"""The launcher compiled ahead of time: Triton takes it from its cache where there is no compiler."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from faser.errors import ConfigError
from faser.kernels.cpu.build import find_compiler
from faser.kernels.cuda.triton.launcher import build

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    find_compiler(("gcc", "clang", "cc")) is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs a C compiler and Python's headers",
)

# As Triton loads its launcher once there is a GPU: backends/nvidia/driver.py, CudaUtils.
_LOAD = """
import sys
from pathlib import Path
import triton
from triton.runtime.build import compile_module_from_src
from faser.kernels.cuda.triton.launcher import add_to_cache
if sys.argv[1:]:
    assert add_to_cache(Path(sys.argv[1]))
source = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"
print(callable(compile_module_from_src(src=source.read_text(), name="cuda_utils").load_binary))
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("prebuilt"))


def stub_driver(folder: Path, launcher: Path) -> None:
    """A libcuda.so.1 that defines what the launcher imports of it."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(launcher)], capture_output=True, text=True, check=True
    )
    names = [word for word in listed.stdout.split() if word.startswith("cu")]
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in names))
    compiler = find_compiler(("gcc", "clang", "cc"))
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)


def load(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": str(folder / "no-programs"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "LD_LIBRARY_PATH": str(folder),
    }
    command = [sys.executable, "-c", _LOAD, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_triton_loads_its_launcher_without_a_compiler(tmp_path: Path, launcher: Path) -> None:
    """Oracle: without the module in its cache Triton asks for a compiler."""
    stub_driver(tmp_path, launcher)
    assert "C compiler" in load(tmp_path).stderr
    done = load(tmp_path, str(launcher.parent))
    assert done.stdout.split() == ["True"], done.stderr
    assert load(tmp_path).stdout.split() == ["True"]


def test_without_a_compiler_it_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looked for no-such-compiler"):
        build(tmp_path, compilers=["no-such-compiler"])
