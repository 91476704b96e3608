"""Agents as their users start them: address, key and model, and no other settings of theirs.

Each is to read a file, edit it and run a command in its folder. A script fixes what the model says to that end.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.scripted import Call, Json, Script

MODEL = "coder"
KEY = "none"
FILE, BEFORE, AFTER = "greeting.txt", "hello\n", "goodbye\n"
COMMAND = f"cat {FILE} > ran.txt"
TASK = f"Change the greeting in {FILE} to goodbye, then run: {COMMAND}"
DONE = "The greeting is changed."


@dataclass(frozen=True, slots=True)
class Agent:
    """What it takes to run an agent.

    program: below the folder of the clients. arguments: of the task. script: of the model's words, by the
    work folder. variables: of its environment, by the server's URL. settings: its own files in the work folder, by
    the server's URL.
    """

    program: str
    arguments: Sequence[str]
    script: Callable[[Path], Script]
    variables: Callable[[str], Mapping[str, str]]
    settings: Callable[[str], Mapping[str, Json]]

    def environment(self, url: str, work: Path, home: Path) -> dict[str, str]:
        """Return the variables of this process without proxies and settings of other clients, and the agent's."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy")
            and not name.startswith(("ANTHROPIC", "CLAUDE", "OPENAI", "OPENCODE", "AIDER", "XDG"))
        }
        return {**kept, "HOME": str(home), "PWD": str(work), **self.variables(url)}

    def prepare(self, url: str, work: Path) -> None:
        (work / FILE).write_text(BEFORE, encoding="utf-8")
        for name, settings in self.settings(url).items():
            (work / name).write_text(json.dumps(settings), encoding="utf-8")

    def check(self, work: Path) -> None:
        """AssertionError unless the file is edited, and the command has run after that."""
        assert (work / FILE).read_text(encoding="utf-8") == AFTER
        assert (work / "ran.txt").read_text(encoding="utf-8") == AFTER


def _nothing(url: str) -> Mapping[str, Any]:
    del url
    return {}


def _claude_code() -> Agent:
    def script(work: Path) -> Script:
        path = str(work / FILE)
        edit = {"file_path": path, "old_string": BEFORE.strip(), "new_string": AFTER.strip()}
        calls = [Call("Read", {"file_path": path}), Call("Edit", edit), Call("Bash", {"command": COMMAND})]
        return Script(calls, DONE)

    return Agent(
        program="node_modules/.bin/claude",
        arguments=["-p", TASK, "--permission-mode", "bypassPermissions"],
        script=script,
        variables=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "IS_SANDBOX": "1",  # the tests may run as root, for whom it bypasses permissions in a sandbox only
        },
        settings=_nothing,
    )


def _opencode() -> Agent:
    def script(work: Path) -> Script:
        path = str(work / FILE)
        edit = {"filePath": path, "oldString": BEFORE.strip(), "newString": AFTER.strip()}
        run = {"command": COMMAND, "description": "Copies the greeting"}
        return Script([Call("read", {"filePath": path}), Call("edit", edit), Call("bash", run)], DONE)

    def settings(url: str) -> dict[str, Json]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
            "models": {MODEL: {}},
        }
        return {"opencode.json": {"provider": {"faser": provider}, "model": f"faser/{MODEL}"}}

    return Agent(
        program="node_modules/.bin/opencode",
        arguments=["run", TASK],
        script=script,
        variables=_nothing,
        settings=settings,
    )


def _aider() -> Agent:
    def script(work: Path) -> Script:
        del work
        return Script([], f"{FILE}\n```\n{AFTER}```\n")

    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-git", "--yes-always"]
    tested = ["--auto-test", "--test-cmd", COMMAND]
    return Agent(
        program="aider/bin/aider",
        arguments=["--model", f"openai/{MODEL}", *quiet, *tested, "--message", TASK, FILE],
        script=script,
        variables=lambda url: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY},
        settings=_nothing,
    )


AGENTS = {"claude-code": _claude_code(), "opencode": _opencode(), "aider": _aider()}
