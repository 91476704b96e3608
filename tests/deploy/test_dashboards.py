"""The dashboards: each expression can be parsed and names what a server exports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.dashboards.__main__ import write
from tests.deploy.exported import DEPLOY, exported_series, unknown_series

FILES = sorted((DEPLOY / "grafana").glob("*.json"))
VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$model_name": ".*", "$pod": ".*"}
ADDED_BY_PROMETHEUS = {"namespace", "pod", "instance", "job"}


def expressions() -> list[tuple[str, str]]:
    return [
        (f"{path.stem}: {panel['title']}", target["expr"])
        for path in FILES
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", [])
    ]


# Series without a panel: they never change, or another series on a panel says the same.
WITHOUT_A_PANEL = {
    *("vllm:corrupted_requests_total", "vllm:engine_sleep_state"),
    *(f"vllm:mm_cache_{what}_total" for what in ("queries", "hits")),
    "vllm:prompt_tokens_cached_total",  # prompt_tokens_by_source
    "faser_spec_paying",  # spec_paid_ratio above 1
    "faser_predicted_latency_seconds",  # its parts have panels: first token, and time per output token
    "faser_model_layers_in_single_operations",  # a property of the model and the machine, also in the log
    "faser_traffic_answers_total",  # of --record-traffic, which is off by default
}


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def test_the_files_are_what_their_program_writes(tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert written == {path.name: path.read_text() for path in FILES}
    assert len(written) == 3


@pytest.mark.parametrize("where, expression", expressions())
def test_an_expression_parses_and_names_exported_series(where: str, expression: str) -> None:
    promql = pytest.importorskip("promql_parser", reason="make deploy-tools installs it")
    promql.parse(filled(expression))
    assert unknown_series(expression) == set(), where


def test_every_series_is_on_a_panel_or_has_a_reason_not_to_be() -> None:
    shown = set(re.findall(r"(?:vllm:|faser_)[\w:]+", " ".join(expression for _, expression in expressions())))
    parts = re.compile("_(bucket|sum|count)$")
    families = {parts.sub("", name) for name in exported_series()}
    assert families - {parts.sub("", name) for name in shown} == WITHOUT_A_PANEL


@pytest.mark.parametrize(
    "series, title",
    [
        ("vllm:time_to_first_token_seconds", "Time to first token"),
        ("vllm:inter_token_latency_seconds", "Inter-token latency"),
        ("vllm:request_time_per_output_token_seconds", "Time per output token"),
        ("vllm:e2e_request_latency_seconds", "End-to-end latency"),
        ("vllm:request_queue_time_seconds", "Queue time"),
        ("vllm:request_prefill_time_seconds", "Prefill time"),
        ("vllm:request_decode_time_seconds", "Decode time"),
        ("vllm:kv_cache_usage_perc", "KV cache usage"),
    ],
)
def test_panels_have_the_names_of_the_field(series: str, title: str) -> None:
    named = {where.split(": ", 1)[1] for where, expression in expressions() if f"{series}_bucket" in expression}
    named |= {
        where.split(": ", 1)[1] for where, expression in expressions() if expression.startswith(series + "{")
    }
    assert named == {title}


def test_the_runbook_names_panels_that_exist() -> None:
    text = " ".join((DEPLOY.parent / "docs" / "runbook.md").read_text().split())
    named = re.findall(r"(?<!\*)\*([A-Z][^*]*)\*(?!\*)", text)
    assert len(named) > 10
    assert set(named) - {where.split(": ", 1)[1] for where, _ in expressions()} == set()


@pytest.mark.parametrize("where, expression", expressions())
def test_labels_that_an_expression_groups_by_exist(where: str, expression: str) -> None:
    series = exported_series()
    named = set(re.findall(r"(?:vllm:|faser_)[\w:]+", expression))
    known = set().union(ADDED_BY_PROMETHEUS, *(series[name] for name in named))
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    assert grouped <= known, where


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_have_ids_and_places_of_their_own(path: Path) -> None:
    board: dict[str, Any] = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert board["uid"] == path.stem
    assert board["id"] is None
