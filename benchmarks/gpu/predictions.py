"""Predictions for an H200, written before the day, and whether each was met; the report has them all.

Qwen3-8B in bfloat16 with a draft model of Qwen3-0.6B's shape at 1,024 tokens of context. Ranges follow from the
launches and bytes of each step. Those of `policies` are what must hold: no cell loses more than 1 % to `off`.
Phases that predict their own cells (`gap`, `few_row_mixtures`) have them in their tables.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.record import Json

DEVICE = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A figure of the rows of a phase's table that have the values in `where`, within least and most."""

    phase: str
    table: str
    where: Mapping[str, Any]
    figure: tuple[str, ...]
    least: float
    most: float


def _plain(sequences: int, least: float, most: float) -> Prediction:
    where = {"sequences": sequences, "sampling": "greedy"}
    return Prediction(
        phase="plain", table="target", where=where, figure=("period_ms", "median"), least=least, most=most
    )


def _verify(sequences: int, rows_each: int, least: float, most: float) -> Prediction:
    where = {"sequences": sequences, "rows_each": rows_each}
    return Prediction(
        phase="verify", table="cells", where=where, figure=("step_ms", "median"), least=least, most=most
    )


def _cycle(sequences: int, least: float, most: float) -> Prediction:
    where = {"sequences": sequences}
    return Prediction(
        phase="cycle", table="cells", where=where, figure=("cycle_ms", "median"), least=least, most=most
    )


def _draft(sequences: int, least: float, most: float) -> Prediction:
    where = {"sequences": sequences}
    return Prediction(
        phase="draft", table="draft bare", where=where, figure=("bare_ms", "median"), least=least, most=most
    )


def _fp8(sequences: int, least: float, most: float) -> Prediction:
    where = {"sequences": sequences}
    return Prediction(phase="fp8", table="rows", where=where, figure=("fp8_ms",), least=least, most=most)


def _overlap(partition: str, sequences: int, least: float, most: float) -> Prediction:
    where = {"partition": partition, "sequences": sequences}
    return Prediction(phase="overlap", table="rows", where=where, figure=("gain",), least=least, most=most)


PREDICTIONS = (
    # 4.88 and 5.45 ms with eight launches a layer; 4.15 and 4.8 with five. From 32 rows on only products can gain.
    _plain(1, 4.0, 4.4),
    _plain(8, 4.6, 5.0),
    _plain(32, 5.9, 6.4),
    _plain(128, 10.3, 11.2),
    # 8.60 and 18.2 ms where attention took tiles of 16 twice, or of 128.
    _verify(32, 5, 7.3, 7.9),
    _verify(64, 7, 13.6, 15.0),
    # A pass of 1.42 ms with ten launches a layer; 0.60 with five.
    _draft(1, 0.55, 0.8),
    _draft(8, 0.65, 0.95),
    # 3.94 and 4.23 ms with ten launches a layer; with five one row is bound by reading weights, and eight rows by
    # widening and multiplying them without tensor cores.
    _fp8(1, 2.4, 2.9),
    _fp8(8, 3.3, 4.1),
    # 13.3, 14.7, 20.4 and 52.7 ms while the host waited in each cycle: without these waits, with fewer launches.
    _cycle(1, 7.0, 9.0),
    _cycle(8, 7.8, 9.8),
    _cycle(32, 14.0, 18.1),
    _cycle(128, 40.0, 47.0),
    *(
        Prediction(
            phase="policies",
            table="rows",
            where={"policy": "faser", "acceptance": acceptance, "sequences": sequences},
            figure=("times_off",),
            least=0.99,
            most=3.5,
        )
        for acceptance in (0.6, 0.8, 0.9)
        for sequences in (1, 8, 32, 128)
    ),
    _overlap("sm", 1, 0.89, 0.99),
    _overlap("sm", 128, 0.86, 1.0),
    _overlap("streams", 64, 0.95, 1.1),
)


def judged(results: Mapping[str, Json]) -> Iterator[Json]:
    """Return each prediction whose figure was measured, with the figure and whether it is in the range."""
    for each in PREDICTIONS:
        for row in results.get(each.phase, {}).get(each.table, []):
            if any(row.get(name) != value for name, value in each.where.items()):
                continue
            found: Any = row
            for name in each.figure:
                found = found[name]
            yield {
                "phase": each.phase,
                "cell": ", ".join(f"{name} {value}" for name, value in each.where.items()),
                "figure": each.figure[0],
                "predicted": f"{each.least:g} to {each.most:g}",
                "measured": found,
                "": "" if each.least <= found <= each.most else "MISSED",
            }
