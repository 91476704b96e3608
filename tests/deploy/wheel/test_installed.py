"""The wheel of `make wheel`, installed into an environment where there is no compiler."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.kernels.cpu.build import Isa, runnable_isas
from tests.deploy.exported import DEPLOY

pytestmark = pytest.mark.wheel
ROOT = DEPLOY.parent
ANSWERS = Path(__file__).parent / "answers.py"


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it requires."""
    folder: Path | None = request.config.getoption("--wheels")
    if folder is None:
        pytest.skip("make try-wheel names the folder of the wheels")
    (wheel,) = folder.glob("*manylinux*.whl")
    home = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet"]
    command = [*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return home / "bin"


def environment(installed: Path, cache: Path, **variables: str) -> dict[str, str]:
    """Without a compiler, and without this checkout."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith(("FASER_", "PYTHON", "VLLM_"))}
    return kept | {"PATH": str(installed), "FASER_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1", **variables}


def run(command: list[str | Path], variables: Mapping[str, str]) -> Any:
    done = subprocess.run(
        command, env=variables, cwd="/", capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_chat_is_served_and_nothing_is_compiled(installed: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    variables = environment(installed, tmp_path)
    command = [str(installed / "faser"), "serve", str(tiny_checkpoint), "--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(
        command, env=variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        said = []
        try:
            for line in server.stdout:
                said.append(line)
                if ready := re.search(r"ready at (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(said))
            body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 8}
            answer = httpx.post(f"{ready[1]}/v1/chat/completions", json=body, timeout=60, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
        assert server.wait(timeout=30) == 0
    assert any(f"native kernels: {runnable_isas()[0]}, from the package" in line for line in said)
    assert not any("compiling" in line for line in said)
    assert not list(tmp_path.rglob("*.so"))


def test_faser_env_names_the_variant(installed: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        [installed / "faser", "env", "--json"],
        env=environment(installed, tmp_path),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout)
    assert (found["backend"], found["compiler"]) == ("native", "none")
    assert found["cpu kernels"].startswith(f"{runnable_isas()[0]}, from the package; ")


@pytest.mark.parametrize("isa", runnable_isas())
def test_every_variant_answers_bit_for_bit_as_the_one_compiled_here(
    isa: Isa, installed: Path, tiny_checkpoint: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    """Two compilers, one result: tokens, and log probabilities in every digit."""
    variables = environment(installed, tmp_path / "wheel", FASER_CPU_ISA=isa)
    theirs = run([installed / "python", ANSWERS, tiny_checkpoint], variables)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/kernels").symlink_to(kernel_cache)
    own = {**os.environ, "FASER_CPU_ISA": isa, "FASER_CACHE_DIR": str(tmp_path / "here"), "PYTHONPATH": str(ROOT)}
    ours = run([sys.executable, ANSWERS, tiny_checkpoint], own)
    assert (theirs["isa"], theirs["origin"]) == (isa, "from the package")
    assert ours["isa"] == isa
    assert ours["origin"] != "from the package"
    assert theirs["answers"] == ours["answers"]
