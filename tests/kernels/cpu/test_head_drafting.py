"""Drafts of a head in one native call. Oracle: the loop in Python over the same kernels, pass after pass.

Planted bugs that these tests have caught: rows of sequences that go on stay where they were; every pass writes to
the first place; a token is fed as the row of the logits that it is; a price counts sequences that have ended; the
numbers of the first token choose all of them; drafts follow the first row of each sequence instead of the last;
every part of the states has the first one's norm; what the residual stream begins with is left as it was. In an
MTP layer: features are the states before the final norm; the stream begins with the features; the output is
chained before its norm; the norm precedes the logits once more; the embedding stands behind the features. Of
sizes: the ends keep the columns that they have in the largest.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine.checkpoints.heads import FeatureNorm, read_mtp_spec
from faser.engine.contract.plan import SequenceRows, SequenceStart, StepRows, StopRule
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.heads.head import Head, HeadLoop, HeadRunner
from faser.engine.execution.drafting.heads.mtp import load_mtp
from faser.engine.execution.drafting.heads.weights import load_head
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput
from faser.engine.execution.drafting.samplers import (
    DraftVocabularySampler,
    GreedyDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.kv_cache import KvShape
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.mtp_models import EXPERTS, write_mtp_model
from tests.engine.execution.draft_lines import margins_of, tokens_of
from tests.engine.execution.drafting.seeded_heads import DRAFT_VOCAB, draft_vocabulary, head_spec, write_seeded

NUM_SLOTS, BLOCK_SIZE, MAX_PLACES, MAX_ROWS = 5, 16, 64, 100


Loader = Callable[[Path, NativeBackend, torch.dtype], tuple[Decoder, Callable[[], Head]]]  # loads the head anew


def eagle3(*, int8: bool = False, **changes: Any) -> Loader:
    """changes: fields of the spec."""

    def load(folder: Path, backend: NativeBackend, dtype: torch.dtype) -> tuple[Decoder, Callable[[], Head]]:
        config = tiny_llama_config() | {"num_hidden_layers": 4}
        write_checkpoint(folder / "target", config, random_weights(llama_shapes(config)))
        spec = head_spec(state_layers=(0, 2, 4), norm_before_residual=int8, **changes)
        write_seeded(folder / "head", spec, dtype=dtype, int8=int8)
        decoder = load_target(folder / "target", backend, dtype, state_layers=spec.state_layers)
        return decoder, lambda: load_head(
            folder / "head", decoder, backend, max_positions=MAX_PLACES, max_rows=MAX_ROWS
        )

    return load


def mtp(
    family: str = "qwen3_5_text",
    *,
    quantization: str | None = None,
    rows: int = DRAFT_VOCAB,
    ids: Sequence[int] | None = None,
    sizes: Sequence[int] = (),
) -> Loader:
    """The layer of a tiny Qwen3.5, whose attention has a gate.

    rows: how many tokens it chooses from. ids: which; None: seeded ones. sizes: as of load_mtp, the last first.
    """

    def load(folder: Path, backend: NativeBackend, dtype: torch.dtype) -> tuple[Decoder, Callable[[], Head]]:
        write_mtp_model(
            folder, family, **(EXPERTS | {"shared_expert_intermediate_size": 64} if "moe" in family else {})
        )
        decoder = load_target(folder, backend, dtype, state_layers=(8,), quantization=quantization)
        spec = read_mtp_spec(folder, decoder.spec)
        assert spec is not None
        assert spec.state_layers == (8,)
        seeded = draft_vocabulary(rows) if rows < VOCAB_SIZE else None
        return decoder, lambda: load_mtp(
            folder,
            spec,
            decoder,
            backend,
            max_positions=MAX_PLACES,
            max_rows=MAX_ROWS,
            max_logit_rows=NUM_SLOTS,
            quantization=quantization,
            draft_ids=seeded if ids is None else torch.tensor(ids),
            sizes=sizes,
            start=sizes[-1] if sizes else 0,
        )

    return load


def load_target(path: Path, backend: NativeBackend, dtype: torch.dtype, **options: Any) -> Decoder:
    return load_decoder(
        path, backend, dtype, max_model_len=64, max_rows=MAX_ROWS, progress=lambda *_: None, **options
    )


class Loops:
    """Two loops over heads of the same weights, one in one call, and the states of sequences of random lengths."""

    def __init__(
        self,
        folder: Path,
        backend: NativeBackend,
        dtype: torch.dtype,
        load: Loader | None = None,
        *,
        samples: bool,
        max_rows: int = MAX_ROWS,
    ) -> None:
        decoder, new_head = (load or eagle3())(folder, backend, dtype)
        spec = new_head().spec
        self.rng = random.Random(3)
        state = SamplingState(NUM_SLOTS)
        ring = HiddenStates(
            num_slots=NUM_SLOTS, num_rows=400, width=spec.states_size, dtype=dtype, device=torch.device("cpu")
        )
        self.inputs = []
        for slot in range(NUM_SLOTS):
            sampling = SamplingParams(temperature=1.5 * (slot % 2), top_p=0.9)
            state.start(SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(1,)))
            ring.start(slot)
            count = self.rng.randint(1, 20)
            tokens = array("i", [self.rng.randrange(VOCAB_SIZE) for _ in range(count)])
            rows = SequenceRows(slot=slot, start=0, token_ids=tuple(tokens), new_blocks=(), samples=True)
            noise = torch.randn(count, spec.states_size, generator=torch.Generator().manual_seed(slot))
            ring.take_in(StepRows.of(rows), [0], noise.to(dtype), [1])
            most = self.rng.randint(1, 6)
            self.inputs.append(
                DraftInput(
                    slot=slot,
                    start=0,
                    token_ids=tokens,
                    max_tokens=most,
                    shift=1,
                    states=ring.pieces(slot, 0),
                )
            )
        self.loops, self.heads = [], []
        for in_one_call in (False, True):
            head = new_head()
            self.heads.append(head)
            shape = KvShape(
                heads=spec.decoder.kv_heads,
                num_blocks=4 * NUM_SLOTS,
                block_size=BLOCK_SIZE,
                dtype=dtype,
            )
            runner = HeadRunner(head, backend, shape, states=decoder.states, vocab_size=VOCAB_SIZE)
            assert runner.drafts_in_one_call
            table = BlockTable(NUM_SLOTS, 4)
            for slot in range(NUM_SLOTS):
                table.append(slot, tuple(range(4 * slot, 4 * slot + 4)))
            kernels = backend.sampling_kernels
            own = SampleAndMatchDraftSampler(state, kernels=kernels) if samples else GreedyDraftSampler(kernels)
            ids = head.draft_ids
            sampler = own if ids is None else DraftVocabularySampler(own, ids, VOCAB_SIZE)
            predicts = own if in_one_call else None
            self.loops.append(HeadLoop(runner, table, ring, sampler, max_rows=max_rows, predicts=predicts))

    def draft(self, slots: list[int], stop: StopRule | None) -> tuple[DraftBatch, DraftBatch]:
        inputs = [self.inputs[slot] for slot in slots]
        one, other = (loop.draft(inputs, stop) for loop in self.loops)
        return one, other


STOPS = {
    "as asked": None,
    "by row": StopRule(row_price=0.3, pass_prices=(0.0,) * NUM_SLOTS, intercept=0.5, slope=0.3),
    "by pass": StopRule(row_price=0.01, pass_prices=(0.2, 0.9, 1.2, 1.6, 2.0), intercept=0.5, slope=0.3),
}


HEADS = {
    "EAGLE-3": (torch.float32, eagle3()),
    "EAGLE-3, bfloat16": (torch.bfloat16, eagle3()),
    "EAGLE-3, int8": (torch.bfloat16, eagle3(int8=True)),
    "EAGLE-3, normalised output": (torch.float32, eagle3(norm_output=True)),
    "MTP": (torch.float32, mtp()),
    "MTP, the whole vocabulary": (torch.bfloat16, mtp(rows=VOCAB_SIZE)),
    "MTP, int8": (torch.float32, mtp(quantization="int8")),
    "MTP, int4": (torch.bfloat16, mtp(quantization="int4")),
    "MTP, experts": (torch.bfloat16, mtp("qwen3_5_moe_text")),
    "MTP, experts, int8": (torch.float32, mtp("qwen3_5_moe_text", quantization="int8")),
}


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_the_loop(
    tmp_path: Path, native_alone: NativeBackend, head: str, samples: bool
) -> None:
    dtype, load = HEADS[head]
    loops = Loops(tmp_path, native_alone, dtype, load, samples=samples)
    for stop in STOPS.values():
        lengths = set()
        for slots in ([0], [1], [2, 0], [0, 1, 2, 3, 4], [4, 3, 1]):
            one, other = loops.draft(slots, stop)
            assert tokens_of(other) == tokens_of(one)
            assert (other.num_fed.tolist(), other.passes) == (one.num_fed.tolist(), one.passes)
            np.testing.assert_array_equal(np.concatenate(margins_of(other)), np.concatenate(margins_of(one)))
            lengths |= {*one.lengths.tolist()}
        assert len(lengths) > 1, "drafts end at different passes"


ENDS = (300, 411)


@pytest.mark.parametrize("samples", [False, True])
def test_a_size_of_the_vocabulary_drafts_as_a_layer_with_these_tokens_alone(
    tmp_path: Path, native_alone: NativeBackend, samples: bool
) -> None:
    """The size changes between drafts. Oracle: a layer loaded for one size; then, pass by pass, the same layer."""
    sizes = (64, 128, 256)

    def loops(name: str, ids: Sequence[int], sizes: Sequence[int] = ()) -> Loops:
        load = mtp(quantization="int8", ids=ids, sizes=sizes)
        return Loops(tmp_path / name, native_alone, torch.bfloat16, load, samples=samples)

    changing = loops("changing", [*range(sizes[-1]), *ENDS], sizes)
    found = set()
    for chosen, size in ((2, 256), (0, 64), (1, 128), (2, 256)):
        for head in changing.heads:
            head.vocabulary.chosen = chosen
        alone = loops(f"alone {size} {chosen}", [*range(size), *ENDS])
        wanted = alone.draft([0, 1, 2, 3, 4], None)[1]
        for other in changing.draft([0, 1, 2, 3, 4], None):
            assert tokens_of(other) == tokens_of(wanted)
            np.testing.assert_array_equal(np.concatenate(margins_of(other)), np.concatenate(margins_of(wanted)))
        found.add(str(tokens_of(wanted)))
    assert len(found) == len(sizes), "sizes make a difference"


@pytest.mark.parametrize("norms", FeatureNorm)
def test_states_are_normalised_as_the_head_says(
    tmp_path: Path, native_alone: NativeBackend, norms: FeatureNorm
) -> None:
    loops = Loops(tmp_path, native_alone, torch.float32, eagle3(feature_norm=norms), samples=False)
    one, other = loops.draft([0, 1, 2], None)
    assert tokens_of(other) == tokens_of(one)
    np.testing.assert_array_equal(np.concatenate(margins_of(other)), np.concatenate(margins_of(one)))


def test_more_committed_tokens_than_a_pass_takes_are_read_pass_by_pass(
    tmp_path: Path, native_alone: NativeBackend
) -> None:
    loops = Loops(tmp_path, native_alone, torch.float32, samples=False, max_rows=7)
    one, other = loops.draft([0, 1, 2, 3, 4], None)
    assert tokens_of(other) == tokens_of(one)
    assert other.passes == one.passes > one.lengths.max()


def test_after_a_draft_of_one_call_the_head_goes_on_alike(tmp_path: Path, native_alone: NativeBackend) -> None:
    """What the first drafts left in the cache is written over by the next ones in the same way."""
    loops = Loops(tmp_path, native_alone, torch.float32, samples=False)
    for _ in range(3):
        one, other = loops.draft([0, 1, 2, 3, 4], None)
        assert tokens_of(other) == tokens_of(one)


def test_a_loop_that_may_be_cut_short_goes_pass_by_pass(tmp_path: Path, native_alone: NativeBackend) -> None:
    loops = Loops(tmp_path, native_alone, torch.float32, samples=False)
    cut = loops.loops[1].draft(loops.inputs, None, lambda: True)
    assert {*cut.lengths.tolist()} == {1}
    assert cut.passes == 1
