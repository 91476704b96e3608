"""Triton's launcher, compiled ahead of time: the one C module that Triton 3.7 needs on a machine with a GPU.

Triton compiles kernels with what its package brings, but the module that loads and launches them with the
machine's C compiler, once; then it is in Triton's cache. An image without a compiler carries the module, and
add_to_cache puts it where Triton looks. `python -m faser.kernels.cuda.triton.launcher` compiles it; that needs no
GPU and no driver.

The module of Triton 3.6 only loads kernels. That version compiles another module for every signature that is
launched, so it needs the compiler on the machine.
"""

import argparse
import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from faser.errors import ConfigError
from faser.files import replacing
from faser.kernels.cpu.build import find_compiler

PREBUILT_DIR = Path(__file__).parent / "prebuilt"
_NAME = "cuda_utils"  # Triton's own name of the module
_DRIVER = "libcuda.so.1"
_ERROR_LINES = 8


def build(directory: Path, *, compilers: Sequence[str] = ("gcc", "clang", "cc")) -> Path:
    """Compile the launcher of the installed Triton into directory, under the name that add_to_cache looks for.

    Raises ConfigError without a C compiler, and with the compiler's first lines if it fails: Python's headers may
    be missing.
    """
    compiler = find_compiler(compilers)
    if compiler is None:
        raise ConfigError(f"no C compiler found (looked for {', '.join(compilers)})")
    source = _source()
    headers = [sysconfig.get_path("include", _scheme()), str(source.parent / "include")]
    target = directory / _file_name(source)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faser-launcher-") as work, replacing(target) as new:
        _run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-xc", "/dev/null", "-o", f"{work}/{_DRIVER}"]
        )
        flags = ("-O3", "-shared", "-fPIC", "-Wno-psabi", f"-L{work}", *(f"-I{each}" for each in headers))
        # Linkers may leave out a library of which nothing is used, as of this empty one.
        _run([compiler, str(source), *flags, "-o", str(new), "-Wl,--no-as-needed", f"-l:{_DRIVER}"])
        new.chmod(0o755)
    return target


def add_to_cache(directory: Path = PREBUILT_DIR) -> bool:
    """Put the module that build made into Triton's cache, before Triton looks for it; whether it is there then.

    False: none was built for this Triton and this Python. Triton then needs a C compiler.
    """
    from triton.runtime.cache import get_cache_manager

    source = _source()
    prebuilt = directory / _file_name(source)
    cache, name = get_cache_manager(_key(source)), f"{_NAME}{_suffix()}"
    if cache.get_file(name) is None:
        if not prebuilt.exists():
            return False
        cache.put(prebuilt.read_bytes(), name, binary=True)
    return True


def _source() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"


def _key(source: Path) -> str:
    """Triton's key of the module on this machine: in triton/runtime/build.py, compile_module_from_src.

    It depends on whether the program `file` is installed, by platform.architecture, so a file is not named by it.
    """
    from triton.runtime.build import platform_key

    return hashlib.sha256((source.read_text() + platform_key()).encode("utf-8")).hexdigest()


def _file_name(source: Path) -> str:
    return f"{_NAME}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}{_suffix()}"


def _suffix() -> str:
    """Names the version of Python, which Triton's key does not."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _scheme() -> str:
    """Debian's default scheme names a folder for packages installed locally, without headers."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme in ("posix_local", "venv") else scheme


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[:_ERROR_LINES])
        raise ConfigError(f"{command[0]} could not compile Triton's launcher:\n{said}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m faser.kernels.cuda.triton.launcher", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=PREBUILT_DIR)
    directory: Path = parser.parse_args(arguments).directory
    sys.stdout.write(f"{build(directory)}\n")


if __name__ == "__main__":
    main()
