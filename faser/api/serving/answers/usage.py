"""Usage: counts the tokens of a request while its outputs arrive."""

from collections.abc import Callable
from typing import Any

from faser.api.serving.answers.prediction import PredictionUsage
from faser.types import OutputDelta


class Usage:
    """num_prompt_tokens: per prompt; a prompt counts once, whatever its number of samples.

    predicted: token ids of the request's prediction; None: it has none, and the usage does not mention one.
    shares_cache: of the requests; the cached tokens would tell what other clients' prompts were, so they are null.
    on_tokens: is called with the number of tokens whenever some are counted.
    """

    def __init__(
        self,
        num_prompt_tokens: list[int],
        *,
        predicted: tuple[int, ...] | None = None,
        shares_cache: bool = False,
        on_tokens: Callable[[int], None],
    ) -> None:
        self._shares_cache = shares_cache
        self._prompt_tokens = sum(num_prompt_tokens)
        self._cached_tokens = [0] * len(num_prompt_tokens)
        self._completion_tokens = 0
        self._reasoning_tokens: dict[int, int] = {}
        self._prediction = None if predicted is None else PredictionUsage(predicted)
        self._on_tokens = on_tokens

    def count_prompts(self) -> None:
        """The engine has accepted the prompts; as_json counts them in any case."""
        self._on_tokens(self._prompt_tokens)

    def count_cached(self, prompt_index: int, num_tokens: int) -> None:
        self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], num_tokens)

    def count(self, choice_index: int, delta: OutputDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._on_tokens(len(delta.token_ids))
        if self._prediction is not None:
            self._prediction.take(choice_index, delta.token_ids)

    def count_reasoning(self, choice_index: int, num_tokens: int) -> None:
        """num_tokens: of the choice's reasoning so far; they are among its completion tokens."""
        self._reasoning_tokens[choice_index] = num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def num_completion_tokens(self) -> int:
        return self._completion_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, whether or not the client is told."""
        return sum(self._cached_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(self._reasoning_tokens.values())

    def as_json(self) -> dict[str, Any]:
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        cached = None if self._shares_cache else {"cached_tokens": self.num_cached_tokens}
        if self._prediction is not None:
            details["accepted_prediction_tokens"] = self._prediction.accepted
            details["rejected_prediction_tokens"] = self._prediction.rejected
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": cached,
            "completion_tokens_details": details,
        }
