"""Servers as processes: started, frozen while another one is measured, asked, looked at, and stopped.

Owns the processes, what they hold and what they cost in processor time, and a closed loop of clients that ask
FASER. A frozen server costs nothing, whatever its idle loop does.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.prompts import Prompt

START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 600.0
HELLO = Prompt(question_id=0, category="warm-up", text="Say hello.")
_POLL_S = 0.1
_KILL_TIMEOUT_S = 20.0
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class ServerError(Exception):
    """A server did not start, or ended before it was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe to start a server. environment: variables besides the caller's own. log_path: of its output."""

    name: str
    command: tuple[str, ...]
    base_url: str
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command for a result: folders of this machine are not named in it."""
        return " ".join("=".join(Path(part).name for part in each.split("=")) for each in self.command)


class Server:
    """One running server with all its processes. Use as a context manager: leaving it ends them."""

    def __init__(self, recipe: Recipe, *, grace_s: float = 20.0) -> None:
        """grace_s: how long its processes may take to end by themselves."""
        self.recipe = recipe
        self._grace_s = grace_s
        self._output = recipe.log_path.open("wb")
        self._process = psutil.Popen(
            recipe.command,
            env={**os.environ, **recipe.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.recipe.base_url

    @property
    def log(self) -> str:
        return self.recipe.log_path.read_text("utf-8", "replace")

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S, route: str = "/health") -> float:
        """Seconds until the route answered 200. Raises ServerError with the end of the log."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            if self._process.poll() is not None:
                raise ServerError(f"{self.recipe.name} ended while starting:\n{self._log_end()}")
            with contextlib.suppress(httpx.TransportError):  # nobody listens yet
                if httpx.get(f"{self.url}{route}", timeout=5, trust_env=False).is_success:
                    return time.monotonic() - began_s
            time.sleep(_POLL_S)
        raise ServerError(f"{self.recipe.name} is not healthy after {timeout_s:g} s:\n{self._log_end()}")

    def children(self) -> list[psutil.Process]:
        """The processes that its first one has started and that run: the engines."""
        return [each for each in self._process.children() if each.is_running()]

    def freeze(self) -> None:
        """No process of this server gets processor time until thaw."""
        self._each(lambda process: process.suspend())

    def thaw(self) -> None:
        self._each(lambda process: process.resume())

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let a frozen server run meanwhile."""
        self.thaw()
        try:
            yield
        finally:
            self.freeze()

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
        self._output.close()

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.stop()

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended since the list was made
                act(process)

    def _log_end(self) -> str:
        return "\n".join(self.log.splitlines()[-15:])


def faser_recipe(name: str, flags: Sequence[str], folder: Path, *program: str) -> Recipe:
    """`faser serve` with these flags, a model among them, on a free port. program: in place of the command."""
    port = free_port()
    command = program or (sys.executable, "-m", "faser", "serve")
    return Recipe(
        name=name,
        command=(*command, *flags, "--host", "127.0.0.1", "--port", str(port)),
        base_url=f"http://127.0.0.1:{port}",
        log_path=folder / f"{name.replace(' ', '-')}.log",
    )


@contextlib.contextmanager
def frozen_servers(
    arms: Mapping[str, Sequence[str]], folder: Path, most_at_once: int
) -> Iterator[dict[str, Server]]:
    """A server for each arm, as frozen_server makes it of its flags."""
    with contextlib.ExitStack() as stack:
        yield {
            arm: stack.enter_context(frozen_server(faser_recipe(arm, flags, folder), most_at_once))
            for arm, flags in arms.items()
        }


@contextlib.contextmanager
def frozen_server(recipe: Recipe, most_at_once: int, timeout_s: float = START_TIMEOUT_S) -> Iterator[Server]:
    """A server that has answered most_at_once short requests, and is frozen."""
    asking = Asking(concurrency=most_at_once, temperature=0, ignore_eos=True, max_tokens=32, salt="warm-up")
    with Server(recipe) as server:
        server.wait_until_healthy(timeout_s)
        ask_all(server.url, [HELLO] * most_at_once, asking)
        server.freeze()
        yield server


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


def peak_bytes(front_end_pid: int) -> dict[str, int]:
    """The kernel's high-water marks of the front-end's memory and of the engine's; both count what they share."""
    front_end = psutil.Process(front_end_pid)
    (engine,) = front_end.children()
    return {"front_end": _high_water(front_end.pid), "engine": _high_water(engine.pid)}


