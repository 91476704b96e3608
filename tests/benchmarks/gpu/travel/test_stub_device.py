"""The stand-in for a lent machine enforces the rules of such machines."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.travel.rehearsal import Limits, StubDevice, known_packages


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One tracked file, one new one, one that git ignores, and a link to a folder."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name, text in (("tracked.py", "x = 1"), ("new.py", "y = 2"), (".gitignore", "*.so\n"), ("built.so", "z")):
        (root / name).write_text(text)
    (root / "linked").symlink_to("..")
    for command in (["init", "-q"], ["add", "tracked.py", ".gitignore"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root


@pytest.fixture
def load(tmp_path: Path) -> Path:
    folder = tmp_path / "load-1"
    folder.mkdir()
    (folder / "part").write_text("carried")
    return folder


def test_the_checkout_travels_with_what_is_carried_and_without_what_is_ignored(checkout: Path, load: Path) -> None:
    device = StubDevice(checkout.parent / "device", checkout)
    reply = device.run("find . -type f | sort; cat .lent/load-1/part; echo; readlink linked", carry=load)
    assert reply.output_tail.splitlines() == [
        "./.gitignore",
        "./.lent/load-1/part",
        "./new.py",
        "./tracked.py",
        "carried",
        "..",
    ]
    assert reply.status == 0


def test_more_than_may_travel_is_refused(checkout: Path, load: Path) -> None:
    device = StubDevice(checkout.parent / "device", checkout, Limits(travel_bytes=20))
    with pytest.raises(ValueError, match=r"24 bytes would travel; 20 may"):
        device.run("true", carry=load)


def test_few_small_shallow_files_with_plain_names_come_back(checkout: Path) -> None:
    device = StubDevice(checkout.parent / "device", checkout, Limits(file_bytes=100, back_bytes=150))
    reply = device.run(
        "cd $OUT; mkdir -p a/b/c; for i in 1 2 3 4 5 6 7 8 9; do echo > m$i; done; echo > a/b/in;"
        "echo > a/b/c/deep; echo > 'a/odd name'; head -c 101 /dev/zero > a/large"
    )
    assert reply.left_out == (
        "a/b/c/deep (more than 2 folders down)",
        "a/large (101 bytes are too many)",
        "a/odd name (a name with odd letters)",
        "m8 (more than 8 files)",
        "m9 (more than 8 files)",
    )
    assert (reply.files / "a" / "b" / "in").is_file()
    assert len([each for each in reply.files.rglob("*") if each.is_file()]) == 8


def test_out_is_empty_before_a_command_and_other_places_stay_until_the_machine_is_given_back(
    checkout: Path,
) -> None:
    device = StubDevice(checkout.parent / "device", checkout)
    device.run("echo > $OUT/one; echo > $HOME/kept")
    assert device.run("ls $OUT; ls $HOME").output_tail == "kept\n"
    device.give_back()
    assert device.run("ls $HOME").output_tail == ""


def test_a_command_is_killed_at_its_limit_with_its_children_and_its_files_come_back(checkout: Path) -> None:
    device = StubDevice(checkout.parent / "device", checkout, Limits(seconds=0.5))
    reply = device.run("echo before > $OUT/file; sleep 30 | cat; echo after > $OUT/file")
    assert reply.status is None
    assert reply.seconds < 20.0
    assert (reply.files / "file").read_text() == "before\n"


def test_packages_that_the_machine_lacks_are_not_found_though_they_are_installed(checkout: Path) -> None:
    """Bug seen caught: the finder asked after the usual ones."""
    device = StubDevice(checkout.parent / "device", checkout, packages=("numpy",))
    told = device.run(
        "python3 -c 'import numpy, json, tracked; print(tracked.x)'; python3 -c 'import torch' 2>&1 | tail -1;"
        "cd /; python3 -c 'import safetensors' 2>&1 | tail -1"
    )
    assert told.output_tail.splitlines() == [
        "1",
        "ModuleNotFoundError: No module named 'torch'",
        "ModuleNotFoundError: No module named 'safetensors'",
    ]


def test_what_serving_over_http_needs_is_not_among_the_packages() -> None:
    assert not {"fastapi", "uvicorn", "pydantic", "msgspec", "gguf", "openai"} & set(known_packages())
    assert {"torch", "triton", "numpy", "transformers"} <= set(known_packages())
