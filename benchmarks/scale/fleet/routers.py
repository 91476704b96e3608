"""Routers of a fleet: each knows what was reported to it, late, and what it has sent itself, at once.

in turn     one replica after the other
least       the one with the fewest requests, as last reported
two         the one with fewer requests of two that are drawn (power of two choices)
counted     the fewest, as last reported, but with its own requests as they are now
prefix      as counted, but for the replica that knows the longest beginning, while that one has at most
            `slack` requests and a quarter more than the least: the rule of faser/engine/client/replicas.py

A router is one of several that do not know of each other. What replicas' caches hold, a router of `prefix` knows
by what it has sent, or by events that come late. Knows requests, not how replicas work.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.fleet.replicas import Key, beginning_key
from benchmarks.scale.fleet.workload import FleetRequest

RULES = ("in turn", "least", "two", "counted", "prefix")
SLACK, SLACK_SHARE = 4, 0.25  # of faser/engine/client/replicas.py

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """rule: of RULES. report_s: between two reports of load, to all routers at once. routers: how many share the
    requests evenly. events_s: how late events of caches come; None: what was sent counts."""

    rule: str = "prefix"
    report_s: float = 0.05
    routers: int = 1
    events_s: float | None = None


class Router:
    def __init__(self, routing: Routing, count: int, seed: int) -> None:
        self._routing, self._count = routing, count
        self._random = np.random.default_rng(seed)
        self._own: Counts = np.zeros(count, dtype=np.int64)
        self._others: Counts = np.zeros(count, dtype=np.int64)  # as reported
        self._reported: Counts = np.zeros(count, dtype=np.int64)
        self._up = np.ones(count, dtype=bool)
        self._next = 0
        self._knowing: defaultdict[Key, dict[int, None]] = defaultdict(dict)
        self._late: list[tuple[float, int, int, Key, bool]] = []
        self._noted = 0

    def report(self, num_jobs: Counts, up: NDArray[np.bool_]) -> None:
        """Load and readiness of all replicas, as of now."""
        self._reported = num_jobs.copy()
        self._others = num_jobs - self._own
        self._up = up.copy()

    def choose(self, request: FleetRequest, now_s: float) -> int | None:
        """A replica that was up as of the last report and has refused nothing since. None: there is none."""
        rule = self._routing.rule
        if not self._up.any():
            return None
        if rule == "in turn":
            while not self._up[self._next % self._count]:
                self._next += 1
            found = self._next % self._count
            self._next += 1
            return found
        if rule == "two":
            ups = np.flatnonzero(self._up)
            pair = ups[self._random.integers(len(ups), size=2)]
            return int(pair[int(self._reported[pair[0]] > self._reported[pair[1]])])
        load = self._reported if rule == "least" else self._own + self._others
        masked = np.where(self._up, load, np.iinfo(np.int64).max)
        lowest = int(masked.min())
        if rule == "prefix":
            self._hear(now_s)
            best = self._best(request, masked)
            if best is not None and masked[best] <= lowest + SLACK + SLACK_SHARE * lowest:
                return best
        least = np.flatnonzero(masked == lowest)
        return int(least[self._random.integers(len(least))])  # a router that takes the first loads that one most

    def sent(self, request: FleetRequest, replica: int) -> None:
        self._own[replica] += 1
        if self._routing.events_s is None:
            self._note(replica, request.session, True)
            self._note(replica, beginning_key(request), True)

    def ended(self, replica: int) -> None:
        self._own[replica] -= 1

    def refused(self, replica: int) -> None:
        """It does not take requests, whatever was reported."""
        self._up[replica] = False

    def cached(self, replica: int, key: Key, held: bool, now_s: float) -> None:
        """An event of a cache."""
        if self._routing.events_s is not None:
            self._noted += 1
            heapq.heappush(self._late, (now_s + self._routing.events_s, self._noted, replica, key, held))

    def forget(self, replica: int) -> None:
        """It has lost its cache: it was started again."""
        for each in self._knowing.values():
            each.pop(replica, None)

    def _hear(self, now_s: float) -> None:
        while self._late and self._late[0][0] <= now_s:
            _, _, replica, key, held = heapq.heappop(self._late)
            self._note(replica, key, held)

    def _note(self, replica: int, key: Key, held: bool) -> None:
        if held:
            self._knowing[key][replica] = None
        else:
            self._knowing[key].pop(replica, None)

    def _best(self, request: FleetRequest, load: Counts) -> int | None:
        """The least busy of the replicas that know the session; else of those that know its beginning."""
        for key in (
            (request.session, beginning_key(request)) if request.shared_tokens else (beginning_key(request),)
        ):
            if knowing := self._knowing.get(key):
                known: Sequence[int] = list(knowing)
                return known[int(np.argmin(load[known]))]
        return None
