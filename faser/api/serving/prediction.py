"""OpenAI's predicted output: read from the body, and how much of it came true.

A prediction is text to draft from. It saves time where the answer repeats it, and never changes a token.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from faser.api.protocol.common import Prediction
from faser.api.serving.prompts import in_background
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError

_RUN = 3  # so many tokens in a row are no coincidence


async def read_prediction(given: Prediction | None, tokenizer: Tokenizer, *, limit: int) -> tuple[int, ...] | None:
    """Its token ids; None: the body has none. limit: of the context, in tokens: no answer is longer.

    Raises RequestError for a longer one.
    """
    if given is None:
        return None
    text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    _check_length(tokenizer.min_tokens(text), limit)
    token_ids = await in_background(len(text), lambda: tokenizer.encode(text, add_special_tokens=False))
    _check_length(len(token_ids), limit)
    return tuple(token_ids)


def _check_length(num_tokens: int, limit: int) -> None:
    if num_tokens > limit:
        raise RequestError(
            f"prediction has at least {num_tokens} tokens; it must not exceed the model's context, {limit} tokens",
            param="prediction",
        )


@dataclass(slots=True)
class _Answer:
    """recent: its last tokens. met: runs of the prediction that occurred in it; kept: where these lie there."""

    recent: tuple[int, ...] = ()
    met: set[tuple[int, ...]] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


class Fate:
    """How much of a prediction the answers have: its tokens that lie in a run of three which an answer has, too.

    It is a matter of texts alone: neither the drafter nor the load of the server is in the numbers. Every token
    of an answer costs the same.
    """

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._num_predicted = len(predicted)
        self._run = max(1, min(_RUN, len(predicted)))
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for first in range(len(predicted) - self._run + 1):
            self._places[predicted[first : first + self._run]].append(first)
        self._answers: defaultdict[Hashable, _Answer] = defaultdict(_Answer)

    def take(self, answer: Hashable, token_ids: Iterable[int]) -> None:
        """One of the answers goes on."""
        own = self._answers[answer]
        for token_id in token_ids:
            own.recent = (*own.recent, token_id)[-self._run :]
            if own.recent in self._places and own.recent not in own.met:
                own.met.add(own.recent)
                for first in self._places[own.recent]:
                    own.kept.update(range(first, first + self._run))

    @property
    def accepted(self) -> int:
        return sum(len(each.kept) for each in self._answers.values())

    @property
    def rejected(self) -> int:
        return len(self._answers) * self._num_predicted - self.accepted
