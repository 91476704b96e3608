"""Files of questions, in each of their forms, and with mistakes."""

from pathlib import Path

import pytest

from faser.distill.operator_files import read_conversations
from faser.errors import ConfigError


def test_each_form_gives_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n{"turns": ["two", "later"]}\n'
        '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]}\n'
    )
    assert [[(each["role"], each["content"]) for each in found] for found in read_conversations(path)] == [
        [("user", "one")],
        [("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]
    path = tmp_path / "a.txt"
    path.write_text("one\n \n{two}\n")
    assert [found[0]["content"] for found in read_conversations(path)] == ["one", "{two}"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b" \n", "holds no question"),
        ("a.txt", b"\xff\xfe", "must be text in UTF-8"),
        ("a.jsonl", b'{"prompt": "one"}\nnot JSON\n', "its line 2 must be JSON such as"),
        ("a.jsonl", b'{"prompt": 1}', "its line 1 must be JSON such as"),
        ("a.jsonl", b'{"messages": []}', "its line 1 must be JSON such as"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}', "its line 1 must be JSON such as"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "assistant", "content": "a"}]}',
            "its line 1 ends with a message of the assistant; it must end with the user's",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_conversations(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read: No such file or directory"):
        read_conversations(tmp_path / "none")
