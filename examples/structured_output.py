"""Get a label, a pattern and an object by a schema: `python examples/structured_output.py [MODEL]`."""

import json
import sys

from pydantic import BaseModel, Field

from faser import LLM, SamplingParams
from faser.sampling_params import StructuredOutputsParams


class City(BaseModel):
    """A schema that also bounds the length of each text."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


questions = {
    "Classify the sentiment, Positive or Negative: I love this phone!": StructuredOutputsParams(
        choice=["Positive", "Negative"]
    ),
    "Write an ISO date in May 2024.": StructuredOutputsParams(regex=r"2024-05-[0-3]\d"),
    "Describe the capital of France as JSON with name and country.": StructuredOutputsParams(
        json=City.model_json_schema()
    ),
}

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [
        SamplingParams(temperature=0.0, max_tokens=128, structured_outputs=structure)
        for structure in questions.values()
    ]
    texts = [output.outputs[0].text for output in llm.chat(chats, params)]

print(*texts, sep="\n")
print(City(**json.loads(texts[-1])))
