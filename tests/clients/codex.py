"""Codex CLI as its users start it: the settings that the documentation names, which are address, key and model.

It is to read a file, patch it and run a command in its folder.
"""

import os
import re
import subprocess
from pathlib import Path

from tests.clients.scripted import Call, Json, Script

PROGRAM = "node_modules/.bin/codex"
FILE = "settings.txt"
TIMEOUT_S = 600
KEY = "secret"
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


def run_codex(program: Path, model: str, url: str, home: Path, work: Path) -> "subprocess.CompletedProcess[str]":
    """Run it in the work folder, where it has the file, with its settings in home. url: of the server."""
    (work / FILE).write_text(BEFORE, encoding="utf-8")
    (home / "config.toml").write_text(settings_of(model, url), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [
            str(program),
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "Make the colour blue.",
        ],
        cwd=work,
        env=environment | {"CODEX_HOME": str(home), "FASER_KEY": KEY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


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
