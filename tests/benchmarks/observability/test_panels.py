"""The expressions that the trial evaluates are those of the dashboards, with every variable filled in."""

import json
import re

from benchmarks.observability.prometheus import DEPLOY, MAY_BE_EMPTY, panels, reason_to_be_empty


def test_every_expression_is_there_without_a_variable() -> None:
    found = [(panel.dashboard, panel.title, len(panel.targets)) for panel in panels()]
    assert found == [
        (path.stem, panel["title"], len(panel.get("targets", [])))
        for path in sorted((DEPLOY / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
    ]
    expressions = [expression for panel in panels() for expression, _ in panel.targets]
    assert not [each for each in expressions if re.search(r"\$\w*[a-z]", each)]


def test_a_reason_to_be_empty_belongs_to_a_panel() -> None:
    expressions = [expression for panel in panels() for expression, _ in panel.targets]
    for part in MAY_BE_EMPTY:
        assert any(part in each for each in expressions), part
    assert reason_to_be_empty("DCGM_FI_DEV_GPU_UTIL") == MAY_BE_EMPTY["DCGM_"]
    assert reason_to_be_empty("vllm:num_requests_running") is None
