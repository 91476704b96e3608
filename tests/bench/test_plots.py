"""Plots of a campaign are well-formed SVG; a plot without data is left out."""

import xml.etree.ElementTree as ET
from dataclasses import replace

from faser.bench.plots import plots
from faser.bench.report import summaries
from tests.bench.recorded_runs import RUNS, run_of


def test_every_plot_is_svg_and_names_its_policies() -> None:
    drawn = plots(RUNS, summaries(RUNS))
    assert list(drawn) == ["speed_up_t0.svg", "acceptance_t0.svg", "gamma_t0.svg", "step_time.svg"]
    for text in drawn.values():
        ET.fromstring(text)
    texts = [element.text for element in ET.fromstring(drawn["speed_up_t0.svg"]).iter() if element.text]
    assert {"off", "fixed:3", "faser"} <= set(texts)


def test_a_plot_without_data_is_left_out() -> None:
    without_points = [replace(run_of("off", 5.0), points=())]
    assert list(plots(without_points, summaries(without_points))) == ["speed_up_t0.svg"]
