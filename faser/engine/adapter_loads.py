"""AdapterLoads: which adapters are in memory, and the requests that wait until theirs is.

One thread reads files, one adapter at a time, off the step loop; tenants take turns. At most max_loaded adapters
are in memory. The least recently used one leaves that no accepted request uses; where there is none, requests
wait, and one that has waited for WAIT_S is refused with Retry-After. All but the reading belongs to the thread of
the step loop.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Protocol

from faser.engine.contract.messages import Abort
from faser.engine.preparation import WAIT_S
from faser.errors import FaserError, OverloadError, RequestError
from faser.types.adapter import Adapter
from faser.types.request import Request
from faser.types.statistics import EngineStats

_END_S = 5.0  # for an adapter that is being read

_log = logging.getLogger("faser.engine")


class AdapterEngine(Protocol):
    """The engine, as far as adapters go."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Read an adapter's files. Called in a thread. Raises RequestError."""
        ...

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter that is not in use."""
        ...

    def adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters that accepted requests use."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """An adapter has been read. error: why it cannot be used; None: it can."""

    adapter: Adapter
    error: RequestError | None


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that waits for its adapter. aborts: what was aborted of it meanwhile."""

    request: Request
    came_s: float
    aborts: list[Abort] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Load:
    """An adapter to read. ahead: the front-end asked for it and waits for the answer."""

    adapter: Adapter
    held: list[HeldRequest] = field(default_factory=list)
    ahead: bool = False

    @property
    def tenant(self) -> str | None:
        return self.held[0].request.tenant if self.held else None


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The end of a load. error: why its requests fail; None: they can be added. answers: the front-end waits."""

    adapter: Adapter
    held: Sequence[HeldRequest]
    error: RequestError | None
    answers: bool


class AdapterLoads:
    """put: takes an AdapterRead, from a thread; it belongs to `ended` then. now: the clock, in seconds."""

    def __init__(
        self,
        engine: AdapterEngine,
        put: Callable[[AdapterRead], None],
        *,
        max_loaded: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._put = put
        self._max_loaded = max_loaded
        self._now = now
        self._loaded: OrderedDict[str, None] = OrderedDict()  # digests, least recently used first
        self._unwanted: set[str] = set()  # of these: leave as soon as no request uses them
        self._queued: dict[str, _Load] = {}  # by digest, in the order of their arrival
        self._reading: _Load | None = None
        self._turns: dict[str | None, int] = {}  # number of each tenant's last load, since the queue was empty
        self._num_read = 0
        self._work: SimpleQueue[Adapter | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def holds(self, request: Request, aborts: Iterable[Abort] = ()) -> bool:
        """Hold a request whose adapter is not in memory until it is; False: the request can be added now."""
        if request.adapter is None or self._is_loaded(request.adapter):
            return False
        self._load(request.adapter).held.append(HeldRequest(request, self._now(), list(aborts)))
        self._read_next()
        return True

    def load(self, adapter: Adapter) -> bool:
        """Load an adapter ahead of requests; return whether it is in memory already, so that nothing follows."""
        if self._is_loaded(adapter):
            return True
        self._load(adapter).ahead = True
        self._read_next()
        return False

    def drop(self, digest: str) -> None:
        """Free an adapter as soon as no request uses it, unless one asks for it again."""
        if digest in self._loaded:
            self._unwanted.add(digest)

    def reclassify(self, request: Request) -> bool:
        """Give a request that is held other targets and limits; return whether it is held."""
        for _, held in self._held(request.request_id):
            held.request = request
            return True
        return False

    def abort(self, message: Abort) -> bool:
        """Abort a request that is held, at its end; return whether it is held.

        A whole request has no end: it is dropped here.
        """
        for load, held in self._held(message.request_id):
            held.aborts.append(message)
            if message.index is None:
                self._let_go(load, held)
            return True
        return False

    def ended(self, read: AdapterRead) -> LoadEnded:
        """An adapter has been read; its requests are held no more."""
        load, self._reading = self._reading, None
        assert load is not None, "an adapter was read that no request asked for"
        if not self._queued:
            self._turns.clear()
        if read.error is None:
            self._loaded[read.adapter.digest] = None
        return LoadEnded(load.adapter, tuple(load.held), read.error, load.ahead)

    def rest(self) -> list[tuple[Request, OverloadError]]:
        """Between two steps: free what is unwanted, read what had no room; return requests that wait no longer."""
        if self._unwanted:
            for digest in self._unwanted - self._engine.adapters_in_use():
                self._drop(digest)
        if not self._queued:
            return []
        self._read_next()
        oldest_s, late = self._now() - WAIT_S, []
        for load in list(self._queued.values()):
            for held in [each for each in load.held if each.came_s < oldest_s]:
                self._let_go(load, held)
                late.append((held.request, self._no_room()))
        return late

    def add_to(self, stats: EngineStats) -> EngineStats:
        """Return the statistics with the requests that are held."""
        held = [held.request for load in self._loads() for held in load.held]
        if not held:
            return stats
        names = {each.adapter.name for each in held if each.adapter is not None}
        return replace(
            stats,
            num_waiting=stats.num_waiting + sum(each.sampling.n for each in held),
            waiting_adapters=tuple(sorted(names.union(stats.waiting_adapters))),
        )

    def close(self) -> None:
        """End the thread. It is waited for, as those of Preparation are."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)

    def _loads(self) -> list[_Load]:
        return [*self._queued.values(), *([] if self._reading is None else [self._reading])]

    def _held(self, request_id: str) -> Iterator[tuple[_Load, HeldRequest]]:
        """Find a request that is held, with the load that it waits for."""
        for load in self._loads():
            for held in load.held:
                if held.request.request_id == request_id:
                    yield load, held

    def _is_loaded(self, adapter: Adapter) -> bool:
        if adapter.digest not in self._loaded:
            return False
        self._loaded.move_to_end(adapter.digest)
        self._unwanted.discard(adapter.digest)
        return True

    def _load(self, adapter: Adapter) -> _Load:
        """The load of an adapter: the one in progress, or one that begins as soon as it can."""
        if self._reading is not None and self._reading.adapter.digest == adapter.digest:
            return self._reading
        return self._queued.setdefault(adapter.digest, _Load(adapter))

    def _let_go(self, load: _Load, held: HeldRequest) -> None:
        """Hold a request no more; an adapter that no other request wants is not read."""
        load.held.remove(held)
        if not load.held and not load.ahead and load is not self._reading:
            del self._queued[load.adapter.digest]

    def _read_next(self) -> None:
        """Begin to read the next adapter, if none is being read and there is room for one."""
        if self._reading is not None or not self._queued or not self._make_room():
            return
        load = min(self._queued.values(), key=lambda each: self._turns.get(each.tenant, 0))
        del self._queued[load.adapter.digest]
        self._num_read += 1
        self._turns[load.tenant] = self._num_read
        self._reading = load
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="faser-adapters", daemon=True)
            self._thread.start()
        self._work.put(load.adapter)

    def _make_room(self) -> bool:
        """Free the least recently used adapter that no request uses, if all room is taken."""
        if len(self._loaded) < self._max_loaded:
            return True
        in_use = self._engine.adapters_in_use()
        digest = next((each for each in self._loaded if each not in in_use), None)
        if digest is None:
            return False
        self._drop(digest)
        return True

    def _drop(self, digest: str) -> None:
        del self._loaded[digest]
        self._unwanted.discard(digest)
        self._engine.drop_adapter(digest)

    def _no_room(self) -> OverloadError:
        return OverloadError(
            f"the adapter was not loaded within {WAIT_S:.0f} s: requests use all {self._max_loaded} adapters that "
            "this server keeps in memory, or others were read before it; try again, or raise --max-cpu-loras",
            retry_after_s=round(WAIT_S),
        )

    def _read_all(self) -> None:
        while (adapter := self._work.get()) is not None:
            self._put(AdapterRead(adapter, self._read(adapter)))

    def _read(self, adapter: Adapter) -> RequestError | None:
        began_s = time.monotonic()
        try:
            self._engine.load_adapter(adapter)
        except RequestError as error:
            return error
        except FaserError as error:
            return RequestError(str(error), param="model")
        except Exception as error:  # a fault of ours; its requests fail, and no others
            _log.exception("adapter %s cannot be loaded", adapter.name)
            return RequestError(f"the adapter {adapter.name!r} cannot be loaded: {type(error).__name__}: {error}")
        _log.info("loaded adapter %s from %s in %.2f s", adapter.name, adapter.path, time.monotonic() - began_s)
        return None
