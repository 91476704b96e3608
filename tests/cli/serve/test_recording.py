"""Whether there is a recorder, and what is said when there cannot be one."""

from pathlib import Path

import pytest

from faser.cli.serve.recording import open_recorder
from faser.config.declaration import flag_label
from faser.config.server import ServerConfig
from faser.errors import ConfigError


def test_without_the_flag_there_is_none() -> None:
    with open_recorder(ServerConfig(), flag_label, lambda _: None) as recorder:
        assert recorder is None


def test_a_file_that_cannot_be_recorded_to_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    config = ServerConfig(record_traffic=str(path))
    with (
        open_recorder(config, flag_label, lambda _: None),
        pytest.raises(ConfigError) as caught,
        open_recorder(config, flag_label, lambda _: None),
    ):
        pass
    assert str(caught.value) == f"--record-traffic is {path}; another process records to it"
    with (
        pytest.raises(ConfigError) as caught,
        open_recorder(ServerConfig(record_traffic="/dev/null"), flag_label, lambda _: None),
    ):
        pass
    assert str(caught.value) == "--record-traffic is /dev/null; it cannot be written: it is not a regular file"
