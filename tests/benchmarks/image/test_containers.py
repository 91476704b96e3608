"""What is read of podman's and docker's output. The program is a script that prints what they print."""

import json
from pathlib import Path

import pytest

from benchmarks.image.containers import Engine, TrialError, layers

_MIB = 1 << 20
_PODMAN = json.dumps(
    [
        {"CreatedBy": "ENTRYPOINT", "size": 0},
        {"CreatedBy": "COPY dir:2 in /opt/faser ", "size": 7 * _MIB},
        {"CreatedBy": "/bin/sh", "size": 236 * _MIB},
    ]
)
_DOCKER = "\n".join(
    json.dumps({"CreatedBy": instruction, "Size": str(size)})
    for instruction, size in (("ENTRYPOINT", 0), ("COPY dir:2 in /opt/faser ", 7 * _MIB), ("/bin/sh", 236 * _MIB))
)


def program(folder: Path, name: str, says: str, status: int = 0) -> Engine:
    script = folder / name
    (folder / "said").write_text(says)
    script.write_text(f"#!/bin/sh\ncat {folder}/said\necho trouble >&2\nexit {status}\n")
    script.chmod(0o755)
    return Engine(program=str(script))


@pytest.mark.parametrize("name, says", [("podman", _PODMAN), ("docker", _DOCKER)])
def test_layers_are_listed_from_the_base_on_without_empty_ones(name: str, says: str, tmp_path: Path) -> None:
    found = layers(program(tmp_path, name, says), "faser")
    assert found == [("/bin/sh", 236 * _MIB), ("COPY dir:2 in /opt/faser", 7 * _MIB)]


def test_a_command_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(TrialError, match="podman stop --time 30 x: trouble"):
        program(tmp_path, "podman", "", status=125).call("stop", "--time", "30", "x")


@pytest.mark.parametrize("name", ["podman", "docker"])
def test_no_folder_is_writable_in_a_locked_container(name: str) -> None:
    """podman mounts some, unless it is forbidden; docker knows no such flag."""
    assert ("--read-only-tmpfs=false" in Engine(program=name).lock) is (name == "podman")
    assert {"--read-only", "--cap-drop"} <= set(Engine(program=name).lock)
