"""Line charts are well-formed SVG."""

from xml.etree import ElementTree

from faser.bench.chart import line_chart


def test_a_chart_names_its_lines_and_is_well_formed() -> None:
    svg = line_chart("A & B", "load", "ms", {"off": [(1, 2.0), (2, 3.0)], "<new>": [(1, 0.0), (2, 1.0)]})
    assert svg is not None
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "off", "<new>", "load", "ms"} <= set(texts)
