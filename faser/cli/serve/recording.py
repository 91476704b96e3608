"""open_recorder: the file of answers that the settings ask for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faser.config.checks import Label
from faser.config.server import ServerConfig
from faser.engine.client.traffic import Outcome, TrafficRecorder
from faser.errors import ConfigError

_FLUSH_TIMEOUT_S = 2.0


@contextmanager
def open_recorder(
    config: ServerConfig, label: Label, count: Callable[[Outcome], None]
) -> Iterator[TrafficRecorder | None]:
    """Within it answers can be recorded; None: the settings do not ask for it. count: as of TrafficRecorder.

    Raises ConfigError for a file that cannot be written.
    """
    if config.record_traffic is None:
        yield None
        return
    named = f"{label('record_traffic')} is {config.record_traffic}"
    try:
        recorder = TrafficRecorder(Path(config.record_traffic), count)
    except BlockingIOError:
        raise ConfigError(f"{named}; another process records to it") from None
    except OSError as error:
        raise ConfigError(f"{named}; it cannot be written: {error.strerror}") from None
    try:
        yield recorder
    finally:
        recorder.close(_FLUSH_TIMEOUT_S)
