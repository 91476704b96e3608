"""OpenAI's predicted outputs: reads the prediction of a body, and counts how much of it the answers repeat.

A prediction is text to draft from. It saves time if the answer repeats it, and never changes a token.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from faser.api.protocol.common import Prediction
from faser.api.serving.requests.prompts import encode, excess
from faser.api.serving.requests.text_worker import TextWorker
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError

_RUN = 3  # shorter runs of equal tokens are taken for coincidence


async def read_prediction(
    given: Prediction | None, tokenizer: Tokenizer, worker: TextWorker, *, limit: int
) -> tuple[int, ...] | None:
    """Token ids of the prediction; None: the body has none. limit: the context length, in tokens.

    Raises RequestError for a prediction longer than the limit, as no answer can be.
    """
    if given is None:
        return None
    text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    return await worker.run(len(text), lambda: _tokenize(text, tokenizer, limit))


def _tokenize(text: str, tokenizer: Tokenizer, limit: int) -> tuple[int, ...]:
    size = excess(text, tokenizer, limit)
    if size is None:
        token_ids = encode(text, tokenizer, field="prediction", add_special_tokens=False)
        if len(token_ids) <= limit:
            return tuple(token_ids)
        size = f"{len(token_ids)} tokens"
    raise RequestError(
        f"prediction has {size}; it must not exceed the model's context, {limit} tokens", param="prediction"
    )


@dataclass(slots=True)
class _Answer:
    """One answer so far.

    recent: its last tokens, at most a run. matched: runs of the prediction that occur in it.
    accepted: indices in the prediction of the tokens in these runs.
    """

    recent: tuple[int, ...] = ()
    matched: set[tuple[int, ...]] = field(default_factory=set)
    accepted: set[int] = field(default_factory=set)


class PredictionUsage:
    """Counts accepted and rejected prediction tokens, for the usage of an answer.

    A predicted token is accepted if it lies in a run of three predicted tokens that occurs in the answer. Only
    the texts decide: the numbers depend neither on the drafter nor on the load of the server. Each token of an
    answer costs the same time.
    """

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._num_predicted = len(predicted)
        self._run = max(1, min(_RUN, len(predicted)))
        self._starts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for start in range(len(predicted) - self._run + 1):
            self._starts[predicted[start : start + self._run]].append(start)
        self._answers: defaultdict[Hashable, _Answer] = defaultdict(_Answer)

    def take(self, answer_key: Hashable, token_ids: Iterable[int]) -> None:
        """Add the next tokens of one answer."""
        answer = self._answers[answer_key]
        for token_id in token_ids:
            answer.recent = (*answer.recent, token_id)[-self._run :]
            if answer.recent in self._starts and answer.recent not in answer.matched:
                answer.matched.add(answer.recent)
                for start in self._starts[answer.recent]:
                    answer.accepted.update(range(start, start + self._run))

    @property
    def accepted(self) -> int:
        return sum(len(each.accepted) for each in self._answers.values())

    @property
    def rejected(self) -> int:
        return len(self._answers) * self._num_predicted - self.accepted
