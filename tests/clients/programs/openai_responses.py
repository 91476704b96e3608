"""The `openai` package: responses, streams, JSON and tools. Usage: openai_responses.py URL MODEL."""

import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Bern?"


class Weather(BaseModel):
    city: Literal["Bern", "Zürich"]
    is_warm: bool


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
seeded: dict[str, Any] = {"extra_body": {"seed": 1}}

answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, **seeded)
assert answer.usage is not None

with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=20, **seeded) as stream:
    events = list(stream)
assert events[-1].type in ("response.completed", "response.incomplete")
text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert text == answer.output_text

parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=200)
assert isinstance(parsed.output_parsed, Weather), parsed

called = client.responses.create(
    model=MODEL,
    input=QUESTION,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=200,
)
(call,) = (item for item in called.output if item.type == "function_call")
assert call.name == "weather"
Weather.model_validate_json(call.arguments)

with client.responses.stream(
    model=MODEL,
    input=QUESTION,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=200,
) as stream:
    final = stream.get_final_response()
(streamed,) = (item for item in final.output if item.type == "function_call")
Weather.model_validate_json(streamed.arguments)

conversation: Any = [
    {"role": "user", "content": QUESTION},
    *called.output,
    {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 20}'},
]
again = client.responses.create(
    model=MODEL, input=conversation, tools=[TOOL], tool_choice="none", max_output_tokens=10
)
assert again.output[-1].type == "message"

try:
    client.responses.create(model=MODEL, input=QUESTION, previous_response_id=answer.id)
except openai.BadRequestError as error:
    assert "previous_response_id" in str(error)
else:
    raise AssertionError("there are no stored responses")
print("ok")
