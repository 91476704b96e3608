"""Results for people and programs: a table, a JSON document, a bar chart in SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from statistics import median
from typing import Any

from benchmarks.peers.summary import FASER_OFF, Measurement, Spread, ratios, same_file, speeds, verdicts

_COLOURS = ("#0b6e4f", "#6fb59a", "#c97b16", "#4a5fa5", "#8a8f98", "#a03e5b", "#c2778f", "#d9a3b5", "#5b3a8c")
_PLOT_WIDTH, _PLOT_HEIGHT = 720, 240
_LEFT, _TOP, _BOTTOM = 56, 64, 32
_LEGEND_COLUMNS = 5
_BAR_SHARE = 0.84


def table(measurements: Sequence[Measurement]) -> str:
    """One line per system and concurrency: medians over the rounds, and FASER's speed over the peer's.

    FASER stands against the peer twice: with default flags, and `off`, without speculation.
    """
    quick, against, off_against = speeds(measurements), ratios(measurements), ratios(measurements, FASER_OFF)
    lines = [
        f"{'system':<22}{'at':>4}{'tokens/s':>10}{'(low - high)':>18}{'TTFT ms':>9}{'TPOT ms':>9}{'ITL ms':>8}"
        f"{'FASER / it':>12}{'(low - high)':>16}{'off / it':>10}{'(low - high)':>16}{'others':>8}"
    ]
    for (system, concurrency), rate in sorted(quick.items(), key=lambda item: (item[0][1], item[0][0])):
        mine = [one for one in measurements if (one.system, one.concurrency) == (system, concurrency)]
        over = (against.get((system, concurrency)), 12), (off_against.get((system, concurrency)), 10)
        lines.append(
            f"{system:<22}{concurrency:>4}{rate.median:>10.1f}{_range(rate, 1):>18}"
            f"{1e3 * median(one.ttft_s for one in mine):>9.0f}"
            f"{1e3 * median(one.tpot_s for one in mine):>9.1f}"
            f"{1e3 * median(one.itl_s for one in mine):>8.1f}"
            + "".join(
                f"{ratio.median:>{width}.2f}{_range(ratio, 2):>16}" if ratio else " " * (width + 16)
                for ratio, width in over
            )
            + f"{max(one.foreign_cores for one in mine):>8.2f}"
        )
    lines += [
        f"{name} over llama.cpp with the same file, at {concurrency}: {ratio.median:.2f} {_range(ratio, 2)}"
        for (name, concurrency), ratio in same_file(measurements).items()
    ]
    lines += [
        f"bar: {bar.of} {bar.factor:g} x {bar.system} at {bar.concurrency}: {ratio_found:.2f}, "
        f"{'met' if met else 'MISSED'}"
        for bar, ratio_found, met in verdicts(measurements)
    ]
    return "\n".join(lines)


def document(measurements: Sequence[Measurement], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured, with what was computed from it. about: machine, command, systems, conditions."""
    return {
        **about,
        "output_tokens_per_s": _nested(speeds(measurements)),
        "faser_over": _nested(ratios(measurements)),
        "faser_off_over": _nested(ratios(measurements, FASER_OFF)),
        "same_file": _nested(same_file(measurements)),
        "bars": [{**asdict(bar), "ratio": ratio, "met": met} for bar, ratio, met in verdicts(measurements)],
        "measurements": [asdict(one) for one in measurements],
    }


def chart(measurements: Sequence[Measurement], title: str) -> str:
    """Output tokens/s as grouped bars, one group per concurrency; a line on each bar spans all rounds."""
    found = speeds(measurements)
    systems = list(dict.fromkeys(one.system for one in measurements))
    groups = sorted({one.concurrency for one in measurements})
    top = max(rate.high for rate in found.values())
    width, height = _LEFT + _PLOT_WIDTH + 16, _TOP + _PLOT_HEIGHT + _BOTTOM
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#333"><title>{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>',
        *_legend(systems),
        *_axis(top),
    ]
    for place, concurrency in enumerate(groups):
        left = _LEFT + place * _PLOT_WIDTH / len(groups)
        middle = left + _PLOT_WIDTH / len(groups) / 2
        shapes.append(f'<text x="{middle:.1f}" y="{height - 12}" text-anchor="middle">at {concurrency}</text>')
        shapes += _group(systems, found, concurrency, left, _PLOT_WIDTH / len(groups), top)
    return "\n".join([*shapes, "</svg>", ""])


def _group(
    systems: Sequence[str],
    found: Mapping[tuple[str, int], Spread],
    concurrency: int,
    left: float,
    width: float,
    top: float,
) -> list[str]:
    step = width * _BAR_SHARE / len(systems)
    shapes = []
    for place, system in enumerate(systems):
        if (system, concurrency) not in found:
            continue
        rate = found[system, concurrency]
        x = left + width * (1 - _BAR_SHARE) / 2 + place * step
        y, low, high = (_height_at(value, top) for value in (rate.median, rate.low, rate.high))
        middle = x + step / 2
        shapes += [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.9:.1f}" '
            f'height="{_TOP + _PLOT_HEIGHT - y:.1f}" fill="{_COLOURS[place % len(_COLOURS)]}"/>',
            f'<path d="M{middle:.1f} {low:.1f}V{high:.1f}" stroke="#333"/>',
            f'<text x="{middle:.1f}" y="{high - 4:.1f}" text-anchor="middle" font-size="11">'
            f"{rate.median:.0f}</text>",
        ]
    return shapes


def _legend(systems: Sequence[str]) -> list[str]:
    shapes = []
    for place, system in enumerate(systems):
        row, column = divmod(place, _LEGEND_COLUMNS)
        x, y = _LEFT + column * 140, 26 + row * 16
        shapes.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLOURS[place % len(_COLOURS)]}"/>')
        shapes.append(f'<text x="{x + 15}" y="{y + 9}">{escape(system)}</text>')
    return shapes


def _axis(top: float) -> list[str]:
    shapes = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _height_at(top * share, top)
        shapes.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _PLOT_WIDTH}" stroke="#ddd"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:.0f}</text>')
    return shapes


def _height_at(value: float, top: float) -> float:
    """The vertical place of a value; the greatest one lies a label's height below the top."""
    return _TOP + _PLOT_HEIGHT - (_PLOT_HEIGHT - 16) * value / top


def _nested(found: Mapping[tuple[str, int], Spread]) -> dict[str, dict[str, dict[str, float]]]:
    nested: dict[str, dict[str, dict[str, float]]] = {}
    for (system, concurrency), one in found.items():
        nested.setdefault(system, {})[str(concurrency)] = asdict(one)
    return nested


def _range(one: Spread, digits: int) -> str:
    return f"({one.low:.{digits}f} - {one.high:.{digits}f})"
