"""Coding agents against a server whose model's words are fixed: each goes through its tool loop to exit status 0.

`make clients` installs the agents into .clients/ and runs this; elsewhere the option --clients names that folder.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, MODEL
from tests.clients.scripted import scripted, write_long_checkpoint
from tests.end_to_end.server import Server, serving

TIMEOUT_S = 600  # an agent's prompt has tens of thousands of tokens


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Path:
    folder: str | None = request.config.getoption("--clients")
    if folder is None:
        pytest.skip("make clients installs the clients and runs this")
    return Path(folder).absolute()


@pytest.fixture(scope="module")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del installed  # without clients there is no need for a server
    folder = tmp_path_factory.mktemp("server")
    with serving(write_long_checkpoint(folder / "model"), folder, "--served-model-name", MODEL) as server:
        yield server


@pytest.mark.clients
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_edits_and_runs(name: str, installed: Path, server: Server, tmp_path: Path) -> None:
    agent, work, home = AGENTS[name], tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    script = agent.script(work)
    with scripted(server.url, script) as proxy:
        agent.prepare(proxy.url, work)
        done = subprocess.run(
            [str(installed / agent.program), *agent.arguments],
            cwd=work,
            env=agent.environment(proxy.url, work, home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    statuses = [each.status for each in proxy.generations()]
    assert done.returncode == 0, f"{statuses}\n{done.stdout}{done.stderr}"
    assert set(statuses) == {200}
    assert len(statuses) > len(script.calls)
    agent.check(work)
