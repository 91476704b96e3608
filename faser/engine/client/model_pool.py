"""ModelPool: several models on one server, each loaded when it is first asked for.

Owns which models are loaded, the memory that they may take together, and the requests that wait for one. A model
that is loaded is an engine with everything that one has, and an application that answers its requests; how both
are made is a ModelSource's part. Knows neither HTTP nor files.

    unloaded ──first request──▶ loading ──▶ loaded ──idle, and its memory is needed──▶ unloading ──▶ unloaded
                                   └──▶ unloaded, with the reason; tried again after a pause

Memory is reserved before a load begins. Where none is free, the model leaves that was used least recently; if all
have running requests, that one takes no new ones, and leaves when the last of them has ended. Those that ask for
it meanwhile wait, and it is loaded again in its turn.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from faser.config.declaration import show_bytes
from faser.errors import ConfigError, EngineError, FaserError, NotReadyError
from faser.types.engine import EngineState, ModelInfo, ProgressCallback

App = TypeVar("App")
Made = TypeVar("Made", covariant=True)

# An engine's process beside weights and KV cache: its libraries, kernels and workspaces.
PROCESS_BYTES = 512 << 20

_RETRY_PAUSE_S = 10.0  # a model that cannot be loaded is not tried for every request
_UNKNOWN_LOAD_S = 10.0  # of a model that has never been loaded
_MAX_RETRY_AFTER_S = 600

_log = logging.getLogger("faser.models")


class PooledEngine(Protocol):
    """The engine of one model. AsyncEngine says what each method does."""

    @property
    def info(self) -> ModelInfo: ...

    async def start(self) -> None: ...

    async def wait_ready(self) -> ModelInfo: ...

    async def wait_dead(self) -> FaserError: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


class ModelSource(Protocol[Made]):
    """A model that can be loaded. names: in requests; the first is its own. root: as the operator names it.

    adapters: paths of its LoRA adapters, which requests name too, by their names.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def root(self) -> str: ...

    @property
    def adapters(self) -> Mapping[str, str]: ...

    async def locate(self, report: ProgressCallback) -> int:
        """Fetch the model's files. Returns the bytes that it takes in memory, an estimate."""
        ...

    async def build(self, report: ProgressCallback) -> tuple[PooledEngine, Made]:
        """Return an engine that has not been started, and what answers the model's requests."""
        ...


class ModelState(StrEnum):
    """The states of a model; llama.cpp's names, and one for the time in which its engine ends."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class PoolObserver(Protocol):
    """Observer of a pool; metrics are one. model: its own name."""

    def loading(self, model: str) -> None:
        """A model's engine is being started."""
        ...

    def loaded(self, model: str, load_s: float) -> None:
        """A model was loaded, in this time."""
        ...

    def unloaded(self, model: str, reason: str) -> None:
        """A loaded model has left. reason: evicted, idle, request or died."""
        ...

    def failed(self, model: str) -> None:
        """A model could not be loaded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of a pool. max_models: loaded at once; None: no limit. memory_bytes: all of them together.

    load_timeout_s: the longest time that a request waits for its model. idle_timeout_s: a model without requests
    is unloaded after it; None: never. drain_s: what running requests get to finish when their model is to leave.
    """

    max_models: int | None
    memory_bytes: int
    load_timeout_s: float
    idle_timeout_s: float | None
    drain_s: float


