"""The chart as Helm renders it, and what its pods run."""

import json
import pickle
import re
from functools import cache
from typing import Any

import pytest
import yaml

from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.sources import SETTINGS, parse, settle
from tests.deploy.exported import DEPLOY

helm = pytest.importorskip("helm_python", reason="make deploy-tools installs it")

CHART = DEPLOY / "helm" / "faser"
WORKLOADS = ("Deployment", "LeaderWorkerSet")


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the chart makes of the values; the caller may change it."""
    found: list[dict[str, Any]] = pickle.loads(_rendered(json.dumps(values)))
    return found


@cache
def _rendered(values: str) -> bytes:
    rendered = helm.Chart.load(str(CHART)).render(json.loads(values), name="release", namespace="models")
    documents = [
        each for path, text in rendered.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text)
    ]
    return pickle.dumps([each for each in documents if each])


def of_kind(values: dict[str, Any], *kinds: str) -> dict[str, Any]:
    (found,) = [each for each in objects(values) if each["kind"] in kinds]
    return found


def templates(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the pods that answer HTTP; then, where several pods hold a model, of the others."""
    found = of_kind(values, *WORKLOADS)["spec"]
    group = found.get("leaderWorkerTemplate")
    return [found["template"]] if group is None else [group["leaderTemplate"], group["workerTemplate"]]


def containers(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["spec"]["containers"][0] for each in templates(values)]


def container(values: dict[str, Any]) -> dict[str, Any]:
    return containers(values)[0]


def expanded(texts: list[str], **variables: str) -> list[str]:
    """What kubelet makes of a command or of arguments. KeyError: a variable that the pod does not have."""
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each) for each in texts]


def configs(values: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """What `faser serve` makes of the container's arguments. Raises UsageError for those it does not know."""
    made = container(values)
    given = {each["name"] for each in made["env"]}
    return configs_of(expanded(made["args"], **({"POD_IP": "10.0.0.7"} if "POD_IP" in given else {})))


def configs_of(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    findings = parse("faser serve", arguments, SETTINGS)
    engine, server = settle(findings, (EngineConfig, ServerConfig))
    assert findings.warnings == []
    return engine, server
