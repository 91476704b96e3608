"""ChatRenderer: checks the messages of a chat and renders them as a prompt, with the model's chat template.

For templates that know no tools, tools go into the messages themselves: the system message describes the
functions, and calls and results of earlier turns are written out, in the format of HermesParser.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from faser.api.bodies.body import shown
from faser.api.bodies.chat import read_messages
from faser.api.requests.chat_template import ChatTemplate, choose_template
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError

Message = dict[str, Any]
_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NEUTRAL: tuple[Any, ...] = ("none", [])
_HINTS = ("reasoning_effort",)  # without effect on a model whose template does not use it


class ChatRenderer:
    """The chat templates of a server. Rendering has no state, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, override: str | None) -> None:
        """override: replaces the model's templates. Raises ModelError if one does not compile, or loops."""
        templates = tokenizer.chat_template if override is None else override
        self._plain = _NamedTemplate(templates, tokenizer, with_tools=False)
        self._with_tools = _NamedTemplate(templates, tokenizer, with_tools=True)

    @property
    def tool_template(self) -> str:
        """Source of the template for chats with tools; empty if there is none."""
        return self._with_tools.source

    def template_of(self, *, tools: bool) -> str:
        """Return the source of the template for chats with or without tools; empty if there is none."""
        return (self._with_tools if tools else self._plain).source

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

        Raises RequestError: there is no template, it refuses the messages, or does not use a given field.
        """
        chosen = self._with_tools if tools else self._plain
        if chosen.missing is not None:
            raise RequestError(str(chosen.missing), param="messages")
        given = {name: value for name, value in template_fields.items() if value is not None}
        for name, value in given.items():
            if name not in chosen.source and value not in _NEUTRAL and name not in _HINTS:
                raise RequestError(
                    f"`{name}` is not supported: this model's chat template does not use it", param=name
                )
        continues = bool(continue_final_message)
        read = [_known_role(message, at, chosen.source) for at, message in enumerate(read_messages(messages))]
        if "tool_calls" not in chosen.source:
            read = write_out_calls(read)
        takes_tools = "tools" in chosen.source
        if tools and not takes_tools:
            read = describe_tools(read, tools)
        return chosen.template.render(
            read,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            tools=list(tools) if tools and takes_tools else None,
            extra={**(template_kwargs or {}), **given},
        )


class _NamedTemplate:
    """The template of those that a checkpoint has for chats with or without tools. missing: why there is none."""

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


def _known_role(message: dict[str, Any], at: int, source: str) -> dict[str, Any]:
    """The message, with a role that its template knows.

    OpenAI renamed the role system to developer; older templates know only system. Raises RequestError for a role
    that neither OpenAI nor the template names: most templates would write it into the prompt as it is.
    """
    role = message["role"]
    if role == "developer" and role not in source:
        return {**message, "role": "system"}
    if role not in _ROLES and not any(f"{quote}{role}{quote}" in source for quote in "'\""):
        raise RequestError(
            f"messages.{at}.role is {shown(role)}; it must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, as this "
            "model's chat template does not name it",
            param=f"messages.{at}.role",
        )
    return message


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the functions in the system message; one is added if there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = (
        f"You may call functions. Here is what each does, one JSON object a line:\n<tools>\n{lines}\n</tools>\n"
        "A call is a JSON object with the name and the arguments, within tags. Write one for each call:\n"
        '<tool_call>\n{"name": "function", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "The results come within <tool_response> tags."
    )
    if messages and messages[0]["role"] in _SYSTEM_ROLES:
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