class PooledModel(Generic[App]):
    """One model. Only the pool changes it.

    state, progress (stage, done, total), failure: as the pool's users see it. num_users: requests that it answers
    now. leaving: it takes no new ones. memory_bytes: reserved; 0: nothing is. load_s: of its last load.
    """

    def __init__(self, source: ModelSource[App]) -> None:
        self.source = source
        self.state = ModelState.UNLOADED
        self.progress = ("", 0, 0)
        self.failure: FaserError | None = None
        self.num_users = 0
        self.leaving = False
        self.memory_bytes = 0
        self.load_s: float | None = None
        self.max_model_len: int | None = None
        self.began_s = self.used_s = self.failed_s = 0.0
        self.waiters: list[asyncio.Future[App]] = []
        self.engine: PooledEngine | None = None
        self.app: App | None = None
        self.loading: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.source.names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return the names that requests may have, those of adapters too."""
        return (*self.source.names, *self.source.adapters)

    @property
    def is_ready(self) -> bool:
        """Return whether a request need not wait for it."""
        return self.state is ModelState.LOADED and not self.leaving

    @property
    def share_loaded(self) -> float | None:
        """Return how much of the present stage of a load is done, 0 to 1; None: not known."""
        _, done, total = self.progress
        return done / total if total else None


class ModelPool(Generic[App]):
    """Use it from one event loop only. preloaded: names of models that are loaded before the server is ready."""

    def __init__(
        self,
        sources: Sequence[ModelSource[App]],
        limits: PoolLimits,
        observer: PoolObserver,
        *,
        preloaded: Sequence[str] = (),
    ) -> None:
        self.models = [PooledModel(source) for source in sources]
        self._by_name = {name: model for model in self.models for name in model.all_names}
        self._limits = limits
        self._preloaded = [self._by_name[name] for name in preloaded]
        self._observer = observer
        self._state = EngineState.LOADING
        self._turn = asyncio.Lock()  # of loads that make room, in the order in which they were asked for
        self._changed = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._unloading: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """Return the state of the server: ready once all preloaded models are, whatever becomes of them later."""
        return self._state

    @property
    def state_reason(self) -> str:
        """Return what the server waits for, in words; empty: it does not."""
        if self._state is EngineState.DRAINING:
            return "the server is shutting down"
        loading = next((each for each in self._preloaded if each.state is ModelState.LOADING), None)
        if self._state is not EngineState.LOADING or loading is None:
            return ""
        return f"model {loading.name!r}: {loading.progress[0]}"

    @property
    def reserved_bytes(self) -> int:
        return sum(each.memory_bytes for each in self.models)

    @property
    def limits(self) -> PoolLimits:
        return self._limits

    def find(self, name: str | None) -> PooledModel[App] | None:
        """The model with this name; None: the first. Returns None if there is none."""
        return self.models[0] if name is None else self._by_name.get(name)

    async def start(self) -> None:
        if self._limits.idle_timeout_s is not None:
            self._sweeping = asyncio.create_task(
                self._sweep(self._limits.idle_timeout_s), name="faser-idle-models"
            )

    async def wait_ready(self) -> None:
        """Load what is to be preloaded. Raises the error with which one of them fails."""
        for model in self._preloaded:
            await self._enter(model, None)
            self._leave(model)
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY

    async def wait_dead(self) -> FaserError:
        """Wait until the pool was stopped: a model's end is not the server's."""
        await self._ended.wait()
        return EngineError("the server was stopped")

    @asynccontextmanager
    async def use(self, model: PooledModel[App]) -> AsyncIterator[App]:
        """Wait until the model is loaded; within the context it stays so.

        Raises NotReadyError: the model cannot be loaded, not in time, or the server ends.
        """
        app = await self._enter(model, self._limits.load_timeout_s)
        try:
            yield app
        finally:
            self._leave(model)

    async def load(self, model: PooledModel[App]) -> None:
        """Load a model for later requests. Raises as `use`."""
        async with self.use(model):
            pass

    async def unload(self, model: PooledModel[App]) -> None:
        """End a model's engine when its running requests have ended, at the latest after drain_s.

        A load is given up at once. Does nothing for a model that is not loaded.
        """
        if model.loading is not None:
            model.loading.cancel()
            await asyncio.gather(model.loading, return_exceptions=True)
        if model.state is ModelState.LOADED:
            await self._unload(model, "request", self._limits.drain_s)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and end loads; wait at most timeout_s for accepted requests, then abort the rest."""
        self._state = EngineState.DRAINING
        loads = [each.loading for each in self.models if each.loading is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for model in self.models:
            self._refuse(model, NotReadyError("the server is shutting down"))
        engines = [each.engine for each in self.models if each.engine is not None]
        await asyncio.gather(*(each.drain(timeout_s) for each in engines))

    async def stop(self) -> None:
        """End all engines now. Idempotent."""
        self._state = EngineState.DEAD
        tasks = [self._sweeping, *(task for each in self.models for task in (each.loading, each.watching))]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *self._unloading, return_exceptions=True)
        for model in self.models:
            self._refuse(model, NotReadyError("the server is shutting down"))
        await asyncio.gather(*(self._end(each) for each in self.models if each.engine is not None))
        self._ended.set()

    def check_invariants(self) -> None:
        """Raise AssertionError where the pool contradicts itself."""
        taken = [each for each in self.models if each.memory_bytes]
        assert self._limits.max_models is None or len(taken) <= self._limits.max_models, "too many are loaded"
        for each in self.models:
            assert each.num_users >= 0, f"{each.name} has {each.num_users} requests"
            assert (each.state is ModelState.LOADING) == (each.loading is not None), f"nothing loads {each.name}"
            assert each.state is not ModelState.LOADED or each.engine is not None, f"{each.name} has no engine"
            assert each.state is not ModelState.UNLOADED or not each.memory_bytes, f"{each.name} keeps memory"
            assert not each.waiters or not each.is_ready, f"requests wait for {each.name}, which is loaded"
            assert not each.waiters or each.state is not ModelState.UNLOADED, f"requests for {each.name} are lost"

    async def _enter(self, model: PooledModel[App], timeout_s: float | None) -> App:
        """Count a request of a model, once the model is loaded. timeout_s: None: it waits however long that takes.

        Returns what answers the request: the engine may die before the request has its turn.

        Raises NotReadyError; without a timeout, the error with which the load fails.
        """
        if self._state in (EngineState.DRAINING, EngineState.DEAD):
            raise NotReadyError("the server is shutting down")
        if model.is_ready:
            assert model.app is not None
            model.num_users += 1
            return model.app
        if model.failure is not None and (pause_s := model.failed_s + _RETRY_PAUSE_S - time.monotonic()) > 0:
            raise _not_loaded(model, model.failure, pause_s)
        waiter: asyncio.Future[App] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        self._load_soon(model)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            if _was_granted(waiter):
                return waiter.result()
            raise NotReadyError(
                f"model {model.name!r} was not loaded within {timeout_s:g} s",
                retry_after_s=self._retry_after_s(model),
            ) from None
        except asyncio.CancelledError:
            if _was_granted(waiter):
                self._leave(model)
            raise
        except NotReadyError as error:  # each request has an error of its own
            raise NotReadyError(str(error), retry_after_s=error.retry_after_s) from None
        except FaserError as error:
            if timeout_s is None:
                raise
            raise _not_loaded(model, error, _RETRY_PAUSE_S) from None
        finally:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
            self._changed.set()

    def _leave(self, model: PooledModel[App]) -> None:
        """A request of the model has ended."""
        model.num_users -= 1
        model.used_s = time.monotonic()
        self._changed.set()

    def _retry_after_s(self, model: PooledModel[App]) -> int:
        """Seconds until the model should be loaded, by what its last load took."""
        passed_s = time.monotonic() - model.began_s if model.loading is not None else 0.0
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil((model.load_s or _UNKNOWN_LOAD_S) - passed_s)))

    def _load_soon(self, model: PooledModel[App]) -> None:
        """Begin to load a model, unless it is being loaded, or has yet to leave."""
        if model.loading is None and model.state is ModelState.UNLOADED:
            model.state, model.began_s = ModelState.LOADING, time.monotonic()
            model.loading = asyncio.create_task(self._load(model), name=f"faser-load-{model.name}")

    async def _load(self, model: PooledModel[App]) -> None:
        def report(stage: str, done: int, total: int) -> None:
            model.progress = (stage, done, total)

        try:
            needed = await model.source.locate(report)
            report("waiting for memory", 0, 0)
            if not await self._make_room(model, needed):
                model.state = ModelState.UNLOADED  # those who asked for it have gone
                return
            began_s = time.monotonic()
            report("starting the engine", 0, 0)
            self._observer.loading(model.name)
            model.engine, model.app = await model.source.build(report)
            await model.engine.start()
            info = await model.engine.wait_ready()
        except FaserError as error:
            await self._end(model)
            self._fail(model, error)
        except BaseException as error:
            await self._end(model)
            self._refuse(model, NotReadyError(f"model {model.name!r} was unloaded before it was ready"))
            if not isinstance(error, asyncio.CancelledError):
                _log.exception("model %s cannot be loaded", model.name)
        else:
            model.load_s = time.monotonic() - began_s
            model.max_model_len = info.max_model_len
            model.memory_bytes = PROCESS_BYTES + info.weight_bytes + info.kv_cache_bytes
            self._open(model, model.engine)
        finally:
            model.loading = None
            self._changed.set()
            if model.waiters:
                self._load_soon(model)

    def _open(self, model: PooledModel[App], engine: PooledEngine) -> None:
        """The model is loaded: let those in that wait for it."""
        assert model.load_s is not None
        model.state, model.failure, model.used_s = ModelState.LOADED, None, time.monotonic()
        model.progress = ("waiting for its turn", 0, 0)  # what requests do while it leaves
        model.watching = asyncio.create_task(self._watch(model, engine), name=f"faser-watch-{model.name}")
        self._admit(model)
        self._observer.loaded(model.name, model.load_s)
        _log.info(
            "model %s is loaded, in %.1f s; %d models reserve %s of %s",
            model.name,
            model.load_s,
            sum(each.memory_bytes > 0 for each in self.models),
            show_bytes(self.reserved_bytes),
            show_bytes(self._limits.memory_bytes),
        )

    def _admit(self, model: PooledModel[App]) -> None:
        """Count the waiting requests here: before any of them runs, another model's load may look for memory."""
        assert model.app is not None
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                model.num_users += 1
                waiter.set_result(model.app)

    def _fail(self, model: PooledModel[App], error: FaserError) -> None:
        model.failure, model.failed_s = error, time.monotonic()
        self._refuse(model, error)
        self._observer.failed(model.name)
        _log.error("model %s cannot be loaded: %s", model.name, error)

    def _refuse(self, model: PooledModel[App], error: FaserError) -> None:
        """Fail all requests that wait for a model."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _make_room(self, model: PooledModel[App], needed: int) -> bool:
        """Reserve memory for a model; others leave for it. False: no request waits for it any more.

        Raises ConfigError for a model that does not fit alone.
        """
        budget = self._limits.memory_bytes
        if needed > budget:
            raise ConfigError(
                f"model {model.name!r} takes {show_bytes(needed)} (weights, KV cache, the engine's process), and "
                f"--models-memory is {show_bytes(budget)}; raise it, or lower --kv-cache-memory or --max-model-len"
            )
        async with self._turn:
            victim: PooledModel[App] | None = None
            try:
                while not self._fits(needed):
                    if not model.waiters:
                        return False
                    victim = self._victim(victim)
                    if victim is not None and not victim.num_users:
                        leaves, victim = victim, None
                        await self._unload(leaves, "evicted")
                        continue
                    if victim is not None:
                        victim.leaving = True
                    self._changed.clear()
                    await self._changed.wait()
            finally:
                if victim is not None and victim.state is ModelState.LOADED:
                    victim.leaving = False
                    self._admit(victim)
            model.memory_bytes = needed
        return True

    def _fits(self, needed: int) -> bool:
        taken = [each.memory_bytes for each in self.models if each.memory_bytes]
        limit = self._limits.max_models
        return (limit is None or len(taken) < limit) and sum(taken) + needed <= self._limits.memory_bytes

    def _victim(self, leaving: PooledModel[App] | None) -> PooledModel[App] | None:
        """The model that leaves next: the idle one used least recently, else the busy one. None: none is loaded.

        leaving: the one that takes no new requests already; it stays the victim until it is idle, or another is.
        """
        loaded = [each for each in self.models if each.state is ModelState.LOADED]
        if idle := [each for each in loaded if not each.num_users]:
            chosen = min(idle, key=lambda each: each.used_s)
            if leaving is not None and chosen is not leaving:
                leaving.leaving = False
                self._admit(leaving)
            return chosen
        if leaving in loaded:
            return leaving
        return min(loaded, key=lambda each: each.used_s, default=None)

    async def _unload(self, model: PooledModel[App], reason: str, drain_s: float = 0.0) -> None:
        """End the engine of a loaded model, to the end even if the caller is cancelled meanwhile.

        drain_s: what its running requests get.
        """
        assert model.watching is not None
        model.state = ModelState.UNLOADING  # at once: nothing else may find it loaded
        model.watching.cancel()
        unloading = asyncio.create_task(self._close(model, reason, drain_s), name=f"faser-unload-{model.name}")
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        await asyncio.shield(unloading)

    async def _close(self, model: PooledModel[App], reason: str, drain_s: float) -> None:
        assert model.engine is not None
        if model.num_users:
            await model.engine.drain(drain_s)
        await self._end(model)
        self._observer.unloaded(model.name, reason)
        _log.info("model %s is unloaded (%s)", model.name, reason)
        if model.waiters:
            self._load_soon(model)

    async def _end(self, model: PooledModel[App]) -> None:
        """End what is left of a model's engine, and give its memory back."""
        engine, model.engine, model.app = model.engine, None, None
        if engine is not None:
            await engine.stop()
        model.state, model.leaving, model.memory_bytes = ModelState.UNLOADED, False, 0
        model.progress = ("", 0, 0)
        self._changed.set()

    async def _watch(self, model: PooledModel[App], engine: PooledEngine) -> None:
        """Take note when a loaded model's engine has ended for good. The next request loads the model again."""
        error = await engine.wait_dead()
        if model.engine is engine and model.state is ModelState.LOADED:
            model.state = ModelState.UNLOADING
            model.failure, model.failed_s = error, time.monotonic()
            await self._end(model)
            self._observer.unloaded(model.name, "died")
            _log.error("model %s has ended: %s", model.name, error)
            self._refuse(model, error)

    async def _sweep(self, timeout_s: float) -> None:
        """Unload models that have had no request for a while."""
        while True:
            now_s = time.monotonic()
            idle = [each for each in self.models if each.state is ModelState.LOADED and not each.num_users]
            for model in idle:
                if now_s - model.used_s >= timeout_s and not model.num_users and model.state is ModelState.LOADED:
                    await self._unload(model, "idle")
            await asyncio.sleep(min(timeout_s, max(0.05, timeout_s / 4), 5.0))


def _was_granted(waiter: asyncio.Future[App]) -> bool:
    """Return whether a request was let in at the moment at which it gave up."""
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None


def _not_loaded(model: PooledModel[App], error: FaserError, pause_s: float) -> NotReadyError:
    return NotReadyError(
        f"model {model.name!r} cannot be loaded: {error}", retry_after_s=max(1, math.ceil(pause_s))
    )
