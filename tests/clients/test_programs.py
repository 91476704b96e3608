"""Small programs of other clients against a server that speculates: what people run when they switch a base URL.

`make clients` installs the clients into .clients/ and runs this; elsewhere the option --clients names that folder.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server, serving
from tests.engine.checkpoints.adapter_files import write_adapter

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.name for path in PROGRAMS.iterdir() if path.stem != "__init__" and path.is_file())
MODEL = "tiny"
TIMEOUT_S = 180


@pytest.fixture(scope="module")
def server(installed: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del installed  # without clients there is no need for a server
    folder = tmp_path_factory.mktemp("server")
    adapters = [f"{name}={write_adapter(folder / name, seed=seed)}" for seed, name in enumerate(("one", "two"))]
    with serving(tiny_checkpoint, folder, "--served-model-name", MODEL, "--lora-modules", *adapters) as server:
        yield server


@pytest.mark.clients
@pytest.mark.parametrize("program", NAMES)
def test_the_program_runs_to_its_end(program: str, installed: Path, server: Server) -> None:
    if program.endswith(".mjs"):
        # Node looks for packages in the folders above the program, so it runs where they are installed.
        copy = installed / program
        copy.write_bytes((PROGRAMS / program).read_bytes())
        command = ["node", str(copy)]
    else:
        command = [str(installed / "bin/python"), str(PROGRAMS / program)]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [*command, server.url, MODEL],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


@pytest.mark.clients
def test_the_answers_were_drafted(server: Server) -> None:
    assert server.metric("spec_decode_num_draft_tokens_total") > 0
