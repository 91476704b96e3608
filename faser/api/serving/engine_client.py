"""EngineClient: what the front-end needs from an engine. AsyncEngine implements it; tests use a fake."""

from typing import Protocol, Self

from faser.engine.client.timing import Timing
from faser.engine.text.tokenizer import Tokenizer
from faser.types import EngineState, EngineStats, ModelInfo, Request, RequestOutput


class OutputReader(Protocol):
    """The outputs of one accepted request. Exiting the context before the end aborts the request."""

    @property
    def timing(self) -> Timing:
        """When its outputs came, so far."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestOutput:
        """What the next engine step added to the request. Raises the FaserError with which the request fails."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class EngineClient(Protocol):
    """One engine; all calls come from one event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def state_reason(self) -> str:
        """The reason for the state, in words; may be empty."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the model is loaded."""
        ...

    @property
    def max_samples(self) -> int:
        """How many samples the engine holds at most, running and waiting."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, request: Request, *, num_following: int = 0) -> OutputReader:
        """Accept a request and start it.

        num_following: samples of requests that the same client submits together with it; there must be room for
        all of them.
        Raises RequestError (the request can never be served), OverloadError (the queue is full), NotReadyError.
        """
        ...
