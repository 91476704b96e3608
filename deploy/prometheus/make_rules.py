"""Writes rules.yaml: recording rules of six service level objectives, and the alerts of the runbook.

    python deploy/prometheus/make_rules.py > deploy/prometheus/rules.yaml
    python deploy/prometheus/make_rules.py --chart > deploy/helm/faser/files/rules.yaml

The second one leaves thresholds as @name@, in whose place the chart puts its values.

The error ratio of an objective is recorded over seven windows under the names that sloth gives them, so that its
dashboards work. A burning budget alerts over two windows at once (The Site Reliability Workbook, chapter 5): the
long one says that it matters, the short one that it still goes on. A threshold of a latency objective must be an
edge of the histogram's buckets, written as the server exposes it. Classes of requests have targets of their own,
which the server compares; their objectives are recorded for each class.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
BY = "by (namespace, model_name)"
BY_CLASS = "by (namespace, model_name, class)"
PERIOD_DAYS = 30
# Suitable for CPUs; 0.2 s per token is about as fast as people read. Names are those of the chart's values.
THRESHOLDS = {
    "ttftSeconds": 2.5,
    "tpotSeconds": 0.2,
    "kvCacheUsage": 0.95,
    "queueSeconds": 10.0,
    "preemptionsPerRequest": 0.1,
    "acceptanceRatio": 0.5,
    "stepTimeError": 0.25,
}
# (long window, short window, how many times faster than allowed the budget burns)
PAGE = (("1h", "5m", 14.4), ("6h", "30m", 6.0))
TICKET = (("1d", "2h", 3.0), ("3d", "6h", 1.0))


@dataclass(frozen=True)
class Objective:
    """bad, total: rates of events over the window `%w`. share: that must be good. what: in the alert's words."""

    name: str
    share: float
    bad: str
    total: str
    what: str

    @property
    def identity(self) -> dict[str, str]:
        return {"sloth_service": "faser", "sloth_slo": self.name, "sloth_id": f"faser-{self.name}"}

    @property
    def title(self) -> str:
        return "Faser" + "".join(word.capitalize() for word in self.name.split("-"))

    def error_ratio(self, window: str) -> str:
        ratio = f"({self.bad})\n/\n({self.total} > 0)".replace("%w", window)
        return ratio + "\n"


def _latency(name: str, metric: str, edge: str, what: str) -> Objective:
    total = f"sum {BY} (rate({metric}_count[%w]))"
    good = f'sum {BY} (rate({metric}_bucket{{le="{edge}"}}[%w]))'
    return Objective(name=name, share=0.99, bad=f"{total} - {good}", total=total, what=what)


# A key's own limit, and a client that leaves, are not the server's errors.
_REFUSED = f'sum {BY} (rate(vllm:admission_rejections_total{{reason!="key_limit"}}[%w]))'
_FAILED = f'sum {BY} (rate(vllm:request_success_total{{finished_reason="error"}}[%w]))'
_ENDED = f'sum {BY} (rate(vllm:request_success_total{{finished_reason!="abort"}}[%w]))'


def _of_classes(name: str, target: str, share: float, what: str) -> Objective:
    """target: as faser_slo_requests_total has it; requests without that target do not count."""
    return Objective(
        name=name,
        share=share,
        bad=f'sum {BY_CLASS} (rate(faser_slo_requests_total{{target="{target}",result="missed"}}[%w]))',
        total=f'sum {BY_CLASS} (rate(faser_slo_requests_total{{target="{target}"}}[%w]))',
        what=f"requests of class {{{{ $labels.class }}}} {what}",
    )


OBJECTIVES = (
    Objective(
        name="availability",
        share=0.999,
        bad=f"{_FAILED} + {_REFUSED}",
        total=f"{_ENDED} + {_REFUSED}",
        what="requests fail or are refused",
    ),
    _latency(
        "ttft",
        "vllm:time_to_first_token_seconds",
        "@ttftSeconds@",
        "requests wait more than @ttftSeconds@ s for their first token",
    ),
    _latency(
        "tpot",
        "vllm:request_time_per_output_token_seconds",
        "@tpotSeconds@",
        "requests take more than @tpotSeconds@ s per output token",
    ),
    _of_classes("class-ttft", "ttft", 0.95, "get their first token later than their target"),
    _of_classes("class-tpot", "tpot", 0.95, "take longer for a token than their target"),
    _of_classes("goodput", "both", 0.95, "miss one of their two targets"),
)


