"""ChatRenderer: checks the messages of a chat and renders them as a prompt, with the model's chat template.

For templates that know no tools, tools go into the messages themselves: the system message describes the
functions, and calls and results of earlier turns are written out, in the format of HermesParser.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from faser.api.bodies.body import shown
from faser.api.bodies.chat import read_messages
from faser.api.requests.chat_template import ChatTemplate, TemplateRefusal, choose_template
from faser.api.requests.strict_templates import ORDERS, SYSTEM_ROLES, first_lost
from faser.api.requests.thinking import EFFORTS
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.optional import given, or_else

Message = dict[str, Any]
_TOOLS_OF_MESSAGE = ("message['tools']", 'message["tools"]', "message.tools")
_NEUTRAL: tuple[Any, ...] = ("none", [])
_ASKED: list[Message] = [{"role": "user", "content": "1"}]
_ANSWERED: list[Message] = [*_ASKED, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
_MOST_TAILS = 64
_HINTS = ("reasoning_effort",)  # without effect on a model whose template does not use it


class ChatRenderer:
    """The chat templates of a server. Rendering has no state, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, override: str | None) -> None:
        """override: replaces the model's templates. Raises ModelError if one does not compile, or loops."""
        templates = or_else(override, tokenizer.chat_template)
        self._plain = _NamedTemplate(templates, tokenizer, with_tools=False)
        self._with_tools = _NamedTemplate(templates, tokenizer, with_tools=True)
        self._tails: dict[tuple[bool, str], str | None] = {}

    @property
    def tool_template(self) -> str:
        """Source of the template for chats with tools; empty if there is none."""
        return self._with_tools.source

    def template_of(self, *, tools: bool) -> str:
        """Return the source of the template for chats with or without tools; empty if there is none."""
        return (self._with_tools if tools else self._plain).source

    def tail(self, template_kwargs: Mapping[str, Any] | None, *, tools: bool) -> str | None:
        """Return the end of a prompt that asks for an answer, and that later turns lack; None: it is not known.

        Templates differ in it, so it is found by rendering a turn that asks, and the same turn once it has been
        answered: what both begin with stays.
        """
        key = tools, repr(template_kwargs)
        if key not in self._tails:
            if len(self._tails) >= _MOST_TAILS:
                self._tails.clear()
            self._tails[key] = self._find_tail((self._with_tools if tools else self._plain), template_kwargs or {})
        return self._tails[key]

    def _find_tail(self, chosen: "_NamedTemplate", extra: Mapping[str, Any]) -> str | None:
        options: dict[str, Any] = {"continue_final_message": False, "tools": None, "extra": {**extra}}
        try:
            asked = chosen.template.render(_ASKED, add_generation_prompt=True, **options)
            answered = chosen.template.render(_ANSWERED, add_generation_prompt=False, **options)
        except RequestError:
            return None
        parted = (at for at, (one, other) in enumerate(zip(asked, answered, strict=False)) if one != other)
        return asked[next(parted, min(len(asked), len(answered))) :]

    def efforts_of(self, *, tools: bool) -> frozenset[str]:
        """Return the efforts that the template for chats with or without tools does not refuse."""
        return (self._with_tools if tools else self._plain).efforts

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        template_kwargs: Mapping[str, Any] | None,
        template_fields: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt.

        template_fields: fields of the request that only a template can use; None is absent. tools: the functions
        that the model may call, as OpenAI describes them.

        A template that refuses the messages, or leaves one out, gets them in other orders (strict_templates.py).
        Raises RequestError: there is no template, it refuses the messages in every order, or does not use a given
        field.
        """
        chosen = self._with_tools if tools else self._plain
        if chosen.missing is not None:
            raise RequestError(str(chosen.missing), param="messages")
        asked = given(template_fields)
        for name, value in asked.items():
            if name not in chosen.source and value not in _NEUTRAL and name not in _HINTS:
                raise RequestError(
                    f"`{name}` is not supported: this model's chat template does not use it", param=name
                )
        extra = {**(template_kwargs or {}), **asked}
        if tools and "xml_tools" in chosen.source:  # SmolLM3's name of them
            extra.setdefault("xml_tools", [*tools])
        continues = bool(continue_final_message)
        prompt_of = partial(
            _prompt_of,
            chosen.template,
            add_generation_prompt=or_else(add_generation_prompt, not continues),
            continue_final_message=continues,
            tools=list(tools) if tools and "tools" in chosen.source else None,
            extra=extra,
        )
        read = [_known_role(message, chosen.source) for message in read_messages(messages)]
        failure: RequestError | None = None
        for order in ORDERS:
            try:
                prompt = prompt_of(order(_for_template(read, tools, chosen.source)))
            except TemplateRefusal as error:
                failure = failure or error
                continue
            if (lost := first_lost(read, prompt)) is None:
                return prompt
            failure = failure or _left_out(read[lost]["role"], f"messages.{lost}")
        assert failure is not None
        if not isinstance(failure, TemplateRefusal):
            raise failure
        raise _naming(failure, read, lambda some: prompt_of(_for_template(some, tools, chosen.source)))


def _prompt_of(template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
    """The prompt. Arguments that are text get an object around them where the template needs keys and values."""
    try:
        return template.render(messages, **options)
    except TemplateRefusal:
        with_objects = [_with_argument_objects(message) for message in messages]
        if with_objects == [*messages]:
            raise
        return template.render(with_objects, **options)


def _with_argument_objects(message: Message) -> Message:
    """The message, with an object around arguments that are text: some templates read keys and values only."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call = {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}
        calls.append(call)
    return {**message, "tool_calls": calls}


