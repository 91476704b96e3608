"""The body of a message as the body of a chat: a pure function, and the names of fields for errors."""

from typing import Any

from faser.api.dialects.conversion import Json, chat_body, read_object, read_string
from faser.api.dialects.messages.blocks import chat_messages
from faser.api.dialects.messages.body import CountTokensBody, MessageFields, MessagesBody, ToolChoice
from faser.api.protocol.body import shown
from faser.api.protocol.chat import ChatBody
from faser.errors import RequestError

# For renamed_fields: what the fields of a chat are called here.
FIELD_NAMES = (
    (r"max_completion_tokens", "max_tokens"),
    (r"stop", "stop_sequences"),
    (r"response_format\.json_schema|response_format", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: MessagesBody) -> ChatBody:
    """Raises RequestError with the names of this dialect for what is converted, of chats for what is not."""
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    output = body.output_config
    schema = None if output is None or output.format is None else output.format.schema_
    response_format = {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema, "strict": True}}
    return chat_body(
        {
            **_conversation(body),
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stop": body.stop_sequences,
            "response_format": None if schema is None else response_format,
            "stream": body.stream,
        },
        body,
    )


def conversation(body: CountTokensBody) -> ChatBody:
    """A chat of which only the prompt is wanted."""
    return chat_body(_conversation(body), body)


def _conversation(body: MessageFields) -> dict[str, Any]:
    """The fields of a chat that make its prompt. Text of the assistant at the end is continued."""
    messages = chat_messages(body.messages, body.system)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice, thinking = body.tool_choice, body.thinking
    template_kwargs = dict(body.chat_template_kwargs or {})
    if thinking is not None:
        template_kwargs.setdefault("enable_thinking", thinking.type != "disabled")
    return {
        "model": body.model,
        "messages": messages,
        "continue_final_message": True if continues else None,
        "tools": None
        if body.tools is None
        else [_tool(tool, f"tools.{at}") for at, tool in enumerate(body.tools)],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        "include_reasoning": False if thinking is not None and thinking.display == "omitted" else None,
        "chat_template_kwargs": template_kwargs or None,
    }


def _tool(tool: Json, path: str) -> Json:
    """A function as chats describe it."""
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{path}.type is {shown(tool['type'])}; it must be custom: this server knows no tools of its own",
            param=f"{path}.type",
        )
    function: Json = {
        "name": read_string(tool, "name", path),
        "parameters": read_object(tool.get("input_schema"), f"{path}.input_schema"),
    }
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; it is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
