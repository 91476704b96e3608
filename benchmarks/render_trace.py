"""Draws a few steps of step traces (--trace-steps) as SVG, one trace below the other, all to the same scale.

    python -m benchmarks.render_trace OUT.svg "one after the other=serial.json" "at once=ahead.json" [--steps 8]

Each trace has a strip for the host and a line for each lane. In a verified step a row of dots stands for each
sequence: its drafted tokens accepted and refused, and the target's own one. In a draft the tokens proposed; of one
made beside a step the first is the border, which the step's own token judges: if it stands, the rest is the next
chunk. Knows the trace's events and no more of the engine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from faser.errors import ConfigError

HOST, VERIFY, DRAFT = "host", "verify lane", "draft lane"

_WIDTH, _LEFT, _RIGHT = 960, 92, 16
_TITLE_H, _HOST_H, _LANE_H, _PANEL_GAP, _KEY_H = 30, 10, 44, 26, 56
_DOT, _ROW = 8.0, 10.0  # between dots at most, between sequences
_INK, _PALE = "#24292f", "#6e7781"
_BOXES = {VERIFY: "#ddf4ff", DRAFT: "#fff1d6", HOST: "#8c959f"}
_EDGES = {VERIFY: "#54aeff", DRAFT: "#d4a72c"}
_ACCEPTED, _REFUSED, _OWN, _PROPOSED, _GONE = "#1a7f37", "#cf222e", "#0969da", "#9a6700", "#c9b58a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """line: the name of the one it is on. Microseconds."""

    line: str
    name: str
    begin_us: float
    end_us: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """steps: spans of each step, in time."""

    title: str
    steps: tuple[tuple[Span, ...], ...]

    @property
    def begin_us(self) -> float:
        return min(span.begin_us for span in self.steps[0])

    @property
    def length_us(self) -> float:
        return max(span.end_us for span in self.steps[-1]) - self.begin_us

    @property
    def num_tokens(self) -> int:
        """Brought by the steps: accepted ones, and one of the target's own for every sequence."""
        verified = [span.args for step in self.steps for span in step if span.name == "verify"]
        return sum(sum(each["accepted"]) + len(each["accepted"]) for each in verified)


def read_steps(path: Path) -> list[tuple[Span, ...]]:
    """The steps of a trace; the commit ends one. Raises ConfigError naming the file that is no step trace."""
    try:
        text = path.read_text(encoding="utf-8").rstrip()
        events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
        lines = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        spans = [_span(each, lines) for each in events if each["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no step trace: {error!r}") from error
    steps: list[tuple[Span, ...]] = []
    open_step: list[Span] = []
    for span in spans:
        open_step.append(span)
        if span.name == "commit":
            steps.append(tuple(sorted(open_step, key=lambda each: each.begin_us)))
            open_step = []
    return steps


def _span(event: dict[str, Any], lines: dict[int, str]) -> Span:
    return Span(
        line=lines[event["tid"]],
        name=event["name"],
        begin_us=event["ts"],
        end_us=event["ts"] + event["dur"],
        args=event["args"],
    )


def drawn(panels: Sequence[Panel]) -> str:
    """The picture. Readable on light and on dark ground."""
    longest_us = max(panel.length_us for panel in panels)
    per_us = (_WIDTH - _LEFT - _RIGHT) / longest_us
    panel_h = _TITLE_H + _HOST_H + 2 * _LANE_H + _PANEL_GAP
    height = len(panels) * panel_h + _KEY_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(', '.join(panel.title for panel in panels))}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, number * panel_h, per_us)
    parts += _key(height - _KEY_H + 12)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, top: float, per_us: float) -> list[str]:
    tops = {HOST: top + _TITLE_H, VERIFY: top + _TITLE_H + _HOST_H, DRAFT: top + _TITLE_H + _HOST_H + _LANE_H}
    told = f"{len(panel.steps)} steps, {panel.num_tokens} tokens in {panel.length_us / 1000:.0f} ms"
    parts = [_text(_LEFT, top + 20, f"{panel.title}: {told}", size=14)]
    for line, y in tops.items():
        middle = y + (_HOST_H if line == HOST else _LANE_H) / 2 + 4
        parts.append(_text(_LEFT - 8, middle, line, anchor="end", colour=_PALE))
    bottom = tops[DRAFT] + _LANE_H
    for step in panel.steps:
        end = _LEFT + (max(span.end_us for span in step) - panel.begin_us) * per_us
        parts.append(
            f'<path d="M{end:.1f} {tops[HOST]:.1f}V{bottom:.1f}" stroke="{_PALE}" stroke-dasharray="2 3"/>'
        )
        for span in step:
            x, wide = _LEFT + (span.begin_us - panel.begin_us) * per_us, (span.end_us - span.begin_us) * per_us
            parts += _box(span, x, tops[span.line], wide)
    return parts


