"""The header of a GGUF file. Oracle: the gguf library's reader and its table of types.

Files that are not whole GGUF files are refused by name.
"""

import contextlib
import mmap
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf.header import TENSOR_TYPES, DamagedHeader, Header, OtherByteOrder
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf

METADATA = {
    "a.bool": True,
    "a.float": 0.1,
    "a.text": "größer 模型",
    "a.numbers": [3, 1, 2],
    "a.floats": [0.5, -2.0],
    "a.texts": ["", "é", "x" * 300],
}


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
def test_values_and_tensors_are_those_that_the_library_reads(
    tmp_path: Path, tokenizer: str, quantization: gguf.GGMLQuantizationType
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer=tokenizer, metadata=METADATA, quantization=quantization)
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert set(METADATA) < set(keys)
    assert {key: file.value(key) for key in keys} == {key: reader.fields[key].contents() for key in keys}
    assert file.tensor_names() == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert file.format(tensor.name) == tensor.tensor_type.name
        assert file.shape(tensor.name) == tuple(reversed(tensor.shape.tolist()))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.array(tensor.name), expected.reshape(file.shape(tensor.name)))
        if tensor.tensor_type is gguf.GGMLQuantizationType.Q8_0:
            assert np.array_equal(file.blocks(tensor.name), tensor.data)


def test_tensors_may_be_aligned_otherwise(tmp_path: Path) -> None:
    path, values = tmp_path / "m.gguf", np.arange(9, dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name in ("a", "b"):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [place.start % 256 for place in header_of(path).tensors.values()] == [0, 0]
    assert np.array_equal(GgufFile(path).array("b"), values)


def test_the_types_are_those_of_the_library() -> None:
    expected = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert expected == TENSOR_TYPES


def test_a_part_of_the_file_stays_readable_after_others_were_read(tmp_path: Path) -> None:
    """Its pages were let go meanwhile."""
    path = tmp_path / "m.gguf"
    write_gguf(path, quantization=gguf.GGMLQuantizationType.Q8_0)
    file = GgufFile(path)
    names = [name for name in file.tensor_names() if file.format(name) == "Q8_0"]
    parts = {name: file.blocks(name) for name in names}
    copies = {name: part.copy() for name, part in parts.items()}
    for name in names:
        file.blocks(name)
        assert all(np.array_equal(parts[other], copies[other]) for other in names)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(OtherByteOrder):
        header_of(path)
    with pytest.raises(ModelError, match=r"m\.gguf is of the other byte order; convert it"):
        GgufFile(path)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_are_an_error_of_the_file_or_are_read_within_it(tmp_path: Path, seed: int) -> None:
    """Planted in the header: bytes become any others. Nothing but ModelError escapes."""
    path, rng = tmp_path / "m.gguf", random.Random(seed)
    write_gguf(path, tokenizer="gpt2")
    content = path.read_bytes()
    end = min(place.start for place in header_of(path).tensors.values())
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            file = GgufFile(path)
            for name in file.tensor_names():
                assert file.blocks(name).nbytes <= len(content)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twice", "a.text twice"),
        ("type", "unknown type 99"),
        ("nested", "unknown type 9"),
        ("version", "version is 4"),
    ],
)
def test_what_no_header_says_is_damage(tmp_path: Path, fault: str, message: str) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    value = text("a.text") + struct.pack("<I", 8) + text("x")
    values = {
        "twice": [value, value],
        "type": [text("a") + struct.pack("<II", 99, 0)],
        "nested": [text("a") + struct.pack("<IIQ", 9, 9, 1)],
        "version": [],
    }[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 4 if fault == "version" else 3, 0, len(values)) + b"".join(values)
    )
    with pytest.raises(DamagedHeader, match=message):
        header_of(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 400, 0.5, 0.99])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer="gpt2")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        GgufFile(path)
    assert str(caught.value) == (
        f"{path} is not a GGUF file"
        if path.stat().st_size < 4
        else f"{path} is damaged or cut short: its {show_bytes(path.stat().st_size)} are not what its header "
        "describes"
    )


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "missing.gguf")
