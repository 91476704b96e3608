"""Which models are loaded, who waits, and who leaves. Engines are fakes that load when the test lets them.

Planted bugs that these tests have caught: a busy model that is evicted; a request that gets another model's
application; a waiter that is forgotten when a load fails, or when its model has to leave; an idle model that is
not the least recently used one; memory that is not given back after a failure; a load for which nobody waits any
more that still evicts another model.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from faser.engine.client.model_pool import PROCESS_BYTES, ModelPool, ModelState, PooledModel, PoolLimits
from faser.errors import EngineDiedError, FaserError, ModelError, NotReadyError
from faser.types.engine import EngineState, ModelInfo, ProgressCallback
from tests.fake_engine import model_info

MIB = 1 << 20
Pool = ModelPool[str]


class Engine:
    """Ready once `go` is set. error: of its start; None: it starts."""

    def __init__(self, name: str, size: int, go: asyncio.Event, error: FaserError | None) -> None:
        self.info: ModelInfo = replace(model_info(), weight_bytes=size - PROCESS_BYTES, kv_cache_bytes=0)
        self.name, self.go, self.error = name, go, error
        self.death: asyncio.Future[FaserError] = asyncio.get_running_loop().create_future()
        self.stopped = False
        self.drained_s: float | None = None
        self.drained: asyncio.Event | None = None  # the drain lasts until then

    async def start(self) -> None:
        assert not self.stopped

    async def wait_ready(self) -> ModelInfo:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.info

    async def wait_dead(self) -> FaserError:
        return await asyncio.shield(self.death)

    async def drain(self, timeout_s: float) -> None:
        self.drained_s = timeout_s
        if self.drained is not None:
            await self.drained.wait()

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.stopped = True


@dataclass
class Source:
    """The application of a model is its name and how often it was loaded: a/2."""

    name: str
    size: int = PROCESS_BYTES + 100 * MIB
    error: FaserError | None = None
    held: bool = False
    engines: list[Engine] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}-alias")

    @property
    def root(self) -> str:
        return f"owner/{self.name}"

    async def locate(self, report: ProgressCallback) -> int:
        report("fetching", 1, 4)
        await asyncio.sleep(0)
        return self.size

    async def build(self, report: ProgressCallback) -> tuple[Engine, str]:
        report("loading weights", 1, 2)
        if not self.held:
            self.go.set()
        self.engines.append(Engine(self.name, self.size, self.go, self.error))
        return self.engines[-1], f"{self.name}/{len(self.engines)}"


class Noted:
    """What a pool tells its observer, in words."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def loading(self, model: str) -> None:
        self.told.append(f"{model} loading")

    def loaded(self, model: str, load_s: float) -> None:
        assert load_s >= 0
        self.told.append(f"{model} loaded")

    def unloaded(self, model: str, reason: str) -> None:
        self.told.append(f"{model} {reason}")

    def failed(self, model: str) -> None:
        self.told.append(f"{model} failed")


def pool_of(
    *sources: Source,
    most: int | None = None,
    memory: int = 100 << 30,
    patience_s: float = 30,
    idle_s: float | None = None,
    preloaded: tuple[str, ...] = (),
) -> tuple[Pool, Noted]:
    noted = Noted()
    limits = PoolLimits(
        max_models=most, memory_bytes=memory, load_timeout_s=patience_s, idle_timeout_s=idle_s, drain_s=7.0
    )
    return ModelPool(sources, limits, noted, preloaded=preloaded), noted


def found(pool: Pool, name: str) -> PooledModel[str]:
    model = pool.find(name)
    assert model is not None
    return model


async def ask(pool: Pool, name: str, until: asyncio.Event | None = None) -> str:
    """The application that a request gets. It lasts until the event."""
    async with pool.use(found(pool, name)) as app:
        engine = pool_engine(pool, name)
        if until is not None:
            await until.wait()
        assert not engine.stopped, "its engine was stopped while the request ran"
        return app


def pool_engine(pool: Pool, name: str) -> Engine:
    engine = found(pool, name).engine
    assert isinstance(engine, Engine)
    return engine


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(whole())


def test_a_model_is_loaded_by_its_first_request_and_once() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"))
        await pool.start()
        await pool.wait_ready()
        assert (pool.state, noted.told) == (EngineState.READY, [])
        assert await asyncio.gather(*(ask(pool, name) for name in ("a", "b-alias", "a-alias"))) == [
            "a/1",
            "b/1",
            "a/1",
        ]
        assert sorted(noted.told) == ["a loaded", "a loading", "b loaded", "b loading"]
        pool.check_invariants()
        await pool.stop()

    run(test)


