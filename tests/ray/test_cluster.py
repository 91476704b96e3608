"""Real replicas and a real batch on two nodes, one of which is killed; see story.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import free_port

pytest.importorskip("ray", reason="make ray installs it")

pytestmark = [pytest.mark.full]


@pytest.fixture(scope="module")
def told(tiny_checkpoint: Path) -> dict[str, Any]:
    """What the program has said. Ray's processes keep bytecode, as they import much."""
    command = [sys.executable, "-m", "tests.ray.story", str(tiny_checkpoint), str(free_port())]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_replicas_answer_alike(told: dict[str, Any]) -> None:
    assert len(told["texts"]) == 1


def test_a_request_ends_with_its_client(told: dict[str, Any]) -> None:
    assert told["left"]


@pytest.mark.parametrize("what", ["replica killed", "node killed"])
def test_what_has_not_begun_is_answered_and_what_has_ends_with_an_error_event(
    told: dict[str, Any], what: str
) -> None:
    outcomes = told[what]
    assert outcomes.keys() == {"answered", "error event"}
    assert sum(outcomes.values()) == 16
    assert outcomes["error event"] <= 8, "no more than two replicas have begun at once"


def test_replicas_come_with_waiting_requests_and_go_without_breaking_a_stream(told: dict[str, Any]) -> None:
    assert told["scaled"] == {"answers": {"answered": 24}, "stream": "answered"}


def test_a_batch_survives_the_end_of_a_node_and_of_its_command(told: dict[str, Any]) -> None:
    batch = told["batch"]
    assert (batch["lines lost"], batch["lines doubled"], batch["exit status after --resume"]) == (0, 0, 0)
    assert 13 <= batch["answers when the node was killed"] < batch["answers when the command was killed"] < 40
