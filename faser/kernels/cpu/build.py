"""Compiles the C++ kernels for an instruction set, and finds the compiled library.

Owns instruction sets, compiler flags, file names and the cache. Knows nothing of torch or of what the kernels
compute. `python -m faser.kernels.cpu.build --prebuild` puts the libraries into the package, so that a container
image needs no compiler; deploy/wheel does so for a wheel.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from faser.config.environment import cpu_isa
from faser.errors import ConfigError
from faser.files import remove_stale, replacing
from faser.machine import usable_cores
from faser.processes import run_all_watched
from faser.types.engine import ProgressCallback

SOURCE_DIR = Path(__file__).parent / "native"
PREBUILT_DIR = SOURCE_DIR / "prebuilt"
COMPILERS = ("g++", "clang++", "c++")
COMPILING = "compiling kernels for this CPU, once"
_LEFTOVERS = (".*.tmp", "tmp*")  # of compilations that were killed; the second of earlier versions
_NO_SPACE = os.strerror(errno.ENOSPC)
_log = logging.getLogger("faser")
_ERROR_LINES = 8  # of the compiler's output: the first error names the cause, the rest follow from it
_POLL_S = 0.1
# No contraction: a multiply-add is fused only where the source says so, hence alike in every kernel that inlines
# it.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wall")
_CPUINFO = Path("/proc/cpuinfo")


class Isa(StrEnum):
    """Instruction sets the kernels are compiled for, best first.

    AMX computes products and attention in bfloat16 by tiles, whose bits differ from those of the others. A CPU
    without tiles emulates them if it is asked for this set and has AVX-512 VNNI: slowly, but with the same bits.
    """

    AMX = "amx"
    AVX512_BF16 = "avx512bf16"
    AVX512_VNNI = "avx512vnni"
    AVX512 = "avx512"
    AVX2_VNNI = "avx2vnni"
    AVX2 = "avx2"
    DOTPROD = "dotprod"
    GENERIC = "generic"


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_AVX2 = ("avx2", "fma", "f16c")
# As /proc/cpuinfo spells them; on x86 the compiler's flags are the same words without underscores.
_CPU_FEATURES = {
    Isa.AMX: (*_AVX512, "avx512_vnni"),
    Isa.AVX512_BF16: (*_AVX512, "avx512_vnni", "avx512_bf16"),
    Isa.AVX512_VNNI: (*_AVX512, "avx512_vnni"),
    Isa.AVX512: _AVX512,
    Isa.AVX2_VNNI: (*_AVX2, "avx_vnni"),
    Isa.AVX2: _AVX2,
    Isa.DOTPROD: ("asimddp",),
    Isa.GENERIC: (),
}
_TILE_FEATURES = ("amx_tile", "amx_bf16", "amx_int8")
_ISAS = {
    **dict.fromkeys(("x86_64", "AMD64"), tuple(each for each in Isa if each is not Isa.DOTPROD)),
    **dict.fromkeys(("aarch64", "arm64"), (Isa.DOTPROD, Isa.GENERIC)),
}
LOW_BIT_INSTRUCTIONS = {
    Isa.AMX: "tdpbssd, and vpdpbusd, 512 bits, for few rows",
    Isa.AVX512_BF16: "vpdpbusd, 512 bits",
    Isa.AVX512_VNNI: "vpdpbusd, 512 bits",
    Isa.AVX512: "vpmaddubsw, 512 bits",
    Isa.AVX2_VNNI: "vpdpbusd, 256 bits",
    Isa.AVX2: "vpmaddubsw, 256 bits",
    Isa.DOTPROD: "sdot, 128 bits",
    Isa.GENERIC: "no instruction for them",
}
# (instruction set, flags, sources, the library to write): compiles, or raises ConfigError.
Compile = Callable[[Isa, Sequence[str], Sequence[Path], Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """The library for a CPU. compiler: compiles it unless path exists; None: the library came with the package."""

    isa: Isa
    path: Path
    compiler: str | None

    @property
    def origin(self) -> str:
        if self.compiler is None:
            return "from the package"
        return "compiled here" if self.path.exists() else f"to be compiled by {self.compiler}"


def library_path(
    isa: Isa | None = None,
    *,
    cache_dir: Path,
    compilers: Sequence[str] = COMPILERS,
    prebuilt_dir: Path = PREBUILT_DIR,
    progress: ProgressCallback | None = None,
) -> Path:
    """The compiled library for this CPU (or for isa), built now unless the package or the cache has it.

    Several processes may call this at once: one compiles, and the others wait for it.
    progress: called with (COMPILING, 0, 0) several times a second; what it raises ends the compiler.
    Raises ConfigError as find_library does, and with the compiler's first lines if it fails.
    """
    found = find_library(isa, cache_dir=cache_dir, compilers=compilers, prebuilt_dir=prebuilt_dir)
    if found.compiler is not None:
        remove_stale(cache_dir, *_LEFTOVERS)
        if not found.path.exists():
            _compile(found.compiler, found.isa, found.path, progress or _silent)
    return found.path


def find_library(
    isa: Isa | None = None,
    *,
    cache_dir: Path,
    compilers: Sequence[str] = COMPILERS,
    prebuilt_dir: Path = PREBUILT_DIR,
) -> NativeLibrary:
    """The library that library_path returns; compiles nothing.

    Raises ConfigError if none came with the package that fits and there is no compiler, and as chosen_isa does.
    """
    isa = chosen_isa() if isa is None else isa
    if (prebuilt := _prebuilt(isa, prebuilt_dir)) is not None:
        return NativeLibrary(isa=isa, path=prebuilt, compiler=None)
    compiler = find_compiler(compilers)
    if compiler is None:
        raise ConfigError(
            f"no C++ compiler found (looked for {', '.join(compilers)}) and no kernels for {isa} came with the "
            "package; install g++"
        )
    digest = _digest(_read_sources(), *_flags(isa), _version(compiler))
    return NativeLibrary(isa=isa, path=cache_dir / f"{isa}-{digest}.so", compiler=compiler)


def can_build(*, compilers: Sequence[str] = COMPILERS, prebuilt_dir: Path = PREBUILT_DIR) -> bool:
    """Return whether library_path finds a prebuilt library or a compiler."""
    return _prebuilt(chosen_isa(), prebuilt_dir) is not None or find_compiler(compilers) is not None


def chosen_isa() -> Isa:
    """The instruction set that the variable FASER_CPU_ISA names, else the best of this CPU.

    Raises ConfigError for one that there is not or that the CPU lacks.
    """
    asked, runnable = cpu_isa(), runnable_isas()
    if asked is None:
        return runnable[0]
    if asked not in tuple(Isa):
        raise ConfigError(f"the variable FASER_CPU_ISA is {asked}; it must be one of {', '.join(Isa)}")
    if asked not in runnable:
        raise ConfigError(f"the variable FASER_CPU_ISA is {asked}; this CPU has {', '.join(runnable)}")
    return Isa(asked)


def runnable_isas(
    cpuinfo: Path = _CPUINFO, machine: str | None = None, *, permits_tiles: Callable[[], bool] | None = None
) -> tuple[Isa, ...]:
    """The instruction sets that this CPU has, best first; generic always.

    permits_tiles: asked where the CPU has tiles; None: the system is.
    """
    if not cpuinfo.exists():
        return (Isa.GENERIC,)
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):  # the words of x86 and of aarch64
            flags.update(line.partition(":")[2].split())
            break
    found = [isa for isa in isas_of(machine or platform.machine()) if flags.issuperset(_CPU_FEATURES[isa])]
    if Isa.AMX in found and not (flags.issuperset(_TILE_FEATURES) and (permits_tiles or _permits_tiles)()):
        found.remove(Isa.AMX)
        found.insert(found.index(Isa.AVX512_VNNI) + 1, Isa.AMX)  # emulated
    return tuple(found)


@functools.cache
def _permits_tiles() -> bool:
    """Ask Linux whether this process may use tiles. If not, a warning says so, once."""
    ask, state_of_tiles = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XTILEDATA; 158: arch_prctl
    if ctypes.CDLL(None, use_errno=True).syscall(158, ask, state_of_tiles) == 0:
        return True
    _log.warning(
        "this CPU has AMX, but the system refuses its tiles (%s); products use AVX-512",
        os.strerror(ctypes.get_errno()),
    )
    return False


def isas_of(machine: str) -> tuple[Isa, ...]:
    """The instruction sets of an architecture, by the name that platform.machine() gives it."""
    return _ISAS.get(machine, (Isa.GENERIC,))


def compiler_flags(isa: Isa) -> tuple[str, ...]:
    """Return the flags that make g++ and clang++ compile for an instruction set."""
    if isa is Isa.DOTPROD:
        return ("-mcpu=generic+dotprod",)
    tiles = ("-DFASER_TILES",) if isa is Isa.AMX else ()  # written in assembly: they need no flags
    return (*(f"-m{feature.replace('_', '')}" for feature in _CPU_FEATURES[isa]), *tiles)


def _prebuilt(isa: Isa, directory: Path) -> Path | None:
    """The library that came with the package; None: none came, or it does not fit, of which a warning tells."""
    path = directory / prebuilt_name(isa)
    return path if any(directory.glob("*.so")) and _can_load(path) else None


@functools.cache
def _can_load(path: Path) -> bool:
    """Return whether this process can load a library. If not, a warning says why, once."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("the compiled kernels that came with the package do not fit this machine: %s", error)
        return False
    return True


