"""Makes and packs what a GPU machine without a network lacks: one load, which travels with the checkout.

    python -m benchmarks.gpu.travel.bundle LOAD [--cache DIR] [--vllm] [--modules DIR]

To be run with the versions of Python, torch and Triton of that machine; no GPU is needed. Makes, once, and keeps
in the cache with digests: packages (CARRIED, FlashInfer less the sources that nothing is compiled from there),
modules (FlashInfer's, by CUDA's compiler), triton (the cache of triton_cache.py) and vllm (vllm_tree.py). LOAD
gets an archive of each, and manifest.json with sizes, digests and versions. A load that is too large to travel is
an error that names the sizes.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decoding.environment import needed_modules
from benchmarks.gpu.plan import ON_DEVICE
from benchmarks.gpu.record import Say
from benchmarks.gpu.travel import vllm_tree
from benchmarks.runner import command_line
from faser.config.environment import cache_dir
from faser.files import replacing, write_atomically
from faser.kernels.cuda.flashinfer.build import ARCH, VERSION, Module, build_modules, modules_dir

CARRIED = {
    "flashinfer": f"flashinfer-python=={VERSION}",
    "tvm_ffi": "apache-tvm-ffi==0.1.15.post2",  # what FlashInfer's modules are loaded by; of one version with them
    "llguidance": "llguidance==1.9.1",
    "msgspec": "msgspec==0.22.0",
}
TRITON = "3.6.0"  # of the GPU machine
# Wheels for a machine with a glibc of 2.39 or later; pip takes every tag literally.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def travelling(root: Path) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore; relative to the root. Links travel as links."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [Path(each) for each in sorted(set(listed.split("\0"))) if each]
    return [each for each in found if (root / each).is_symlink() or (root / each).is_file()]


def size_of(path: Path) -> int:
    """Bytes that travel for a file or a link."""
    return path.lstat().st_size


def kept(folder: Path, made_of: str, make: Callable[[Path], None], say: Say) -> Path:
    """The folder; anew where it was made of something else, is not whole, or a file has changed since.

    make: fills a new folder next to it, which then takes its place.
    """
    stamp = folder.with_name(f"{folder.name}.json")
    if folder.is_dir() and stamp.exists():
        known = json.loads(stamp.read_text("utf-8"))
        if known == {"made_of": made_of, "sha256": digest_of(folder)}:
            say(f"{folder.name}: kept")
            return folder
        say(f"{folder.name}: is of {'other files' if known['made_of'] == made_of else 'something else'}")
    say(f"{folder.name}: is being made")
    stamp.unlink(missing_ok=True)
    fresh = folder.with_name(f"{folder.name}.tmp")
    for each in (fresh, folder):
        shutil.rmtree(each, ignore_errors=True)
    fresh.mkdir(parents=True)
    make(fresh)
    fresh.rename(folder)
    write_atomically(stamp, json.dumps({"made_of": made_of, "sha256": digest_of(folder)}) + "\n")
    return folder


def digest_of(folder: Path) -> str:
    """Return a digest of all names and contents, but for byte code."""
    found = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc"):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


MANIFEST = "manifest.json"
_MIB = 1 << 20
_EXPERIMENTS, _IMPORTED = "flashinfer/experimental/", ("__init__.py", "cake_nvfp4_per_token/")
# Attention and products import none of these.
_NEVER = (
    "flashinfer/attention/prims_ts/",
    "flashinfer/cute_dsl/attention/",
    "flashinfer/fused_moe/backends/cudnn_frost/artifacts/",
    "flashinfer/fused_moe/cute_dsl/",
    "flashinfer/moe_ep/kernel_src/",
    "tvm_ffi/3rdparty/",
    "tvm_ffi/include/",
)
_DATA, _SOURCES = "flashinfer/data/", "flashinfer/data/csrc/"
_ROOT = Path(__file__).parents[3]
_KERNELS = _ROOT / "faser" / "kernels" / "cuda" / "triton"
_PYTHON = "{}.{}".format(*sys.version_info[:2])

Run = Callable[[Sequence[str], Mapping[str, str]], None]  # a command, with more in its environment
Member = tuple[str, Path]  # name in the archive, and the file
Json = dict[str, Any]


def main(arguments: list[str], run: Run | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        pack(asked, run or _run, partial(print, flush=True))
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    return 0


def pack(asked: argparse.Namespace, run: Run, say: Say) -> None:
    """Raises ValueError for what cannot be made, and for what is too large to travel."""
    needed = needed_modules(ON_DEVICE)
    made: dict[str, list[Member]] = {}
    made["packages"] = under(packages(asked.cache, run, say), "packages")
    modules = compiled_modules(asked, needed, run, say)
    made["modules"] = [member for each in needed for member in _of_module(asked.modules, each)]
    made["triton"] = under(triton_cache(asked.cache, run, say), "triton")
    if asked.vllm:
        made["vllm"] = under(vllm(asked.cache, run, say), "vllm")
    tree = sum(size_of(asked.root / each) for each in travelling(asked.root))
    fresh = asked.load.with_name(f"{asked.load.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    archives = [archive(asked.cache, name, members, fresh, asked.xz_preset, say) for name, members in made.items()]
    expect_to_travel(archives, tree, asked.travel_mib * _MIB)
    manifest = {
        "archives": archives,
        "shared": vllm_tree.SHARED if asked.vllm else (),
        "tree_bytes": tree,
        "modules": modules,
        "versions": {"python": _PYTHON, "torch": torch.__version__, "triton": _triton_version()},
    }
    write_atomically(fresh / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(asked.load, ignore_errors=True)
    fresh.rename(asked.load)
    say(f"{asked.load}: {sum(each['bytes'] for each in archives) / _MIB:.1f} MiB, next to {tree / _MIB:.1f} MiB")


def expect_to_travel(archives: Sequence[Json], tree: int, most: int) -> None:
    """Raises ValueError that names every size."""
    if tree + sum(each["bytes"] for each in archives) > most:
        sizes = ", ".join(f"{each['name']} {each['bytes'] / _MIB:.1f}" for each in archives)
        raise ValueError(
            f"{sizes} and the checkout {tree / _MIB:.1f} MiB are more than the {most / _MIB:g} MiB that travel"
        )


def packages(cache: Path, run: Run, say: Say) -> Path:
    """Unpack what is used of the wheels."""

    def make(out: Path) -> None:
        for wheel in download(cache / "wheels", run):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(out, [name for name in file.namelist() if is_used(name)])

    return kept(cache / "packages", "\n".join((_PYTHON, *CARRIED.values(), *_NEVER)), make, say)


def download(wheels: Path, run: Run) -> list[Path]:
    """For this Python; without what they depend on, which comes with torch or is there."""
    found = []
    for package in CARRIED.values():
        pattern = f"{package.replace('-', '_').replace('==', '-')}-*.whl"
        if not list(wheels.glob(pattern)):
            run([*pip_download(wheels, _PYTHON), package], {})
        (wheel,) = wheels.glob(pattern)
        found.append(wheel)
    return found


def pip_download(wheels: Path, python: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(wheels)]
    return [*command, *(f"--platform={each}" for each in PLATFORMS)]


def is_used(name: str) -> bool:
    """Return whether a wheel's member is wanted where nothing is compiled.

    FlashInfer reads the templates and sources of a module, which lie directly in one folder, even where it finds
    the module compiled; of the rest only the Python part is used, and of experiments only what is imported.
    """
    if name.startswith(_NEVER):
        return False
    if name.startswith(_DATA):
        return name.startswith(_SOURCES) and "/" not in name.removeprefix(_SOURCES)
    if name.startswith(_EXPERIMENTS):
        return name.endswith(".py") and name.removeprefix(_EXPERIMENTS).startswith(_IMPORTED)
    return name.endswith(".py") or not name.startswith("flashinfer/")


def compiled_modules(asked: argparse.Namespace, needed: Sequence[Module], run: Run, say: Say) -> dict[str, int]:
    """Bytes of every module by its short name. Those that are missing are compiled, for minutes."""
    missing = [each.name for each in needed if not each.is_in([asked.modules])]
    if missing:
        say(f"modules: {', '.join(missing)} are being compiled, for one to four minutes each")
        whole = asked.cache / "whole"
        for wheel in download(asked.cache / "wheels", run):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(whole)
        paths = os.pathsep.join((str(_ROOT), str(whole), os.environ.get("PYTHONPATH", "")))
        build_modules(
            missing, arch=ARCH, out=asked.modules, environment={**os.environ, "PYTHONPATH": paths}, announce=say
        )
        shutil.rmtree(whole)
    else:
        say("modules: kept")
    return {each.name: (asked.modules / each.own_name / f"{each.own_name}.so").stat().st_size for each in needed}


def _of_module(folder: Path, module: Module) -> list[Member]:
    name = module.own_name
    return under(folder / name, f"cache/kernels/{folder.name}/{name}")


def triton_cache(cache: Path, run: Run, say: Say) -> Path:
    """Kernels of this checkout by this Triton; day.py puts them in place. Says so where it is another Triton."""
    if (found := _triton_version()) != TRITON:
        say(f"triton: this is Triton {found}; the GPU machine has {TRITON} and will compile everything anew")

    def make(out: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.travel.triton_cache"]
        paths = os.pathsep.join((str(_ROOT), str(cache / "packages"), os.environ.get("PYTHONPATH", "")))
        run(command, {"TRITON_CACHE_DIR": str(out), "PYTHONPATH": paths})

    return kept(cache / "triton", f"{_PYTHON} {found} {digest_of(_KERNELS)}", make, say)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def vllm(cache: Path, run: Run, say: Say) -> Path:
    made_of = "\n".join((_PYTHON, vllm_tree.VLLM, *vllm_tree.OTHERS, *vllm_tree.UNUSED))

    def make(out: Path) -> None:
        wheels = cache / "vllm-wheels"
        run([*pip_download(wheels, _PYTHON), vllm_tree.VLLM, *vllm_tree.OTHERS], {})
        vllm_tree.make(sorted(wheels.glob("*.whl")), out, say)
        shutil.rmtree(wheels)

    return kept(cache / "vllm", made_of, make, say)


def under(folder: Path, name: str) -> list[Member]:
    """Every file but byte code, links followed, as NAME/…"""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return [(f"{name}/{each.relative_to(folder)}", each) for each in files]


def archive(cache: Path, name: str, members: Iterable[Member], out: Path, preset: int, say: Say) -> Json:
    """OUT/NAME.tar.xz; from the cache where the same files were packed before. A filter helps machine code."""
    packed, stamp = cache / f"{name}.tar.xz", cache / f"{name}.tar.xz.json"
    listed = hashlib.sha256(f"{preset}".encode())
    members = list(members)
    for place, member in members:
        listed.update(f"{place}\0".encode())
        with member.open("rb") as file:
            listed.update(hashlib.file_digest(file, "sha256").digest())
    known = json.loads(stamp.read_text("utf-8")) if stamp.exists() and packed.exists() else {}
    if (known.get("of"), known.get("sha256")) != (listed.hexdigest(), _digest(packed) if known else None):
        say(f"{name}: packing {sum(member.stat().st_size for _, member in members) / _MIB:.0f} MiB")
        filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset | lzma.PRESET_EXTREME}]
        with (
            replacing(packed) as new,
            lzma.open(new, "wb", filters=filters) as content,
            tarfile.open(fileobj=content, mode="w", dereference=True) as file,
        ):
            for place, member in members:
                file.add(member, place, recursive=False)
        write_atomically(stamp, json.dumps({"of": listed.hexdigest(), "sha256": _digest(packed)}) + "\n")
    shutil.copyfile(packed, out / packed.name)
    say(f"{name}: {packed.stat().st_size / _MIB:.1f} MiB")
    return {"name": packed.name, "bytes": packed.stat().st_size, "sha256": _digest(packed)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: Sequence[str], more: Mapping[str, str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, **more}, cwd=_ROOT)


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    add = made.add_argument
    add("load", type=Path, metavar="LOAD")
    add("--cache", type=Path, metavar="DIR", default=cache_dir() / "gpu-day", help="what is kept [%(default)s]")
    add("--vllm", action="store_true", help="with vLLM, for run d")
    add("--modules", type=Path, metavar="DIR", default=modules_dir(cache_dir() / "kernels", ARCH))
    add("--travel-mib", type=int, default=64, help="most of the load and the checkout together [64]")
    add("--xz-preset", type=int, choices=range(10), default=9, help="smaller or sooner [9]")
    add("--root", type=Path, default=_ROOT, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
