"""Where a server keeps refreshed heads."""

import stat

from faser.cli.serve.refreshing import head_folder
from faser.config.server import ServerConfig


def test_without_the_flag_there_is_no_folder() -> None:
    with head_folder(ServerConfig()) as folder:
        assert folder is None


def test_the_folder_is_its_owners_alone_and_goes_with_the_server() -> None:
    with head_folder(ServerConfig(distill_online=True)) as folder:
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "head-1").mkdir()
    assert not folder.exists()
