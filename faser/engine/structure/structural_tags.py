"""Structural tags: text of which parts are free and parts follow a schema, as a grammar in Lark's notation.

    {"format": FORMAT}                                       a tree of formats, by the field `type` of each
    {"triggers": [...], "tags": [...], ...}                  the same as a format of type triggered_tags

    type                  fields
    const_string          value
    json_schema           json_schema
    regex                 pattern
    grammar               grammar, in Lark's or GBNF's notation
    any_text
    sequence, or          elements
    tag                   begin, content, end
    triggered_tags        triggers, tags, at_least_one, stop_after_first
    tags_with_separator   tags, separator, at_least_one, stop_after_first

The names of the formats and their fields are those of xgrammar's structural tags. Free text in front of a trigger
is a lazy token of the grammar: it ends where the trigger does, wherever the model's own tokens end.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from faser.errors import RequestError

MAX_DEPTH = 32  # formats within formats
SpecialTokens = Mapping[str, int]  # the id of each special token, by its spelling

_TEXT = r"/(.|\n)*/"
_FIELDS: dict[
    str, tuple[frozenset[str], frozenset[str]]
] = {  # of each type: those it needs, and those it may have
    name: (frozenset(needed), frozenset(optional))
    for name, needed, optional in (
        ("const_string", ("value",), ()),
        ("json_schema", ("json_schema",), ()),
        ("regex", ("pattern",), ()),
        ("grammar", ("grammar",), ()),
        ("any_text", (), ()),
        ("sequence", ("elements",), ()),
        ("or", ("elements",), ()),
        ("tag", ("begin", "content", "end"), ()),
        ("triggered_tags", ("triggers", "tags"), ("at_least_one", "stop_after_first")),
        ("tags_with_separator", ("tags", "separator"), ("at_least_one", "stop_after_first")),
    )
}


def structural_tag_grammar(tree: Any, json_options: dict[str, Any], special_tokens: SpecialTokens) -> str:
    """tree: the JSON of a structural tag. json_options: of llguidance, for schemas.

    special_tokens: what stands for a token of its own in begin, end and const_string. Raises RequestError that
    names the format and its place.
    """
    if not isinstance(tree, dict):
        raise RequestError(f"the structural tag is {json.dumps(tree)[:80]}; it must be an object")
    writer = _Writer(json_options, special_tokens)
    if "format" in tree:
        if unknown := sorted(set(tree) - {"format", "type"}):
            raise RequestError(f"the structural tag has the field {unknown[0]}; next to format it has none")
        start = writer.format(tree["format"], "format", 0)
    else:
        start = writer.triggered_tags(_triggered(tree), "structural_tag", 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


def _triggered(tree: dict[str, Any]) -> dict[str, Any]:
    """The form with triggers and tags at the top, as a format."""
    tags = tree.get("tags")
    if isinstance(tags, list):
        tags = [_with_content(tag) if isinstance(tag, dict) else tag for tag in tags]
    return {**tree, "type": "triggered_tags", "tags": tags}


def _with_content(tag: dict[str, Any]) -> dict[str, Any]:
    """A tag whose content is written as a schema, as a tag of the tree."""
    if "schema" not in tag or "content" in tag:
        return tag
    rest = {key: value for key, value in tag.items() if key != "schema"}
    return {**rest, "content": {"type": "json_schema", "json_schema": tag["schema"]}}


class _Writer:
    """Writes one rule for each format. rules: lines of Lark's notation."""

    def __init__(self, json_options: dict[str, Any], special_tokens: SpecialTokens) -> None:
        self.rules: list[str] = []
        self._json_options = json_options
        self._special_tokens = special_tokens
        found = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, found))) if found else None
        self._count = 0
        self._writers: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": lambda of, at, _: self._literal(_text(of, "value", at)),
            "json_schema": lambda of, at, _: self._schema(of["json_schema"], f"{at}.json_schema"),
            "regex": lambda of, at, _: f"/{regex_to_lark(_text(of, 'pattern', at), 'dws')}/",
            "grammar": lambda of, at, _: self._grammar(_text(of, "grammar", at), f"{at}.grammar"),
            "any_text": lambda *_: self._rule(_TEXT, terminal=True),
            "sequence": lambda of, at, depth: " ".join(self._elements(of, at, depth)),
            "or": lambda of, at, depth: " | ".join(self._elements(of, at, depth)),
            "tag": self._tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def format(self, asked: Any, at: str, depth: int) -> str:
        """The name of a rule that matches the format. at: its place in the tree, for messages."""
        if depth > MAX_DEPTH:
            raise RequestError(f"{at} is {depth} formats deep; at most {MAX_DEPTH} are allowed")
        if not isinstance(asked, dict):
            raise RequestError(f"{at} is {json.dumps(asked)[:80]}; it must be an object with a type")
        _check_fields(asked, at)
        return self._rule(self._writers[asked["type"]](asked, at, depth))

    def triggered_tags(self, asked: dict[str, Any], at: str, depth: int) -> str:
        """Free text; where a trigger occurs in it, one of the tags that begin with the trigger.

        at_least_one: the text begins with a tag. stop_after_first: it ends with the first one.
        """
        _check_fields(asked, at)
        triggers, tags = _strings(asked, "triggers", at), _tags(asked, at)
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            where = f"{at}.tags[{i}]"
            begin = _text(tag, "begin", where)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise RequestError(f"{where}.begin is {begin[:80]!r}; it must begin with one of the triggers")
            rest = self._tag({**tag, "begin": begin.removeprefix(trigger)}, where, depth)
            bodies.setdefault(trigger, []).append(rest)
        found = [self._triggered(trigger, rests) for trigger, rests in bodies.items()]
        later = self._rule(" | ".join(found))
        first = self._rule(" | ".join(self._rule(self._tag(tag, f"{at}.tags", depth)) for tag in tags))
        text = self._rule(_TEXT, terminal=True)
        at_least_one, stops = _flag(asked, "at_least_one", at), _flag(asked, "stop_after_first", at)
        if at_least_one:
            return first if stops else f"{first} {later}* {text}"
        return f"{later} | {text}" if stops else f"{later}* {text}"

    def _triggered(self, trigger: str, rests: list[str]) -> str:
        """Free text up to the trigger, then one of the rests of tags."""
        rest = self._rule(" | ".join(self._rule(each) for each in rests))
        if (token_id := self._special_tokens.get(trigger)) is not None:
            return self._rule(f"{self._rule(_TEXT, terminal=True)} <[{token_id}]> {rest}")
        text = self._rule(_TEXT, terminal=True)
        lazy = self._rule(f"{text} {_quoted(trigger)}", attributes="[lazy]")
        return self._rule(f"{lazy} {rest}")

    def _tags_with_separator(self, asked: dict[str, Any], at: str, depth: int) -> str:
        tags = _tags(asked, at)
        tag = self._rule(" | ".join(self.format(each, f"{at}.tags[{i}]", depth) for i, each in enumerate(tags)))
        separator = self._literal(_text(asked, "separator", at))
        several = tag if _flag(asked, "stop_after_first", at) else f"{tag} ({separator} {tag})*"
        return several if _flag(asked, "at_least_one", at) else f"({several})?"

    def _tag(self, tag: dict[str, Any], at: str, depth: int) -> str:
        ends = _ends(tag, at)
        content = tag.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            _check_fields(content, f"{at}.content")
            inner = self._rule(" | ".join(self._text_until(end) for end in ends))
        else:
            end = " | ".join(self._literal(each) for each in ends)
            inner = f"{self.format(content, f'{at}.content', depth + 1)} {self._rule(end)}"
        return f"{self._literal(_text(tag, 'begin', at))} {inner}"

    def _text_until(self, end: str) -> str:
        """Free text up to and with its end."""
        text = self._rule(_TEXT, terminal=True)
        if (token_id := self._special_tokens.get(end)) is not None:
            return f"{text} <[{token_id}]>"
        return self._rule(f"{text} {_quoted(end)}", attributes="[lazy]")

    def _elements(self, asked: dict[str, Any], at: str, depth: int) -> list[str]:
        elements = asked["elements"]
        if not isinstance(elements, list) or not elements:
            raise RequestError(f"{at}.elements must be a list of one or more formats")
        return [self.format(each, f"{at}.elements[{i}]", depth + 1) for i, each in enumerate(elements)]

    def _schema(self, schema: Any, at: str) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise RequestError(f"{at} is {json.dumps(schema)[:80]}; it must be a JSON schema, which is an object")
        return f"%json {json.dumps({**schema, 'x-guidance': self._json_options})}"

    def _grammar(self, text: str, at: str) -> str:
        try:
            lark = any_to_lark(text)
        except Exception as error:  # the converter raises plain exceptions for bad input
            raise RequestError(f"{at} cannot be read: {error}") from None
        return f"%lark {{\n{lark}\n}}"

    def _literal(self, text: str) -> str:
        """The text, with special tokens in it as tokens."""
        parts, done = list[str](), 0
        for found in self._special.finditer(text) if self._special is not None else ():
            parts += [_quoted(text[done : found.start()])] if found.start() > done else []
            parts.append(f"<[{self._special_tokens[found.group()]}]>")
            done = found.end()
        return " ".join([*parts, *([_quoted(text[done:])] if done < len(text) or not parts else [])])

    def _rule(self, body: str, *, terminal: bool = False, attributes: str = "") -> str:
        """A new rule; returns its name. Terminals are spelled in capitals."""
        self._count += 1
        name = f"T{self._count}" if terminal else f"r{self._count}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_fields(asked: dict[str, Any], at: str) -> None:
    kind = asked.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        named = "no type" if kind is None else f"the type {json.dumps(kind)[:80]}"
        raise RequestError(f"{at} has {named}; supported: {', '.join(_FIELDS)}")
    needed, optional = _FIELDS[kind]
    if missing := sorted(needed - set(asked)):
        raise RequestError(f"{at} lacks the field {missing[0]}, which a format of type {kind} needs")
    if unknown := sorted(set(asked) - needed - optional - {"type"}):
        raise RequestError(f"{at}.{unknown[0]} is not supported in a format of type {kind}")


