"""TargetKeeper: in which order sequences are served that have targets, and what they leave to the others.

A sequence is due when its first token is. One that is due at no time has its arrival and some patience in its
place, so it waits for none of those that come so much later: without targets the order is that of arrival.

Unpaced sequences start only as far as TargetRoom lets them. Prompts get as many rows of a step as fit within the
tightest target, a sixteenth of all rows at least, and one that is due gets those that it needs for that. How long
tokens of paced sequences really take is followed: the room shrinks while they take longer than their targets, and
grows again. Only sequences that gave a target per token up may use all of the room that the pace leaves: they came
as the paced ones did, and prompts lengthen tokens more than they do.

So none waits for ever: of q unpaced sequences in line the last one starts once q others, at most, have run one
after the other; and a prompt whose patience is over is the first one of a step that gets rows. Knows the pace and
the targets; what a sequence is owed beyond that, admission has decided before it came.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from math import ceil

import numpy as np

from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import StepPlan, StepResult, StepSpan
from faser.engine.contract.target_room import TargetRoom
from faser.engine.control.clock import Clock
from faser.engine.control.pace import PaceFit
from faser.engine.control.sequence import Sequence
from faser.engine.control.waiting_queue import WaitingQueue

# Reasoned, and varied in no filed run.
_PERIOD_S = 0.5  # after which limits are computed anew
_SHARE_OF_ROWS = 16  # of which one is always for prompts
_HASTE = 1.5  # times as many rows as a prompt needs if all goes well
_WANTED = 0.7  # of their targets that tokens should take on average, so that few take longer
_LESS, _MORE, _LEAST = 0.85, 1.05, 0.2  # the room's factor: after too slow a period, after others, at least


def is_due_before(begun: Sequence) -> Callable[[Sequence], bool]:
    """Return a test for waiting sequences: whether one is due, and before a prompt that is partly computed."""
    key = begun.priority_key
    return lambda each: each.request.due_s is not None and each.priority_key < key


class NoTargets:
    """Stands in for TargetKeeper in an engine without a pace, and for the limits of a step without targets."""

    def see(self, _: float | None) -> None:
        """No target changes anything."""

    def observe(self, *_: object) -> None:
        """No step teaches anything."""

    def pace(self) -> None:
        """It is not known."""

    def limits(self, *_: object) -> "NoTargets":
        return self

    def take_rows(self, _: Sequence, num_rows: int) -> int:
        return num_rows

    def next_to_start(
        self, waiting: WaitingQueue, _: Many[Sequence], among: Callable[[Sequence], bool] | None
    ) -> Sequence | None:
        return waiting.first() if among is None else waiting.first_of(among)


NO_TARGETS = NoTargets()


class TargetKeeper:
    """Without targets nothing is limited. pace: is fitted to the steps. most_rows: of a step."""

    def __init__(self, pace: PaceFit, clock: Clock, *, most_rows: int) -> None:
        self._pace, self._clock, self._most_rows = pace, clock, most_rows
        self._room, self._shrunk_room = TargetRoom(), TargetRoom()
        self._due_s = 0.0
        self._factor = 1.0
        self._rows: list[int] = []  # of prompts, by the number of sequences that decode; empty: no limit
        self._step_s = 0.0  # that a step is planned to take at most
        self._then: dict[Sequence, tuple[float, int]] = {}  # time and tokens of paced sequences, a period ago

    def see(self, tpot_ms: float | None) -> None:
        """A request with this target per token, or without one, has come."""
        if tpot_ms is not None:
            self._room.see(tpot_ms, self._clock.now())
            self._due_s = self._due_s if self._rows else 0.0

    def observe(self, plan: StepPlan, result: StepResult, last: StepSpan | None) -> None:
        """A step is done. Arguments as in PaceFit.observe."""
        self._pace.observe(plan, result, last)

    def pace(self) -> Pace:
        """Return the pace as fitted to the steps so far."""
        return self._pace.pace()

    def limits(self, running: Many[Sequence], num_decoding: int) -> "StepLimits | NoTargets":
        """Return the limits of the next step. running: that run now, of which num_decoding decode in it."""
        now_s = self._clock.now()
        token_s = self._room.tightest_s(now_s)
        if token_s is None:
            self._rows, self._factor = [], 1.0
            return NO_TARGETS
        if now_s >= self._due_s:
            self._due_s = now_s + _PERIOD_S
            self._follow(running, now_s)
            pace = self._pace.pace()
            self._room.fit(pace, token_s)
            self._shrunk_room.fit(pace, self._factor * token_s)
            self._limit_rows(pace, self._factor * token_s)
        return StepLimits(self, self._rows[min(num_decoding, len(self._rows) - 1)])

    def may_start(self, running: Many[Sequence]) -> tuple[bool, bool]:
        """Return whether a sequence may start that never had a target per token, and one that gave it up."""
        num_paced = sum(map(is_paced, running))
        num_asked = num_paced + sum(map(_was_paced, running))
        without = len(running) - num_asked < self._shrunk_room.unpaced(num_asked)
        return without, len(running) - num_paced < self._room.unpaced(num_paced)

    def rows_due(self, sequence: Sequence) -> int:
        """Rows that its prompt needs in the next step to be computed when it is due; all if that is over."""
        if sequence.request.due_s is None:
            return 0
        left_s = sequence.request.due_s - self._clock.now()
        if left_s <= self._step_s:
            return sequence.num_uncomputed
        return ceil(sequence.num_uncomputed * _HASTE * self._step_s / left_s)

    def _follow(self, running: Many[Sequence], now_s: float) -> None:
        """Compare what the tokens of the last period have taken with what they may take."""
        ratios = []
        then, self._then = self._then, {}
        for each in running:
            if not is_paced(each) or each.num_tokens == each.prompt_len:
                continue
            self._then[each] = now_s, each.num_tokens
            began_s, tokens = then.get(each, (now_s, each.num_tokens))
            if now_s > began_s:
                target_s = (each.request.token_target_ms or 0.0) / 1000
                ratios.append((now_s - began_s) / max(each.num_tokens - tokens, 1) / target_s)
        if ratios:
            moved = self._factor * (_LESS if sum(ratios) > _WANTED * len(ratios) else _MORE)
            self._factor = min(max(moved, _LEAST), 1.0)

    def _limit_rows(self, pace: Pace, token_s: float) -> None:
        self._step_s = float(token_s * pace.decoding_s(1) / pace.token_s(1))
        rows = np.unique(np.geomspace(1, self._most_rows, 24).astype(np.int64)).astype(np.float64)
        least = max(self._most_rows // _SHARE_OF_ROWS, 1)
        decoding = np.arange(1.0, pace.num_slots + 1)
        step_s = pace.decoding_s(decoding)
        spare_s = token_s * step_s / pace.token_s(decoding) - step_s
        most = np.where(pace.prompt_s(decoding[:, None], rows) <= spare_s[:, None], rows, 0.0).max(axis=1)
        nothing_decodes = self._most_rows
        self._rows = [nothing_decodes, *np.maximum(most, least).astype(np.int64).tolist()]


class StepLimits:
    """Limits that targets set for one step. num_rows: for prompts, unless they are due."""

    __slots__ = ("_keeper", "_num_rows")

    def __init__(self, keeper: TargetKeeper, num_rows: int) -> None:
        self._keeper, self._num_rows = keeper, num_rows

    def take_rows(self, sequence: Sequence, num_rows: int) -> int:
        """Take up to num_rows rows of a prompt from those left, and return how many the step gets."""
        num_rows = min(num_rows, max(self._num_rows, self._keeper.rows_due(sequence)))
        self._num_rows = max(self._num_rows - num_rows, 0)
        return num_rows

    def next_to_start(
        self, waiting: WaitingQueue, running: Many[Sequence], among: Callable[[Sequence], bool] | None
    ) -> Sequence | None:
        """The first of those that wait, and may start next to the running ones. among: None: of all."""
        may_unpaced, has_rows = self._keeper.may_start(running), self._num_rows > 0

        def may_start(each: Sequence) -> bool:
            has_room = is_paced(each) or may_unpaced[_was_paced(each)]
            return has_room and (has_rows or each.request.due_s is not None) and (among is None or among(each))

        return waiting.first_of(may_start)


def is_paced(sequence: Sequence) -> bool:
    """It has a target per token."""
    return sequence.request.token_target_ms is not None


def _was_paced(sequence: Sequence) -> bool:
    """It came with a target per token, which was given up."""
    return not is_paced(sequence) and sequence.request.speculation.slo.tpot_ms is not None


def kind_of(sequence: Sequence) -> tuple[bool, bool, bool, str | None]:
    """Return the kind by which StepLimits.next_to_start and AdapterSlots.startable tell sequences apart."""
    adapter = sequence.request.adapter
    digest = None if adapter is None else adapter.digest
    return is_paced(sequence), _was_paced(sequence), sequence.request.due_s is not None, digest
