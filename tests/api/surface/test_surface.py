"""Every field of every route has its effect or is refused by name, and docs/api.md says so."""

import ast
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.api.bodies.fields import HINTS
from tests.api.surface.cases import BASE, CASES, CHAT, COUNT, DETOKENIZE, TEXT, TOKENIZE, Seen
from tests.api.surface.page import REFUSED, ROUTE_TESTS, page, schema_of
from tests.fake_engine import FakeEngine

_ROOT = Path(__file__).parents[3]
_WITHOUT_ENGINE = (COUNT, TOKENIZE, DETOKENIZE)
_UNLIKELY: dict[str, Any] = {"not": "neutral"}


@pytest.mark.parametrize(
    "route, name",
    [pytest.param(route, name, id=f"{route}-{name}") for route in CASES for name in sorted(CASES[route])],
)
def test_a_field_has_its_effect(http: httpx.Client, engine: FakeEngine, route: str, name: str) -> None:
    case = CASES[route][name]
    answer = http.post(route, json={**BASE[route], **case.others, name: case.value})
    assert answer.status_code == 200, answer.text
    request = None if route in _WITHOUT_ENGINE else engine.requests[-1]
    assert case.counts(Seen(answer=answer, request=request)), answer.text


@pytest.mark.parametrize("route", CASES)
def test_every_field_of_a_schema_has_a_case(route: str) -> None:
    assert set(CASES[route]) == set(schema_of(route))


@pytest.mark.parametrize(
    "route, name",
    [pytest.param(route, name, id=f"{route}-{name}") for route in REFUSED for name in sorted(REFUSED[route])],
)
def test_a_refusal_says_why(http: httpx.Client, engine: FakeEngine, route: str, name: str) -> None:
    answer = http.post(route, json={**BASE[route], name: _UNLIKELY})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"`{name}` is not supported: {REFUSED[route][name].reason}" in message
    assert not engine.requests
    for value in REFUSED[route][name].neutral:
        assert http.post(route, json={**BASE[route], name: value}).status_code == 200, value


@pytest.mark.parametrize(
    "route, name",
    [pytest.param(route, name, id=f"{route}-{name}") for route in (CHAT, TEXT) for name in sorted(HINTS)],
)
def test_a_hint_is_taken(http: httpx.Client, route: str, name: str) -> None:
    plain = http.post(route, json=BASE[route]).json()["choices"]
    assert http.post(route, json={**BASE[route], name: "x"}).json()["choices"] == plain


def test_the_page_is_up_to_date() -> None:
    """make docs writes it."""
    assert (_ROOT / "docs" / "api.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("named", sorted(set(ROUTE_TESTS.values())))
def test_the_tests_that_the_page_names_are_there(named: str) -> None:
    path, _, name = named.partition("::")
    tree = ast.parse((_ROOT / path).read_text(encoding="utf-8"))
    assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
