"""DraftPlanner asks for the drafts of steps: before a step, behind the one in flight, or during it.

    propose, drafted, verified           drafts are made before the step that verifies them
    propose_ahead, ended, propose        they are launched behind a step in flight, whatever it accepts
    propose_overlapped, drafted          they are made while a step runs, for the step after it

It finds the sequences that may draft, says how many tokens there are KV blocks for, and keeps the decision of
SpeculationControl until the scheduler lays out the rows of the step. Blocks of a draft have room for whatever the
step accepts; one that is freed meanwhile may be used at once, since drafting writes to a cache of its own, and
earlier than whatever comes then.
"""

import numpy as np

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import PLACEHOLDER, DraftPlan, DraftRequest, StepPlan, StepResult, StepSpan
from faser.engine.control.decoding import Decoding, Draft
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.looks import Room
from faser.engine.control.speculation.no_speculation import NoSpeculation
from faser.engine.control.speculation.policy import OtherRows
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_builder import StepInFlight, StepsInFlight
from faser.engine.control.waiting_queue import WaitingQueue
from faser.types.arrays import Ints

_ANY = 1 << 30


def most_drafts(max_num_seqs: int, max_rows: int, max_logit_rows: int | None) -> int:
    """Return how many draft tokens a step may have beside a row with logits for every sequence."""
    return _ANY if max_logit_rows is None or max_logit_rows >= max_rows else max_logit_rows - max_num_seqs


