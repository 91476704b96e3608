"""The fields of a chat about tools: the functions that the model may call, and which it must."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, Field

from faser.api.protocol.body import shown
from faser.api.protocol.common import OPEN
from faser.errors import RequestError

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = 'it must be "none", "auto", "required", or the function to call'


class FunctionDefinition(BaseModel):
    """parameters: the JSON schema of the arguments. strict: arguments must match it."""

    model_config = OPEN

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Functions are the only kind of tool."""

    model_config = OPEN

    type: Literal["function"]
    function: FunctionDefinition


TOOLS: Any = Field(None, fail_fast=True, max_length=MAX_TOOLS)


class ToolMode(Enum):
    """Whether an answer calls functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """names: of the functions that may be called. by_name: the request names the one function to call."""

    mode: ToolMode
    names: tuple[str, ...]
    by_name: bool = False


def read_tool_choice(tools: list[Tool], choice: Any) -> ToolChoice:
    """The choice among the tools of a request. choice: the body's `tool_choice`.

    Raises RequestError for tools and choices that do not fit together.
    """
    names = _names(tools)
    match choice:
        case None:
            return ToolChoice(mode=ToolMode.AUTO if names else ToolMode.NONE, names=names)
        case "none" | "auto" | "required":
            mode = ToolMode(choice)
            if mode is ToolMode.AUTO and not names:
                mode = ToolMode.NONE
            if mode is ToolMode.REQUIRED and not names:
                raise RequestError("tool_choice is required, and there are no tools", param="tool_choice")
            return ToolChoice(mode=mode, names=names)
        case {"type": "function", "function": {"name": str(name)}}:
            _check_declared(name, names, "tool_choice.function.name")
            return ToolChoice(mode=ToolMode.REQUIRED, names=(name,), by_name=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            return ToolChoice(mode=ToolMode(mode), names=_allowed(allowed, names))
    raise RequestError(f"tool_choice is {shown(choice)}; {_CHOICES}", param="tool_choice")


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it takes none."""
    return tool.function.parameters or _NO_PARAMETERS


def _names(tools: list[Tool]) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for at, tool in enumerate(tools):
        name, path = tool.function.name, f"tools.{at}.function.name"
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{path} is {shown(name)}; it must have 1 to 128 characters of A-Z a-z 0-9 _ . : / -", param=path
            )
        if name in names:
            raise RequestError(f"{path} is {name}, which tools.{names[name]} has too", param=path)
        names[name] = at
    return tuple(names)


def _allowed(entries: list[Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """The functions of a choice of type allowed_tools."""
    path = "tool_choice.allowed_tools.tools"
    if not entries:
        raise RequestError(f"{path} is an empty list; it must name at least one function", param=path)
    allowed = []
    for at, entry in enumerate(entries):
        match entry:
            case {"type": "function", "function": {"name": str(name)}}:
                _check_declared(name, names, f"{path}.{at}.function.name")
                allowed.append(name)
            case _:
                raise RequestError(f"{path}.{at} is {shown(entry)}; it must be a function", param=f"{path}.{at}")
    return tuple(dict.fromkeys(allowed))


def _check_declared(name: str, names: tuple[str, ...], path: str) -> None:
    if name not in names:
        declared = ", ".join(names) or "none"
        raise RequestError(f"{path} is {shown(name)}; the functions in tools are {declared}", param=path)
