"""A line chart as SVG, by hand: one line a policy over load. Readable on light and on dark ground."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 50
_COLOURS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf")
_TICKS = 5

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """lines: (x, y) of each, ascending in x; the y axis starts at 0."""
    points = [point for line in lines.values() for point in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) if high > low else 0.5
        return _LEFT + across * width, _TOP + height * (1 - y / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text{font:12px sans-serif;fill:#808080}.t{font-size:15px}</style>",
        _text(_WIDTH / 2, 22, title, anchor="middle", kind="t"),
        _text(_LEFT + width / 2, _HEIGHT - 10, x_label, anchor="middle"),
        f'<g transform="rotate(-90 16 {_TOP + height / 2})">'
        f"{_text(16, _TOP + height / 2, y_label, anchor='middle')}</g>",
    ]
    for tick in range(_TICKS + 1):
        _, y = at(low, top * tick / _TICKS)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{width}" stroke="#80808040" fill="none"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{top * tick / _TICKS:.3g}", anchor="end"))
    loads = sorted({x for x, _ in points})
    parts += [_text(at(x, 0)[0], _TOP + height + 18, f"{x:g}", anchor="middle") for x in loads]
    for place, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        corners = [at(x, y) for x, y in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in corners]
        key = _TOP + 18 * place
        parts.append(f'<path d="M{_LEFT + width + 16} {key}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_LEFT + width + 40, key + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
