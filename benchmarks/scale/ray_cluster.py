"""FASER on a Ray cluster of two nodes, one of which is killed: answers, hit share and waiting, and a batch.

    python -m benchmarks scale.ray_cluster QUESTIONS.jsonl OUT.json --trace AzureLLMInferenceTrace_conv.csv
        [--minutes 3] [--rate 0.8] [--lines 48] [--model MODEL] [--port 8000] [--arms …]

QUESTIONS: of Spec-Bench. The nodes are processes of this machine, made by Ray's own cluster utility; each is given
half of its cores. deploy/ray/serve.yaml is deployed, with other numbers of replicas, another port, and another
router in the second arm; sessions and requests are those of benchmarks.scale.replicas. Arms:

    by prefix       FASER's router of prompts
    in turn         Ray Serve's round-robin router
    killed          by prefix; after a third of the time a node is killed, after two thirds a replica. The node
                    comes back meanwhile. Requests reach the gateway of the node that is never killed
    batch           `faser run-batch --ray` of that many lines; a node is killed after a third of them, the command
                    itself after two thirds, and --resume goes on
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from benchmarks.prompts import load_prompts
from benchmarks.runner import CHECKOUT, about, command_line, write_json
from benchmarks.scale.replicas import Run, Sessions, arrivals, run

PREFIX, TURNS, KILLED, BATCH = "by prefix", "in turn", "killed", "batch"
_ROUND_ROBIN = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
_REPLICA = "ray::ServeReplica:faser:Replica"
_READY_S = 600
_ANSWER_TOKENS = 32


class Nodes:
    """Two nodes; the second one can be killed and comes back. Use it in a `with`."""

    def __enter__(self) -> "Nodes":
        os.environ["PYTHONPATH"] = str(CHECKOUT)
        self._share = {"num_cpus": max(1, (os.cpu_count() or 2) // 2), "include_log_monitor": False}
        head = {**self._share, "include_dashboard": False, "no_monitor": True}
        # Not at exit: nodes are added by other threads than the main one, which alone may handle signals.
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self._second = self._cluster.add_node(**self._share)
        ray.init(self._cluster.address, log_to_driver=False)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_second(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)

    def restore_second(self) -> None:
        self._second = self._cluster.add_node(**self._share)

    def kill_replica(self) -> None:
        """The process of an actor, with SIGKILL."""
        found = [each for each in psutil.process_iter(["cmdline"]) if _is_replica(each.info["cmdline"])]
        random.choice(found).kill()


def _is_replica(command: Sequence[str] | None) -> bool:
    return bool(command and command[0].startswith(_REPLICA))


@contextmanager
def served(nodes: Nodes, port: int, flags: Sequence[str], **replica: Any) -> Iterator[str]:
    """The URL of the application of deploy/ray, with two replicas. replica: further keys of its deployment."""
    deploy(nodes, port, flags, **replica)
    try:
        wait_for_replicas(2)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def deploy(nodes: Nodes, port: int, flags: Sequence[str], **replica: Any) -> None:
    """Deploy as an operator does; what runs already is changed."""
    config = yaml.safe_load((CHECKOUT / "deploy/ray/serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["proxy_location"] = "HeadOnly"  # both nodes have this machine's ports
    (application,) = config["applications"]
    application["args"]["flags"] = shlex.join(flags)
    gateway, deployed = application["deployments"]
    gateway["num_replicas"] = 2
    deployed["ray_actor_options"] = {"num_cpus": 0.5}  # so that a node has room for what the other one loses
    if "autoscaling_config" not in replica:
        del deployed["autoscaling_config"]
        deployed["num_replicas"] = 2
    deployed |= replica
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = ["ray.serve.scripts", "run", "--non-blocking", "--address", nodes.address, file.name]
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL, cwd=CHECKOUT)


def wait_for_replicas(count: int) -> None:
    """Return once exactly `count` replicas run. Raises SystemExit after ten minutes."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        application = serve.status().applications.get("faser")
        deployments = application.deployments if application else {}
        states = deployments["Replica"].replica_states if "Replica" in deployments else {}
        if states == {"RUNNING": count}:
            return
        time.sleep(1)
    raise SystemExit(f"{count} replicas were not ready within {_READY_S} s: {serve.status()}")


