"""The chart past one process: engines of a pod, what its prefix cache holds, and a model in several pods."""

import json
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from faser.config.kv_events import of_engine, parse_kv_events
from tests.deploy.exported import DEPLOY
from tests.deploy.rendered import configs, configs_of, container, containers, expanded, objects, of_kind, templates
from tests.deploy.values import ENGINES, RANKS, RENDERED

EVENTS = {"kvEvents": {"enabled": True}}
EVERY_POD: list[dict[str, Any]] = [{"namespaceSelector": {}}]


def ports(values: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(values)["ports"]}


def pool_ports(values: dict[str, Any]) -> list[int]:
    return [each["number"] for each in of_kind(values, "InferencePool")["spec"]["targetPorts"]]


def peers(values: dict[str, Any], port: str) -> list[dict[str, Any]]:
    """Who may connect to a port of this name."""
    rules = of_kind(values, "NetworkPolicy")["spec"]["ingress"]
    (found,) = [each["from"] for each in rules if port in [named["port"] for named in each.get("ports", ())]]
    assert isinstance(found, list)
    return found


def test_the_pool_has_the_port_of_each_engine() -> None:
    server = configs(ENGINES)[1]
    assert (server.data_parallel_size, server.data_parallel_first_port) == (4, 8100)
    engines = {"engine-0": 8100, "engine-1": 8101, "engine-2": 8102, "engine-3": 8103}
    assert ports(ENGINES) == {"http": 8000, **engines}
    assert pool_ports(ENGINES) == list(engines.values())
    for name in engines:
        assert peers(RENDERED["engines"], name) == EVERY_POD


def test_engines_behind_one_port_are_one_for_the_pool() -> None:
    values = RENDERED["engines behind one port"]
    server = configs(values)[1]
    assert (server.data_parallel_size, server.data_parallel_first_port) == (16, None)
    assert ports(values) == {"http": 8000}
    assert pool_ports(values) == [8000]


def test_one_engine_and_no_events_need_no_flag() -> None:
    assert not [each for each in container({})["args"] if "parallel" in each or "kv-events" in each]
    assert ports({}) == {"http": 8000}
    assert "POD_IP" not in [each["name"] for each in container({})["env"]]


