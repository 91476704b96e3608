"""Compiles the kernels for a wheel, so that they load on every Linux with glibc 2.28 or later.

The compiler is zig's clang, which knows the symbols of every glibc and brings a C++ library to link in. Only the
kernels' own functions are visible in the result: nothing of its C++ library meets that of torch.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faser.errors import ConfigError
from faser.kernels.cpu.build import Isa

GLIBC = (2, 28)
_COMPILER = (sys.executable, "-m", "ziglang", "c++", "-target", f"x86_64-linux-gnu.{GLIBC[0]}.{GLIBC[1]}")
# Clang's own order of instructions moves accumulators of the widest tile to memory: products take 15 % longer.
_IN_ORDER = ("-mllvm", "-enable-misched=false")
_EXPORTS = "{ global: faser_*; local: *; };\n"


def compile_library(isa: Isa, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """Compile a library: see faser.kernels.cpu.build.Compile. The same sources make the same bytes anywhere.

    Linked for the plain x86-64: zig compiles its C++ library for the instruction set that the link names.
    """
    compiling = tuple(flag for flag in flags if flag != "-shared") + _IN_ORDER
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(source: Path) -> str:
            compiled = f"{folder}/{source.stem}.o"
            _run(isa, source.parent, *compiling, "-c", source.name, "-o", compiled)
            return compiled

        compiled = list(pool.map(compile_one, sources))
        exports = Path(folder, "exports.map")
        exports.write_text(_EXPORTS)
        options = ("-shared", "-s", "-pthread", f"-Wl,--version-script={exports}", "-Wl,-z,noexecstack")
        _run(isa, Path(folder), *options, *compiled, "-o", str(target.resolve()))
    target.chmod(0o755)


def compiler_version() -> str:
    """The version of LLVM, whose C++ library is in the kernels."""
    said = subprocess.run([*_COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("clang version ")[2].split()[0]


def _run(isa: Isa, folder: Path, *arguments: str) -> None:
    done = subprocess.run([*_COMPILER, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"zig could not compile the native kernels for {isa}:\n{done.stderr}")
