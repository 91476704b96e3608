"""Maps side by side as SVG: acceptance across, the drafter's cost upwards, in a cell how much lanes may cost.

Knows numbers and colours; how they were found is the map's. Readable on light and on dark ground.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CELL_W, _CELL_H = 44, 34
_LEFT, _TOP, _GAP, _BOTTOM = 64, 78, 26, 96
_GROUND = "#ffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """Of cells whose value is at least `least`. words: for the key."""

    least: float
    colour: str
    words: str


_AHEAD = (
    Shade(least=1.3, colour="#e6550d", words="also at 1.3"),
    Shade(least=1.15, colour="#fdae6b", words="also at 1.15"),
    Shade(least=1.0, colour="#fee6ce", words="ahead, if lanes cost less than 1.15"),
)
_BEFORE = Shade(least=0.0, colour="#9ecae1", words="before the step wins anyway")
_PLAIN = Shade(least=0.0, colour="#d0d0d0", words="plain wins anyway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """values: by (acceptance, draft cost), 1 for even. plain: where nobody should draft before the step."""

    title: str
    values: dict[tuple[float, float], float]
    plain: set[tuple[float, float]]


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The panels in a row. All have the same axes."""
    across = sorted({acceptance for acceptance, _ in panels[0].values})
    upwards = sorted({cost for _, cost in panels[0].values}, reverse=True)
    panel_width, panel_height = _CELL_W * len(across), _CELL_H * len(upwards)
    width = _LEFT + len(panels) * (panel_width + _GAP)
    height = _TOP + panel_height + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12" text-anchor="middle">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{_GROUND}"/>',
        _text(width / 2, 24, title, size=15),
    ]
    for number, panel in enumerate(panels):
        left = _LEFT + number * (panel_width + _GAP)
        parts.append(_text(left + panel_width / 2, _TOP - 12, panel.title, size=13))
        parts += _cells(panel, left, across, upwards)
        for i, acceptance in enumerate(across):
            parts.append(_text(left + _CELL_W * (i + 0.5), _TOP + panel_height + 17, f"{acceptance:g}"))
    for i, cost in enumerate(upwards):
        parts.append(_text(_LEFT - 20, _TOP + _CELL_H * (i + 0.5) + 4, f"{cost:g}"))
    middle = _TOP + panel_height / 2
    parts.append(
        f'<g transform="rotate(-90 18 {middle})">{_text(18, middle, "pass of the drafter over a step")}</g>'
    )
    parts.append(_text(width / 2, _TOP + panel_height + 38, "acceptance of a drafted token"))
    parts += _key({_shade(panel, cell) for panel in panels for cell in panel.values}, width, height - 26)
    return "\n".join([*parts, "</svg>\n"])


def shade(value: float, *, plain: bool) -> Shade:
    """Who wins where drafting ahead is `value` times as fast, on free lanes, as the best of the others."""
    others = _PLAIN if plain else _BEFORE
    return next((each for each in _AHEAD if value > each.least), others)


def _shade(panel: Panel, cell: tuple[float, float]) -> Shade:
    return shade(panel.values[cell], plain=cell in panel.plain)


def _cells(panel: Panel, left: float, across: list[float], upwards: list[float]) -> list[str]:
    parts = []
    for (acceptance, cost), value in panel.values.items():
        x = left + _CELL_W * across.index(acceptance)
        y = _TOP + _CELL_H * upwards.index(cost)
        colour = _shade(panel, (acceptance, cost)).colour
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_CELL_W - 1.5}" height="{_CELL_H - 1.5}" rx="2" fill="{colour}"/>'
        )
        parts.append(_text(x + _CELL_W / 2, y + _CELL_H / 2 + 4, f"{value:.2f}"))
    return parts


def _key(used: set[Shade], width: float, y: float) -> list[str]:
    shades = [each for each in (_PLAIN, _BEFORE, *reversed(_AHEAD)) if each in used]
    widths = [42 + 6.4 * len(each.words) for each in shades]
    x = (width - sum(widths)) / 2
    parts = []
    for each, wide in zip(shades, widths, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 11}" width="14" height="14" rx="2" fill="{each.colour}"/>')
        parts.append(_text(x + 20, y, each.words, anchor="start"))
        x += wide
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#24292f">'
        f"{escape(text)}</text>"
    )
