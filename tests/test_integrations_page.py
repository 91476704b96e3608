"""docs/integrations.md: its flags, routes and packages exist, and agents are tested as it sets them up."""

import json
import re
import shlex
from pathlib import Path

import pytest

from faser.api.app import create_app
from faser.config.sources import SETTINGS, parse
from faser.metrics.server import Metrics
from tests.api.server import settings
from tests.clients.agents import AGENTS
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))
URL = "http://127.0.0.1:8000"
_AGENTS = {"aider": "aider", "Claude Code": "claude-code", "opencode": "opencode"}
_OF_TESTS = {"IS_SANDBOX"}


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_clients_are_in_alphabetical_order() -> None:
    assert set(_AGENTS) <= set(SECTIONS)
    assert [*SECTIONS] == sorted(SECTIONS, key=str.lower)
    for name, text in SECTIONS.items():
        assert "```" in text, f"{name} has no block to copy"


def test_the_flags_of_the_server_exist() -> None:
    lines = [line for block in blocks("sh", PAGE) for line in block.splitlines() if line.startswith("faser ")]
    assert lines
    for line in lines:
        _, command, *words = shlex.split(line)
        assert command == "serve"
        assert parse("faser serve", words, SETTINGS).problems == [], line
    flags = {each.flag for each in SETTINGS}
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", prose)) - {"--no-show-model-warnings"}
    assert named <= flags


def test_the_routes_exist() -> None:
    app = create_app(FakeEngine(), settings=settings(), metrics=Metrics(model_name="tiny", max_model_len=4096))
    routes = {f"{method.upper()} {path}" for path, each in app.openapi()["paths"].items() for method in each}
    named = re.findall(r"`((?:GET|POST) /[^`]*)`", PAGE)
    assert named
    assert set(named) <= routes


@pytest.mark.parametrize("section", _AGENTS)
def test_an_agent_is_tested_with_the_settings_of_the_page(section: str) -> None:
    agent, text = AGENTS[_AGENTS[section]], SECTIONS[section]
    exported = dict(re.findall(r"^export (\w+)=(.*)$", "\n".join(blocks("sh", text)), re.MULTILINE))
    assert exported == {name: value for name, value in agent.variables(URL).items() if name not in _OF_TESTS}
    assert [json.loads(block) for block in blocks("json", text)] == [*agent.settings(URL).values()]


def test_the_packages_are_those_that_are_tested() -> None:
    tested = json.loads((ROOT / "tests" / "clients" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    imported = re.findall(r'^import .* from "(.+)";$', "\n".join(blocks("js", PAGE)), re.MULTILINE)
    assert imported
    assert {*imported, *re.findall(r"`(@ai-sdk/[a-z-]+)`", PAGE)} <= set(tested)
