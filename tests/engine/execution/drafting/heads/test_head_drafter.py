"""Drafts of a head: what it says of the states of a sequence's tokens and of these tokens, and of nothing else.

Oracle: the target's layers run one after the other over the tokens alone, and the head over these states, in
caches of their own: over all of them where the head knows the whole sequence, though others have computed a part;
else from the block of the first one that it was given. The head's arithmetic has tests of its own.

Planted bugs that these tests have caught: a state goes with its own token, not with the next one; a layer is
captured one layer late; rows of refused draft tokens stay in the head's cache, or their states in the ring; a slot
keeps its history after a preemption; the last row is computed twice where nothing came in between; a draft token
gets the random numbers of another position; rows with places of their own are published, or blocks keep their
marks while they are written again; a view begins at another block than its places; unknown states are not 0; long
prompts are not read as they come, or before the token that follows is known.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceRows, StepRows, StopRule
from faser.engine.execution.drafting.cold_state import Rebuilds
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates
from faser.engine.execution.drafting.heads.head import HeadDrafter, HeadLoop, HeadRunner
from faser.engine.execution.drafting.heads.weights import load_head
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    DraftVocabularySampler,
    GreedyDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.driving import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    World,
    kv_shape,
    make_decoder,
)
from tests.engine.execution.drafting.seeded_heads import head_spec, write_seeded

METHOD, CAP = "eagle3", 6
STATE_LAYERS = (0, 2, 4)  # the first and the last that there is
MAX_PLACES = MAX_LEN + CAP


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of four layers, and a head for it."""
    folder = tmp_path_factory.mktemp("head")
    config = tiny_llama_config() | {"num_hidden_layers": 4}
    write_checkpoint(folder / "target", config, random_weights(llama_shapes(config)))
    write_seeded(folder / "head", head_spec(state_layers=STATE_LAYERS))
    return folder / "target", folder / "head"


