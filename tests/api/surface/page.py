"""Writes docs/api.md: what each route takes and what becomes of it, from the schemas and the tables of refusals.

python -m tests.api.surface.page > docs/api.md
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from faser.api.app import create_app
from faser.api.bodies.fields import (
    HINTS,
    UNSUPPORTED_IN_CHATS,
    UNSUPPORTED_IN_COMPLETIONS,
    UNSUPPORTED_IN_TOKENIZE,
    UnsupportedField,
)
from faser.api.dialects.messages_requests import UNSUPPORTED_IN_MESSAGES
from faser.api.dialects.responses_requests import UNSUPPORTED_IN_RESPONSES
from faser.metrics.server import Metrics
from tests.api.server import MODEL, settings
from tests.api.surface.cases import (
    CASES,
    CHAT,
    COUNT,
    DETOKENIZE,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOKENIZE,
)
from tests.fake_engine import FakeEngine

REFUSED: dict[str, Mapping[str, UnsupportedField]] = {
    CHAT: UNSUPPORTED_IN_CHATS,
    TEXT: UNSUPPORTED_IN_COMPLETIONS,
    RESPONSES: UNSUPPORTED_IN_RESPONSES,
    MESSAGES: UNSUPPORTED_IN_MESSAGES,
    COUNT: UNSUPPORTED_IN_MESSAGES,
    TOKENIZE: UNSUPPORTED_IN_TOKENIZE,
    DETOKENIZE: {},
    INVOCATIONS: {},
}
FIELD_TEST, REFUSAL_TEST = "test_a_field_has_its_effect", "test_a_refusal_says_why"
_ROUTES, _RENDER = "tests/api/test_routes.py::", "tests/api/dialects/test_render.py::"
_VECTORS = "tests/api/dialects/test_embeddings.py::"
_ADAPTERS = "tests/api/test_adapters.py::"
_STORE = "tests/api/dialects/test_responses_store.py::"
ROUTE_TESTS = {
    "GET /v1/models": f"{_ROUTES}test_every_served_name_has_a_card",
    "GET /v1/models/{model}": f"{_ROUTES}test_every_served_name_has_a_card",
    "POST /v1/load_lora_adapter": f"{_ADAPTERS}test_an_adapter_is_loaded_used_and_unloaded",
    "POST /v1/unload_lora_adapter": f"{_ADAPTERS}test_an_adapter_is_loaded_used_and_unloaded",
    "GET /version": f"{_ROUTES}test_probes_answer_before_the_model_is_loaded",
    "GET /load": f"{_ROUTES}test_the_load_is_the_number_of_requests_that_generate",
    "GET /health": f"{_ROUTES}test_health_is_about_a_restart_from_outside_and_ready_about_requests",
    "GET /ready": f"{_ROUTES}test_health_is_about_a_restart_from_outside_and_ready_about_requests",
    "POST /v1/chat/completions/render": f"{_RENDER}test_a_rendered_chat_is_the_prompt_of_its_answer",
    "POST /v1/completions/render": f"{_RENDER}test_rendered_prompts_are_those_of_the_completions",
    "POST /v1/embeddings": f"{_VECTORS}test_inputs_have_the_forms_of_prompts",
    "POST /v1/rerank": f"{_VECTORS}test_documents_are_ranked_by_the_cosine",
    "POST /v1/score": f"{_VECTORS}test_pairs_of_texts_are_scored_side_by_side",
    "POST /v1/responses/input_tokens": f"{_STORE}test_input_tokens_are_those_that_the_response_counts",
    "GET /v1/responses/{response_id}": f"{_STORE}test_a_response_is_got_continued_and_deleted",
    "DELETE /v1/responses/{response_id}": f"{_STORE}test_a_response_is_got_continued_and_deleted",
    "GET /live": "tests/api/page/test_live_feed.py::test_a_viewer_gets_the_history_and_then_a_sample_each_second",
    "GET /metrics": f"{_ROUTES}test_metrics_are_prometheus_text",
}
_HEAD = """# The HTTP API, route by route

Written by `make docs` from the schemas and the tables of refusals; a test holds it against both. Every row names
its test; those of fields are in `tests/api/surface/test_surface.py`. What a row can only name is explained in
[speculation.md](speculation.md) and [security.md](security.md).

- **Errors** are `{"error": {"message", "type", "param", "code"}}`, as in vLLM; `/v1/messages` has Anthropic's
  shape.
- **null** is the same as leaving a field out. A number may come as text (`"5"`), a whole one as `2.0`, a truth
  value as `1` or `"true"`.
- **An unknown field** is named in the log once and has no effect; `--strict-request-fields` makes it a 400.
- **Paths** may end in a slash, and may begin with `--root-path` or not.
- **vLLM's own API tests** run against the server with `python -m benchmarks vllm_api_tests SDIST`, which gives a
  reason for each that does not: [the last counts](../benchmarks/results/vllm-api-tests.json).
- An unknown route is a 404 that lists these:
"""


def page() -> str:
    lines = [_HEAD]
    operations = list(_operations())
    lines += ["| route | test |", "| --- | --- |"]
    for method, path, _ in operations:
        name = f"{method.upper()} {path}"
        test = f"`{ROUTE_TESTS[name]}`" if name in ROUTE_TESTS else f"[its fields](#{_anchor(name)})"
        lines.append(f"| `{name}` | {test} |")
    for method, path, operation in operations:
        if path in CASES:
            lines += ["", f"## {method.upper()} {path}", "", *_fields(path, operation)]
    return "\n".join(lines) + "\n"


def schema_of(path: str) -> dict[str, Any]:
    """The properties of the body of a route, by name."""
    found = next(operation for _, each, operation in _operations() if each == path)
    schema = found["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Any] = schema["properties"]
    return properties


def _operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    app = create_app(FakeEngine(), settings=settings(), metrics=Metrics(model_name=MODEL, max_model_len=4096))
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _fields(path: str, operation: dict[str, Any]) -> Iterator[str]:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    required = schema.get("required", ())
    yield "| field | type | what becomes of it | test |"
    yield "| --- | --- | --- | --- |"
    for name, described in schema["properties"].items():
        case = CASES[path].get(name)
        note = f": {case.note}" if case is not None and case.note else ""
        status = "required" if name in required else "supported"
        yield f"| `{name}` | {_type(described)} | {status}{note} | `{FIELD_TEST}[{path}-{name}]` |"
    for name, refused in sorted(REFUSED[path].items()):
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in refused.neutral)
        but = f"; {neutral} taken" if neutral else ""
        yield f"| `{name}` | | refused: {refused.reason}{but} | `{REFUSAL_TEST}[{path}-{name}]` |"
    if path in (CHAT, TEXT):
        for name in sorted(HINTS):
            yield f"| `{name}` | | taken, without effect | `test_a_hint_is_taken[{path}-{name}]` |"


def _type(described: dict[str, Any]) -> str:
    kinds = [described, *described.get("anyOf", ())]
    names = [
        each.get("type") or ("one of " + ", ".join(map(str, each["enum"])) if "enum" in each else "")
        for each in kinds
    ]
    return " or ".join(dict.fromkeys(name for name in names if name and name != "null")) or "any"


def _anchor(heading: str) -> str:
    kept = "".join(char for char in heading.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
