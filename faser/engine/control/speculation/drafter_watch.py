"""DrafterWatch: notices that a drafter's acceptance has collapsed, and asks whether its state is still right.

A drafter computes its drafts from a state of its own: keys and values, an index. If that is damaged no answer
changes, but drafts are refused. So how often the first token of a verified draft is accepted is compared with the
drafter's own record, in general and under two conditions:

    uptime        all drafts, in the order in which they came
    position      those at positions of one size: 512 to 1023, 1024 to 2047, …
    prefix_hit    those of sequences whose prompt began with cached blocks

The sum of what was missed is Page's (1954). Drafts of one answer are alike, so an answer adds a bounded amount,
and no fewer than four answers raise an alarm. A condition that is new begins with the record of all drafts, a
position with that of shorter ones.

After an alarm the data plane is asked, one slot between two steps, whether a cold state of that drafter has other
bits (Executor.rebuild). If so it has taken the slot's place, which is counted and logged. If not, the text has
changed: nothing happens but that the records begin anew with what acceptance is now.

Nothing of this runs in a step: SpeculationStatistics hands over the drafts of many steps at once.
"""

import logging
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from faser.config.speculation import DRAFT_METHODS, PASS_METHODS
from faser.engine.contract.plan import DrafterCheck
from faser.types.arrays import Ints

_log = logging.getLogger("faser.drafters")

UPTIME, POSITION, PREFIX_HIT = "uptime", "position", "prefix_hit"
# Reasoned, and varied in no filed run.
_PIECE = 32  # drafts of an answer that are looked at together
_LEAST_RECORD, _MOST_BORROWED = (
    16.0,
    32.0,
)  # pieces before anything is expected; of all drafts, for a new condition
_KEPT = 0.99  # of a record after one more piece
_SPREAD, _SPREAD_PIECES = 4.0, 8.0  # variance of a piece over that of a binomial one: at first, and its weight
_ALLOWANCE = 0.75  # standard deviations a piece that may be missed for good
_MOST_OF_ANSWER, _ALARM = 4.0, 14.0  # standard deviations that an answer may add, and that raise an alarm
_LEAST_RATE = 0.05  # of acceptance, and its distance from 1: the variance must not vanish
_LATEST, _LEAST_PIECES = 24, 3  # pieces that say what the cause is; with and without it
_NUM_METHODS = len(DRAFT_METHODS)
_Key = tuple[int, str, int]  # method, condition, and which position


@dataclass(slots=True)
class _Record:
    """Acceptance of first tokens under one condition. drafts, right: discounted sums.

    misses: summed squares over the binomial variance, of `pieces` pieces. behind: Page's sum; since it was 0 there
    were new_drafts, new_right of them accepted, where the record had said `before`.
    """

    drafts: float = 0.0
    right: float = 0.0
    misses: float = _SPREAD * _SPREAD_PIECES
    pieces: float = _SPREAD_PIECES
    behind: float = 0.0
    before: float = 0.0
    new_drafts: int = 0
    new_right: int = 0

    @property
    def rate(self) -> float:
        return min(max(self.right / max(self.drafts, 1.0), _LEAST_RATE), 1 - _LEAST_RATE)

    @property
    def is_known(self) -> bool:
        return self.drafts >= _LEAST_RECORD * _PIECE

    def lent(self) -> "_Record":
        """Return the record with which a new condition begins."""
        by = min(1.0, _MOST_BORROWED * _PIECE / max(self.drafts, 1.0))
        return _Record(self.drafts * by, self.right * by, self.misses, self.pieces)

    def add(self, drafts: int, right: int, of_answer: float) -> float:
        """Take in a piece of an answer that has missed of_answer so far; returns what it has missed now."""
        rate, weight = self.rate, drafts / _PIECE
        variance, spread = rate * (1 - rate), max(self.misses / self.pieces, 1.0)
        missed = rate * drafts - right
        if self.is_known:
            now = of_answer + missed / math.sqrt(_PIECE * spread * variance) - _ALLOWANCE * weight
            if self.behind == 0:
                self.before, self.new_drafts, self.new_right = rate, 0, 0
            self.behind = max(self.behind + min(now, _MOST_OF_ANSWER) - min(of_answer, _MOST_OF_ANSWER), 0.0)
            self.new_drafts += drafts
            self.new_right += right
            of_answer = now
        kept = _KEPT**weight
        self.misses = self.misses * kept + weight * min(missed**2 / (drafts * variance), 4 * spread)
        self.pieces = self.pieces * kept + weight
        self.drafts = self.drafts * kept + drafts
        self.right = self.right * kept + right
        return of_answer

    def move_on(self) -> None:
        """Expect from now on the acceptance seen of late."""
        if self.behind > 0:
            self.drafts, self.right = float(self.new_drafts), float(self.new_right)
        self.behind = 0.0