def measure_arm(nodes: Nodes, given: argparse.Namespace, texts: Sequence[str], arm: str) -> Run:
    seconds = 60 * given.minutes
    times = list(arrivals(given.trace, given.rate, seconds))
    kills: list[tuple[float, Callable[[], None]]] = []
    if arm == KILLED:
        kills = [
            (seconds / 3, nodes.kill_second),
            (seconds / 3 + 1, nodes.restore_second),
            (2 * seconds / 3, nodes.kill_replica),
        ]
    router = {"request_router_config": {"request_router_class": _ROUND_ROBIN}} if arm == TURNS else {}
    with served(nodes, given.port, [*given.model, "--max-num-seqs", "8"], **router) as url:
        return asyncio.run(run([url], Sessions(texts, seed=0), times, kills))


def run_batch(nodes: Nodes, questions: Sequence[str], count: int, model: Sequence[str]) -> dict[str, Any]:
    """Run a batch on Ray, kill a node, then the command, and go on. Returns how many were lost or doubled."""
    with tempfile.TemporaryDirectory(prefix="faser-ray-batch-") as folder:
        lines, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        with lines.open("w") as file:
            for number in range(count):
                messages = [{"role": "user", "content": questions[number % len(questions)][:400]}]
                body = {"messages": messages, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "faser", "run-batch", "-i", str(lines), "-o", str(out), *model]
        command += ["--ray", "--ray-address", nodes.address, "--ray-cpus", "0.5", "--requests-at-once", "4"]
        began_s = time.monotonic()
        first = subprocess.Popen(command, cwd=CHECKOUT)
        at_node = wait_for_lines(out, count // 3, first)
        nodes.kill_second()
        at_command = wait_for_lines(out, 2 * count // 3, first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        nodes.restore_second()
        second = subprocess.run([*command, "--resume"], cwd=CHECKOUT, check=False, capture_output=True, text=True)
        seconds = time.monotonic() - began_s
        ids = Counter(json.loads(line)["custom_id"] for line in out.read_text().splitlines())
    return {
        "lines": count,
        "answers when the node was killed": at_node,
        "answers when the command was killed": at_command,
        "exit status after --resume": second.returncode,
        "said": second.stderr.strip().splitlines()[-1:],
        "lines lost": count - len(ids),
        "lines doubled": sum(count > 1 for count in ids.values()),
        "seconds": round(seconds, 1),
    }


def wait_for_lines(path: Path, count: int, command: "subprocess.Popen[bytes]") -> int:
    while command.poll() is None:
        found = path.read_bytes().count(b"\n") if path.exists() else 0
        if found >= count:
            return found
        time.sleep(0.2)
    raise SystemExit(f"run-batch ended with status {command.returncode} before it had {count} answers")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--trace", type=Path, required=True, help="of Azure: TIMESTAMP, ContextTokens, GeneratedTokens"
    )
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--lines", type=int, default=48, help="of the batch")
    parser.add_argument("--model", nargs=1, default=[])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--arms", default=",".join((PREFIX, TURNS, KILLED, BATCH)), help="of these, in this order")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    texts = [each.text for each in load_prompts(given.questions)]
    with Nodes() as nodes:
        for arm in given.arms.split(","):
            if arm == BATCH:
                found[arm] = run_batch(nodes, texts, given.lines, given.model)
            else:
                found[arm] = measure_arm(nodes, given, texts, arm).report()
            print(arm, found[arm], flush=True)
    settings = {name: getattr(given, name) for name in ("minutes", "rate", "lines")}
    versions = {"ray": ray.__version__}
    write_json(given.out, {**about("scale.ray_cluster"), **versions, "settings": settings, "arms": found})
