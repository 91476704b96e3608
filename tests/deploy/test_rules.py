"""The rules name what a server exports, and fire when they should: promtool runs them on made-up series."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.make_rules import THRESHOLDS
from faser.metrics.server import Metrics
from tests.deploy.exported import DEPLOY, exported_series, unknown_series

RULES = DEPLOY / "prometheus" / "rules.yaml"
SCHEMA = DEPLOY / "helm" / "faser" / "values.schema.json"
RUNBOOK = (DEPLOY.parent / "docs" / "runbook.md").read_text()


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def _alerts() -> list[str]:
    return [rule["alert"] for rule in _rules() if "alert" in rule]


@pytest.mark.parametrize(
    "flags, path", [([], RULES), (["--chart"], DEPLOY / "helm" / "faser" / "files" / "rules.yaml")]
)
def test_the_files_are_what_their_program_writes(flags: list[str], path: Path) -> None:
    program = DEPLOY / "prometheus" / "make_rules.py"
    done = subprocess.run([sys.executable, program, *flags], capture_output=True, text=True, check=True)
    assert done.stdout == path.read_text()


def test_every_series_in_a_rule_is_exported_or_recorded() -> None:
    assert {name for rule in _rules() for name in unknown_series(rule["expr"])} == set()


@pytest.mark.parametrize(
    "metric, threshold",
    [("time_to_first_token_seconds", "ttftSeconds"), ("request_time_per_output_token_seconds", "tpotSeconds")],
)
def test_thresholds_of_latency_are_edges_of_the_buckets(metric: str, threshold: str) -> None:
    text = Metrics(model_name="m", max_model_len=64).render().decode()
    edges = re.findall(rf'vllm:{metric}_bucket{{engine="0",le="([^"]+)"', text)
    allowed = json.loads(SCHEMA.read_text())["properties"]["prometheusRule"]["properties"]["thresholds"][
        "properties"
    ]
    assert [f"{float(each)}" for each in allowed[threshold]["enum"]] == edges[:-1]  # the last one is +Inf
    assert f'le="{THRESHOLDS[threshold]}"' in RULES.read_text()
    assert f"vllm:{metric}_count" in exported_series()


@pytest.mark.parametrize("alert", _alerts())
def test_every_alert_has_an_entry_in_the_runbook_and_points_at_it(alert: str) -> None:
    (rule,) = [rule for rule in _rules() if rule.get("alert") == alert]
    assert rule["annotations"]["runbook_url"].endswith(f"docs/runbook.md#{alert.lower()}")
    assert f"\n## {alert}\n" in RUNBOOK


def test_the_runbook_has_the_thresholds() -> None:
    text = " ".join(RUNBOOK.split())
    assert f"waits longer than {THRESHOLDS['ttftSeconds']} s for its first token" in text
    assert f"takes longer than {THRESHOLDS['tpotSeconds']} s per output token" in text


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    headings = [line[3:] for line in RUNBOOK.splitlines() if line.startswith("## Faser")]
    assert sorted(headings) == sorted(_alerts())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_that_alerts_fire_when_they_should_and_are_silent_otherwise(tmp_path: Path) -> None:
    rules_test = Path(__file__).parent / "rules_test.yaml"
    for source in (RULES, rules_test):
        shutil.copy(source, tmp_path / source.name)
    tested = {
        case["alertname"]
        for test in yaml.safe_load(rules_test.read_text())["tests"]
        for case in test["alert_rule_test"]
    }
    assert tested == set(_alerts())
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
