"""The complete state of a parser, to compare parsers that got the same text in different pieces.

A parser is an object with a suspended generator. Its state is all that the generator can still read: the point
where each of the nested generators waits, their local variables that are used later, and their evaluation stacks.
Variables that are assigned again before they are used may differ, as they hold pieces of the text.

Lists of strings count as the joined text, and lists of events as the joined events: parsers only add to them.
"""

import dis
import gc
import re
import types
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from faser.api.parsing.answer_parser import AnswerParser, _joined
from faser.api.parsing.events import ContentText, ReasoningText, ToolCallArguments, ToolCallEnd, ToolCallStart
from faser.api.parsing.text_cursor import TextCursor

_EVENTS = (ContentText, ReasoningText, ToolCallArguments, ToolCallEnd, ToolCallStart)
_Seen = dict[int, tuple[int, Any]]
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}


def state_of(parser: AnswerParser) -> Any:
    """Everything that the parser's answers to later text depend on."""
    return _state(parser, {})


def shown(events: Sequence[Any]) -> list[Any]:
    """The events with adjoining texts joined, without the random ids of calls."""
    return [
        (
            type(each).__name__,
            getattr(each, "index", None),
            getattr(each, "name", None),
            getattr(each, "text", None),
        )
        for each in _joined(events)
    ]


def _state(value: Any, seen: _Seen) -> Any:
    match value:
        case None | bool() | int() | float() | str() | bytes() | type() | types.CodeType():
            return value
        case re.Pattern():
            return value.pattern
        case tuple():
            return tuple(_state(each, seen) for each in value)
        case range() | set() | frozenset():
            return (type(value).__name__, sorted(value))
    if id(value) in seen:
        return ("seen", seen[id(value)][0])
    seen[id(value)] = (len(seen), value)  # kept, or its id would be another object's
    match value:
        case TextCursor():
            rest = {key: each for key, each in vars(value).items() if key not in ("_text", "_at", "_marked")}
            return (value._text[value._marked :], value.offset, _state(rest, seen))
        case types.GeneratorType():
            return _state_of_generator(value, seen)
        case list() if value and all(isinstance(each, str) for each in value):
            return "".join(value)
        case list() if all(isinstance(each, _EVENTS) for each in value):
            return shown(value)
        case list():
            return [_state(each, seen) for each in value]
        case dict():
            return {key: _state(each, seen) for key, each in value.items()}
        case types.FunctionType():
            cells = [each.cell_contents for each in value.__closure__ or ()]
            return (value.__qualname__, _state(cells, seen), _state(value.__defaults__, seen))
        case types.MethodType():
            return (value.__func__.__qualname__, _state(value.__self__, seen))
        case types.BuiltinMethodType():
            return (value.__qualname__, _state(value.__self__, seen))
    if hasattr(value, "__next__"):
        return _state(value.__reduce__(), seen)
    if type(value).__module__.startswith("faser.api.parsing") and not is_dataclass(value):
        return (type(value).__qualname__, _state(vars(value), seen))
    return ("object", id(value))  # shared by all parsers


def _state_of_generator(generator: Any, seen: _Seen) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return "ended"
    code, bound = generator.gi_code, frame.f_locals
    live = _live_variables(code).get(frame.f_lasti, frozenset(bound))
    variables = {name: _state(bound[name], seen) for name in sorted(live & bound.keys())}
    return (code.co_qualname, frame.f_lasti, variables, [_state(each, seen) for each in _stack(generator, bound)])


def _stack(generator: Any, bound: dict[str, Any]) -> list[Any]:
    """The evaluation stack, which the garbage collector sees behind the local variables."""
    referents = gc.get_referents(generator)
    code = (
        len(referents) - 1 - next(at for at, each in enumerate(reversed(referents)) if each is generator.gi_code)
    )
    own = generator.gi_code
    cells = set(own.co_cellvars) | set(own.co_freevars)
    num_slots = len(cells) + sum(name in bound for name in own.co_varnames if name not in cells)
    stack = referents[code + 1 + num_slots :]
    assert generator.gi_yieldfrom is None or any(each is generator.gi_yieldfrom for each in stack)
    return stack


@cache
def _live_variables(code: types.CodeType) -> dict[int, frozenset[str]]:
    """For each instruction, the variables that may be read after it before they are assigned."""
    bytecode: Any = dis.Bytecode(code)
    instructions = list(bytecode)
    at = {each.offset: index for index, each in enumerate(instructions)}
    following: list[set[int]] = []
    for index, each in enumerate(instructions):
        found = set()
        if each.opname not in _ENDS and "JUMP_FORWARD" not in each.opname and "JUMP_BACKWARD" not in each.opname:
            found.add(index + 1)
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            found.add(at[each.argval])
        found |= {
            at[entry.target] for entry in bytecode.exception_entries if entry.start <= each.offset < entry.end
        }
        following.append({target for target in found if target < len(instructions)})
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    after = list(before)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(instructions))):
            after[index] = frozenset().union(*(before[target] for target in following[index]))
            loaded, stored = _accesses(instructions[index])
            needed = (after[index] - stored) | loaded
            changed |= needed != before[index]
            before[index] = needed
    return {each.offset: after[index] for index, each in enumerate(instructions)}


def _accesses(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that an instruction loads, and those that it stores. Cells count as loaded only."""
    name = instruction.opname
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if "DEREF" in name or "CLOSURE" in name:
        return frozenset(names), frozenset()
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - frozenset(names[:1]), frozenset(names[:1])
    if name.startswith("LOAD_FAST"):
        return frozenset(names), frozenset()
    if name.startswith("STORE_FAST"):
        return frozenset(), frozenset(names)
    return frozenset(), frozenset()
