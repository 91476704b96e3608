"""Servers as processes: started, frozen while another one is measured, thawed, stopped.

Owns the processes and what they cost in processor time. A frozen server costs nothing, whatever its idle
loop does. Does not know what the servers are.

The server under attack, seen from outside: its two processes, what they hold, what its routes say.

A closed loop of chat requests against one FASER server: what came back, and how long all of it took.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.prompts import Prompt

_POLL_S = 0.25
_KILL_TIMEOUT_S = 20.0


class ServerError(Exception):
    """A server did not start, or ended before it was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to start a server. environment: variables beside the caller's own. log_path: its output goes there."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    base_url: str
    log_path: Path


class Server:
    """One running server with all its processes. Use as a context manager: leaving it ends them."""

    def __init__(self, recipe: Recipe, *, grace_s: float = 20.0) -> None:
        """grace_s: how long its processes may take to end by themselves."""
        self.recipe = recipe
        self._grace_s = grace_s
        self._log = recipe.log_path.open("wb")
        self._process = psutil.Popen(
            recipe.command,
            env={**os.environ, **recipe.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Seconds until /health answered 200. Raises ServerError with the end of the log."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            if self._process.poll() is not None:
                raise ServerError(f"{self.recipe.name} ended while starting:\n{self._log_end()}")
            try:
                if httpx.get(f"{self.recipe.base_url}/health", timeout=5, trust_env=False).is_success:
                    return time.monotonic() - began_s
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(_POLL_S)
        raise ServerError(f"{self.recipe.name} is not healthy after {timeout_s:g} s:\n{self._log_end()}")

    def freeze(self) -> None:
        """No process of this server gets processor time until thaw."""
        self._each(lambda process: process.suspend())

    def thaw(self) -> None:
        self._each(lambda process: process.resume())

    def cpu_s(self) -> float:
        """Processor seconds of all its processes that live."""
        total = 0.0

        def add(process: psutil.Process) -> None:
            nonlocal total
            times = process.cpu_times()
            total += times.user + times.system

        self._each(add)
        return total

    def stop(self) -> None:
        """SIGTERM to the first process, and after the grace SIGKILL to whatever is left."""
        processes = self._processes()
        self.thaw()
        if self._process.poll() is None:
            self._process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=self._grace_s)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_KILL_TIMEOUT_S)
        self._log.close()

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self._processes():
            try:
                act(process)
            except psutil.NoSuchProcess:
                continue  # it ended since the list was made

    def _log_end(self) -> str:
        lines = self.recipe.log_path.read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-15:])


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def busy_s(servers: Sequence[Server]) -> float:
    """Processor seconds that the whole machine spent so far on anything but these servers and this process."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait
    own = psutil.Process().cpu_times()
    return float(busy - own.user - own.system - sum(server.cpu_s() for server in servers))


START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 60.0
_server_POLL_S = 0.05
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What an idle server holds. tasks: unfinished asyncio tasks of the front-end. gauges: of /metrics."""

    front_end_descriptors: int
    front_end_threads: int
    front_end_tasks: int
    engine_descriptors: int
    engine_threads: int
    gauges: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class WatchedServer:
    """One `faser serve` on a free port of 127.0.0.1. Leaving the context kills what is left of it.

    folder: for its log and a socket. flags: beside --port.
    """

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.address = ("127.0.0.1", port)
        self._socket = folder / "tasks"
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "benchmarks.serving.watched_server", str(self._socket)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.front_end = psutil.Process(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.log[-20_000:], file=sys.stderr)
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in self.front_end.children(recursive=True):
                each.kill()
        self._process.kill()
        self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds until /ready answered 200. Raises ServerError with the log."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with status {self._process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5, trust_env=False).status_code == 200:
                    return time.monotonic() - began_s
            time.sleep(_server_POLL_S)
        raise ServerError(f"the server is not ready after {timeout_s:g} s:\n{self.log}")

    def engine(self) -> psutil.Process | None:
        """The engine's process; None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in self.front_end.children():
                if each.status() != psutil.STATUS_ZOMBIE:
                    return each
        return None

    def gauges(self) -> dict[str, float]:
        """Samples that run, samples that wait, and the share of KV blocks in use."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return {name: float(re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for name in _GAUGES}

    def holdings(self) -> Holdings:
        """Raises ServerError if there is no engine."""
        gauges, tasks = self.gauges(), self._tasks()
        engine = self.engine()
        if engine is None:
            raise ServerError(f"there is no engine:\n{self.log}")
        return Holdings(
            front_end_descriptors=self.front_end.num_fds(),
            front_end_threads=self.front_end.num_threads(),
            front_end_tasks=len(tasks),
            engine_descriptors=engine.num_fds(),
            engine_threads=engine.num_threads(),
            gauges=gauges,
        )

    def idle_holdings(self, timeout_s: float = 60.0) -> Holdings:
        """Holdings once nothing runs, waits or holds a block, or once timeout_s have passed all the same."""
        deadline_s = time.monotonic() + timeout_s
        while any(self.gauges().values()) and time.monotonic() < deadline_s:
            time.sleep(_server_POLL_S)
        time.sleep(1.0)  # connections that clients have closed are closed here too
        return self.holdings()

    def end(self) -> int | None:
        """Exit status after SIGTERM; None: it did not end."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_TIMEOUT_S)
        return None

    def _tasks(self) -> list[str]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            with connection.makefile("rb") as answer:
                names: list[str] = json.load(answer)
        return names


_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a run asks. salt: of the prefix cache and of the corpus of past answers, for all its requests."""

    concurrency: int
    temperature: float
    ignore_eos: bool
    max_tokens: int
    salt: str

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request. Its seed is the question's, so that every arm samples the same answer."""
        return {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": prompt.question_id,
            "cache_salt": self.salt,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One run. tokens: output tokens of all answers. drafted, accepted: tokens, as `metrics.faser` counts them.

    texts: the answers, in the order of the prompts.
    """

    tokens: int
    seconds: float
    drafted: int
    accepted: int
    texts: tuple[str, ...]


def ask_all(url: str, prompts: Sequence[Prompt], asking: Asking) -> Answered:
    """Answers to all prompts. Raises httpx.HTTPError where one is refused or does not come in ten minutes."""
    try:
        return asyncio.run(_closed_loop(url, prompts, asking))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # one client's trouble is enough to end all


async def _closed_loop(url: str, prompts: Sequence[Prompt], asking: Asking) -> Answered:
    waiting = iter(enumerate(prompts))
    answers: dict[int, dict[str, Any]] = {}

    async def client(http: httpx.AsyncClient) -> None:
        for number, prompt in waiting:
            response = await http.post("/v1/chat/completions", json=asking.body(prompt))
            response.raise_for_status()
            answers[number] = response.json()

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(asking.concurrency):
                clients.create_task(client(http))
        seconds = time.perf_counter() - began_s
    counted = [(answer.get("metrics") or {}).get("faser") or {} for answer in answers.values()]
    return Answered(
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers.values()),
        seconds=seconds,
        drafted=sum(each.get("drafted", 0) for each in counted),
        accepted=sum(each.get("accepted", 0) for each in counted),
        texts=tuple(answers[number]["choices"][0]["message"]["content"] for number in range(len(prompts))),
    )
