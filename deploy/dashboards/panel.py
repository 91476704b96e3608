"""Parts of a dashboard: rows of panels. A panel is a title, a unit and expressions."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """expressions: (PromQL, legend). kind: a panel type of Grafana. axis: what is counted, beside the axis.

    lines: values with a line of their own, such as an alert's threshold.
    """

    title: str
    expressions: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    least: float | None = 0
    most: float | None = None
    axis: str = ""
    lines: tuple[float, ...] = ()
    note: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)
