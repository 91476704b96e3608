"""LiteLLM: chats, streams, tools, schemas and Responses. Usage: litellm_completion.py URL MODEL."""

import os
import sys
from typing import Any, Literal

from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices when it is imported
import litellm

URL, MODEL = sys.argv[1:]
HI: list[Any] = [{"role": "user", "content": "What is the weather in Bern?"}]
TO: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 100}


class Weather(BaseModel):
    city: Literal["Bern", "Zürich"]
    is_warm: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look the weather up.",
        "parameters": Weather.model_json_schema(),
    },
}

answer = litellm.completion(messages=HI, **TO)
assert answer.choices[0].message.content
assert answer.usage.completion_tokens > 0
chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **TO))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert chunks[-1].usage.completion_tokens > 0

structured = litellm.completion(messages=HI, response_format=Weather, **TO)
assert Weather.model_validate_json(structured.choices[0].message.content)

called = litellm.completion(messages=HI, tools=[TOOL], tool_choice="required", **TO).choices[0].message
call = called.tool_calls[0]
assert call.function.name == "weather"
assert Weather.model_validate_json(call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": "Bern: warm"}
again = litellm.completion(messages=[*HI, called.model_dump(), result], tools=[TOOL], tool_choice="none", **TO)
assert again.choices[0].message.content
del TO["max_tokens"]
assert litellm.responses(input=HI, max_output_tokens=100, **TO).output
print("ok")
