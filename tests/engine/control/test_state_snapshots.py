"""Which sequences go on from a snapshot of a recurrent state, and of which states there is one.

Oracles: the executor's memory (a state of exactly a sequence's own tokens, which is never taken back behind a
whole chunk), and lists of tokens, searched one by one. Bugs seen to be caught: a snapshot
one block before or behind the state that was saved; one of a state with drafted rows; one that was given away
before it was read; one that outlives its block.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from faser.engine.contract.plan import SequenceDelta, StateSave, StepPlan, StepRows
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.engine.control.sequence import Sequence, Tenant
from faser.engine.control.state_snapshots import StateSnapshots
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.engine.driving import BLOCK_SIZE, CHUNK, Driver, request
from tests.fakes import RandomPolicy, ScriptedExecutor

TEXT = list(range(100, 400))


def driver(num_snapshots: int = 8, **settings: object) -> Driver:
    usual = {"num_blocks": 400, "max_model_len": 400, "max_num_batched_tokens": 64}
    return Driver(num_snapshots=num_snapshots, **usual | settings)  # type: ignore[arg-type]


def cached(found: Driver, *requests: Request) -> list[int]:
    """Tokens that the samples of these found in the cache, once all have ended with the tokens they should."""
    found.add(*requests)
    found.run()
    found.check(*requests)
    return [last(found, each, index).num_cached_tokens for each in requests for index in range(each.sampling.n)]


def last(found: Driver, asked: Request, index: int = 0) -> SequenceDelta:
    delta = found.samples[asked.request_id, index].last
    assert delta is not None
    return delta


def saved_ends(plans: Iterable[StepPlan]) -> list[int]:
    return [save.num_tokens for plan in plans for save in plan.saves]


def test_the_samples_of_a_request_compute_its_prompt_once() -> None:
    asked = request("a", TEXT[:43], n=3)
    found = driver()
    assert cached(found, asked) == [0, 36, 36]  # 39 tokens without the template's tail
    rows = [rows for plan in found.executor.steps for rows in plan.rows]
    assert sum(len(each.token_ids) for each in rows if each.start < 36) == 36


@pytest.mark.parametrize("tail, kept", [(None, 36), (0, 40), (3, 40), (4, 36), (12, 28)])
def test_a_prompt_leaves_its_snapshot_before_what_later_turns_lack(tail: int | None, kept: int) -> None:
    """The next turn has the prompt up to that, and then the answer without its thinking."""
    found = driver()
    cached(found, replace(request("a", TEXT[:43]), prompt_tail=tail))
    lacking = 4 if tail is None else tail
    assert cached(found, request("b", [*TEXT[: 43 - lacking], 7, 8, 9, 7, 8])) == [kept]


def test_a_turn_goes_on_where_the_turn_before_it_ended() -> None:
    """With what was said, and with what a template leaves out of it."""
    found, first = driver(), request("a", TEXT[:43], max_tokens=10)
    assert cached(found, first) == [0]
    said = found.samples["a", 0].token_ids
    assert cached(found, request("b", [*TEXT[:43], *said, 7, 8, 9])) == [52]  # of 53, the last one is not computed
    assert cached(found, request("c", [*TEXT[:39], 7, 8, 9])) == [36]


def test_the_third_prompt_with_a_beginning_goes_on_behind_it() -> None:
    """The second one leaves a snapshot where both part; a beginning of few tokens is not worth one."""
    for shared, wanted in ((130, 128), (60, 0)):
        found = driver()
        prompts = [[*TEXT[:shared], *range(1000 * i, 1000 * i + 30)] for i in (1, 2, 3)]
        hits = [cached(found, request(str(i), prompt))[0] for i, prompt in enumerate(prompts)]
        assert hits == [0, 0, wanted]


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    text, limits = [*range(1000, 6000)], {"num_blocks": 1400, "max_model_len": 5100, "max_num_batched_tokens": 500}
    found = driver(num_snapshots=16, **limits)
    found.add(request("a", text, max_tokens=1))
    assert saved_ends(found.run()) == [2048, 4096, 4996]
    assert cached(found, request("b", [*text[:4500], 7])) == [4096]
    few = driver(num_snapshots=8, **limits)
    few.add(request("a", text, max_tokens=1))
    assert saved_ends(few.run()) == [2500, 4996]  # a quarter of the snapshots


def test_another_salt_or_text_finds_no_snapshot() -> None:
    found = driver()
    plain = request("a", TEXT[:43])
    salted = [replace(plain, request_id=name, cache_salt="s") for name in "bc"]
    assert [cached(found, each) for each in (plain, *salted)] == [[0], [0], [36]]


def test_the_least_recently_used_snapshot_makes_room() -> None:
    found = driver(num_snapshots=2)
    prompts = {name: [*range(at, at + 23)] for name, at in (("a", 1000), ("b", 2000), ("c", 3000))}
    for name in "ab":
        cached(found, request(name, prompts[name], max_tokens=1))
    assert cached(found, request("a again", prompts["a"], max_tokens=1)) == [16]
    cached(found, request("c", prompts["c"], max_tokens=1))
    hits = {name: cached(found, request(f"{name} last", prompts[name], max_tokens=1))[0] for name in "ac"}
    assert hits == {"a": 16, "c": 16}
    assert cached(found, request("b last", prompts["b"], max_tokens=1)) == [0]


def test_a_snapshot_goes_with_its_block() -> None:
    found = driver(num_blocks=12)
    cached(found, request("a", TEXT[:24], max_tokens=1))
    cached(found, request("b", [*range(1000, 1040)], max_tokens=8))
    assert cached(found, request("c", TEXT[:24], max_tokens=1)) == [0]


def test_a_preempted_and_an_aborted_sequence_leave_where_they_can_go_on() -> None:
    found = driver(num_blocks=26, max_num_seqs=2)
    old, young = request("old", TEXT[:31], max_tokens=40), request("young", TEXT[100:125], max_tokens=30)
    found.add(old, young)
    found.run()
    found.check(old, young)
    assert last(found, young).num_preemptions > 0
    starts = [start for plan in found.executor.steps for start in plan.started]
    assert [start.snapshot is None for start in starts] == [True, True, *[False] * (len(starts) - 2)]
    assert len(starts) > 2

    found = driver()
    found.add(request("a", TEXT[:300], max_tokens=10))
    found.step()
    found.abort("a")
    assert cached(found, request("b", TEXT[:300], max_tokens=10)) == [64]


def test_a_sequence_that_fails_leaves_no_snapshot() -> None:
    found = driver()
    found.add(request("a", TEXT[:43]))
    found.executor.fail_slots.add(0)
    assert saved_ends(found.run()) == []
    assert last(found, request("a", TEXT[:43])).finish_reason is FinishReason.ERROR


def test_prompts_share_nothing_without_snapshots_or_without_prefix_caching() -> None:
    for settings in ({"num_snapshots": 0}, {"prefix_caching": False}):
        assert cached(driver(**settings), request("a", TEXT[:43], n=2), request("b", TEXT[:43])) == [0, 0, 0]


@pytest.mark.parametrize("num_snapshots", [1, 3, 20])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.full(but=("False-3", "True-1", "True-20"))
def test_conversations_with_drafts_and_too_few_blocks_find_their_own_states(
    num_snapshots: int, ahead: bool
) -> None:
    """Drafts of random lengths, some pruned; samples dropped in the middle; what was said comes again."""
    hits = 0
    for seed in range(12):
        rng = random.Random(seed)
        executor = ScriptedExecutor(block_size=BLOCK_SIZE, prunes=rng, chunk=CHUNK)
        found = driver(
            num_snapshots,
            num_blocks=60,
            max_num_seqs=4,
            speculates=RandomPolicy(seed),
            ahead=ahead,
            executor=executor,
        )
        said = {name: TEXT[: rng.randint(30, 60)] for name in "abc"}
        for turn in range(4):
            asked = [
                request(f"{name}{turn}", prompt, seed=seed, max_tokens=12, n=rng.randint(1, 2))
                for name, prompt in said.items()
            ]
            found.add(*asked)
            for _ in range(rng.randint(1, 12)):
                if found.scheduler.has_work():
                    found.step()
            dropped = rng.choice(asked)
            found.abort(dropped.request_id)
            found.run()
            found.check(*(each for each in asked if each is not dropped))
            for each, name in zip(asked, said, strict=True):
                said[name] = [*said[name], *found.samples[each.request_id, 0].token_ids, rng.randint(0, 1)]
        hits += found.scheduler.stats().prefix_cache_hits
    assert hits > 0


class PinsNothing(StateSnapshots):
    """Planted: a snapshot may be given away before the plan that reads it has gone out."""

    def start(self, sequence: Sequence, num_cached: int) -> int | None:
        found = super().start(sequence, num_cached)
        self._restoring.clear()
        return found


@dataclass
class Tokens:
    """Oracle of the book-keeping: prefixes that have a snapshot, the least recently used one first."""

    room: int
    kept: list[tuple[int, ...]] = field(default_factory=list)
    read: set[tuple[int, ...]] = field(default_factory=set)  # by the plan in the making

    def save(self, prefix: tuple[int, ...]) -> None:
        if prefix in self.kept:
            self.kept.remove(prefix)
        elif len(self.kept) == self.room:
            unread = [each for each in self.kept if each not in self.read]
            if not unread:
                return
            self.kept.remove(unread[0])
        self.kept.append(prefix)

    def longest(self, token_ids: list[int], num_cached: int) -> int:
        lengths = [len(each) for each in self.kept if each == tuple(token_ids[: len(each)])]
        return max([each for each in lengths if each <= num_cached], default=0)


class World:
    """Sequences over StateSnapshots and a KvManager, without a scheduler; what the data plane would hold."""

    def __init__(self, seed: int, snapshots: type[StateSnapshots]) -> None:
        self.rng = random.Random(seed)
        self.kv = KvManager(24, BLOCK_SIZE)
        self.num_snapshots = self.rng.randint(1, 4)
        self.snapshots = snapshots(self.kv, self.num_snapshots, num_slots=4, chunk=CHUNK)
        self.tokens = Tokens(self.num_snapshots)
        self.running: list[Sequence] = []
        self.begun: list[Sequence] = []  # since the last plan
        self.starts: list[tuple[int, int | None, tuple[int, ...]]] = []  # slot, snapshot, tokens; of the next plan
        self.in_slot: dict[int, list[int]] = {}  # tokens that the slot's state has
        self.held: dict[int, tuple[int, ...]] = {}  # by snapshot
        self.num_hits = 0

    def live(self) -> None:
        for _ in range(60):
            getattr(self, self.rng.choice(["arrive", "arrive", "leave", "step", "step"]))()
            self.forget()

    def forget(self) -> None:
        """Blocks may have lost their content: so have the snapshots that end with them."""
        self.tokens.kept = [each for each in self.tokens.kept if self.has(each)]

    def has(self, prefix: tuple[int, ...]) -> bool:
        """Whether a block that ends with these tokens is published."""
        table = self.kv.new_table()
        return self.kv.is_published(self.kv._digest_at(table, list(prefix), len(prefix) // BLOCK_SIZE - 1))

    def arrive(self) -> None:
        free = set(range(4)) - {each.held_slot for each in self.running}
        if not free:
            return
        tail = [self.rng.randint(0, 1) for _ in range(self.rng.randint(0, 3))]
        prompt = [*TEXT[: self.rng.randint(1, 30)], *tail]
        sequence = new_sequence(prompt, self.kv.new_table())
        shared = self.kv.cached_prefix(sequence.table, sequence.token_ids)
        num_cached = len(shared) * BLOCK_SIZE
        prefix = shared[: self.snapshots.reach(sequence, shared)]
        hit = len(prefix) * BLOCK_SIZE
        assert hit == self.tokens.longest(prompt, num_cached)
        if not self.kv.can_allocate(self.kv.blocks_for(len(prompt)) - len(prefix), adopting=prefix):
            return
        self.kv.adopt(sequence.table, prefix)
        sequence.slot, sequence.num_computed = min(free), hit
        snapshot = self.snapshots.start(sequence, hit)
        self.running.append(sequence)
        self.begun.append(sequence)
        if snapshot is not None:
            self.num_hits += 1
            self.tokens.save(tuple(prompt[:hit]))
            self.tokens.read.add(tuple(prompt[:hit]))
        self.starts.append((sequence.held_slot, snapshot, tuple(prompt[:hit])))
        self.kv.allocate(sequence.table, self.kv.blocks_for(len(prompt)) - len(prefix))

    def leave(self) -> None:
        if not self.running or (sequence := self.rng.choice(self.running)) in self.begun:
            return
        self.expect_save(sequence)
        self.snapshots.leave(sequence)
        self.kv.release(sequence.table)
        self.running.remove(sequence)

    def step(self) -> None:
        """Launch and commit rows of all that run, those of a draft included; the saves see the states before."""
        rows, launched = StepRows(), []
        for each in self.running:
            wanted = min(each.num_uncomputed, self.rng.randint(1, 12))
            count = self.snapshots.rows_to_end(each, each.num_computed, wanted)
            assert 0 < count <= wanted or wanted == 0
            if count:
                num_drafts = self.rng.randint(0, 2) if count == each.num_uncomputed else 0
                inputs = [0] * (count + num_drafts)
                rows.add(each.held_slot, each.num_computed, inputs, samples=False, num_drafts=num_drafts)
                launched.append((each, count))
        self.execute(self.snapshots.launch(rows))
        self.begun, self.starts = [], []
        self.tokens.read.clear()
        for each, count in launched:
            each.num_computed += count
            self.in_slot[each.held_slot] = each.token_ids[: each.num_computed // CHUNK * CHUNK]
            self.kv.publish(each.table, each.token_ids, each.num_computed)
        for each in self.wanted():
            self.expect_save(each)
        self.snapshots.commit()
        self.snapshots.check_invariants()

    def wanted(self) -> list[Sequence]:
        """Those whose state ends where a snapshot is wanted, in the order in which they are asked."""
        return [each for each, ends in self.snapshots._wanted.items() if len(self.in_slot[each.held_slot]) in ends]

    def expect_save(self, sequence: Sequence) -> None:
        prefix = tuple(self.in_slot[sequence.held_slot])
        if prefix and len(prefix) % BLOCK_SIZE == 0 and self.has(prefix):
            self.tokens.save(prefix)

    def execute(self, saves: tuple[StateSave, ...]) -> None:
        """What the data plane does with a plan before its rows."""
        for save in saves:
            assert save.num_tokens == len(self.in_slot[save.slot])
            self.held[save.snapshot] = tuple(self.in_slot[save.slot])
        for slot, snapshot, prefix in self.starts:
            found = () if snapshot is None else self.held[snapshot]
            assert found == prefix, "a sequence reads a snapshot of other tokens"
            self.in_slot[slot] = list(prefix)


def new_sequence(prompt: list[int], table: SequenceBlocks) -> Sequence:
    return Sequence(
        Request(request_id="a", prompt_token_ids=tuple(prompt), sampling=SamplingParams()),
        0,
        priority_key=(0, 0.0, 0),
        tenant=Tenant(""),
        seed=1,
        table=table,
        max_total=100,
        eos_token_ids=frozenset(),
    )


def test_book_keeping_is_that_of_lists_of_tokens() -> None:
    worlds = [World(seed, StateSnapshots) for seed in range(150)]
    for each in worlds:
        each.live()
    assert sum(each.num_hits for each in worlds) > 300


def test_a_snapshot_that_was_given_away_before_it_was_read_is_caught() -> None:
    worlds = [World(seed, PinsNothing) for seed in range(150)]
    with pytest.raises(AssertionError):
        list(map(World.live, worlds))
