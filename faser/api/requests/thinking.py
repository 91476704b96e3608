"""Thinking budgets: from the fields of a chat to the tokens that its answers may think.

    thinking_token_budget   vLLM's: a number of tokens; -1: none
    reasoning_effort        OpenAI's, where the model's template has no use for it; EFFORTS has the numbers

The first wins. An effort that asks for no thinking uses the switch of a template that has one. A template with a
use for efforts gets the nearest one that its model knows.
"""

import logging
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from typing import Any

from faser.api.bodies.body import shown
from faser.api.bodies.chat import ChatBody
from faser.api.parsing.harmony import ANALYSIS, ENDS, MESSAGE, is_analysis, opening_of
from faser.api.parsing.registry import ReasoningStyle
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types.sampling import ThinkingBudget

_log = logging.getLogger("faser.api")

# Tokens by effort, the least effort first. None: as many as the model wants.
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 8192, "high": 24576, "xhigh": None, "max": None}
_HARMONY_EFFORTS = ("low", "medium", "high")
_SWITCH = "enable_thinking"
_MOST_TOKENS = 1 << 31  # no context is as long


def template_kwargs(body: ChatBody, template: str) -> Mapping[str, Any] | None:
    """Return the variables of the chat template: those of the body, and its switch where no thinking is wanted."""
    given = body.chat_template_kwargs
    if EFFORTS.get(body.reasoning_effort or "") == 0 and _SWITCH in template and not _takes_effort(template):
        return {_SWITCH: False, **(given or {})}
    return given


def template_effort(
    given: str | None, template: str, accepted: Collection[str], style: ReasoningStyle
) -> str | None:
    """Return the effort for the chat template; None: none. accepted: those of EFFORTS that it does not refuse."""
    if not given:
        return None
    if given not in EFFORTS:
        return given if given in template else _other_effort(given, None)
    known = _HARMONY_EFFORTS if style.harmony else tuple(EFFORTS)
    scale = [*EFFORTS]
    at = scale.index(given)
    # Of two efforts that are as near, the greater: a client that asks for some thinking gets some.
    nearest = sorted(range(len(scale)), key=lambda other: (abs(other - at), -other))
    used = next((scale[other] for other in nearest if scale[other] in known and scale[other] in accepted), None)
    return given if used == given else _other_effort(given, used)


@lru_cache(maxsize=64)
def _other_effort(given: str, used: str | None) -> str | None:
    """Return the effort that is used, and say so once for each that is given."""
    instead = "ignoring it" if used is None else f"using {shown(used)}"
    _log.warning("the model does not know reasoning_effort %s; %s", shown(given), instead)
    return used


def thinking_budget(
    body: ChatBody,
    style: ReasoningStyle,
    prompt: str,
    template: str,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
) -> ThinkingBudget | None:
    """Return what binds the thinking of the answers; None: nothing. prompt: its text.

    Without effect where the model has no format of reasoning, or closes it with more than one token.
    """
    max_tokens = _max_tokens(body, template)
    if max_tokens is None:
        return None
    if not style.divides:
        return _without_effect("the model has no format of reasoning")
    if style.harmony:
        opening = opening_of(prompt)
        begin, end, is_open = ANALYSIS, ENDS[0], MESSAGE in opening and is_analysis(opening)
    else:
        within = style.think.begins_within(prompt)
        if within is False:
            return None
        begin, end, is_open = style.think.begin, style.think.end, style.always or within is True
    end_id = tokenizer.token_id(end)
    if end_id is None or end_id >= vocab_size:
        return _without_effect(f"{end} is not one token of this model")
    return ThinkingBudget(
        max_tokens=max_tokens,
        begin=tuple(tokenizer.encode(begin, add_special_tokens=False)),
        end=end_id,
        is_open=is_open,
        repeats=style.harmony,
    )


def _max_tokens(body: ChatBody, template: str) -> int | None:
    given = body.thinking_token_budget
    if given is None:
        return None if _takes_effort(template) else EFFORTS.get(body.reasoning_effort or "")
    if given < -1:
        raise RequestError(
            f"thinking_token_budget is {given}; it must be a number of tokens from 0 on, or -1 for no budget",
            param="thinking_token_budget",
        )
    return None if given == -1 or given > _MOST_TOKENS else given


def _takes_effort(template: str) -> bool:
    return "reasoning_effort" in template


@cache
def _without_effect(reason: str) -> None:
    """Said once for each reason."""
    _log.warning("thinking budgets of requests have no effect: %s", reason)