@dataclass(frozen=True)
class Symptom:
    """An alert outside the objectives. lasts: how long expr must hold."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str


SYMPTOMS = (
    Symptom(
        "FaserDown", 'up{job=~".*faser.*"} == 0', "2m", "page", "Prometheus cannot scrape {{ $labels.instance }}"
    ),
    Symptom(
        "FaserNotReady",
        f'max {BY} (faser_engine_state{{state="ready"}}) == 0',
        "10m",
        "page",
        "No engine of {{ $labels.model_name }} takes requests",
    ),
    Symptom(
        "FaserEngineRestarts",
        "increase(faser_engine_restarts_total[15m]) > 0",
        "0m",
        "ticket",
        "The engine of {{ $labels.instance }} died or hung, and was started again",
    ),
    Symptom(
        "FaserFlaps",
        'changes(faser_engine_state{state="ready"}[30m]) > 4',
        "0m",
        "ticket",
        "The engine of {{ $labels.instance }} became ready and not ready {{ $value }} times in half an hour",
    ),
    Symptom(
        "FaserAuditDiverged",
        'increase(faser_audit_divergences_total{backend="native"}[1h]) > 0',
        "0m",
        "page",
        "An answer of {{ $labels.instance }} differs from the one without drafts",
    ),
    Symptom(
        "FaserEngineStuck",
        "vllm:num_requests_running > 0\n"
        "and rate(vllm:generation_tokens_total[5m]) == 0\n"
        "and rate(vllm:prompt_tokens_total[5m]) == 0",
        "5m",
        "page",
        "{{ $value }} samples run on {{ $labels.instance }} and no token comes",
    ),
    Symptom(
        "FaserKvCacheFull",
        "vllm:kv_cache_usage_perc > @kvCacheUsage@",
        "10m",
        "ticket",
        "Running requests hold {{ $value | humanizePercentage }} of the KV blocks of {{ $labels.instance }}",
    ),
    Symptom(
        "FaserPreempts",
        f"sum {BY} (rate(vllm:num_preemptions_total[10m]))\n"
        f"> @preemptionsPerRequest@ * sum {BY} (rate(vllm:request_success_total[10m]))",
        "10m",
        "ticket",
        "More than @preemptionsPerRequest@ samples per request of {{ $labels.model_name }} are preempted",
    ),
    Symptom(
        "FaserQueueSlow",
        "histogram_quantile(0.95, sum by (namespace, model_name, le) "
        "(rate(vllm:request_queue_time_seconds_bucket[10m]))) > @queueSeconds@",
        "10m",
        "ticket",
        "One request in twenty waits more than {{ $value | humanizeDuration }} for its first step",
    ),
    Symptom(
        "FaserAcceptanceCollapsed",
        f"(sum {BY} (rate(faser_spec_accepted_tokens_total[30m]))"
        f" / (sum {BY} (rate(faser_spec_verified_tokens_total[30m])) > 1))\n"
        f"< @acceptanceRatio@ * (sum {BY} (rate(faser_spec_accepted_tokens_total[1d]))"
        f" / sum {BY} (rate(faser_spec_verified_tokens_total[1d])))",
        "30m",
        "ticket",
        "Draft acceptance of {{ $labels.model_name }} is below @acceptanceRatio@ of that of the last day",
    ),
    Symptom(
        "FaserStepTimesWrong",
        'abs(1 - rate(faser_step_predicted_seconds_total{role="step"}[30m])\n'
        '/ (rate(faser_step_measured_seconds_total{role="step"}[30m]) > 0.05)) > @stepTimeError@',
        "30m",
        "ticket",
        "Steps of {{ $labels.instance }} take {{ $value | humanizePercentage }} more or less than predicted",
    ),
)


def _budget_rules(objective: Objective) -> list[dict[str, object]]:
    """Return rules for what is left of the budget of a period, under sloth's names."""
    chosen = f'{{sloth_id="{objective.identity["sloth_id"]}"}}'
    short = f"slo:sli_error:ratio_rate5m{chosen}"
    over_budget = f"/ on (sloth_id) group_left\nslo:error_budget:ratio{chosen}\n"
    period = f"{PERIOD_DAYS}d"
    averaged = f"sum_over_time({short}[{period}])\n/ count_over_time({short}[{period}])\n"
    rules = {
        f"slo:sli_error:ratio_rate{period}": averaged,
        "slo:objective:ratio": f"vector({objective.share})",
        "slo:error_budget:ratio": f"vector(1 - {objective.share})",
        "slo:time_period:days": f"vector({PERIOD_DAYS})",
        "slo:current_burn_rate:ratio": f"{short}\n{over_budget}",
        "slo:period_burn_rate:ratio": f"slo:sli_error:ratio_rate{period}{chosen}\n{over_budget}",
        "slo:period_error_budget_remaining:ratio": f"1 - slo:period_burn_rate:ratio{chosen}",
        "sloth_slo_info": "vector(1)",
    }
    made: list[dict[str, object]] = []
    for name, expr in rules.items():
        labels = dict(objective.identity)
        if name.endswith(period):
            labels["sloth_window"] = period
        if name == "sloth_slo_info":
            labels["sloth_objective"] = f"{100 * objective.share:g}"
        made.append({"record": name, "expr": expr, "labels": labels})
    return made


