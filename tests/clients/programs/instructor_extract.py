"""`instructor`: objects by tools, by JSON schemas and in a stream. Usage: instructor_extract.py URL MODEL."""

import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
HI: list[Any] = [{"role": "user", "content": "Zürich is warm."}]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a model may go on with further properties to its limit

    city: Literal["Bern", "Zürich"]
    is_warm: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=HI, response_model=Weather, max_tokens=200, max_retries=0
    )
    assert isinstance(found, Weather)
    partial = client.chat.completions.create_partial(
        model=MODEL, messages=HI, response_model=Weather, max_tokens=200, max_retries=0
    )
    *_, last = partial
    assert last.city in ("Bern", "Zürich")
print("ok")
