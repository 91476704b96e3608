"""Servers as processes: started, frozen while another one is measured, thawed, stopped.

Owns the processes and what they cost in processor time. A frozen server costs nothing, whatever its idle
loop does. Does not know what the servers are.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

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
