"""The trace-event format as far as step traces use it: what every viewer demands of an event."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

PHASES = {
    "X": {"name", "ts", "dur", "args"},
    "M": {"name", "args"},
    "C": {"name", "ts", "args"},
}
_EVERYWHERE = {"ph", "pid", "tid"}
CLOCK_US = 0.25  # times are rounded to a tenth of a microsecond


def checked(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that was closed. Fails where it is none."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(events, list)
    assert len({each["pid"] for each in events}) == 1
    named = {each["tid"] for each in events if each["name"] == "thread_name"}
    for each in events:
        assert set(each) == PHASES[each["ph"]] | _EVERYWHERE, each
        assert isinstance(each["pid"], int)
        assert each["tid"] in named
        assert isinstance(each["args"], dict)
        assert all(math.isfinite(each[key]) and each[key] >= 0 for key in ("ts", "dur") if key in each), each
    for line in named:
        _spans_do_not_cross([each for each in events if each["ph"] == "X" and each["tid"] == line])
    return events


def _spans_do_not_cross(spans: list[dict[str, Any]]) -> None:
    """Viewers stack spans of a line; two that cross are shown wrong."""
    for before, after in pairwise(sorted(spans, key=lambda each: float(each["ts"]))):
        assert before["ts"] + before["dur"] <= after["ts"] + CLOCK_US, (before, after)
