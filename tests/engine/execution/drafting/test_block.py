"""Drafts of block drafters: whole drafts are those of the formulas, whatever came before.

Oracle: block_reference.py in float64, over the states of the committed tokens. The states are made up, for the
drafter reads nothing else of the target but its embedding and head.

Planted bugs that these tests have caught: anchor-first slots read as fill-in, and the other way round; context
rows at other places; a block that is causal where it should not be, and the reverse; windows that begin at the end
of the block, or are ignored; norms plus one; the layers' input norm on context rows; the correction given the
anchor instead of the token before, or indexed by the drafter's own ids; confidences without the token before; the
mask's embedding at the anchor; context rows of refused drafts kept; a block longer than trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.blocks import block_method, read_block_spec
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceRows, SequenceStart, StepRows
from faser.engine.execution.drafting.block_loop import BlockLoop, BlockRunner
from faser.engine.execution.drafting.block_weights import load_block
from faser.engine.execution.drafting.head import HeadDrafter
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates
from faser.engine.execution.drafting.samplers import (
    DraftSampler,
    GreedyDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.types import SamplingParams
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.block_reference import BlockReference
from tests.engine.execution.drafting.seeded_blocks import BlockShape, draft_ids, write_block

VOCAB, NUM_SLOTS, BLOCK_SIZE, MAX_PLACES, MAX_ROWS = 211, 4, 16, 96, 24
STATE_LAYERS = (1, 2, 4)
PLAIN = BlockShape(vocab_size=VOCAB, state_layers=STATE_LAYERS)
BARE = replace(PLAIN, markov_rank=0, confidence=False)  # DFlash

SHAPES = {
    "dspark": ("dspark", PLAIN),
    "dspark of three layers and blocks of seven": ("dspark", replace(PLAIN, num_layers=3, block_size=7)),
    "dflash": ("dflash", replace(BARE, from_anchor=False, block_size=7)),
    "dflash, anchor first": ("dspark", BARE),
    "causal": ("dspark", replace(PLAIN, causal=True, block_size=7)),
    "windows": (
        "dspark",
        replace(PLAIN, window=7, windowed=(True, False, True), num_layers=3, block_size=7, causal=False),
    ),
    "causal where windowed": (
        "dflash",
        replace(BARE, window=6, windowed=(True, False), from_anchor=False, block_size=7),
    ),
    "few tokens": ("speculators", replace(PLAIN, draft_vocab=100, block_size=7)),
    "few tokens, dflash": ("speculators", replace(BARE, draft_vocab=100, from_anchor=False)),
    "fill in, corrected": ("speculators", replace(PLAIN, from_anchor=False, block_size=7)),
    "own mask": ("speculators", replace(PLAIN, draft_vocab=100, mask_token_id=None)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("target")
    config = tiny_llama_config() | {"num_hidden_layers": 5, "vocab_size": VOCAB, "tie_word_embeddings": False}
    weights = random_weights(llama_shapes(config))
    write_checkpoint(folder, config, weights)
    return folder, weights


@dataclass
class Line:
    """token_ids: committed ones. states: [N, K * H] of all of them but the last."""

    token_ids: list[int]
    states: Tensor


class Driven:
    """A block drafter, a target whose states are made up, and the oracle."""

    def __init__(
        self,
        folder: Path,
        target: tuple[Path, dict[str, Tensor]],
        backend: Backend,
        layout: str,
        shape: BlockShape,
        *,
        sampler: DraftSampler | None = None,
        max_rows: int = MAX_ROWS,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> None:
        path, weights = target
        own = write_block(folder, shape, layout, target=weights, **config)
        decoder = load_decoder(
            path, backend, dtype, max_model_len=MAX_PLACES, max_rows=64, state_layers=STATE_LAYERS,
            progress=lambda *_: None,
        )  # fmt: skip
        method = block_method(folder)
        assert method is not None
        self.spec = read_block_spec(folder, decoder.spec, method)
        model = load_block(
            folder, self.spec, decoder, backend, max_positions=MAX_PLACES, max_rows=max_rows, max_logit_rows=3,
            draft_ids=rows,
        )  # fmt: skip
        spec = self.spec.decoder
        kv = KvShape(heads=spec.kv_heads, num_blocks=NUM_SLOTS * 6, block_size=BLOCK_SIZE, dtype=dtype)
        self.runner = BlockRunner(model, backend, kv, states=decoder.states, vocab_size=VOCAB)
        self.ring = HiddenStates(
            num_slots=NUM_SLOTS,
            num_rows=1000,
            width=self.spec.states_size,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        table = BlockTable(NUM_SLOTS, -(-MAX_PLACES // BLOCK_SIZE))
        self.cache = HeadCache(table, num_slots=NUM_SLOTS, num_blocks=kv.num_blocks, block_size=BLOCK_SIZE)
        self.loop = BlockLoop(self.runner, table, self.ring, sampler or GreedyDraftSampler(), max_rows=max_rows)
        self.drafter = HeadDrafter(self.loop, self.ring, self.cache, method, trained=MAX_PLACES)
        self.lines: dict[int, Line] = {}
        doubles = {name: each.double().numpy() for name, each in (own | {"d2t": torch.zeros(1)}).items()}
        doubles["embed_tokens.weight"] = weights["model.embed_tokens.weight"].double().numpy()
        if "lm_head.weight" not in own:
            doubles["lm_head.weight"] = weights["lm_head.weight"].double().numpy()
        ids = draft_ids(shape).numpy() if layout == "speculators" else np.arange(VOCAB)
        if rows is not None:
            ids = rows.numpy()
            of_rows = ("lm_head.weight", "markov_head.markov_w2.weight")
            doubles |= {name: doubles[name][ids] for name in of_rows if name in doubles}
        causal = [shape.window is not None and each for each in shape.windowed or [False] * shape.num_layers]
        if shape.causal is not None:
            causal = [shape.causal] * shape.num_layers
        self.reference = BlockReference(shape=shape, weights=doubles, ids=ids, causal=causal)
        self._generator = torch.Generator().manual_seed(2)

    def start(self, slot: int, prompt: Sequence[int], chunks: Sequence[int] = (), **sampling: float) -> None:
        """A prompt whose tokens but the last are computed in chunks of these sizes."""
        params = SamplingParams(**{"temperature": 0.0} | sampling)  # type: ignore[arg-type]
        found = SequenceStart(
            slot=slot, sampling=params, seed=slot + 7, prompt_len=len(prompt), token_ids=tuple(prompt)
        )
        self.drafter.start(found)
        self.lines[slot] = Line(list(prompt), torch.empty(0, self.spec.states_size))
        rest = len(prompt) - 1 - sum(chunks)
        for count in (*chunks, *([rest] if rest else [])):
            self.compute(slot, count)

    def compute(self, slot: int, count: int, num_drafts: int = 0, accepted: int = 0) -> None:
        """Rows of the next tokens, the last of which are drafts. States of the refused ones are made up too."""
        line, width = self.lines[slot], self.spec.states_size
        start = len(line.states)
        states = torch.randn(count + num_drafts, width, generator=self._generator)
        kept = count + accepted
        rows = SequenceRows(
            slot=slot, start=start, token_ids=(0,) * len(states), samples=False, num_drafts=num_drafts
        )
        self.ring.take_in(StepRows.of(rows), [0, len(states)], states, [accepted + 1])
        line.states = torch.cat((line.states, states[:kept]))

    def propose(self, requests: dict[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        plan = DraftPlan(
            step=1,
            width=8,
            requests=tuple(DraftRequest(slot=slot, max_tokens=most) for slot, most in requests.items()),
            stop=None,
        )
        found = self.drafter.propose(plan)
        self.cache.check_invariants()
        return {each.slot: (list(each.token_ids), list(each.confidences)) for each in lines_of(found.table)}

    def commit(self, slot: int, draft: Sequence[int], accepted: int, bonus: int) -> None:
        """The target has verified a draft."""
        tokens = [*draft[:accepted], bonus]
        self.compute(slot, 1, num_drafts=len(draft), accepted=accepted)
        self.lines[slot].token_ids += tokens
        self.drafter.commit([slot], [len(tokens)], tokens)

    def wanted(self, slot: int, most: int) -> tuple[list[int], list[float]]:
        line = self.lines[slot]
        most = min(most, self.spec.most_tokens)
        return self.reference.draft(line.states.double().numpy(), line.token_ids[-1], most)

    def check(self, requests: dict[int, int]) -> dict[int, list[int]]:
        found = self.propose(requests)
        for slot, most in requests.items():
            token_ids, confidences = self.wanted(slot, most)
            assert found[slot][0] == token_ids
            assert found[slot][1] == pytest.approx(confidences, abs=2e-3)
        return {slot: draft for slot, (draft, _) in found.items()}


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_whole_drafts_are_those_of_the_formulas(
    name: str, backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Two sequences at once, with blocks of different lengths, prompts in chunks, and drafts half accepted."""
    layout, shape = SHAPES[name]
    driven = Driven(tmp_path, target, backend, layout, shape)
    driven.start(0, prompt(19), chunks=(3, 7))
    driven.start(2, prompt(5, seed=2))
    most = driven.spec.most_tokens
    for accepted in (1, 0, 2):
        drafts = driven.check({2: most, 0: max(most - 1, 1)})
        for slot, draft in drafts.items():
            driven.commit(slot, draft, min(accepted, len(draft)), bonus=9 + accepted)
    driven.check({0: most})
    driven.check({0: most, 2: 1})  # asked for again: nothing has come since


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_a_drafter_may_choose_from_some_rows_of_a_whole_vocabulary(
    name: str, backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Whether the checkpoint has the target's head or none."""
    layout, shape = SHAPES[name]
    rows = torch.arange(3, VOCAB, 2)
    driven = Driven(tmp_path, target, backend, layout, shape, rows=rows)
    driven.start(0, prompt(19))
    drafts = driven.check({0: driven.spec.most_tokens})
    assert {*drafts[0]} <= {*rows.tolist()}


def test_a_draft_is_no_longer_than_the_drafter_was_trained_for(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    driven = Driven(tmp_path, target, backend, "dflash", replace(BARE, from_anchor=False))
    driven.start(0, prompt(9))
    assert len(driven.check({0: 8})[0]) == 3


def test_passes_have_a_limit_of_rows_and_drafts_do_not_depend_on_it(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark"], max_rows=9)
    for slot in range(NUM_SLOTS):
        driven.start(slot, prompt(12 + slot, seed=slot))
    driven.check(dict.fromkeys(range(NUM_SLOTS), 4))


def test_a_cold_drafter_has_the_same_keys(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """After chunks and rejections. Bit for bit where rows do not depend on their batch."""
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark of three layers and blocks of seven"])
    driven.start(1, prompt(21), chunks=(5, 9))
    for accepted in (0, 3, 7, 1):
        draft = driven.propose({1: 7})[1][0]
        driven.commit(1, draft, accepted, bonus=accepted)
    warm = driven.check({1: 7})
    assert not driven.drafter.rebuild(driven.spec.method, 1)
    if (memory := driven.loop.memory) is not None:
        (block, *_) = driven.cache.computed_blocks(1)
        memory[0][block, :64] += 1  # a fault, which is found and mended
        assert driven.drafter.rebuild(driven.spec.method, 1)
    assert driven.check({1: 7}) == warm


def test_drafts_of_requests_that_sample_race_with_their_random_numbers(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """A drafter whose every row is sure of the target's own distribution would be right: the noise is the same.

    Oracle: one sequence at a time over the candidates alone, by the same sampler.
    """
    state = SamplingState(NUM_SLOTS)
    sampler = SampleAndMatchDraftSampler(state)
    driven = Driven(tmp_path, target, backend, *SHAPES["few tokens"], sampler=sampler)
    for slot in range(3):
        line, params = prompt(9 + slot, seed=slot), SamplingParams(temperature=(0.0, 0.8, 1.5)[slot])
        found = SequenceStart(
            slot=slot, sampling=params, seed=slot + 7, prompt_len=len(line), token_ids=tuple(line)
        )
        state.start(found)
        driven.start(slot, line)
    together = driven.propose(dict.fromkeys(range(3), 7))
    alone = {slot: driven.propose({slot: 7})[slot] for slot in range(3)}
    assert {slot: draft for slot, (draft, _) in together.items()} == {
        slot: draft for slot, (draft, _) in alone.items()
    }
    assert together[0][0] == driven.wanted(0, 7)[0]
    assert together[2][0] != driven.wanted(2, 7)[0], "drawn, not the likeliest"
    assert together[1][1] != pytest.approx(driven.wanted(2, 7)[1])
