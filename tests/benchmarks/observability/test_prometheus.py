"""Rules with shorter windows are the same rules otherwise.

Planted bug that these tests have caught: the wait of an alert stays as it is.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.observability.prometheus import DEPLOY, shortened

SHIPPED = (DEPLOY / "prometheus" / "rules.yaml").read_text()


def test_ranges_and_waits_are_shorter_and_names_stay() -> None:
    rule = "- record: a:rate5m\n  expr: rate(b_total[{}]) + c[{}]\n  for: {}\n  labels: {{window: 5m}}\n"
    assert shortened(rule.format("5m", "1d", "10m"), 20) == rule.format("15s", "4320s", "30s")


def test_no_window_is_shorter_than_four_scrapes() -> None:
    assert shortened("rate(a_total[5m])", 1000) == "rate(a_total[4s])"


@pytest.mark.parametrize("scale", [1, 20])
def test_of_the_shipped_rules_only_windows_change(scale: int) -> None:
    def without_windows(text: str) -> str:
        return re.sub(r"\[\w+\]|(?<=for: )\w+", "", text)

    assert without_windows(shortened(SHIPPED, scale)) == without_windows(SHIPPED)
    waits = [
        rule["for"] for group in yaml.safe_load(SHIPPED)["groups"] for rule in group["rules"] if "for" in rule
    ]
    assert waits


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_the_shortened_rules_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(shortened(SHIPPED, 20))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
