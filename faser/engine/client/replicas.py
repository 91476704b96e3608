"""Replicas: several engines with the same model behind one interface (data parallelism).

Each request goes to one of them: to the one that has seen the longest beginning of its prompt, unless that one has
clearly more to do than another; else to the one with the least to do (affinity.py). One with latency targets goes
to a replica that predicts to keep them, if there is one. A request whose engine ends
before its first output goes to another one, and its client does not notice; later the engine's end is the
request's.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from faser.engine.client.affinity import Seen, best_first, chained
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.output_stream import OutputStream, Timing
from faser.engine.contract.cache_salt import salt_digest
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import EngineDiedError, FaserError, NotReadyError, OverloadError
from faser.types.adapter import Adapter
from faser.types.answer import RequestOutput
from faser.types.engine import EngineState, ModelInfo
from faser.types.request import NO_TARGETS, Request
from faser.types.statistics import EngineStats

_PIECE = 64  # tokens of a prompt that are known together
# The state of all of them is the best of one.
_BEST_FIRST = (
    EngineState.READY,
    EngineState.DRAINING,
    EngineState.WARMING,
    EngineState.LOADING,
    EngineState.RESTARTING,
    EngineState.DEAD,
)

_log = logging.getLogger("faser.engine")


@dataclass(slots=True)
class _Replica:
    """num_samples: of the requests that it has now."""

    number: int
    engine: AsyncEngine
    num_samples: int = 0
    seen: Seen = field(default_factory=Seen)


class Replicas:
    """Use it from one event loop only. An AsyncEngine says what each method does of one engine."""

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._watching: list[asyncio.Task[None]] = []

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        return tuple(each.engine for each in self._replicas)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engines[0].tokenizer

    @property
    def state(self) -> EngineState:
        return min((each.state for each in self.engines), key=_BEST_FIRST.index)

    @property
    def state_reason(self) -> str:
        return next(each.state_reason for each in self.engines if each.state is self.state)

    @property
    def info(self) -> ModelInfo:
        """Return the info of one replica; all have the same. Raises NotReadyError before the first is loaded."""
        for each in self.engines:
            try:
                return each.info
            except NotReadyError:
                continue
        raise NotReadyError(self.state_reason)

    @property
    def max_samples(self) -> int:
        """Return the limit of one replica: the samples of a request are not divided among replicas."""
        return self.engines[0].max_samples

    @property
    def stats(self) -> EngineStats:
        """Return the sum of all replicas' stats: running, waiting, and done so far."""
        found = [each.stats for each in self.engines]
        return EngineStats(
            num_running=sum(each.num_running for each in found),
            num_waiting=sum(each.num_waiting for each in found),
            kv_usage=sum(each.kv_usage for each in found) / len(found),
            num_preemptions=sum(each.num_preemptions for each in found),
            prompt_tokens=sum(each.prompt_tokens for each in found),
            prompt_tokens_cached=sum(each.prompt_tokens_cached for each in found),
            generation_tokens=sum(each.generation_tokens for each in found),
            prefix_cache_queries=sum(each.prefix_cache_queries for each in found),
            prefix_cache_hits=sum(each.prefix_cache_hits for each in found),
            num_steps=sum(each.num_steps for each in found),
            running_adapters=tuple(sorted({name for each in found for name in each.running_adapters})),
            waiting_adapters=tuple(sorted({name for each in found for name in each.waiting_adapters})),
        )

    async def start(self) -> None:
        for each in self.engines:
            await each.start()
        self._watching = [asyncio.create_task(_log_end(each)) for each in self._replicas]

    async def wait_ready(self) -> ModelInfo:
        """Wait until all replicas are ready. Raises what one of them raises."""
        found = await asyncio.gather(*(each.wait_ready() for each in self.engines))
        return found[0]

    async def wait_dead(self) -> FaserError:
        """Wait until the last replica has ended for good. Returns the reason."""
        found = await asyncio.gather(*(each.wait_dead() for each in self.engines))
        return found[-1]

    def submit(self, request: Request, *, num_following: int = 0) -> "ReplicaStream":
        """Raises what AsyncEngine.submit does: OverloadError where no replica has room."""
        return ReplicaStream(request, lambda other: self._submit(request, num_following, other))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter in all replicas that are ready; others load it on demand. Raises as AsyncEngine does."""
        ready = [each for each in self.engines if each.state is EngineState.READY] or self.engines[:1]
        await asyncio.gather(*(each.load_adapter(adapter) for each in ready))

    def drop_adapter(self, adapter: Adapter) -> None:
        for each in self.engines:
            each.drop_adapter(adapter)

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(each.drain(timeout_s) for each in self.engines))

    async def stop(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(each.stop() for each in self.engines))

    def _submit(self, request: Request, num_following: int, tried: "frozenset[int]") -> "_Submitted":
        """tried: numbers of replicas that have lost the request already."""
        digests = list(_digests(request))
        refused: FaserError | None = None
        replicas = self._in_order(digests, tried)
        if request.speculation.slo != NO_TARGETS:  # no class is given up where another replica can keep it
            replicas.sort(key=lambda each: each.engine.shortfall(request))
        for replica in replicas:
            try:
                stream = replica.engine.submit(request, num_following=num_following)
            except (OverloadError, NotReadyError) as error:
                refused = refused or error
                continue
            replica.seen.note(digests)
            replica.num_samples += request.sampling.n
            return _Submitted(stream, replica)
        raise refused or NotReadyError(f"the engine is {self.state}: {self.state_reason}")

    def _in_order(self, digests: Sequence[bytes], tried: "frozenset[int]") -> list[_Replica]:
        """The replicas that accept requests, best first."""
        ready = [
            each for each in self._replicas if each.engine.state is EngineState.READY and each.number not in tried
        ]
        return best_first(ready, lambda each: each.seen.known(digests), lambda each: each.num_samples)


@dataclass(frozen=True, slots=True)
class _Submitted:
    stream: OutputStream
    replica: _Replica


class ReplicaStream:
    """The outputs of a request, from the replica that has it. See OutputStream."""

    def __init__(self, request: Request, submit: "Callable[[frozenset[int]], _Submitted]") -> None:
        self._num_samples = request.sampling.n
        self._submit = submit
        self._tried: frozenset[int] = frozenset()
        self._begun = False
        self._at: _Submitted | None = submit(self._tried)
        self._stream = self._at.stream

    @property
    def timing(self) -> Timing:
        return self._stream.timing

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            try:
                output = await anext(self._stream)
            except EngineDiedError as error:
                if self._begun or not self._move():
                    raise
                _log.info("a request moves to another replica: %s", error)
            except BaseException:
                self._leave()
                raise
            else:
                self._begun = True
                return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()
        self._stream.close()

    def _move(self) -> bool:
        """Give the request to another replica, if one takes it."""
        assert self._at is not None, "the request has ended"
        self._tried |= {self._at.replica.number}
        self._leave()
        try:
            self._at = self._submit(self._tried)
        except FaserError:
            return False
        self._stream = self._at.stream
        return True

    def _leave(self) -> None:
        """The replica has the request no more. Idempotent."""
        if self._at is not None:
            self._at.replica.num_samples -= self._num_samples
            self._at = None


async def _log_end(replica: _Replica) -> None:
    error = await replica.engine.wait_dead()
    _log.error("replica %d has ended for good: %s", replica.number, error)


def _digests(request: Request) -> Iterator[bytes]:
    """Yield the digests of the prompt's whole pieces, chained from that of its salt."""
    tokens = request.prompt_token_ids
    firsts = range(0, len(tokens) - _PIECE + 1, _PIECE)
    salt = salt_digest(request.cache_salt, request.adapter)
    return chained(salt, (array("q", tokens[first : first + _PIECE]).tobytes() for first in firsts))
