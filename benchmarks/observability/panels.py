"""The expressions of every dashboard, with the variables filled in as Grafana fills them for "All"."""

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.observability.prometheus import DEPLOY

_RATE_INTERVAL = "30s"
_VARIABLES = {"$__rate_interval": _RATE_INTERVAL, "$namespace": ".*", "$model_name": ".*", "$pod": ".*"}

# Why a panel may be empty in the trial.
MAY_BE_EMPTY = {
    "DCGM_": "there is no GPU, hence no dcgm-exporter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. targets: (expression, legend). definition: as in the file."""

    dashboard: str
    title: str
    kind: str
    targets: tuple[tuple[str, str], ...]
    definition: dict[str, Any]


def panels() -> list[Panel]:
    return [
        Panel(
            dashboard=path.stem,
            title=panel["title"],
            kind=panel["type"],
            targets=tuple((_filled(each["expr"]), each["legendFormat"]) for each in panel.get("targets", [])),
            definition=panel,
        )
        for path in sorted((DEPLOY / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
    ]


def reason_to_be_empty(expression: str) -> str | None:
    return next((reason for part, reason in MAY_BE_EMPTY.items() if part in expression), None)


def _filled(expression: str) -> str:
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression
