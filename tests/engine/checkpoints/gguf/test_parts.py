"""Models split into several GGUF files. Oracle: the gguf library's writer, which splits as llama.cpp does."""

import struct
from pathlib import Path

import numpy as np
import pytest

from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf_config import gguf_config
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf


def split(folder: Path, tensors_a_part: int = 8, **options: object) -> list[Path]:
    """Write a model of 20 tensors in parts; returns their paths in order."""
    write_gguf(folder / "m.gguf", tokenizer="gpt2", tensors_a_part=tensors_a_part, **options)  # type: ignore[arg-type]
    return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("tensors_a_part, count", [(1, 20), (8, 3), (19, 2)])
def test_any_part_opens_the_whole_model(tmp_path: Path, tensors_a_part: int, count: int) -> None:
    parts = split(tmp_path, tensors_a_part)
    assert len(parts) == count
    write_gguf(tmp_path / "whole.gguf", tokenizer="gpt2")
    whole = GgufFile(tmp_path / "whole.gguf")
    for part in (parts[0], parts[1], parts[-1]):
        file = GgufFile(part)
        assert file.path == parts[0]
        assert file.num_bytes == sum(each.stat().st_size for each in parts)
        assert file.tensor_names() == whole.tensor_names()
        for name in whole.tensor_names():
            assert np.array_equal(file.array(name), whole.array(name))
        assert gguf_config(part) == gguf_config(tmp_path / "whole.gguf")


def refusal(part: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile(part)
    return str(caught.value)


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    parts = split(tmp_path)
    lost = parts.pop(missing)
    lost.unlink()
    for part in parts:
        assert refusal(part) == f"{lost} is missing; 2 of 3 parts are there; put all into one folder"


def test_swapped_parts_are_named(tmp_path: Path) -> None:
    first, second, third = split(tmp_path)
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(kept)
    assert refusal(first) == f"{second} holds part 3 of 3; by its name it must hold part 2"


def test_a_part_under_another_name_is_told_how_parts_are_named(tmp_path: Path) -> None:
    first, *_ = split(tmp_path)
    for name in ("renamed.gguf", "m-00001-of-00004.gguf", "m-00004-of-00003.gguf"):
        other = first.with_name(name)
        other.write_bytes(first.read_bytes())
        assert refusal(other) == (
            f"{other} is one of 3 parts; their names must end in -00001-of-00003.gguf and so on"
        )


@pytest.mark.parametrize(
    "tensors_a_part, untied, said",
    [
        (8, True, "is not of the model of m-00001-of-00003.gguf: split.tensors.count is 21, not 20"),
        (5, False, "is not of the model of m-00001-of-00003.gguf: split.count is 4, not 3"),
        (7, False, "is not of the model of m-00001-of-00003.gguf: it has the tensor blk.0.ffn_gate.weight"),
    ],
)
def test_a_part_of_another_model_or_split_is_named(
    tmp_path: Path, tensors_a_part: int, untied: bool, said: str
) -> None:
    for name in ("this", "other"):
        (tmp_path / name).mkdir()
    parts = split(tmp_path / "this")
    parts[1].write_bytes(split(tmp_path / "other", tensors_a_part, untied=untied)[1].read_bytes())
    for part in parts:
        if tensors_a_part != 5 or part != parts[1]:
            assert refusal(part).startswith(f"{parts[1]} {said}")


def test_parts_that_lack_tensors_are_refused(tmp_path: Path) -> None:
    parts = split(tmp_path)
    key = b"split.tensors.count" + struct.pack("<I", 5)
    for part in parts:
        content = part.read_bytes()
        assert content.count(key + struct.pack("<i", 20)) == 1
        part.write_bytes(content.replace(key + struct.pack("<i", 20), key + struct.pack("<i", 21)))
    assert refusal(parts[1]) == f"{parts[0]}: split.tensors.count is 21, and its 3 parts have 20 tensors"
    parts[1].write_bytes(parts[1].read_bytes().replace(b"split.no", b"split.xx"))
    assert refusal(parts[0]) == f"{parts[1]} states no part number; by its name it must hold part 2"


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    first, second, _ = split(tmp_path)
    second.write_bytes(second.read_bytes()[:100])
    assert refusal(first).startswith(f"{second} is damaged or cut short")
