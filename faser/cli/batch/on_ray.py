"""A batch on a Ray cluster: lines of a file go through Ray Data to engines on its nodes, results come back here.

This process alone writes results, each line's once, as they come; so the file of results is the checkpoint on a
cluster too. Ray Data restarts an engine whose process or node has ended, and gives it its lines again. Imports Ray
when it is asked to answer.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import msgspec

from faser.api.middleware.keys import ApiKeys
from faser.cli.application import Application, make_metrics, started, while_alive
from faser.cli.batch.lines import BatchLine, ResultsFile, Totals, answer_line
from faser.cli.preparation import read_chat_template
from faser.config.sources import SETTINGS, parse, server_settings
from faser.errors import ConfigError, EngineError

_LINES = 4  # of one call of an engine: a call's results arrive together
_MOST_CALLS = 4096  # of a long file, whose calls have more lines

_log = logging.getLogger("faser.ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines that run a batch. address: None: this one alone. num_replicas: engines; None: one for each node.

    num_cpus, num_gpus: that Ray sets apart for each engine.
    """

    address: str | None
    num_replicas: int | None
    num_cpus: float
    num_gpus: float


def answer_on_ray(
    prog: str,
    flags: Sequence[str],
    cluster: Cluster,
    lines: Sequence[BatchLine],
    results: ResultsFile,
    *,
    at_once: int,
    on_result: Callable[[], None],
) -> Totals:
    """Answer all lines. flags: of faser serve, the model among them. at_once: lines, of each engine.

    Raises ConfigError for a cluster that cannot be reached, EngineError if an engine ends for good.
    """
    totals, missing = Totals(), {line.number for line in lines}
    if not lines:
        return totals
    with _connected(cluster) as num_replicas, _translated():
        for row in _answers(prog, flags, cluster, num_replicas, lines, at_once).iter_rows():
            if row["number"] not in missing:
                _log.warning("line %d was answered twice; its first result is kept", row["number"])
                continue
            missing.remove(row["number"])
            result = msgspec.json.decode(row["result"])
            totals.count(result)
            results.write(result)
            on_result()
    if missing:
        raise EngineError(
            f"Ray has lost {len(missing)} lines, line {min(missing)} first; --resume tries them again"
        )
    return totals


def _answers(
    prog: str, flags: Sequence[str], cluster: Cluster, num_replicas: int, lines: Sequence[BatchLine], at_once: int
) -> Any:
    """A dataset with a row {number, result} for each line."""
    from ray.data import ActorPoolStrategy, from_items

    size = min(at_once, max(_LINES, math.ceil(len(lines) / _MOST_CALLS)))
    calls = max(1, at_once // size)
    items = [{"line": msgspec.json.encode(line)} for line in lines]
    return from_items(items, override_num_blocks=math.ceil(len(items) / size)).map_batches(
        Answerer,
        fn_constructor_args=(prog, list(flags)),
        batch_size=None,  # a block
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=num_replicas,
            max_tasks_in_flight_per_actor=2 * calls,
            max_concurrent_calls_per_actor=calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=cluster.num_cpus,
        num_gpus=cluster.num_gpus,
        scheduling_strategy="SPREAD",
    )


class Answerer:
    """An engine and its application, in a thread of an actor of Ray Data, which calls it from several threads."""

    def __init__(self, prog: str, flags: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="faser-batch", daemon=True).start()
        self._stack = AsyncExitStack()
        self._application: Application = self._in_loop(partial(self._start, prog, flags)).result()

    def __call__(self, batch: Any) -> Any:
        """batch: a table of Arrow, as is what comes back: a row {number, result} for each {line}."""
        import pyarrow

        lines = [msgspec.json.decode(each, type=BatchLine) for each in batch.column("line").to_pylist()]
        found = self._in_loop(partial(self._answer, lines)).result()
        results = [msgspec.json.encode(each) for each in found]
        return pyarrow.table({"number": [each.number for each in lines], "result": results})

    async def _start(self, prog: str, flags: Sequence[str]) -> Application:
        findings = parse(prog, flags, SETTINGS)
        engine_config, server_config = server_settings(findings)
        template = read_chat_template(server_config.chat_template, findings.label("chat_template"))
        metrics = make_metrics(engine_config, server_config)
        loading = started(engine_config, server_config, ApiKeys(()), template, metrics, _log_progress)
        return await self._stack.enter_async_context(loading)

    async def _answer(self, lines: Sequence[BatchLine]) -> list[dict[str, Any]]:
        """In the order of the lines: a call that Ray repeats has the same number of results in the same place."""
        transport = httpx.ASGITransport(app=self._application.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            answers = asyncio.gather(*(answer_line(client, line) for line in lines))
            return await while_alive(_awaited(answers), self._application.engine)

    def _in_loop(self, work: Callable[[], Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work(), self._loop)


def _log_progress(stage: str, done: int, total: int) -> None:
    _log.debug("%s: %d of %d", stage, done, total)


async def _awaited(answers: "asyncio.Future[list[dict[str, Any]]]") -> list[dict[str, Any]]:
    return await answers


@contextmanager
def _connected(cluster: Cluster) -> Iterator[int]:
    """Within it there is a cluster; gives the number of engines. Raises ConfigError."""
    import ray
    from ray.data import DataContext

    own = not ray.is_initialized()
    if own:
        try:
            ray.init(
                cluster.address or "local", log_to_driver=False, logging_level="ERROR", include_dashboard=False
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray-address is {cluster.address}; {str(error).splitlines()[0]}") from None
    try:
        data = DataContext.get_current()
        data.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield cluster.num_replicas or sum(each["Alive"] for each in ray.nodes())
    finally:
        if own:
            ray.shutdown()


@contextmanager
def _translated() -> Iterator[None]:
    """Ray's errors as an EngineError of one line."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise EngineError(
            f"Ray: {str(cause).strip().splitlines()[-1]}; --resume goes on with what is left"
        ) from None
