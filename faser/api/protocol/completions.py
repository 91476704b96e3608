"""The body of POST /v1/completions, whose prompt has four forms."""

from typing import Any

from faser.api.protocol.body import shown
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.scalars import Flag, Integer
from faser.errors import RequestError

MAX_PROMPTS = 2048

_FORMS = "it must be a string, a list of strings, a list of token ids, or a list of such lists"


class CompletionBody(GenerationBody):
    """The shared fields, and those of completions only. logprobs: number of alternatives; 0: the chosen token."""

    prompt: Any
    logprobs: Integer | None = None
    echo: Flag | None = None


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """One entry per prompt, in order. Raises RequestError that names the element of the wrong type."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(f"prompt is {shown(prompt)}; {_FORMS}", param="prompt")
    if not prompt:
        raise RequestError(f"prompt is an empty list; {_FORMS}", param="prompt")
    if len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
        raise RequestError(f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt")
    match prompt[0]:
        case str():
            _check_elements(prompt, str, "prompt")
            return prompt
        case list():
            _check_elements(prompt, list, "prompt")
            for at, token_ids in enumerate(prompt):
                _check_elements(token_ids, int, f"prompt.{at}")
            return prompt
        case _:
            _check_elements(prompt, int, "prompt")
            return [prompt]


def _check_elements(elements: list[Any], kind: type, path: str) -> None:
    if set(map(type, elements)) <= {kind}:  # fast enough for millions of token ids
        return
    wrong = next(at for at, element in enumerate(elements) if type(element) is not kind)
    raise RequestError(f"{path}.{wrong} is {shown(elements[wrong])}; {_FORMS}", param=f"{path}.{wrong}")