def _high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Resources of an idle server. tasks: unfinished asyncio tasks of the front-end. gauges: of /metrics."""

    front_end_descriptors: int
    front_end_threads: int
    front_end_tasks: int
    engine_descriptors: int
    engine_threads: int
    gauges: dict[str, float]


class WatchedServer(Server):
    """A FASER whose two processes are looked at from outside. flags: in addition to --port."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._socket = folder / "tasks"
        program = (sys.executable, "-m", "benchmarks", "serving.watched_server", str(self._socket))
        super().__init__(faser_recipe("server", flags, folder, *program), grace_s=0)
        self.front_end = psutil.Process(self._process.pid)

    def __exit__(self, *error: object) -> None:
        if any(error):
            print(self.log[-20_000:], file=sys.stderr)
        self.stop()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

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

    def idle_holdings(self, timeout_s: float = 60.0) -> Holdings:
        """Holdings once nothing runs, waits or holds a block, or once timeout_s have passed all the same.

        Raises ServerError if there is no engine.
        """
        deadline_s = time.monotonic() + timeout_s
        while any(self.gauges().values()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        time.sleep(1.0)  # connections that clients have closed are closed here too
        gauges, tasks, engine = self.gauges(), self._tasks(), self.engine()
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

    def end(self) -> int | None:
        """Exit status after SIGTERM; None: it did not end within a minute."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
            status: int = self._process.wait(60.0)
            return status
        return None

    def _tasks(self) -> list[str]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            with connection.makefile("rb") as answer:
                names: list[str] = json.load(answer)
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Form of a run's requests. salt: of the prefix cache and of the corpus of past answers, for all of them.

    in_turn: further fields, of which each request has one set, in turn; empty: none has any.
    """

    concurrency: int
    temperature: float
    ignore_eos: bool
    max_tokens: int
    salt: str
    in_turn: tuple[Mapping[str, Any], ...] = ()

    def body(self, prompt: Prompt, number: int = 0) -> dict[str, Any]:
        """The request with this number. Its seed is the question's, so that every arm samples the same answer."""
        return {
            **(self.in_turn[number % len(self.in_turn)] if self.in_turn else {}),
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": prompt.question_id,
            "cache_salt": self.salt,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a server. tokens: output tokens of all answers. drafted, accepted: as metrics.faser counts.

    texts: of the answers, in the order of the prompts. paid: what drafts bring, as the server has measured it over
    all runs so far: by how many sequences decode, then by bound.
    """

    tokens: int
    seconds: float
    drafted: int
    accepted: int
    texts: tuple[str, ...]
    paid: Mapping[str, Mapping[str, float]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def ask_all(url: str, prompts: Sequence[Prompt], asking: Asking) -> Run:
    """Answers to all prompts. Raises httpx.HTTPError where one is refused or does not come in ten minutes."""
    try:
        return asyncio.run(_closed_loop(url, prompts, asking))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # one client's trouble is enough to end all


async def _closed_loop(url: str, prompts: Sequence[Prompt], asking: Asking) -> Run:
    waiting = iter(enumerate(prompts))
    answers: dict[int, dict[str, Any]] = {}

    async def client(http: httpx.AsyncClient) -> None:
        for number, prompt in waiting:
            response = await http.post("/v1/chat/completions", json=asking.body(prompt, number))
            if response.is_error:
                raise httpx.HTTPStatusError(
                    f"{response.url} answered {response.status_code}: {response.text[:1000]}",
                    request=response.request,
                    response=response,
                )
            answers[number] = response.json()

    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as http:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(asking.concurrency):
                clients.create_task(client(http))
        seconds = time.perf_counter() - began_s
        paid = paid_ratios((await http.get("/metrics")).raise_for_status().text)
    places = range(len(prompts))
    counted = [(answers[place].get("metrics") or {}).get("faser") or {} for place in places]
    return Run(
        tokens=sum(answers[place]["usage"]["completion_tokens"] for place in places),
        seconds=seconds,
        drafted=sum(each.get("drafted", 0) for each in counted),
        accepted=sum(each.get("accepted", 0) for each in counted),
        texts=tuple(answers[place]["choices"][0]["message"]["content"] for place in places),
        paid=paid,
    )


def paid_ratios(page: str) -> dict[str, dict[str, float]]:
    """faser_spec_paid_ratio of a page of metrics: by how many sequences decode, then by bound."""
    found: dict[str, dict[str, float]] = {}
    for labels, value in re.findall(r"^faser_spec_paid_ratio\{(.*)\} (\S+)$", page, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(of["sequences"], {})[of["bound"]] = round(float(value), 3)
    return found