class _NamedTemplate:
    """The template of those that a checkpoint has for chats with or without tools. missing: why there is none.

    efforts: of EFFORTS, those that it takes; some templates raise on others than theirs.
    """

    def __init__(
        self, templates: str | Mapping[str, str] | None, tokenizer: Tokenizer, *, with_tools: bool
    ) -> None:
        self.missing: RequestError | None = None
        try:
            self.source = choose_template(templates, with_tools=with_tools)
        except RequestError as error:
            self.missing, self.source = error, ""
        self.template = ChatTemplate(self.source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        if self.missing is None:
            self.template.check()
        self.efforts = frozenset(effort for effort in EFFORTS if self._takes(reasoning_effort=effort))
        if not self.efforts:  # it refuses a chat of one message, whatever the effort
            self.efforts = frozenset(EFFORTS)

    def _takes(self, **extra: str) -> bool:
        if not any(name in self.source for name in extra):
            return True
        hello = [{"role": "user", "content": "Hello"}]
        try:
            self.template.render(hello, add_generation_prompt=True, continue_final_message=False, extra=extra)
        except RequestError:
            return False
        return True


def _known_role(message: Message, source: str) -> Message:
    """The message, without an empty list of calls, and with the role system where the template has no developer.

    OpenAI renamed the role system to developer; older templates know only system.
    """
    if message.get("tool_calls") == []:
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    if message["role"] == "developer" and "developer" not in source:
        return {**message, "role": "system"}
    return message


def _for_template(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], source: str) -> list[Message]:
    """The messages, with calls and functions written out where the template does not write them."""
    if "tool_calls" not in source:
        messages = write_out_calls(messages)
    if tools and any(spelled in source for spelled in _TOOLS_OF_MESSAGE):
        return _with_tools(messages, tools)
    return describe_tools(messages, tools) if tools and "tools" not in source else [*messages]


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the functions as JSON in a field of the system message, as Phi-4-mini has them."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    has_system = bool(messages) and messages[0]["role"] in SYSTEM_ROLES
    system = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**system, "tools": functions}, *messages[has_system:]]


def _left_out(role: str, path: str) -> RequestError:
    return RequestError(
        f"{path} has the role {shown(role)}, and the chat template leaves its content out; use a role that this "
        "model's template writes",
        param=path,
    )


def _naming(
    failure: TemplateRefusal, messages: Sequence[Message], prompt_of: Callable[[Sequence[Message]], str]
) -> RequestError:
    """The failure, with the message that the template refuses: without it and those behind it there is another."""
    first, last = 0, len(messages)  # the refused message is among these
    while last - first > 1:
        middle = (first + last) // 2
        try:
            prompt_of(messages[:middle])
            first = middle
        except RequestError as error:
            first, last = (first, middle) if str(error) == str(failure) else (middle, last)
    role, reason = shown(messages[first]["role"]), str(failure).partition(": ")[2]
    return RequestError(
        f"the chat template cannot render messages.{first}, of the role {role}: {reason}",
        param=f"messages.{first}",
    )


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the functions in the system message; one is added if there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = (
        f"You may call functions. Here is what each does, one JSON object a line:\n<tools>\n{lines}\n</tools>\n"
        "A call is a JSON object with the name and the arguments, within tags. Write one for each call:\n"
        '<tool_call>\n{"name": "function", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "The results come within <tool_response> tags."
    )
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def write_out_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with calls as text of the assistant and their results as text of the user.

    Results that follow one another become one message, for templates in which the roles must alternate.
    """
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
            else:
                written.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            parts = [message["content"], *map(_written_out, calls)]
            written.append({"role": message["role"], "content": "\n".join(part for part in parts if part)})
        else:
            written.append(message)
        after_result = is_result
    return written


def _written_out(call: Mapping[str, Any]) -> str:
    function = call["function"]
    content = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"
