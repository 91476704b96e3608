"""Files that are not whole GGUF files are refused by name."""

from pathlib import Path

import pytest

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf


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


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(ModelError, match="one of 3 parts"):
        GgufFile(tmp_path / "m.gguf")
