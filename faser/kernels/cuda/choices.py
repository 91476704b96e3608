"""Choices between kernels that compute the same: measured on the device at start, and kept.

    key       the work: "norm and qkv, 8 rows, 4096 x 6144, bfloat16"
    ways      reference (as today), others: callables that return the result
    fastest   1. results of the others within a tolerance of what is expected, or they are left out with a warning
              2. device time of a run with nothing in the caches, in a captured graph, as in a decode step
              3. another way than the reference must be faster by 3 %

What was chosen is kept in a file, with the device and the versions that it holds for; the next start on the same
ones measures nothing.
"""

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from faser.errors import FaserError
from faser.files import parse_json, write_atomically

_log = logging.getLogger("faser")

_MARGIN = 0.97  # of the reference's time: what a way other than the reference may take at most
_ROUNDS = 5  # measurements of each way, in turns

Way = Callable[[], Tensor]


class KernelClock(Protocol):
    """Times work on a device."""

    def seconds(self, work: Way) -> float:
        """Return the device's time of one run with cold caches. Raises what the work raises."""
        ...


class Choices:
    """The fastest way of each kind of work on one device.

    clock: None: nothing can be timed, so every reference is taken. path: of the file; None: nothing is kept.
    about: what the file's content holds for; with another one it is not read.
    """

    def __init__(
        self, clock: KernelClock | None = None, path: Path | None = None, about: Mapping[str, str] | None = None
    ) -> None:
        self._clock, self._path, self._about = clock, path, dict(about or {})
        self._chosen: dict[str, str] = self._read()

    @property
    def can_measure(self) -> bool:
        """Return whether anything but references may be chosen."""
        return self._clock is not None

    def fastest(self, key: str, ways: Mapping[str, Way], *, tolerance: float, expected: Way | None = None) -> str:
        """Return the name of the fastest way, the first of which is the reference.

        key: names the work, its sizes and types. expected: computes what the other ways must find; None: what the
        reference does, which may round more than they do. tolerance: how far a result may be from it, as a share
        of its largest value. An error of the reference is raised; another way's leaves it out.
        """
        reference, *others = ways
        if self._clock is None or not others:
            return reference
        name = f"{key}: {', '.join(ways)}"
        if self._chosen.get(name) not in ways:
            self._chosen[name] = self._measured(key, ways, tolerance, expected or ways[reference])
            self._write()
        return self._chosen[name]

    def _measured(self, key: str, ways: Mapping[str, Way], tolerance: float, wanted: Way) -> str:
        assert self._clock is not None
        reference, *others = ways
        expected = wanted().clone()
        timed: dict[str, list[float]] = {reference: []}
        for name in others:
            try:
                difference = _difference(ways[name](), expected)
                if difference <= tolerance:
                    self._clock.seconds(ways[name])  # the first run loads kernels
                    timed[name] = []
                    continue
                reason = f"its result differs by {difference:.2g}, more than {tolerance:.2g}"
            except (RuntimeError, FaserError, ValueError) as error:
                reason = str(error)
            _log.warning("%s: %s is not used on this device: %s", key, name, reason)
        for _ in range(_ROUNDS):
            for name, found in timed.items():
                found.append(self._clock.seconds(ways[name]))
        times = {name: median(found) for name, found in timed.items()}
        best = min(times, key=times.__getitem__)
        chosen = best if times[best] < _MARGIN * times[reference] else reference
        shown = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in times.items())
        _log.info("%s: %s (%s)", key, chosen, shown)
        return chosen

    def _read(self) -> dict[str, str]:
        if self._path is None or self._clock is None:
            return {}
        try:
            content = parse_json(self._path.read_text(encoding="utf-8"))
            if content["about"] != self._about:
                return {}
            return {str(key): str(name) for key, name in content["chosen"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is not readable (%s); kernels are measured again", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_atomically(self._path, json.dumps({"about": self._about, "chosen": self._chosen}, indent=1))
        except OSError as error:
            _log.warning("which kernels are fastest is not kept: %s: %s", self._path, error.strerror or error)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; infinity for other shapes or NaN."""
    if found.shape != expected.shape:
        return float("inf")
    scale = max(float(expected.abs().max()), 1e-30)
    largest = float((found.float() - expected.float()).abs().max()) / scale
    return largest if largest == largest else float("inf")


class GraphClock:
    """Times work in captured graphs of a CUDA device, each run after a write that is larger than its caches."""

    def __init__(self, device: torch.device, *, runs: int = 8) -> None:
        self._device, self._runs = device, runs
        self._flush_bytes = 2 * max(torch.cuda.get_device_properties(device).L2_cache_size, 1 << 26)

    def seconds(self, work: Way) -> float:
        work()  # loads kernels, which cannot be captured
        with_work, without = self._replayed(work), self._replayed(None)
        return max(with_work - without, 0.0) / self._runs

    def _replayed(self, work: Way | None) -> float:
        torch.cuda.synchronize(self._device)
        flushed = torch.empty(
            self._flush_bytes, dtype=torch.uint8, device=self._device
        )  # freed: KV needs the room
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._runs):
                flushed.zero_()
                if work is not None:
                    work()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


def driver_version(file: Path = Path("/sys/module/nvidia/version")) -> str:
    """The driver's version, as Linux tells it; empty where it does not."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def device_choices(device: torch.device, path: Path) -> Choices:
    """Choices timed on a CUDA device and kept in path, for its name, the libraries and these kernels."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = blake2b(b"".join(each.read_bytes() for each in sources), digest_size=8).hexdigest()
    about = {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "kernels": digest,
        **{name: version(name) for name in ("torch", "triton", "flashinfer-python")},
    }
    return Choices(GraphClock(device), path, about)
