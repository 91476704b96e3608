"""Drives a drafter that is a model as an engine would, with shared blocks and preemption; says what is right."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.draft_lines import DraftLine, committed, lines_of
from tests.engine.execution.models.paged import PagedModel, load

BLOCK_SIZE = 4
NUM_BLOCKS = 96
NUM_SLOTS = 4
MAX_LEN = 96
MAX_ROWS = 12  # less than most prompts have, so that they are caught up in pieces


def make_runner(directory: Path) -> Runner:
    """The checkpoint with a cache of its own, on the reference backend."""
    backend, decoder = TorchBackend(), make_decoder(directory)
    return Runner(decoder, backend, kv_shape(decoder))


def make_decoder(directory: Path, state_layers: tuple[int, ...] = ()) -> Decoder:
    return load_decoder(
        directory,
        TorchBackend(),
        torch.float32,
        max_model_len=MAX_LEN,
        max_rows=MAX_ROWS,
        state_layers=state_layers,
        progress=lambda *_: None,
    )


def kv_shape(decoder: Decoder) -> KvShape:
    spec = decoder.spec
    return KvShape(
        heads=spec.kv_heads,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )


class Oracle:
    """Greedy drafts, each computed from the first token on in a cache of their own."""

    def __init__(self, directory: Path) -> None:
        self._model: PagedModel = load(directory)
        self.greedy = lru_cache(maxsize=None)(self._greedy)

    def _greedy(self, token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        return tuple(self._model.greedy(token_ids, count))


@dataclass
class Line:
    """A running sequence."""

    token_ids: list[int]
    blocks: SequenceBlocks
    draft: tuple[int, ...] = ()


@dataclass
class World:
    """An engine without a target: what sequences go on with is made up."""

    drafter: Drafter
    table: BlockTable
    rng: random.Random
    lines: dict[int, Line] = field(default_factory=dict)
    kv: KvManager = field(default_factory=lambda: KvManager(NUM_BLOCKS, BLOCK_SIZE))
    num_adopted: int = 0
    sampling: SamplingState = field(default_factory=lambda: SamplingState(NUM_SLOTS))  # that the drafter reads

    def start(self, slot: int, token_ids: Sequence[int], **sampling: float) -> int:
        """Admit a sequence, adopting what the prefix cache has, and grow it to hold its tokens.

        Returns how many tokens were adopted.
        """
        blocks = self.kv.new_table()
        prefix = self.kv.cached_prefix(blocks, list(token_ids))
        self.kv.adopt(blocks, prefix)
        self.num_adopted += len(prefix)
        self.table.clear(slot)
        self.table.append(slot, tuple(prefix))
        self.lines[slot] = Line(list(token_ids), blocks)
        start = SequenceStart(
            slot=slot,
            sampling=SamplingParams(**{"temperature": 0.0} | sampling),  # type: ignore[arg-type]
            seed=slot + 100,
            prompt_len=len(token_ids),
            token_ids=tuple(token_ids),
        )
        self.sampling.start(start)
        self.drafter.start(start)
        self._grow(slot, len(token_ids))
        return len(prefix) * BLOCK_SIZE

    def release(self, slot: int) -> None:
        self.kv.release(self.lines.pop(slot).blocks)
        self.sampling.release(slot)
        self.drafter.release(slot)

    def propose(
        self,
        requests: dict[int, int],
        stop: StopRule | None = None,
        *,
        unverified: Mapping[int, tuple[int, ...]] | None = None,
        until: Callable[[], bool] | None = None,
    ) -> Proposals:
        """Drafts of at most requests[slot] tokens. unverified: the tokens that drafts of slots continue."""
        given = {slot: () if unverified is None else unverified.get(slot, ()) for slot in requests}
        for slot, count in requests.items():
            self._grow(slot, len(self.lines[slot].token_ids) + len(given[slot]) + count)
        asked = tuple(
            DraftRequest(slot=slot, max_tokens=count, new_blocks=(), unverified=given[slot])
            for slot, count in requests.items()
        )
        found = self.drafter.propose(DraftPlan(step=1, width=16, requests=asked, stop=stop), until)
        assert [draft.slot for draft in lines_of(found.table)] == list(requests)
        for draft in lines_of(found.table):
            assert len(draft.token_ids) == len(draft.confidences) <= requests[draft.slot]
            self.lines[draft.slot].draft = draft.token_ids
        return found

    def commit(self, tokens: dict[int, tuple[int, ...]]) -> None:
        """Sequences go on with these tokens; all but the last count as computed by the target."""
        for slot, token_ids in tokens.items():
            line = self.lines[slot]
            line.token_ids += token_ids
            self._grow(slot, len(line.token_ids))
            self.kv.publish(line.blocks, line.token_ids, len(line.token_ids) - 1)
            line.draft = ()
        self.drafter.commit(*committed(tokens))

    def accept(self, slot: int, count: int) -> tuple[int, ...]:
        """So many tokens of the slot's draft, and one that the draft does not go on with."""
        draft = self.lines[slot].draft
        other = self.rng.randrange(VOCAB_SIZE)
        if count < len(draft) and other == draft[count]:
            other = (other + 1) % VOCAB_SIZE
        return (*draft[:count], other)

    def _grow(self, slot: int, num_tokens: int) -> None:
        line = self.lines[slot]
        missing = self.kv.blocks_for(num_tokens) - len(line.blocks.blocks)
        if missing > 0:
            self.table.append(slot, tuple(self.kv.allocate(line.blocks, missing)))


def check_drafts(world: World, drafts: Sequence[DraftLine], oracle: Oracle) -> None:
    """Every drafted token is what the model says of the sequence's tokens alone."""
    for draft in drafts:
        known = tuple(world.lines[draft.slot].token_ids)
        assert draft.token_ids == oracle.greedy(known, len(draft.token_ids)), (draft.slot, len(known))
