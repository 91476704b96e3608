"""Chart: lines, points and a band in one pair of axes, as SVG, without a library.

Readable on light and on dark backgrounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 40, 50
_COLOURS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf")
_GREY = "#808080"
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(slots=True, kw_only=True)
class Chart:
    """x from low to high, y from 0 to top. doubling: x is logarithmic, with a tick at each power of 2."""

    title: str
    x_label: str
    y_label: str
    low: float
    high: float
    top: float
    doubling: bool = False
    _parts: list[str] = field(default_factory=list)
    _names: int = 0

    def line(self, name: str, points: Points, *, marks: bool = True) -> None:
        """A line with its name in the legend. points: ascending in x. marks: a dot on each point."""
        colour = _COLOURS[self._names % len(_COLOURS)]
        corners = [self._at(x, y) for x, y in points]
        self._parts.append(f'<path d="M{"L".join(corners)}" stroke="{colour}" stroke-width="2" fill="none"/>')
        if marks:
            self._parts.append(_dots(corners, colour))
        legend_y = _TOP + 18 * self._names
        legend_x = _WIDTH - _RIGHT + 16
        self._parts.append(f'<path d="M{legend_x} {legend_y}h18" stroke="{colour}" stroke-width="2"/>')
        self._parts.append(_text(legend_x + 24, legend_y + 4, name, anchor="start"))
        self._names += 1

    def dots(self, points: Points) -> None:
        self._parts.append(_dots([self._at(x, y) for x, y in points], f"{_COLOURS[1]}80"))

    def band(self, corners: Points) -> None:
        """A grey area."""
        path = "L".join(self._at(x, y) for x, y in corners)
        self._parts.append(f'<path d="M{path}Z" fill="{_GREY}30"/>')

    def rule(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """A dashed grey reference line."""
        path = f"M{self._at(*begin)}L{self._at(*end)}"
        self._parts.append(f'<path d="{path}" stroke="{_GREY}" stroke-dasharray="4 3" fill="none"/>')

    def svg(self) -> str:
        middle = _TOP + self._height / 2
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>text{{font:12px sans-serif;fill:{_GREY}}}</style>",
                _text(_LEFT + self._width / 2, 22, self.title),
                _text(_LEFT + self._width / 2, _HEIGHT - 10, self.x_label),
                f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, self.y_label)}</g>',
                *self._grid(),
                *self._parts,
                "</svg>\n",
            ]
        )

    @property
    def _width(self) -> int:
        return _WIDTH - _LEFT - _RIGHT

    @property
    def _height(self) -> int:
        return _HEIGHT - _TOP - _BOTTOM

    def _grid(self) -> list[str]:
        parts = []
        for value in _round_numbers(0, self.top):
            y = _TOP + self._height * (1 - value / self.top)
            parts.append(f'<path d="M{_LEFT} {y:.1f}h{self._width}" stroke="{_GREY}40" fill="none"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
        below = _TOP + self._height + 18
        return parts + [
            _text(float(self._at(value, 0).split()[0]), below, f"{value:g}") for value in self._x_ticks()
        ]

    def _x_ticks(self) -> list[float]:
        if self.doubling:
            return [2.0**i for i in range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)]
        return _round_numbers(self.low, self.high)

    def _at(self, x: float, y: float) -> str:
        low, high = (math.log2(self.low), math.log2(self.high)) if self.doubling else (self.low, self.high)
        place = math.log2(x) if self.doubling else x
        across = (place - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + across * self._width:.1f} {_TOP + self._height * (1 - y / self.top):.1f}"


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    *,
    doubling: bool = False,
    marks: bool = True,
) -> str | None:
    """A chart of the lines that have points, ascending in x; None if no line has."""
    drawn = {name: points for name, points in lines.items() if points}
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        return None
    chart = Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        low=min(x for x, _ in everything),
        high=max(x for x, _ in everything),
        top=max(y for _, y in everything) or 1.0,
        doubling=doubling,
    )
    for name, points in drawn.items():
        chart.line(name, points, marks=marks)
    return chart.svg()


def stacked(charts: Sequence[str]) -> str:
    """One SVG of charts of this module, from top to bottom."""
    panels = [
        chart.replace("<svg ", f'<svg y="{place * _HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" ', 1)
        for place, chart in enumerate(charts)
    ]
    whole = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(panels)}" role="img">'
    return "\n".join([whole, *panels, "</svg>\n"])


def _round_numbers(low: float, high: float) -> list[float]:
    """About _TICKS multiples of 1, 2 or 5 times a power of ten: 0, 0.5, 1, 1.5 for 0 to 1.8."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= _TICKS)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _dots(corners: Sequence[str], colour: str) -> str:
    path = "".join(f"M{corner}h.01" for corner in corners)
    return f'<path d="{path}" stroke="{colour}" stroke-width="5" stroke-linecap="round"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
