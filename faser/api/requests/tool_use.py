"""ToolUse: what the fields about tools and reasoning make of a chat.

They add functions to the prompt, a grammar to the sampling, and parsers to the answers. A grammar in the model's
own format enforces calls that a request demands, and arguments that must match strict schemas. Where the format is
not made of JSON, demanded calls are in that of Hermes instead.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from faser.api.bodies.chat import ChatBody, Tool, ToolChoice, ToolMode, parameters_of, read_tool_choice
from faser.api.parsing.answer_parser import AnswerParsing
from faser.api.parsing.harmony import ANALYSIS, ENDS, FINAL, MESSAGE, START, is_analysis, opening_of
from faser.api.parsing.registry import TOOL_PARSERS, ServerParsers
from faser.api.parsing.tool_parser import NO_CALLS, CallTag, ToolParser
from faser.api.requests.closed_schema import closed_schema
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind

_log = logging.getLogger("faser.api")

Format = dict[str, Any]  # of a structural tag; see engine/structure/structural_tags.py

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """tools: those that the prompt describes. choice: among all of the request. parser: of the calls in answers.

    parallel: an answer may have several calls.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parser: ToolParser
    parsers: ServerParsers
    parallel: bool
    shows_reasoning: bool

    def described(self) -> list[dict[str, Any]]:
        """The functions as chat templates expect them: the fields that the request has."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def parsing(self, tokenizer: Tokenizer) -> AnswerParsing:
        declared = {tool.function.name: parameters_of(tool) for tool in self.tools}
        style = self.parsers.reasoning
        return AnswerParsing(
            tokenizer=tokenizer,
            reasoning=style.divides,
            marks=style.think,
            always_reasons=style.always,
            harmony=style.harmony,
            shows_reasoning=self.shows_reasoning,
            tool_parser=self.parser,
            declared={name: schema for name, schema in declared.items() if name in self.choice.names},
            parallel=self.parallel,
        )

    def constrain(self, sampling: SamplingParams, prompt: str, tokenizer: Tokenizer) -> SamplingParams:
        """The sampling of the answers. prompt: its text.

        Raises RequestError for demands that no answer can meet together.
        """
        style, asked = self.parsers.reasoning, sampling.structured_output
        if style.harmony:
            structure = self._in_harmony(asked, opening_of(prompt))
        else:
            structure = self._structure(asked)
            if structure is not None and style.divides:
                structure = self._after_reasoning(structure, prompt)
        shows_special = sampling.skip_special_tokens and any(
            (token_id := tokenizer.token_id(mark)) is not None and tokenizer.is_special(token_id)
            for mark in self._marks()
        )
        return replace(
            sampling,
            structured_output=structure,
            skip_special_tokens=sampling.skip_special_tokens and not shows_special,
        )

    def _marks(self) -> tuple[str, ...]:
        parser = self.parser
        return parser.marks + parser.ends + parser.inner_marks + self.parsers.reasoning.marks

    def _structure(self, asked: StructuredOutput | None) -> StructuredOutput | None:
        """Return the structure of the answer after its reasoning. asked: by other fields of the request."""
        if self.choice.mode is ToolMode.NONE:
            return asked
        if self.choice.mode is ToolMode.REQUIRED:
            # response_format is of the text, and there is none: a client that sends both reads the call.
            if asked is not None and not asked.param.startswith("response_format"):
                raise RequestError(
                    f"tool_choice demands a call and {asked.param} sets the answer's structure; an answer can "
                    "meet only one of them",
                    param="tool_choice",
                )
            return _structural_tag(self._calls())
        if asked is not None:
            return _structural_tag({"type": "or", "elements": [self._calls(), _as_format(asked)]}, asked.param)
        strict = [tool for tool in self._callable() if tool.function.strict]
        if not strict:
            return None
        if self.parser.tag is None or self.parser.tag.trigger is None:
            _log.debug("strict tools are not enforced: no grammar writes the model's format of calls")
            return None
        return _structural_tag(
            {
                "type": "triggered_tags",
                "triggers": [self.parser.tag.trigger],
                "tags": [self._tag(tool, self.parser.tag, demanded=False) for tool in self._callable()],
                "at_least_one": False,
                "stop_after_first": not self.parallel,
            }
        )

    def _calls(self) -> Format:
        """One call or more, and nothing else."""
        assert self.parser.tag is not None
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool, self.parser.tag, demanded=True) for tool in self._callable()],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": self.choice.by_name or not self.parallel,
        }

    def _callable(self) -> Sequence[Tool]:
        return [tool for tool in self.tools if tool.function.name in self.choice.names]

    def _tag(self, tool: Tool, tag: CallTag, *, demanded: bool) -> Format:
        """demanded: by tool_choice; otherwise only strict functions have their arguments checked."""
        schema = closed_schema(parameters_of(tool)) if demanded or tool.function.strict else _ANY_OBJECT
        return {
            "type": "tag",
            "begin": tag.begin(tool.function.name),
            "content": {"type": "json_schema", "json_schema": schema},
            "end": tag.end,
        }

    def _after_reasoning(self, structure: StructuredOutput, prompt: str) -> StructuredOutput:
        """The structure begins where the reasoning ends. The prompt or the model decides whether there is any."""
        style = self.parsers.reasoning
        marks = style.think
        within = marks.begins_within(prompt)
        if within is False:
            return structure
        answer = _as_format(structure)
        ends = {"type": "any_text"}
        rest = [{"type": "regex", "pattern": r"\n*"}, answer]
        if within or style.always:
            reasoning = {"type": "tag", "begin": "", "content": ends, "end": marks.end}
            return _structural_tag({"type": "sequence", "elements": [reasoning, *rest]}, structure.param)
        reasoning = {"type": "tag", "begin": marks.begin, "content": ends, "end": marks.end}
        reasoned = {"type": "sequence", "elements": [reasoning, *rest]}
        return _structural_tag({"type": "or", "elements": [reasoned, answer]}, structure.param)

    def _in_harmony(self, asked: StructuredOutput | None, opening: str) -> StructuredOutput | None:
        """The structure follows an analysis, or begins the answer. opening: see opening_of.

        What other fields ask for is in the channel final, which the prompt may have opened.
        """
        is_open = MESSAGE in opening
        in_answer = is_open and not is_analysis(opening)
        if asked is not None and not in_answer:
            final = {"type": "const_string", "value": FINAL}
            asked = _structural_tag({"type": "sequence", "elements": [final, _as_format(asked)]}, asked.param)
        structure = self._structure(asked)
        if structure is None or in_answer:
            return structure
        begin, text = "" if is_open else ANALYSIS, {"type": "any_text"}
        analysis = {"type": "tag", "begin": begin, "content": text, "end": ENDS[0]}
        answer, following = _as_format(structure), {"type": "const_string", "value": f"{START}assistant"}
        reasoned = {"type": "sequence", "elements": [analysis, following, answer]}
        form = reasoned if is_open else {"type": "or", "elements": [reasoned, answer]}
        return _structural_tag(form, structure.param)


def read_tool_use(body: ChatBody, parsers: ServerParsers, *, asks_structure: bool = False) -> ToolUse:
    """asks_structure: other fields of the body say what the answer must match.

    Raises RequestError for fields that do not fit together or that this server cannot follow.
    """
    tools = tuple(body.tools or ())
    choice = read_tool_choice(list(tools), body.tool_choice)
    parser = _parser(choice, parsers, asks_structure=asks_structure)
    return ToolUse(
        # A model that sees tools calls them, whatever the request allows.
        tools=tools if choice.mode is not ToolMode.NONE else (),
        choice=choice,
        parser=parser,
        parsers=parsers,
        parallel=body.parallel_tool_calls is not False and not choice.by_name,
        shows_reasoning=body.include_reasoning is not False,
    )


def _parser(choice: ToolChoice, parsers: ServerParsers, *, asks_structure: bool) -> ToolParser:
    own = parsers.tool_parser
    if choice.mode is ToolMode.NONE:
        return NO_CALLS
    if choice.mode is ToolMode.AUTO:
        if not parsers.auto:
            raise RequestError(
                "tool_choice is auto, which --no-enable-auto-tool-choice forbids; it may be required, or name a "
                "function",
                param="tool_choice",
            )
        if own is NO_CALLS:
            raise RequestError(
                "tool_choice is auto, and this server does not know how the model writes calls; "
                "--tool-call-parser says it. required, or the name of a function, works without",
                param="tool_choice",
            )
        if not asks_structure:
            return own
    return TOOL_PARSERS["hermes"] if own.tag is None else own


def _structural_tag(form: Format, param: str = "tools") -> StructuredOutput:
    """param: the field that asks for it."""
    return StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, text=json.dumps({"format": form}), param=param)


def _as_format(structure: StructuredOutput) -> Format:
    """A structure as a format of a structural tag."""
    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": _ANY_OBJECT}
        case StructureKind.JSON:
            return {"type": "json_schema", "json_schema": json.loads(structure.text)}
        case StructureKind.REGEX:
            return {"type": "regex", "pattern": structure.text}
        case StructureKind.GRAMMAR:
            return {"type": "grammar", "grammar": structure.text}
        case StructureKind.CHOICE:
            choices = json.loads(structure.text)
            return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in choices]}
        case StructureKind.STRUCTURAL_TAG:
            tree: Mapping[str, Any] = json.loads(structure.text)
            return dict(tree["format"]) if "format" in tree else {"type": "triggered_tags", **_tagged(tree)}


def _tagged(tree: Mapping[str, Any]) -> Format:
    """The older form of structural tags, whose tags have a schema, with contents."""
    tags = [
        {
            "begin": tag["begin"],
            "end": tag["end"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
        }
        for tag in tree["tags"]
    ]
    return {**tree, "tags": tags}
