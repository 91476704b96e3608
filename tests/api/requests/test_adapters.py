"""Adapters in the front-end: which name stands for which files, and how they come and go."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from faser.api.requests.adapters import Adapters, no_adapters, read_modules
from faser.config.adapters import AdapterModule
from faser.errors import ConfigError, ModelError, OverloadError, RequestError, UnknownModelError
from faser.types.adapter import Adapter
from tests.fake_engine import FakeEngine

NAMES = ("tiny", "tiny-alias")


def read(name: str, path: str) -> Adapter:
    """The digest follows from the last part of the path, which stands for the files."""
    if path.endswith("missing"):
        raise ModelError(f"{path} is no adapter")
    return Adapter(name=name, path=path, digest=hashlib.sha256(Path(path).name.encode()).hexdigest())


def run(
    work: Callable[[Adapters], Coroutine[Any, Any, None]], engine: FakeEngine, folder: Path | None = None
) -> None:
    asyncio.run(work(Adapters(engine, read, served_names=NAMES, folder=folder)))


def names(adapters: Adapters) -> list[str]:
    return [each.adapter.name for each in adapters]


def test_an_adapter_is_loaded_before_it_is_served_and_dropped_after() -> None:
    engine = FakeEngine()

    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "/a/sql")
        served = adapters.get("sql")
        assert served is not None
        assert served.parent == "tiny"
        assert engine.adapters == [served.adapter]
        await adapters.unload("sql")
        assert adapters.get("sql") is None
        assert engine.adapters == []

    run(work, engine)


def test_a_load_for_which_there_is_no_room_holds_no_other_up() -> None:
    engine = FakeEngine()

    async def work() -> None:
        adapters = Adapters(engine, read, served_names=NAMES, load_s=0.01)
        await adapters.load("sql", "/a/sql")
        engine.step_s = 60
        loading = asyncio.create_task(adapters.load("chat", "/a/chat"))
        await asyncio.sleep(0)
        await adapters.unload("sql")
        with pytest.raises(OverloadError, match=r"not loaded within 0\.01 s, .* raise --max-cpu-loras"):
            await loading
        assert names(adapters) == []

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_failed_load_changes_nothing() -> None:
    engine = FakeEngine()
    engine.bad_adapters.add(read("x", "/a/bad").digest)

    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "/a/sql")
        for path in ("/a/missing", "/a/bad"):
            with pytest.raises(RequestError, match=path):
                await adapters.load("sql", path, replaces=True)
        served = adapters.get("sql")
        assert served is not None
        assert served.adapter.path == "/a/sql"
        assert engine.adapters == [served.adapter]

    run(work, engine)


def test_a_name_is_taken_until_it_is_replaced_or_unloaded() -> None:
    engine = FakeEngine()

    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "/a/one")
        with pytest.raises(RequestError, match="load_inplace"):
            await adapters.load("sql", "/a/two")
        await adapters.load("sql", "/a/two", replaces=True)
        assert [each.path for each in engine.adapters] == ["/a/two"]
        await adapters.unload("sql")
        await adapters.load("sql", "/a/one")

    run(work, engine)


@pytest.mark.parametrize("name", ["tiny", "tiny-alias"])
def test_an_adapter_never_hides_the_model(name: str) -> None:
    async def work(adapters: Adapters) -> None:
        with pytest.raises(RequestError, match="the name of the served model"):
            await adapters.load(name, "/a/sql", replaces=True)

    run(work, FakeEngine())


@pytest.mark.parametrize("name", ["", "a,b", "a\nb", "x" * 257])
def test_a_name_that_no_metric_or_log_could_show_is_refused(name: str) -> None:
    async def work(adapters: Adapters) -> None:
        with pytest.raises(RequestError, match="printable"):
            await adapters.load(name, "/a/sql")

    run(work, FakeEngine())


def test_files_with_two_names_stay_until_both_are_unloaded() -> None:
    engine = FakeEngine()

    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "/a/same")
        await adapters.load("sql-v1", "/b/same")
        await adapters.unload("sql")
        assert engine.adapters != []
        await adapters.unload("sql-v1")
        assert engine.adapters == []

    run(work, engine)


def test_of_two_loads_at_once_with_one_name_one_wins() -> None:
    engine = FakeEngine()
    engine.step_s = 0.05

    async def work(adapters: Adapters) -> None:
        loads = (adapters.load("sql", path) for path in ("/a/one", "/a/two"))
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert first is None
        assert isinstance(second, RequestError)
        assert [each.path for each in engine.adapters] == ["/a/one"]

    run(work, engine)


def test_an_unknown_adapter_cannot_be_unloaded() -> None:
    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "/a/sql")
        with pytest.raises(UnknownModelError, match="'poems' not found; loaded adapters: sql"):
            await adapters.unload("poems")

    run(work, FakeEngine())


@pytest.mark.parametrize("path", ["../secret", "/etc", "sub/../../secret", "link/secret", "", ".", "a\0b"])
def test_no_path_of_a_client_leaves_the_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").mkdir()
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)

    async def work(adapters: Adapters) -> None:
        with pytest.raises(RequestError, match="--lora-dir"):
            await adapters.load("sql", path)

    run(work, FakeEngine(), folder)


def test_a_path_of_a_client_is_relative_to_the_folder(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def work(adapters: Adapters) -> None:
        await adapters.load("sql", "team/sql")
        assert [each.path for each in engine.adapters] == [str(tmp_path.resolve() / "team" / "sql")]

    run(work, engine, tmp_path)


def test_a_server_without_room_names_the_flag() -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match="--enable-lora"):
            await no_adapters(FakeEngine(), NAMES).load("sql", "/a/sql")

    asyncio.run(work())


def test_modules_of_the_operator_have_the_parent_that_he_names() -> None:
    async def work() -> None:
        modules = await read_modules(
            [
                AdapterModule(name="sql", path="/a/sql"),
                AdapterModule(name="poems", path="/a/poems", base_model_name="base"),
            ],
            read,
        )
        adapters = Adapters(FakeEngine(), read, served_names=NAMES, modules=modules)
        assert [(each.adapter.name, each.parent) for each in adapters] == [("sql", "tiny"), ("poems", "base")]
        with pytest.raises(ConfigError, match="poems has the name of the served model"):
            Adapters(FakeEngine(), read, served_names=("poems",), modules=modules)
        with pytest.raises(ModelError, match="is no adapter"):
            await read_modules([AdapterModule(name="x", path="/a/missing")], read)

    asyncio.run(work())
