"""The Scheduler decides which sequences run: it turns requests into StepPlans and StepResults into StepDeltas.

Owns the sequences, their slots and the order in which they are served. Sees token ids, block numbers and seconds,
never tensors. A step is propose (DraftPlanner), plan, commit. A step without drafts may also be planned while the
one before it is in flight (asynchronous scheduling): by then a sequence will have one more token, whichever token
it is, or more of its prompt computed.

Running sequences follow one total order, the priority key: (priority,) when the first token is due (targets.py).
The best one always gets its rows, if need be with the blocks of the worst one; so every step brings some sequence
nearer to its end. The WaitingQueue orders those that wait, and shares the engine fairly among tenants.
"""

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

from faser.engine.contract.kv_events import KvEvent
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import (
    PLACEHOLDER,
    DrafterCheck,
    StepDeltas,
    StepPlan,
    StepResult,
    StepSpan,
)
from faser.engine.contract.target_room import due_s
from faser.engine.control.adapters import AdapterSlots, NoAdapters
from faser.engine.control.clock import Clock
from faser.engine.control.decoding import Decoding, Draft
from faser.engine.control.draft_planner import DraftPlanner, most_drafts, soon_wanted
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.kv_disk import KvDisk, NoDisk
from faser.engine.control.pace import PaceFit
from faser.engine.control.sequence import PriorityKey, Sequence, Status, sample_seed, total_tokens
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.no_speculation import NoSpeculation
from faser.engine.control.state_snapshots import NoSnapshots, StateSnapshots
from faser.engine.control.step_builder import FollowingRows, StepBuilder, StepInFlight, StepsInFlight
from faser.engine.control.targets import NO_TARGETS, TargetKeeper, is_due_before, kind_of
from faser.engine.control.waiting_queue import WaitingQueue
from faser.errors import ConfigError, RequestError
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.statistics import EngineStats

_NO_DRAFT: Draft = (), ()


