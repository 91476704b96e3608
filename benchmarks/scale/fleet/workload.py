"""Requests for a fleet: the Azure trace laid over itself until the rate is reached, cut into sessions.

The trace has lengths and no content, so what prompts share is made up: each copy of the trace has some sessions
open at a time, and each session begins with one of a few beginnings, which are not equally popular. A turn repeats
what its session has said and heard, as far as its own prompt is long enough. Knows neither replicas nor routers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OPEN_SESSIONS = 12  # of each copy
TURNS = 5  # of a session, in the mean
BEGINNINGS = 50
BEGINNING_TOKENS = 400


class FleetRequest(NamedTuple):
    """at_s: of arrival. shared_tokens: of the prompt, that an earlier turn of the session has; 0 in the first."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: int
    beginning: int
    shared_tokens: int


def fleet_requests(
    trace: Sequence[tuple[float, int, int]], *, rate: float, seconds: float, seed: int
) -> list[FleetRequest]:
    """trace: (seconds, prompt tokens, output tokens), ascending. rate: requests a second, in the trace's mean."""
    random = np.random.default_rng(seed)
    length_s = trace[-1][0] - trace[0][0]
    copies = max(math.ceil(rate * length_s / len(trace)), 1)
    stretch = copies * len(trace) / length_s / rate
    at_s = np.array([each[0] for each in trace])
    found: list[FleetRequest] = []
    popularity = 1 / np.arange(1, BEGINNINGS + 1)
    popularity /= popularity.sum()
    sessions = 0
    for _ in range(copies):
        moved = (at_s - random.uniform(0, length_s)) % length_s * stretch
        inside = np.flatnonzero(moved < seconds)
        chosen = inside[np.argsort(moved[inside])].tolist()
        draws = random.random((len(chosen), 2))
        beginnings = random.choice(BEGINNINGS, size=len(chosen) + OPEN_SESSIONS, p=popularity)
        # Of each open session: its number, its beginning, and the tokens said and heard so far.
        opened = [(sessions + number, int(beginnings[number]), 0) for number in range(OPEN_SESSIONS)]
        sessions += OPEN_SESSIONS
        for number, index in enumerate(chosen):
            _, prompt, output = trace[index]
            place = int(draws[number, 0] * OPEN_SESSIONS)
            session, beginning, said = opened[place]
            found.append(
                FleetRequest(float(moved[index]), prompt, output, session, beginning, min(said, prompt - 1))
            )
            opened[place] = (session, beginning, prompt + output)
            if draws[number, 1] < 1 / TURNS:
                opened[place] = (sessions, int(beginnings[OPEN_SESSIONS + number]), 0)
                sessions += 1
    return sorted(found)