def _burns(objective: Objective, pairs: tuple[tuple[str, str, float], ...]) -> str:
    budget = 1 - objective.share
    chosen = f'{{sloth_id="{objective.identity["sloth_id"]}"}}'
    pace = "\nor\n".join(
        f"(slo:sli_error:ratio_rate{long}{chosen} > {factor:g} * {budget:.4g}\n"
        f" and ignoring (sloth_window) slo:sli_error:ratio_rate{short}{chosen} > {factor:g} * {budget:.4g})"
        for long, short, factor in pairs
    )
    return f"max without (sloth_window) (\n{pace}\n)"


def _alert(name: str, expr: str, lasts: str, severity: str, summary: str) -> dict[str, object]:
    rule: dict[str, object] = {"alert": name, "expr": expr + "\n"}
    if lasts != "0m":
        rule["for"] = lasts
    rule["labels"] = {"severity": severity}
    rule["annotations"] = {"summary": summary, "runbook_url": f"docs/runbook.md#{name.lower()}"}
    return rule


def groups() -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for objective in OBJECTIVES:
        rules: list[dict[str, object]] = [
            {
                "record": f"slo:sli_error:ratio_rate{window}",
                "expr": objective.error_ratio(window),
                "labels": {**objective.identity, "sloth_window": window},
            }
            for window in WINDOWS
        ]
        made.append({"name": f"faser-slo-{objective.name}", "rules": [*rules, *_budget_rules(objective)]})
    alerts: list[dict[str, object]] = []
    for objective in OBJECTIVES:
        for suffix, severity, pairs in (("BudgetBurnsFast", "page", PAGE), ("BudgetBurns", "ticket", TICKET)):
            summary = (
                f"{objective.what[0].upper()}{objective.what[1:]}: {{{{ $value | humanizePercentage }}}} of them"
            )
            alerts.append(_alert(objective.title + suffix, _burns(objective, pairs), "0m", severity, summary))
    made.append({"name": "faser-slo-alerts", "rules": alerts})
    symptoms = [_alert(each.name, each.expr, each.lasts, each.severity, each.summary) for each in SYMPTOMS]
    made.append({"name": "faser-symptoms", "rules": symptoms})
    return made


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def rules(thresholds: Mapping[str, float]) -> str:
    """Return the file; thresholds that are not given stay as @name@."""
    text = yaml.dump({"groups": groups()}, Dumper=_Dumper, sort_keys=False, width=110)
    for name, value in thresholds.items():
        text = text.replace(f"@{name}@", str(value))
    return f"# Written by deploy/prometheus/make_rules.py\n{text}"


if __name__ == "__main__":
    sys.stdout.write(rules({} if sys.argv[1:] == ["--chart"] else THRESHOLDS))
