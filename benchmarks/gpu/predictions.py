"""What the first runs on a device are expected to find, written down before there was one.

Launches, bytes and rates of an H200 were counted, nothing was measured. So every figure here is a ratio, which
another device shares more or less: times the floor, of vLLM's rate, of the best way without lanes. The gains of
drafting ahead are those of the engine's own cost model for these steps (a step of 64 sequences with five rows each
takes 10.5 ms, a pass over them 2.6 ms), with assumed lanes: streams slow verification by 1.15 and drafting by 1.5,
green contexts by 1.2 and 1.6.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.record import Json

_WITHIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """figure: of the row of `rows`, in the result of a phase, that says these things of itself.

    within: share of the expected value by which the measured one may differ and count as predicted.
    """

    phase: str
    rows: str
    cell: tuple[tuple[str, Any], ...]
    figure: str
    expected: float
    within: float = _WITHIN

    @property
    def about(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.cell)

    def measured(self, found: Mapping[str, Json]) -> float | None:
        """found: the results of phases by name. None: it was not measured."""
        for row in found.get(self.phase, {}).get(self.rows, []):
            if all(row.get(name) == value for name, value in self.cell):
                value = row.get(self.figure)
                return None if value is None else float(value)
        return None

    def judged(self, found: Mapping[str, Json]) -> tuple[float | None, str]:
        measured = self.measured(found)
        if measured is None:
            return None, "not measured"
        off = measured / self.expected - 1
        return measured, "as predicted" if abs(off) <= self.within else f"missed by {off:+.0%}"


def _plain() -> list[Prediction]:
    expected = {1: 1.46, 8: 1.42, 32: 1.38, 128: 1.36}
    return [
        Prediction(
            phase="plain",
            rows="target",
            cell=(("sampling", "greedy"), ("sequences", sequences)),
            figure="times_floor",
            expected=times,
        )
        for sequences, times in expected.items()
    ]


def _cycle() -> list[Prediction]:
    """Losses in the order of their size: passes, small kernels, the host's part."""
    expected = {1: 2.0, 32: 2.2, 128: 2.0}
    return [
        Prediction(
            phase="cycle",
            rows="cells",
            cell=(("sequences", each),),
            figure="times_floor",
            expected=times,
            within=0.2,
        )
        for each, times in expected.items()
    ]


def _policies() -> list[Prediction]:
    expected = {1: 1.75, 8: 1.6, 32: 1.3, 128: 1.05}
    return [
        Prediction(
            phase="policies",
            rows="rows",
            cell=(("acceptance", 0.8), ("sequences", each), ("policy", "faser")),
            figure="times_off",
            expected=times,
            within=0.15,
        )
        for each, times in expected.items()
    ]


def _vllm() -> list[Prediction]:
    """Compiled, vLLM would be a little ahead (0.96); without, its norms are kernels of their own as ours are."""
    return [
        Prediction(
            phase="vllm",
            rows="rows",
            cell=(("configuration", "plain"), ("sequences", each)),
            figure="ratio",
            expected=1.0,
        )
        for each in (32, 1, 128, 8)
    ]


def _overlap() -> list[Prediction]:
    expected = {
        ("sm", 0.9): {64: 1.11, 32: 0.96, 16: 0.95},
        ("sm", 0.8): {64: 1.02, 32: 0.92, 16: 0.95},
        ("streams", 0.9): {64: 1.18, 32: 1.03, 16: 1.01},
        ("streams", 0.8): {64: 1.09, 32: 0.97, 16: 1.0},
    }
    return [
        Prediction(
            phase="overlap",
            rows="rows",
            cell=(("partition", partition), ("acceptance", acceptance), ("sequences", sequences)),
            figure="gain",
            expected=gain,
            within=0.05,
        )
        for (partition, acceptance), gains in expected.items()
        for sequences, gain in gains.items()
    ]


PREDICTIONS = (*_plain(), *_cycle(), *_policies(), *_vllm(), *_overlap())


def as_json() -> list[Json]:
    return [asdict(each) for each in PREDICTIONS]
