"""Containers of FASER's image, driven through the command line of podman or docker."""

import json
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PYTHON = "/opt/faser/bin/python"
GRACE_S = 30
_READY_TIMEOUT_S = 180.0
_EMPTY_LAYER = 4096
# As a cautious operator runs it. docker has no writable folder then; podman would add some, were it not told.
LOCKED_DOWN = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
_MEMORY = """
import os, pathlib
total = 0
for each in pathlib.Path("/proc").glob("[0-9]*/smaps_rollup"):
    if int(each.parent.name) != os.getpid():
        total += sum(int(l.split()[1]) for l in each.read_text().splitlines() if l.startswith("Pss:"))
print(total * 1024)
"""


class TrialError(Exception):
    """What was promised of the image is not so. The message says what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """program: podman or docker. flags: of every `run`."""

    program: str
    flags: tuple[str, ...] = ()

    def call(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Output of a command. Raises TrialError if it fails."""
        done = self.attempt(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise TrialError(f"{self.program} {shlex.join(arguments)}: {done.stderr.strip()[-600:]}")
        return done.stdout.strip()

    def attempt(self, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments],
            cwd=tempfile.gettempdir(),  # podman leaves a file named oom where a container ran out of memory
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def is_podman(self) -> bool:
        return self.program.endswith("podman")

    @property
    def json_format(self) -> str:
        return "json" if self.is_podman else "{{json .}}"

    @property
    def lock(self) -> tuple[str, ...]:
        return (*LOCKED_DOWN, "--read-only-tmpfs=false") if self.is_podman else LOCKED_DOWN


@dataclass(slots=True, kw_only=True)
class Container:
    """A running server. began_s: by time.monotonic(), before the engine was asked to start it."""

    engine: Engine
    name: str
    port: int
    began_s: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self, path: str) -> int | None:
        """Status of a GET; None: nothing listens."""
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code
        except httpx.TransportError:
            return None

    def wait_ready(self) -> float:
        """Seconds since it was started. Raises TrialError if it ends, or after three minutes."""
        while self.status("/ready") != 200:
            if time.monotonic() - self.began_s > _READY_TIMEOUT_S or not self.running:
                raise TrialError(f"not ready; it said: {self.logs()[-600:]}")
            time.sleep(0.05)
        return time.monotonic() - self.began_s

    @property
    def running(self) -> bool:
        return self.inspect("State.Running") == "true"

    def inspect(self, path: str) -> str:
        return self.engine.call("inspect", "--format", "{{." + path + "}}", self.name)

    def run_inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.engine.attempt("exec", self.name, *command)

    def memory_bytes(self) -> int:
        """Proportional share of memory of all processes inside."""
        return int(self.run_inside(PYTHON, "-c", _MEMORY).stdout)

    def stop(self, grace_s: int = GRACE_S) -> tuple[int, float]:
        """Exit status, and seconds from the signal to the end; it is killed after grace_s."""
        began_s = time.monotonic()
        self.engine.call("stop", "--time", str(grace_s), self.name)
        return int(self.inspect("State.ExitCode")), time.monotonic() - began_s

    def logs(self) -> str:
        done = self.engine.attempt("logs", self.name)
        return done.stdout + done.stderr


@contextmanager
def started(
    engine: Engine, image: str, *flags: str, arguments: Sequence[str] = (), lock: bool = True
) -> Iterator[Container]:
    """A container on the host's network, at a free port of 127.0.0.1; removed in the end with its volumes."""
    port = free_port()
    name = f"faser-trial-{port}"
    variables = ("--env", "FASER_HOST=127.0.0.1", "--env", f"FASER_PORT={port}")
    network = () if "--network" in flags else ("--network", "host")
    container = Container(engine=engine, name=name, port=port)
    try:
        engine.call(
            "run", "--detach", "--name", name, *network, *variables, *engine.flags,
            *(engine.lock if lock else ()), *flags, image, *arguments,
        )  # fmt: skip
        yield container
    finally:
        at_once = ("--time", "0") if engine.is_podman else ()
        engine.attempt("rm", "--force", "--volumes", *at_once, name)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def image_config(engine: Engine, image: str) -> dict[str, Any]:
    """What the image says of itself, as `inspect` shows it."""
    (found,) = json.loads(engine.call("image", "inspect", image))
    assert isinstance(found, dict)
    return found


def layers(engine: Engine, image: str) -> list[tuple[str, int]]:
    """(instruction, bytes) of each layer with content, the base first."""
    text = engine.call("history", "--no-trunc", "--human=false", "--format", engine.json_format, image)
    found = json.loads(text) if engine.is_podman else [json.loads(line) for line in text.splitlines()]
    sizes = [(str(each["CreatedBy"]).strip(), int(each["Size"])) for each in map(_capitalised, reversed(found))]
    return [(instruction, size) for instruction, size in sizes if size > _EMPTY_LAYER]


def _capitalised(record: dict[str, Any]) -> dict[str, Any]:
    """podman writes size and docker Size."""
    return {name[:1].upper() + name[1:]: value for name, value in record.items()}
