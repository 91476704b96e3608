"""A vLLM that is small enough to be carried to a machine without a network with one Hopper GPU.

It can be imported from, on a machine that has torch 2.11 and transformers: vLLM, less what dense models in
bfloat16 do not use there, its main library with the code of one GPU only; and the packages that vLLM imports and
such a machine lacks. It has run on an H200.
"""

import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import Say

VLLM = "vllm==0.24.0"
# Imported by vLLM, the API client included; a machine with torch and transformers has the rest.
OTHERS = tuple(
    """
    annotated-types==0.8.0 cachetools==8.0.0 cbor2==6.2.1 fastapi==0.136.3
    httpcore2==2.16.2 httpx2==2.16.2 jiter==0.19.0 more-itertools==11.2.1 msgspec==0.22.0
    openai==3.52.0 openai-harmony==0.0.8 opentelemetry-api==1.45.2 partial-json-parser==0.2.1.1.post7
    pybase64==1.5.1 pydantic==2.14.3 pydantic-core==2.50.4 pyzmq==27.3.0 sniffio==1.3.1 starlette==1.10.0
    truststore==0.10.5 typing-inspection==0.4.5 uvicorn==0.54.0 xgrammar==0.2.8
    """.split()  # noqa: SIM905
)
# Imported by it as well, with what is known of their versions, from the packages that FASER needs (carried.py).
SHARED = ("llguidance*", "tvm_ffi", "apache_tvm_ffi*")
# Attention of other GPUs, mixtures of experts, latent attention, four bits, and the front end in Rust.
UNUSED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/_rust_tool_parser.abi3.so",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
)
_CUT = "vllm/_C_stable_libtorch.abi3.so"
_ARCH = 90
_MAGIC, _PTX, _ELF = 0xBA55ED50, 1, 2  # of a container of device code, and of the kinds of code in it


def make(wheels: Sequence[Path], out: Path, say: Say) -> None:
    """Unpack what is used, into a folder that is there."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(out, [name for name in file.namelist() if not name.startswith(UNUSED)])
    if (library := out / _CUT).exists():
        data = bytearray(library.read_bytes())
        dropped = cut(data, _ARCH)
        library.write_bytes(data)
        say(f"{library.name}: {dropped / 1e6:.0f} MB of code for other GPUs are zeros now")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Code for one GPU within a container. at, size: in bytes, with its header."""

    kind: int
    arch: int
    at: int
    size: int


def cut(data: bytearray, arch: int) -> int:
    """Keep a library's code for arch alone, or PTX that becomes it; bytes that were dropped.

    Entries move to the front of their container, whose size shrinks; the rest of it is zeros, which compress to
    nothing. The file keeps its length, so no pointer into it moves. Raises ValueError for what is no such library.
    """
    kept = dropped = 0
    for at, header, payload, entries in list(containers(data)):
        if not entries:
            continue
        native = any(each.kind == _ELF and each.arch == arch for each in entries)
        wanted = [
            each
            for each in entries
            if (each.kind == _ELF and each.arch == arch)
            or (each.kind == _PTX and each.arch <= arch and not native)
        ]
        # An empty container would be none: of code for other GPUs alone, the smallest entry stays.
        wanted = wanted or [min(entries, key=lambda each: each.size)]
        body = b"".join(bytes(data[each.at : each.at + each.size]) for each in wanted)
        data[at + header : at + header + payload] = body + bytes(payload - len(body))
        struct.pack_into("<Q", data, at + 8, len(body))
        kept += native
        dropped += payload - len(body)
    if not kept:
        raise ValueError(f"there is no code for sm_{arch} in this library")
    return dropped


def containers(data: bytes | bytearray) -> Iterator[tuple[int, int, int, list[Entry]]]:
    """(offset, bytes of the header, bytes behind it, entries) of each. Raises ValueError for no ELF file."""
    for start, size in _sections(data):
        at, end = start, start + size
        while at + 16 <= end:
            magic, _, header, payload = struct.unpack_from("<IHHQ", data, at)
            if magic != _MAGIC:
                at += 8
                continue
            entries, place, stop = [], at + header, at + header + payload
            while place + 64 <= stop:
                kind, _, entry_header, entry_payload = struct.unpack_from("<HHIQ", data, place)
                arch = struct.unpack_from("<I", data, place + 0x1C)[0]
                entries.append(Entry(kind=kind, arch=arch, at=place, size=entry_header + entry_payload))
                place += entry_header + entry_payload
            yield at, header, payload, entries
            at = stop


def _sections(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Offset and size of the sections of device code."""
    if bytes(data[:5]) != b"\x7fELF\x02":
        raise ValueError("this is no 64-bit ELF file")
    table = struct.unpack_from("<Q", data, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    found = []
    for name, _, _, _, offset, size, *_ in headers:
        start = names + name
        if bytes(data[start : data.index(b"\0", start)]) == b".nv_fatbin":
            found.append((offset, size))
    return found
