"""The `openai` package: chats, streams, JSON and tools. Usage: openai_chat.py URL MODEL."""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
HI: list[Any] = [{"role": "user", "content": "What is the weather in Bern?"}]


class Weather(BaseModel):
    city: Literal["Bern", "Zürich"]
    is_warm: bool


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20, seed=1)
assert answer.choices[0].message.content is not None
assert answer.usage is not None

stream = client.chat.completions.create(
    model=MODEL, messages=HI, max_tokens=20, seed=1, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert text == answer.choices[0].message.content
assert chunks[-1].usage is not None
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

parsed = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Weather, max_tokens=200)
assert isinstance(parsed.choices[0].message.parsed, Weather), parsed

called = client.chat.completions.create(
    model=MODEL, messages=HI, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
)
(call,) = called.choices[0].message.tool_calls or ()
assert call.type == "function"
assert call.function.name == "weather"
Weather.model_validate_json(call.function.arguments)
assert called.choices[0].finish_reason == "tool_calls"

with client.chat.completions.stream(
    model=MODEL, messages=HI, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
) as events:
    final = events.get_final_completion()
(call,) = final.choices[0].message.tool_calls or ()
Weather.model_validate(json.loads(call.function.arguments))

again = client.chat.completions.create(
    model=MODEL,
    messages=[
        *HI,
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 20}'},
    ],
    tools=[TOOL],
    tool_choice="none",
    max_tokens=10,
)
assert not again.choices[0].message.tool_calls
print("ok")
