"""The Scheduler decides which sequences run: it turns requests into StepPlans and StepResults into StepDeltas.

Owns the sequences, their slots and the order in which they are served. Sees token ids, block numbers and seconds,
never tensors. A step is propose, plan, commit. A step without drafts may also be planned while the one before it
is in flight (asynchronous scheduling): by then a sequence will have one more token, whichever token it is, or
more of its prompt computed. Behind a step with drafts only the next drafts are asked for while it is in flight.
Their blocks have room for whatever it accepts; one that is freed meanwhile may be used at once, since drafting
writes to a cache of its own, and earlier than whatever comes then.

Running sequences follow one total order, the priority key: (priority,) when the first token is due (targets.py).
The best one always gets its rows, if need be with the blocks of the worst one; so every step brings some sequence
nearer to its end. The WaitingQueue orders those that wait, and shares the engine fairly among tenants.
"""

import random
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from faser.engine.contract.drafts import Drafts, Ints
from faser.engine.contract.kv_events import KvEvent
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import (
    PLACEHOLDER,
    DrafterCheck,
    DraftPlan,
    DraftRequest,
    SequenceStart,
    StepDeltas,
    StepPlan,
    StepResult,
    StepRows,
    StepSpan,
)
from faser.engine.contract.target_room import due_s
from faser.engine.control.clock import Clock
from faser.engine.control.decoding import Decoding, Draft
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.kv_disk import KvDisk
from faser.engine.control.pace import PaceFit
from faser.engine.control.sequence import PriorityKey, Sequence, Status, sample_seed, total_tokens
from faser.engine.control.speculation.control import OtherRows, SpeculationControl, StepPrediction
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.state_snapshots import StateSnapshots
from faser.engine.control.targets import NO_LIMITS, StepLimits, TargetKeeper, is_due_before, kind_of
from faser.engine.control.waiting_queue import WaitingQueue
from faser.errors import ConfigError, RequestError
from faser.types.answer import FinishReason, SpeculationSummary, StepTrace
from faser.types.request import Request
from faser.types.statistics import EngineStats

_NO_DRAFT: Draft = (), ()


