"""Tools of /v1/responses: each that the client runs becomes a function, the one kind that a model calls.

A function of a namespace is known to the model by its full name. A custom tool is a function of one string. The
tools of shells and patches are functions whose arguments are checked, because their calls are items with fields of
their own. Tools that OpenAI's servers run are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from faser.api.bodies.body import shown
from faser.api.dialects.conversion import Json, read_object, read_optional_string, read_string, wrong
from faser.errors import RequestError
from faser.optional import given

# The tools that OpenAI's servers run, or with which its models search for tools.
_HOSTED = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "computer",
        "computer_use_preview",
        "programmatic_tool_calling",
        "tool_search",
    }
)


class _LocalShell(msgspec.Struct):
    command: Annotated[list[str], Meta(description="The program and its arguments.", min_length=1)]
    working_directory: str | UnsetType = UNSET
    timeout_ms: int | UnsetType = UNSET


class _Shell(msgspec.Struct):
    commands: Annotated[list[str], Meta(description="Command lines, which may run side by side.", min_length=1)]
    timeout_ms: int | UnsetType = UNSET
    max_output_length: int | UnsetType = UNSET


class _ApplyPatch(msgspec.Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: Annotated[str | UnsetType, Meta(description="In the V4A format. Not for delete_file.")] = UNSET

    def __post_init__(self) -> None:
        if self.type == "delete_file":
            self.diff = UNSET
        elif self.diff is UNSET:
            raise ValueError("a patch that creates or updates a file has a diff")


@dataclass(frozen=True, slots=True)
class Shape:
    """Form in which calls of a tool without a name of its own are items.

    field: of the item, with the arguments. defaults: further keys that the field has.
    """

    description: str
    arguments: type[msgspec.Struct]
    field: str
    defaults: Mapping[str, Any]

    def read(self, arguments: str) -> Json | None:
        """The item's field; None: the arguments are not those of the tool."""
        try:
            found = msgspec.json.decode(arguments, type=self.arguments)
        except msgspec.MsgspecError:
            return None
        return {**self.defaults, **msgspec.to_builtins(found)}

    def arguments_of(self, item_field: Json) -> Json:
        """The arguments of the call that became this field of an item."""
        return given({name: item_field.get(name) for name in self.arguments.__struct_fields__})


# By the type of the tool; the type of a call's item has _call after it.
SHAPES = {
    "local_shell": Shape(
        "Run a program on the user's machine.", _LocalShell, "action", {"type": "exec", "env": {}}
    ),
    "shell": Shape(
        "Run command lines in a shell.", _Shell, "action", {"timeout_ms": None, "max_output_length": None}
    ),
    "apply_patch": Shape("Create, update or delete a file.", _ApplyPatch, "operation", {}),
}
_OFFERED = ("function", "custom", "namespace", *SHAPES)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the client runs. kind: function, custom, or one of SHAPES, which is its name too."""

    kind: str
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request.

    functions: as chats describe them; paths: where each stands in the request. by_name: the tools by the names of
    their functions. left_out: the types of those that the model does not see, by path.
    """

    functions: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    by_name: dict[str, ClientTool] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def renamed(self) -> list[tuple[str, str]]:
        """For renamed_fields: the paths of the functions."""
        return [(rf"tools\.{at}(?:\.function)?", path) for at, path in enumerate(self.paths)]

    def read(self, tool: Json, path: str, namespace: Json | None = None) -> None:
        """Add a tool. namespace: that it is in. Raises RequestError for a type that OpenAI does not have."""
        kind = tool.get("type")
        match kind:
            case "function":
                keys = ("name", "description", "parameters", "strict")
                self._add(kind, given({key: tool.get(key) for key in keys}), path, namespace)
            case "custom":
                self._add(kind, _custom(tool, path), path, namespace)
            case "namespace" if namespace is None:
                read_string(tool, "name", path)
                inner = tool.get("tools")
                if not isinstance(inner, list):
                    raise wrong(inner, f"{path}.tools", "a list of functions")
                for at, each in enumerate(inner):
                    self.read(read_object(each, f"{path}.tools.{at}"), f"{path}.tools.{at}", tool)
            case "shell" if (tool.get("environment") or {"type": "local"}).get("type") != "local":
                self.left_out[path] = kind
            case "local_shell" | "shell" | "apply_patch":
                self._add(kind, _shaped(kind), path, namespace)
            case str() if kind in _HOSTED:
                self.left_out[path] = kind
            case _:
                raise RequestError(
                    f"{path}.type is {shown(kind)}; it must be {' or '.join(_OFFERED)}: this server runs "
                    "no tools of its own",
                    param=f"{path}.type",
                )

    def _add(self, kind: str, function: Json, path: str, namespace: Json | None) -> None:
        own, name = function.get("name"), None if namespace is None else namespace["name"]
        if isinstance(own, str):  # otherwise the check of chats names it
            function["name"] = full_name(own, name)
            self.by_name.setdefault(function["name"], ClientTool(kind, own, name))
        self.functions.append({"type": "function", "function": function})
        self.paths.append(path)

    def choice(self, asked: Any) -> tuple[Any, list[Json]]:
        """(tool_choice as chats have it, the functions that may be called)."""
        if not isinstance(asked, dict):
            return asked, self.functions
        if asked.get("type") != "allowed_tools":
            name = _chosen(asked, "tool_choice", also=" or allowed_tools")
            return {"type": "function", "function": {"name": name}}, self.functions
        return asked.get("mode", "auto"), self._allowed(asked)

    def _allowed(self, choice: Json) -> list[Json]:
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise wrong(tools, "tool_choice.tools", "a list of functions")
        by_name = {each["function"].get("name"): each for each in self.functions}
        allowed = []
        for at, each in enumerate(tools):
            path = f"tool_choice.tools.{at}"
            if read_object(each, path).get("type") in _HOSTED:
                continue
            name = _chosen(each, path)
            if name not in by_name:
                raise wrong(name, f"{path}.name", "the name of one of tools")
            allowed.append(by_name[name])
        return allowed


def read_tools(tools: Sequence[Json]) -> ResponseTools:
    """The tools of a request. Raises RequestError that names the one that is wrong."""
    found = ResponseTools()
    for at, tool in enumerate(tools):
        found.read(tool, f"tools.{at}")
    return found


def full_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a function."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _chosen(choice: Json, path: str, *, also: str = "") -> str:
    """The function's name of a tool that a choice names."""
    kind = choice.get("type")
    if kind in SHAPES:
        return str(kind)
    if kind not in ("function", "custom"):
        raise wrong(kind, f"{path}.type", f"function, custom, {', '.join(SHAPES)}{also}")
    return full_name(read_string(choice, "name", path), read_optional_string(choice, "namespace", path))


def _custom(tool: Json, path: str) -> Json:
    """A function of one string. A regular expression is enforced; another grammar is described to the model."""
    asked = read_object(tool.get("format") or {}, f"{path}.format")
    text: Json = {"type": "string"}
    if asked.get("type") == "grammar":
        definition, syntax = (read_string(asked, key, f"{path}.format") for key in ("definition", "syntax"))
        text["description"] = f"Must match this {syntax} grammar:\n{definition}"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    described = given({"description": tool.get("description")})
    return {"name": read_string(tool, "name", path), **described, "parameters": schema, "strict": True}


def _shaped(kind: str) -> Json:
    shape = SHAPES[kind]
    schema = msgspec.json.schema(shape.arguments)["$defs"][shape.arguments.__name__]
    del schema["title"]
    schema["additionalProperties"] = False
    return {"name": kind, "description": shape.description, "parameters": schema, "strict": True}
