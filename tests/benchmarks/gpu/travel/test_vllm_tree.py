"""The vLLM that is carried along, of made-up wheels and a library with four containers of code."""

import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.travel.vllm_tree import containers, cut, make

PTX, ELF = 1, 2
LIBRARY = "vllm/_C_stable_libtorch.abi3.so"


def entry(kind: int, arch: int, code: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0, 64, len(code))
    struct.pack_into("<I", header, 0x1C, arch)
    return bytes(header) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


CONTAINERS = (
    container(entry(ELF, 80, b"a" * 24), entry(ELF, 90, b"b" * 16), entry(PTX, 90, b"p" * 8)),
    container(entry(PTX, 80, b"c" * 8), entry(ELF, 100, b"d" * 40)),
    container(entry(ELF, 100, b"e" * 40), entry(ELF, 120, b"f" * 8)),
    container(entry(ELF, 90, b"g" * 8)),
)


def library() -> bytes:
    """An ELF file with its names and one section of device code."""
    code = b"".join(CONTAINERS)
    names = b"\0.shstrtab\0.nv_fatbin\0".ljust(24, b"\0")
    headers = [(0, 0), (len(b"\0.shstrtab\0"), len(code)), (1, len(names))]
    offsets = [0, 64, 64 + len(code)]
    table = 64 + len(code) + len(names)
    found = bytearray(b"\x7fELF\x02".ljust(64, b"\0") + code + names)
    struct.pack_into("<Q", found, 0x28, table)
    struct.pack_into("<HHH", found, 0x3A, 64, len(headers), 2)
    for (name, size), offset in zip(headers, offsets, strict=True):
        found += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 0, 0)
    return bytes(found)


def code_of(data: bytes | bytearray) -> list[list[tuple[int, int, bytes]]]:
    return [
        [(each.kind, each.arch, bytes(data[each.at + 64 : each.at + each.size])) for each in entries]
        for _, _, _, entries in containers(data)
    ]


def test_a_library_keeps_the_code_of_one_gpu_and_its_length() -> None:
    """Planted: PTX kept next to code; a container left empty; entries that do not move to the front."""
    whole = library()
    data = bytearray(whole)
    dropped = cut(data, 90)
    assert len(data) == len(whole)
    assert dropped == (64 + 24) + (64 + 8) + (64 + 40) + (64 + 40)
    assert code_of(data) == [
        [(ELF, 90, b"b" * 16)],
        [(PTX, 80, b"c" * 8)],
        [(ELF, 120, b"f" * 8)],
        [(ELF, 90, b"g" * 8)],
    ]


def test_what_is_no_library_with_that_code_is_refused() -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        cut(bytearray(b"text"), 90)
    with pytest.raises(ValueError, match="no code for sm_75"):
        cut(bytearray(library()), 75)


def test_a_tree_has_vllm_less_what_is_unused_and_the_other_packages(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm-0.24.0-cp38-abi3-any.whl", "w") as wheel:
        for name in ("vllm/__init__.py", "vllm/third_party/deep_gemm/large.so", "vllm/_qutlass_C.abi3.so"):
            wheel.writestr(name, name)
        wheel.writestr(LIBRARY, library())
    with zipfile.ZipFile(tmp_path / "msgspec-0.22.0-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "")
    out, said = tmp_path / "vllm-tree", list[str]()
    make(sorted(tmp_path.glob("*.whl")), out, said.append)
    files = {str(each.relative_to(out)) for each in out.rglob("*") if each.is_file()}
    assert files == {"vllm/__init__.py", "msgspec/__init__.py", LIBRARY}
    assert (out / LIBRARY).read_bytes() != library()
    assert said == ["_C_stable_libtorch.abi3.so: 0 MB of code for other GPUs are zeros now"]
