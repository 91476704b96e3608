"""A real `faser serve` in a child process, as its users see it: a URL, a log, an exit status.

Owns the process and what is read off /metrics. Knows nothing of what tests ask the server.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil

from faser.config.environment import cache_dir
from faser.processes import python_command
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0

# The reference arithmetic on one thread: a test must not fight for cores.
_COMMON_FLAGS = ("--port", "0", "--dtype", "float32", "--backend", "torch", "--num-threads", "1")


class Server:
    """One running server. url: without /v1. key: the API key that clients made here bring."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, key: str) -> None:
        self.process = process
        self.url = ""
        self._log = log
        self._key = key

    @property
    def log(self) -> str:
        """What it has written so far, standard output and standard error together."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        """Fills in url. AssertionError with the log if the server ends, or takes too long."""
        until(lambda: " ready at " in self.log or self.process.poll() is not None, START_TIMEOUT_S)
        found = re.search(r" ready at (\S+)", self.log)
        assert found, f"the server ended with status {self.process.poll()}:\n{self.log}"
        self.url = found[1]

    def wait_end(self) -> int:
        """Its exit status."""
        return self.process.wait(END_TIMEOUT_S)

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self._key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._key, max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of vllm:name that have these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        series = re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        assert series, f"there is no metric vllm:{name}"
        return sum(float(value) for own, value in series if all(each in own for each in wanted))

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, and no KV block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def engine_process(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child


def start(
    model: Path | None,
    folder: Path,
    *flags: str,
    key: str = "none",
    variables: Mapping[str, str] | None = None,
    compiled: bool = True,
    cwd: Path = ROOT,
) -> Server:
    """A server that has just been started; it must be ended by `end`. folder: where its log and its cache go.

    model: None: the default model. variables: of its environment, besides this process's. compiled: it finds the
    kernels that this run of the tests has compiled; False: its cache is empty. cwd: where it is started.
    """
    kernels = folder / "cache" / "kernels"
    if compiled and not kernels.exists():
        kernels.parent.mkdir(exist_ok=True)
        kernels.symlink_to(cache_dir() / "kernels")
    descriptor, log = tempfile.mkstemp(prefix="server-", suffix=".log", dir=folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FASER_", "VLLM_"))}
    environment |= {"FASER_CACHE_DIR": str(folder / "cache"), "PYTHONUNBUFFERED": "1", **(variables or {})}
    named = [] if model is None else [str(model)]
    with open(descriptor, "wb") as output:
        process = subprocess.Popen(
            python_command("faser", "serve", *named, *_COMMON_FLAGS, *flags),
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Server(process, Path(log), key)


def end(server: Server) -> None:
    """Kill what is left of a server, its engine included."""
    try:
        left = psutil.Process(server.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        left = []
    server.process.kill()
    server.process.wait()
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()


@contextmanager
def serving(model: Path, folder: Path, *flags: str, key: str = "none") -> Iterator[Server]:
    """A server that answers, killed at the end if it still lives."""
    server = start(model, folder, *flags, key=key)
    try:
        server.wait_ready()
        yield server
    finally:
        end(server)