def find_compiler(compilers: Sequence[str] = COMPILERS) -> str | None:
    return next((path for name in compilers if (path := shutil.which(name))), None)


def prebuilt_name(isa: Isa) -> str:
    """Names what a library is compiled from: one of other sources or flags is not taken for it."""
    return f"{isa}-{_digest(_read_sources(), *_flags(isa))}.so"


def prebuild(directory: Path, isas: Sequence[Isa], compile_with: Compile | None = None) -> list[Path]:
    """Compile for every isa into directory, under the names that library_path looks for.

    compile_with: None: the compiler of this machine, whose libraries may not load on machines with older ones.
    """
    compile_with = compile_with or _compiler_here()
    directory.mkdir(parents=True, exist_ok=True)  # readable to all, unlike a cache
    targets = [directory / prebuilt_name(isa) for isa in isas]
    for isa, target in zip(isas, targets, strict=True):
        compile_with(isa, _flags(isa), [path for path in _source_files() if path.suffix == ".cpp"], target)
    return targets


def _compiler_here() -> Compile:
    """Return what compiles with this machine's compiler. Raises ConfigError where there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    return lambda isa, _flags, _sources, target: _compile(compiler, isa, target, _silent)


def _silent(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


def _compile(compiler: str, isa: Isa, target: Path, progress: ProgressCallback) -> None:
    """Compile into a temporary file in the target's folder, then rename: no process ever sees half a library."""

    def watch() -> None:
        progress(COMPILING, 0, 0)

    watch()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone_in(target.parent, watch):
            if target.exists():  # another process has compiled it meanwhile
                return
            with replacing(target) as new:
                _compile_into(new, compiler, isa, target.parent, watch)
                new.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"cannot write compiled kernels to {target.parent}: {error.strerror}; the variable FASER_CACHE_DIR "
            f"names another folder"
        ) from error


