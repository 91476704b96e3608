"""The bodies of POST /tokenize and /detokenize."""

from typing import Any

from pydantic import BaseModel, Field

from faser.api.protocol.common import LIST, OPEN
from faser.api.protocol.scalars import Flag
from faser.api.protocol.tools import TOOLS, Tool


class TokenizeBody(BaseModel):
    """Either a prompt or messages. add_special_tokens: by default true for a prompt, false for messages."""

    model_config = OPEN

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = LIST
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = TOOLS


class DetokenizeBody(BaseModel):
    """Token ids to convert to text, special tokens included."""

    model_config = OPEN

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)
