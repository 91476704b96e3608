"""Entries in /openapi.json for routes that read their body and write their answer themselves."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from faser.api.bodies.bounds import bounds

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_MESSAGES_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error", "request_id"],
}
_MESSAGES = "/v1/messages"
_MEANINGS = {
    400: "A field is wrong or not supported; param names it.",
    401: "The API key is missing or wrong.",
    403: "The operator has not allowed it.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or is compressed.",
    429: "The API key has used what it may.",
    500: "The engine died, or the server has a bug.",
    503: "The engine is not ready, or its queue is full.",
    504: "The deadline came first.",
}

# Of routes that read a body; of all others.
BODY_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
PLAIN_ERRORS = (401, 429, 500)
_BODY = "body"  # until the document is asked for


def speaks_messages(route: str) -> bool:
    """Return whether a route's errors have the shape of Anthropic's Messages."""
    return route == _MESSAGES or route.startswith(_MESSAGES + "/")


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route that takes this body. `document` writes the schema out."""
    return {_BODY: schema}


def answers(*errors: int, content: str = "application/json", meaning: str = "The answer.") -> dict[int | str, Any]:
    """The statuses of a route. content: the type of a 200; text/event-stream: of one that streams on request."""
    kinds = ("application/json", content) if content == "text/event-stream" else (content,)
    schema = {
        kind: {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}}
        for kind in kinds
    }
    found: dict[int | str, Any] = {200: {"description": meaning, "content": schema}}
    for status in errors:
        found[status] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": _ERROR}},
        }
    return found


GENERATED = answers(*BODY_ERRORS, 504, content="text/event-stream")  # of a route that generates


def include(app: FastAPI, router: APIRouter) -> None:
    """Add the routes of a router, which `documented` then has."""
    app.include_router(router)
    app.state.routes = (*all_routes(app), *(each for each in router.routes if isinstance(each, APIRoute)))


def all_routes(app: FastAPI) -> tuple[APIRoute, ...]:
    """Return the routes that were included, in their order."""
    routes: tuple[APIRoute, ...] = getattr(app.state, "routes", ())
    return routes


def documented(app: FastAPI) -> tuple[APIRoute, ...]:
    """The routes that the document has, in its order."""
    return tuple(each for each in all_routes(app) if each.include_in_schema)


def document(app: FastAPI, *, max_logprobs: int) -> dict[str, Any]:
    """The document of an app, without FastAPI's own error format, which no route ever has.

    max_logprobs: the operator's limit.
    """
    if app.openapi_schema is None:
        for route in documented(app):
            extra = route.openapi_extra or {}
            if (schema := extra.pop(_BODY, None)) is not None:
                content = {"application/json": {"schema": _inlined(schema)}}
                extra["requestBody"] = {"required": True, "content": content}
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        limits = bounds(max_logprobs)
        for path, operations in made["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if "requestBody" in operation:
                    _bound(operation["requestBody"]["content"]["application/json"]["schema"], limits)
                if speaks_messages(path):
                    for status in operation["responses"].keys() - {"200"}:
                        operation["responses"][status]["content"]["application/json"]["schema"] = _MESSAGES_ERROR
        made.get("components", {}).pop("schemas", None)
        app.openapi_schema = made
    return app.openapi_schema


def _bound(schema: dict[str, Any], limits: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the limits of its fields to the schema of a body; what a field declares itself stays.

    Not before FastAPI has read the schema: it makes floats of large integers.
    """
    for name, field in schema["properties"].items():
        if {"type": "boolean"} not in field.get("anyOf", ()):  # chats have their numbers in top_logprobs
            schema["properties"][name] = {**limits.get(name, {}), **field}


def _inlined(schema: type[BaseModel]) -> dict[str, Any]:
    """The schema with its definitions inlined: the app's document has no section for them."""
    document = schema.model_json_schema()
    definitions = document.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    inlined: dict[str, Any] = resolve(document)
    return inlined
