"""Measures what two lanes of CPU cores gain over taking turns, on the native kernels, and writes it as JSON.

    python -m benchmarks.lanes OUT.json [--seconds 4]

Loads: `memory` is a stack of large products for one row, bound by reading weights; `compute` the same for many
rows; `calls` many small products, bound by the interpreter between them, which both lanes share. Every pair of
them runs serially at full width and side by side, in turns, so that a busy moment of the machine hits both;
`speed_up` is the ratio of the fastest ones, `median` that of the medians. Also: how long a draft takes to its
lane, what changing cores costs, and whether idle threads of the full width disturb a lane's first kernels.

Takes about 20 times --seconds, and is worth something on a machine that does nothing else: load_average says so.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faser.engine.contract.step_times import FACTORS, InterferenceTable
from faser.engine.execution.overlap.partition import EVERYTHING, Cores, Lane, Serial, core_numbers, synchronous
from faser.engine.execution.startup.interference import InterferenceCell, measure_interference
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import chosen_isa, library_path

DTYPE = torch.bfloat16

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """num_layers layers of two products each, hidden to inner and back, for a number of rows."""

    num_layers: int
    hidden: int
    inner: int
    rows: int


SIZES = {
    "memory": Size(num_layers=8, hidden=1024, inner=2816, rows=1),  # 92 MB of weights
    "compute": Size(num_layers=2, hidden=1024, inner=2816, rows=64),
    "calls": Size(num_layers=150, hidden=64, inner=64, rows=1),
}
SMALL = Size(num_layers=1, hidden=1024, inner=2816, rows=1)


class Load:
    """Work of a size, on a backend of its own."""

    def __init__(self, backend: NativeBackend, size: Size) -> None:
        self.backend, self.rows = backend, size.rows
        up, down = (size.inner, size.hidden), (size.hidden, size.inner)
        self._layers = [
            tuple(backend.pack(_random(*shape) * shape[1] ** -0.5) for shape in (up, down))
            for _ in range(size.num_layers)
        ]
        self._hidden, self._inner = _random(size.rows, size.hidden), _random(size.rows, size.inner)

    def run(self, lane: Lane) -> Tensor:
        self.backend.use(lane.cores)
        for up, down in self._layers:
            self.backend.linear(self._hidden, up, self._inner)
            self.backend.linear(self._inner, down, self._hidden)
        return self._hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each pair of loads (default: 4)")
    asked = parser.parse_args()
    if len(core_numbers()) < 2:
        parser.error(f"this process may use {len(core_numbers())} core; two lanes take two")
    torch.set_num_threads(1)
    lanes = Cores()
    with tempfile.TemporaryDirectory() as folder:
        library = library_path(cache_dir=Path(folder))
        backend = NativeBackend(library, num_threads=len(core_numbers()))
        record = _measure(backend, lanes, asked.seconds)
    lanes.close()
    record["command"] = f"python -m benchmarks.lanes OUT.json --seconds {asked.seconds:g}"
    asked.out.write_text(json.dumps(record, indent=1) + "\n")


def _measure(backend: NativeBackend, lanes: Cores, seconds: float) -> Record:
    record: Record = {
        "cores": core_numbers(),
        "isa": chosen_isa(),
        "load_average": os.getloadavg()[0],
        "handover_us": _handover_us(lanes),
        "use_us": _use_us(backend),
        "first_kernels_us": _first_kernels_us(backend, lanes),
        "pairs": [],
    }
    for drafting in SIZES:
        for verifying in SIZES:
            draft = Load(backend.concurrent_instance(), SIZES[drafting])
            verify = Load(backend, SIZES[verifying])
            pair = {"draft": drafting, "verify": verifying, **measure_pair(lanes, draft, verify, seconds)}
            record["pairs"].append(pair)
            print(json.dumps(pair))
    return record


def measure_pair(lanes: Cores, draft: Load, verify: Load, seconds: float) -> Record:
    """Both ways in turns, at every share; and what the profile makes of the same loads."""
    serial = Serial()
    partitions: dict[str, tuple[Cores | Serial, float]] = {"serial": (serial, 0.0)}
    partitions |= {f"lanes {share:.3f}": (lanes, share) for share in lanes.shares()}
    times: dict[str, list[float]] = {name: [] for name in partitions}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or not times["serial"]:
        for name, (partition, share) in partitions.items():
            if share:
                partition.resize(share)
            joined = partition.run_both(lambda lane, _done: draft.run(lane), synchronous(verify.run))
            times[name].append(max(joined.draft_ended_s, joined.verify_ended_s) - joined.began_s)
    cell = InterferenceCell(
        rows=verify.rows, context=1, verify=synchronous(verify.run), draft=draft.run, whole_s=1.0
    )
    return {
        "rounds": len(times["serial"]),
        "serial_ms": round(1e3 * min(times["serial"]), 3),
        "speed_up": ratios(times, min),
        "median": ratios(times, statistics.median),
        "co_run": [_rounded(each) for each in measure_interference(lanes, [cell], budget_s=seconds)],
    }


def _rounded(slowdown: InterferenceTable) -> Record:
    """Of the only cell."""
    cells = {name: getattr(slowdown, name)[0][0] for name in FACTORS}
    return {name: round(value, 3) for name, value in {"share": slowdown.share, **cells}.items()}


def ratios(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """Of the serial time to that of each other way."""
    return {name: round(of(times["serial"]) / of(each), 3) for name, each in times.items() if name != "serial"}


def _handover_us(lanes: Cores) -> Record:
    """From the call of `both` to the first line of the draft, while verification holds nothing."""
    times = []
    for _ in range(500):
        joined = lanes.run_both(lambda _lane, _done: None, synchronous(lambda _lane: time.sleep(0.0005)))
        times.append(1e6 * (joined.draft_began_s - joined.began_s))
    return spread(times)


def _use_us(backend: NativeBackend) -> Record:
    """One change of cores: to a lane's, or back."""
    cores = core_numbers()
    times = []
    for at in range(2000):
        began = time.perf_counter()
        backend.use(cores[:1] if at % 2 else None)
        times.append(1e6 * (time.perf_counter() - began))
    backend.use(None)
    return spread(times)


def _first_kernels_us(backend: NativeBackend, lanes: Cores) -> Record:
    """A draft lane's short work right after work at full width: threads left to spin, and told to rest."""
    load, lane_load = Load(backend, SMALL), Load(backend.concurrent_instance(), SMALL)
    lanes.resize(lanes.shares()[0])
    first = lanes.run_both(lambda _lane, _done: None, synchronous(lambda lane: lane)).verified
    found: Record = {}
    for name, verify_lane in (("spinning", EVERYTHING), ("resting", first)):
        times = []
        for _ in range(300):
            load.run(EVERYTHING)
            load.backend.use(verify_lane.cores)
            joined = lanes.run_both(
                lambda lane, _done: lane_load.run(lane), synchronous(lambda _lane: time.sleep(0.001))
            )
            times.append(1e6 * (joined.draft_ended_s - joined.began_s))
        found[name] = spread(times)
    backend.use(None)
    return found


def spread(times: list[float]) -> Record:
    ordered = sorted(times)
    return {
        "min": round(ordered[0], 2),
        "median": round(ordered[len(ordered) // 2], 2),
        "p90": round(ordered[len(ordered) * 9 // 10], 2),
    }


def _random(*size: int) -> Tensor:
    return torch.randn(size).to(DTYPE)


if __name__ == "__main__":
    main()
