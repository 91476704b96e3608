"""LearnedFile: keeps what drafts cost and gain over restarts, in a few KB beside the step times of the engine.

A run begins with what an earlier one has learned, which then counts as little as a few steps. Times that were
measured anew make it void, and what is damaged is ignored, with a line in the log. Written while the engine has
nothing to do, at most once a minute, and at its end.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from faser.engine.contract.companion import Companion
from faser.files import parse_json, write_atomically

_log = logging.getLogger("faser.engine")

_FORMAT = 2
_INTERVAL_S = 60.0
_MOST_BYTES = 1 << 20


class Learning(Protocol):
    """Has something to keep. restore: raises ValueError, KeyError or TypeError for what saved has not returned."""

    def saved(self) -> dict[str, Any]: ...
    def restore(self, saved: dict[str, Any]) -> None: ...


class LearnedFile(Companion):
    """path: of the file. times: names the measurement of the step times, from which everything is relative."""

    def __init__(
        self, path: Path, learning: Learning, *, times: str, now: Callable[[], float] = monotonic
    ) -> None:
        self._path, self._learning, self._times, self._now = path, learning, times, now
        self._written_s = now()
        self._load()

    def rest(self) -> None:
        if self._now() - self._written_s >= _INTERVAL_S:
            self.save()

    def close(self) -> None:
        self.save()

    def save(self) -> None:
        self._written_s = self._now()
        content = {"format": _FORMAT, "times": self._times, **self._learning.saved()}
        try:
            write_atomically(self._path, json.dumps(content))
        except OSError as error:
            _log.warning(
                "draft statistics cannot be saved, so the next start begins without them: %s: %s",
                self._path,
                error.strerror or error,
            )

    def _load(self) -> None:
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has {self._path.stat().st_size} bytes, more than {_MOST_BYTES}")
            content = parse_json(self._path.read_text(encoding="utf-8"))
            if (content["format"], content["times"]) == (_FORMAT, self._times):
                self._learning.restore(content)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"{type(error).__name__}: {error}"
            _log.warning("ignoring the draft statistics of an earlier run: %s: %s", self._path, why)