def test_the_first_model_is_that_of_requests_without_a_name() -> None:
    pool, _ = pool_of(Source("a"), Source("b"))
    assert pool.find(None) is pool.models[0]
    assert pool.find("c") is None


def test_preloaded_models_come_before_the_server_is_ready_and_fail_it() -> None:
    async def test() -> None:
        held = Source("a", held=True)
        pool, _ = pool_of(held, Source("b", error=ModelError("b.gguf has no tensors")), preloaded=("a", "b"))
        ready = asyncio.create_task(pool.wait_ready())
        await settle()
        assert (pool.state, pool.state_reason) == (EngineState.LOADING, "model 'a': loading weights")
        held.go.set()
        with pytest.raises(ModelError, match=r"^b\.gguf has no tensors$"):
            await ready
        await pool.stop()

    run(test)


def test_the_least_recently_used_idle_model_leaves() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"), Source("c"), most=2)
        for name in ("a", "b", "a", "c", "a"):
            await ask(pool, name)
            pool.check_invariants()
        assert [each for each in noted.told if "loading" not in each] == [
            "a loaded",
            "b loaded",
            "b evicted",
            "c loaded",
        ]
        await pool.stop()

    run(test)


def test_as_many_leave_as_the_memory_asks_for() -> None:
    async def test() -> None:
        large = Source("large", size=PROCESS_BYTES + 600 * MIB)
        small = [Source(name) for name in "abc"]
        pool, noted = pool_of(*small, large, memory=3 * (PROCESS_BYTES + 100 * MIB))
        for name in ("a", "b", "c", "large"):
            await ask(pool, name)
            pool.check_invariants()
            assert pool.reserved_bytes <= pool.limits.memory_bytes
        assert [each for each in noted.told if "evicted" in each] == ["a evicted", "b evicted"]
        assert found(pool, "c").state is ModelState.LOADED
        await pool.stop()

    run(test)


def test_a_model_that_does_not_fit_alone_names_both_numbers_and_evicts_nothing() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("huge", size=8 << 30), memory=6 << 30)
        await ask(pool, "a")
        with pytest.raises(NotReadyError, match=r"'huge' takes 8GiB .* --models-memory is 6GiB"):
            await ask(pool, "huge")
        assert "a evicted" not in noted.told
        await pool.stop()

    run(test)


def test_a_busy_model_leaves_after_its_last_request_and_takes_no_new_one_meanwhile() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"), most=1)
        end = asyncio.Event()
        running = asyncio.create_task(ask(pool, "a", end))
        await settle()
        other = asyncio.create_task(ask(pool, "b"))
        await settle()
        late = asyncio.create_task(ask(pool, "a"))
        await settle()
        assert not late.done()
        assert found(pool, "a").leaving
        assert not pool_engine(pool, "a").stopped
        pool.check_invariants()
        end.set()
        assert [await running, await other, await late] == ["a/1", "b/1", "a/2"]
        assert [each for each in noted.told if "evicted" in each] == ["a evicted", "b evicted"]
        await pool.stop()

    run(test)


def test_an_idle_model_leaves_rather_than_a_busy_one_used_longer_ago() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"), Source("c"), most=2)
        end = asyncio.Event()
        running = asyncio.create_task(ask(pool, "a", end))
        await settle()
        await ask(pool, "b")
        assert await ask(pool, "c") == "c/1"
        assert [each for each in noted.told if "evicted" in each] == ["b evicted"]
        end.set()
        assert await running == "a/1"
        await pool.stop()

    run(test)


def test_requests_that_wait_are_let_in_before_their_model_can_leave_again() -> None:
    """Two models take turns on the room for one: each load serves all that wait for it."""

    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"), most=1)
        got = await asyncio.gather(*(ask(pool, name) for name in "abababab"))
        assert got == ["a/1", "b/1"] * 4
        assert noted.told.count("a loaded") == noted.told.count("b loaded") == 1
        await pool.stop()

    run(test)


