"""The `anthropic` package: messages, streams, tools, counts. Usage: anthropic_messages.py URL MODEL."""

import sys
from typing import Any

import anthropic

URL, MODEL = sys.argv[1:]
HI: list[Any] = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Zürich"]}, "is_warm": {"type": "boolean"}},
        "required": ["city", "is_warm"],
        "additionalProperties": False,
    },
}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
seeded: dict[str, Any] = {"extra_body": {"seed": 1}}

answer = client.messages.create(model=MODEL, max_tokens=20, messages=HI, **seeded)
counted = client.messages.count_tokens(model=MODEL, messages=HI)
assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

with client.messages.stream(model=MODEL, max_tokens=20, messages=HI, **seeded) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert [block.to_dict() for block in final.content] == [block.to_dict() for block in answer.content]
assert text == "".join(block.text for block in answer.content if block.type == "text")

called = client.messages.create(model=MODEL, max_tokens=200, messages=HI, tools=[TOOL], tool_choice=ANY)
(use,) = (block for block in called.content if block.type == "tool_use")
assert called.stop_reason == "tool_use"
assert use.name == "weather"
assert use.input["city"] in ("Bern", "Zürich")

with client.messages.stream(model=MODEL, max_tokens=200, messages=HI, tools=[TOOL], tool_choice=ANY) as stream:
    final = stream.get_final_message()
(streamed,) = (block for block in final.content if block.type == "tool_use")
assert isinstance(streamed.input["is_warm"], bool)

result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "20 degrees"}
again = client.messages.create(
    model=MODEL,
    max_tokens=10,
    messages=[*HI, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}],
    tools=[TOOL],
    tool_choice={"type": "none"},
)
assert again.stop_reason in ("max_tokens", "end_turn")

try:
    client.messages.create(model="gpt-9", max_tokens=5, messages=HI)
except anthropic.NotFoundError as error:
    assert "gpt-9" in str(error)
else:
    raise AssertionError("there is no such model")
print("ok")
