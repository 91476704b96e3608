"""Who asks what and when: a stretch of a real trace of arrivals, brought to a rate that this machine can bear.

Owns the choice of stretches and the change of their pace. All times of a stretch are multiplied by one factor, so
bursts and lulls stay what they are relative to each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser.errors import ConfigError

Trace = Sequence[tuple[float, int, int]]  # seconds, prompt tokens, output tokens; ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. at_s: seconds since the start. seed: of its sampling; in greedy runs without a meaning."""

    at_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """asks: ascending in time. pace: how many times as fast as in the trace they come; below 1 is slower."""

    asks: tuple[Ask, ...]
    pace: float

    @property
    def output_tokens(self) -> int:
        return sum(ask.output_tokens for ask in self.asks)


def requests_of(trace: Trace, *, tokens_per_s: float, seconds: float, max_tokens: int) -> int:
    """How many requests, at least 1, bring so many output tokens a second, by the trace's mean length."""
    return max(round(tokens_per_s * seconds / mean_length(trace, max_tokens)), 1)


def mean_length(trace: Trace, max_tokens: int) -> float:
    """Mean number of output tokens, none above max_tokens."""
    return float(np.mean([min(output, max_tokens) for _, _, output in trace]))


def stretch(
    trace: Trace,
    prompts: Sequence[tuple[int, ...]],
    *,
    first: int,
    count: int,
    seconds: float,
    max_tokens: int,
) -> Stretch:
    """count requests of the trace from number `first` on, all of which come within `seconds`, the first at 0.

    The pace is set by when the request behind the last one came. Prompts are taken in turn from number `first` on.
    Raises ConfigError where the trace is too short, or has no time in it there.
    """
    if first + count >= len(trace):
        raise ConfigError(
            f"{count} requests from number {first} on and the one behind; the trace has {len(trace)}"
        )
    began_s, ended_s = trace[first][0], trace[first + count][0]
    if ended_s <= began_s:
        raise ConfigError(f"requests {first} to {first + count} of the trace came at the same time")
    pace = (ended_s - began_s) / seconds
    asks = tuple(
        Ask(
            at_s=(at_s - began_s) / pace,
            prompt_token_ids=prompts[number % len(prompts)],
            output_tokens=max(min(output, max_tokens), 1),
            seed=number,
        )
        for number, (at_s, _, output) in enumerate(trace[first : first + count], start=first)
    )
    return Stretch(asks=asks, pace=pace)


def firsts(trace: Trace, repeats: int, count: int) -> list[int]:
    """Where the stretches of the repeats begin: spread evenly over the trace."""
    last = len(trace) - count - 1
    if last < 0:
        raise ConfigError(f"{count} requests and the one behind are wanted; the trace has {len(trace)}")
    return [last * repeat // max(repeats - 1, 1) for repeat in range(repeats)]
