"""The server under attack, seen from outside: its two processes, what they hold, what its routes say."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.peers.servers import ServerError, free_port

START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 60.0
_POLL_S = 0.05
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
        command = [sys.executable, "-m", "benchmarks.chaos.watched_server", str(self._socket)]
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
            time.sleep(_POLL_S)
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
            time.sleep(_POLL_S)
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
