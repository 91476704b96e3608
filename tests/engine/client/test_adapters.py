"""Adapters of a real engine as its front-end has them: loaded ahead, on demand, dropped, and after a death."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import Transport
from faser.engine.client.replicas import Replicas
from faser.engine.client.supervisor import Supervision
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import EngineDiedError, ModelError, NotReadyError, RequestError
from faser.types.adapter import Adapter
from faser.types.engine import EngineState
from faser.types.request import Request
from tests.engine.checkpoints.adapter_files import tiny_modules, write_adapter
from tests.engine.client.test_async_engine import CONFIG, GREEDY, answer, children, request, until

WITH_ROOM = replace(CONFIG, enable_lora=True, max_loras=1, max_lora_rank=8)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(folder / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    return [read_adapter(path.name, path, max_rank=8) for path in paths]


@pytest.fixture(scope="module")
def misfit(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """An adapter of a layer that the model does not have."""
    modules = {name.replace("layers.0", "layers.9"): shape for name, shape in tiny_modules("q_proj").items()}
    return read_adapter("misfit", write_adapter(tmp_path_factory.mktemp("misfit"), modules), max_rank=8)


@asynccontextmanager
async def running(
    directory: Path, tokenizer: Tokenizer, transport: Transport = "thread", first: tuple[Adapter, ...] = ()
) -> AsyncIterator[AsyncEngine]:
    supervision = Supervision(max_restarts=1 if transport == "process" else 0)
    engine = AsyncEngine(
        WITH_ROOM, directory, tokenizer, transport=transport, supervision=supervision, adapters=first
    )
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def asking(tokenizer: Tokenizer, adapter: Adapter | None) -> Request:
    return replace(request("the quick brown", tokenizer, GREEDY), adapter=adapter)


async def told(engine: AsyncEngine, tokenizer: Tokenizer, adapter: Adapter | None) -> tuple[int, ...]:
    deltas = await answer(engine, asking(tokenizer, adapter))
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


def test_an_adapter_answers_alike_whether_it_was_loaded_ahead_or_on_demand(
    tiny_checkpoint: Path, tokenizer: Tokenizer, adapters: list[Adapter]
) -> None:
    one, two = adapters

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, first=(one,)) as engine:
            base = await told(engine, tokenizer, None)
            ahead, on_demand = await told(engine, tokenizer, one), await told(engine, tokenizer, two)
            assert len({base, ahead, on_demand}) == 3
            engine.drop_adapter(one)
            await engine.load_adapter(two)
            engine.drop_adapter(two)
            assert await told(engine, tokenizer, one) == ahead
            assert await told(engine, tokenizer, two) == on_demand
            together = await asyncio.gather(*(told(engine, tokenizer, each) for each in (None, one, two) * 2))
            assert together == [base, ahead, on_demand] * 2
            await until(lambda: engine.stats.running_adapters == engine.stats.waiting_adapters == ())

    asyncio.run(scenario())


def test_dropping_an_adapter_that_runs_does_not_touch_its_request(
    tiny_checkpoint: Path, tokenizer: Tokenizer, adapters: list[Adapter]
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer) as engine:
            whole = await told(engine, tokenizer, adapters[0])
            async with engine.submit(asking(tokenizer, adapters[0])) as stream:
                first = await anext(stream)
                engine.drop_adapter(adapters[0])
                rest = [delta async for output in stream for delta in output.deltas]
            tokens = [token_id for delta in (*first.deltas, *rest) for token_id in delta.token_ids]
            assert tuple(tokens) == whole

    asyncio.run(scenario())


def test_an_adapter_that_does_not_fit_is_named(
    tiny_checkpoint: Path, tokenizer: Tokenizer, misfit: Adapter
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer) as engine:
            with pytest.raises(RequestError, match=r"model\.layers\.9"):
                await engine.load_adapter(misfit)
            with pytest.raises(RequestError, match=r"model\.layers\.9"):
                await told(engine, tokenizer, misfit)
            assert await told(engine, tokenizer, None)
        with pytest.raises(ModelError, match="adapter misfit: "):
            async with running(tiny_checkpoint, tokenizer, first=(misfit,)):
                pass

    asyncio.run(scenario())


def test_files_that_change_behind_the_server_answer_no_request(
    tiny_checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    adapter = read_adapter("one", write_adapter(tmp_path / "one"), max_rank=8)
    write_adapter(tmp_path / "one", seed=1)

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer) as engine:
            with pytest.raises(RequestError, match="has changed since it was loaded"):
                await told(engine, tokenizer, adapter)

    asyncio.run(scenario())


def test_an_engine_that_is_started_again_reads_adapters_on_demand(
    tiny_checkpoint: Path, tokenizer: Tokenizer, adapters: list[Adapter]
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, "process", first=(adapters[0],)) as engine:
            before = await told(engine, tokenizer, adapters[0])
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            loading = asyncio.create_task(engine.load_adapter(adapters[1]))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match="signal 9"):
                await loading
            with pytest.raises(NotReadyError, match="restarting"):
                await engine.load_adapter(adapters[1])
            await until(lambda: engine.state is EngineState.READY, 60)
            assert await told(engine, tokenizer, adapters[0]) == before

    asyncio.run(scenario())


def test_replicas_that_are_ready_load_it_all(
    tiny_checkpoint: Path, tokenizer: Tokenizer, adapters: list[Adapter], misfit: Adapter
) -> None:
    async def scenario() -> None:
        engines = [AsyncEngine(WITH_ROOM, tiny_checkpoint, tokenizer, transport="thread") for _ in range(2)]
        replicas = Replicas(engines)
        with pytest.raises(NotReadyError):
            await replicas.load_adapter(adapters[0])
        await replicas.start()
        try:
            await replicas.wait_ready()
            await replicas.load_adapter(adapters[0])
            with pytest.raises(RequestError, match=r"model\.layers\.9"):
                await replicas.load_adapter(misfit)
            found = await asyncio.gather(*(told(each, tokenizer, adapters[0]) for each in engines))
            assert found[0] == found[1]
        finally:
            await replicas.stop()

    asyncio.run(scenario())
