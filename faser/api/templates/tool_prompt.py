"""Tools in the messages themselves, for chat templates that know no tools.

The system message describes the functions; calls and results of earlier turns are written out. The format is that
of HermesParser; see parsing/formats/hermes.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_SYSTEM_ROLES = ("system", "developer")


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
