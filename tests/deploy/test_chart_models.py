"""Where a pod's model comes from, how it is held, and which pods may share a volume."""

import json
from typing import Any

import pytest

from faser.config.declaration import Setting, read, settings_of
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.sources import UsageError
from tests.deploy.rendered import CHART, configs, configs_of, container, helm, objects, of_kind, templates
from tests.deploy.values import GPU, HUB, RANKS, RENDERED, SHARED, VOLUME

SCHEMA = json.loads((CHART / "values.schema.json").read_text())["properties"]


def setting_of(name: str) -> Setting:
    (found,) = [
        each for config in (EngineConfig, ServerConfig) for each in settings_of(config) if each.name == name
    ]
    return found


def choices(name: str) -> list[str]:
    """What the program accepts for a setting."""
    return list(setting_of(name).choices or ())


def fetching(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The init containers that fetch models, the same in every pod of a group."""
    found = [
        [each for each in template["spec"].get("initContainers", ()) if each["name"].startswith("fetch-")]
        for template in templates(values)
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def strategy(values: dict[str, Any]) -> Any:
    return of_kind(values, "Deployment")["spec"]["strategy"]


@pytest.mark.parametrize(
    "path, name",
    [
        (("engine", "dtype"), "dtype"),
        (("engine", "quantization"), "quantization"),
        (("engine", "kvCacheDtype"), "kv_cache_dtype"),
        (("speculation", "policy"), "speculative_policy"),
        (("server", "logLevel"), "log_level"),
        (("server", "logFormat"), "log_format"),
    ],
)
def test_the_schema_allows_what_the_program_accepts(path: tuple[str, str], name: str) -> None:
    group, key = path
    allowed = SCHEMA[group]["properties"][key]["enum"]
    assert sorted(filter(None, allowed)) == sorted(choices(name))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("key, name", [("quantization", "quantization"), ("kvCacheDtype", "kv_cache_dtype")])
def test_types_without_kernels_on_a_device_are_refused_as_the_program_does(
    device: str, backend: str, key: str, name: str
) -> None:
    refused = []
    for choice in choices(name):
        arguments = [f"--device={device}", f"--{name.replace('_', '-')}={choice}", f"--backend={backend}"]
        try:
            configs_of(arguments)
        except UsageError:
            refused.append(choice)
            with pytest.raises(helm.HelmError, match=f"engine.{key} is {choice}, which needs engine.device"):
                objects({"engine": {"device": device, key: choice, "extraArgs": arguments[2:]}})
        else:
            assert container({"engine": {"device": device, key: choice, "extraArgs": arguments[2:]}})
    assert bool(refused) == (backend == "auto" and (device, key) != ("cuda", "quantization"))


@pytest.mark.parametrize(
    "size, count", [("8GiB", 8 << 30), ("1.5T", 3 << 39), ("512mb", 512 << 20), ("1048576", 1 << 20)]
)
def test_sizes_are_written_as_the_program_reads_them(size: str, count: int) -> None:
    assert read(setting_of("kv_cache_memory"), (size,)) == count
    assert f"--kv-cache-memory={size}" in container({"engine": {"kvCacheMemory": size}})["args"]


def test_low_bit_weights_and_keys_reach_the_program() -> None:
    engine, _ = configs(RENDERED["values/low-bit.yaml"])
    assert (engine.quantization, engine.kv_cache_dtype) == ("int4", "int8")


def test_an_init_container_fetches_each_hub_model_as_the_server_would() -> None:
    values = RENDERED["hub models"]
    made, (model, draft) = container(values), fetching(values)
    everything = templates(values)[0]["spec"]["initContainers"]
    assert [each["name"] for each in everything] == ["first", "fetch-model", "fetch-draft"]
    assert model["command"] == draft["command"] == ["/opt/faser/bin/faser", "pull"]
    assert model["args"] == ["Qwen/Qwen3-8B", "--revision=v1"]
    assert draft["args"] == ["Qwen/Qwen3-0.6B", "--revision=v2"]
    speculation = configs(values)[0].speculation
    assert (speculation.model, speculation.revision) == ("Qwen/Qwen3-0.6B", "v2")
    for each in (model, draft):
        assert each["image"] == made["image"]
        assert each["securityContext"] == made["securityContext"]
        assert each["envFrom"] == made["envFrom"]
        assert [variable for variable in each["env"] if variable not in made["env"]] == []
        assert {"FASER_CACHE_DIR", "HF_HOME", "HF_TOKEN", "HTTPS_PROXY"} <= {
            named["name"] for named in each["env"]
        }
        assert [mount for mount in each["volumeMounts"] if mount not in made["volumeMounts"]] == []
        assert {mount["mountPath"] for mount in each["volumeMounts"]} == {"/data", "/tmp", "/etc/ssl/certs"}


def test_fetching_asks_for_no_more_than_the_server_and_for_no_gpu() -> None:
    (model, _), made = fetching(RENDERED["hub models"]), container(RENDERED["hub models"])
    assert made["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "32Gi"}
    assert model["resources"] == {"requests": made["resources"]["requests"], "limits": {"memory": "32Gi"}}


def test_what_fetches_a_model_has_no_api_key() -> None:
    values = RENDERED["values/gated.yaml"]
    assert "FASER_API_KEY" in [each["name"] for each in container(values)["env"]]
    for each in fetching(values):
        secrets = [variable["name"] for variable in each["env"] if "valueFrom" in variable]
        assert secrets == ["HF_TOKEN"]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"name": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        {"name": "/data/models/mine"},
        {"existingClaim": "models", "name": "qwen/qwen3"},
    ],
)
def test_nothing_is_fetched_that_the_pod_has(model: dict[str, Any]) -> None:
    assert fetching({"model": model}) == []


def test_every_rank_has_the_model_fetched() -> None:
    assert [each["name"] for each in fetching({**RANKS, **HUB, **SHARED})] == ["fetch-model"]


def test_a_pod_asks_for_cores_and_memory_unless_told_otherwise() -> None:
    assert container({})["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}
    assert container(GPU)["resources"]["requests"] == {"cpu": "4", "memory": "2Gi"}
    assert "resources" not in container({"resources": {"requests": None}})


def test_a_pod_with_a_volume_to_itself_ends_before_the_next_one_starts() -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert strategy({}) == rolling
    assert strategy({**VOLUME}) == {"type": "Recreate"}
    assert strategy(RENDERED["pods of a shared volume"]) == strategy(RENDERED["pods of a claim"]) == rolling
    given = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert strategy({**VOLUME, "strategy": given}) == given


def test_the_gpu_example_runs_where_gpus_are() -> None:
    values = RENDERED["values/gpu.yaml"]
    pod = templates(values)[0]["spec"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    engine, _ = configs(values)
    assert (engine.device, engine.kv_cache_dtype) == ("cuda", "fp8")
