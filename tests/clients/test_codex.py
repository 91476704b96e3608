"""Codex CLI, as published, through a whole loop of tools: it reads a file, patches it and runs a command.

Its settings are an address, a key and a model. The model's words are fixed by a grammar; what Codex makes of them,
and what FASER makes of its requests, is tried. See tests/clients/test_programs.py for how to run it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.codex import AFTER, BEFORE, FILE, KEY, PROGRAM, SCRIPTS, TEXT, outputs_of, run_codex
from tests.clients.scripted import scripted, write_long_checkpoint
from tests.end_to_end.server import Server, serving


@pytest.fixture(scope="module")
def codex(installed: Path) -> Path:
    return installed / PROGRAM


@pytest.fixture(scope="module")
def server(codex: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del codex  # without it there is no need for a server
    folder = tmp_path_factory.mktemp("server")
    checkpoint = write_long_checkpoint(folder / "model")
    flags = ("--served-model-name", *SCRIPTS, "--api-key", KEY, "--max-model-len", "65536")
    with serving(checkpoint, folder, *flags, key=KEY) as server:
        yield server


@pytest.mark.clients
@pytest.mark.parametrize("model", SCRIPTS)
def test_codex_reads_a_file_patches_it_and_runs_a_command(
    codex: Path, server: Server, tmp_path: Path, model: str
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    with scripted(server.url, SCRIPTS[model]) as proxy:
        done = run_codex(codex, model, proxy.url, home, work)
    seen = done.stdout + done.stderr + server.log[-2000:]
    assert done.returncode == 0, seen
    assert (work / FILE).read_text(encoding="utf-8") == AFTER, seen
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
