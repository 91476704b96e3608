"""LangChain's ChatOpenAI, over chats and over responses. Usage: langchain_chat.py URL MODEL."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Bern?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Bern", "Zürich"]
    is_warm: bool


@tool
def weather(city: Literal["Bern", "Zürich"], is_warm: bool) -> str:
    """Look the weather up."""
    return f"{city}: {'warm' if is_warm else 'cold'}"


for use_responses_api in (False, True):
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        max_completion_tokens=200,
        use_responses_api=use_responses_api,
        stream_usage=True,
    )
    answer = chat.invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata
    pieces = list(chat.stream(QUESTION))
    assert "".join(piece.text for piece in pieces)

    structured = chat.with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke(QUESTION), Weather)

    agent = chat.bind_tools([weather], tool_choice="weather")
    called = agent.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    again = chat.bind_tools([weather], tool_choice="none").invoke([HumanMessage(QUESTION), called, result])
    assert not again.tool_calls
print("ok")
