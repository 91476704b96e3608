"""AdapterSlots: which adapter is in which slot of the data plane, and which waiting sequences can have theirs.

A step computes with the adapters in a few slots. A running sequence holds its adapter's slot; a slot that no
sequence holds keeps its adapter until another one needs the room, least recently used first. A waiting sequence
whose adapter has no slot now is passed over, and keeps its place. After it has been overtaken often enough by
sequences with other adapters, one slot admits no more of them, and is its own as soon as the last one has ended.
Knows digests and counts, never weights; which adapters are in memory is AdapterLoads' business.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from faser.engine.contract.plan import AdapterPlacement
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.step_builder import StepsInFlight
from faser.errors import RequestError
from faser.types.request import Request

# Sequences with other adapters that may start before one that waits for a slot. Reasoned, and varied in no filed
# run.
MOST_OVERTAKING = 16

NO_ADAPTERS = "this engine serves no adapters; start it with --enable-lora"

MayStart = Callable[[Sequence], bool]


class NoAdapters:
    """Stands in for AdapterSlots in an engine without adapters."""

    def check(self, request: Request) -> None:
        """Raises RequestError for a request with an adapter."""
        if request.adapter is not None:
            raise RequestError(NO_ADAPTERS, param="model")

    def startable(self, among: MayStart | None, _: StepsInFlight) -> MayStart | None:
        return among

    def start(self, *_: object) -> tuple[AdapterPlacement, ...]:
        return ()

    def names(self, _: Iterable[Sequence]) -> tuple[str, ...]:
        return ()

    def nothing(self, *_: object) -> None:
        """There is no slot to leave."""

    leave = forget = check_invariants = nothing


class AdapterSlots:
    """num_slots: of the data plane."""

    def __init__(self, num_slots: int) -> None:
        self._digests: list[str | None] = [None] * num_slots  # of the adapter in each slot
        self._slot_of: dict[str, int] = {}
        self._holders = [0] * num_slots  # running sequences
        self._idle = OrderedDict.fromkeys(range(num_slots))  # slots without any, least recently used first
        self._passed: Sequence | None = None  # the sequence that has waited longest for a slot, which
        self._num_overtaken = 0  # sequences with other adapters have overtaken
        self._draining: int | None = None  # the slot that will be its own

    def check(self, request: Request) -> None:
        """Every adapter that is loaded can have a slot."""

    def startable(self, among: MayStart | None, in_flight: StepsInFlight) -> MayStart | None:
        """Return a test for waiting sequences: whether one may start, as far as `among` and its adapter allow.

        None: all may. The test notes the first sequence that it denies for its adapter.
        """
        if self._passed is not None and self._passed.status is not Status.WAITING:
            self._settle()
        if self._draining is None and self._free(in_flight) is not None:
            return among

        def may_start(sequence: Sequence) -> bool:
            if among is not None and not among(sequence):
                return False
            if sequence.request.adapter is None or self._slot(sequence, in_flight) is not None:
                return True
            self._passed = self._passed or sequence
            return False

        return may_start

    def start(self, sequence: Sequence, in_flight: StepsInFlight) -> tuple[AdapterPlacement, ...]:
        """Give a sequence that may start its adapter's slot; return what the plan puts there."""
        adapter = sequence.request.adapter
        if adapter is None:
            return ()
        slot = self._slot(sequence, in_flight)
        assert slot is not None, "no slot is free; startable says so"
        sequence.adapter_slot = slot
        self._holders[slot] += 1
        self._idle.pop(slot, None)
        if self._passed is not None:
            self._overtake(adapter.digest)
        return self.put(slot, adapter.digest)

    def put(self, slot: int, digest: str) -> tuple[AdapterPlacement, ...]:
        """Give a slot, which no sequence with another adapter holds, this one; return what the plan puts there."""
        before = self._digests[slot]
        if before == digest:
            return ()
        elsewhere = self._slot_of.get(digest)
        if elsewhere is not None:
            self._digests[elsewhere] = None
        if before is not None:
            del self._slot_of[before]
        self._digests[slot], self._slot_of[digest] = digest, slot
        return (AdapterPlacement(slot, digest),)

    def leave(self, sequence: Sequence) -> None:
        """A sequence runs no longer; rows of it may still be in flight."""
        if sequence.request.adapter is None:
            return
        slot = sequence.adapter_slot
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._idle[slot] = None

    def forget(self, digest: str) -> None:
        """Empty the slot of an adapter that leaves the memory; no sequence uses it."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            assert not self._holders[slot], f"adapter slot {slot} is in use"
            self._digests[slot] = None
            self._idle.move_to_end(slot, last=False)

    def names(self, sequences: Iterable[Sequence]) -> tuple[str, ...]:
        """Return the names of these sequences' adapters, each once, sorted."""
        adapters = (each.request.adapter for each in sequences)
        return tuple(sorted({each.name for each in adapters if each is not None}))

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """AssertionError where two records disagree. Slow: for tests."""
        holders = [0] * len(self._holders)
        for sequence in running:
            if (adapter := sequence.request.adapter) is not None:
                assert self._digests[sequence.adapter_slot] == adapter.digest, "it computes with another adapter"
                holders[sequence.adapter_slot] += 1
        assert holders == self._holders
        assert set(self._idle) == {slot for slot, count in enumerate(holders) if not count}
        assert self._slot_of == {digest: slot for slot, digest in enumerate(self._digests) if digest is not None}

    def _free(self, in_flight: StepsInFlight, *, but: int | None = None) -> int | None:
        """The idle slot to use next; None: there is none. A slot with rows in flight waits for their end."""
        busy = {each.adapter_slot for step in in_flight for each in step.sequences}
        return next((slot for slot in self._idle if slot not in busy and slot != but), None)

    def _slot(self, sequence: Sequence, in_flight: StepsInFlight) -> int | None:
        """The slot that the sequence can have now; None: none."""
        assert sequence.request.adapter is not None
        digest = sequence.request.adapter.digest
        slot = self._slot_of.get(digest)
        if slot is not None:
            return None if slot == self._draining else slot
        return self._free(in_flight, but=None if digest == self._passed_digest else self._draining)

    @property
    def _passed_digest(self) -> str | None:
        adapter = None if self._passed is None else self._passed.request.adapter
        return None if adapter is None else adapter.digest

    def _overtake(self, digest: str) -> None:
        """A sequence with this adapter starts while one waits for a slot."""
        if digest == self._passed_digest:
            self._settle()
            return
        self._num_overtaken += 1
        if self._num_overtaken >= MOST_OVERTAKING and self._draining is None:
            self._draining = min(range(len(self._holders)), key=lambda slot: self._holders[slot])

    def _settle(self) -> None:
        """Forget the sequence that waits for a slot: it has one, or has left."""
        self._passed, self._num_overtaken, self._draining = None, 0, None