def test_a_model_stays_if_those_who_wanted_its_place_have_gone() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), Source("b"), most=1)
        end = asyncio.Event()
        running = asyncio.create_task(ask(pool, "a", end))
        await settle()
        other = asyncio.create_task(ask(pool, "b"))
        await settle()
        late = asyncio.create_task(ask(pool, "a"))
        await settle()
        other.cancel()
        assert await late == "a/1"
        end.set()
        assert await running == "a/1"
        await settle()
        assert (found(pool, "b").state, noted.told) == (ModelState.UNLOADED, ["a loading", "a loaded"])
        pool.check_invariants()
        await pool.stop()

    run(test)


def test_a_load_goes_on_when_its_client_disconnects() -> None:
    async def test() -> None:
        source = Source("a", held=True)
        pool, _ = pool_of(source)
        asking = asyncio.create_task(ask(pool, "a"))
        await settle()
        asking.cancel()
        await settle()
        assert found(pool, "a").state is ModelState.LOADING
        source.go.set()
        await settle()
        assert (found(pool, "a").state, found(pool, "a").num_users) == (ModelState.LOADED, 0)
        assert await ask(pool, "a") == "a/1"
        await pool.stop()

    run(test)


def test_who_gives_up_at_the_moment_of_the_end_of_the_load_holds_nothing() -> None:
    async def test() -> None:
        source = Source("a", held=True)
        pool, _ = pool_of(source)
        asking = asyncio.create_task(ask(pool, "a"))
        await settle()
        source.go.set()
        while found(pool, "a").state is not ModelState.LOADED:
            await asyncio.sleep(0)
        asking.cancel()
        await settle()
        assert found(pool, "a").num_users == 0
        await pool.stop()

    run(test)


