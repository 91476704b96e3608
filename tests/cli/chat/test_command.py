"""`faser chat` refuses wrong flags and names a server that does not answer."""

from pathlib import Path

import pytest

from faser.cli.chat.command import chat
from faser.config.sources import UsageError
from faser.errors import ConfigError


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--url is http://127.0.0.1:9; no server answers there"):
        chat(["--url", "http://127.0.0.1:9"])


def test_engine_flags_need_a_model_in_this_process() -> None:
    with pytest.raises(UsageError) as caught:
        chat(["--max-num-seqs", "4", "--config", "x"])
    assert caught.value.problems == (
        "--config is x; only faser serve reads a config file",
        "--max-num-seqs needs --in-process; a server has its own settings",
    )


@pytest.mark.parametrize(
    "text, problem",
    [(None, "cannot be read as JSON"), ("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")],
)
def test_a_schema_that_cannot_be_read_is_named(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        chat(["--json-schema", str(path)])
    assert f"--json-schema is {path}; " in caught.value.problems[0]
    assert problem in caught.value.problems[0]
