"""The bounds of fields in /openapi.json are those that the routes enforce. Oracle: jsonschema."""

from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.server import http_client, serving, settings
from tests.api.surface.cases import BASE, CHAT, MESSAGES, RESPONSES, TEXT
from tests.fake_engine import FakeEngine

ROUTES = (CHAT, TEXT, RESPONSES, MESSAGES)
NUMBERS = (-(2**70), -101, -1, 0, 1, 2, 9, 17, 21, 129, 2**63, 2**70, -2.5, 1e-9, 0.5, 2.5)
NEEDED = {"top_logprobs": {"logprobs": True}}  # further fields, without which any value is refused
# The value may be right, and is too much for this context, or does not fit another field.
ELSEWHERE = (
    "context length",
    "must not exceed max_tokens",
    "must be absent or equal to n",
    "or from 1 to 4096",
    "or 0 with echo",
)


@pytest.fixture(scope="module")
def paths(url: str) -> Any:
    return httpx.get(f"{url}/openapi.json").json()["paths"]


def fields_of(paths: Any, route: str) -> dict[str, Any]:
    schema = paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, Any] = schema["properties"]
    return fields


def types_of(field: Any) -> set[str]:
    return {each["type"] for each in field.get("anyOf", [field]) if "type" in each}


def is_accepted(http: httpx.Client, route: str, name: str, value: Any) -> bool | None:
    """None: another field or the context decides. A refusal names the field."""
    needed = NEEDED.get(name, {}) if route == CHAT else {}
    answer = http.post(route, json={**BASE[route], **needed, name: value})
    if answer.status_code == 200:
        return True
    error = answer.json()["error"]
    assert answer.status_code == 400
    depends = any(words in error["message"] for words in ELSEWHERE)
    if depends and not (
        name in ("truncate_prompt_tokens", "max_tokens") and value < (1 if "trunc" in name else 0)
    ):
        return None
    assert error["message"].startswith(name), error
    return False


@pytest.mark.parametrize("route", ROUTES)
def test_a_number_is_accepted_where_its_schema_says_so(http: httpx.Client, paths: Any, route: str) -> None:
    tried = 0
    for name, field in fields_of(paths, route).items():
        types = types_of(field)
        if not types & {"integer", "number"}:
            continue
        for value in NUMBERS:
            if isinstance(value, float) and "number" not in types:
                continue
            accepted = is_accepted(http, route, name, value)
            if accepted is not None:
                tried += 1
                says = jsonschema.Draft202012Validator(field).is_valid(value)
                assert accepted is says, (name, value, field)
    assert tried > 100


def sides(field: Any) -> list[tuple[Any, bool]]:
    """Values at each bound of a schema, and just beyond it; whether they are within."""
    found: list[tuple[Any, bool]] = []
    whole = "integer" in types_of(field)
    step = 1 if whole else 0.001
    if (low := field.get("minimum")) is not None:
        found += [(low, True), (low - step, False)]
    if (above := field.get("exclusiveMinimum")) is not None:
        found += [(above + step, True), (above, False)]
    if (high := field.get("maximum")) is not None:
        found += [(high, True), (high + step, False)]
    items = field.get("items", {})
    one = 5 if "stop_token_ids" in str(field.get("title", "")).lower().replace(" ", "_") else "ab"
    if (most := field.get("maxItems")) is not None:
        found += [([one] * most, True), ([one] * (most + 1), False)]
    if field.get("minItems") == 1:
        found.append(([], False))
    if "maxLength" in items:
        found += [(["a" * items["maxLength"]], True), (["a" * (items["maxLength"] + 1)], False), ([""], False)]
    if "pattern" in items:
        found.append(([" "], False))
    if (most := field.get("maxProperties")) is not None:
        found += [({str(at): 1 for at in range(most + extra)}, not extra) for extra in (0, 1)]
        low, high = field["additionalProperties"]["minimum"], field["additionalProperties"]["maximum"]
        found += [({"5": low}, True), ({"5": low - 1}, False), ({"5": high}, True), ({"5": high + 1}, False)]
    if (longest := field.get("maxLength")) is not None:
        found += [("a" * longest, True), ("a" * (longest + 1), False)]
    if field.get("minLength") == 1:
        found.append(("", False))
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_both_sides_of_every_bound_are_as_the_schema_says(http: httpx.Client, paths: Any, route: str) -> None:
    bounded = {name: found for name, field in fields_of(paths, route).items() if (found := sides(field))}
    assert bounded.keys() >= {
        "temperature",
        "top_p",
        "seed",
        "stop_token_ids",
        "logit_bias",
        "bad_words",
        "request_id",
    }
    for name, values in bounded.items():
        for value, within in values:
            accepted = is_accepted(http, route, name, value)
            assert accepted in (within, None), (name, str(value)[:80], within)


def test_the_operators_limit_of_log_probabilities_is_in_the_schema() -> None:
    with serving(FakeEngine(), settings(max_logprobs=3)) as url, http_client(url) as http:
        paths = http.get("/openapi.json").json()["paths"]
        assert fields_of(paths, CHAT)["top_logprobs"]["maximum"] == 3
        assert is_accepted(http, CHAT, "top_logprobs", 3)
        assert is_accepted(http, CHAT, "top_logprobs", 4) is False


@pytest.mark.parametrize("route", BASE)
@pytest.mark.parametrize("status, body, kind", [(415, b"{}", "text/plain"), (400, b"{", "application/json")])
def test_an_error_has_the_documented_shape(
    http: httpx.Client, paths: Any, route: str, status: int, body: bytes, kind: str
) -> None:
    answer = http.post(route, content=body, headers={"content-type": kind})
    assert answer.status_code == status
    (media_type, content), *others = paths[route]["post"]["responses"][str(status)]["content"].items()
    assert not others
    assert answer.headers["content-type"] == media_type
    jsonschema.validate(answer.json(), content["schema"])
    assert not jsonschema.Draft202012Validator(content["schema"]).is_valid({})


def test_the_live_view_is_a_stream_of_events(paths: Any) -> None:
    responses = paths["/live"]["get"]["responses"]
    assert list(responses["200"]["content"]) == ["text/event-stream"]
    assert {"401", "503"} <= responses.keys()
