"""ChatTemplate: renders the messages of a chat as the prompt format that the model was trained on.

Gives templates the functions that those of checkpoints expect. They run in a sandbox (template_sandbox.py).
Knows no tokenizer and no HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from faser.api.requests.template_sandbox import (
    BUDGET,
    MAX_CHARS,
    Budget,
    OverBudgetError,
    TemplateSandbox,
    TooSlowError,
)
from faser.errors import ModelError, RequestError
from faser.optional import given

Message = Mapping[str, Any]

# Appended to the final message while the template runs, to find where that message ends in the prompt. If the
# space after the mark is missing in the prompt, the template trims messages.
_END_MARK = "\ue000end of the final message\ue001"
_TRIMMED_AWAY = " "

_RESERVED = ("messages", "tools", "add_generation_prompt")


class TemplateRefusal(RequestError):
    """A template that raises on the messages of a chat."""


class ChatTemplate:
    """One compiled template. Rendering has no state, so threads may share it."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        """Raises ModelError with the line when the template does not compile."""
        environment = TemplateSandbox()
        environment.filters["tojson"] = _tojson
        environment.bound_filters()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        if BUDGET in source:
            raise ModelError(f"the chat template does not compile: {BUDGET} is not its own")
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError, MemoryError) as error:  # of Python's own compiler
            what = str(error) or type(error).__name__
            raise ModelError(f"the chat template does not compile: {what}") from None
        # Templates test whether these are defined, or append them to text: None must not become the text "None".
        self._tokens = given({"bos_token": bos_token, "eos_token": eos_token})

    def check(self) -> None:
        """Render a chat of one message. Raises ModelError if that takes more than the budget.

        A template may refuse this chat: some want other messages first.
        """
        hello = [{"role": "user", "content": "Hello"}]
        try:
            self.render(hello, add_generation_prompt=True, continue_final_message=False, extra={})
        except OverBudgetError as error:
            raise ModelError(f"{error}, and this was one message") from None
        except RequestError:
            return

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt.

        add_generation_prompt: end with the header of an assistant message. continue_final_message: end inside
        the last message, so that the model continues it. extra: further variables of the template.

        Raises TemplateRefusal (param messages) with the template's own message if it refuses the messages.
        """
        if taken := [name for name in _RESERVED if name in extra]:
            raise RequestError(
                f"chat_template_kwargs has {taken[0]}; that variable has a field of its own",
                param="chat_template_kwargs",
            )
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other: both are true",
                    param="continue_final_message",
                )
            messages = _with_end_mark(messages)
        variables = {
            **self._tokens,
            "documents": None,
            **extra,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: Budget(),
        }
        prompt = self._run(variables)
        return _up_to_end_mark(prompt) if continue_final_message else prompt

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise OverBudgetError(f"the prompt has more than {MAX_CHARS} characters")
                pieces.append(piece)
            return "".join(pieces)
        except (OverBudgetError, TooSlowError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise TemplateRefusal(
                f"the chat template cannot render these messages: {str(error) or type(error).__name__}",
                param="messages",
            ) from None


def choose_template(templates: str | Mapping[str, str] | None, *, with_tools: bool) -> str:
    """The template to use, of those that a checkpoint has.

    Raises RequestError if there is none: the model was not trained for chats.
    """
    if isinstance(templates, str):
        return templates
    named = templates or {}
    wanted = ("tool_use", "default") if with_tools else ("default",)
    chosen = next((named[name] for name in wanted if name in named), None)
    if chosen is None:
        found = f"; it has {', '.join(named)} but no default" if named else ""
        raise RequestError(f"this model has no chat template{found}; use completions, or serve it with one")
    return chosen


def _with_end_mark(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the end mark appended to the text of the last one."""
    if not messages:
        raise RequestError("messages is empty; continue_final_message needs a message", param="messages")
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END_MARK + _TRIMMED_AWAY
    elif isinstance(content, list) and (at := _last_text_part(content)) is not None:
        part = {**content[at], "text": content[at]["text"] + _END_MARK + _TRIMMED_AWAY}
        last["content"] = [*content[:at], part, *content[at + 1 :]]
    else:
        raise RequestError("the last message has no text; continue_final_message needs one", param="messages")
    return [*messages[:-1], last]


def _last_text_part(content: Sequence[Any]) -> int | None:
    texts = [at for at, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else None


def _up_to_end_mark(prompt: str) -> str:
    """The prompt up to the end of the last message."""
    end = prompt.rfind(_END_MARK)
    if end < 0:
        raise RequestError(
            "the chat template leaves out the end of the last message; it cannot be continued", param="messages"
        )
    kept = prompt.startswith(_TRIMMED_AWAY, end + len(_END_MARK))
    return prompt[:end] if kept else prompt[:end].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; Jinja's own filter escapes <, >, & and '."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """The local time, for templates that state the date."""
    return datetime.now().strftime(pattern)
