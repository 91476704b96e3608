"""Workload: when requests arrive, and which recorded request each one follows.

An open workload has its own arrival times (a recorded trace, or a Poisson process); in a closed one a fixed number
of clients each wait for their answer. A seed makes the requests the same for every policy.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.simulator.trace import Trace
from faser.errors import ConfigError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = "%Y-%m-%d %H:%M:%S.%f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. at_s: seconds since the start, None in a closed workload. trace: number of its RequestTrace."""

    at_s: float | None
    prompt_len: int
    output_len: int
    trace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Arrivals of requests. Exactly one of azure, rate and clients is given.

    azure: (seconds, prompt tokens, output tokens) of each request, ascending. rate: of a Poisson process, a
    second. clients: of a closed workload. Without azure, lengths are those of the recorded requests.
    scale: factor on the lengths of azure, which stay at least 1. in_order: recorded requests follow each other
    round robin; otherwise they are drawn.
    """

    azure: tuple[tuple[float, int, int], ...] | None = None
    rate: float | None = None
    clients: int | None = None
    scale: float = 1.0
    in_order: bool = False

    def at_load(self, load: float) -> "Workload":
        """Arrivals `load` times as fast, or as many clients (at least one)."""
        if self.azure is not None:
            faster = tuple((at_s / load, prompt, output) for at_s, prompt, output in self.azure)
            return Workload(azure=faster, scale=self.scale, in_order=self.in_order)
        if self.rate is not None:
            return Workload(rate=self.rate * load, in_order=self.in_order)
        assert self.clients is not None
        return Workload(clients=max(round(self.clients * load), 1), in_order=self.in_order)

    def arrivals(
        self, trace: Trace, *, duration_s: float | None, limit: int | None, seed: int
    ) -> Iterator[Arrival]:
        """Requests in the order of arrival: open ones up to duration_s, and of all at most `limit`."""
        random = np.random.default_rng(seed)
        return islice(self._endless(trace, duration_s, random), limit)

    def _endless(self, trace: Trace, duration_s: float | None, random: np.random.Generator) -> Iterator[Arrival]:
        for number, (at_s, prompt_len, output_len) in enumerate(self._times(random)):
            if at_s is not None and duration_s is not None and at_s >= duration_s:
                return
            count = len(trace.requests)
            chosen = number % count if self.in_order else int(random.integers(count))
            recorded = trace.requests[chosen]
            yield Arrival(
                at_s=at_s,
                prompt_len=recorded.prompt_len if prompt_len is None else prompt_len,
                output_len=recorded.output_len if output_len is None else output_len,
                trace=chosen,
            )

    def _times(self, random: np.random.Generator) -> Iterator[tuple[float | None, int | None, int | None]]:
        if self.azure is not None:
            for at_s, prompt_len, output_len in self.azure:
                yield at_s, max(round(prompt_len * self.scale), 1), max(round(output_len * self.scale), 1)
            return
        at_s = 0.0
        while True:
            if self.rate is None:
                yield None, None, None
            else:
                at_s += float(random.exponential(1 / self.rate))
                yield at_s, None, None


def parse_workload(text: str, *, scale: float = 1.0, in_order: bool = False) -> Workload:
    """poisson:RATE, closed:CLIENTS, or the path of a CSV file of Azure's kind. Raises ConfigError."""
    kind, _, value = text.partition(":")
    if kind in ("poisson", "closed"):
        try:
            number = float(value) if kind == "poisson" else int(value)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise ConfigError(f"--arrivals is {text}; it must be {kind}:NUMBER with a number above 0")
        if kind == "poisson":
            return Workload(rate=float(number), in_order=in_order)
        return Workload(clients=int(number), in_order=in_order)
    return Workload(azure=read_azure(Path(text)), scale=scale, in_order=in_order)


def read_azure(path: Path) -> tuple[tuple[float, int, int], ...]:
    """(seconds since the first, prompt tokens, output tokens) of every request, in the order of time.

    The columns of the Azure LLM inference traces (arXiv 2311.18677). Raises ConfigError naming file and line.
    """
    found = []
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for record in csv.DictReader(file):
                line += 1
                moment = datetime.strptime(record[AZURE_COLUMNS[0]][:26], _AZURE_TIME)
                found.append((moment, int(record[AZURE_COLUMNS[1]]), int(record[AZURE_COLUMNS[2]])))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--arrivals is {path}; it is no poisson:RATE or closed:N, and no file: {error}"
        ) from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}, line {line}: {error!r}; the columns are {', '.join(AZURE_COLUMNS)}") from error
    if not found:
        raise ConfigError(f"{path} has no request")
    found.sort()
    return tuple(((moment - found[0][0]).total_seconds(), prompt, output) for moment, prompt, output in found)