class _Piece(NamedTuple):
    """missed: share of its drafts that were expected to be accepted and were not. size: of its position."""

    missed: float
    size: int
    has_hit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    """An alarm that no comparison has answered yet. at: which position, if that is the cause."""

    method: int
    cause: str
    at: int
    before: float
    now: float


class DrafterWatch:
    """One per engine with drafters. rebuilds: states that were replaced, by drafter and cause."""

    def __init__(self, num_slots: int) -> None:
        self.rebuilds: Counter[tuple[str, str]] = Counter()
        self.num_alarms = 0
        self._records: dict[_Key, _Record] = {}
        self._drafts: Ints = np.zeros(num_slots * _NUM_METHODS, dtype=np.int64)  # of the pieces in the making
        self._right: Ints = np.zeros(num_slots * _NUM_METHODS, dtype=np.int64)
        self._begun: Ints = np.zeros(num_slots, dtype=np.int64)  # known tokens when the slot was taken
        self._known: Ints = np.zeros(num_slots, dtype=np.int64)
        self._is_watched = [False] * num_slots
        self._has_hit = [False] * num_slots
        self._of_answer: dict[int, dict[_Key, float]] = {}  # by slot, what its answer has missed
        self._latest: dict[int, deque[_Piece]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._suspicion: _Suspicion | None = None
        self._checks: list[DrafterCheck] = []
        self._num_checked = self._num_differed = 0

    def start(self, slot: int, known: int, *, has_hit: bool, is_watched: bool = True) -> None:
        """A sequence of that many tokens takes over the slot.

        has_hit: its first tokens were cached. is_watched: False: its drafts say nothing about others.
        """
        lines = slice(slot * _NUM_METHODS, (slot + 1) * _NUM_METHODS)
        self._drafts[lines] = self._right[lines] = 0
        self._begun[slot] = self._known[slot] = known
        self._is_watched[slot], self._has_hit[slot] = is_watched, has_hit
        self._of_answer[slot] = {}

    def release(self, slot: int) -> None:
        """The sequence leaves the slot."""
        for method in range(_NUM_METHODS):
            if self._drafts[slot * _NUM_METHODS + method]:
                self._close(slot, method)
        del self._of_answer[slot]
        self._checks = [check for check in self._checks if check.slot != slot]
        self._answer()

    def take(self, slots: Ints, methods: Ints, kept: Ints, accepted: Ints, num_new: Ints) -> None:
        """Drafts of several steps, [S]; a slot may recur. kept, accepted: tokens.

        num_new: of each slot, tokens since it was taken.
        """
        verified = kept > 0
        lines = (slots * _NUM_METHODS + methods)[verified]
        np.add.at(self._drafts, lines, 1)
        np.add.at(self._right, lines, accepted[verified] > 0)
        self._known[slots] = self._begun[slots] + num_new
        for line in np.unique(lines[self._drafts[lines] >= _PIECE]).tolist():
            self._close(*divmod(line, _NUM_METHODS))
        if self._suspicion is not None and not self._checks and not self._num_checked:
            self._plan(self._suspicion)

    def next_check(self) -> DrafterCheck | None:
        """The state that is to be compared next; None: none."""
        return self._checks[0] if self._checks else None

    def checked(self, check: DrafterCheck, *, differed: bool) -> None:
        """That state has been compared. differed: and replaced."""
        self._checks.remove(check)
        self._num_checked += 1
        self._num_differed += differed
        self._answer()

    def _close(self, slot: int, method: int) -> None:
        """A piece is whole: compare it with the records."""
        line = slot * _NUM_METHODS + method
        drafts, right = int(self._drafts[line]), int(self._right[line])
        self._drafts[line] = self._right[line] = 0
        if not self._is_watched[slot]:
            return
        of_answer = self._of_answer[slot]
        keys = [(method, UPTIME, 0), (method, POSITION, self._size(slot))]
        if self._has_hit[slot]:
            keys.append((method, PREFIX_HIT, 0))
        keys = [key for key in keys if self._has_record(key)]
        missed = self._records[keys[0]].rate - right / drafts
        self._latest[method].append(_Piece(missed, self._size(slot), self._has_hit[slot]))
        for key in keys:
            of_answer[key] = self._records[key].add(drafts, right, of_answer.get(key, 0.0))
        if not self._records[keys[0]].behind:
            self._latest[method].clear()
        alarms = [key for key in keys if self._records[key].behind >= _ALARM]
        if alarms and self._suspicion is None:
            self._suspect(method, alarms[0])

    def _has_record(self, key: _Key) -> bool:
        """There is a record, now at the latest. It has to wait until the one that it begins with is known."""
        if key in self._records:
            return True
        method, condition, at = key
        lender: _Record | None = None
        if condition == PREFIX_HIT:
            lender = self._records[method, UPTIME, 0]
        elif shorter := [each for each in self._records if each[:2] == (method, POSITION) and each[2] < at]:
            lender = self._records[max(shorter)]
        if lender is not None and not lender.is_known:
            return False
        self._records[key] = _Record() if lender is None else lender.lent()
        return True

    def _suspect(self, method: int, alarmed: _Key) -> None:
        key = self._cause(method, alarmed)
        record = self._records.get(key)
        if record is None or not record.behind:
            record = self._records[alarmed]
        now = record.new_right / max(record.new_drafts, 1)
        self._suspicion = _Suspicion(method=method, cause=key[1], at=key[2], before=record.before, now=now)
        self.num_alarms += 1

    def _cause(self, method: int, alarmed: _Key) -> _Key:
        """The condition without which the latest pieces have missed less than half of what they have with it.

        Without one it is that of the alarm: of all drafts, if these have fallen behind as well.
        """
        pieces = self._latest[method]
        found, most = alarmed, 0.0
        for size in sorted({each.size for each in pieces}):
            longer = [each.missed for each in pieces if each.size >= size]
            shorter = [each.missed for each in pieces if each.size < size]
            if (difference := _difference(longer, shorter)) > most:
                found, most = (method, POSITION, size), difference
        hit = [each.missed for each in pieces if each.has_hit]
        if _difference(hit, [each.missed for each in pieces if not each.has_hit]) > most:
            found = (method, PREFIX_HIT, 0)
        return found

    def _plan(self, suspicion: _Suspicion) -> None:
        """Have all states of the drafter compared, once there is one that the suspicion is about."""
        method = DRAFT_METHODS[suspicion.method]
        slots = [slot for slot in self._of_answer if self._is_watched[slot]]
        if suspicion.cause == PREFIX_HIT:
            is_there = any(self._has_hit[slot] for slot in slots)
        elif suspicion.cause == POSITION:
            is_there = any(self._size(slot) >= suspicion.at for slot in slots)
        else:
            is_there = bool(slots)
        shared: list[int | None] = [] if method in PASS_METHODS else [None]
        if is_there or shared:
            self._checks = [DrafterCheck(method=method, slot=slot) for slot in (*shared, *self._of_answer)]

    def _answer(self) -> None:
        """All states have been compared: judge the suspicion."""
        suspicion = self._suspicion
        if suspicion is None or self._checks or not self._num_checked:
            return
        method, differed = DRAFT_METHODS[suspicion.method], self._num_differed
        records = [each for key, each in self._records.items() if key[0] == suspicion.method]
        text = "acceptance of first tokens by %s fell from %.2f to %.2f (%s): "
        about = (method, suspicion.before, suspicion.now, suspicion.cause)
        if differed:
            self.rebuilds[method, suspicion.cause] += differed
            _log.warning(text + "rebuilt %d of %d states, which were damaged", *about, differed, self._num_checked)
            for record in records:
                record.behind = 0.0
        else:
            _log.info(
                text + "no damaged state was found (%d asked), so the text has changed", *about, self._num_checked
            )
            for record in records:
                record.move_on()
        self._suspicion = None
        self._num_checked = self._num_differed = 0

    def _size(self, slot: int) -> int:
        """Return the size of the slot's position: positions from 2**(n - 1) on have size n."""
        return int(self._known[slot]).bit_length()


def _difference(some: list[float], others: list[float]) -> float:
    """Return how much more some pieces missed than the others on average; 0 where that is not most of it."""
    if min(len(some), len(others)) < _LEAST_PIECES:
        return 0.0
    one, other = sum(some) / len(some), sum(others) / len(others)
    return one - other if other < one / 2 else 0.0
