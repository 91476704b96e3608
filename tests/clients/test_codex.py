"""Codex CLI, as published, through a whole loop of tools: it reads a file, patches it and runs a command.

Its settings are an address, a key and a model. The model's words are fixed by a grammar; what Codex makes of them,
and what FASER makes of its requests, is tried. See tests/clients/test_programs.py for how to run it.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Json, Script, scripted, write_long_checkpoint
from tests.end_to_end.server import Server, serving

KEY = "secret"
TIMEOUT_S = 600
BEFORE, AFTER = "colour = red\n", "colour = blue\n"
PATCH = "*** Begin Patch\n*** Update File: settings.txt\n@@\n-colour = red\n+colour = blue\n*** End Patch"
READ = Call("exec_command", {"cmd": "cat settings.txt"})
COUNT = Call("exec_command", {"cmd": "wc -c settings.txt"})
CLOSE = Call("multi_agent_v1.close_agent", {"target": "nobody"})
TEXT = "The colour is blue now."


class CodexScript(Script):
    """A script that also calls custom tools, whose argument is input, and functions of a namespace, as n.f."""

    def fixed(self, path: str, body: Json) -> Json:
        for call in self.calls[len(outputs_of(body)) :][:1]:
            namespace, _, name = call.name.rpartition(".")
            for tool in body["tools"]:
                if tool["type"] == "custom" and tool["name"] == name:
                    only = re.escape(call.arguments["input"])
                    grammar = {"type": "grammar", "syntax": "regex", "definition": only}
                    choice = {"type": "custom", "name": name}
                    return _replaced(body, tool, {**tool, "format": grammar}, choice)
                if tool["type"] == "namespace" and tool["name"] == namespace:
                    inner = Script([Call(name, call.arguments)], "").fixed(path, {**tool, "input": []})
                    choice = {**inner["tool_choice"], "namespace": namespace}
                    return _replaced(body, tool, {**tool, "tools": inner["tools"]}, choice)
        return super().fixed(path, body)


def _replaced(body: Json, tool: Json, by: Json, choice: Json) -> Json:
    return body | {"tools": [by if each is tool else each for each in body["tools"]], "tool_choice": choice}


# Codex knows no tool for patches of a model that it does not know, so its shell has the command, and agents are in
# a namespace; of one that it knows, it declares a custom tool for patches.
SCRIPTS = {
    "tiny": CodexScript(
        [READ, CLOSE, Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}), COUNT], TEXT
    ),
    "gpt-5.5": CodexScript([READ, Call("apply_patch", {"input": PATCH}), COUNT], TEXT),
}

DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.fixture(scope="module")
def codex(request: pytest.FixtureRequest) -> Path:
    folder: str | None = request.config.getoption("--clients")
    if folder is None:
        pytest.skip("make clients installs the clients and runs this")
    return Path(folder).absolute() / "node_modules" / ".bin" / "codex"


@pytest.fixture(scope="module")
def server(codex: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del codex  # without it there is no need for a server
    folder = tmp_path_factory.mktemp("server")
    checkpoint = write_long_checkpoint(folder / "model")
    flags = ("--served-model-name", *SCRIPTS, "--api-key", KEY, "--max-model-len", "65536")
    with serving(checkpoint, folder, *flags, key=KEY) as server:
        yield server


def settings_of(model: str, url: str) -> str:
    """The settings that the documentation names, for another model and address."""
    section = DOCS.read_text(encoding="utf-8").partition("## Codex CLI")[2]
    text = section.partition("```toml\n")[2].partition("```")[0]
    for named, used in (("SmolLM2-135M-Instruct", model), ("http://127.0.0.1:8000", url)):
        assert named in text
        text = text.replace(named, used)
    return text


def outputs_of(body: Json) -> list[str]:
    """What the calls before a request gave."""
    return [item["output"] for item in body["input"] if item["type"].endswith("call_output")]


@pytest.mark.clients
@pytest.mark.parametrize("model", SCRIPTS)
def test_codex_reads_a_file_patches_it_and_runs_a_command(
    codex: Path, server: Server, tmp_path: Path, model: str
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    settings = work / "settings.txt"
    settings.write_text(BEFORE, encoding="utf-8")
    with scripted(server.url, SCRIPTS[model]) as proxy:
        (home / "config.toml").write_text(settings_of(model, proxy.url), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment |= {"CODEX_HOME": str(home), "FASER_KEY": KEY}
        done = subprocess.run(
            [
                str(codex),
                "exec",
                "--json",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "Make the colour blue.",
            ],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    seen = done.stdout + done.stderr + server.log[-2000:]
    assert done.returncode == 0, seen
    assert settings.read_text(encoding="utf-8") == AFTER, seen
    assert TEXT in done.stdout
    answered = proxy.generations()
    assert [each.status for each in answered] == [200] * (len(SCRIPTS[model].calls) + 1), seen
    last = answered[-1].body
    assert last is not None
    read, *agent, patched, counted = outputs_of(last)
    assert BEFORE in read
    assert "settings.txt" in patched
    assert f"{len(AFTER)} settings.txt" in counted
    assert all("nobody" in output and "unsupported" not in output for output in agent), agent
    assert "web_search" in json.dumps(last["tools"])  # it is left out by the server, not by Codex