@pytest.mark.parametrize(
    "model, topic",
    [
        ({}, "kv@10.0.0.7:8000@SmolLM2-135M-Instruct"),
        ({"name": "Qwen/Qwen3-8B"}, "kv@10.0.0.7:8000@Qwen/Qwen3-8B"),
        ({"name": "Qwen/Qwen3-8B", "servedNames": ["qwen", "default"]}, "kv@10.0.0.7:8000@qwen"),
    ],
)
def test_events_have_the_pods_address_and_the_model_as_topic(model: dict[str, Any], topic: str) -> None:
    values = {**EVENTS, "model": model}
    (address,) = [each for each in container(values)["env"] if each["name"] == "POD_IP"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    events = configs(values)[0].kv_events
    assert events is not None
    assert (events.endpoint, events.replay_endpoint, events.topic) == ("tcp://*:5557", "tcp://*:5558", topic)
    assert ports(values) == {"http": 8000, "kv-events": 5557, "kv-replay": 5558}


def test_ports_and_topic_of_events_are_the_values() -> None:
    values = RENDERED["kv-events for one router"]
    events = configs(values)[0].kv_events
    assert events is not None
    assert (events.endpoint, events.replay_endpoint, events.topic) == (
        "tcp://*:6000",
        "tcp://*:6001",
        "kv@10.0.0.7@all",
    )
    assert ports(values) == {"http": 8000, "kv-events": 6000, "kv-replay": 6001}


def test_each_engine_has_its_own_ports_for_events() -> None:
    """Oracle: the program. A picker adds the engine's number to the ports of the first one."""
    values = RENDERED["kv-events of engines"]
    engine, server = configs(values)
    found = ports(values)
    for number in range(server.data_parallel_size):
        own = parse_kv_events(of_engine(engine.kv_events_config, number))[0]
        assert own is not None
        assert own.endpoint == f"tcp://*:{found[f'kv-events-{number}']}" == f"tcp://*:{5557 + number}"
        assert own.replay_endpoint == f"tcp://*:{found[f'kv-replay-{number}']}"
        assert peers(values, f"kv-events-{number}") == peers(values, f"kv-replay-{number}") == EVERY_POD
    assert len(set(found.values())) == len(found) == 1 + 3 * 4
    assert max(map(len, found)) <= 15  # what Kubernetes allows


def test_events_go_to_those_that_are_named_and_else_to_those_that_send_requests() -> None:
    values = RENDERED["kv-events for one router"]
    gateway, picker = ([{"podSelector": {"matchLabels": {"app": app}}}] for app in ("gateway", "picker"))
    assert peers(values, "http") == gateway
    assert peers(values, "kv-events") == peers(values, "kv-replay") == picker
    alike = {**values, "networkPolicy": {**values["networkPolicy"], "kvEventsFrom": []}}
    assert peers(alike, "kv-events") == peers(alike, "kv-replay") == gateway
    assert peers({**EVENTS, "networkPolicy": {"enabled": True}}, "kv-events") == EVERY_POD
    for rule in of_kind(RENDERED["network"], "NetworkPolicy")["spec"]["ingress"]:
        assert [each["port"] for each in rule["ports"]] == ["http"]


def test_torchrun_starts_a_rank_in_each_pod_of_a_group() -> None:
    entry_point = ["/opt/faser/bin/faser", "serve"]
    assert f"ENTRYPOINT {json.dumps(entry_point)}\n" in (DEPLOY.parent / "Dockerfile").read_text()
    group = of_kind(RANKS, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for index, made in enumerate(containers(RANKS)):
        given = {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "release-0.release.models"}
        program, *command = expanded(made["command"] + made["args"], **given)
        assert program == "/opt/faser/bin/torchrun"
        torchrun = get_args_parser().parse_args(command)
        assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.node_rank) == (str(group["size"]), "1", index)
        assert (torchrun.master_addr, torchrun.master_port) == ("release-0.release.models", 29500)
        assert torchrun.no_python
        assert [torchrun.training_script, *torchrun.training_script_args[:1]] == entry_point
        engine, _ = configs_of(torchrun.training_script_args[1:])
        assert engine.tensor_parallel_size == group["size"] == 3


def test_a_pod_of_two_gpus_holds_two_ranks_without_torchrun() -> None:
    (made,) = containers(RENDERED["two GPUs of a pod"])
    assert "command" not in made
    assert configs(RENDERED["two GPUs of a pod"])[0].tensor_parallel_size == 2
    (of_group, _) = containers({**RANKS, "tensorParallel": {"size": 2, "ranksPerPod": 4}})
    assert "--nproc-per-node=4" in of_group["command"]
    assert "--tensor-parallel-size=8" in of_group["args"]


def test_the_leader_alone_answers() -> None:
    leader, worker = containers(RENDERED["ranks"])
    assert {"ports", "startupProbe", "livenessProbe", "readinessProbe"} <= set(leader)
    assert {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & set(worker) == set()
    for same in ("image", "args", "command", "env", "volumeMounts", "securityContext"):
        assert leader[same] == worker[same]


def test_a_group_finishes_its_answers_together() -> None:
    leader, worker = containers(RENDERED["ranks"])
    drain = configs(RENDERED["ranks"])[1].shutdown_timeout
    assert drain == 90.5
    # A worker gets its signal when the leader has had 5 s for its endpoints to leave, and its answers.
    (_, waits), (_, outlives) = (each["lifecycle"]["preStop"]["exec"]["command"] for each in (leader, worker))
    assert float(outlives) >= float(waits) + drain
    for template in templates(RENDERED["ranks"]):
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace > float(outlives)
        (kills,) = [
            float(each.split("=")[1])
            for each in template["spec"]["containers"][0]["command"]
            if each.startswith("--shutdown-timeout=")
        ]
        assert drain < kills <= grace - float(waits)


def test_ranks_reach_each_other_where_the_network_is_closed() -> None:
    policy = of_kind(RENDERED["ranks"], "NetworkPolicy")["spec"]
    group = [{"podSelector": policy["podSelector"]}]
    assert {"from": group} in policy["ingress"]
    assert {"to": group} in policy["egress"]
    policy = of_kind(RENDERED["engines"], "NetworkPolicy")["spec"]
    assert [each for each in policy["ingress"] + policy["egress"] if "ports" not in each] == []


@pytest.mark.parametrize("name", [name for name in RENDERED if "ranks" in name])
def test_the_groups_own_service_does_not_have_the_name_of_the_charts(name: str) -> None:
    """The controller makes a headless Service that is called as the LeaderWorkerSet, unless there is one."""
    made = objects(RENDERED[name])
    (group,) = [each["metadata"]["name"] for each in made if each["kind"] == "LeaderWorkerSet"]
    assert group not in [each["metadata"]["name"] for each in made if each["kind"] == "Service"]
    assert len(f"{group}-999-9999999999") <= 63  # a revision of a group's workers, which is a label


def test_pods_of_a_group_are_replaced_as_the_values_say() -> None:
    by_default = {"rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0}}
    for name, given in (("ranks", by_default), ("ranks of a claim", {})):
        rollout = of_kind(RENDERED[name], "LeaderWorkerSet")["spec"]["rolloutStrategy"]
        assert rollout == {"type": "RollingUpdate", **given}
