"""One case for each field of each route: a value, and how the answer or the engine's request shows its effect."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from faser.api.bodies.fields import SAMPLING_FIELDS
from faser.types.request import Request
from faser.types.sampling import SAMPLING_LIMITS, SamplingParams

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE, INVOCATIONS = f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize", "/invocations"

HI = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "what f does", "parameters": {"type": "object", "properties": {}}},
}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    COUNT: {"messages": HI},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [104, 105]},
    INVOCATIONS: {"prompt": "hi"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a case led to. request: the engine's; only of routes that generate."""

    answer: httpx.Response
    request: Request | None

    @property
    def sampling(self) -> SamplingParams:
        assert self.request is not None
        return self.request.sampling

    @property
    def prompt(self) -> str:
        assert self.request is not None
        return bytes(self.request.prompt_token_ids).decode()

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = self.answer.json()
        return found


Check = Callable[[Seen], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """value: of the field. others: further fields that it needs. counts: whether it had its effect.

    note: what the page says of it.
    """

    value: Any
    counts: Check
    others: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def _samples(name: str, value: Any, read: Any = None, *, note: str = "", **others: Any) -> Case:
    """A field that is a parameter of sampling. read: as the engine has it."""
    wanted = value if read is None else read
    return Case(value=value, counts=lambda seen: getattr(seen.sampling, name) == wanted, others=others, note=note)


def _declared(name: str) -> Case:
    """A number or truth value as SamplingParams declares it: another value than its default reaches the engine."""
    default, limits = getattr(SamplingParams(), name), SAMPLING_LIMITS.get(name)
    if limits is None:
        return _samples(name, not default)
    value = default + (2 if isinstance(default, int) else 0.5)
    if limits.high is None:
        return _samples(name, value, note=f"above {limits.low:g}" if limits.above else "")
    note = f"above {limits.low:g}, to {limits.high:g}" if limits.above else f"{limits.low:g} to {limits.high:g}"
    return _samples(name, value if value <= limits.high else default / 2, note=note)


def _asks(value: Any, counts: Check, *, note: str = "", **others: Any) -> Case:
    return Case(value=value, counts=counts, others=others, note=note)


def _describes_tools(seen: Seen) -> bool:
    return TOOL["function"]["description"] in seen.prompt


def _structure(seen: Seen) -> Any:
    structure = seen.sampling.structured_output
    return None if structure is None else json.loads(structure.text)["format"]


def _demands_calls(seen: Seen) -> bool:
    structure = _structure(seen)
    return bool(structure["type"] == "tags_with_separator" and structure["at_least_one"])


def _hint(value: Any, note: str = "a hint, without effect on tokens") -> Case:
    return Case(value=value, counts=lambda seen: seen.answer.status_code == 200, note=note)


def _structured(value: Any, note: str) -> Case:
    return Case(value=value, counts=lambda seen: seen.sampling.structured_output is not None, note=note)


def _streams(seen: Seen) -> bool:
    return seen.answer.headers["content-type"].startswith("text/event-stream")


def _events(seen: Seen) -> list[dict[str, Any]]:
    lines = [line for line in seen.answer.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _choice(seen: Seen) -> dict[str, Any]:
    choice: dict[str, Any] = seen.json["choices"][0]
    return choice


ENGINE: dict[str, Case] = {
    **{
        name: _declared(name)
        for name in SAMPLING_FIELDS
        if isinstance(getattr(SamplingParams(), name), int | float)
    },
    "top_k": _samples("top_k", 5, note="-1 and 0: off"),
    "seed": _samples("seed", 7, note="equal seeds give equal tokens, whatever else runs"),
    "logit_bias": _samples("logit_bias", {"5": 1.5}, ((5, 1.5),), note="token ids to -100 … 100"),
    "allowed_token_ids": _samples("allowed_token_ids", [5, 6], (5, 6)),
    "bad_words": _asks(["no"], lambda seen: bool(seen.sampling.bad_words)),
    "stop_token_ids": _samples("stop_token_ids", [5], (5,)),
    "store": _asks(
        False,
        lambda seen: seen.request is not None and not seen.request.may_record,
        note="with `false` the answer is not recorded, whatever `--record-traffic` says",
    ),
    "truncate_prompt_tokens": _asks(1, lambda seen: len(seen.prompt) == 1, note="-1: the context length"),
    "truncation_side": _asks(
        "right",
        lambda seen: seen.prompt in ("h", "["),
        truncate_prompt_tokens=1,
        note="left (default) keeps the last tokens, right the first",
    ),
    "request_id": _asks("mine", lambda seen: seen.answer.headers["x-request-id"] == "mine"),
    "priority": _asks(
        3,
        lambda seen: seen.request is not None and seen.request.priority == 3,
        note="lower is sooner; without effect unless the server runs with `--scheduling-policy priority`",
    ),
    "service_tier": _hint("flex", "the class of that name, if the server has one; else without effect"),
    "nvext": _asks(
        {"agent_hints": {"priority": 3, "osl": 40}},
        lambda seen: (
            seen.request is not None and (seen.request.priority, seen.request.expected_tokens) == (-3, 40)
        ),
        note="`agent_hints`: `priority` (higher is sooner; `priority` of the body wins), `osl` (expected tokens)",
    ),
    "cache_salt": _asks("s", lambda seen: seen.request is not None and seen.request.cache_salt is not None),
    "timeout": _asks(
        9, lambda seen: seen.request is not None and seen.request.deadline_s is not None, note="seconds"
    ),
    "speculative": _asks(
        {"max_tokens": 2},
        lambda seen: seen.request is not None and seen.request.speculation.max_tokens == 2,
        note="[limits of speculation](speculation.md#by-request-and-by-class), and `trace`: where each token of a "
        "stream [comes from](speculation.md#where-each-token-comes-from)",
    ),
    "structured_outputs": _structured({"regex": "a+"}, "json, regex, choice, grammar, structural_tag"),
}

GENERATION: dict[str, Case] = ENGINE | {
    "model": _asks("tiny-alias", lambda seen: seen.json["model"] == "tiny-alias"),
    "n": _asks(2, lambda seen: len(seen.json["choices"]) == 2),
    "best_of": _asks(2, lambda seen: len(seen.json["choices"]) == 2, n=2, note="must equal `n`"),
    "max_tokens": _samples("max_tokens", 3),
    "temperature": _declared("temperature"),
    "top_p": _declared("top_p"),
    "stop": _samples("stop", "x", ("x",), note="at most 16 strings"),
    "prompt_logprobs": _samples("prompt_logprobs", 1, note="not with `stream`"),
    "add_special_tokens": _hint(True, ""),
    "return_token_ids": _asks(True, lambda seen: _choice(seen)["token_ids"] is not None),
    "response_format": _structured({"type": "json_object"}, "text, json_object, json_schema, structural_tag"),
    "guided_json": _structured({"type": "object"}, "older name of `structured_outputs.json`"),
    "guided_regex": _structured("a+", "older name of `structured_outputs.regex`"),
    "guided_choice": _structured(["a"], "older name of `structured_outputs.choice`"),
    "guided_grammar": _structured('start: "a"', "older name of `structured_outputs.grammar`"),
    "grammar": _structured('root ::= "a"', "llama.cpp's name of `structured_outputs.grammar`"),
    "json_schema": _structured({"type": "object"}, "llama.cpp's name of `structured_outputs.json`"),
    "stream": _asks(True, _streams),
    "stream_options": _asks(
        {"include_usage": True},
        lambda seen: _events(seen)[-1]["usage"] is not None,
        stream=True,
        note="`include_usage`, `continuous_usage_stats`, `include_obfuscation`",
    ),
    "prediction": _asks(
        {"type": "content", "content": "Hello!"},
        lambda seen: seen.json["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0,
        note="a text to draft from",
    ),
}

CASES: dict[str, dict[str, Case]] = {
    CHAT: GENERATION
    | {
        "messages": _asks(HI, lambda seen: seen.prompt == "[user]hi[assistant]"),
        "max_completion_tokens": _samples("max_tokens", 3, note="wins over `max_tokens`"),
        "logprobs": _asks(True, lambda seen: seen.sampling.logprobs == 0),
        "top_logprobs": _samples("logprobs", 2, logprobs=True),
        "return_tokens_as_token_ids": _asks(
            True,
            lambda seen: _choice(seen)["logprobs"]["content"][0]["token"].startswith("token_id:"),
            logprobs=True,
        ),
        "add_generation_prompt": _asks(False, lambda seen: seen.prompt == "[user]hi"),
        "continue_final_message": _asks(True, lambda seen: seen.prompt == "[user]hi"),
        "chat_template_kwargs": _hint({"enable_thinking": False}, "variables of the chat template"),
        "reasoning_effort": _hint(
            "low", "for the chat template, or a [thinking budget](tools.md#thinking-budgets)"
        ),
        "thinking_token_budget": _hint(
            5, "tokens that an answer may think ([thinking budgets](tools.md#thinking-budgets))"
        ),
        "echo": _asks(
            True,
            lambda seen: _choice(seen)["message"]["content"] == "So Hello!",
            messages=[*HI, {"role": "assistant", "content": "So "}],
            continue_final_message=True,
            note="the answer begins with the assistant's message that it continues",
        ),
        "return_prompt_text": _asks(True, lambda seen: seen.json["prompt_text"] == "[user]hi[assistant]"),
        "documents": _hint([], "for the chat template; refused if that does not use it"),
        "tools": _asks([TOOL], _describes_tools, note="functions, at most 1024 ([tools](tools.md))"),
        "tool_choice": _asks(
            "required", _demands_calls, tools=[TOOL], note="or `none`, `auto`, a function by name"
        ),
        "parallel_tool_calls": _asks(
            False, lambda seen: _structure(seen)["stop_after_first"], tools=[TOOL], tool_choice="required"
        ),
        "include_reasoning": _hint(False, "false: the answer leaves its reasoning out"),
    },
    TEXT: GENERATION
    | {
        "prompt": _asks(
            [104, 105], lambda seen: seen.prompt == "hi", note="text, texts, token ids, lists of them"
        ),
        "logprobs": _samples("logprobs", 2),
        "return_tokens_as_token_ids": _asks(
            True, lambda seen: _choice(seen)["logprobs"]["tokens"][0].startswith("token_id:"), logprobs=0
        ),
        "echo": _asks(True, lambda seen: _choice(seen)["text"] == "hiHello!"),
    },
    RESPONSES: ENGINE
    | {
        "model": _asks("tiny-alias", lambda seen: seen.json["model"] == "tiny-alias"),
        "input": _asks("hi", lambda seen: "[user]hi" in seen.prompt),
        "instructions": _asks("be", lambda seen: "be" in seen.prompt),
        # Its effect: tests/api/dialects/test_responses_store.py.
        "previous_response_id": _hint(None, "continues a response that `--responses-store` has kept"),
        "max_output_tokens": _samples("max_tokens", 3),
        "temperature": _samples("temperature", 0.5),
        "top_p": _samples("top_p", 0.5),
        "top_logprobs": _samples("logprobs", 2, include=["message.output_text.logprobs"]),
        "include": _asks(["message.output_text.logprobs"], lambda seen: seen.sampling.logprobs is not None),
        "stop": _samples("stop", "x", ("x",)),
        "reasoning": _hint({"effort": "low"}, "`effort` is as `reasoning_effort` of chats"),
        "text": _hint({"format": {"type": "text"}}, ""),
        "tools": _asks(
            [FLAT_TOOL],
            _describes_tools,
            note="all that the client runs itself ([Responses](dialects.md#v1responses), [tools](tools.md))",
        ),
        "tool_choice": _asks("required", _demands_calls, tools=[FLAT_TOOL]),
        "parallel_tool_calls": _hint(True),
        "max_tool_calls": _hint(3),
        "store": _asks(
            False,
            lambda seen: seen.request is not None and not seen.request.may_record,
            note="with `false` the answer is not recorded, whatever `--record-traffic` says; no response can be "
            "fetched later",
        ),
        "stream": _asks(True, _streams),
        "stream_options": _hint({"include_obfuscation": False}, "with `stream`"),
        "truncation": _hint("auto", "`auto` or `disabled`; an input that does not fit is refused with both"),
        "chat_template_kwargs": _hint({"a": 1}, "variables of the chat template"),
        "metadata": _hint({"a": "b"}),
        "prompt_cache_key": _hint("k"),
        "safety_identifier": _hint("k"),
        "user": _hint("u"),
    },
    MESSAGES: ENGINE
    | {
        "model": _asks("tiny-alias", lambda seen: seen.json["model"] == "tiny-alias"),
        "messages": _asks(HI, lambda seen: seen.prompt == "[user]hi[assistant]"),
        "system": _asks("be", lambda seen: seen.prompt.startswith("[system]be")),
        "max_tokens": _samples("max_tokens", 3),
        "stop_sequences": _samples("stop", ["x"], ("x",)),
        "temperature": _samples("temperature", 0.5),
        "top_p": _samples("top_p", 0.5),
        "stream": _asks(True, _streams),
        "metadata": _hint({"user_id": "u"}),
        "tools": _hint([], ""),
        "tool_choice": _hint({"type": "none"}, ""),
        "thinking": _hint({"type": "disabled"}, "`budget_tokens` is as `thinking_token_budget` of chats"),
        "output_config": _hint({"effort": "low"}, "`effort` is as `reasoning_effort` of chats"),
        "output_format": _asks(
            {"type": "json_schema", "schema": {"type": "object"}},
            lambda seen: seen.sampling.structured_output is not None,
            note="the older place of `output_config.format`",
        ),
        "context_management": _hint({"edits": []}, "no edit is carried out; `x-faser-ignored` names them"),
        "chat_template_kwargs": _hint({"a": 1}, "variables of the chat template"),
    },
    COUNT: {name: _hint(case.value, "does not change the count") for name, case in ENGINE.items()}
    | {
        "model": _hint("tiny-alias", ""),
        "messages": _asks(HI, lambda seen: seen.json["input_tokens"] == len("[user]hi[assistant]")),
        "system": _asks("be", lambda seen: seen.json["input_tokens"] > len("[user]hi[assistant]")),
        "tools": _hint([], ""),
        "tool_choice": _hint({"type": "none"}, ""),
        "thinking": _hint({"type": "disabled"}, ""),
        "output_config": _hint({"effort": "low"}, ""),
        "output_format": _hint({"type": "json_schema", "schema": {}}, "does not change the count"),
        "context_management": _hint({"edits": []}, "no edit is carried out"),
        "chat_template_kwargs": _hint({"a": 1}, "variables of the chat template"),
    },
    TOKENIZE: {
        "model": _hint("tiny-alias", ""),
        "prompt": _asks("hi", lambda seen: seen.json["tokens"] == [104, 105]),
        "messages": _asks(HI, lambda seen: seen.json["count"] == len("[user]hi[assistant]"), prompt=None),
        "add_special_tokens": _hint(True, "by default true for a prompt, false for messages"),
        "return_token_strs": _asks(True, lambda seen: seen.json["token_strs"] == ["h", "i"]),
        "add_generation_prompt": _asks(
            False, lambda seen: seen.json["count"] == len("[user]hi"), messages=HI, prompt=None
        ),
        "continue_final_message": _asks(
            True, lambda seen: seen.json["count"] == len("[user]hi"), messages=HI, prompt=None
        ),
        "chat_template_kwargs": _hint({"a": 1}, "variables of the chat template"),
        "tools": _asks([TOOL], lambda seen: seen.json["count"] > 100, messages=HI, prompt=None),
    },
    DETOKENIZE: {
        "model": _hint("tiny-alias", ""),
        "tokens": _asks([104, 105], lambda seen: seen.json["prompt"] == "hi"),
    },
    INVOCATIONS: {
        "messages": _asks(HI, lambda seen: seen.json["object"] == "chat.completion", prompt=None),
        "prompt": _asks("hi", lambda seen: seen.json["object"] == "text_completion"),
    },
}
