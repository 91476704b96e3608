"""From exchanges to results: a measurement per system, round and concurrency; medians and ratios over the rounds.

Owns what is computed from the times, the bars that FASER is held to, and how both are shown: a table, a JSON
document and a bar chart in SVG. Pure functions of plain values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any

from benchmarks.cells import Spread
from benchmarks.peers.llamacpp import QUANTISED
from benchmarks.peers.load import Exchange

FASER, FASER_OFF = "faser", "faser-off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One system answering one set of prompts. Latencies are medians over requests (itl: over gaps), in seconds.

    prompt_tokens: by request, in the prompts' order. foreign_cores: mean number of cores that neither client
    nor server had, while it ran.
    """

    system: str
    round: int
    concurrency: int
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    itl_s: float
    foreign_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The output tokens/s of `of`, a form of FASER, shall be at least `factor` times this system's."""

    system: str
    concurrency: int
    factor: float
    of: str = FASER


BARS = (
    Bar(system="transformers", concurrency=1, factor=1.3),
    Bar(system="transformers-generate", concurrency=1, factor=1.3),
    Bar(system="vllm", concurrency=1, factor=1.0),
    Bar(system="vllm", concurrency=4, factor=1.0),
    Bar(system="vllm", concurrency=16, factor=1.0),
    *(
        Bar(
            system=f"llamacpp-{precision}",
            concurrency=at,
            factor=1.2 if at == 1 else 1.5,
            of=f"{FASER_OFF}-{precision}",
        )
        for precision in QUANTISED
        for at in (1, 4, 16)
    ),
)


def measure(
    exchanges: Sequence[Exchange], *, system: str, round: int, concurrency: int, foreign_s: float
) -> Measurement:
    """foreign_s: processor seconds that others spent from the first request to the last token."""
    began_s = min(exchange.sent_s for exchange in exchanges)
    ended_s = max(exchange.token_times_s[-1] for exchange in exchanges)
    output_tokens = sum(exchange.output_tokens for exchange in exchanges)
    return Measurement(
        system=system,
        round=round,
        concurrency=concurrency,
        prompt_tokens=tuple(exchange.prompt_tokens for exchange in exchanges),
        output_tokens=output_tokens,
        wall_s=ended_s - began_s,
        output_tokens_per_s=output_tokens / (ended_s - began_s),
        ttft_s=median(exchange.ttft_s for exchange in exchanges),
        tpot_s=median(exchange.tpot_s for exchange in exchanges),
        itl_s=median(gap for exchange in exchanges for gap in exchange.gaps_s),
        foreign_cores=foreign_s / (ended_s - began_s),
    )


def check_same_work(measurements: Iterable[Measurement]) -> None:
    """Raises ValueError unless all systems read the same prompt tokens, request by request, in every round."""
    seen: dict[tuple[int, int], Measurement] = {}
    for found in measurements:
        first = seen.setdefault((found.round, found.concurrency), found)
        if (found.prompt_tokens, found.output_tokens) != (first.prompt_tokens, first.output_tokens):
            raise ValueError(
                f"round {found.round}, concurrency {found.concurrency}: {found.system} read "
                f"{found.prompt_tokens} prompt tokens and wrote {found.output_tokens}, {first.system} "
                f"read {first.prompt_tokens} and wrote {first.output_tokens}"
            )


def speeds(measurements: Iterable[Measurement]) -> dict[tuple[str, int], Spread]:
    """Output tokens/s by system and concurrency."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in measurements:
        found.setdefault((one.system, one.concurrency), []).append(one.output_tokens_per_s)
    return {key: Spread.of(values) for key, values in found.items()}


def ratios(measurements: Iterable[Measurement], system: str = FASER) -> dict[tuple[str, int], Spread]:
    """Speed of `system` over that of each other one in the same round, by other system and concurrency."""
    by_round: dict[tuple[int, int], dict[str, float]] = {}
    for one in measurements:
        by_round.setdefault((one.round, one.concurrency), {})[one.system] = one.output_tokens_per_s
    found: dict[tuple[str, int], list[float]] = {}
    for (_, concurrency), rates in by_round.items():
        for other, rate in rates.items():
            if system in rates and other != system:
                found.setdefault((other, concurrency), []).append(rates[system] / rate)
    return {key: Spread.of(values) for key, values in found.items()}


def same_file(measurements: Sequence[Measurement]) -> dict[tuple[str, int], Spread]:
    """Speed of each faser-…FILE over that of llama.cpp with the same file, by FASER's name and concurrency."""
    found: dict[tuple[str, int], Spread] = {}
    for precision in QUANTISED:
        for name in (f"{FASER}-{precision}", f"{FASER_OFF}-{precision}"):
            for (other, concurrency), ratio in ratios(measurements, name).items():
                if other == f"llamacpp-{precision}":
                    found[name, concurrency] = ratio
    return found


def bar_outcomes(measurements: Sequence[Measurement]) -> list[tuple[Bar, float, bool]]:
    """Each bar whose ratio was measured, with its median ratio and whether that reaches the bar."""
    found = {of: ratios(measurements, of) for of in {bar.of for bar in BARS}}
    measured = [(bar, found[bar.of].get((bar.system, bar.concurrency))) for bar in BARS]
    return [(bar, ratio.median, ratio.median >= bar.factor) for bar, ratio in measured if ratio is not None]


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
        for bar, ratio_found, met in bar_outcomes(measurements)
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
        "bars": [{**asdict(bar), "ratio": ratio, "met": met} for bar, ratio, met in bar_outcomes(measurements)],
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