class Scheduler:
    """Raises ConfigError for limits that cannot work together.

    max_num_seqs: slots. max_num_batched_tokens: rows of a step; at least one per slot, so that no running sequence
    is left out. max_logit_rows: of a step; None: all. seed: seeds requests that have no seed. speculation: None
    never drafts. pace: is fitted to the steps; None: targets limit nothing. shares_prefixes: a sequence may begin
    with another one's blocks.
    snapshots: of recurrent states, which no block holds; None: the model has none, or shares no prefixes.
    state_chunk: tokens after which a state is kept; the row that completes them cannot be computed again. 0: any
    row can. disk: has KV of earlier prompts; None: there is none. adapters: None: requests have none. drafts: asks
    for those of each step.
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
        max_logit_rows: int | None = None,
        pace: PaceFit | None = None,
        disk: KvDisk | None = None,
        adapters: AdapterSlots | None = None,
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
        self._speculation = speculation or NoSpeculation()
        self._shares_prefixes = shares_prefixes
        self._snapshots = snapshots or NoSnapshots()
        self._state_chunk = state_chunk
        self._disk = disk or NoDisk()
        self._adapters = adapters or NoAdapters()
        self._targets = TargetKeeper(pace, clock, most_rows=max_num_batched_tokens) if pace else NO_TARGETS
        self._requests: dict[str, list[Sequence]] = {}  # unfinished samples by request id
        self._waiting_for_prefix: dict[str, list[Sequence]] = {}  # until the first sample has computed the prompt
        self._waiting = WaitingQueue(clock, kind_of)
        self._running: list[Sequence] = []  # best first
        self._decoding = Decoding(kv)  # of these
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight = StepsInFlight()
        self.drafts = DraftPlanner(
            self._speculation,
            kv,
            self._running,
            self._decoding,
            self._waiting,
            self._in_flight,
            max_num_seqs=max_num_seqs,
            max_rows=max_num_batched_tokens,
            max_drafts=most_drafts(max_num_seqs, max_num_batched_tokens, max_logit_rows),
        )
        self._num_added = 0
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0

    def add(self, request: Request) -> None:
        """Accept a request: sampling.n sequences. Raises RequestError if it can never fit."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id is {request.request_id!r}; it is in use", param="request_id")
        self._adapters.check(request)
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
                table=self._kv.new_table(request.cache_salt, request.adapter),
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
            queued = sequence not in held and sequence not in self._disk
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
        self._speculation.use_policy(name, gamma, forget=forget, overlap=overlap)

    def drafter_check(self) -> DrafterCheck | None:
        """A drafter's state that is to be compared with a cold one before the next step; None, as a rule: none."""
        return self._speculation.drafter_check()

    def drafter_checked(self, check: DrafterCheck, *, differed: bool) -> None:
        """The state has been compared. differed: and replaced."""
        self._speculation.drafter_checked(check, differed=differed)

    def has_work(self) -> bool:
        return bool(self._requests)

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute. Every plan must be committed.

        Decoding sequences come first, with a row each and the rows of their drafts; then prompts that are partly
        computed, best first, and sequences that wait and are due before them; then the others that wait. The
        drafts that `drafts` has asked for must be there.
        """
        self._in_flight.check_none()
        self._queue_loaded()
        step = StepBuilder(budget=self._max_num_batched_tokens)
        begun = self._decode(step, self.drafts.verified())
        step.limits = self._targets.limits(self._running, len(step.sequences))
        for sequence in begun:
            if self._waiting and not step.preempted:
                self._admit_waiting(step, is_due_before(sequence))
            self._serve(sequence, step)
        if not step.preempted:
            self._admit_waiting(step)
        return self._launch(step) if step.rows else None

    def _decode(self, step: StepBuilder, kept: dict[Sequence, Draft]) -> list[Sequence]:
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
                draft, blocks = kept.get(sequence, _NO_DRAFT)
                inputs = (sequence.token_ids[num_computed], *draft)
                step.add(
                    sequence,
                    num_computed,
                    inputs,
                    samples=sequence.generates,
                    num_drafts=len(draft),
                    new_blocks=blocks,
                )
            else:
                self._serve(sequence, step)
        return begun

    def can_schedule_async(self) -> bool:
        """Return whether the next step can be planned now: this one has no drafts, and scores no prompt."""
        first = self._in_flight[0]
        if first.drafts is not None or self._speculation.drafts_overlapped:
            return False
        return not any(map(_owes_scores, first.sequences))

    def plan_async(self, late: Collection[int] = ()) -> StepPlan | None:
        """Plan the step after the one in flight, which has no drafts; None: it has to wait for that one's tokens.

        The order is that of `plan`. A sequence that the step in flight ends, for other reasons than its length, is
        computed in vain. Preemption waits for a step with nothing in flight, and so do sequences whose prompt is
        scored. late: slots without rows, as LaunchedStep has them; they go on once their masks are there.
        """
        in_flight = self._in_flight.only()
        if self._waiting and self._free_slots and self._starts_with_scores():
            return None
        if any(map(_owes_scores, self._running)):
            return None
        self._queue_loaded()
        decoding, prompts = self._following(in_flight, late)
        limits = self._targets.limits(self._running, len(decoding))
        step = StepBuilder(budget=self._max_num_batched_tokens, limits=limits)
        following = [*decoding, *self._within_budget(prompts, len(decoding), step)]
        kv = self._kv
        missing = [kv.blocks_for(each.end) - len(each.sequence.table.blocks) for each in following]
        if sum([each for each in missing if each > 0]) > kv.num_available:
            return None
        if not self._speculation.passes_over(len(decoding), prompts=len(following) > len(decoding)):
            return None
        for each, num_blocks in zip(following, missing, strict=True):
            new_blocks = kv.allocate(each.sequence.table, num_blocks) if num_blocks > 0 else ()
            if each.num_rows:
                step.add_known(each.sequence, each.num_rows, new_blocks, in_flight=each.num_in_flight)
            else:  # for the token that the step in flight will sample
                start = each.sequence.num_tokens
                step.add(each.sequence, start, (PLACEHOLDER,), samples=True, new_blocks=new_blocks)
        self._admit_waiting(step)
        return self._launch(step, is_async=True) if step.rows else None

    def _following(
        self, in_flight: StepInFlight, late: Collection[int]
    ) -> tuple[list[FollowingRows], list[FollowingRows]]:
        """The rows that running sequences want after the step in flight: those of one row each, and prompts."""
        decoding: list[FollowingRows] = []
        prompts: list[FollowingRows] = []
        positions = {sequence: at for at, sequence in enumerate(in_flight.sequences)}
        for sequence in self._running:
            if sequence.slot in late:
                continue
            at = positions.get(sequence)
            if at is not None and in_flight.plan.rows.samples[at]:
                if sequence.may_draft:  # else the step in flight samples its last token
                    decoding.append(FollowingRows(sequence, 0, 0))
                continue
            num_in_flight = 0 if at is None else in_flight.plan.rows.counts[at]
            wanted = sequence.num_uncomputed - num_in_flight
            if wanted:
                found = decoding if wanted == 1 else prompts
                found.append(FollowingRows(sequence, num_in_flight, wanted))
        return decoding, prompts

    def _starts_with_scores(self) -> bool:
        """Return whether the prompt of the next sequence to start is scored, which needs a step of its own.

        One that has to wait for an adapter slot holds no step up.
        """
        may_start = self._adapters.startable(None, self._in_flight)
        first = self._waiting.first() if may_start is None else self._waiting.first_of(may_start)
        return first is not None and _owes_scores(first)

    def _within_budget(
        self, prompts: list[FollowingRows], num_decoding: int, step: StepBuilder
    ) -> list[FollowingRows]:
        """Keep as many rows of the prompts, in their order, as decoding sequences and targets leave."""
        budget, found = self._max_num_batched_tokens - num_decoding, []
        for each in prompts:
            num_rows = self._prompt_rows(
                each.sequence, min(each.num_rows, budget), step, in_flight=each.num_in_flight
            )
            if num_rows:
                found.append(FollowingRows(each.sequence, each.num_in_flight, num_rows))
            budget -= num_rows
        return found

    def _prompt_rows(self, sequence: Sequence, num_rows: int, step: StepBuilder, *, in_flight: int = 0) -> int:
        """Return how many of num_rows prompt rows the step gets; its limits count them. in_flight: rows before."""
        num_rows = self._snapshots.rows_to_end(sequence, sequence.num_computed + in_flight, num_rows)
        return step.limits.take_rows(sequence, num_rows)

    def commit(self, plan: StepPlan, result: StepResult, *, last: StepSpan | None = None) -> StepDeltas:
        """Take the result of a step; deltas for sequences with something to report, in no particular order.

        The drafts made during it must be there. last: the step before this one; None: the engine had nothing to
        do in between.
        """
        assert self._in_flight, f"no step is in flight; step {plan.step} cannot be committed"
        first = self._in_flight[0]
        assert plan.step == first.plan.step == result.step, f"step {result.step} is not step {first.plan.step}"
        assert len(result.counts) == len(plan.rows), f"{len(result.counts)} answers for {len(plan.rows)} sequences"
        sampled = result.by_sequence()
        self._targets.observe(plan, result, last)
        self.drafts.learn(plan, result, first, sampled, last)
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
        self._snapshots.commit()
        return deltas

    def stats(self) -> EngineStats:
        """The queue, the KV pool, tokens. The engine counts the steps and their times."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting)
            + sum(map(len, self._waiting_for_prefix.values()))
            + self._disk.num_waiting,
            kv_usage=self._kv.usage,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._kv.num_query_tokens,
            prefix_cache_hits=self._kv.num_hit_tokens,
            speculation=self._speculation.stats(),
            kv_disk=self._disk.stats(),
            running_adapters=self._adapters.names(self._running),
            waiting_adapters=self._adapters.names(
                each for group in self._requests.values() for each in group if each.status is Status.WAITING
            ),
        )

    def pace(self) -> Pace | None:
        """Return the pace as fitted to the steps so far; None: it is not fitted."""
        return self._targets.pace()

    def uncomputed_prompts(self) -> dict[str, int]:
        """Tokens that are left to compute of prompts that have begun, by request."""
        begun = [each for each in self._running if each.num_computed < each.prompt_len]
        return {each.request.request_id: each.prompt_len - each.num_computed for each in begun}

    def adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters of all requests, and of rows in flight of those that have ended."""
        requests = [group[0].request for group in self._requests.values()]
        requests += [each.request for step in self._in_flight for each in step.sequences]
        return {each.adapter.digest for each in requests if each.adapter is not None}

    def forget_adapter(self, digest: str) -> None:
        """An adapter that is not in use leaves the memory."""
        self._adapters.forget(digest)

    def take_kv_events(self) -> list[KvEvent]:
        """Return and forget the changes of the prefix index since the last call."""
        return self._kv.take_events()

    def check_invariants(self) -> None:
        """AssertionError where two records disagree. Slow: for tests."""
        self._kv.check_invariants()
        self._snapshots.check_invariants()
        self._adapters.check_invariants(self._running)
        waiting_for_prefix = [sequence for group in self._waiting_for_prefix.values() for sequence in group]
        known = [sequence for group in self._requests.values() for sequence in group]
        places = [*self._running, *self._waiting, *waiting_for_prefix]
        places += [each for each in known if each in self._disk]
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

    def _serve(self, sequence: Sequence, step: StepBuilder) -> None:
        """Give a running sequence the rows that it wants, as far as the budget and the blocks allow."""
        num_rows, budget = len(sequence.token_ids) - sequence.num_computed, step.budget
        num_rows = num_rows if num_rows < budget else budget
        if num_rows > 1:
            num_rows = self._prompt_rows(sequence, num_rows, step)
        if sequence.status is not Status.RUNNING or num_rows == 0:
            return
        lacking = sequence.num_computed + num_rows - len(sequence.table.blocks) * self._kv.block_size
        if lacking <= 0:
            step.add_known(sequence, num_rows, ())
        elif self._make_room(sequence, missing := self._kv.blocks_for(lacking), step):
            step.add_known(sequence, num_rows, self._kv.allocate(sequence.table, missing))

    def _queue_loaded(self) -> None:
        """Queue the sequences whose prefix has come from the disk."""
        for sequence in self._disk.loaded():
            self._waiting.add(sequence)

    def _make_room(self, sequence: Sequence, num_blocks: int, step: StepBuilder) -> bool:
        """Preempt the worst running sequences until num_blocks are available for this one.

        False when it is the worst itself: it pauses with the blocks it has, until a better one ends or takes them.
        """
        while not self._kv.can_allocate(num_blocks):
            worst = self._running[-1]
            if worst is sequence:
                assert len(self._running) > 1 or self._disk.is_loading, (
                    "a sequence alone does not fit, though its request was accepted"
                )
                return False
            self._preempt(worst, step)
        return True

    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        """Move it back among the waiting sequences. It keeps its tokens and loses their KV."""
        step.drop(sequence)
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.start_over()
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _admit_waiting(self, step: StepBuilder, among: Callable[[Sequence], bool] | None = None) -> None:
        """Start waiting sequences in the order of their queue, while slots, rows and blocks last.

        among: which of them; None: all, as far as they leave room for those with targets.

        All known tokens of a sequence must fit next to what the running ones will soon want, so that it is not
        preempted at once. Where nothing runs, all blocks are available, and it fits. Slots with rows in a step in
        flight wait for its end, and so do sequences whose prompt is scored. One whose adapter can have no slot is
        passed over.
        """
        if not self._waiting:
            return
        free_slots = self._in_flight.idle(self._free_slots)
        while self._waiting and free_slots and step.budget > 0:
            may_start = self._adapters.startable(among, self._in_flight)
            sequence = step.limits.next_to_start(self._waiting, self._running, may_start)
            if sequence is None or (self._in_flight and _owes_scores(sequence)):
                return
            spare = soon_wanted(self._kv, self._running)
            if self._disk.begin(sequence, spare=spare):
                self._waiting.remove(sequence)
                continue
            prefix = self._shared_prefix(sequence)
            num_own = self._kv.blocks_for(sequence.num_tokens) - len(prefix)
            if not self._kv.can_allocate(num_own, adopting=prefix, spare=spare):
                return
            self._waiting.admit(sequence, num_uncached=sequence.num_tokens - len(prefix) * self._kv.block_size)
            slot = free_slots.pop()
            if free_slots is not self._free_slots:
                self._free_slots.remove(slot)
            self._admit(sequence, slot, prefix, step)

    def _admit(self, sequence: Sequence, slot: int, prefix: list[int], step: StepBuilder) -> None:
        num_cached = len(prefix) * self._kv.block_size
        self._kv.adopt(sequence.table, prefix, num_queried=0 if sequence.needs_prompt else sequence.num_tokens)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock.now()
            sequence.num_cached = num_cached
        sequence.status = Status.RUNNING
        sequence.slot = slot
        sequence.num_computed = num_cached
        insort(self._running, sequence, key=_priority_key)
        snapshot = self._snapshots.start(sequence, num_cached)
        num_rows = self._prompt_rows(sequence, min(sequence.num_uncomputed, step.budget), step)
        missing = self._kv.blocks_for(num_cached + num_rows) - len(prefix)
        self._speculation.start(sequence)
        step.adapters += self._adapters.start(sequence, self._in_flight)
        step.start(sequence, snapshot)
        step.add_known(sequence, num_rows, [*prefix, *self._kv.allocate(sequence.table, missing)])

    def _shared_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold its first tokens already: in the prefix cache, or in the table of a running sample."""
        if sequence.needs_prompt or not self._shares_prefixes:
            return []
        shared = self._kv.cached_prefix(sequence.table, sequence.token_ids)
        if self._state_chunk:
            return shared[: self._snapshots.reach(sequence, shared)]
        num_prompt = (sequence.prompt_len - 1) // self._kv.block_size
        for sibling in self._requests[sequence.request.request_id]:
            if len(shared) >= num_prompt:
                break
            if sibling.num_computed >= num_prompt * self._kv.block_size:
                shared = sibling.table.blocks[:num_prompt]
        return shared

    def _launch(self, step: StepBuilder, *, is_async: bool = False) -> StepPlan:
        self._in_flight.number += 1
        plan = StepPlan(
            step=self._in_flight.number,
            saves=self._snapshots.launch(step.rows),
            released=self._in_flight.take_released(),
            adapters=tuple(step.adapters),
            started=tuple(step.started),
            rows=step.rows,
            is_async=is_async,
        )
        drafts, prediction = self.drafts.take(), self._speculation.launch(plan)
        self._in_flight.append(StepInFlight(plan, step.sequences, drafts, prediction))
        self._kv.begin_step()
        return plan

    def _commit_one(
        self,
        step: StepInFlight,
        at: int,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        result: StepResult,
        deltas: StepDeltas,
    ) -> None:
        """Advance one sequence; adds to the deltas if there is something to report."""
        rows, taken, scores, error = step.plan.rows, 0, None, result.errors.get(at)
        if error is None or token_ids:
            if at in result.prompt_logprobs and sequence.scores_prompt:
                sequence.take_prompt_logprobs(result.prompt_logprobs[at])
            taken = self._advance(sequence, rows.starts[at] + rows.counts[at], token_ids)
            scores = None if sequence.needs_only_logits else sequence.hand_over_prompt_logprobs()
        if error is not None and sequence.finish_reason is None:
            sequence.finish_reason = FinishReason.ERROR
            deltas.errors[len(deltas)] = error
        if sequence.finish_reason is not None:
            self._remove(sequence)
        elif not taken and scores is None:
            if self._state_chunk and rows.samples[at] and sequence.num_tokens % self._state_chunk == 0:
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
        summary = None
        if sequence.finish_reason is not None:
            summary = sequence.speculated
        elif sequence.sampling.stop:  # the front-end may find that it ends here
            summary = self._speculation.summary(sequence)
        if summary is not None:
            deltas.speculation[place] = summary
        if sequence.request.speculation.trace and taken:
            deltas.traces[place] = self._speculation.trace(
                step.drafts,
                rows.slots[at],
                gamma=rows.num_drafts[at] - result.num_cut.get(at, 0),
                accepted=len(token_ids) - (error is None),
            )

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
        elif sequence in self._disk:
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
        self._snapshots.leave(sequence)
        self._kv.release(sequence.table)
        self._speculation.release(sequence)
        self._adapters.leave(sequence)
        self._in_flight.released.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        self._decoding.leave(sequence)
        del self._running[bisect_left(self._running, sequence.priority_key, key=_priority_key)]


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
    """Return whether log probabilities of its prompt are still to be read off the forward of a step."""
    return not sequence.needs_only_logits and sequence.scores_prompt
