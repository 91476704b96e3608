"""`faser chat` refuses wrong flags and names a server that does not answer."""

import pytest

from faser.cli.chat.command import chat
from faser.cli.flags.sources import UsageError
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
