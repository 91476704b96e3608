"""Routers that are not FASER's, in front of servers: how each is started, and how it learns of one more server.

    nginx                   deploy/nginx/faser.conf, with other addresses: the fewest connections
    vllm-router POLICY      of PyPI's vllm-router: round_robin, cache_aware, consistent_hash, kv_aware, …
    production-stack LOGIC  vLLM's production-stack: roundrobin, session, prefixaware

Each is a program of its own, which has to be there. Knows no traffic.
"""

import json
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.scale.replicas import SESSION_HEADER
from benchmarks.servers import Recipe, Server, ServerError, free_port

KINDS = ("nginx", "vllm-router", "production-stack")
_DELIVERED = Path(__file__).parents[2] / "deploy" / "nginx" / "faser.conf"


class Front(Protocol):
    """A router that runs. add: from now on it knows this server too."""

    @property
    def url(self) -> str: ...

    def add(self, url: str) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs, as the operator calls them."""

    nginx: str = "nginx"
    vllm_router: str = "vllm-router"
    production_stack: str = "vllm-router"


def start_front(
    name: str, servers: Sequence[str], model: str, folder: Path, programs: Programs, events: Mapping[str, str]
) -> Front:
    """servers: URLs. model: its name in requests. events: of each server, the endpoint of its KV events."""
    kind, _, rule = name.partition(" ")
    if kind not in KINDS:
        raise SystemExit(f"--fronts has {name}; it must begin with one of {', '.join(KINDS)}")
    if kind == "nginx":
        return _Nginx(servers, folder, programs.nginx)
    if kind == "vllm-router":
        return _VllmRouter(servers, folder, programs.vllm_router, rule or "cache_aware", model, events)
    return _ProductionStack(servers, folder, programs.production_stack, rule or "roundrobin", model)


class _Nginx:
    def __init__(self, servers: Sequence[str], folder: Path, program: str) -> None:
        self._servers, self._folder = list(servers), folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._write()
        settings = folder / "nginx.conf"
        settings.write_text(
            f"daemon off; pid {folder}/nginx.pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; include {folder}/faser.conf; "
            + " ".join(
                f"{each}_temp_path {folder}/{each};"
                for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            )
            + " }\n"
        )
        self._server = Server(
            Recipe(
                name="nginx",
                command=(*shlex.split(program), "-c", str(settings), "-p", str(folder)),
                base_url=self.url,
                log_path=folder / "front.log",
            )
        )
        self._server.wait_until_healthy(60, "/v1/models")

    def add(self, url: str) -> None:
        self._servers.append(url)
        self._write()
        os.kill(int((self._folder / "nginx.pid").read_text()), signal.SIGHUP)

    def stop(self) -> None:
        self._server.stop()

    def _write(self) -> None:
        (self._folder / "faser.conf").write_text(nginx_settings(self._servers, self._port))


def nginx_settings(servers: Sequence[str], port: int) -> str:
    """deploy/nginx/faser.conf with these servers, listening at this port."""
    text, upstreams = re.subn(
        r"( +server )127\.0\.0\.1:\d+( .*\n)(?: +server .*\n)*",
        lambda found: "".join(f"{found[1]}{each.removeprefix('http://')}{found[2]}" for each in servers),
        _DELIVERED.read_text(),
    )
    text, listens = re.subn(r"listen [\d.:]+;", f"listen 127.0.0.1:{port};", text)
    if (upstreams, listens) != (1, 1):
        raise ServerError(
            f"{_DELIVERED} has {upstreams} lists of servers and {listens} ports; it must have one each"
        )
    return text


class _VllmRouter:
    def __init__(
        self,
        servers: Sequence[str],
        folder: Path,
        program: str,
        policy: str,
        model: str,
        events: Mapping[str, str],
    ) -> None:
        port = free_port()
        command = [
            *(*shlex.split(program), "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
            *("--prometheus-port", str(free_port()), "--worker-urls", *servers),
            *("--health-check-interval-secs", "2", "--health-check-endpoint", "/ready"),
        ]
        if policy == "kv_aware":
            for url in servers:
                command += ["--kv-event-source", f"{url}={events[url]}"]
            command += ["--kv-event-model", model]
        self._server = _started("vllm-router", command, port, folder)
        self.url = self._server.url

    def add(self, url: str) -> None:
        httpx.post(f"{self.url}/add_worker", params={"url": url}, timeout=60, trust_env=False).raise_for_status()

    def stop(self) -> None:
        self._server.stop()


class _ProductionStack:
    def __init__(self, servers: Sequence[str], folder: Path, program: str, logic: str, model: str) -> None:
        port = free_port()
        self._folder, self._servers, self._model, self._logic = folder, list(servers), model, logic
        self._write()
        command = [
            *(*shlex.split(program), "--host", "127.0.0.1", "--port", str(port)),
            *("--service-discovery", "static", "--static-backends", ",".join(servers)),
            *("--static-models", ",".join([model] * len(servers)), "--engine-stats-interval", "1"),
            *("--routing-logic", logic, "--session-key", SESSION_HEADER),
            *("--static-backend-health-checks", "--static-model-types", ",".join(["chat"] * len(servers))),
            *("--static-backend-health-check-interval", "5"),
            *("--dynamic-config-yaml", str(folder / "dynamic.yaml")),
        ]
        self._server = _started("production-stack", command, port, folder)
        self.url = self._server.url

    def add(self, url: str) -> None:
        self._servers.append(url)
        self._write()

    def stop(self) -> None:
        self._server.stop()

    def _write(self) -> None:
        settings = {
            "service_discovery": "static",
            "routing_logic": self._logic,
            "session_key": SESSION_HEADER,
            "static_models": {self._model: {"static_model_type": "chat", "static_backends": self._servers}},
            "static_backend_health_checks": True,
        }
        (self._folder / "dynamic.yaml").write_text(json.dumps(settings))


def _started(name: str, command: Sequence[str], port: int, folder: Path) -> Server:
    url = f"http://127.0.0.1:{port}"
    server = Server(Recipe(name=name, command=tuple(command), base_url=url, log_path=folder / "front.log"))
    server.wait_until_healthy(120)
    return server