class DraftPlanner:
    """running, decoding, waiting, in_flight: the scheduler's own; only read, but for slots to release.

    max_num_seqs, max_rows, max_drafts: of a step.
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
        max_drafts: int,
    ) -> None:
        self._speculation, self._in_flight = speculation, in_flight
        self._kv, self._running, self._decoding, self._waiting = kv, running, decoding, waiting
        self._max_num_seqs, self._max_rows, self._max_drafts = max_num_seqs, max_rows, max_drafts
        self._next: StepDrafts | None = None  # of the step that is being made
        self._ahead: StepDrafts | None = None  # of the step after the one in flight
        self._has_decided = False  # that step, as far as it has drafts
        self._overlapped: StepDrafts | None = None  # made during the step in flight

    # Before the step.

    def propose(self) -> DraftPlan | Drafts | None:
        """Ask for the drafts of the next step; None: it has no drafts, or overlapped drafts are there already.

        Drafts: they have been looked up, and nothing need be asked.
        """
        self._in_flight.check_none()
        self._next = None  # drop those of a step that its sequences' end has left without rows
        if not self._speculation.speculates:
            return None
        if self._has_decided:
            self._take_ahead()
        else:
            self._next = self._decide(*self._candidates(), self._room)
        drafts = self._next
        if drafts is None:
            return None
        if drafts.is_looked:
            return drafts.drafts
        takes_blocks = not drafts.looks_first
        requests = [
            DraftRequest(each.held_slot, length, self._new_blocks(each, length) if takes_blocks else ())
            for each, length in zip(drafts.sequences, drafts.lengths.tolist(), strict=True)
        ]
        in_rounds = self._speculation.in_rounds or drafts.looks_first
        return self._ask(drafts, requests, from_text=in_rounds, released=self._in_flight.take_released())

    def _ask(
        self,
        drafts: StepDrafts,
        requests: list[DraftRequest],
        *,
        from_text: bool = False,
        released: tuple[int, ...] = (),
    ) -> DraftPlan:
        drafts.plan = DraftPlan(
            step=self._in_flight.number + (not drafts.share),
            width=self._speculation.cap,
            requests=tuple(requests),
            released=released,
            stop=drafts.stop,
            share=drafts.share or None,
            from_text=from_text,
        )
        return drafts.plan

    def drafted(self, answer: Drafts) -> Drafts | DraftPlan:
        """Take the answer to the plan that went out last: the drafts of all requests, or the plan to send next."""
        drafts = self._overlapped or self._next
        assert drafts is not None, "drafts come exactly when they were asked for"
        step = self._in_flight.number + (not drafts.share)
        assert answer.step == step, f"drafts for step {answer.step} are not for step {step}"
        return self._speculation.drafted(drafts, answer) or drafts.drafts

    def verified(self) -> dict[Sequence, Draft]:
        """Return the part of the drafts that the next step verifies, and the blocks that it takes in addition."""
        if self._next is None and self._speculation.drafts_overlapped:
            found, others = self._candidates()
            if found:
                self._next = self._speculation.chunks(found, others, budget=self._max_rows)
        elif self._next is not None and not (self._next.is_unread or self._next.is_decided):
            self._speculation.keep(self._next, self._room)
        drafts = self._next
        if drafts is None or drafts.is_decided:
            return {}
        if drafts.is_unread:
            drafts.kept = drafts.lengths
            unread = zip(drafts.sequences, drafts.lengths.tolist(), strict=True)
            return {each: ((PLACEHOLDER,) * count, self._new_blocks(each, count)) for each, count in unread}
        pairs = [(drafts.sequences[at], token_ids) for at, token_ids in drafts.verified()]
        return {each: (token_ids, self._new_blocks(each, len(token_ids))) for each, token_ids in pairs}

    def take(self) -> StepDrafts | None:
        """Return the drafts of the step that is launched, and forget them; None: it has none."""
        drafts, self._next = self._next, None
        return drafts

    # Behind the step in flight.

    def can_follow(self) -> bool:
        """Return whether the step just planned may be launched, and the next drafts before it has ended."""
        step = self._in_flight[0]
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
        brings = {each: count + 1 for each, count in zip(step.sequences, step.plan.rows.num_drafts, strict=True)}

        def room(sequences: list[Sequence], lengths: list[int]) -> list[int]:
            most = [length + brings[each] for each, length in zip(sequences, lengths, strict=True)]
            pairs = zip(sequences, self._room(sequences, most), strict=True)
            return [max(given - brings[each], 0) for each, given in pairs]

        drafts = self._ahead = self._decide(candidates, others, room)
        self._has_decided = True
        if drafts is None or drafts.candidates.sequences.missing_kv.any():
            return None
        requests = []
        for each, length in zip(drafts.sequences, drafts.lengths.tolist(), strict=True):
            most = min(brings[each] + length, each.max_total - len(each.token_ids))
            requests.append(DraftRequest(each.held_slot, length, self._new_blocks(each, most)))
        return self._ask(drafts, requests)

    def ended(self, lengths: Ints) -> None:
        """Take the lengths of the drafts launched ahead, once the step before is over; their tokens come later."""
        assert self._ahead is not None, "no drafts were launched ahead"
        self._ahead.lengths = lengths
        self._take_ahead()
        if self._next is not None:
            self._next.is_unread = True

    def _take_ahead(self) -> None:
        """The drafts of the next step are those decided on before, of the sequences that go on."""
        drafts, self._ahead, self._has_decided = self._ahead, None, False
        if drafts is None:
            return
        left = np.array([each.max_total - 1 - len(each.token_ids) for each in drafts.sequences], dtype=np.int64)
        going = [each.status is Status.RUNNING and each.num_uncomputed == 1 for each in drafts.sequences]
        at = ((left > 0) & going).nonzero()[0]
        if len(at):
            drafts.narrow(at)
            drafts.lengths = np.minimum(drafts.lengths, left[at])
            self._next = drafts
            self._speculation.settle(drafts)

    # During the step.

    def propose_overlapped(self, plan: StepPlan) -> DraftPlan | None:
        """Ask for drafts that are made while the step just planned runs and continue its own; None: no drafts."""
        step = self._in_flight.only()
        if not self._speculation.may_overlap(plan):
            return None
        started = {start.slot for start in plan.started}
        drafting = {
            sequence: rows
            for sequence, rows in zip(step.sequences, plan.rows, strict=True)
            if rows.samples
            and len(rows.token_ids) == rows.num_drafts + 1
            and sequence.may_draft
            and rows.slot not in started
        }
        if not drafting:
            return None
        drafts = self._speculation.decide_overlapped(
            [*drafting],
            [rows.num_drafts for rows in drafting.values()],
            budget=self._max_rows,
            room=self._room,
        )
        if drafts is None:
            return None
        requests = []
        for each, length in zip(drafts.sequences, drafts.lengths.tolist(), strict=True):
            unverified = drafting[each].token_ids[1:]
            new_blocks = self._new_blocks(each, len(unverified) + length)
            requests.append(DraftRequest(each.held_slot, length, new_blocks, unverified))
        self._overlapped = drafts
        return self._ask(drafts, requests, from_text=self._speculation.in_rounds)

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

    def _decide(self, candidates: list[Sequence], others: OtherRows, room: Room) -> StepDrafts | None:
        if not candidates:
            return None
        return self._speculation.decide(candidates, others, budget=self._max_rows, room=room)

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
            if at is not None and step.plan.rows.samples[at]:
                if each.max_total - known > 1 + 1:  # a step without a draft brings the last one but one
                    found.append(each)
                else:
                    rows, decoding = rows + 1, decoding + 1
                continue
            wanted = known - each.num_computed - (0 if at is None else step.plan.rows.counts[at])
            rows, decoding = rows + wanted, decoding + (wanted == 1)
        return found, self._others(len(found), rows, decoding)

    def _others(self, num_drafting: int, rows: int, decoding: int) -> OtherRows:
        """Count in the prompt that may start next, as far as a step has rows beside those that draft."""
        if self._waiting and len(self._running) < self._max_num_seqs:
            rows += self._waiting.first().num_tokens
        rows = min(rows, self._max_rows - num_drafting)
        return OtherRows(rows=rows, sequences=decoding, drafts=self._max_drafts)

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
