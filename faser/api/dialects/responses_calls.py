"""Calls of a response: the item that each becomes while its arguments come.

Functions and custom tools grow by deltas. The items of shells and patches come whole, once their arguments can be
read; where they cannot, the item is a function call with the arguments as the model wrote them.
"""

import json
import re
from collections.abc import Mapping

from faser.api.dialects.conversion import Json
from faser.api.dialects.responses_tools import SHAPES, ClientTool
from faser.optional import given

# The key of an item that grows by deltas, and its events without .delta and .done.
GROWING = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}

_OPENING = '{"input":"'
_OPENED = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# JSON text that ends neither within an escape nor between the two halves of a surrogate pair.
_WHOLE = re.compile(
    r'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[0-9a-fA-F]{4}|(?=\\[^u]|[^\\])))*+"
)


class InputReader:
    """Reads the one string of a custom tool's arguments as they come. Other arguments are taken as they are."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_string: bool | None = None  # None: not known yet

    def take(self, arguments: str) -> str:
        """The part of the input that these further arguments add."""
        self._unread += arguments
        if self._is_string is None:
            if opened := _OPENED.match(self._unread):
                self._is_string, self._unread = True, self._unread[opened.end() :]
            elif not _OPENING.startswith("".join(self._unread.split())):
                self._is_string = False
        if self._is_string is None:
            return ""
        if not self._is_string:
            text, self._unread = self._unread, ""
            return text
        end = _WHOLE.match(self._unread).end()  # type: ignore[union-attr]  # matches nothing at least
        text, self._unread = self._unread[:end], self._unread[end:]
        decoded: str = json.loads(f'"{text}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class CallItem:
    """One call. tools: of the request, by the names of their functions."""

    def __init__(self, tools: Mapping[str, ClientTool], name: str, call_id: str) -> None:
        self._tool = tools.get(name, ClientTool("function", name))
        self._call_id = call_id
        self._arguments = ""
        self._reader = InputReader() if self._tool.kind == "custom" else None

    def begun(self) -> tuple[str, Json] | None:
        """(type of the item, its fields); None: it comes whole."""
        return None if self._tool.kind in SHAPES else self._growing()

    def take(self, arguments: str) -> str:
        """Return the events of further arguments of an item that grows."""
        if self._tool.kind in SHAPES:
            self._arguments += arguments
            return ""
        return arguments if self._reader is None else self._reader.take(arguments)

    def whole(self) -> tuple[str, Json, str] | None:
        """(type of the item, its fields, the text by which it grows at once); None: it has begun before."""
        shape = SHAPES.get(self._tool.kind)
        if shape is None:
            return None
        found = shape.read(self._arguments)
        if found is None:
            return *self._growing(), self._arguments
        return f"{self._tool.kind}_call", {"call_id": self._call_id, shape.field: found}, ""

    def _growing(self) -> tuple[str, Json]:
        kind = "custom_tool_call" if self._tool.kind == "custom" else "function_call"
        named = given({"name": self._tool.name, "namespace": self._tool.namespace})
        return kind, {"call_id": self._call_id, **named, GROWING[kind][0]: ""}
