"""Drafts of a block drafter in one native call. Oracle: the loop in Python over the same kernels.

Planted bugs that these tests have caught:
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine.checkpoints.blocks import read_block_spec
from faser.engine.contract.plan import SequenceRows, SequenceStart, StepRows
from faser.engine.execution.drafting.blocks.loop import BlockLoop, BlockRunner
from faser.engine.execution.drafting.blocks.weights import load_block
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput
from faser.engine.execution.drafting.samplers import GreedyDraftSampler, SampleAndMatchDraftSampler
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.kv_cache import KvShape
from faser.types.sampling import SamplingParams
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.draft_lines import margins_of, tokens_of
from tests.engine.execution.drafting.seeded_blocks import BlockShape, write_block

NUM_SLOTS, BLOCK_SIZE, BLOCKS_EACH, VOCAB = 5, 16, 20, 701  # several blocks of the race
MAX_PLACES, MAX_ROWS = BLOCK_SIZE * BLOCKS_EACH, 400
DSPARK = BlockShape(vocab_size=VOCAB, state_layers=(1, 2, 4), block_size=7)
DFLASH = replace(DSPARK, markov_rank=0, confidence=False, from_anchor=False)
FEW = replace(DSPARK, draft_vocab=100)

BLOCKS: dict[str, tuple[str, BlockShape, torch.dtype, dict[str, Any]]] = {
    "dspark": ("dspark", DSPARK, torch.float32, {}),
    "dspark, bfloat16": ("dspark", replace(DSPARK, num_layers=3), torch.bfloat16, {}),
    "dspark, int8": ("dspark", DSPARK, torch.bfloat16, {"quantization": "int8"}),
    "dspark, int4": ("speculators", replace(FEW, markov_rank=32), torch.bfloat16, {"quantization": "int4"}),
    "dspark, keys in int8": ("dspark", DSPARK, torch.bfloat16, {"kv": torch.int8}),
    "speculators, few tokens": ("speculators", FEW, torch.float32, {}),
    "speculators, fill in": ("speculators", replace(FEW, from_anchor=False), torch.bfloat16, {}),
    "fewer tokens than candidates": ("speculators", replace(FEW, draft_vocab=9), torch.float32, {}),
    "own mask": ("speculators", replace(FEW, mask_token_id=None), torch.bfloat16, {}),
    "some rows of the target's head": ("dspark", DSPARK, torch.bfloat16, {"rows": 300}),
    "dflash": ("dflash", DFLASH, torch.float32, {}),
    "dflash, bfloat16": ("dflash", DFLASH, torch.bfloat16, {}),
    "causal": ("dspark", replace(DSPARK, causal=True), torch.float32, {}),
    "windows": (
        "dspark",
        replace(DSPARK, window=9, windowed=(True, False, True), num_layers=3, causal=False),
        torch.bfloat16,
        {},
    ),
    "causal where windowed": ("dflash", replace(DFLASH, window=8, windowed=(True, False)), torch.float32, {}),
}


class Loops:
    """Two loops over drafters of the same weights, one in one call. States are made up."""

    def __init__(self, folder: Path, backend: NativeBackend, name: str, *, samples: bool, max_rows: int) -> None:
        layout, shape, self._dtype, options = BLOCKS[name]
        config = tiny_llama_config() | {"num_hidden_layers": 5, "vocab_size": VOCAB, "tie_word_embeddings": False}
        weights = random_weights(llama_shapes(config))
        write_checkpoint(folder / "target", config, weights)
        write_block(folder / "blocks", shape, layout, target=weights)
        decoder = load_decoder(
            folder / "target", backend, self._dtype, max_model_len=MAX_PLACES, max_rows=MAX_ROWS,
            state_layers=shape.state_layers, progress=lambda *_: None,
        )  # fmt: skip
        method = "dflash" if shape.markov_rank == 0 else "dspark"
        self.spec = read_block_spec(folder / "blocks", decoder.spec, method)
        self.rng, self._state = random.Random(3), SamplingState(NUM_SLOTS)
        self._ring = HiddenStates(
            num_slots=NUM_SLOTS,
            num_rows=2000,
            width=self.spec.states_size,
            dtype=self._dtype,
            device=torch.device("cpu"),
        )
        for slot in range(NUM_SLOTS):
            sampling = SamplingParams(temperature=1.5 * (slot % 2), top_p=0.9, top_k=12 * (slot == 3))
            self._state.start(SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(1,)))
            self._ring.start(slot)
        self._ends = [0] * NUM_SLOTS  # of the committed rows of each slot
        self.loops = []
        for in_one_call in (False, True):
            model = load_block(
                folder / "blocks", self.spec, decoder, backend, max_positions=MAX_PLACES, max_rows=max_rows,
                max_logit_rows=3, quantization=options.get("quantization"),
                draft_ids=torch.arange(7, 7 + options["rows"]) if "rows" in options else None,
            )  # fmt: skip
            kv = KvShape(
                heads=self.spec.decoder.kv_heads,
                num_blocks=BLOCKS_EACH * NUM_SLOTS,
                block_size=BLOCK_SIZE,
                dtype=options.get("kv", self._dtype),
            )
            runner = BlockRunner(model, backend, kv, states=decoder.states, vocab_size=VOCAB)
            assert runner.drafts_in_one_call
            table = BlockTable(NUM_SLOTS, BLOCKS_EACH)
            for slot in range(NUM_SLOTS):
                table.append(slot, tuple(range(BLOCKS_EACH * slot, BLOCKS_EACH * (slot + 1))))
            kernels = backend.sampling_kernels
            sampler = (
                SampleAndMatchDraftSampler(self._state, kernels=kernels)
                if samples
                else GreedyDraftSampler(kernels)
            )
            predicts = sampler if in_one_call else None
            self.loops.append(BlockLoop(runner, table, self._ring, sampler, max_rows=max_rows, predicts=predicts))

    def next_input(self, slot: int, count: int) -> DraftInput:
        """So many further tokens are committed."""
        start = self._ends[slot]
        self._ends[slot] += count
        rows = SequenceRows(slot=slot, start=start, token_ids=(0,) * count, new_blocks=(), samples=True)
        noise = torch.randn(
            count, self.spec.states_size, generator=torch.Generator().manual_seed(9 * start + slot)
        )
        self._ring.take_in(StepRows.of(rows), [0], noise.to(self._dtype), [1])
        return DraftInput(
            slot=slot,
            start=start,
            token_ids=array("i", [self.rng.randrange(VOCAB) for _ in range(count)]),
            max_tokens=self.rng.randint(1, 8),
            shift=1,
            states=self._ring.pieces(slot, start),
        )

    def draft(self, inputs: Sequence[DraftInput]) -> tuple[DraftBatch, DraftBatch]:
        one, other = (loop.draft(inputs, None) for loop in self.loops)
        return one, other

    def check(self, inputs: Sequence[DraftInput]) -> DraftBatch:
        one, other = self.draft(inputs)
        assert tokens_of(other) == tokens_of(one)
        assert (other.num_fed.tolist(), other.passes) == (one.num_fed.tolist(), one.passes)
        np.testing.assert_array_equal(np.concatenate(margins_of(other)), np.concatenate(margins_of(one)))
        memory = [loop.memory for loop in self.loops]
        assert memory[0] is not None
        assert memory[1] is not None
        for mine, yours in zip(*memory, strict=True):
            assert torch.equal(mine, yours)
        return other


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_are_those_of_the_loop(
    tmp_path: Path, native_alone: NativeBackend, name: str, samples: bool
) -> None:
    """One sequence and several, with long contexts and short ones, whose caches hold the same keys afterwards."""
    loops = Loops(tmp_path, native_alone, name, samples=samples, max_rows=MAX_ROWS)
    lengths, tokens = set(), set()
    for slots, most in (([0], 40), ([1], 300), ([2, 0], 9), ([0, 1, 2, 3, 4], 20), ([4, 3, 1], 3), ([3], 1)):
        found = loops.check([loops.next_input(slot, loops.rng.randint(1, most)) for slot in slots])
        lengths |= {*found.lengths.tolist()}
        tokens |= {token for line in tokens_of(found) for token in line}
    assert len(lengths) > 2
    assert len(tokens) > 6
    assert max(lengths) <= loops.spec.most_tokens


def test_more_rows_than_a_pass_takes_are_computed_in_several(tmp_path: Path, native_alone: NativeBackend) -> None:
    loops = Loops(tmp_path, native_alone, "dspark", samples=True, max_rows=20)
    assert loops.check([loops.next_input(slot, 7) for slot in range(NUM_SLOTS)]).passes > 1
    assert loops.check([loops.next_input(1, 2)]).passes == 1


def test_the_same_draft_again_is_the_same(tmp_path: Path, native_alone: NativeBackend) -> None:
    loops = Loops(tmp_path, native_alone, "dspark", samples=True, max_rows=MAX_ROWS)
    inputs = [loops.next_input(slot, 7) for slot in range(NUM_SLOTS)]
    first = loops.check(inputs)
    again = loops.check([replace(each, states=each.states) for each in inputs])
    assert tokens_of(again) == tokens_of(first)
