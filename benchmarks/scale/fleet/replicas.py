"""Replicas of a fleet: what each has to do, how far it gets in a tick, and what its prefix cache holds.

A step takes what a measured table says for its rows: one for each sequence that decodes, and the prompt tokens
that fit beside them, first come, first served. Within a tick a replica makes as many steps, whole or not, as there
is time for. So nothing is computed and nothing is scheduled exactly; check.py holds it against the real scheduler.
Preemption and the memory of running requests are left out. Knows no router.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.fleet.workload import BEGINNING_TOKENS, FleetRequest
from faser.engine.contract.step_times import CostTable

Floats = NDArray[np.float64]
CACHE_TOKENS = 600_000  # some 80 GB of an 8B's keys and values in 16 bits
Key = int  # of a session; of a beginning: below 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """costs: seconds of a step by its rows. cache_tokens: that the prefix cache holds beside running requests."""

    costs: CostTable
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    cache_tokens: int = CACHE_TOKENS


@dataclass(slots=True)
class Job:
    """A request on a replica. prefill: prompt tokens still to compute. slot: where it decodes; None: not yet."""

    request: FleetRequest
    router: int = 0
    prefill: float = 0.0
    reused: int = 0
    slot: int | None = None
    first_s: float | None = None
    sent_s: float = 0.0


class PrefixCache:
    """Least recently used sessions and beginnings, with their tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._most, self._held = most_tokens, 0
        self._tokens: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._tokens

    def reusable(self, request: FleetRequest) -> int:
        """Tokens of the prompt that it holds. Whole blocks of 16."""
        found = 0
        for key, tokens in ((beginning_key(request), BEGINNING_TOKENS), (request.session, request.shared_tokens)):
            if key in self._tokens:
                self._tokens.move_to_end(key)
                found = max(found, min(tokens, self._tokens[key], request.prompt_tokens - 1))
        return found // 16 * 16

    def keep(self, request: FleetRequest) -> Iterator[tuple[Key, bool]]:
        """A prompt and its answer, which have been computed. Gives what it holds now (True), and no longer."""
        whole = request.prompt_tokens + request.output_tokens
        for key, tokens in ((beginning_key(request), BEGINNING_TOKENS), (request.session, whole)):
            self._held += tokens - self._tokens.pop(key, 0)
            self._tokens[key] = tokens
            yield key, True
        while self._held > self._most:
            key, tokens = self._tokens.popitem(last=False)
            self._held -= tokens
            yield key, False


def beginning_key(request: FleetRequest) -> Key:
    return -1 - request.beginning


@dataclass(slots=True)
class Ticked:
    """Events of a tick: jobs that ended, and changes of caches (replica, key, whether it is held now)."""

    ended: list[tuple[int, Job]] = field(default_factory=list)
    cached: list[tuple[int, Key, bool]] = field(default_factory=list)


