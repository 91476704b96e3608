"""The interface of what works beside an engine's steps: audit, KV on disk, events, learned values, ranks."""

from faser.engine.contract.plan import StepDeltas
from faser.types.request import Request
from faser.types.statistics import EngineStats


class Companion:
    """Companion of an engine, called on its thread. This one does nothing; subclasses override what they need."""

    def admit(self, request: Request) -> Request:
        """Return a new request as the scheduler is to get it."""
        return request

    def abort(self, request_id: str, index: int | None) -> None:
        """A request is dropped, or one of its samples."""

    def adapter_dropped(self, digest: str) -> None:
        """An adapter that no request uses has left the memory."""

    def stepped(self, deltas: StepDeltas) -> None:
        """A step has run; without work it has no deltas."""

    def rest(self) -> None:
        """There is nothing to compute now."""

    def idle(self) -> None:
        """There is nothing to compute and no request."""

    def wait_s(self) -> float | None:
        """Seconds until `idle` has something to do even if no request arrives; None: it has not."""
        return None

    def add_to(self, stats: EngineStats) -> EngineStats:
        """Return the engine's statistics with this one's."""
        return stats

    def close(self) -> None:
        """The engine has ended. No step follows."""
