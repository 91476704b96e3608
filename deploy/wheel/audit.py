"""Audit of a wheel: its record, its tags, what it lacks, and what its libraries need or give away.

Beside auditwheel, which knows libraries alone. Runs nothing of the wheel except that it loads the libraries that
this CPU can run.
"""

import base64
import csv
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from deploy.wheel.libraries import GLIBC
from deploy.wheel.pack import PLATFORM, PREBUILT
from faser.errors import ConfigError
from faser.kernels.cpu.build import isas_of, prebuilt_name, runnable_isas
from faser.kernels.cpu.library import load

MAX_BYTES = 100 << 20  # what PyPI takes of a project that has not asked for more
_MAY_NEED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
_PATHS = (b"/tmp/", b"/home/", b"/root/", b"/usr/", b"/build", b"site-packages")  # of the machine that built it
_STRAY = (".pyc", ".o", ".orig", ".swp")
_EXECUTABLE = 1  # a segment's flag


def faults(wheel: Path, package: Path) -> list[str]:
    """Each fault in a line; none: the wheel is good. package: the folder faser that it was made of."""
    with zipfile.ZipFile(wheel) as source:
        members = {name: source.read(name) for name in source.namelist()}
        repeated = len(source.namelist()) - len(members)
    found = [f"{repeated} members have the name of another"] if repeated else []
    found += (
        [f"{wheel.stat().st_size} bytes; the limit is {MAX_BYTES}"] if wheel.stat().st_size > MAX_BYTES else []
    )
    found += [*_record_faults(members), *_content_faults(members, package)]
    if wheel.name.endswith(f"-{PLATFORM}.whl"):
        found += _platform_faults(members)
        libraries = {PurePosixPath(name).name: each for name, each in members.items() if name.startswith(PREBUILT)}
        for name, content in libraries.items():
            found += [f"{name}: {fault}" for fault in library_faults(content)]
        found += _loading_faults(libraries)
    return found


def _record_faults(members: dict[str, bytes]) -> Iterator[str]:
    (record,) = [name for name in members if name.endswith(".dist-info/RECORD")]
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(members[record].decode()))}
    for name in sorted(members.keys() ^ rows.keys()):
        yield f"{name} is {'not in RECORD' if name in members else 'in RECORD alone'}"
    for name in sorted(members.keys() & rows.keys() - {record}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(members[name]).digest()).rstrip(b"=").decode()
        if rows[name] != (f"sha256={digest}", str(len(members[name]))):
            yield f"{name} is not what RECORD says"
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            yield f"{name} lies outside of the wheel"


def _content_faults(members: dict[str, bytes], package: Path) -> Iterator[str]:
    """Every file of the package is inside, as it is; and nothing else but metadata and compiled kernels."""
    own = {
        f"faser/{path.relative_to(package).as_posix()}": path
        for path in package.rglob("*")
        if path.is_file() and "prebuilt" not in path.parts and not stray(path.as_posix())
    }
    for name, path in sorted(own.items()):
        if members.get(name) != path.read_bytes():
            yield f"{name} {'differs from its source' if name in members else 'is missing'}"
    for name in sorted(members):
        if name not in own and not name.startswith(PREBUILT) and ".dist-info/" not in name:
            yield f"{name} does not belong into it"


def stray(path: str) -> bool:
    """Return whether a file is what tools leave behind."""
    return "__pycache__" in PurePosixPath(path).parts or path.endswith(_STRAY)


def _platform_faults(members: dict[str, bytes]) -> Iterator[str]:
    (about,) = [content.decode() for name, content in members.items() if name.endswith(".dist-info/WHEEL")]
    for line in ("Root-Is-Purelib: false", f"Tag: py3-none-{PLATFORM}"):
        if line not in about.splitlines():
            yield f"WHEEL lacks the line {line}"
    needed = {f"{PREBUILT}/{prebuilt_name(isa)}" for isa in isas_of("x86_64")}
    there = {name for name in members if name.startswith(PREBUILT)}
    for name in sorted(needed ^ there):
        yield f"{name} is {'missing' if name in needed else 'of other sources or flags'}"


def library_faults(content: bytes) -> Iterator[str]:
    """Yield what would keep a library from loading on another machine, or tells of the machine that built it."""
    try:
        elf = ELFFile(io.BytesIO(content))
    except ELFError as error:
        yield f"is no library: {error}"
        return
    if (elf["e_machine"], elf["e_type"]) != ("EM_X86_64", "ET_DYN"):
        yield f"is {elf['e_type']} for {elf['e_machine']}; it must be a library for x86-64"
        return
    for segment in elf.iter_segments("PT_GNU_STACK"):
        if segment["p_flags"] & _EXECUTABLE:
            yield "asks for a stack that can be executed"
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            yield from _dynamic_faults(section)
        elif isinstance(section, GNUVerNeedSection):
            yield from _version_faults(section)
        elif isinstance(section, SymbolTableSection):
            yield from _symbol_faults(section)
        elif section.name.startswith(".debug"):
            yield f"has the section {section.name}"
    for path in _PATHS:
        if (at := content.find(path)) >= 0:
            yield f"holds a path: {content[at : at + 60].split(bytes(1))[0].decode(errors='replace')}"


def _dynamic_faults(section: DynamicSection) -> Iterator[str]:
    for tag in section.iter_tags():
        if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in _MAY_NEED:
            yield f"needs {tag.needed}"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"):
            yield f"has {tag.entry.d_tag}"


def _version_faults(section: GNUVerNeedSection) -> Iterator[str]:
    for library, versions in section.iter_versions():
        for version in versions:
            family, _, number = version.name.partition("_")
            if family != "GLIBC" or tuple(map(int, number.split("."))) > GLIBC:
                yield f"needs {version.name} of {library.name}"


def _symbol_faults(section: SymbolTableSection) -> Iterator[str]:
    if section.name == ".symtab":
        yield "has symbols for debuggers"
        return
    for symbol in section.iter_symbols():
        if symbol.name and symbol["st_shndx"] != "SHN_UNDEF" and not symbol.name.startswith("faser_"):
            yield f"shows {symbol.name}"


def _loading_faults(libraries: dict[str, bytes]) -> Iterator[str]:
    """Functions that the Python side expects are in every library that this CPU may load."""
    with tempfile.TemporaryDirectory() as folder:
        for isa in runnable_isas():
            name = prebuilt_name(isa)
            if name not in libraries:
                continue
            path = Path(folder, name)
            path.write_bytes(libraries[name])
            try:
                load(path)
            except (ConfigError, AttributeError) as error:
                yield f"{name}: {error}"