@contextlib.contextmanager
def _alone_in(folder: Path, watch: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, so that servers that start together do not compile the same side by side.

    watch: called while another process holds it. A file system without locks has none to wait for.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
                watch()
                continue
            except OSError:
                pass
            break
        yield
    finally:
        os.close(descriptor)


def _compile_into(new: Path, compiler: str, isa: Isa, cache: Path, watch: Callable[[], None]) -> None:
    """Compile the sources, as many at once as there are cores, and link them. Raises ConfigError."""
    sources = sorted((path for path in _source_files() if path.suffix == ".cpp"), key=_size, reverse=True)
    with tempfile.TemporaryDirectory(prefix="faser-kernels-") as folder:
        objects = [f"{folder}/{number}.o" for number in range(len(sources))]
        flags = [flag for flag in _flags(isa) if flag != "-shared"]
        compiling = [
            [compiler, *flags, "-c", str(source), "-o", compiled]
            for source, compiled in zip(sources, objects, strict=True)
        ]
        linking = [compiler, *_flags(isa), *objects, "-o", str(new)]
        for commands in (compiling, [linking]):
            for done in run_all_watched(commands, watch, at_once=usable_cores()):
                if done.status != 0:
                    _refuse_full_disk(done.stderr, cache)
                    said = "\n".join(done.stderr.splitlines()[:_ERROR_LINES])
                    raise ConfigError(f"{compiler} could not compile the native kernels for {isa}:\n{said}")


def _size(path: Path) -> int:
    return path.stat().st_size


def _refuse_full_disk(stderr: str, folder: Path) -> None:
    """Raises ConfigError, in one line, if the compiler failed for want of space."""
    line = next((line for line in stderr.splitlines() if _NO_SPACE in line), None)
    if line is not None:
        raise ConfigError(
            f"cannot compile kernels into {folder}, with temporary files in {tempfile.gettempdir()}: "
            f"{line.strip()}; the variables FASER_CACHE_DIR and TMPDIR name other folders"
        )


def _flags(isa: Isa) -> tuple[str, ...]:
    return _FLAGS + compiler_flags(isa)


@functools.cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCE_DIR.rglob("*") if path.suffix in (".cpp", ".h"))


@functools.cache
def _read_sources() -> str:
    return "\0".join(f"{path.relative_to(SOURCE_DIR)}\0{path.read_text()}" for path in _source_files())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build for every instruction set of this machine's architecture."""
    parser = argparse.ArgumentParser(prog="python -m faser.kernels.cpu.build", description=__doc__)
    parser.add_argument(
        "--prebuild", type=Path, nargs="?", const=PREBUILT_DIR, required=True, metavar="DIR", help="where to"
    )
    directory: Path = parser.parse_args(arguments).prebuild
    for path in prebuild(directory, isas_of(platform.machine())):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
