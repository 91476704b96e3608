"""What the front-end needs of an engine; AsyncEngine provides it, and tests have a fake one."""

from typing import Protocol, Self

from faser.engine.text.tokenizer import Tokenizer
from faser.types import EngineState, EngineStats, ModelInfo, Request, RequestOutput


class OutputStream(Protocol):
    """Outputs of one accepted request. Leaving it unfinished aborts the request."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestOutput:
        """The next engine step that touched the request. Raises FaserError if the request ends that way."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class EngineClient(Protocol):
    """An engine as seen from one event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def state_reason(self) -> str:
        """Why the state is what it is, in words; may be empty."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the model is loaded."""
        ...

    @property
    def max_samples(self) -> int:
        """So many samples at once, running and waiting."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last gave a sign of life."""
        ...

    def submit(self, request: Request) -> OutputStream:
        """Accept a request and start on it.

        Raises RequestError (it can never be served), OverloadError (the queue is full) or NotReadyError.
        """
        ...
