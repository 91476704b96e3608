"""Containers of FASER's image, driven through the command line of podman or docker, and clients of their servers.

The chart's pod and the compose file's service are started by podman: no cluster and no Docker engine is needed.
podman runs no probes and no preStop, so the probes' URLs are asked here. It knows no Service.
"""

import json
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from openai import OpenAI

PYTHON = "/opt/faser/bin/python"
GRACE_S = 30
_READY_TIMEOUT_S = 180.0
_EMPTY_LAYER = 4096
# As a cautious operator runs it. docker has no writable folder then; podman would add some.
LOCKED_DOWN = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
_MEMORY = """
import os, pathlib
total = 0
for each in pathlib.Path("/proc").glob("[0-9]*/smaps_rollup"):
    if int(each.parent.name) != os.getpid():
        total += sum(int(l.split()[1]) for l in each.read_text().splitlines() if l.startswith("Pss:"))
print(total * 1024)
"""


class TrialError(Exception):
    """Raised where a promise of the image does not hold. The message says what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """program: podman or docker. flags: of every `run`."""

    program: str
    flags: tuple[str, ...] = ()

    def call(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Output of a command. Raises TrialError if it fails."""
        done = self.attempt(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise TrialError(f"{self.program} {shlex.join(arguments)}: {done.stderr.strip()[-600:]}")
        return done.stdout.strip()

    def attempt(self, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments],
            cwd=tempfile.gettempdir(),  # podman leaves a file named oom where a container ran out of memory
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def is_podman(self) -> bool:
        return self.program.endswith("podman")

    @property
    def json_format(self) -> str:
        return "json" if self.is_podman else "{{json .}}"

    @property
    def lock(self) -> tuple[str, ...]:
        return (*LOCKED_DOWN, "--read-only-tmpfs=false") if self.is_podman else LOCKED_DOWN


@dataclass(slots=True, kw_only=True)
class Container:
    """A running server. began_s: by time.monotonic(), before the engine was asked to start it."""

    engine: Engine
    name: str
    port: int
    began_s: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self, path: str) -> int | None:
        """Status of a GET; None: nothing listens."""
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code
        except httpx.TransportError:
            return None

    def wait_ready(self) -> float:
        """Seconds since it was started. Raises TrialError if it ends, or after three minutes."""
        while self.status("/ready") != 200:
            if time.monotonic() - self.began_s > _READY_TIMEOUT_S or not self.running:
                raise TrialError(f"not ready; it said: {self.logs()[-600:]}")
            time.sleep(0.05)
        return time.monotonic() - self.began_s

    @property
    def running(self) -> bool:
        return self.inspect("State.Running") == "true"

    def inspect(self, path: str) -> str:
        return self.engine.call("inspect", "--format", "{{." + path + "}}", self.name)

    def run_inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.engine.attempt("exec", self.name, *command)

    def memory_bytes(self) -> int:
        """Proportional share of memory of all processes inside."""
        return int(self.run_inside(PYTHON, "-c", _MEMORY).stdout)

    def stop(self, grace_s: int = GRACE_S) -> tuple[int, float]:
        """Exit status, and seconds from the signal to the end; it is killed after grace_s."""
        began_s = time.monotonic()
        self.engine.call("stop", "--time", str(grace_s), self.name)
        return int(self.inspect("State.ExitCode")), time.monotonic() - began_s

    def logs(self) -> str:
        done = self.engine.attempt("logs", self.name)
        return done.stdout + done.stderr


@contextmanager
def started(
    engine: Engine, image: str, *flags: str, arguments: Sequence[str] = (), lock: bool = True
) -> Iterator[Container]:
    """A container on the host's network, at a free port of 127.0.0.1; removed in the end with its volumes."""
    port = free_port()
    name = f"faser-trial-{port}"
    variables = ("--env", "FASER_HOST=127.0.0.1", "--env", f"FASER_PORT={port}")
    network = () if "--network" in flags else ("--network", "host")
    container = Container(engine=engine, name=name, port=port)
    try:
        engine.call(
            "run", "--detach", "--name", name, *network, *variables, *engine.flags,
            *(engine.lock if lock else ()), *flags, image, *arguments,
        )  # fmt: skip
        yield container
    finally:
        at_once = ("--time", "0") if engine.is_podman else ()
        engine.attempt("rm", "--force", "--volumes", *at_once, name)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def image_config(engine: Engine, image: str) -> dict[str, Any]:
    """Return the image's own description, as `inspect` shows it."""
    (found,) = json.loads(engine.call("image", "inspect", image))
    assert isinstance(found, dict)
    return found


def layers(engine: Engine, image: str) -> list[tuple[str, int]]:
    """(instruction, bytes) of each layer with content, the base first."""
    text = engine.call("history", "--no-trunc", "--human=false", "--format", engine.json_format, image)
    found = json.loads(text) if engine.is_podman else [json.loads(line) for line in text.splitlines()]
    sizes = [(str(each["CreatedBy"]).strip(), int(each["Size"])) for each in map(_capitalised, reversed(found))]
    return [(instruction, size) for instruction, size in sizes if size > _EMPTY_LAYER]


def _capitalised(record: dict[str, Any]) -> dict[str, Any]:
    """podman writes size and docker Size."""
    return {name[:1].upper() + name[1:]: value for name, value in record.items()}


QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
_LONG: Any = [{"role": "user", "content": "Count from one to five hundred, one number a line."}]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(url: str) -> str:
    """The answer, plain and as a stream, which must be the same. Raises TrialError if it is not, or is wrong."""
    asked = client(url)
    (model,) = asked.models.list().data
    plain = asked.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, max_tokens=24)
    stream = asked.chat.completions.create(
        model=model.id, messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    answer = plain.choices[0].message.content or ""
    if streamed != answer or "Paris" not in answer:
        raise TrialError(f"answered {answer!r}, streamed {streamed!r}")
    return answer


@dataclass(slots=True)
class LongStream:
    """A stream of num_tokens tokens, read by a thread. begun: it has some tokens. tokens: as its usage says."""

    url: str
    num_tokens: int
    begun: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    finish_reason: str | None = None
    error: Exception | None = None

    def start(self) -> threading.Thread:
        """The thread, which has read a few tokens. Raises TrialError if none come."""
        thread = threading.Thread(target=self._read)
        thread.start()
        if not self.begun.wait(60):
            raise TrialError(f"the stream did not begin: {self.error}")
        return thread

    def check_whole(self) -> None:
        """Raises TrialError if tokens are missing."""
        if self.error is not None or (self.tokens, self.finish_reason) != (self.num_tokens, "length"):
            raise TrialError(
                f"{self.tokens} of {self.num_tokens} tokens, finish_reason {self.finish_reason}, {self.error}"
            )

    def _read(self) -> None:
        try:
            asked = client(self.url)
            (model,) = asked.models.list().data
            stream = asked.chat.completions.create(
                model=model.id, messages=_LONG, max_tokens=self.num_tokens, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            for number, chunk in enumerate(stream):
                if number == 3:
                    self.begun.set()
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                if chunk.usage is not None:
                    self.tokens = chunk.usage.completion_tokens
        except Exception as error:
            self.error = error


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
