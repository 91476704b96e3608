"""fetch_model: downloads a model while HTTP already answers, and can be cancelled at any moment."""

import asyncio
import threading
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.downloads import Downloads
from faser.engine.checkpoints.source import check_source, resolve
from faser.types import ProgressCallback


class _Cancelled(Exception):
    """The server ends before the model is there."""


async def fetch_model(
    config: EngineConfig, report: ProgressCallback, *, downloads: Downloads | None = None
) -> Path:
    """The directory of the model, or its GGUF file, in a thread; the event loop goes on.

    report: called with (stage, done, total) in bytes, several times a second. When the caller is cancelled, the
    thread ends with the next report, and leaves no files.
    Raises ModelError as resolve does; for the name of a draft model or head, too, before anything is fetched.
    """
    cancelled = threading.Event()

    def watched(stage: str, done: int, total: int) -> None:
        if cancelled.is_set():
            raise _Cancelled
        report(stage, done, total)

    speculation = config.speculation
    if speculation.needs_draft_model or speculation.needs_head:
        check_source(speculation.model, speculation.revision)
    try:
        return await asyncio.to_thread(
            resolve, config.model, cache_dir(), revision=config.revision, progress=watched, downloads=downloads
        )
    finally:
        cancelled.set()
