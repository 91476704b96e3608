"""Simulation: requests come, routers choose, replicas work, fail and are replaced, in ticks of a simulated clock.

Owns the loop and what is counted. In a tick: reports, failures, arrivals, work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.scale.fleet.replicas import Fleet, Job, ReplicaModel
from benchmarks.scale.fleet.routers import Router, Routing
from benchmarks.scale.fleet.workload import FleetRequest

TICK_S = 0.01
_SAMPLE_S = 0.25  # between two looks at how evenly work lies


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Every replica is replaced, `at_once` at a time: it ends its requests, for drain_s at most, and loads."""

    at_once: int
    load_s: float
    begins_s: float = 0.0
    drain_s: float = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """seconds: in which requests arrive. warm_s: the first ones do not count. failures: when one replica, drawn,
    is lost with all that it does; it is back after load_s."""

    replicas: int
    model: ReplicaModel
    routing: Routing
    seconds: float
    warm_s: float = 0.0
    failures: tuple[float, ...] = ()
    load_s: float = 60.0
    rollout: Rollout | None = None
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Outcome of the requests that arrived after warm_s. first_s, total_s: since arrival. broken: had begun on a
    replica that was lost. moved: went to another replica before their first token. refused: by a replica that
    was not up. unserved: no replica was up. rolled_s: what a rollout took.

    At each look: fullest, jobs of the busiest replica; mean, of all; idle_beside_queue, the share of replicas
    without work while others queue.
    """

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    broken: int = 0
    moved: int = 0
    refused: int = 0
    unserved: int = 0
    rolled_s: float | None = None
    fullest: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    idle_beside_queue: list[float] = field(default_factory=list)
    cache_changes: int = 0

    def report(self) -> dict[str, Any]:
        def at(values: Sequence[float], share: float) -> float:
            return round(float(np.quantile(values, share)), 4)

        return {
            "requests": len(self.total_s),
            "first token s": {"median": at(self.first_s, 0.5), "p99": at(self.first_s, 0.99)},
            "whole answer s": {"median": at(self.total_s, 0.5), "p99": at(self.total_s, 0.99)},
            "prompt tokens reused": round(self.reused_tokens / self.prompt_tokens, 4),
            "busiest replica over mean": round(float(np.mean(self.fullest)) / float(np.mean(self.mean)), 2),
            "idle replicas while others queue": round(float(np.mean(self.idle_beside_queue)), 4),
            "streams broken": self.broken,
            "moved before the first token": self.moved,
            "refused and sent again": self.refused,
            "found no replica": self.unserved,
            **({} if self.rolled_s is None else {"rollout s": round(self.rolled_s, 1)}),
        }


class Simulation:
    """One scenario, from empty replicas until every request has ended. An instance serves one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.fleet = Fleet(scenario.replicas, scenario.model)
        routing = scenario.routing
        self._routers = [Router(routing, scenario.replicas, seed) for seed in range(routing.routers)]
        self._random = np.random.default_rng(scenario.seed)
        self._failures = list(scenario.failures)
        self._loading: list[tuple[float, int]] = []  # when a replica is back
        self._draining: dict[int, float] = {}  # until when
        self._to_replace = list(range(scenario.replicas)) if scenario.rollout else []
        self._outcome = Outcome()

    def run(self, requests: Sequence[FleetRequest]) -> Outcome:
        """requests: ascending in time."""
        scenario, outcome, fleet = self._scenario, self._outcome, self.fleet
        came, tick, next_report_s, next_look_s = 0, 0, 0.0, scenario.warm_s
        while came < len(requests) or fleet.num_jobs.any() or self._changing():
            now_s = tick * TICK_S
            if now_s >= next_report_s:
                next_report_s += scenario.routing.report_s
                for router in self._routers:
                    router.report(fleet.num_jobs, fleet.up)
            self._fail(now_s)
            self._replace(now_s)
            while came < len(requests) and requests[came].at_s <= now_s:
                request = requests[came]
                self._send(Job(request, router=came % len(self._routers), sent_s=request.at_s), now_s)
                came += 1
            done = fleet.advance(now_s, TICK_S)
            for replica, job in done.ended:
                self._routers[job.router].ended(replica)
                self._count(job, now_s + TICK_S)
            outcome.cache_changes += len(done.cached)
            if scenario.routing.events_s is not None:
                for replica, key, held in done.cached:
                    for router in self._routers:
                        router.cached(replica, key, held, now_s)
            if next_look_s <= now_s < scenario.seconds:
                next_look_s += _SAMPLE_S
                self._look()
            tick += 1
        return outcome

    def _send(self, job: Job, now_s: float) -> None:
        """A replica that is away refuses at once, and the router asks another one."""
        router = self._routers[job.router]
        while (replica := router.choose(job.request, now_s)) is not None:
            if self.fleet.up[replica]:
                router.sent(job.request, replica)
                self.fleet.submit(replica, job)
                return
            self._outcome.refused += 1
            router.refused(replica)
        self._outcome.unserved += 1

    def _count(self, job: Job, now_s: float) -> None:
        if job.sent_s < self._scenario.warm_s:
            return
        assert job.first_s is not None
        outcome = self._outcome
        outcome.first_s.append(job.first_s - job.sent_s)
        outcome.total_s.append(now_s - job.sent_s)
        outcome.prompt_tokens += job.request.prompt_tokens
        outcome.reused_tokens += job.reused

    def _look(self) -> None:
        jobs = self.fleet.num_jobs[self.fleet.up] if self.fleet.up.any() else self.fleet.num_jobs
        self._outcome.fullest.append(int(jobs.max()))
        self._outcome.mean.append(float(jobs.mean()))
        queueing = bool((jobs > self._scenario.model.max_num_seqs).any())
        self._outcome.idle_beside_queue.append(float((jobs == 0).mean()) if queueing else 0.0)

    def _changing(self) -> bool:
        return bool(self._loading or self._draining or self._to_replace)

    def _fail(self, now_s: float) -> None:
        while self._failures and self._failures[0] <= now_s:
            self._failures.pop(0)
            running = np.flatnonzero(self.fleet.up)
            self._end(int(running[self._random.integers(len(running))]), now_s, self._scenario.load_s)
        for back_s, replica in list(self._loading):
            if back_s <= now_s:
                self._loading.remove((back_s, replica))
                self.fleet.up[replica] = True

    def _replace(self, now_s: float) -> None:
        rollout = self._scenario.rollout
        if rollout is None or now_s < rollout.begins_s:
            return
        for replica, until_s in list(self._draining.items()):
            if not self.fleet.num_jobs[replica] or now_s >= until_s:
                del self._draining[replica]
                self._end(replica, now_s, rollout.load_s)
        while self._to_replace and len(self._draining) + len(self._loading) < rollout.at_once:
            replica = self._to_replace.pop()
            self.fleet.up[replica] = False
            self._draining[replica] = now_s + rollout.drain_s
        if not self._changing() and self._outcome.rolled_s is None:
            self._outcome.rolled_s = now_s - rollout.begins_s

    def _end(self, replica: int, now_s: float, load_s: float) -> None:
        """Its process ends. What had begun is broken; the rest goes elsewhere."""
        self.fleet.up[replica] = False
        unbegun, begun = self.fleet.lose(replica)
        self._loading.append((now_s + load_s, replica))
        self._outcome.broken += len(begun)
        self._outcome.moved += len(unbegun)
        for job in begun + unbegun:
            self._routers[job.router].ended(replica)
        for router in self._routers:
            router.forget(replica)
        for job in unbegun:
            self._send(Job(job.request, router=job.router, sent_s=job.sent_s), now_s)
