"""Where API keys come from, and which ones are refused at the start."""

from pathlib import Path

import pytest

from faser.cli.serve.keys import read_api_keys
from faser.config.server import ServerConfig
from faser.config.sources import UsageError


def keys_of(folder: Path, content: bytes, *flags: str) -> tuple[str, ...]:
    path = folder / "keys.txt"
    path.write_bytes(content)
    return read_api_keys(ServerConfig(api_key=flags, api_key_file=str(path)))


def test_flags_and_file_add_up_and_spaces_around_a_line_are_dropped(tmp_path: Path) -> None:
    assert keys_of(tmp_path, b"one\n\n  two \r\ndr\xc3\xa9i\n", "flag") == ("flag", "one", "two", "dréi")


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "it contains no key"),
        (b" \n\n", "it contains no key"),
        (b"ok\n\xff\xfe\n", "it is not UTF-8: invalid start byte"),
        (b"ok\nhalf\x00way\n", "line 2: it has a character that is not printable, and no client could present it"),
    ],
)
def test_a_file_without_usable_keys_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        keys_of(tmp_path, content)
    assert str(caught.value) == f"--api-key-file is {tmp_path / 'keys.txt'}; {problem}"


def test_a_file_that_has_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("one")
    config = ServerConfig(api_key_file=str(path))
    path.unlink()
    with pytest.raises(UsageError, match="it cannot be read: No such file or directory"):
        read_api_keys(config)
