"""Describes bodies in /openapi.json for routes that read their body themselves."""

from typing import Any

from pydantic import BaseModel


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}},
    }


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
