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
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from faser.config.speculation import DRAFT_METHODS, PASS_METHODS
from faser.engine.contract.drafts import Ints
from faser.engine.contract.plan import DrafterCheck

_log = logging.getLogger("faser.drafters")

UPTIME, POSITION, PREFIX_HIT = "uptime", "position", "prefix_hit"
_PIECE = 32  # drafts of an answer that are looked at together
_LEAST_RECORD, _MOST_BORROWED = (
    16.0,
    32.0,
)  # pieces before anything is expected; of all drafts, for a new condition
_KEPT = 0.99  # of a record after one more piece
_SPREAD, _SPREAD_PIECES = 4.0, 8.0  # variance of a piece over that of a binomial one: at first, and its weight
_ALLOWANCE = 0.75  # standard deviations a piece that may be missed for good
_MOST_OF_ANSWER, _ALARM = 4.0, 14.0  # standard deviations that an answer may add, and that raise an alarm
_LEAST_RATE = 0.05
_ALIKE = 0.1  # difference of rates that does not tell conditions apart
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

    @property
    def fallen(self) -> float:
        """By how much the rate is less than it was."""
        return self.before - self.new_right / max(self.new_drafts, 1)

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
        """What acceptance has been of late is what is expected from now on."""
        if self.behind > 0:
            self.drafts, self.right = float(self.new_drafts), float(self.new_right)
        self.behind = 0.0


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
        for key in keys:
            of_answer[key] = self._records[key].add(drafts, right, of_answer.get(key, 0.0))
        if self._suspicion is None and any(self._records[key].behind >= _ALARM for key in keys):
            self._suspect(keys)

    def _has_record(self, key: _Key) -> bool:
        """There is a record, now at the latest. That of a position has to wait until shorter ones are known."""
        if key in self._records:
            return True
        method, condition, at = key
        lender = self._records.get((method, UPTIME, 0), _Record())
        if condition == POSITION:
            shorter = [each for each in self._records if each[:2] == key[:2] and each[2] < at]
            lender = self._records[max(shorter)] if shorter else _Record()
            if shorter and not lender.is_known:
                return False
        self._records[key] = lender.lent()
        return True

    def _suspect(self, keys: Many[_Key]) -> None:
        """The cause is the first of the conditions under which acceptance has fallen as far as under any."""
        fallen = {key: record.fallen for key in keys if (record := self._records[key]).behind >= _ALARM / 2}
        key = next(each for each in fallen if fallen[each] >= max(fallen.values()) - _ALIKE)
        record = self._records[key]
        self._suspicion = _Suspicion(
            method=key[0], cause=key[1], at=key[2], before=record.before, now=record.before - record.fallen
        )
        self.num_alarms += 1

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
                text + "its state is right (%d compared), so the text has changed", *about, self._num_checked
            )
            for record in records:
                record.move_on()
        self._suspicion = None
        self._num_checked = self._num_differed = 0

    def _size(self, slot: int) -> int:
        """Of the slot's position: positions from 2**(n - 1) on have size n."""
        return int(self._known[slot]).bit_length()
