"""The chart: it renders, a cluster's schemas accept what it renders, and it agrees with the program."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.prometheus.make_rules import THRESHOLDS, rules
from tests.deploy.exported import DEPLOY, unknown_series
from tests.deploy.rendered import CHART, WORKLOADS, configs, container, helm, objects, of_kind, templates
from tests.deploy.values import CLAIM, GPU, REFUSED, RENDERED

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make deploy-tools installs it")

operator = pytest.importorskip("cloudcoil.models.prometheus_operator.v1", reason="make deploy-tools installs it")
keda = pytest.importorskip("cloudcoil.models.keda.v1alpha1", reason="make deploy-tools installs it")

MODELS = {
    "ServiceMonitor": operator.ServiceMonitor,
    "PodMonitor": operator.PodMonitor,
    "PrometheusRule": operator.PrometheusRule,
    "ScaledObject": keda.ScaledObject,
}
OLDEST, NEWEST = "1.27", "1.37"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
OWN_SCHEMAS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "resources.json").read_text())


def test_helm_lints_it_without_a_warning() -> None:
    messages = helm.lint(str(CHART), {}, strict=True)
    assert messages["errors"] == []
    assert [each["error"] for each in messages["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", RENDERED)
@pytest.mark.full(
    but=[*(f"{each}-{NEWEST}" for each in RENDERED), *(f"{each}-{OLDEST}" for each in list(RENDERED)[::8])]
)
def test_a_cluster_accepts_what_it_renders(name: str, version: str) -> None:
    for each in objects(RENDERED[name]):
        group = each["apiVersion"].split("/")[0]
        if group in OWN_SCHEMAS:
            jsonschema.validate(each, OWN_SCHEMAS[group][each["kind"]])
        elif each["kind"] in MODELS:
            # The models accept unknown keys: what they understood must be the whole.
            understood = MODELS[each["kind"]].model_validate(each)
            assert understood.model_dump(mode="json", by_alias=True, exclude_unset=True) == each
        else:
            kubernetes_validate.validate(each, version, strict=True)
    for template in templates(RENDERED[name]):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": template}
        kubernetes_validate.validate(pods, version, strict=True)


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_are_refused_by_name(name: str) -> None:
    values, words = REFUSED[name]
    with pytest.raises(helm.HelmError, match=re.escape(words)):
        objects(values)


@pytest.mark.parametrize("name", RENDERED)
def test_faser_serve_reads_the_arguments(name: str) -> None:
    _, server = configs(RENDERED[name])
    assert server.host == "0.0.0.0"


def test_values_reach_the_program() -> None:
    engine, server = configs(GPU)
    assert (engine.device, engine.dtype, engine.max_num_seqs, engine.gpu_memory_utilization) == (
        "cuda",
        "bfloat16",
        256,
        0.9,
    )
    assert engine.enforce_eager
    assert configs(CLAIM)[0].model == "/models/qwen3-8b"
    assert configs(CLAIM)[1].served_model_name == ("qwen", "default")
    engine, server = configs(RENDERED["long-drain"])
    assert (server.port, server.shutdown_timeout, server.root_path, server.request_timeout) == (
        9000,
        120,
        "/llm",
        600,
    )
    server = configs(RENDERED["observed"])[1]
    assert server.log_format == "json"
    assert server.otlp_traces_endpoint == "http://collector.observability:4318/v1/traces"
    for name, hosts in (("defaults", ("*",)), ("own-names", ("llm.example", "*.corp.example")), ("no-names", ())):
        assert configs(RENDERED[name])[1].allowed_hosts == hosts
    speculation = configs(RENDERED["speculation"])[0].speculation
    assert speculation.method == "ngram"
    assert (speculation.slo.ttft_ms, speculation.slo.tpot_ms) == (500, 50.5)
    assert set(speculation.classes) >= {"interactive", "batch"}


@pytest.mark.parametrize("name", RENDERED)
def test_probes_ask_routes_of_the_server_on_its_port(name: str) -> None:
    made = container(RENDERED[name])
    (port,) = [each for each in made["ports"] if each["name"] == "http"]
    assert f"--port={port['containerPort']}" in made["args"]
    paths = {probe: made[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe: each["path"] for probe, each in paths.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {each["port"] for each in paths.values()} == {port["name"]}


@pytest.mark.parametrize("name", RENDERED)
def test_nothing_that_selects_servers_selects_the_pod_of_helm_test(name: str) -> None:
    labels = of_kind(RENDERED[name], "Pod")["metadata"]["labels"]
    for each in objects(RENDERED[name]):
        spec = each.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is not None and each["kind"] != "ServiceMonitor":  # that one selects Services
            assert not selector.get("matchLabels", selector).items() <= labels.items(), each["kind"]


@pytest.mark.parametrize("name", RENDERED)
def test_a_pod_has_time_to_drain(name: str) -> None:
    for template in templates(RENDERED[name]):
        arguments = template["spec"]["containers"][0]["args"]
        (drain,) = [float(each.split("=")[1]) for each in arguments if "--shutdown-timeout" in each]
        assert template["spec"]["terminationGracePeriodSeconds"] >= 5 + drain + 10


@pytest.mark.parametrize("name", RENDERED)
def test_selectors_are_name_and_instance_alone_and_match_the_pods_that_answer(name: str) -> None:
    workload = of_kind(RENDERED[name], *WORKLOADS)
    stable = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
    every = answering = {key: workload["metadata"]["labels"][key] for key in stable}
    for template in templates(RENDERED[name]):
        assert every.items() <= template["metadata"]["labels"].items()
    if workload["kind"] == "LeaderWorkerSet":
        answering = every | {WORKER_INDEX: "0"}  # a label that its controller gives to the leaders
    for each in objects(RENDERED[name]):
        spec = each.get("spec", {})
        if each["kind"] in ("Service", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
            assert spec["selector"].get("matchLabels", spec["selector"]) == answering, each["kind"]
        elif each["kind"] in ("Deployment", "ServiceMonitor"):  # the latter selects the Service
            assert spec["selector"]["matchLabels"] == every, each["kind"]
        elif each["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"] == every


def test_the_pod_is_locked_down() -> None:
    pod = of_kind({}, "Deployment")["spec"]["template"]["spec"]
    made = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert made["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = {each["mountPath"] for each in made["volumeMounts"]}
    assert {"/data", "/tmp", "/dev/shm"} <= written


def test_without_an_autoscaler_the_values_say_how_many_pods() -> None:
    assert of_kind({}, "Deployment")["spec"]["replicas"] == 1
    assert of_kind(RENDERED["ranks"], "LeaderWorkerSet")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "name, scaler",
    [
        ("hpa", "HorizontalPodAutoscaler"),
        ("keda", "ScaledObject"),
        ("ranks with hpa", "HorizontalPodAutoscaler"),
        ("ranks with keda", "ScaledObject"),
    ],
)
def test_with_an_autoscaler_the_number_of_pods_is_left_to_it(name: str, scaler: str) -> None:
    scaled = of_kind(RENDERED[name], *WORKLOADS)
    assert "replicas" not in scaled["spec"]
    assert of_kind(RENDERED[name], scaler)["spec"]["scaleTargetRef"] == {
        "apiVersion": scaled["apiVersion"],
        "kind": scaled["kind"],
        "name": scaled["metadata"]["name"],
    }


@pytest.mark.parametrize("name", ["keda", "ranks with keda"])
def test_keda_sums_the_queue_and_names_exported_series(name: str) -> None:
    scaled = of_kind(RENDERED[name], "ScaledObject")["spec"]
    queries = [each["metadata"]["query"] for each in scaled["triggers"]]
    assert [each for each in queries if f'pod=~"{scaled["scaleTargetRef"]["name"]}-.*"' not in each] == []
    assert queries[0].startswith("sum(vllm:num_requests_waiting{")
    assert set().union(*map(unknown_series, queries)) == set()


@pytest.mark.parametrize(
    "endpoint, port",
    [
        ("http://collector:4318/v1/traces", 4318),
        ("https://traces.example/otlp/v1/traces", 443),
        ("http://collector/v1/traces", 80),
    ],
)
def test_a_locked_down_pod_reaches_the_port_that_takes_its_spans(endpoint: str, port: int) -> None:
    values = {
        "server": {"otlpTracesEndpoint": endpoint},
        "networkPolicy": {"enabled": True, "allowModelDownload": False},
    }
    rules = of_kind(values, "NetworkPolicy")["spec"]["egress"]
    assert [each["port"] for rule in rules for each in rule["ports"]] == [53, 53, port]


def test_a_disruption_budget_needs_more_than_one_pod() -> None:
    assert not [each for each in objects({}) if each["kind"] == "PodDisruptionBudget"]
    assert of_kind(RENDERED["three-pods"], "PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert of_kind(RENDERED["hpa"], "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_secrets_reach_the_pod_as_variables_and_never_as_arguments() -> None:
    made = container(RENDERED["secrets"])
    secrets = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in made["env"] if "valueFrom" in each
    }
    assert secrets == {"FASER_API_KEY": "keys", "HF_TOKEN": "hub"}
    assert "one" not in " ".join(container(RENDERED["key-in-values"])["args"])
    monitor = of_kind(RENDERED["secrets"], "ServiceMonitor")["spec"]["endpoints"][0]
    assert monitor["authorization"]["credentials"] == {"name": "keys", "key": "api-key"}


def test_thresholds_of_alerts_are_the_values() -> None:
    given = RENDERED["thresholds"]["prometheusRule"]["thresholds"]
    rule = of_kind(RENDERED["thresholds"], "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(
        rules({**THRESHOLDS, **{name: float(each) for name, each in given.items()}})
    )
    for default in THRESHOLDS:
        tightened = {**RENDERED["monitoring"], "prometheusRule": {"enabled": True, "thresholds": {default: 0.75}}}
        assert of_kind(tightened, "PrometheusRule")["spec"] == yaml.safe_load(rules({**THRESHOLDS, default: 0.75}))
    assert "@" not in rules(THRESHOLDS)


def test_rules_and_dashboards_are_those_of_the_project() -> None:
    rule = of_kind(RENDERED["monitoring"], "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["prometheusRule"]["thresholds"] == THRESHOLDS
    boards = [each for each in objects(RENDERED["monitoring"]) if each["kind"] == "ConfigMap"]
    assert len(boards) == 3
    for each in boards:
        ((name, text),) = each["data"].items()
        assert json.loads(text) == json.loads((DEPLOY / "grafana" / name).read_text())
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
