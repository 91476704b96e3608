"""Coding agents against a server whose model's words are fixed: each goes through its tool loop to exit status 0.

`make clients` installs the agents into .clients/ and runs this; elsewhere the option --clients names that folder.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, DONE, KEY, MODEL
from tests.clients.scripted import Script, scripted, write_long_checkpoint
from tests.end_to_end.server import Server, serving

TIMEOUT_S = 600  # an agent's prompt has tens of thousands of tokens


@pytest.fixture(scope="module")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del installed  # without clients there is no need for a server
    folder = tmp_path_factory.mktemp("server")
    flags = ("--served-model-name", MODEL, "--api-key", KEY)  # with a key, answers say how many tokens were cached
    with serving(write_long_checkpoint(folder / "model"), folder, *flags, key=KEY) as server:
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


@pytest.mark.clients
def test_a_new_session_of_claude_code_finds_its_system_prompt_cached(
    installed: Path, server: Server, tmp_path: Path
) -> None:
    agent, script, starts = AGENTS["claude-code"], Script([], DONE), []
    for task in ("Say that all is done.", "Who wrote the Odyssey? Answer in one line."):
        with scripted(server.url, script) as proxy:
            subprocess.run(
                [str(installed / agent.program), "-p", task],
                cwd=tmp_path,
                env=agent.environment(proxy.url, tmp_path, tmp_path),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
            )
        starts.append(proxy.generations()[0])
    first, second = (start.body or {} for start in starts)
    assert first["system"][0] != second["system"][0], "the sessions have the same billing line"
    assert first["messages"] != second["messages"]
    alone = {"system": second["system"], "messages": [{"role": "user", "content": "x"}]}
    with server.http() as http:
        num_system = http.post("/v1/messages/count_tokens", json=alone).json()["input_tokens"]
    (cached,) = re.findall(rb'"message_start".*?"cache_read_input_tokens":(\d+)', starts[1].answer)
    assert int(cached) >= 0.95 * num_system, f"{int(cached)} of {num_system} tokens"