def _box(span: Span, x: float, y: float, width: float) -> list[str]:
    about = escape(f"{span.name}, {(span.end_us - span.begin_us) / 1000:.1f} ms")
    if span.line == HOST:
        box = f'x="{x:.1f}" y="{y + 2:.1f}" width="{max(width, 0.8):.1f}" height="6" fill="{_BOXES[HOST]}"'
        return [f"<rect {box}><title>{about}</title></rect>"]
    look = f'rx="2" fill="{_BOXES[span.line]}" stroke="{_EDGES[span.line]}"'
    parts = [
        f'<rect x="{x:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="{_LANE_H - 6}" {look}>'
        f"<title>{about}</title></rect>"
    ]
    rows = _dots(span)
    if not rows:
        parts.append(_text(x + width / 2, y + _LANE_H / 2 + 4, "prompt", anchor="middle", colour=_PALE))
    first = y + _LANE_H / 2 - (len(rows) - 1) * _ROW / 2
    apart = max(min([_DOT, *((width - 4) / len(colours) for colours in rows)]), 1.0)
    for number, colours in enumerate(rows):
        for at, colour in enumerate(colours):
            centre = f'cx="{x + 2 + (at + 0.5) * apart:.1f}" cy="{first + number * _ROW:.1f}"'
            parts.append(f'<circle {centre} r="{0.42 * apart:.1f}" fill="{colour}"/>')
    return parts


def _dots(span: Span) -> list[list[str]]:
    """Colours, a row for each sequence. Behind a refused token the rest was judged for nothing."""
    args = span.args
    if span.line == VERIFY:
        pairs = zip(args["accepted"], args["drafted"], strict=True)
        return [[_ACCEPTED] * kept + [_OWN] + [_REFUSED] * (drafted - kept) for kept, drafted in pairs]
    if "stands" not in args:
        return [[_PROPOSED] * drafted for drafted in args["drafted"]]
    borders = zip(args["stands"], args["drafted"], strict=True)
    return [_made_ahead(stands, drafted) for stands, drafted in borders if drafted]


def _made_ahead(stands: bool, drafted: int) -> list[str]:
    return [_ACCEPTED, *[_PROPOSED] * (drafted - 1)] if stands else [_GONE] * drafted


def _key(y: float) -> list[str]:
    words = {
        _ACCEPTED: "drafted, as the target has it",
        _OWN: "the target's own",
        _REFUSED: "refused",
        _PROPOSED: "proposed, verified next",
        _GONE: "drafted ahead and dropped",
    }
    parts, x = [], float(_LEFT)
    for colour, word in words.items():
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 9, y, word))
        x += 30 + 6.2 * len(word)
    parts.append(
        _text(_LEFT, y + 22, "grey strip: the host plans and commits; dotted: a step is over", colour=_PALE)
    )
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = _INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def panel_of(given: str, first: int, count: int) -> Panel:
    """TITLE=TRACE. Raises ConfigError for other text, and for a trace with fewer steps."""
    title, _, path = given.partition("=")
    if not path:
        raise ConfigError(f"{given!r} names no trace; it must be TITLE=FILE")
    steps = read_steps(Path(path))
    if len(steps) < first + count:
        raise ConfigError(f"{path} has {len(steps)} steps; {first + count} are to be read")
    return Panel(title=title, steps=tuple(steps[first : first + count]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", nargs="+", metavar="TITLE=TRACE")
    parser.add_argument("--first", type=int, default=0, help="steps left out at the beginning [0]")
    parser.add_argument("--steps", type=int, default=8, help="steps of each trace [8]")
    given = parser.parse_args()
    panels = [panel_of(each, given.first, given.steps) for each in given.traces]
    given.out.write_text(drawn(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
