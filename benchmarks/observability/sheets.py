"""Contact sheets: every panel of a dashboard with its real samples, drawn by matplotlib in Grafana's grid.

They are for looking at units, legends and thresholds. Grafana draws the same data in its own way.
"""

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: pictures go to files alone

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.observability.prometheus import Panel, Prometheus

_COLUMNS = 24
_MOST_LEGENDS = 14


def draw(prometheus: Prometheus, panels: list[Panel], path: Path, begin_s: float, end_s: float) -> None:
    """One picture of the panels of one dashboard, over this time."""
    height = max(each.definition["gridPos"]["y"] + each.definition["gridPos"]["h"] for each in panels)
    figure = plt.figure(figsize=(20, 0.42 * height), dpi=60)
    for panel in panels:
        place = panel.definition["gridPos"]
        left, width = place["x"] / _COLUMNS, place["w"] / _COLUMNS
        top = 1 - place["y"] / height
        if panel.kind == "row":
            figure.text(left + 0.005, top - 0.6 / height, panel.title, fontsize=13, weight="bold")
            continue
        share = place["h"] / height
        axes = figure.add_axes((left + 0.03, top - 0.72 * share, width - 0.045, 0.56 * share))
        axes.set_title(panel.title, fontsize=9, loc="left")
        _fill(axes, panel, prometheus, begin_s, end_s)
    figure.savefig(path)
    plt.close(figure)


def _fill(axes: Axes, panel: Panel, prometheus: Prometheus, begin_s: float, end_s: float) -> None:
    unit = panel.definition["fieldConfig"]["defaults"].get("unit", "short")
    if panel.kind in ("bargauge", "stat"):
        named = [
            (_named(legend, each["metric"]), float(each["value"][1]))
            for expression, legend in panel.targets
            for each in prometheus.query(expression)
        ]
        if panel.kind == "stat":
            axes.axis("off")
            axes.text(0.5, 0.5, "\n".join(name for name, _ in named) or "no data", ha="center", va="center")
            return
        axes.barh([name for name, _ in named], [value for _, value in named])
        axes.invert_yaxis()
        for number, (_, value) in enumerate(named):
            axes.text(value, number, " " + _shown(value, unit), va="center", fontsize=7)
        axes.tick_params(labelsize=7)
        return
    drawn: list[tuple[str, Any, Any]] = []
    for expression, legend in panel.targets:
        for each in prometheus.query_range(expression, begin_s, end_s, max(1, (end_s - begin_s) / 200)):
            values = np.array([(float(at) - begin_s, float(value)) for at, value in each["values"]])
            drawn.append((_named(legend, each["metric"]), values[:, 0], values[:, 1]))
    if not drawn:
        axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes, color="grey")
        return
    if panel.kind == "heatmap":
        _heatmap(axes, drawn)
        return
    custom = panel.definition["fieldConfig"]["defaults"].get("custom", {})
    drawn.sort(key=lambda each: -float(np.nansum(each[2])))
    if custom.get("stacking", {}).get("mode") == "normal":
        every = np.unique(np.concatenate([at for _, at, _ in drawn]))
        axes.stackplot(
            every, [np.interp(every, at, value) for _, at, value in drawn], labels=[name for name, _, _ in drawn]
        )
    else:
        for name, at, value in drawn:
            axes.plot(at, value, label=name, linewidth=1.2)
    for step in panel.definition["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])[1:]:
        axes.axhline(step["value"], color="red", linestyle="--", linewidth=0.8)
    axes.set_ylabel(custom.get("axisLabel", ""), fontsize=7)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, unit)))
    if "min" in panel.definition["fieldConfig"]["defaults"]:
        axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    if any(name for name, _, _ in drawn) and len(drawn) <= _MOST_LEGENDS:
        axes.legend(fontsize=6, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    else:
        axes.set_xlabel(f"{len(drawn)} series", fontsize=7)


def _heatmap(axes: Axes, drawn: list[tuple[str, Any, Any]]) -> None:
    """Buckets are cumulative: the count of one is its own less that of the one below."""
    drawn.sort(key=lambda each: float(each[0].replace("+Inf", "inf")))
    every = np.unique(np.concatenate([at for _, at, _ in drawn]))
    counts = np.array([np.interp(every, at, value) for _, at, value in drawn])
    own = np.diff(counts, axis=0, prepend=0)
    axes.imshow(
        own, aspect="auto", origin="lower", cmap=mpl.colormaps["turbo"], extent=(0, every[-1], 0, len(own))
    )
    axes.set_yticks(np.arange(len(own)) + 0.5, [name for name, _, _ in drawn], fontsize=6)


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{value:.3g}" + {"reqps": " req/s", "percent": " %", "watt": " W", "mbytes": " MiB"}.get(unit, "")
