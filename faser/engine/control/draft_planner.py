"""DraftPlanner asks for the drafts of steps: before a step, behind the one in flight, or during it.

    propose, drafted, verified           drafts are made before the step that verifies them
    propose_ahead, ended, propose        they are launched behind a step in flight, whatever it accepts
    propose_overlapped, drafted          they are made while a step runs, for the step after it

It finds the sequences that may draft, says how many tokens there are KV blocks for, and keeps the decision of
SpeculationControl until the scheduler lays out the rows of the step. Blocks of a draft have room for whatever the
step accepts; one that is freed meanwhile may be used at once, since drafting writes to a cache of its own, and
earlier than whatever comes then.
"""

from dataclasses import dataclass

import numpy as np

from faser.engine.contract.drafts import Drafts, Ints
from faser.engine.contract.plan import PLACEHOLDER, DraftPlan, DraftRequest, StepPlan, StepResult, StepSpan
from faser.engine.control.decoding import Decoding, Draft
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.speculation.control import OtherRows, Room, SpeculationControl
from faser.engine.control.speculation.no_speculation import NoSpeculation
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_builder import StepInFlight, StepsInFlight
from faser.engine.control.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Decided:
    """The decision about a step. drafts: None: it has none. sequences: those of the drafts, in their order."""

    drafts: StepDrafts | None
    sequences: list[Sequence]


_NO_DRAFTS = _Decided(None, [])