class Scheduler:
    """Raises ConfigError for limits that cannot work together.

    max_num_seqs: slots. max_num_batched_tokens: rows of a step; at least one per slot, so that no running sequence
    is left out. seed: seeds the requests that have no seed. speculation: None never drafts. pace: is fitted to
    the steps. shares_prefixes: a sequence may begin with another one's blocks. snapshots: of recurrent states,
    which no block holds; None: the model has no such states, or shares no prefixes. state_chunk: a state is kept
    after each so many tokens; a row that completes them cannot be computed again. 0: any row can. disk: has KV of
    earlier prompts; None: there is none.
    """

    def __init__(
        self,
        *,
        kv: KvManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        policy: str = "fcfs",
        seed: int = 0,
        clock: Clock,
        speculation: SpeculationControl | None = None,
        shares_prefixes: bool = True,
        snapshots: StateSnapshots | None = None,
        state_chunk: int = 0,
        pace: PaceFit | None = None,
        disk: KvDisk | None = None,
    ) -> None:
        if policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling policy is {policy!r}; it must be fcfs or priority")
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens} and max_num_seqs is {max_num_seqs}; "
                "a step must have room for a token of each of at least one sequence"
            )
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._by_priority = policy == "priority"
        self._random = random.Random(seed)
        self._clock = clock
        self._speculation = speculation
        self._shares_prefixes = shares_prefixes
        self._snapshots = snapshots
        self._state_chunk = state_chunk
        self._pace = pace
        self._disk = disk
        self._targets = TargetKeeper(pace, clock, most_rows=max_num_batched_tokens)
        self._drafts: StepDrafts | None = None  # of the step that is being made
        self._overlapped: StepDrafts | None = None  # made during the step in flight
        self._drafting: list[Sequence] = []  # the sequences of these drafts
        self._decided: _DecidedAhead | None = None  # about the step after the one in flight
        self._requests: dict[str, list[Sequence]] = {}  # unfinished samples by request id
        self._waiting_for_prefix: dict[str, list[Sequence]] = {}  # until the first sample has computed the prompt
        self._waiting = WaitingQueue(clock, kind_of)
        self._running: list[Sequence] = []  # best first
        self._decoding = Decoding(kv)  # of these
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []  # slots that the data plane still has to release
        self._in_flight: deque[_StepInFlight] = deque()  # at most two
        self._step = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0

    def add(self, request: Request) -> None:
        """Accept a request: sampling.n sequences. Raises RequestError if it can never fit."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id is {request.request_id!r}; it is in use", param="request_id")
        room = self._kv.num_blocks * self._kv.block_size
        max_total = total_tokens(request, max_model_len=self._max_model_len, room=room)
        given = request.sampling.seed
        seed = self._random.getrandbits(63) if given is None else given
        tenant = self._waiting.join(request.tenant, request.sampling.n)
        sequences = [
            Sequence(
                request,
                index,
                priority_key=self._next_priority_key(request),
                tenant=tenant,
                seed=sample_seed(seed, index),
                table=self._kv.new_table(request.cache_salt),
                max_total=max_total,
                eos_token_ids=self._eos_token_ids,
            )
            for index in range(request.sampling.n)
        ]
        self._targets.see(request.token_target_ms)
        self._requests[request.request_id] = sequences
        num_first = 1 if self._shares_prefixes else len(sequences)
        for sequence in sequences[:num_first]:
            self._waiting.add(sequence)
        if len(sequences) > num_first:
            self._waiting_for_prefix[request.request_id] = sequences[num_first:]

    def reclassify(self, request: Request) -> None:
        """Put a request that waits where its new targets belong. One that has begun stays as it is.

        request: the same one, with other targets and other limits of speculation.
        """
        sequences = self._requests.get(request.request_id, [])
        if any(each.first_scheduled_s is not None for each in sequences):
            return
        held = self._waiting_for_prefix.get(request.request_id, ())
        for sequence in sequences:
            queued = sequence not in held and not self._loads(sequence)
            if queued:
                self._waiting.remove(sequence)
            sequence.request = request
            sequence.priority_key = self._next_priority_key(request)
            if queued:
                self._waiting.add(sequence)
        self._targets.see(request.token_target_ms)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples, in any state. Unknown and finished requests are ignored.

        The blocks become available at once, or when the step in flight is committed.
        """
        for sequence in list(self._requests.get(request_id, ())):
            if index in (None, sequence.index):
                sequence.finish_reason = FinishReason.ABORT
                self._remove(sequence)

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None:
        """Use another policy from the next step on: see Engine.use_policy."""
        if self._speculation is None:
            raise ConfigError(f"policy is {name!r}; this engine was built without a drafter")
        self._speculation.use_policy(name, gamma, forget=forget, overlap=overlap)

    def drafter_check(self) -> DrafterCheck | None:
        """A drafter's state that is to be compared with a cold one before the next step; None, as a rule: none."""
        return None if self._speculation is None else self._speculation.watch.next_check()

    def drafter_checked(self, check: DrafterCheck, *, differed: bool) -> None:
        """The state has been compared. differed: and replaced."""
        assert self._speculation is not None
        self._speculation.watch.checked(check, differed=differed)

    def has_work(self) -> bool:
        return bool(self._requests)

    def propose(self) -> DraftPlan | Drafts | None:
        """Ask for the drafts of the next step; None: it has no drafts, or overlapped drafts are there already.

        Drafts: they have been looked up, and nothing need be asked.
        """
        assert not self._in_flight, f"step {self._step} has not been committed"
        self._drafts, self._drafting = None, []  # of a step that its sequences' end has left without rows
        if self._speculation is None:
            return None
        if self._decided is not None:
            self._take_decided()
        else:
            candidates, other_rows = self._candidates()
            if not candidates:
                return None
            self._drafts = self._speculation.decide(
                candidates, other_rows, budget=self._max_num_batched_tokens, room=self._room_to_draft
            )
            if self._drafts is not None:
                self._drafting = [candidates[i] for i in self._drafts.chosen]
        drafts = self._drafts
        if drafts is None:
            return None
        if drafts.is_looked:
            return drafts.drafts
        pairs = zip(self._drafting, drafts.lengths.tolist(), strict=True)
        if drafts.looks_first:
            requests = [DraftRequest(sequence.held_slot, length) for sequence, length in pairs]
        else:
            requests = [
                DraftRequest(sequence.held_slot, length, self._blocks_to_draft(sequence, length))
                for sequence, length in pairs
            ]
        drafts.plan = DraftPlan(
            step=self._step + 1,
            width=self._speculation.cap,
            released=self._take_released(),
            requests=tuple(requests),
            stop=drafts.stop,
            from_text=self._speculation.in_rounds or drafts.looks_first,
        )
        return drafts.plan

    def drafted(self, answer: Drafts) -> Drafts | DraftPlan:
        """Take the answer to the plan that went out last: the drafts of all requests, or the plan to send next."""
        drafts = self._drafts if self._overlapped is None else self._overlapped
        assert self._speculation is not None, "this engine has no drafter"
        assert drafts is not None, "drafts come exactly when they were asked for"
        step = self._step if drafts.share else self._step + 1
        assert answer.step == step, f"drafts for step {answer.step} are not for step {step}"
        following = self._speculation.drafted(drafts, answer)
        return drafts.drafts if following is None else following

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute. Every plan must be committed.

        Decoding sequences come first, with a row each and the rows of their drafts; then prompts that are partly
        computed, best first, and sequences that wait and are due before them; then the others that wait. The
        drafts of the plan from propose must be there.
        """
        assert not self._in_flight, f"step {self._step} has not been committed"
        self._take_loaded()
        step = StepBuilder(budget=self._max_num_batched_tokens)
        kept = self._verified()
        begun = self._decode(step, kept)
        step.limits = self._targets.limits(self._running, len(step.sequences))
        for sequence in begun:
            if self._waiting and not step.preempted:
                self._admit_waiting(step, is_due_before(sequence))
            self._serve(sequence, step)
        if not step.preempted:
            self._admit_waiting(step)
        return self._launch(step) if step.rows else None

    def _decode(self, step: "StepBuilder", kept: dict[Sequence, Draft]) -> list[Sequence]:
        """Give the decoding sequences their rows. Returns the sequences with a prompt that is partly computed."""
        decoding, size = self._decoding, self._kv.block_size
        new_blocks = {}
        for sequence in decoding.without_room():
            if sequence not in decoding:
                continue  # preempted for a better one
            if self._make_room(sequence, 1, step):
                new_blocks[sequence] = tuple(self._kv.allocate(sequence.table, 1))
            else:
                decoding.leave(sequence)
        step.decode_all(decoding, kept)
        step.rows.new_blocks |= {
            sequence.held_slot: blocks for sequence, blocks in new_blocks.items() if sequence in decoding
        }
        begun: list[Sequence] = []
        if len(decoding) == len(self._running):
            return begun
        for sequence in tuple(self._running):
            if sequence in decoding:
                continue
            num_computed = sequence.num_computed
            if len(sequence.token_ids) - num_computed > 1:
                begun.append(sequence)
            elif num_computed < len(sequence.table.blocks) * size and step.budget > 0:
                step.decode(sequence, *kept.get(sequence, _NO_DRAFT))
            else:
                self._serve(sequence, step)
        return begun

    def can_schedule_async(self) -> bool:
        """Return whether the next step can be planned now: this one has no drafts, and scores no prompt."""
        first = self._in_flight[0]
        overlapped = self._speculation is not None and self._speculation.drafts_overlapped
        return first.drafts is None and not overlapped and not any(map(_owes_scores, first.sequences))

    def plan_async(self, late: Collection[int] = ()) -> StepPlan | None:
        """Plan the step after the one in flight, which has no drafts; None: it has to wait for that one's tokens.

        The order is that of `plan`. A sequence that the step in flight ends, for other reasons than its length, is
        computed in vain. Preemption waits for a step with nothing in flight, and so do sequences whose prompt is
        scored. late: slots without rows, as LaunchedStep has them; they go on once their masks are there.
        """
        assert len(self._in_flight) == 1, f"{len(self._in_flight)} steps are in flight"
        newcomer = self._waiting.first() if self._waiting and self._free_slots else None
        if (newcomer is not None and _owes_scores(newcomer)) or any(map(_owes_scores, self._running)):
            return None
        self._take_loaded()
        decoding, prompts = self._following(self._in_flight[0], late)
        limits = self._targets.limits(self._running, len(decoding))
        step = StepBuilder(budget=self._max_num_batched_tokens, limits=limits)
        following = [*decoding, *self._within_budget(prompts, len(decoding), step)]
        kv = self._kv
        missing = [kv.blocks_for(each.end) - len(each.sequence.table.blocks) for each in following]
        if sum([each for each in missing if each > 0]) > kv.num_available:
            return None
        if self._speculation is not None and not self._speculation.passes_over(
            len(decoding), prompts=len(following) > len(decoding)
        ):
            return None
        for each, num_blocks in zip(following, missing, strict=True):
            new_blocks = kv.allocate(each.sequence.table, num_blocks) if num_blocks > 0 else ()
            if each.num_rows:
                step.add(each.sequence, each.num_rows, new_blocks, in_flight=each.num_in_flight)
            else:
                step.add_placeholder(each.sequence, new_blocks)
        self._admit_waiting(step)
        return self._launch(step, is_async=True) if step.rows else None

    def _following(
        self, in_flight: "_StepInFlight", late: Collection[int]
    ) -> tuple[list["_FollowingRows"], list["_FollowingRows"]]:
        """The rows that running sequences want after the step in flight: those of one row each, and prompts."""
        decoding: list[_FollowingRows] = []
        prompts: list[_FollowingRows] = []
        positions = {sequence: at for at, sequence in enumerate(in_flight.sequences)}
        for sequence in self._running:
            if sequence.slot in late:
                continue
            at = positions.get(sequence)
            if at is not None and in_flight.rows.samples[at]:
                if sequence.may_draft:  # else the step in flight samples its last token
                    decoding.append(_FollowingRows(sequence, 0, 0))
                continue
            num_in_flight = 0 if at is None else in_flight.rows.counts[at]
            wanted = sequence.num_uncomputed - num_in_flight
            if wanted:
                found = decoding if wanted == 1 else prompts
                found.append(_FollowingRows(sequence, num_in_flight, wanted))
        return decoding, prompts

    def _within_budget(
        self, prompts: list["_FollowingRows"], num_decoding: int, step: "StepBuilder"
    ) -> list["_FollowingRows"]:
        """Keep as many rows of the prompts, in their order, as decoding sequences and targets leave."""
        budget, found = self._max_num_batched_tokens - num_decoding, []
        for each in prompts:
            num_rows = self._prompt_rows(
                each.sequence, min(each.num_rows, budget), step, in_flight=each.num_in_flight
            )
            if num_rows:
                found.append(_FollowingRows(each.sequence, each.num_in_flight, num_rows))
            budget -= num_rows
        return found

    def _prompt_rows(self, sequence: Sequence, num_rows: int, step: "StepBuilder", *, in_flight: int = 0) -> int:
        """Return how many of num_rows prompt rows the step gets; its limits count them. in_flight: rows before."""
        if self._snapshots is not None:
            num_rows = self._snapshots.rows_to_end(sequence, sequence.num_computed + in_flight, num_rows)
        return step.limits.take_rows(sequence, num_rows)

    def can_draft_ahead(self) -> bool:
        """Return whether the step just planned may be launched, and the next drafts before it has ended."""
        first, speculation = self._in_flight[0], self._speculation
        return (
            speculation is not None
            and speculation.can_follow
            and first.drafts is not None
            and all(each.needs_only_logits for each in first.sequences)
        )

    def propose_ahead(self) -> DraftPlan | None:
        """Ask for drafts that go on behind the step in flight, whatever it accepts. None: they cannot.

        Unless drafts_ended follows, `propose` has the drafts made that were decided on.
        """
        assert len(self._in_flight) == 1, f"{len(self._in_flight)} steps are in flight"
        assert self._speculation is not None
        step = self._in_flight[0]
        candidates, others = self._candidates_ahead(step)
        if not candidates:
            return None
        brings = {each: count + 1 for each, count in zip(step.sequences, step.rows.num_drafts, strict=True)}

        def room(sequences: list[Sequence], lengths: list[int]) -> list[int]:
            most = [length + brings[each] for each, length in zip(sequences, lengths, strict=True)]
            pairs = zip(sequences, self._room_to_draft(sequences, most), strict=True)
            return [max(given - brings[each], 0) for each, given in pairs]

        drafts = self._speculation.decide(candidates, others, budget=self._max_num_batched_tokens, room=room)
        sequences = [] if drafts is None else [candidates[i] for i in drafts.chosen]
        self._decided = _DecidedAhead(drafts, sequences)
        if drafts is None or drafts.candidates.sequences.missing_kv.any():
            return None
        requests = []
        for each, length in zip(sequences, drafts.lengths.tolist(), strict=True):
            most = min(brings[each] + length, each.max_total - len(each.token_ids))
            requests.append(DraftRequest(each.held_slot, length, self._blocks_to_draft(each, most)))
        drafts.plan = DraftPlan(
            step=self._step + 1, width=self._speculation.cap, requests=tuple(requests), stop=drafts.stop
        )
        return drafts.plan

    def drafts_ended(self, lengths: Ints) -> None:
        """Take the lengths of the drafts launched ahead, once the step before is over; their tokens come later."""
        assert self._decided is not None, "no drafts were launched ahead"
        drafts = self._decided.drafts
        assert drafts is not None
        drafts.lengths = lengths
        self._take_decided()
        if self._drafts is not None:
            self._drafts.is_unread = True

    def _take_decided(self) -> None:
        """The drafts of the next step are those decided on before, of the sequences that go on."""
        assert self._decided is not None
        drafts, sequences = self._decided.drafts, self._decided.sequences
        self._decided, self._drafts, self._drafting = None, None, []
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
        self._drafts, self._drafting = drafts, [sequences[i] for i in going]
        assert self._speculation is not None
        self._speculation.settle(drafts, self._drafting)

    def propose_overlapped(self, plan: StepPlan) -> DraftPlan | None:
        """Ask for drafts that are made while the step just planned runs and continue its own; None: no drafts."""
        assert len(self._in_flight) == 1, "nothing is planned"
        if self._speculation is None or not self._speculation.may_overlap(plan):
            return None
        started = {start.slot for start in plan.started}
        pairs = [
            (sequence, rows)
            for sequence, rows in zip(self._in_flight[0].sequences, plan.rows, strict=True)
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
            budget=self._max_num_batched_tokens,
            room=self._room_to_draft,
        )
        if drafts is None:
            return None
        requests = []
        for i, length in zip(drafts.chosen, drafts.lengths.tolist(), strict=True):
            sequence, rows = pairs[i]
            unverified = rows.token_ids[1:]
            new_blocks = self._blocks_to_draft(sequence, len(unverified) + length)
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

    def commit(self, plan: StepPlan, result: StepResult, *, last: StepSpan | None = None) -> StepDeltas:
        """Take the result of a step; deltas for sequences with something to report, in no particular order.

        The drafts of the plan from propose_overlapped must be there. last: the step before this one; None: the
        engine had nothing to do in between.
        """
        assert self._in_flight, f"no step is in flight; step {plan.step} cannot be committed"
        first = self._in_flight[0]
        assert plan.step == first.step == result.step, f"step {result.step} is not step {first.step}"
        assert len(result.counts) == len(plan.rows), f"{len(result.counts)} answers for {len(plan.rows)} sequences"
        sampled = result.by_sequence()
        if self._pace is not None:
            self._pace.observe(plan, result, last)
        if self._speculation is not None:
            assert first.prediction is not None
            if first.drafts is not None and first.drafts.is_unread:
                assert result.drafts is not None, "drafts come with the step that verifies them"
                self._speculation.arrived(first.drafts, result.drafts)
            overlapped, self._overlapped = self._overlapped, None
            self._speculation.learn(
                plan,
                result,
                first.sequences,
                sampled,
                prediction=first.prediction,
                drafts=first.drafts,
                overlapped=overlapped,
                last=last,
            )
        deltas = StepDeltas()
        taken = self._decoding.take(first.sequences, sampled, result, deltas)
        self._generation_tokens += len(deltas.token_ids)
        if len(taken) < len(sampled):
            for at, (sequence, token_ids) in enumerate(zip(first.sequences, sampled, strict=True)):
                if at not in taken and sequence.status is Status.RUNNING:
                    self._commit_one(first, at, sequence, token_ids, result, deltas)
                    self._decoding.update(sequence)
        self._in_flight.popleft()
        self._kv.end_step()
        if self._snapshots is not None:
            self._snapshots.commit()
        return deltas

    def stats(self) -> EngineStats:
        """The queue, the KV pool, tokens. The engine counts the steps and their times."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting)
            + sum(map(len, self._waiting_for_prefix.values()))
            + (0 if self._disk is None else self._disk.num_waiting),
            kv_usage=self._kv.usage,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._kv.num_query_tokens,
            prefix_cache_hits=self._kv.num_hit_tokens,
            speculation=None if self._speculation is None else self._speculation.stats(),
            kv_disk=None if self._disk is None else self._disk.stats(),
        )

    def pace(self) -> Pace | None:
        """Return the pace as fitted to the steps so far; None: it is not fitted."""
        return None if self._pace is None else self._pace.pace()

    def uncomputed_prompts(self) -> dict[str, int]:
        """Tokens that are left to compute of prompts that have begun, by request."""
        begun = [each for each in self._running if each.num_computed < each.prompt_len]
        return {each.request.request_id: each.prompt_len - each.num_computed for each in begun}

    def take_kv_events(self) -> list[KvEvent]:
        """Return and forget the changes of the prefix index since the last call."""
        return self._kv.take_events()

    def check_invariants(self) -> None:
        """AssertionError where two records disagree. Slow: for tests."""
        self._kv.check_invariants()
        if self._snapshots is not None:
            self._snapshots.check_invariants()
        waiting_for_prefix = [sequence for group in self._waiting_for_prefix.values() for sequence in group]
        known = [sequence for group in self._requests.values() for sequence in group]
        places = [*self._running, *self._waiting, *waiting_for_prefix, *filter(self._loads, known)]
        assert len(places) == len(set(places)) == len(known)
        assert set(places) == set(known)
        self._waiting.check_invariants()
        assert all(a.priority_key < b.priority_key for a, b in pairwise(self._running))
        slots = [sequence.slot for sequence in self._running]
        assert Counter([*slots, *self._free_slots]) == Counter(range(self._max_num_seqs))
        self._decoding.check(self._running)
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert 0 <= sequence.num_computed < sequence.num_tokens
            assert len(sequence.table.blocks) >= self._kv.blocks_for(sequence.num_computed)
        for sequence in (*self._waiting, *waiting_for_prefix):
            assert sequence.status is Status.WAITING
            assert sequence.slot is None
            assert not sequence.table.blocks
            assert sequence.num_computed == 0

    def _next_priority_key(self, request: Request) -> PriorityKey:
        self._num_added += 1
        return (request.priority if self._by_priority else 0, due_s(request), self._num_added)

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
        if self._waiting and self._free_slots:
            rows += self._waiting.first().num_tokens
        others = OtherRows(rows=min(rows, self._max_num_batched_tokens - len(found)), sequences=decoding)
        return found, others

    def _candidates_ahead(self, step: "_StepInFlight") -> tuple[list[Sequence], OtherRows]:
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
        if self._waiting and self._free_slots:
            rows += self._waiting.first().num_tokens
        return found, OtherRows(rows=min(rows, self._max_num_batched_tokens - len(found)), sequences=decoding)

    def _num_uncomputed(self) -> int:
        members = len(self._decoding)
        if members == len(self._running):
            return members
        return sum([len(each.token_ids) - each.num_computed for each in self._running])

    def _room_to_draft(self, sequences: list[Sequence], lengths: list[int]) -> list[int]:
        """Shorten each length to the blocks that are left once all running sequences have what they soon want."""
        kv, count = self._kv, len(self._running)
        wanted = self._num_uncomputed() + count * max(lengths, default=0)
        if kv.num_available > kv.blocks_for(wanted) + 3 * count:
            return lengths
        left, size = kv.num_available - self._soon_wanted(), kv.block_size
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

    def _blocks_to_draft(self, sequence: Sequence, length: int) -> tuple[int, ...]:
        lacking = len(sequence.token_ids) + length - len(sequence.table.blocks) * self._kv.block_size
        if lacking <= 0:
            return ()
        return tuple(self._kv.allocate(sequence.table, self._kv.blocks_for(lacking)))

    def _verified(self) -> dict[Sequence, Draft]:
        """Return the part of the drafts that this step verifies, and the blocks that it takes in addition."""
        if self._speculation is None:
            return {}
        if self._drafts is None:
            if not self._speculation.drafts_overlapped:
                return {}
            sequences, other_rows = self._candidates()
            if not sequences:
                return {}
            chunks = self._speculation.chunks(sequences, other_rows, budget=self._max_num_batched_tokens)
            if chunks is None:
                return {}
            self._drafts, self._drafting = chunks, [sequences[i] for i in chunks.chosen]
        elif self._drafts.is_unread:
            lengths = self._drafts.kept = self._drafts.lengths
            unread = zip(self._drafting, lengths.tolist(), strict=True)
            return {each: ((PLACEHOLDER,) * count, self._blocks_to_draft(each, count)) for each, count in unread}
        elif self._drafts.is_decided:
            return {}
        else:
            self._speculation.keep(self._drafts, self._drafting, self._room_to_draft)
        pairs = [(self._drafting[at], token_ids) for at, token_ids in self._drafts.verified()]
        return {each: (token_ids, self._blocks_to_draft(each, len(token_ids))) for each, token_ids in pairs}

    def _serve(self, sequence: Sequence, step: "StepBuilder") -> None:
        """Give a running sequence the rows that it wants, as far as the budget and the blocks allow."""
        num_rows, budget = len(sequence.token_ids) - sequence.num_computed, step.budget
        num_rows = num_rows if num_rows < budget else budget
        if num_rows > 1:
            num_rows = self._prompt_rows(sequence, num_rows, step)
        if sequence.status is not Status.RUNNING or num_rows == 0:
            return
        lacking = sequence.num_computed + num_rows - len(sequence.table.blocks) * self._kv.block_size
        if lacking <= 0:
            step.add(sequence, num_rows, ())
        elif self._make_room(sequence, missing := self._kv.blocks_for(lacking), step):
            step.add(sequence, num_rows, self._kv.allocate(sequence.table, missing))

    def _loads(self, sequence: Sequence) -> bool:
        """Return whether the sequence waits for its prefix to come from the disk."""
        return self._disk is not None and sequence in self._disk

    def _take_loaded(self) -> None:
        """Queue the sequences whose prefix has come from the disk."""
        if self._disk is not None:
            for sequence in self._disk.loaded():
                self._waiting.add(sequence)

    def _make_room(self, sequence: Sequence, num_blocks: int, step: "StepBuilder") -> bool:
        """Preempt the worst running sequences until num_blocks are available for this one.

        False when it is the worst itself: it pauses with the blocks it has, until a better one ends or takes them.
        """
        while not self._kv.can_allocate(num_blocks):
            worst = self._running[-1]
            if worst is sequence:
                assert len(self._running) > 1 or (self._disk is not None and self._disk.is_loading), (
                    "a sequence alone does not fit, though its request was accepted"
                )
                return False
            self._preempt(worst, step)
        return True

    def _preempt(self, sequence: Sequence, step: "StepBuilder") -> None:
        """Move it back among the waiting sequences. It keeps its tokens and loses their KV."""
        step.drop(sequence)
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.start_over()
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _admit_waiting(self, step: "StepBuilder", among: Callable[[Sequence], bool] | None = None) -> None:
        """Start waiting sequences in the order of their queue, while slots, rows and blocks last.

        among: which of them; None: all, as far as they leave room for those with targets.

        All known tokens of a sequence must fit next to what the running ones will soon want, so that it is not
        preempted at once. Where nothing runs, all blocks are available, and it fits. Slots with rows in a step in
        flight wait for its end, and so do sequences whose prompt is scored.
        """
        if not self._waiting:
            return
        free_slots = self._free_slots
        if self._in_flight:
            free_slots = [slot for slot in free_slots if slot not in self._in_flight[0].rows.slots]
        while self._waiting and free_slots and step.budget > 0:
            sequence = step.limits.next_to_start(self._waiting, self._running, among)
            if sequence is None or (self._in_flight and _owes_scores(sequence)):
                return
            if self._disk is not None and self._disk.begin(sequence, spare=self._soon_wanted()):
                self._waiting.remove(sequence)
                continue
            prefix = self._shared_prefix(sequence)
            num_own = self._kv.blocks_for(sequence.num_tokens) - len(prefix)
            if not self._kv.can_allocate(num_own, adopting=prefix, spare=self._soon_wanted()):
                return
            self._waiting.admit(sequence, num_uncached=sequence.num_tokens - len(prefix) * self._kv.block_size)
            slot = free_slots.pop()
            if free_slots is not self._free_slots:
                self._free_slots.remove(slot)
            self._admit(sequence, slot, prefix, step)

    def _admit(self, sequence: Sequence, slot: int, prefix: list[int], step: "StepBuilder") -> None:
        num_cached = len(prefix) * self._kv.block_size
        self._kv.adopt(sequence.table, prefix, num_queried=0 if sequence.needs_prompt else sequence.num_tokens)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock.now()
            sequence.num_cached = num_cached
        sequence.status = Status.RUNNING
        sequence.slot = slot
        sequence.num_computed = num_cached
        insort(self._running, sequence, key=_priority_key)
        snapshot = None if self._snapshots is None else self._snapshots.start(sequence, num_cached)
        num_rows = self._prompt_rows(sequence, min(sequence.num_uncomputed, step.budget), step)
        missing = self._kv.blocks_for(num_cached + num_rows) - len(prefix)
        if self._speculation is not None:
            self._speculation.start(sequence)
        step.start(sequence, snapshot)
        step.add(sequence, num_rows, [*prefix, *self._kv.allocate(sequence.table, missing)])

    def _shared_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold its first tokens already: in the prefix cache, or in the table of a running sample."""
        if sequence.needs_prompt or not self._shares_prefixes:
            return []
        shared = self._kv.cached_prefix(sequence.table, sequence.token_ids)
        if self._snapshots is not None:
            return shared[: self._snapshots.reach(sequence, shared)]
        num_prompt = (sequence.prompt_len - 1) // self._kv.block_size
        for sibling in self._requests[sequence.request.request_id]:
            if len(shared) >= num_prompt:
                break
            if sibling.num_computed >= num_prompt * self._kv.block_size:
                shared = sibling.table.blocks[:num_prompt]
        return shared

    def _soon_wanted(self) -> int:
        """Blocks that the running sequences lack for their known tokens, and one more for each.

        A sequence that holds more of them, for a long draft, gives none to others.
        """
        size = self._kv.block_size
        wanted = [1 - (-len(each.token_ids) // size) - len(each.table.blocks) for each in self._running]
        return sum([each for each in wanted if each > 0])

    def _launch(self, step: "StepBuilder", *, is_async: bool = False) -> StepPlan:
        self._step += 1
        released = self._take_released()
        plan = StepPlan(
            step=self._step,
            saves=() if self._snapshots is None else self._snapshots.launch(step.rows),
            released=released,
            started=tuple(step.started),
            rows=step.rows,
            is_async=is_async,
        )
        drafts, self._drafts, self._drafting = self._drafts, None, []
        self._in_flight.append(
            _StepInFlight(
                step=self._step,
                sequences=step.sequences,
                rows=step.rows,
                drafts=drafts,
                prediction=None if self._speculation is None else self._speculation.launch(plan),
            )
        )
        self._kv.begin_step()
        return plan

    def _take_released(self) -> tuple[int, ...]:
        """All slots to release, except those with rows in a step that is still in flight."""
        if not self._released:
            return ()
        busy = frozenset().union(*(each.rows.slots for each in self._in_flight))
        released = tuple(slot for slot in self._released if slot not in busy)
        self._released = [slot for slot in self._released if slot in busy]
        return released

    def _commit_one(
        self,
        step: "_StepInFlight",
        at: int,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        result: StepResult,
        deltas: StepDeltas,
    ) -> None:
        """Advance one sequence; adds to the deltas if there is something to report."""
        taken, scores, error = 0, None, result.errors.get(at)
        if error is None or token_ids:
            if at in result.prompt_logprobs and sequence.scores_prompt:
                sequence.take_prompt_logprobs(result.prompt_logprobs[at])
            taken = self._advance(sequence, step.rows.starts[at] + step.rows.counts[at], token_ids)
            scores = None if sequence.needs_only_logits else sequence.hand_over_prompt_logprobs()
        if error is not None and sequence.finish_reason is None:
            sequence.finish_reason = FinishReason.ERROR
            deltas.errors[len(deltas)] = error
        if sequence.finish_reason is not None:
            self._remove(sequence)
        elif not taken and scores is None:
            if self._state_chunk and step.rows.samples[at] and sequence.num_tokens % self._state_chunk == 0:
                self._put_back(sequence)  # its mask was not ready, and its last row is in the state already
            return
        place = len(deltas)
        _report(sequence, token_ids[:taken], deltas)
        if at in result.logprobs:
            deltas.logprobs[place] = result.logprobs[at][:taken]
        if scores is not None:
            deltas.prompt_logprobs[place] = scores
        if at in result.pooled:
            deltas.pooled[place] = result.pooled[at]
        if sequence.finish_reason is not None:
            deltas.finish_reasons[place] = sequence.finish_reason
        if sequence.stop_reason is not None:
            deltas.stop_reasons[place] = sequence.stop_reason
        summary = self._speculated(sequence)
        if summary is not None:
            deltas.speculation[place] = summary
        if sequence.request.speculation.trace and taken:
            num_cut = result.num_cut.get(at, 0)
            accepted = len(token_ids) - (error is None)
            deltas.traces[place] = self._trace(step, at, accepted, num_cut=num_cut)

    def _advance(self, sequence: Sequence, num_computed: int, token_ids: tuple[int, ...]) -> int:
        """Move past its computed rows; returns how many of the new tokens it takes."""
        only_prompt = len(sequence.token_ids) == sequence.prompt_len
        taken = sequence.advance(num_computed, token_ids)
        self._generation_tokens += taken
        sequence.tenant.generated(taken)
        self._kv.publish(sequence.table, sequence.token_ids, sequence.num_computed)
        if only_prompt and (taken or sequence.finish_reason is not None):
            self._note_prompt_done(sequence)
        return taken

    def _speculated(self, sequence: Sequence) -> SpeculationSummary | None:
        """With the last delta; with every delta where a stop string may end it, which the front-end finds."""
        if sequence.finish_reason is not None or self._speculation is None:
            return sequence.speculated
        return self._speculation.summary(sequence) if sequence.sampling.stop else None

    def _trace(self, step: "_StepInFlight", at: int, accepted: int, *, num_cut: int) -> StepTrace:
        if self._speculation is None:
            return StepTrace()
        rows = step.rows
        gamma = rows.num_drafts[at] - num_cut
        return self._speculation.trace(step.drafts, rows.slots[at], gamma=gamma, accepted=accepted)

    def _note_prompt_done(self, sequence: Sequence) -> None:
        """The first sample has computed the request's prompt: count it, and let the other samples share it."""
        if sequence.index == 0:
            self._prompt_tokens += sequence.prompt_len
            self._prompt_tokens_cached += min(sequence.num_cached, sequence.prompt_len)
            self._queue_siblings(sequence.request.request_id)

    def _queue_siblings(self, request_id: str) -> None:
        for sequence in self._waiting_for_prefix.pop(request_id, ()):
            self._waiting.add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose finish_reason is set, whatever its status."""
        request_id = sequence.request.request_id
        waiting_for_prefix = self._waiting_for_prefix.get(request_id, [])
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        elif sequence in waiting_for_prefix:
            waiting_for_prefix.remove(sequence)
        elif self._disk is not None and self._loads(sequence):
            self._disk.drop(sequence)
        else:
            self._waiting.remove(sequence)
        self._waiting.leave(sequence)
        sequence.status = Status.FINISHED
        samples = self._requests[request_id]
        samples.remove(sequence)
        if not samples:
            del self._requests[request_id]
        if sequence.index == 0 or not waiting_for_prefix:
            self._queue_siblings(request_id)

    def _stop_running(self, sequence: Sequence) -> None:
        """Take its blocks and slot. The slot may be reused at once, since plans release before they start."""
        assert sequence.slot is not None
        if self._snapshots is not None:
            self._snapshots.leave(sequence)
        self._kv.release(sequence.table)
        if self._speculation is not None:
            self._speculation.release(sequence)
        self._released.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        self._decoding.leave(sequence)
        del self._running[bisect_left(self._running, sequence.priority_key, key=_priority_key)]


@dataclass(slots=True)
class StepBuilder:
    """A StepPlan in the making. budget: rows that may still be added. sequences: of rows, in their order."""

    budget: int
    limits: StepLimits = NO_LIMITS
    started: list[SequenceStart] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    rows: StepRows = field(default_factory=StepRows)
    preempted: bool = False

    def start(self, sequence: Sequence, snapshot: int | None) -> None:
        self.started.append(
            SequenceStart(
                slot=sequence.held_slot,
                sampling=sequence.sampling,
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                token_ids=tuple(sequence.token_ids),
                cache_salt=sequence.request.cache_salt,
                predicted_token_ids=sequence.request.predicted_token_ids,
                snapshot=snapshot,
            )
        )

    def add(
        self, sequence: Sequence, num_rows: int, new_blocks: list[int] | tuple[int, ...], *, in_flight: int = 0
    ) -> None:
        """num_rows: of known tokens. in_flight: rows before these, which the step in flight computes."""
        start, known = sequence.num_computed + in_flight, sequence.token_ids
        end = start + num_rows
        self.sequences.append(sequence)
        self.rows.add(
            sequence.held_slot,
            start,
            known[start:end],
            samples=end == len(known) and sequence.generates,
            new_blocks=tuple(new_blocks),
        )
        self.budget -= num_rows

    def decode_all(self, decoding: Decoding, kept: dict[Sequence, Draft]) -> None:
        """Begin with the rows of all of these, and with those of their drafts."""
        decoding.lay(self.rows, kept)
        self.sequences += decoding.sequences
        self.budget -= len(self.rows.token_ids)

    def decode(self, sequence: Sequence, draft: tuple[int, ...], new_blocks: tuple[int, ...] = ()) -> None:
        """A row for its last known token, which is all that is missing, and the rows of a draft after it."""
        rows, last = self.rows, len(sequence.token_ids) - 1
        self.sequences.append(sequence)
        rows.slots.append(sequence.held_slot)
        rows.starts.append(last)
        rows.counts.append(1 + len(draft))
        rows.num_drafts.append(len(draft))
        rows.samples.append(sequence.generates)
        rows.token_ids.append(sequence.token_ids[last])
        rows.token_ids += draft
        if new_blocks:
            rows.new_blocks[sequence.held_slot] = new_blocks
        self.budget -= 1 + len(draft)

    def add_placeholder(self, sequence: Sequence, new_blocks: list[int] | tuple[int, ...]) -> None:
        """A row after the last known token, for the token that the step in flight will sample."""
        self.sequences.append(sequence)
        self.rows.add(
            sequence.held_slot,
            sequence.num_tokens,
            (PLACEHOLDER,),
            samples=True,
            new_blocks=tuple(new_blocks),
        )
        self.budget -= 1

    def drop(self, sequence: Sequence) -> None:
        """Take the rows of a preempted sequence back. This step has not started it: admission never preempts."""
        self.preempted = True
        if sequence in self.sequences:
            at = self.sequences.index(sequence)
            del self.sequences[at]
            self.budget += self.rows.remove(at)


@dataclass(frozen=True, slots=True)
class _DecidedAhead:
    """Drafts of the step after the one in flight, and their sequences. drafts: None: it has none."""

    drafts: StepDrafts | None
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepInFlight:
    """A step in flight. sequences: in the order of the plan's rows.

    drafts: that it verifies; None: it has none. prediction: None in an engine that never drafts.
    """

    step: int
    sequences: list[Sequence]
    rows: StepRows
    drafts: StepDrafts | None
    prediction: StepPrediction | None


@dataclass(slots=True)
class _FollowingRows:
    """Rows of a sequence after the step in flight. num_in_flight: its rows there, unless they bring a token.

    num_rows: of known tokens; 0: one row, for the token that the step in flight brings.
    """

    sequence: Sequence
    num_in_flight: int
    num_rows: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after these rows."""
        sequence = self.sequence
        if not self.num_rows:
            return len(sequence.token_ids) + 1
        return sequence.num_computed + self.num_in_flight + self.num_rows


def _report(sequence: Sequence, token_ids: tuple[int, ...], deltas: StepDeltas) -> None:
    """Append the fields that every delta has."""
    deltas.request_ids.append(sequence.request.request_id)
    deltas.indices.append(sequence.index)
    deltas.counts.append(len(token_ids))
    deltas.token_ids += token_ids
    deltas.num_cached_tokens.append(sequence.num_cached)
    deltas.num_preemptions.append(sequence.num_preemptions)
    deltas.first_scheduled_s.append(sequence.first_scheduled_s)


def _priority_key(sequence: Sequence) -> PriorityKey:
    return sequence.priority_key


def _owes_scores(sequence: Sequence) -> bool:
    """Return whether scores of its prompt are still to be read off the forward of a step."""
    return not sequence.needs_only_logits and sequence.sampling.scores_prompt