def test_all_who_wait_learn_why_a_load_fails_and_it_is_tried_again_after_a_pause() -> None:
    async def test() -> None:
        source = Source("a", error=ModelError("the file is cut off"))
        pool, noted = pool_of(source)
        got = await asyncio.gather(*(ask(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in got] == ["model 'a' cannot be loaded: the file is cut off"] * 3
        assert all(isinstance(each, NotReadyError) for each in got)
        assert (found(pool, "a").state, pool.reserved_bytes) == (ModelState.UNLOADED, 0)
        assert source.engines[0].stopped
        with pytest.raises(NotReadyError, match="the file is cut off") as caught:
            await ask(pool, "a")
        assert 1 <= caught.value.retry_after_s <= 10
        assert len(source.engines) == 1
        found(pool, "a").failed_s -= 60  # as if a minute had passed
        source.error = None
        assert await ask(pool, "a") == "a/2"
        assert found(pool, "a").failure is None
        assert noted.told == ["a loading", "a failed", "a loading", "a loaded"]
        await pool.stop()

    run(test)


def test_a_request_waits_no_longer_than_it_may_and_learns_when_to_come_back() -> None:
    async def test() -> None:
        source = Source("a", held=True)
        pool, _ = pool_of(source, patience_s=0.05)
        found(pool, "a").load_s = 4.5  # of an earlier load
        with pytest.raises(NotReadyError, match=r"'a' was not loaded within 0\.05 s") as caught:
            await ask(pool, "a")
        assert caught.value.retry_after_s == 5
        source.go.set()
        await settle()
        assert await ask(pool, "a") == "a/1"
        await pool.stop()

    run(test)


def test_an_engine_that_dies_for_good_is_replaced_after_a_pause() -> None:
    async def test() -> None:
        source = Source("a")
        pool, noted = pool_of(source, Source("b"))
        await ask(pool, "a")
        source.engines[0].death.set_result(EngineDiedError("the engine died (signal 9)"))
        await settle()
        model = found(pool, "a")
        assert (model.state, str(model.failure)) == (ModelState.UNLOADED, "the engine died (signal 9)")
        assert (source.engines[0].stopped, pool.reserved_bytes) == (True, 0)
        with pytest.raises(NotReadyError, match="signal 9"):
            await ask(pool, "a")
        assert await ask(pool, "b") == "b/1"
        found(pool, "a").failed_s -= 60  # as if a minute had passed
        assert await ask(pool, "a") == "a/2"
        assert "a died" in noted.told
        await pool.stop()

    run(test)


def test_an_operator_unloads_a_model_with_its_requests_drained_and_ends_a_load() -> None:
    async def test() -> None:
        source, held = Source("a"), Source("b", held=True)
        pool, noted = pool_of(source, held)
        end = asyncio.Event()
        running = asyncio.create_task(ask(pool, "a", end))
        await settle()
        engine = pool_engine(pool, "a")
        engine.drained = end
        unloading = asyncio.create_task(pool.unload(found(pool, "a")))
        await settle()
        assert (engine.stopped, engine.drained_s) == (False, 7.0)
        end.set()
        assert await running == "a/1"
        await unloading
        assert engine.stopped
        waiting = asyncio.create_task(ask(pool, "b"))
        await settle()
        await pool.unload(found(pool, "b"))
        with pytest.raises(NotReadyError, match="'b' was unloaded before it was ready"):
            await waiting
        assert held.engines[0].stopped
        assert pool.reserved_bytes == 0
        await pool.unload(found(pool, "b"))
        assert noted.told == ["a loading", "a loaded", "a request", "b loading"]
        pool.check_invariants()
        await pool.stop()

    run(test)


def test_an_idle_model_is_unloaded_after_its_time() -> None:
    async def test() -> None:
        pool, noted = pool_of(Source("a"), idle_s=0.05)
        await pool.start()
        end = asyncio.Event()
        running = asyncio.create_task(ask(pool, "a", end))
        await asyncio.sleep(0.2)
        assert found(pool, "a").state is ModelState.LOADED
        end.set()
        await running
        while found(pool, "a").state is not ModelState.UNLOADED:
            await asyncio.sleep(0.01)
        assert noted.told[-1] == "a idle"
        await pool.stop()

    run(test)


def test_the_drain_refuses_who_waits_ends_loads_and_drains_engines() -> None:
    async def test() -> None:
        held = Source("b", held=True)
        pool, _ = pool_of(Source("a"), held)
        await ask(pool, "a")
        waiting = asyncio.create_task(ask(pool, "b"))
        await settle()
        await pool.drain(3.0)
        for asking in (waiting, ask(pool, "a")):
            with pytest.raises(NotReadyError):
                await asking
        assert (pool.state, held.engines[0].stopped) == (EngineState.DRAINING, True)
        assert pool_engine(pool, "a").drained_s == 3.0
        await pool.stop()
        assert all(each.engine is None for each in pool.models)
        assert isinstance(await pool.wait_dead(), FaserError)

    run(test)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_request_is_served_by_its_own_model_or_refused(seed: int) -> None:
    """Oracle: the invariants, and the application of each request. Loads fail, clients leave, engines die."""

    async def test() -> None:
        rng = random.Random(seed)
        sources = [Source(name, size=PROCESS_BYTES + rng.randrange(1, 400) * MIB) for name in "abcd"]
        budget = max(each.size for each in sources) + rng.randrange(0, 3) * PROCESS_BYTES
        pool, _ = pool_of(*sources, most=rng.choice((None, 1, 2)), memory=budget)
        counts = dict.fromkeys(("served", "refused", "left"), 0)

        async def request(name: str) -> None:
            try:
                async with pool.use(found(pool, name)) as app:
                    assert app.split("/")[0] == name
                    engine = sources["abcd".index(name)].engines[int(app.split("/")[1]) - 1]
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                        assert not engine.stopped or engine.death.done(), "evicted while it was busy"
                    counts["served"] += 1
            except NotReadyError:
                counts["refused"] += 1
            except asyncio.CancelledError:
                counts["left"] += 1

        asking: list[asyncio.Task[None]] = []
        for _ in range(300):
            draw = rng.random()
            source = rng.choice(sources)
            if draw < 0.75:
                asking.append(asyncio.create_task(request(source.name)))
            elif draw < 0.85 and asking:
                rng.choice(asking).cancel()
            elif draw < 0.9:
                source.error = ModelError("no") if source.error is None else None
            elif draw < 0.93 and source.engines and not source.engines[-1].death.done():
                source.engines[-1].death.set_result(EngineDiedError("gone"))
            for model in pool.models:
                model.failed_s -= rng.random() * 20  # as if time had passed
            await asyncio.sleep(0)
            pool.check_invariants()
            assert pool.reserved_bytes <= budget
        for each in await asyncio.gather(*asking, return_exceptions=True):
            assert not isinstance(each, Exception)
        before_start = sum(each.cancelled() for each in asking)
        assert sum(counts.values()) + before_start == len(asking)
        assert counts["served"] > 20
        await pool.stop()
        assert all(engine.stopped for source in sources for engine in source.engines)

    run(test)
