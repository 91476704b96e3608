"""An engine in this process, and requests that run on it to their ends.

Owns the loops over an engine's steps that measurements share. Imports torch only when an engine is opened.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.plan import SequenceDelta
from faser.errors import EngineError
from faser.types.request import Request

if TYPE_CHECKING:
    from faser.engine.build import Built

Tokens = tuple[int, ...]


class StepEngine(Protocol):
    """Engine, as far as it is needed to answer requests."""

    def add(self, request: Request) -> None: ...
    def step(self) -> Iterable[SequenceDelta]: ...
    def has_work(self) -> bool: ...


def quiet(_stage: str, _done: int, _total: int) -> None:
    """In place of a progress bar."""


def model_directory(model: str | None) -> Path:
    """Resolve a directory, a GGUF file or a hub id; None: the default model."""
    return resolve(model, cache_dir(), progress=quiet)


def opened(config: EngineConfig, **options: Any) -> "Built":
    """An engine and its parts. options: of faser.engine.build.build."""
    from faser.engine.build import build

    return build(config, model_directory(config.model), quiet, **options)


def answers(engine: StepEngine, requests: Iterable[Request]) -> dict[str, Tokens]:
    """Tokens by request, all of them asked at once. Raises EngineError if a request fails."""
    asked = list(requests)
    return {name: tuple(said) for name, said in closed_loop(engine, asked, max(len(asked), 1))}


def closed_loop(engine: StepEngine, requests: Iterable[Request], clients: int) -> Iterator[tuple[str, list[int]]]:
    """(request id, tokens) of each answer, in order of completion; `clients` requests run at a time.

    Raises EngineError for a request that fails.
    """
    waiting = iter(requests)
    open_ones: dict[str, list[int]] = {}
    while True:
        for request in itertools.islice(waiting, clients - len(open_ones)):
            engine.add(request)
            open_ones[request.request_id] = []
        if not open_ones:
            return
        for delta in engine.step():
            if delta.error is not None:
                raise EngineError(f"request {delta.request_id} failed: {delta.error}")
            open_ones[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                yield delta.request_id, open_ones.pop(delta.request_id)
