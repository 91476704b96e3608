"""The series that a server exports, one with several models too, as a scrape shows them."""

import re
from functools import cache
from pathlib import Path

from faser.metrics.models import ModelsMetrics
from faser.metrics.server import Metrics
from faser.types.statistics import AuditStats, EngineStats, PaidRatio, SpeculationBalance, SpeculationStats

DEPLOY = Path(__file__).parents[2] / "deploy"
_ABOUT_SCRAPES = {"up"}


@cache
def exported_series() -> dict[str, set[str]]:
    """The label names of every series, histograms' buckets, sums and counts each by itself."""
    series: dict[str, set[str]] = {}
    metrics = Metrics(model_name="m", max_model_len=2048)
    paid = PaidRatio((1, 1), 1.2, 1.1, 1.3, drafts=True)
    speculation = SpeculationStats(
        policy="faser", method="auto", paid=(paid,), balance=SpeculationBalance(1.0, 2.0)
    )
    # Of an engine that audits and has measured what drafts bring.
    metrics.engine(EngineStats(audit=AuditStats(backend="native"), speculation=speculation))
    for line in ModelsMetrics({"m": metrics}).render().decode().splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition("{")
            series.setdefault(name.split(" ")[0], set()).update(re.findall(r'(\w+)="', labels))
    return series


def unknown_series(expression: str) -> set[str]:
    """Names in a PromQL expression that neither a server exports nor a rule records."""
    named = set(re.findall(r"\b(?:vllm:|faser_|slo:)[\w:]+|\bup\b", expression))
    known = set(exported_series()) | _ABOUT_SCRAPES
    recorded = set(re.findall(r"record: (\S+)", (DEPLOY / "prometheus" / "rules.yaml").read_text()))
    return named - known - recorded