def _text(asked: dict[str, Any], name: str, at: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{at}.{name} is {json.dumps(value)[:80]}; it must be text")
    return value


def _ends(tag: dict[str, Any], at: str) -> list[str]:
    """The texts that may end a tag: one, or a list."""
    value = tag.get("end")
    ends: list[Any] = value if isinstance(value, list) else [value]
    if not ends or not all(isinstance(end, str) for end in ends):
        raise RequestError(f"{at}.end is {json.dumps(value)[:80]}; it must be text")
    return ends


def _strings(asked: dict[str, Any], name: str, at: str) -> list[str]:
    values = asked.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(each, str) and each for each in values):
        raise RequestError(f"{at}.{name} must be a list of one or more texts that are not empty")
    return values


def _tags(asked: dict[str, Any], at: str) -> list[dict[str, Any]]:
    tags = asked.get("tags")
    if not isinstance(tags, list) or not tags:
        raise RequestError(f"{at}.tags must be a list of one or more tags")
    found = []
    for i, tag in enumerate(tags):
        if not isinstance(tag, dict):
            raise RequestError(f"{at}.tags[{i}] must be an object")
        tag = {"type": "tag", **_with_content(tag)}
        _check_fields(tag, f"{at}.tags[{i}]")
        found.append(tag)
    return found


def _flag(asked: dict[str, Any], name: str, at: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{at}.{name} is {json.dumps(value)[:80]}; it must be true or false")
    return value
