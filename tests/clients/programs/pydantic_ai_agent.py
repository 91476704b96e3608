"""pydantic-ai's agents over chats, responses and messages. Usage: pydantic_ai_agent.py URL MODEL."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Bern?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Bern", "Zürich"]
    is_warm: bool


async def use(model: Model) -> None:
    settings = {"max_tokens": 200}
    by_tool = Agent(model, output_type=Weather, model_settings=settings, retries=0)
    assert isinstance((await by_tool.run(QUESTION)).output, Weather)
    plain = Agent(model, model_settings=settings)
    async with plain.run_stream(QUESTION) as stream:
        assert [piece async for piece in stream.stream_text(delta=True)]
    if not isinstance(model, AnthropicModel):
        by_schema = Agent(model, output_type=NativeOutput(Weather), model_settings=settings, retries=0)
        assert isinstance((await by_schema.run(QUESTION)).output, Weather)


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    await use(OpenAIChatModel(MODEL, provider=openai))
    await use(OpenAIResponsesModel(MODEL, provider=openai))
    await use(AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")))


asyncio.run(main())
print("ok")