class Fleet:
    """num_jobs: [R] jobs of each replica. up: [R] whether it takes requests."""

    def __init__(self, count: int, model: ReplicaModel) -> None:
        self.count, self._model = count, model
        self.num_jobs = np.zeros(count, dtype=np.int64)
        self.up = np.ones(count, dtype=bool)
        self._waiting: list[deque[Job]] = [deque() for _ in range(count)]
        self._prefilling: list[deque[Job]] = [deque() for _ in range(count)]
        self._decoding: list[dict[int, Job]] = [{} for _ in range(count)]
        self._free = [list(range(model.max_num_seqs)) for _ in range(count)]
        self._left = np.zeros((count, model.max_num_seqs), dtype=np.float32)  # tokens to decode
        self._caches = [PrefixCache(model.cache_tokens) for _ in range(count)]
        self._step_s = model.costs.dense(model.max_num_batched_tokens)
        self._num_decoding = np.zeros(count, dtype=np.int64)
        self._prompt_tokens = np.zeros(count)  # that wait to be computed, of admitted jobs
        self._to_admit: set[int] = set()  # replicas where a job came, or a slot became free
        self._with_prompts: set[int] = set()

    def submit(self, replica: int, job: Job) -> None:
        self.num_jobs[replica] += 1
        self._waiting[replica].append(job)
        self._to_admit.add(replica)

    def advance(self, now_s: float, tick_s: float) -> Ticked:
        """Everything that the replicas do between now_s and now_s + tick_s. Ends are at the end of it."""
        found = Ticked()
        for replica in sorted(self._to_admit):
            self._admit(replica)
        self._to_admit.clear()
        chunk, steps = self._steps(tick_s)
        busy = self._left > 0
        for replica in sorted(self._with_prompts):
            self._prefill(replica, float(chunk[replica] * steps[replica]), now_s + tick_s, found)
        self._left -= steps[:, None].astype(np.float32) * busy
        for replica, slot in np.argwhere(busy & (self._left <= 0)).tolist():
            job = self._decoding[replica].pop(slot)
            self._leave(replica, slot)
            found.ended.append((replica, job))
            found.cached += [(replica, key, held) for key, held in self._caches[replica].keep(job.request)]
        return found

    def lose(self, replica: int) -> tuple[list[Job], list[Job]]:
        """Everything it had to do, and its cache. Jobs without and with a first token."""
        unbegun = [*self._waiting[replica], *self._prefilling[replica]]
        begun = list(self._decoding[replica].values())
        self._waiting[replica].clear()
        self._prefilling[replica].clear()
        self._decoding[replica].clear()
        self._free[replica] = list(range(self._model.max_num_seqs))
        self._left[replica] = 0
        self.num_jobs[replica] = self._num_decoding[replica] = 0
        self._prompt_tokens[replica] = 0
        self._with_prompts.discard(replica)
        self._caches[replica] = PrefixCache(self._model.cache_tokens)
        return unbegun, begun

    def _admit(self, replica: int) -> None:
        waiting, free = self._waiting[replica], self._free[replica]
        while waiting and free:
            job = waiting.popleft()
            job.slot = free.pop()
            job.reused = self._caches[replica].reusable(job.request)
            job.prefill = job.request.prompt_tokens - job.reused
            self._prefilling[replica].append(job)
            self._prompt_tokens[replica] += job.prefill
            self._with_prompts.add(replica)

    def _steps(self, tick_s: float) -> tuple[Floats, Floats]:
        """Return prompt tokens of a step [R], and steps in the tick [R]; 0 where a replica has nothing to do."""
        room = self._model.max_num_batched_tokens - self._num_decoding
        chunk = np.minimum(np.ceil(self._prompt_tokens), room)
        rows = self._num_decoding + chunk.astype(np.int64)
        return chunk, np.divide(tick_s, self._step_s[rows], out=np.zeros(self.count), where=rows > 0)

    def _prefill(self, replica: int, tokens: float, end_s: float, found: Ticked) -> None:
        """Compute this number of prompt tokens. A prompt that is done decodes from the next tick on."""
        jobs = self._prefilling[replica]
        while jobs and tokens > 0:
            done = min(jobs[0].prefill, tokens)
            jobs[0].prefill -= done
            tokens -= done
            self._prompt_tokens[replica] -= done
            if jobs[0].prefill > 0:
                return
            job = jobs.popleft()
            job.first_s = end_s
            assert job.slot is not None
            if job.request.output_tokens < 2:
                self._num_decoding[replica] += 1
                self._leave(replica, job.slot)
                found.ended.append((replica, job))
                continue
            self._decoding[replica][job.slot] = job
            self._num_decoding[replica] += 1
            self._left[replica, job.slot] = job.request.output_tokens - 1
        if not jobs:
            self._with_prompts.discard(replica)
            self._prompt_tokens[replica] = 0.0  # what rounding has left

    def _leave(self, replica: int, slot: int) -> None:
        self._left[replica, slot] = 0
        self._free[replica].append(slot)
        self._num_decoding[replica] -= 1
        self.num_jobs[replica] -= 1
        self._to_admit.add(replica)
