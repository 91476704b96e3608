"""Charts are well-formed SVG with points and labels in the right places."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks.spec_bench.chart import Chart, line_chart


def test_a_chart_names_its_lines_and_is_well_formed() -> None:
    svg = line_chart("A & B", "load", "ms", {"off": [(1, 2.0), (2, 3.0)], "<new>": [(1, 0.0), (2, 1.0)]})
    assert svg is not None
    texts = [each.text for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "off", "<new>", "load", "ms"} <= set(texts)


def test_a_chart_puts_points_where_their_numbers_say() -> None:
    chart = Chart(title="a", x_label="x", y_label="y", low=1, high=16, top=2.0, doubling=True)
    chart.line("<b>", [(1, 0.0), (4, 1.0), (16, 2.0)], marks=False)
    paths = [each.get("d") for each in ET.fromstring(chart.svg()).iter() if each.get("stroke-width") == "2"]
    assert paths[0] == "M64.0 370.0L317.0 205.0L570.0 40.0"


@pytest.mark.parametrize(
    "top, labels",
    [
        (1.82, ["0", "0.5", "1", "1.5"]),
        (1660.0, ["0", "500", "1000", "1500"]),
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_a_scale_is_marked_with_round_numbers(top: float, labels: list[str]) -> None:
    drawn = ET.fromstring(Chart(title="a", x_label="x", y_label="y", low=0, high=1, top=top).svg())
    assert [each.text for each in drawn.iter() if each.get("text-anchor") == "end"] == labels
