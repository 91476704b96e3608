"""The chart's pod and the compose file's service, started by podman: no cluster and no Docker engine is needed.

podman runs no probes and no preStop, so the probes' URLs are asked here. It knows no Service.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.image.clients import LongStream, ask
from benchmarks.image.containers import Container, Engine, TrialError, free_port

CHART = Path("deploy/helm/faser")
COMPOSE = Path("deploy/compose.yaml")
_STREAM_TOKENS = 200
_SETTINGS = "faser-trial-settings"


def rendered(image: str, port: int) -> list[dict[str, Any]]:
    """The Deployment as the chart renders it, and a ConfigMap with settings; the port is bound to 127.0.0.1."""
    import helm_python

    repository, _, tag = image.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "resources": {"limits": {"memory": "2Gi", "cpu": 2}},
        "envFrom": [{"configMapRef": {"name": _SETTINGS}}],
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": _SETTINGS},
                "data": {"FASER_MAX_NUM_SEQS": "8", "FASER_SERVED_MODEL_NAME": "from-the-config-map"},
            }
        ],
    }
    texts = helm_python.Chart.load(str(CHART)).render(values, name="trial", namespace="default")
    objects = [each for text in texts.values() for each in _documents(text)]
    chosen = [each for each in objects if each["kind"] in ("ConfigMap", "Deployment")]
    (deployment,) = [each for each in chosen if each["kind"] == "Deployment"]
    (mapping,) = _container_of(deployment)["ports"]
    mapping.update(hostPort=port, hostIP="127.0.0.1")
    return sorted(chosen, key=lambda each: str(each["kind"]))


def _documents(text: str) -> list[dict[str, Any]]:
    try:
        return [each for each in yaml.safe_load_all(text) if isinstance(each, dict) and "kind" in each]
    except yaml.YAMLError:  # NOTES.txt
        return []


def _container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    found = deployment["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(found, dict)
    return found


def chart_pod(engine: Engine, image: str) -> dict[str, Any]:
    """`podman play kube` with what the chart renders: a chat, the probes' URLs, the rights; stopped, it drains."""
    port = free_port()
    objects = rendered(image, port)
    made = _container_of(objects[-1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pod.yaml"
        file.write_text(yaml.safe_dump_all(objects))
        with _pod(engine, file) as name:
            container = Container(engine=engine, name=name, port=port)
            paths = {
                probe: made[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")
            }
            ready_s = container.wait_ready()
            probes = {probe: container.status(path) for probe, path in paths.items()}
            if set(probes.values()) != {200}:
                raise TrialError(f"probes answer {probes}")
            models = httpx.get(f"{container.url}/v1/models").json()["data"]
            if models[0]["id"] != "from-the-config-map":
                raise TrialError(f"the ConfigMap did not reach the server: {models[0]['id']}")
            ask(container.url)
            rights = _check_rights(container)
            stream = LongStream(container.url, _STREAM_TOKENS)
            reader = stream.start()
            # `--down` would wait 10 s: podman 4.3 does not read terminationGracePeriodSeconds.
            status, stop_s = container.stop(
                objects[-1]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            )
            reader.join()
            stream.check_whole()
            if status != 0:
                raise TrialError(f"the exit status is {status}")
    return {
        "ready_s": round(ready_s, 1),
        "probes": probes,
        "arguments": made["args"],
        **rights,
        "tokens_while_stopped": stream.tokens,
        "exit_status": status,
        "stop_s": round(stop_s, 1),
    }


@contextmanager
def _pod(engine: Engine, file: Path) -> Iterator[str]:
    """Started; the name of FASER's container. Whatever is left of it is removed."""
    engine.call("play", "kube", "--network", "bridge", str(file))
    try:
        (name,) = [each for each in engine.call("ps", "--format", "{{.Names}}").split() if each.endswith("-faser")]
        yield name
    finally:
        engine.attempt("play", "kube", "--down", str(file))


def _check_rights(container: Container) -> dict[str, Any]:
    status = container.run_inside("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if (int(fields["CapEff"], 16), fields["Uid"].split()[0], fields["NoNewPrivs"].strip()) != (0, "10001", "1"):
        raise TrialError(f"capabilities {fields['CapEff']}, user {fields['Uid']}")
    if container.run_inside("touch", "/opt/faser/x").returncode == 0:
        raise TrialError("the root can be written")
    folders = ("/data", "/tmp", "/dev/shm")
    writable = [path for path in folders if container.run_inside("touch", f"{path}/x").returncode == 0]
    if not {"/data", "/tmp"} <= set(writable):  # podman mounts /dev/shm for root alone, Kubernetes for all
        raise TrialError(f"only {writable} can be written")
    return {"writable": writable}


def compose_service(engine: Engine, image: str) -> dict[str, Any]:
    """FASER's service of the compose file, by podman-compose: a chat on the port it names, then `down`.

    Prometheus' and Grafana's images are not started. Port 8000 of 127.0.0.1 must be free.
    """
    service = yaml.safe_load(COMPOSE.read_text())["services"]["faser"]
    if engine.attempt("image", "inspect", service["image"]).returncode != 0:
        raise TrialError(f"there is no image {service['image']}; tag {image} so")
    command = ["podman-compose", "--podman-path", engine.program, "--in-pod", "false", "-f", str(COMPOSE)]
    try:
        _compose(command, "up", "--detach", "--no-build", "--no-deps", "faser")
        listed = engine.call("ps", "--format", "{{.Names}}").split()
        (name,) = [each for each in listed if each.startswith("faser") and "faser" in each.split("_")]
        container = Container(engine=engine, name=name, port=8000)
        ready_s = container.wait_ready()
        ask(container.url)
        stream = LongStream(container.url, _STREAM_TOKENS)
        reader = stream.start()
        began_s = time.monotonic()
        _compose(command, "stop", "faser")
        stop_s = time.monotonic() - began_s
        reader.join()
        stream.check_whole()
        status = int(container.inspect("State.ExitCode"))
        if status != 0:
            raise TrialError(f"the exit status is {status}")
    finally:
        subprocess.run([*command, "down", "--volumes"], capture_output=True, check=False)
    return {"ready_s": round(ready_s, 1), "exit_status": status, "stop_s": round(stop_s, 1)}


def _compose(command: list[str], *arguments: str) -> None:
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    if done.returncode != 0:
        raise TrialError(f"podman-compose {' '.join(arguments)}: {done.stderr[-600:]}")
