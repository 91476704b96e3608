"""A Prometheus with the configuration and the rules of deploy/, whose windows are `scale` times shorter.

And the panels of every dashboard, with the variables filled in as Grafana fills them for "All".
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from benchmarks.servers import ServerError, free_port
from deploy.prometheus import make_rules

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRAPE_S = 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def shortened(rules: str, scale: float) -> str:
    """rules.yaml with every range `[5m]` and every `for: 5m` divided by scale; at least four scrapes long.

    The names of recorded series stay as they are.
    """

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found["count"]) * _SECONDS[found["unit"]] / scale
        return f"{found['before']}{max(4 * SCRAPE_S, round(seconds))}s{found['after']}"

    duration = r"(?P<count>\d+)(?P<unit>[smhd])"
    rules = re.sub(rf"(?P<before>\[){duration}(?P<after>\])", shorter, rules)
    return re.sub(rf"(?P<before>^ *for: ){duration}(?P<after>$)", shorter, rules, flags=re.MULTILINE)


class Prometheus:
    """One Prometheus on a free port, that scrapes one server. Leaving the context ends it.

    folder: for its files. target: HOST:PORT of the server. patient: latencies may be 10 s and .5 s a token.
    """

    def __init__(self, folder: Path, target: str, scale: float, *, patient: bool = False) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise ServerError("there is no prometheus; on Debian: apt install prometheus")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.dump(config))
        thresholds = make_rules.THRESHOLDS
        if patient:
            thresholds = {**thresholds, "ttftSeconds": 10.0, "tpotSeconds": 0.5}
        (folder / "rules.yaml").write_text(shortened(make_rules.rules(thresholds), scale))
        port = free_port()
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30, trust_env=False)
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        for _ in range(300):
            try:
                self._http.get("/status/buildinfo").raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.1)
            else:
                return self
        raise ServerError("Prometheus does not answer")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._http.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples now: metric, value. Raises httpx.HTTPStatusError for an expression that Prometheus refuses."""
        return self._result("/query", {"query": expression})

    def query_range(self, expression: str, begin_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Samples over time: metric, values."""
        span = {"start": str(begin_s), "end": str(end_s), "step": str(step_s)}
        return self._result("/query_range", {"query": expression, **span})

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("/rules").raise_for_status().json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> dict[str, float]:
        """Alerts that fire, by name, with the time since when their condition holds, in seconds since 1970."""
        alerts = self._http.get("/alerts").raise_for_status().json()["data"]["alerts"]
        return {
            each["labels"]["alertname"]: datetime.fromisoformat(
                each["activeAt"][:26].rstrip("Z") + "+00:00"
            ).timestamp()
            for each in alerts
            if each["state"] == "firing"
        }

    def _result(self, route: str, params: Mapping[str, str]) -> list[dict[str, Any]]:
        answer = self._http.post(route, data=dict(params)).raise_for_status().json()
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


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
