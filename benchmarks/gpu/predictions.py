"""Predictions for an H200, written before the day, and whether each was met; the report has them all.

Qwen3-8B in bfloat16 with a draft model of Qwen3-0.6B's shape, at 1,024 tokens of context. Ranges follow from the
launches and bytes of each step. Those of `policies` are what must hold: no cell loses more than 1 % to `off`.
Phases that predict their own cells (`cycle`, `few_row_mixtures`) have further ones in their tables. On an H100
times are longer by its bandwidth and clocks, so ranges of times are stretched; those of ratios are not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.record import Json

# How much longer a time may be on each device, at least and at most. An H100 copies 3.0 of 4.28 TB/s.
DEVICES: Mapping[str, tuple[float, float]] = {"H200": (1.0, 1.0), "H100": (1.0, 1.45)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A figure of the rows of a phase's table that have the values in `where`, within least and most."""

    phase: str
    table: str
    where: Mapping[str, Any]
    figure: tuple[str, ...]
    least: float
    most: float

    @property
    def is_time(self) -> bool:
        return self.figure[0].endswith(("_ms", "ms", "us"))


def _cells(
    phase: str, table: str, figure: Sequence[str], by: Sequence[str], cells: Sequence[Sequence[Any]], **always: Any
) -> Iterator[Prediction]:
    """Predict one figure of several cells.

    by: columns whose values begin every cell; its range is behind them. always: in every cell.
    """
    for *values, least, most in cells:
        where = {**always, **dict(zip(by, values, strict=True))}
        yield Prediction(phase=phase, table=table, where=where, figure=tuple(figure), least=least, most=most)


_MEDIAN = "median"
PREDICTIONS = (
    # 4.88 and 5.45 ms with eight launches a layer; 4.15 and 4.8 with five. From 32 rows on only products can gain.
    *_cells(
        "plain",
        "target",
        ("period_ms", _MEDIAN),
        ("sequences",),
        ((1, 4.0, 4.4), (8, 4.6, 5.0), (32, 5.9, 6.4), (128, 10.3, 11.2)),
        sampling="greedy",
    ),
    # 8.60 and 18.2 ms where attention took tiles of 16 twice, or of 128.
    *_cells(
        "verify",
        "cells",
        ("step_ms", _MEDIAN),
        ("sequences", "rows_each"),
        ((32, 5, 7.3, 7.9), (64, 7, 13.6, 15.0)),
    ),
    # Of one layer. A tile of 16 reads the keys of five rows twice; 36 layers lost 3.9 ms to tiles of 128.
    *_cells(
        "attention",
        "cells",
        ("us",),
        ("sequences", "rows_each", "tile"),
        ((32, 5, 16, 70, 105), (32, 5, 64, 45, 70), (64, 7, 64, 95, 140), (64, 7, 128, 190, 260)),
        model="target",
    ),
    # A pass of 1.42 ms and a step of 5.04 with ten launches a layer; 0.60 and 4.3 with five. In 8 bits 3.94
    # and 4.23 with ten; with five one row is bound by reading weights, eight by widening them for products
    # without tensor cores. Half the bytes of the keys save 2.2 of 11.1 ms.
    *_cells(
        "passes",
        "rows",
        ("bare_ms", _MEDIAN),
        ("model", "way", "sequences"),
        (
            ("draft", "separate", 1, 1.3, 1.55),
            ("draft", "chosen", 1, 0.55, 0.8),
            ("draft", "chosen", 8, 0.65, 0.95),
            ("target", "separate", 1, 4.8, 5.2),
            ("target", "chosen", 1, 4.1, 4.6),
            ("target", "chosen", 8, 4.7, 5.2),
            ("target", "fp8", 1, 2.4, 3.0),
            ("target", "fp8", 8, 3.3, 4.1),
            ("target", "fp8 keys", 128, 8.4, 9.4),
        ),
    ),
    # Five launches in each of 28 and 36 layers, and the two ends.
    *_cells(
        "passes",
        "profiles",
        ("launches",),
        ("model", "sequences"),
        (("draft", 1, 145, 170), ("target", 1, 185, 215)),
        way="chosen",
    ),
    # 13.3, 14.7, 20.4 and 52.7 ms while the host waited in each cycle: without these waits, with fewer launches.
    *_cells(
        "cycle",
        "cells",
        ("cycle_ms", _MEDIAN),
        ("sequences",),
        ((1, 7.0, 9.0), (8, 7.8, 9.8), (32, 14.0, 18.1), (128, 40.0, 47.0)),
        steps="followed",
    ),
    *_cells(
        "cycle",
        "cells",
        ("gap_ms", _MEDIAN),
        ("sequences",),
        ((1, 0.0, 0.4), (8, 0.0, 0.4), (32, 0.0, 0.4)),
        steps="followed",
    ),
    *_cells(
        "policies",
        "rows",
        ("times_off",),
        ("acceptance", "sequences"),
        [(acceptance, each, 0.99, 3.5) for acceptance in (0.6, 0.8, 0.9) for each in (1, 8, 32, 128)],
        policy="faser",
    ),
    # Products at 570 TFLOP/s, attention by fa2: 215 and 45 ms of 8,192 tokens, 860 and 720 of 32,768.
    *_cells(
        "prompts",
        "alone",
        ("ms", _MEDIAN),
        ("tokens",),
        ((512, 12.0, 18.0), (2048, 50.0, 66.0), (8192, 235.0, 290.0), (32768, 1350.0, 1800.0)),
    ),
    *_cells(
        "prompts",
        "beside",
        ("during_ms", _MEDIAN),
        ("rows_a_step",),
        ((2048, 56.0, 75.0), (8192, 240.0, 300.0)),
    ),
    # The others' steps are launched ahead whether or not one of them has a grammar.
    *_cells("grammar", "cells", ("period_ms", _MEDIAN), ("grammars",), ((0, 5.9, 6.5), (1, 5.9, 6.9))),
    # Bandwidth is in proportion to the processors, up to about 100 of them.
    *_cells(
        "lanes",
        "copies",
        ("gb_s_a_processor",),
        ("processors",),
        [(each, 30.0, 42.0) for each in (12, 20, 36, 44, 60, 84)],
    ),
    *_cells(
        "lanes",
        "passes",
        ("gb_s_a_processor",),
        ("processors",),
        [(each, 25.0, 40.0) for each in (12, 20, 36, 44, 60)],
        sequences=64,
        context=1024,
    ),
    *_cells(
        "overlap",
        "rows",
        ("gain",),
        ("partition", "sequences"),
        (("sm", 1, 0.89, 0.99), ("sm", 128, 0.86, 1.0), ("streams", 64, 0.95, 1.1)),
    ),
)


def judged(results: Mapping[str, Json], device: str) -> Iterator[Json]:
    """Return each prediction whose figure was measured, with the figure and whether it is in the range.

    device: its name; nothing is predicted of one that is not among DEVICES.
    """
    for stretch in (stretch for name, stretch in DEVICES.items() if name in device):
        for each in PREDICTIONS:
            low, high = stretch if each.is_time else (1.0, 1.0)
            least, most = each.least * low, each.most * high
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
                    "predicted": f"{least:g} to {most:g}",
                    "measured": found,
                    "": "" if least <= found <= most else "MISSED",
                }
