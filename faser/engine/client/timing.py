"""Timing: when what happened to one request, as the front-end saw it."""

from collections import Counter


class Timing:
    """Times of one request, in seconds of time.monotonic(), and what else its metrics count."""

    def __init__(self, *, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: dict[int, float] = {}
        self.num_tokens: Counter[int] = Counter()  # by sample
        self.num_preemptions: dict[int, int] = {}
        self.num_cached_tokens = 0  # of the prompt

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, of the slowest sample; None: no sample has two tokens."""
        first_s = self.first_token_s
        if first_s is None:
            return None
        means = [
            (self.last_token_s[index] - first_s) / (count - 1)
            for index, count in self.num_tokens.items()
            if count > 1
        ]
        return max(means, default=None)