def one_sequence(start: int, count: int, num_blocks: int) -> RowLayout:
    return RowLayout(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_len=torch.tensor([start + count], dtype=torch.int32),
        positions=torch.arange(start, start + count, dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
    )


Choose = Callable[[Tensor, int], int]  # from logits [1, Vd] and the position of the token: its row


def greedy(logits: Tensor, _position: int) -> int:
    return int(logits[0].argmax())


@dataclass
class Oracle:
    """Drafts from tokens alone. The head's buffers are its own."""

    decoder: Decoder
    head_directory: Path
    states: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = TorchBackend()
        self.head = load_head(
            self.head_directory, self.decoder, self.backend, max_positions=MAX_PLACES, max_rows=MAX_LEN
        )

    @torch.inference_mode()
    def states_of(self, token_ids: tuple[int, ...]) -> Tensor:
        """[N, K * H], a row at a time, each layer's from a run that ends there."""
        if token_ids not in self.states:
            rows: list[list[Tensor]] = [[] for _ in token_ids]
            num_blocks = -(-MAX_LEN // BLOCK_SIZE)
            for layer in STATE_LAYERS:
                cache = self.backend.allocate_kv(kv_shape(self.decoder))
                for position, token_id in enumerate(token_ids):
                    plan = self.backend.plan(one_sequence(position, 1, num_blocks), BLOCK_SIZE)
                    hidden = self.decoder.embed(torch.tensor([token_id]))
                    rows[position].append(self.decoder.run_layers(hidden, 0, layer, cache, plan).clone())
            self.states[token_ids] = torch.cat([torch.cat(row, dim=1) for row in rows])
        return self.states[token_ids]

    @torch.inference_mode()
    def drafts(
        self,
        token_ids: tuple[int, ...],
        first: int,
        known: int,
        count: int,
        choose: Choose = greedy,
        others: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """Drafts of a head whose rows begin with this state, and that knows the states from `known` on.

        others: by the position of their states, rows that have another token than the one that follows. Ids are
        the target's.
        """
        spec, draft_ids = self.head.spec.decoder, self.head.draft_ids
        assert draft_ids is not None
        cache = self.backend.allocate_kv(head_kv(self.head.spec.decoder.num_kv_heads, spec.head_dim, 64))
        states, drafted = self.states_of(token_ids[:-1]), [0]
        hidden, num_known = states[:0], len(token_ids)
        for row in range(first, num_known + count - 2):
            of_known = row < num_known - 1
            token_id = others.get(row, token_ids[row + 1]) if of_known else drafted[-1]
            state = states[[row]] if known <= row and of_known else torch.zeros_like(states[:1])
            features = self.head.features(state) if of_known else hidden
            plan = self.backend.plan(one_sequence(row - first, 1, 64), BLOCK_SIZE)
            hidden = self.head.run(torch.tensor([token_id]), features, cache, plan).clone()
            if row >= num_known - 2:
                position = num_known + len(drafted) - 1
                drafted.append(int(draft_ids[choose(self.head.logits(hidden), position)]))
        return tuple(drafted[1:])


def head_kv(num_kv_heads: int, head_dim: int, num_blocks: int) -> KvShape:
    return KvShape(
        heads=((num_kv_heads, head_dim),),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )


class Drafting:
    """A target that captures, a head that drafts, and what the head must have read of every slot."""

    def __init__(
        self,
        directories: tuple[Path, Path],
        rng: random.Random,
        *,
        ring_rows: int = 4000,
        most_each: int = 1024,
        prompt_rows: int = 1024,
        sampler: DraftSampler | None = None,
        trained: int = MAX_PLACES,
    ) -> None:
        target, head_directory = directories
        backend, decoder = TorchBackend(), make_decoder(target, STATE_LAYERS)
        self.runner = Runner(decoder, backend, kv_shape(decoder))
        head = load_head(head_directory, decoder, backend, max_positions=MAX_PLACES, max_rows=MAX_ROWS)
        assert head.draft_ids is not None
        self.ring = HiddenStates(
            num_slots=NUM_SLOTS,
            num_rows=ring_rows,
            width=head.spec.states_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
            most_each=most_each,
            prompt_rows=prompt_rows,
        )
        spec = head.spec.decoder
        kv = head_kv(spec.num_kv_heads, spec.head_dim, NUM_BLOCKS)
        self.head_runner = HeadRunner(head, backend, kv, states=decoder.states, vocab_size=VOCAB_SIZE)
        table = BlockTable(NUM_SLOTS, -(-MAX_PLACES // BLOCK_SIZE))
        self.cache = HeadCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        own = DraftVocabularySampler(sampler or GreedyDraftSampler(), head.draft_ids, VOCAB_SIZE)
        loop = HeadLoop(self.head_runner, self.cache.table, self.ring, own, max_rows=MAX_ROWS)
        drafter = HeadDrafter(loop, self.ring, self.cache, METHOD, trained=trained)
        self.world = World(drafter, table, rng)
        self.oracle = Oracle(make_decoder(target), head_directory)
        self.computed: dict[int, int] = {}  # by slot, leading tokens whose keys and values the target has
        self.read: dict[int, tuple[int, int, int]] = {}  # by slot, rows that the head has, as for Oracle.drafts
        self.began: dict[int, int] = {}  # by slot, tokens of a prefix that others have computed
        # By what the head has read from the first token to the end of a block: tokens that came next.
        self.filled: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.num_adopted = self.num_apart = 0  # drafts that begin with rows of others, or without a prefix

    def start(self, slot: int, prompt: list[int]) -> None:
        self.computed[slot] = min(self.world.start(slot, prompt), len(prompt) - 1)
        self.began[slot] = self.computed[slot]
        self.read.pop(slot, None)

    def release(self, slot: int) -> None:
        """The head reads on to the end of the last full block."""
        token_ids, read = self.world.lines[slot].token_ids, self.read.get(slot)
        if read is not None and read[1] == 0:
            end = self.computed[slot] // BLOCK_SIZE * BLOCK_SIZE
            if 0 < end < len(token_ids) and end - read[2] <= BLOCK_SIZE:
                self.filled[(*token_ids[:end],)].add(token_ids[end])
        self.world.release(slot)

    def step(self, rows: list[SequenceRows], num_tokens: dict[int, int]) -> None:
        """The target computes rows. num_tokens: by slot, how many tokens the step commits."""
        step = StepRows.of(*rows)
        batch = replace(self.world.table.gather(step), captures=True)
        self.runner.forward(batch)
        states = self.runner.states(batch.num_rows)
        counts = [num_tokens.get(each.slot, 0) for each in rows]
        self.ring.take_in(step, batch.layout.query_start.tolist(), states, counts)

    def prefill(self, slot: int, most: int) -> None:
        """Compute the prompt but its last token, in chunks."""
        token_ids, rng = self.world.lines[slot].token_ids, self.world.rng
        while (start := self.computed[slot]) < len(token_ids) - 1:
            count = min(rng.randint(1, most), len(token_ids) - 1 - start)
            part = tuple(token_ids[start : start + count])
            self.step([SequenceRows(slot=slot, start=start, token_ids=part, new_blocks=(), samples=False)], {})
            self.computed[slot] += count
            self.world.drafter.commit([], [], [])

    def verify(self, verified: dict[int, tuple[int, ...]]) -> None:
        """Verify these drafts, accept a part of each, and commit."""
        rng, rows, tokens = self.world.rng, [], {}
        for slot, kept in verified.items():
            line = self.world.lines[slot]
            start = self.computed[slot]
            part = (*line.token_ids[start:], *kept)
            rows.append(
                SequenceRows(
                    slot=slot, start=start, token_ids=part, new_blocks=(), samples=True, num_drafts=len(kept)
                )
            )
            tokens[slot] = self.world.accept(slot, rng.randint(0, len(kept)))
            self.computed[slot] = len(line.token_ids) + len(tokens[slot]) - 1
        while rows:
            batch: list[SequenceRows] = []
            while rows and sum(len(each.token_ids) for each in batch) + len(rows[0].token_ids) <= MAX_ROWS:
                batch.append(rows.pop(0))
            self.step(batch, {each.slot: len(tokens[each.slot]) for each in batch})
        self.world.commit(tokens)

    def propose(self, requests: dict[int, int], *, exact: bool = True) -> None:
        """Ask for drafts and compare them. exact: the head has lost nothing of any slot."""
        readable = {}
        for slot in requests:
            pieces, end = self.ring.pieces(slot, 0), len(self.world.lines[slot].token_ids) - 1
            while pieces and pieces[-1].end == end:
                readable[slot] = end = pieces.pop().position
        found = self.world.propose(requests)
        self.cache.check_invariants()
        self.ring.check_invariants()
        for draft in lines_of(found.table):
            slot, token_ids = draft.slot, tuple(self.world.lines[draft.slot].token_ids)
            if not draft.token_ids:
                assert not exact or slot not in readable
                continue
            first, computed = self.cache.table.first(slot) * BLOCK_SIZE, len(token_ids) - 1
            before = self.read.get(slot)
            possible: list[dict[int, int]] = [{}]
            if before is not None and readable[slot] <= before[2]:
                known = before[1]  # it has gone on reading
                assert before[0] == first
            elif before is None and first == 0 and readable[slot] not in range(1, BLOCK_SIZE):
                known = 0
                self.num_adopted += readable[slot] > 0
            else:
                known = readable[slot]
                self.num_apart += 1
            assert 0 <= known - first < BLOCK_SIZE
            if known == 0:
                began = range(BLOCK_SIZE, self.began[slot] + 1, BLOCK_SIZE)
                each_last = product(*(sorted(self.filled[token_ids[:end]]) for end in began))
                possible = [{end - 1: last for end, last in zip(began, each, strict=True)} for each in each_last]
                for end in range(BLOCK_SIZE, computed + 1, BLOCK_SIZE):
                    self.filled[token_ids[:end]].add(token_ids[end])
            self.read[slot] = (first, known, computed)
            assert draft.method == METHOD
            count = len(draft.token_ids)
            assert draft.token_ids in {
                self.oracle.drafts(token_ids, first, known, count, others=each) for each in possible
            }

    def run(self, num_rounds: int, *, exact: bool = True) -> None:
        """Sequences come, go, wait and draft; of each draft the target verifies a part, and accepts a part."""
        rng, shared = self.world.rng, [self.world.rng.randrange(VOCAB_SIZE) for _ in range(20)]
        for _ in range(num_rounds):
            for slot in range(NUM_SLOTS):
                line = self.world.lines.get(slot)
                if line is None and rng.random() < 0.7:
                    own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 12))]
                    self.start(slot, [*shared[: rng.randrange(21)], *own])
                    self.prefill(slot, MAX_ROWS)
                elif line is not None and len(line.token_ids) > MAX_LEN - 16:
                    self.release(slot)
                elif line is not None and rng.random() < 0.1:  # a preemption
                    self.release(slot)
                    self.start(slot, line.token_ids)
                    self.prefill(slot, MAX_ROWS)
            requests = {slot: rng.randint(1, CAP) for slot in self.world.lines if rng.random() < 0.7}
            self.propose(requests, exact=exact)
            if rng.random() < 0.2:  # the drafts are given up, and asked for again
                self.propose(requests, exact=exact)
            lines = {slot: line for slot, line in self.world.lines.items() if rng.random() < 0.9}
            self.verify({slot: line.draft[: rng.randint(0, len(line.draft))] for slot, line in lines.items()})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full(but=("0",))
def test_drafts_are_those_of_a_head_that_read_the_states_of_the_tokens_before(
    directories: tuple[Path, Path], seed: int
) -> None:
    drafting = Drafting(directories, random.Random(seed))
    drafting.run(15)
    assert drafting.num_adopted > 0, "some sequences begin with a prefix that the head knows"


def test_sampled_drafts_have_the_random_numbers_of_their_positions(directories: tuple[Path, Path]) -> None:
    """Oracle: the same sampler, asked for one token at a time by its position in the sequence."""
    state = SamplingState(NUM_SLOTS)
    sampler = SampleAndMatchDraftSampler(state)
    drafting = Drafting(directories, random.Random(9), sampler=sampler)
    drafting.world.sampling = state
    prompt = [*range(3, 40)]
    for slot in range(NUM_SLOTS):  # all but the first begin with a prefix, so that their rows have other places
        drafting.computed[slot] = drafting.world.start(slot, prompt, temperature=1.5)
        drafting.prefill(slot, MAX_ROWS)
        drafting.verify({slot: ()})
    assert drafting.world.num_adopted > 0
    draft_ids = drafting.head_runner.head.draft_ids
    assert draft_ids is not None
    order, ids = draft_ids.argsort(), draft_ids.sort().values.numpy()
    firsts = [drafting.ring.pieces(slot, 0)[0].position for slot in range(NUM_SLOTS)]
    for draft in lines_of(drafting.world.propose(dict.fromkeys(range(NUM_SLOTS), 5)).table):
        slots, token_ids = np.array([draft.slot]), tuple(drafting.world.lines[draft.slot].token_ids)

        def choose(logits: Tensor, position: int, slots: NDArray[np.int64] = slots) -> int:
            at = np.array([position])
            asked = DraftRows(slots=slots, positions=at, draft_starts=at)
            return int(order[sampler.choose(logits[:, order], asked, ids).token_ids[0]])

        known = firsts[draft.slot]
        first = drafting.cache.table.first(draft.slot) * BLOCK_SIZE
        assert known == first
        assert draft.token_ids == drafting.oracle.drafts(token_ids, first, known, 5, choose)
        assert draft.token_ids != drafting.oracle.drafts(token_ids, first, known, 5), "the draft is not greedy"


@pytest.mark.parametrize("ring_rows", [2 * MAX_ROWS, 2 * MAX_ROWS + 3])
@pytest.mark.full(but=("24",))
def test_states_that_are_lost_leave_a_gap_and_no_error(directories: tuple[Path, Path], ring_rows: int) -> None:
    drafting = Drafting(directories, random.Random(5), ring_rows=ring_rows)
    drafting.run(15, exact=False)
    assert drafting.num_apart > 0


def test_a_prompt_is_caught_up_once(directories: tuple[Path, Path]) -> None:
    drafting = Drafting(directories, random.Random(7))
    drafting.start(0, [*range(40)])
    drafting.prefill(0, MAX_ROWS)
    first = drafting.world.propose({0: 2})
    assert first.catchup_tokens == 38, "of 39 states one is that of a step without drafts"
    assert first.passes == 4 + 1, "39 rows in passes of 12, and one for the second token"
    again = drafting.world.propose({0: 2})
    assert (again.catchup_tokens, again.passes) == (0, 2)
    assert lines_of(again.table)[0].token_ids == lines_of(first.table)[0].token_ids
    drafting.verify({0: lines_of(again.table)[0].token_ids})
    assert drafting.world.propose({0: 1}).catchup_tokens == 0


def test_long_prompts_are_read_as_they_come(directories: tuple[Path, Path]) -> None:
    """All of them, though a slot keeps far fewer states; and the next sequence with the prompt finds it read."""
    drafting, prompt = Drafting(directories, random.Random(2), most_each=2 * MAX_ROWS, prompt_rows=4), [*range(80)]
    for slot in range(2):
        drafting.start(slot, prompt)
        drafting.prefill(slot, MAX_ROWS)
        found = drafting.world.propose({slot: 4})
        assert found.catchup_tokens < MAX_ROWS
        (draft,) = lines_of(found.table)
        assert draft.token_ids == drafting.oracle.drafts(tuple(prompt), 0, 0, 4)
        drafting.verify({slot: ()})
    assert drafting.began[1] == 76, "all but the block that is not full"


def test_a_state_waits_for_the_token_that_follows(directories: tuple[Path, Path]) -> None:
    """A step may be launched before the tokens of the last one are known."""
    drafting, prompt = Drafting(directories, random.Random(2), most_each=2 * MAX_ROWS, prompt_rows=4), [*range(40)]
    drafting.start(0, prompt)
    for start in range(0, 40, 10):
        part = tuple(prompt[start : start + 10])
        drafting.step([SequenceRows(slot=0, start=start, token_ids=part, new_blocks=(), samples=False)], {})
    drafting.world.commit({})
    assert places(drafting) == 39
    drafting.world.commit({0: (7,)})
    (draft,) = lines_of(drafting.world.propose({0: 3}).table)
    assert draft.token_ids == drafting.oracle.drafts((*prompt, 7), 0, 0, 3)


def test_the_stop_rule_ends_drafts(directories: tuple[Path, Path]) -> None:
    drafting = Drafting(directories, random.Random(8))
    for slot in range(2):
        drafting.start(slot, [*range(3 + slot, 20)])
        drafting.prefill(slot, MAX_ROWS)
    never = StopRule(row_price=1.0, pass_prices=(0.0, 0.0), intercept=0.0, slope=0.0)
    found = drafting.world.propose({0: 4, 1: 4}, never)
    assert [draft.token_ids for draft in lines_of(found.table)] == [(), ()]
    once = StopRule(row_price=0.4, pass_prices=(0.0, 0.0), intercept=0.0, slope=0.0)
    assert [len(draft.token_ids) for draft in lines_of(drafting.world.propose({0: 4, 1: 4}, once).table)] == [1, 1]
    assert [len(draft.token_ids) for draft in lines_of(drafting.world.propose({0: 4, 1: 2}).table)] == [4, 2]


def test_a_head_beyond_its_trained_positions_begins_anew_and_stays_within_them(
    directories: tuple[Path, Path],
) -> None:
    """Once it has had to be rebuilt there; before, it drafts beyond them like any other."""
    drafting = Drafting(directories, random.Random(3), trained=30)
    drafting.start(0, list(range(40)))
    drafting.prefill(0, MAX_ROWS)
    drafting.propose({0: 3})
    assert places(drafting) == 39
    drafter = drafting.world.drafter
    assert isinstance(drafter, Rebuilds)
    assert not drafter.rebuild("mtp", 0)
    assert not drafter.rebuild(METHOD, 1), "slot 1 has no sequence"
    assert drafter.rebuild(METHOD, 0)
    rows = []
    for _ in range(20):
        drafting.verify({0: drafting.world.lines[0].draft})
        drafting.world.propose({0: 3})
        rows.append(places(drafting))
    assert max(rows) <= 30
    assert min(rows) > 0


def places(drafting: Drafting) -> int:
    """How many rows the head has for slot 0."""
    pieces = drafting.cache.own_rows(0)
    return drafting.cache.place(0, pieces[-1].end)
