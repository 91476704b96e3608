"""`python -m deploy.wheel [--out dist]`: builds the wheels, audits them, and writes their checksums.

Two wheels: one for Linux on x86-64 with compiled kernels for every CPU, and one for any platform, which compiles
them where it starts. Run it in a checkout; SOURCE_DATE_EPOCH, or else the time of the commit, dates the contents.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from deploy.wheel.audit import faults, stray
from deploy.wheel.bill_of_materials import NAME, bill_of_materials
from deploy.wheel.libraries import compile_library, compiler_version
from deploy.wheel.pack import PLATFORM, pack, requirements
from faser import __version__
from faser.errors import ConfigError
from faser.kernels.cpu.build import isas_of, prebuild

ROOT = Path(__file__).parents[2]
_METADATA = ("pyproject.toml", "README.md", "LICENSE")
_BUILDERS = ("setuptools", "ziglang")


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a wheel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m deploy.wheel", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="where to")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    epoch_s = source_date()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pure = build_pure(ROOT, Path(folder), epoch_s)
        _say(f"compiling kernels for {', '.join(isas_of('x86_64'))}")
        try:
            libraries = prebuild(Path(folder, "prebuilt"), isas_of("x86_64"), compile_library)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        bom = bill_of_materials(
            version=__version__,
            requires=requirements(pure),
            llvm=compiler_version(),
            tools={name: version(name) for name in _BUILDERS},
            epoch_s=epoch_s,
        )
        contents = {path.name: path.read_bytes() for path in libraries}
        wheels = [pack(pure, contents, {NAME: bom}, out, epoch_s=epoch_s), Path(shutil.copy(pure, out))]
    _say(f"built in {time.monotonic() - began_s:.0f} s")
    good = [_audit(each) for each in wheels]
    _write_sums(out, wheels)
    return 0 if all(good) else 1


def source_date() -> int:
    """Unix time that dates the contents: SOURCE_DATE_EPOCH, else the time of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def build_pure(root: Path, folder: Path, epoch_s: int) -> Path:
    """The wheel for any platform, of a clean copy of the sources: no leftover of another build gets into it."""
    copy = folder / "source"
    shutil.copytree(root / "faser", copy / "faser", ignore=_leftovers, copy_function=shutil.copyfile)
    for name in _METADATA:
        shutil.copyfile(root / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(copy)]
    subprocess.run(command, check=True, umask=0o022, env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch_s)})
    (wheel,) = folder.glob("*.whl")
    return wheel


def _leftovers(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "prebuilt" or stray(name)]


def _audit(wheel: Path) -> bool:
    """Print what is in a wheel and every fault; returns whether there is none."""
    _say(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    found = faults(wheel, ROOT / "faser")
    for fault in found:
        _say(f"  fault: {fault}")
    commands: list[tuple[str, ...]] = [("twine", "check", "--strict", str(wheel))]
    if wheel.name.endswith(f"{PLATFORM}.whl"):
        commands.append(("auditwheel", "show", str(wheel)))
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        said = (done.stdout + done.stderr).strip()
        _say("\n".join(f"  {line}" for line in said.splitlines() if line.strip()))
        if done.returncode != 0 or (command[0] == "auditwheel" and "manylinux" not in said):
            found.append(command[0])
    return not found


def _write_sums(out: Path, wheels: list[Path]) -> None:
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in sorted(wheels)]
    (out / "SHA256SUMS").write_text("".join(lines))
    _say("".join(lines))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
