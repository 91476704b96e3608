"""The tokens a request used, counted while they come."""

from typing import Any

from faser.types import RequestOutput


class Usage:
    """num_prompt_tokens: of each prompt; a prompt counts once, however many samples it has.

    predicted: whether the request sent a prediction, whose fate is then reported.
    """

    def __init__(self, num_prompt_tokens: list[int], *, predicted: bool = False) -> None:
        self._prompt_tokens = sum(num_prompt_tokens)
        self._cached_tokens = [0] * len(num_prompt_tokens)
        self._completion_tokens = 0
        self._predicted = predicted

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        self._completion_tokens += sum(len(delta.token_ids) for delta in output.deltas)
        if output.num_cached_tokens:
            self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], output.num_cached_tokens)

    def as_json(self) -> dict[str, Any]:
        details = {"reasoning_tokens": 0}
        if self._predicted:  # no drafter reads it, so no token of it was drafted
            details |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
            "completion_tokens_details": details,
        }
