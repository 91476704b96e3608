"""The LoRA adapters that requests may name as their model, and how they come and go while the server runs.

An adapter is known by a name and by the digest of its files. Requests carry both, so an engine that is started
again, or that has dropped an adapter, reads it when the next request wants it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from faser.config.adapters import AdapterModule, name_problem
from faser.errors import ConfigError, ModelError, OverloadError, RequestError, UnknownModelError
from faser.types.adapter import Adapter

# Checks the files of a path and returns the adapter under a name. Called in a thread. Raises ModelError.
ReadAdapter = Callable[[str, str], Adapter]

_NAME, _PATH = "lora_name", "lora_path"  # fields of vLLM's routes
_LOAD_S = 60.0  # for a client's adapter: requests may use all the room that there is

_log = logging.getLogger("faser.api")


class AdapterLoader(Protocol):
    """An engine, in so far as it has adapters."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter ahead of requests. Raises RequestError (it is unusable), NotReadyError, EngineError."""
        ...

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter once no accepted request uses it."""
        ...


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """parent: name of the model that it changes. created_s: when it was loaded, in Unix seconds."""

    adapter: Adapter
    parent: str
    created_s: int


class Adapters:
    """Use it from one event loop.

    read: of files. served_names: of the model. modules: the operator's, each with the name of its model; None: the
    first served name. enabled: the engine has room for adapters. folder: to which paths
    that clients give are confined; None: they are not. load_s: the longest time that a client waits for a load.
    Raises ConfigError for a module with a served name.
    """

    def __init__(
        self,
        engine: AdapterLoader,
        read: ReadAdapter,
        *,
        served_names: Sequence[str],
        modules: Sequence[tuple[Adapter, str | None]] = (),
        enabled: bool = True,
        folder: Path | None = None,
        load_s: float = _LOAD_S,
    ) -> None:
        self._engine = engine
        self._read = read
        self._served_names = tuple(served_names)
        self._enabled = enabled
        self._folder = folder
        self._load_s = load_s
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()  # one after another: two may have one name
        for adapter, parent in modules:
            if adapter.name in self._served_names:
                raise ConfigError(
                    f"the adapter {adapter.name} has the name of the served model; name it otherwise"
                )
            self._serve(adapter, parent)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._served.values())

    def get(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter with a name; None: there is none."""
        return None if name is None else self._served.get(name)

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load an adapter that a client names, and serve it. replaces: the name may be taken by another adapter.

        Requests that run with an adapter that is replaced end with it. Raises RequestError, NotReadyError,
        OverloadError or EngineError; then nothing has changed.
        """
        if not self._enabled:
            raise RequestError("this server has no room for adapters; start it with --enable-lora", param=_NAME)
        if problem := name_problem(name):
            raise RequestError(f"{_NAME} is {name[:200]!r}; {problem}", param=_NAME)
        async with self._changing:
            if name in self._served_names:
                raise RequestError(f"{_NAME} is {name!r}, which is the name of the served model", param=_NAME)
            if name in self._served and not replaces:
                raise RequestError(
                    f"the adapter {name!r} is loaded already; unload it first, or send load_inplace: true",
                    param=_NAME,
                )
            try:
                adapter = await asyncio.to_thread(self._read, name, self._within(path))
            except ModelError as error:
                raise RequestError(str(error), param=_PATH) from None
            try:
                async with asyncio.timeout(self._load_s):
                    await self._engine.load_adapter(adapter)
            except TimeoutError:
                raise OverloadError(
                    f"the adapter was not loaded within {self._load_s:g} s, since running requests use all "
                    "adapters that the server keeps in memory; try again, or raise --max-cpu-loras"
                ) from None
            before = self._served.get(name)
            self._serve(adapter, None)
            if before is not None:
                self._drop(before.adapter)
        _log.info("adapter %s was loaded from %s", name, adapter.path)

    async def unload(self, name: str) -> None:
        """Serve an adapter no more; requests that have been accepted end with it. Raises UnknownModelError."""
        async with self._changing:
            if name not in self._served:
                known = ", ".join(self._served) or "none"
                raise UnknownModelError(f"adapter {name[:200]!r} not found; loaded adapters: {known}", param=_NAME)
            self._drop(self._served.pop(name).adapter)
        _log.info("adapter %s was unloaded", name)

    def _serve(self, adapter: Adapter, parent: str | None) -> None:
        self._served[adapter.name] = ServedAdapter(adapter, parent or self._served_names[0], int(time.time()))

    def _drop(self, adapter: Adapter) -> None:
        """Free an adapter, unless the same files are served under another name."""
        if all(each.adapter.digest != adapter.digest for each in self):
            self._engine.drop_adapter(adapter)

    def _within(self, path: str) -> str:
        """Return the path that a client means. Raises RequestError for one that leaves the folder."""
        if self._folder is None:
            return path
        folder = self._folder.resolve()
        try:
            found = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a null character; a circle of links
            found = folder.parent
        if not found.is_relative_to(folder) or found == folder:
            raise RequestError(
                f"{_PATH} is {path[:200]!r}; it must be below the server's --lora-dir, and relative to it",
                param=_PATH,
            )
        return str(found)


async def read_modules(modules: Sequence[AdapterModule], read: ReadAdapter) -> list[tuple[Adapter, str | None]]:
    """Read the operator's adapters; each comes with the name of its model. Raises ModelError."""
    found = []
    for module in modules:
        began_s = time.monotonic()
        adapter = await asyncio.to_thread(read, module.name, module.path)
        _log.info("read adapter %s of %s in %.1f s", module.name, adapter.path, time.monotonic() - began_s)
        found.append((adapter, module.base_model_name))
    return found


def no_adapters(engine: AdapterLoader, served_names: Sequence[str]) -> Adapters:
    """Return the adapters of a server that has none, and no room for any."""

    def read(name: str, path: str) -> Adapter:
        raise AssertionError(f"{name} is read from {path}, though there is no room for adapters")

    return Adapters(engine, read, served_names=served_names, enabled=False)
