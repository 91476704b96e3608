"""WaitingQueue: the sequences that wait to run, and which of them is admitted next.

Priorities come first. Within a priority, preempted sequences return before any newcomer, by their keys; then the
tenant with the least service comes, and of its sequences the one that is due first (earliest deadline first; those
without a target by their arrival and some patience, so that none of them waits for ever). So how long a tenant
waits depends on how many others wait, not on how much each of them has sent.

Source: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models", arXiv:2401.00588,
algorithm 2. Its virtual counter is Tenant.service here, its client a tenant. A tenant that begins to wait has its
service raised to the least among those that wait already, so that idle tenants save up no turns. Beyond the
paper: priorities; cached prompt tokens, which count nothing; a tenant is forgotten DEBT_KEPT_S after its last
sequence has ended, so that a tenant that pauses between its requests owes what it was given before.

Finding the next sequence takes O(log n) for n waiting tenants; tokens are counted without touching the queue.
Where only some sequences may start, it takes O(n log n), however many sequences the tenants have: of those of one
kind the first one speaks for all.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, pairwise

from faser.engine.control.clock import Clock
from faser.engine.control.sequence import PriorityKey, Sequence, Tenant

DEBT_KEPT_S = 60.0  # how long a tenant without sequences is remembered
_MOST_IDLE = 10_000  # tenants without sequences; the one that has been idle for longest goes first
_MOST_AT_ONCE = 8  # are forgotten when a tenant comes or goes

KindOf = Callable[[Sequence], Hashable]
Turn = tuple[int, PriorityKey]  # a tenant's service, and the key of its first sequence: smaller comes sooner


class WaitingQueue:
    """Owns the tenants and their order. Sequences enter and leave; the scheduler counts their tokens.

    kind_of: see first_of; never changes for a sequence.
    """

    def __init__(self, clock: Clock, kind_of: KindOf = lambda _sequence: None) -> None:
        self._clock, self._kind_of = clock, kind_of
        self._tenants: dict[str, Tenant] = {}
        self._idle_since_s: dict[str, float] = {}  # of tenants without sequences, the longest idle first
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self._priorities: list[int] = []  # of the levels, best first
        self._last_admitted = Tenant("")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (each for level in self._levels.values() for each in level)

    def join(self, name: str, num_sequences: int) -> Tenant:
        """The tenant of a request that has just been accepted, with num_sequences sequences."""
        self._forget_idle()
        self._idle_since_s.pop(name, None)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        tenant.num_sequences += num_sequences
        return tenant

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended; it is not in the queue."""
        tenant = sequence.tenant
        tenant.num_sequences -= 1
        if not tenant.num_sequences:
            self._idle_since_s[tenant.name] = self._clock.now()
            self._forget_idle()

    def add(self, sequence: Sequence) -> None:
        """A newcomer, or a sequence that was preempted."""
        priority = sequence.priority_key[0]
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._kind_of)
            insort(self._priorities, priority)
        level.add(sequence, self._last_admitted.service)
        self._count += 1

    def first(self) -> Sequence:
        """The sequence to admit next. The queue is not empty."""
        return self._levels[self._priorities[0]].first()

    def first_of(self, may_start: Callable[[Sequence], bool]) -> Sequence | None:
        """The first one, in the same order, of those that may start; None: none of them may.

        may_start: says no to all of a tenant's sequences of a kind if it does to the first one of them.
        """
        in_order = (each for priority in self._priorities for each in self._levels[priority].in_order())
        return next(filter(may_start, in_order), None)

    def admit(self, sequence: Sequence, *, num_uncached: int) -> None:
        """Remove a sequence that starts to run. num_uncached: its known tokens that must be computed.

        A preempted sequence has been counted already: it was not its tenant's wish to compute it again.
        """
        if not _has_run(sequence):
            sequence.tenant.prefilled(num_uncached)
            self._last_admitted = sequence.tenant
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.priority_key[0]
        level = self._levels[priority]
        level.remove(sequence)
        self._count -= 1
        if level.is_empty:
            del self._levels[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _forget_idle(self) -> None:
        """Forget the tenants whose debt has been kept for long enough."""
        oldest_s = self._clock.now() - DEBT_KEPT_S
        for name, since_s in list(islice(self._idle_since_s.items(), _MOST_AT_ONCE)):
            if since_s > oldest_s and len(self._idle_since_s) <= _MOST_IDLE:
                return
            del self._idle_since_s[name], self._tenants[name]

    def check_invariants(self) -> None:
        """AssertionError where two records disagree. Slow: for tests."""
        assert self._priorities == sorted(self._levels)
        assert self._count == sum(1 for _ in self)
        for priority, level in self._levels.items():
            assert not level.is_empty
            level.check_invariants()
            assert all(each.priority_key[0] == priority for each in level)
        idle = {name for name, tenant in self._tenants.items() if not tenant.num_sequences}
        assert idle == set(self._idle_since_s)
        assert all(self._tenants[each.tenant.name] is each.tenant for each in self)


class _Level:
    """The sequences of one priority.

    The heap has one live entry for each line, which is at most its turn: service only grows, so a turn is computed
    again when its entry comes to the top. Entries that are no longer their line's are dropped there.
    """

    def __init__(self, kind_of: KindOf) -> None:
        self._kind_of = kind_of
        self._preempted: list[Sequence] = []  # in the order of their keys
        self._lines: dict[Tenant, _Line] = {}  # none is empty
        self._turns: list[tuple[Turn, _Line]] = []  # a heap

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for line in self._lines.values():
            yield from line

    @property
    def is_empty(self) -> bool:
        return not self._preempted and not self._lines

    def first(self) -> Sequence:
        return self._preempted[0] if self._preempted else self._next_line().first()

    def in_order(self) -> Iterator[Sequence]:
        """The preempted ones, then the first ones of each kind, in the order of the tenants' turns."""
        yield from self._preempted
        for line in sorted(self._lines.values(), key=lambda each: each.turn):
            yield from line.firsts()

    def add(self, sequence: Sequence, least_service: int) -> None:
        """least_service: to which its tenant's is raised if no other tenant waits."""
        if _has_run(sequence):
            insort(self._preempted, sequence, key=_priority_key)
            return
        tenant = sequence.tenant
        line = self._lines.get(tenant)
        if line is None:
            least = self._next_line().tenant.service if self._lines else least_service
            tenant.service = max(tenant.service, least)
            line = self._lines[tenant] = _Line(tenant, self._kind_of)
        line.add(sequence)
        if line.entry is None or line.turn < line.entry:
            self._enter(line)

    def remove(self, sequence: Sequence) -> None:
        if _has_run(sequence):
            _discard(self._preempted, sequence)
            return
        line = self._lines[sequence.tenant]
        line.remove(sequence)
        if line.is_empty:
            line.entry = None
            del self._lines[sequence.tenant]

    def check_invariants(self) -> None:
        assert all(a.priority_key < b.priority_key for a, b in pairwise(self._preempted))
        for tenant, line in self._lines.items():
            assert not line.is_empty
            line.check_invariants()
            assert line.entry is not None
            assert line.entry <= line.turn
            assert (line.entry, line) in self._turns
            assert all(each.tenant is tenant for each in line)

    def _next_line(self) -> "_Line":
        """The line of the tenant with the least service."""
        while True:
            entry, line = self._turns[0]
            if entry != line.entry:
                heappop(self._turns)
            elif entry == (turn := line.turn):
                return line
            else:
                line.entry = turn
                heapreplace(self._turns, (turn, line))

    def _enter(self, line: "_Line") -> None:
        line.entry = line.turn
        heappush(self._turns, (line.entry, line))
        if len(self._turns) > 2 * len(self._lines) + _SPARE_TURNS:
            self._turns = [(each.entry, each) for each in self._lines.values() if each.entry is not None]
            heapify(self._turns)


class _Line:
    """A tenant's newcomers of one priority, each kind in the order of their keys. entry: its own in the heap."""

    def __init__(self, tenant: Tenant, kind_of: KindOf) -> None:
        self.tenant = tenant
        self.entry: Turn | None = None
        self._kind_of = kind_of
        self._kinds: dict[Hashable, list[Sequence]] = {}  # none is empty

    def __iter__(self) -> Iterator[Sequence]:
        for ordered in self._kinds.values():
            yield from ordered

    @property
    def is_empty(self) -> bool:
        return not self._kinds

    @property
    def turn(self) -> Turn:
        return self.tenant.service, self.first().priority_key

    def first(self) -> Sequence:
        return min([ordered[0] for ordered in self._kinds.values()], key=_priority_key)

    def firsts(self) -> list[Sequence]:
        """The first one of each kind, in the order of their keys."""
        return sorted([ordered[0] for ordered in self._kinds.values()], key=_priority_key)

    def add(self, sequence: Sequence) -> None:
        insort(self._kinds.setdefault(self._kind_of(sequence), []), sequence, key=_priority_key)

    def remove(self, sequence: Sequence) -> None:
        kind = self._kind_of(sequence)
        _discard(self._kinds[kind], sequence)
        if not self._kinds[kind]:
            del self._kinds[kind]

    def check_invariants(self) -> None:
        for kind, ordered in self._kinds.items():
            assert ordered
            assert all(a.priority_key < b.priority_key for a, b in pairwise(ordered))
            assert all(self._kind_of(each) == kind for each in ordered)


_SPARE_TURNS = 8  # entries that are no line's, before the heap is made anew


def _discard(ordered: list[Sequence], sequence: Sequence) -> None:
    at = bisect_left(ordered, sequence.priority_key, key=_priority_key)
    assert ordered[at] is sequence
    del ordered[at]


def _has_run(sequence: Sequence) -> bool:
    return sequence.first_scheduled_s is not None


def _priority_key(sequence: Sequence) -> PriorityKey:
    return sequence.priority_key
