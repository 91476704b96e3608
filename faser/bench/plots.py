"""The plots of a campaign, as SVG texts by file name. A plot without data is left out."""

from collections.abc import Sequence

from faser.bench.campaign import Run
from faser.bench.chart import Chart, line_chart
from faser.bench.report import BAND, FASER, Summary

_MAX_DOTS = 3000
_SHOWN_SHARE = 0.99  # of the points; an outlier must not compress the scale for the others


def plots(runs: Sequence[Run], found: Sequence[Summary]) -> dict[str, str]:
    made: dict[str, str | None] = {}
    for temperature in dict.fromkeys(each.temperature for each in found):
        ending = f"t{temperature:g}.svg"
        of_temperature = [each for each in found if each.temperature == temperature]
        made[f"speed_up_{ending}"] = speed_ups(of_temperature)
        made[f"acceptance_{ending}"] = survival_by_depth(of_temperature)
        made[f"gamma_{ending}"] = gamma_over_time([each for each in runs if each.temperature == temperature])
    made["step_time.svg"] = step_times(runs)
    return {name: drawn for name, drawn in made.items() if drawn is not None}


def speed_ups(found: Sequence[Summary]) -> str | None:
    """Speed-up over policy off by concurrency, one line per policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in sorted(found, key=lambda one: one.concurrency):
        if each.speed_up is not None:
            lines.setdefault(each.policy, []).append((each.concurrency, each.speed_up))
    return line_chart("Speed-up over no speculation", "requests at a time", "speed-up", lines, doubling=True)


def survival_by_depth(found: Sequence[Summary]) -> str | None:
    """Probability that the first k drafted tokens are all accepted, at the lowest concurrency measured."""
    lowest = min((each.concurrency for each in found), default=0)
    lines = {
        each.policy: [(depth, share) for depth, share in enumerate(each.survivals, start=1) if share is not None]
        for each in found
        if each.concurrency == lowest
    }
    return line_chart(f"Drafts accepted up to a depth, {lowest} at a time", "depth", "share", lines)


def gamma_over_time(runs: Sequence[Run]) -> str | None:
    """Mean gamma of each step with policy faser, one line per concurrency, of the last round."""
    last = {each.concurrency: each for each in sorted(runs, key=lambda run: run.round) if each.policy == FASER}
    lines = {
        f"{concurrency} at a time": [(point.at_s, point.gamma) for point in each.points]
        for concurrency, each in sorted(last.items())
    }
    return line_chart(f"Drafted tokens verified in a step: {FASER}", "seconds", "mean γ", lines, marks=False)


def step_times(runs: Sequence[Run]) -> str | None:
    """Predicted by measured step times, in ms, and a band of ten per cent around equality."""
    points = [
        (1000 * point.measured_s, 1000 * point.predicted_s)
        for each in runs
        for point in each.points
        if point.predicted_s > 0 and point.measured_s > 0
    ]
    if not points:
        return None
    top = sorted(map(max, points))[int(_SHOWN_SHARE * (len(points) - 1))]
    chart = Chart(title="Time of a step, ms", x_label="measured", y_label="predicted", low=0, high=top, top=top)
    chart.band([(0, 0), (top / (1 + BAND), top), (top, top), (top, top * (1 - BAND))])
    chart.rule((0, 0), (top, top))
    chart.dots([point for point in points if max(point) <= top][:: -(-len(points) // _MAX_DOTS)])
    return chart.svg()
