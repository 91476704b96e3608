"""What a server needs to refresh its head: a private folder for heads, and what trains them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.head_refresh import HeadRefresher, LearnerProcess
from faser.engine.contract.messages import Configure
from faser.metrics.head_refresh import RefreshMetrics


@contextmanager
def head_folder(config: ServerConfig) -> Iterator[Path | None]:
    """A folder that only its owner can read, and that is removed at the end; None: heads stay as they are."""
    if not config.distill_online:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="faser-heads-") as folder:
        yield Path(folder)


def make_refresher(config: EngineConfig, directory: Path, folder: Path, metrics: RefreshMetrics) -> HeadRefresher:
    """directory: of the model. folder: of head_folder."""
    return HeadRefresher(partial(LearnerProcess, Configure(config, str(directory))), folder, metrics)
