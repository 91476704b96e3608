"""TrafficMemory: the finished answers of the last hour, as a learner takes them. Knows no learner.

Which answers are held out follows from their prompts: all answers to one prompt are, or none is, in every round.
"""

import itertools
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from faser.engine.client.traffic.request_traffic import FinishedAnswer
from faser.engine.contract.messages import LearnableAnswer

WINDOW_S = 3600.0
_MOST_TOKENS = 1 << 18  # of prompts and answers; 10 MB as Python keeps them
_HELD_OUT_EVERY = 6  # prompts


class TrafficMemory:
    """window_s: how long an answer is kept. most_tokens: of all that are kept; older answers go first."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        most_tokens: int = _MOST_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s = window_s
        self._most_tokens = most_tokens
        self._clock = clock
        self._kept: deque[tuple[float, LearnableAnswer]] = deque()
        self._num_tokens = 0
        self._numbers = itertools.count()
        self._next_new = 0  # number of the first answer that no round has had

    def put(self, finished: FinishedAnswer) -> None:
        prompt = finished.request.prompt_token_ids
        answer = LearnableAnswer(
            number=next(self._numbers),
            prompt=prompt,
            answer=finished.token_ids,
            temperature=finished.request.sampling.temperature,
            held_out=is_held_out(prompt),
        )
        self._kept.append((self._clock(), answer))
        self._num_tokens += finished.num_tokens
        self.forget_old()

    def forget_old(self) -> None:
        """Drop what is older than the window, and the oldest of what is too much."""
        oldest_s = self._clock() - self._window_s
        while self._kept and (self._num_tokens > self._most_tokens or self._kept[0][0] <= oldest_s):
            _, answer = self._kept.popleft()
            self._num_tokens -= len(answer.prompt) + len(answer.answer)

    @property
    def new_tokens(self) -> int:
        """Tokens of answers to learn from that no round has had."""
        return learned_tokens([each for _, each in self._kept if each.number >= self._next_new])

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def begin_round(self) -> tuple[LearnableAnswer, ...]:
        """All answers that are kept; none of them is new any more."""
        self.forget_old()
        answers = tuple([each for _, each in self._kept])
        if answers:
            self._next_new = answers[-1].number + 1
        return answers


def is_held_out(prompt: Sequence[int]) -> bool:
    """Whether answers to this prompt measure heads, and no head ever learns from them."""
    return zlib.crc32(array("q", prompt).tobytes()) % _HELD_OUT_EVERY == 0


def learned_tokens(answers: Sequence[LearnableAnswer]) -> int:
    """Tokens of the answers that are not held out."""
    return sum([len(each.answer) for each in answers if not each.held_out])
