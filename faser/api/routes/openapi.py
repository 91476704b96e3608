"""How routes that read their body themselves still describe it in /openapi.json."""

from typing import Any

from pydantic import BaseModel


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}},
    }


def _inlined(schema: type[BaseModel]) -> dict[str, Any]:
    """The schema with its definitions in place, since they have no home in the app's own document."""
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
