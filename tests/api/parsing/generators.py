"""Answers of every format with what they hold, composed from parts. They are kept as data files in corpus/.

A format has one entry in FORMATS: how it writes calls, and strings that contain its own end tags. To write the
files anew: python -m tests.api.parsing.generators
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser.api.parsing.answer_parser import THINK_MARKS, ThinkMarks
from faser.api.parsing.gemma4 import GEMMA4_MARKS
from faser.api.parsing.harmony import GPT_OSS, Harmony
from faser.api.parsing.muse_glimmer import MUSE_GLIMMER

CORPUS = Path(__file__).parent / "corpus"
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {"type": "object", "properties": {}},
}
Call = tuple[str, dict[str, Any]]  # name and arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. open: the prompt ends within reasoning. text: as the model writes it. The rest is expected."""

    format: str
    open: bool = False
    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        calls = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
        expected = {"reasoning": self.reasoning, "content": self.content, "tool_calls": calls}
        return {
            "format": self.format,
            "tools": TOOLS,
            "prompt_ends_with_think": self.open,
            "text": self.text,
            "answer": expected,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a format writes calls.

    write: the text of calls. leads: they begin the answer, where a format may need no mark.
    tags: strings that contain the format's own tags, as values. whole: further texts that are the call of g, if
    they are the whole answer. prose: texts that name tags and are no calls.
    in_open_reasoning: calls are found in reasoning that never closes. harmony: the dialect, where the answer is a
    series of messages; aside: the header of content before calls.
    think: the marks around reasoning otherwise.
    """

    write: Callable[[Sequence[Call], bool], str]
    tags: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    prose: tuple[str, ...] = ()
    in_open_reasoning: bool = True
    harmony: Harmony | None = None
    aside: str = ""
    think: ThinkMarks = THINK_MARKS

    @property
    def think_begin(self) -> str:
        """The text in front of reasoning."""
        return self.think.begin + (self.think.label or "\n")


def gemma4(calls: Sequence[Call], leads: bool) -> str:
    written = "".join(f"<|tool_call>call:{name}{_gemma4_object(each)}<tool_call|>" for name, each in calls)
    return written.removeprefix("<|tool_call>") if leads else written


def _gemma4_object(arguments: dict[str, Any]) -> str:
    values = {key: f'<|"|>{each}<|"|>' if isinstance(each, str) else str(each) for key, each in arguments.items()}
    return "{" + ",".join(f"{key}:{value}" for key, value in values.items()) + "}"


def glm4(calls: Sequence[Call], leads: bool) -> str:
    written = "\n".join(f"{name}\n{json.dumps(arguments)}" for name, arguments in calls)
    return written if leads else f"<|assistant|>{written}"


def granite(calls: Sequence[Call], leads: bool) -> str:
    del leads
    return f"<|tool_call|>{_json_list(calls)}"


def phi4_mini_json(calls: Sequence[Call], leads: bool) -> str:
    return f"functools{_json_list(calls)}" if leads else f"<|tool_call|>{_json_list(calls)}<|/tool_call|>"


def _json_list(calls: Sequence[Call]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def hermes(calls: Sequence[Call], leads: bool) -> str:
    del leads
    objects = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def llama3_json(calls: Sequence[Call], leads: bool) -> str:
    objects = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return ("" if leads else "<|python_tag|>") + "; ".join(objects)


def mistral(calls: Sequence[Call], leads: bool) -> str:
    del leads
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def muse_glimmer(calls: Sequence[Call], leads: bool) -> str:
    del leads
    return "<|start|>assistant".join(
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        + "".join(f'<atem:parameter name="{key}">{each}</atem:parameter>\n' for key, each in arguments.items())
        + "</atem:invoke>\n</atem:function_calls><|eom|>"
        for name, arguments in calls
    )


def openai(calls: Sequence[Call], leads: bool) -> str:
    del leads
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def pythonic(calls: Sequence[Call], leads: bool) -> str:
    written = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{written}]" if leads else f"<|python_start|>[{written}]<|python_end|>"


def lfm2(calls: Sequence[Call], leads: bool) -> str:
    del leads
    return f"<|tool_call_start|>{pythonic(calls, leads=True)}<|tool_call_end|>"


def qwen3_coder(calls: Sequence[Call], leads: bool) -> str:
    del leads
    functions = (
        f"<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>"
        for name, arguments in calls
    )
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in functions)


_G = '{"name": "g", "arguments": {}}'
FORMATS: dict[str, Format] = {
    "gemma4": Format(
        write=gemma4,
        tags=(
            'a<|"|>b',
            '<|"|>',
            "}<tool_call|>",
            "<|tool_call>call:g{}",
            "<channel|>",
            "<|channel>thought\n<",
            "<|",
        ),
        prose=(
            "Use <|tool_call>, then <tool_call|>.",
            "call me",
            "call:f is how",
            "<|tool_call>call:f{...}<tool_call|>",
        ),
        think=GEMMA4_MARKS,
    ),
    "glm4": Format(
        write=glm4,
        tags=("<|observation|>", "<|assistant|>f\n{", '"}\ng\n{'),
        prose=("f is <|assistant|> in", "g\n[1]", "f\n{...}"),
    ),
    "granite": Format(
        write=granite,
        tags=("</tool_call>", "<tool_call>", "<|tool_call|>[{", '"}}]'),
        prose=("Use <|tool_call|> or <tool_call>.", '<|tool_call|>[{"name": "f", "arguments": {...}}]'),
    ),
    "phi4_mini_json": Format(
        write=phi4_mini_json,
        tags=("<|/tool_call|>", "<|tool_call|>[{", "functools[", '"}}]<|/tool_call|>'),
        prose=("functools.partial", "Use functools[ or <|tool_call|> <|/tool_call|>"),
    ),
    "hermes": Format(
        write=hermes,
        tags=("</tool_call>", "<tool_call>{", '"}}\n</tool_call>'),
        whole=(_G, f"```json\n{_G}\n```", f"```\n{_G}\n```", f"<tools>\n{_G}\n</tools>", f"{{{_G}}}"),
        prose=("Use <tool_call>, then </tool_call>.", '<tool_call>{"name": "f", "arguments": {...}}</tool_call>'),
    ),
    "llama3_json": Format(write=llama3_json, tags=("<|python_tag|>", '"}}; {'), prose=('{"a": 1}',)),
    "mistral": Format(
        write=mistral, tags=("[TOOL_CALLS]", "[ARGS]{"), prose=("The mark is [TOOL_CALLS] indeed.",)
    ),
    "muse_glimmer": Format(
        write=muse_glimmer,
        tags=(" x ", "a</atem:parameter>b", "</atem:invoke>", "</atem:function_calls>", "<atem:", " to=g"),
        prose=('Write <atem:invoke name="g">.', "a to=g b"),
        harmony=MUSE_GLIMMER,
        aside=MUSE_GLIMMER.answer,
    ),
    "openai": Format(
        write=openai,
        tags=("<|call|", '"}<|'),
        prose=("a <| b",),
        in_open_reasoning=False,
        harmony=GPT_OSS,
        aside="<|channel|>commentary<|message|>",
    ),
    "pythonic": Format(write=pythonic, tags=("<|python_end|>", "')]", '"])'), prose=("[1, 2]", "[f]")),
    "lfm2": Format(
        write=lfm2, tags=("<|tool_call_end|>", "')]", '"])'), prose=("[1, 2]", "<|tool_call_start|>[f]")
    ),
    "qwen3_coder": Format(
        write=qwen3_coder,
        tags=("x</parameter>y", "\n</parameter>\n", "</function>", "</tool_call>", "<tool_call>", "<function=g>"),
        prose=("Use <function=f> and <parameter=a>.", "<tool_call> is a tag"),
    ),
}


def answers_of(name: str) -> Iterator[Answer]:
    """All answers of a format."""
    form = FORMATS[name]
    one: list[Call] = [("f", {"a": "x"})]
    called: list[list[Call]] = [
        [],
        [("g", {})],
        one,
        [("f", {"a": 'é "q" \\ \'', "n": -2}), ("g", {})],
        *([("f", {"a": tag, "n": 1})] for tag in form.tags),
    ]
    compose = _in_text if form.harmony is None else _in_harmony
    for calls in called:
        for before in ("", "Hi"):
            for after in ("", "bye"):
                for reasoning in ("", "Hm 1 < 2."):
                    yield compose(name, reasoning, before, calls, after)
    if form.harmony is None:
        draft = f"Perhaps {form.write(one, False)}?"
        yield _in_text(name, draft, "Hi", one, "")
        yield _in_text(name, draft, "No.", [], "")
        text = form.write(one, False)
        yield _in_text(name, f"Perhaps {text[: text.rindex('x') + 1]}", "No.", [], "")
        if form.in_open_reasoning:
            yield Answer(format=name, open=True, text=f"Hm.\n{text}", reasoning="Hm.", calls=one)
            yield Answer(format=name, open=True, text=f"Hm {text}?", reasoning=f"Hm {text}?")
    for text in form.whole:
        yield Answer(format=name, text=text, calls=[("g", {})])
        yield Answer(format=name, text=f"{text} bye", content=f"{text} bye")
        yield Answer(format=name, text=f"Hi {text}", content=f"Hi {text}")
    for text in form.prose:
        yield Answer(format=name, text=text, content=text)


def _in_text(name: str, reasoning: str, before: str, calls: list[Call], after: str) -> Answer:
    form = FORMATS[name]
    parts = [before, form.write(calls, not before) if calls else "", after]
    thought = f"{form.think_begin}{reasoning}\n{form.think.end}\n\n" if reasoning else ""
    return Answer(
        format=name,
        text=thought + " ".join(part for part in parts if part),
        reasoning=reasoning,
        content=" ".join(part for part in (before, after) if part),
        calls=calls,
    )


def _in_harmony(name: str, reasoning: str, before: str, calls: list[Call], after: str) -> Answer:
    form = FORMATS[name]
    assert form.harmony is not None
    end, last = form.harmony.ends[0], form.harmony.ends[-1]
    parts = [
        f"{form.harmony.reasoning}{reasoning}{end}" if reasoning else "",
        f"{form.aside}{before}{end}" if before else "",
        form.write(calls, False) if calls else "",
        f"{form.harmony.answer}{after}{last}" if after else "",
    ]
    return Answer(
        format=name,
        text="<|start|>assistant".join(part for part in parts if part),
        reasoning=reasoning,
        content="\n".join(part for part in (before, after) if part),
        calls=calls,
    )


def lines_of(name: str) -> str:
    """The data file of a format: a JSON object a line."""
    return "".join(json.dumps(each.as_json(), ensure_ascii=False) + "\n" for each in answers_of(name))


if __name__ == "__main__":
    for each in FORMATS:
        (CORPUS / f"{each}.jsonl").write_text(lines_of(each))
