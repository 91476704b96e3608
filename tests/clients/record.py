"""Record what clients send: python -m tests.clients.record .clients, after make clients.

Writes benchmarks/results/clients.md, and tests/api/dialects/recorded/*.json, which make test sends again. In those
all prose is made up: prompts and descriptions of tools belong to others, and paths and ids are personal.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients import codex
from tests.clients.agents import AGENTS, MODEL
from tests.clients.scripted import Exchange, Json, scripted, write_long_checkpoint
from tests.end_to_end.server import ROOT, serving

RECORDED = ROOT / "tests" / "api" / "dialects" / "recorded"
TABLE = ROOT / "benchmarks" / "results" / "clients.md"
SERVER = "http://127.0.0.1:8000"  # in what is recorded
VERCEL = ROOT / "tests" / "clients" / "programs" / "vercel.mjs"
# The models of its program, by provider.
_VERCEL = {
    "@ai-sdk/openai-compatible": ("compatible",),
    "@ai-sdk/openai": ("responses", "chat"),
    "@ai-sdk/anthropic": ("anthropic",),
}

_HEAD = """# Clients, as published, through a tool loop

Written by `python -m tests.clients.record .clients` after `make clients`. Each agent has no settings but address,
key and model. It reads a file, edits it and runs a command; a proxy adds a grammar of one possible answer to each
request, so the rows are about protocol, stream and parsers, not the model. Codex does so twice: as a model that it
does not know, and by the name of one that it knows, for which it declares other tools. Each provider of Vercel's
SDK makes a text, a stream, a loop with a tool and an object. `tests/clients/test_agents.py`, `test_codex.py` and
`test_programs.py` run the same.

| client | version | requests | named in `x-faser-ignored` | result |
| --- | --- | --- | --- | --- |
"""

_PROSE = {"text", "content", "description", "thinking", "title", "user_id", "input", "instructions", "output"}
_KEPT_CHARS = 16  # of prose: a word or two, such as a result that the script asks for
_BILLING = "x-anthropic-billing-header:"
_MADE_UP = "Answer in few words, and use a tool where one helps. "


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    exchanges: Sequence[Exchange]
    failure: str

    def __str__(self) -> str:
        asked = Counter(f"`{each.path}` {each.status}" for each in self.exchanges)
        requests = ", ".join(f"{count} × {name}" for name, count in asked.items())
        ignored = sorted({each.ignored for each in self.exchanges if each.ignored})
        return (
            f"| {self.client} | {self.version} | {requests} | {'; '.join(ignored)} | {self.failure or 'exit 0'} |"
        )


def made_up(value: Any, personal: Mapping[str, str], key: str = "") -> Any:
    """The value with made-up prose of a hundredth of its length, 40 characters at most.

    personal: what replaces strings anywhere.
    """
    if isinstance(value, dict):
        return {name: made_up(each, personal, name) for name, each in value.items()}
    if isinstance(value, list):
        return [made_up(each, personal, key) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(_BILLING):
        return f"{_BILLING} cc_version=1.2.3.123; cc_entrypoint=cli;"
    for old, new in personal.items():
        value = value.replace(old, new)
    if key in _PROSE and len(value) > _KEPT_CHARS:
        return (_MADE_UP * 9)[: max(_KEPT_CHARS, min(len(value) // 100, 40))]
    return value


def fixture(exchanges: Sequence[Exchange], called: set[str], personal: Mapping[str, str]) -> list[Json]:
    """The requests for answers. Of the tools those that are called, and those that are not plain functions."""
    requests = []
    for each in exchanges:
        body = made_up(each.body, personal) | {"model": "tiny"}
        if "tools" in body:
            body["tools"] = [
                tool for tool in body["tools"] if not called or not _is_plain(tool) or _name(tool) in called
            ]
        requests.append({"path": each.path, "body": body})
    return requests


def _name(tool: Json) -> str:
    return str(tool.get("function", tool).get("name"))


def _is_plain(tool: Json) -> bool:
    return tool.get("type", "function") == "function" and "defer_loading" not in tool


def _agents(installed: Path, url: str, folder: Path) -> Iterator[Row]:
    for name, agent in AGENTS.items():
        work, home = folder / name, folder / f"{name}-home"
        work.mkdir()
        home.mkdir()
        script = agent.script(work)
        program = str(installed / agent.program)
        with scripted(url, script) as proxy:
            agent.prepare(proxy.url, work)
            failure = _failure([program, *agent.arguments], work, agent.environment(proxy.url, work, home))
        try:
            agent.check(work)
        except (AssertionError, FileNotFoundError):
            failure = failure or "the file is not edited"
        version = _version(program, agent.environment(proxy.url, work, home))
        personal = {proxy.url: SERVER, str(work): "/work", str(home): "/home/me"}
        _save(name, proxy.generations(), {call.name for call in script.calls}, personal)
        yield Row(name, version, proxy.generations(), failure)


def _codex(installed: Path, url: str, folder: Path) -> Iterator[Row]:
    """Their requests are in tests/api/dialects/recorded/codex.json, which is kept as it is."""
    program = installed / codex.PROGRAM
    for model, script in codex.SCRIPTS.items():
        work, home = folder / f"codex-{model}", folder / f"codex-{model}-home"
        work.mkdir()
        home.mkdir()
        with scripted(url, script) as proxy:
            failure = _how_failed(codex.run_codex(program, model, proxy.url, home, work))
        if (work / codex.FILE).read_text(encoding="utf-8") != codex.AFTER:
            failure = failure or "the file is not edited"
        yield Row(f"codex, model `{model}`", _version(str(program), None), proxy.generations(), failure)


def _vercel(installed: Path, url: str) -> Iterator[Row]:
    packages = json.loads((installed / "package.json").read_text(encoding="utf-8"))["dependencies"]
    copy = installed / VERCEL.name
    copy.write_bytes(VERCEL.read_bytes())
    exchanges: list[Exchange] = []
    personal: dict[str, str] = {}
    for provider, models in _VERCEL.items():
        with scripted(url, None) as proxy:
            failure = _failure(["node", str(copy), proxy.url, MODEL, *models], installed, None)
        exchanges += proxy.generations()
        personal[proxy.url] = SERVER
        yield Row(
            f"Vercel `{provider}`", f"{packages[provider]}, ai {packages['ai']}", proxy.generations(), failure
        )
    _save("vercel", exchanges, set(), personal)


def _version(program: str, environment: Mapping[str, str] | None) -> str:
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, env=environment, check=True)
    (version,) = re.findall(r"\d+\.\d+\.\d+", printed.stdout)
    return str(version)


def _failure(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None) -> str:
    return _how_failed(
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    )


def _how_failed(done: "subprocess.CompletedProcess[str]") -> str:
    """How a client failed; empty: it ended with status 0."""
    return f"exit {done.returncode}: {' '.join(done.stderr.split())[-200:]}" if done.returncode else ""


def _save(name: str, exchanges: Sequence[Exchange], called: set[str], personal: Mapping[str, str]) -> None:
    RECORDED.mkdir(exist_ok=True)
    requests = fixture(exchanges, called, personal)
    text = json.dumps(requests, indent=1, ensure_ascii=False)
    (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main(installed: Path) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_long_checkpoint(folder / "model")
        with serving(model, folder, "--served-model-name", MODEL, *codex.SCRIPTS) as server:
            rows = [
                *_agents(installed, server.url, folder),
                *_codex(installed, server.url, folder),
                *_vercel(installed, server.url),
            ]
    TABLE.write_text(_HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return int(any(row.failure for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