class DraftPlanner:
    """running, decoding, waiting, in_flight: the scheduler's own; only read, but for slots to release.

    max_num_seqs, max_rows: of a step.
    """

    def __init__(
        self,
        speculation: SpeculationControl | NoSpeculation,
        kv: KvManager,
        running: list[Sequence],
        decoding: Decoding,
        waiting: WaitingQueue,
        in_flight: StepsInFlight,
        *,
        max_num_seqs: int,
        max_rows: int,
    ) -> None:
        self._speculation = speculation
        self._kv = kv
        self._running = running
        self._decoding = decoding
        self._waiting = waiting
        self._in_flight = in_flight
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_rows
        self._next = _NO_DRAFTS  # about the step that is being made
        self._ahead: _Decided | None = None  # about the step after the one in flight
        self._overlapped: StepDrafts | None = None  # made during the step in flight

    # Before the step.

    def propose(self) -> DraftPlan | Drafts | None:
        """Ask for the drafts of the next step; None: it has no drafts, or overlapped drafts are there already.

        Drafts: they have been looked up, and nothing need be asked.
        """
        self._in_flight.check_none()
        self._next = _NO_DRAFTS  # drop those of a step that its sequences' end has left without rows
        if not self._speculation.speculates:
            return None
        if self._ahead is not None:
            self._take_ahead(self._ahead)
        else:
            self._next = self._decide(*self._candidates(), self._room)
        drafts = self._next.drafts
        if drafts is None:
            return None
        if drafts.is_looked:
            return drafts.drafts
        takes_blocks = not drafts.looks_first
        drafts.plan = DraftPlan(
            step=self._in_flight.number + 1,
            width=self._speculation.cap,
            released=self._in_flight.take_released(),
            requests=tuple(
                [
                    DraftRequest(each.held_slot, length, self._new_blocks(each, length) if takes_blocks else ())
                    for each, length in zip(self._next.sequences, drafts.lengths.tolist(), strict=True)
                ]
            ),
            stop=drafts.stop,
            from_text=self._speculation.in_rounds or drafts.looks_first,
        )
        return drafts.plan

    def drafted(self, answer: Drafts) -> Drafts | DraftPlan:
        """Take the answer to the plan that went out last: the drafts of all requests, or the plan to send next."""
        drafts = self._overlapped or self._next.drafts
        assert drafts is not None, "drafts come exactly when they were asked for"
        step = self._in_flight.number + (not drafts.share)
        assert answer.step == step, f"drafts for step {answer.step} are not for step {step}"
        return self._speculation.drafted(drafts, answer) or drafts.drafts

    def verified(self) -> dict[Sequence, Draft]:
        """Return the part of the drafts that the next step verifies, and the blocks that it takes in addition."""
        if self._next.drafts is None and self._speculation.drafts_overlapped:
            found, others = self._candidates()
            if found:
                self._next = _of(self._speculation.chunks(found, others, budget=self._max_rows), found)
        elif self._next.drafts is not None and not (self._next.drafts.is_unread or self._next.drafts.is_decided):
            self._speculation.keep(self._next.drafts, self._next.sequences, self._room)
        drafts, sequences = self._next.drafts, self._next.sequences
        if drafts is None or drafts.is_decided:
            return {}
        if drafts.is_unread:
            drafts.kept = drafts.lengths
            unread = zip(sequences, drafts.lengths.tolist(), strict=True)
            return {each: ((PLACEHOLDER,) * count, self._new_blocks(each, count)) for each, count in unread}
        pairs = [(sequences[at], token_ids) for at, token_ids in drafts.verified()]
        return {each: (token_ids, self._new_blocks(each, len(token_ids))) for each, token_ids in pairs}

    def take(self) -> StepDrafts | None:
        """Return the drafts of the step that is launched, and forget them; None: it has none."""
        drafts, self._next = self._next.drafts, _NO_DRAFTS
        return drafts

    # Behind the step in flight.

    def can_follow(self) -> bool:
        """Return whether the step just planned may be launched, and the next drafts before it has ended."""
        step = self._in_flight.first
        return (
            self._speculation.can_follow
            and step.drafts is not None
            and all(each.needs_only_logits for each in step.sequences)
        )

    def propose_ahead(self) -> DraftPlan | None:
        """Ask for drafts that go on behind the step in flight, whatever it accepts. None: they cannot.

        Unless `ended` follows, `propose` has the drafts made that were decided on.
        """
        step = self._in_flight.only()
        candidates, others = self._candidates_ahead(step)
        if not candidates:
            return None
        brings = {each: count + 1 for each, count in zip(step.sequences, step.rows.num_drafts, strict=True)}

        def room(sequences: list[Sequence], lengths: list[int]) -> list[int]:
            most = [length + brings[each] for each, length in zip(sequences, lengths, strict=True)]
            pairs = zip(sequences, self._room(sequences, most), strict=True)
            return [max(given - brings[each], 0) for each, given in pairs]

        self._ahead = self._decide(candidates, others, room)
        drafts = self._ahead.drafts
        if drafts is None or drafts.candidates.sequences.missing_kv.any():
            return None
        requests = []
        for each, length in zip(self._ahead.sequences, drafts.lengths.tolist(), strict=True):
            most = min(brings[each] + length, each.max_total - len(each.token_ids))
            requests.append(DraftRequest(each.held_slot, length, self._new_blocks(each, most)))
        drafts.plan = DraftPlan(
            step=self._in_flight.number + 1,
            width=self._speculation.cap,
            requests=tuple(requests),
            stop=drafts.stop,
        )
        return drafts.plan

    def ended(self, lengths: Ints) -> None:
        """Take the lengths of the drafts launched ahead, once the step before is over; their tokens come later."""
        assert self._ahead is not None, "no drafts were launched ahead"
        assert self._ahead.drafts is not None, "the step after the one in flight has no drafts"
        self._ahead.drafts.lengths = lengths
        self._take_ahead(self._ahead)
        if self._next.drafts is not None:
            self._next.drafts.is_unread = True

    def _take_ahead(self, decided: _Decided) -> None:
        """The drafts of the next step are those decided on before, of the sequences that go on."""
        self._ahead = None
        drafts, sequences = decided.drafts, decided.sequences
        left = [each.max_total - 1 - len(each.token_ids) for each in sequences]
        going = [
            at
            for at, each in enumerate(sequences)
            if each.status is Status.RUNNING and left[at] > 0 and each.num_uncomputed == 1
        ]
        if drafts is None or not going:
            return
        at = np.array(going, dtype=np.int64)
        drafts.narrow(at)
        drafts.lengths = np.minimum(drafts.lengths, np.array(left, dtype=np.int64)[at])
        self._next = _Decided(drafts, [sequences[i] for i in going])
        self._speculation.settle(drafts, self._next.sequences)

    # During the step.

    def propose_overlapped(self, plan: StepPlan) -> DraftPlan | None:
        """Ask for drafts that are made while the step just planned runs and continue its own; None: no drafts."""
        step = self._in_flight.only()
        if not self._speculation.may_overlap(plan):
            return None
        started = {start.slot for start in plan.started}
        pairs = [
            (sequence, rows)
            for sequence, rows in zip(step.sequences, plan.rows, strict=True)
            if rows.samples
            and len(rows.token_ids) == rows.num_drafts + 1
            and sequence.may_draft
            and rows.slot not in started
        ]
        if not pairs:
            return None
        drafts = self._speculation.decide_overlapped(
            [sequence for sequence, _ in pairs],
            [rows.num_drafts for _, rows in pairs],
            budget=self._max_rows,
            room=self._room,
        )
        if drafts is None:
            return None
        requests = []
        for i, length in zip(drafts.chosen, drafts.lengths.tolist(), strict=True):
            sequence, rows = pairs[i]
            unverified = rows.token_ids[1:]
            new_blocks = self._new_blocks(sequence, len(unverified) + length)
            requests.append(
                DraftRequest(slot=rows.slot, max_tokens=length, new_blocks=new_blocks, unverified=unverified)
            )
        self._overlapped = drafts
        drafts.plan = DraftPlan(
            step=plan.step,
            width=self._speculation.cap,
            requests=tuple(requests),
            share=drafts.share,
            from_text=self._speculation.in_rounds,
        )
        return drafts.plan

    # After the step.

    def learn(
        self,
        plan: StepPlan,
        result: StepResult,
        step: StepInFlight,
        sampled: list[tuple[int, ...]],
        last: StepSpan | None,
    ) -> None:
        """Take in what a step made of its drafts, before its tokens are committed. last: as in commit."""
        if step.drafts is not None and step.drafts.is_unread:
            assert result.drafts is not None, "drafts come with the step that verifies them"
            self._speculation.arrived(step.drafts, result.drafts)
        overlapped, self._overlapped = self._overlapped, None
        self._speculation.learn(
            plan,
            result,
            step.sequences,
            sampled,
            prediction=step.prediction,
            drafts=step.drafts,
            overlapped=overlapped,
            last=last,
        )

    # Which sequences may draft, and how much.

    def _decide(self, candidates: list[Sequence], others: OtherRows, room: Room) -> _Decided:
        if not candidates:
            return _NO_DRAFTS
        drafts = self._speculation.decide(candidates, others, budget=self._max_rows, room=room)
        return _of(drafts, candidates)

    def _candidates(self) -> tuple[list[Sequence], OtherRows]:
        """The sequences that may draft, and an estimate of the other rows of the next step."""
        found = self._decoding.may_draft()
        rows = decoding = len(self._decoding) - len(found)
        if len(self._decoding) < len(self._running):
            for each in self._running:
                if each in self._decoding:
                    continue
                known = len(each.token_ids)
                wanted = known - each.num_computed
                if wanted == 1 and each.max_total - known > 1:
                    found.append(each)
                else:
                    rows += wanted
                    decoding += wanted == 1
        return found, self._others(len(found), rows, decoding)

    def _candidates_ahead(self, step: StepInFlight) -> tuple[list[Sequence], OtherRows]:
        """The sequences that may draft behind a step in flight, and an estimate of the other rows by then."""
        found, rows, decoding = [], 0, 0
        positions = {sequence: at for at, sequence in enumerate(step.sequences)}
        for each in self._running:
            at, known = positions.get(each), len(each.token_ids)
            if at is not None and step.rows.samples[at]:
                if each.max_total - known > 1 + 1:  # a step without a draft brings the last one but one
                    found.append(each)
                else:
                    rows, decoding = rows + 1, decoding + 1
                continue
            wanted = known - each.num_computed - (0 if at is None else step.rows.counts[at])
            rows, decoding = rows + wanted, decoding + (wanted == 1)
        return found, self._others(len(found), rows, decoding)

    def _others(self, num_drafting: int, rows: int, decoding: int) -> OtherRows:
        """Count in the prompt that may start next, as far as a step has rows beside those that draft."""
        if self._waiting and len(self._running) < self._max_num_seqs:
            rows += self._waiting.first().num_tokens
        return OtherRows(rows=min(rows, self._max_rows - num_drafting), sequences=decoding)

    def _room(self, sequences: list[Sequence], lengths: list[int]) -> list[int]:
        """Shorten each length to the blocks that are left once all running sequences have what they soon want."""
        kv, count = self._kv, len(self._running)
        uncomputed = count
        if len(self._decoding) < count:
            uncomputed = sum([len(each.token_ids) - each.num_computed for each in self._running])
        if kv.num_available > kv.blocks_for(uncomputed + count * max(lengths, default=0)) + 3 * count:
            return lengths
        left, size = kv.num_available - soon_wanted(kv, self._running), kv.block_size
        missing = [
            -(-(len(each.token_ids) + length) // size) - len(each.table.blocks)
            for each, length in zip(sequences, lengths, strict=True)
        ]
        if sum([each for each in missing if each > 0]) <= left:
            return lengths
        given = []
        for sequence, length, lacking in zip(sequences, lengths, missing, strict=True):
            if lacking > max(left, 0):
                length = max(len(sequence.table.blocks) * size - len(sequence.token_ids), 0)
            elif lacking > 0:
                left -= lacking
            given.append(length)
        return given

    def _new_blocks(self, sequence: Sequence, length: int) -> tuple[int, ...]:
        """Take the blocks that the sequence lacks for a draft of this length after its known tokens."""
        lacking = len(sequence.token_ids) + length - len(sequence.table.blocks) * self._kv.block_size
        if lacking <= 0:
            return ()
        return tuple(self._kv.allocate(sequence.table, self._kv.blocks_for(lacking)))


def soon_wanted(kv: KvManager, running: list[Sequence]) -> int:
    """Blocks that the running sequences lack for their known tokens, and one more for each.

    A sequence that holds more of them, for a long draft, gives none to others.
    """
    size = kv.block_size
    wanted = [1 - (-len(each.token_ids) // size) - len(each.table.blocks) for each in running]
    return sum([each for each in wanted if each > 0])


def _of(drafts: StepDrafts | None, candidates: list[Sequence]) -> _Decided:
    return _NO_DRAFTS if drafts is None else _Decided(drafts, [candidates[i] for i in drafts.chosen])
