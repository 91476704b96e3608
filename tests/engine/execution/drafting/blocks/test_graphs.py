"""Block drafters in CUDA graphs draft what they draft eagerly, token for token, on the emulated device.

Oracle: the same drafter on the same emulation, operation by operation and with the host's walk (test_block.py).
Conversations of several slots have drafts of other lengths; parts of them are accepted.

Planted bugs that these tests have caught: the first token of a block is read from the anchor's row where that
predicts none, or another row counts as the first one; candidates stay those behind the anchor; random numbers stay
those of the first position; padding rows are stored in block 0; candidates, or numbers of states, are those of the
pass before; the walk stays in its first row.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.blocks.graphs import BlockGraphs
from faser.engine.execution.drafting.blocks.loop import BlockRunner
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.samplers import GreedyDraftSampler, SampleAndMatchDraftSampler
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.kv_cache import KvShape
from faser.types.sampling import SamplingParams
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.drafting.blocks.test_model import (
    BARE,
    MAX_PLACES,
    NUM_SLOTS,
    PLAIN,
    SECOND,
    VOCAB,
    Driven,
    prompt,
)
from tests.engine.execution.drafting.seeded_blocks import BlockShape
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

WIDE = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
SIZES = (2, 4, 8, 16, 24)


def wide(shape: BlockShape) -> BlockShape:
    return replace(shape, **WIDE)  # type: ignore[arg-type]


SHAPES = {
    "dspark": ("dspark", wide(PLAIN)),
    "dflash": ("dflash", wide(replace(BARE, from_anchor=False, block_size=7))),
    "causal": ("dspark", wide(replace(PLAIN, causal=True, block_size=7))),
    "windows": ("dspark", wide(replace(PLAIN, window=24, windowed=(True, False), causal=False))),
    "few tokens, own mask": ("speculators", wide(replace(PLAIN, draft_vocab=100, mask_token_id=None))),
    "fill in, corrected": ("speculators", wide(replace(PLAIN, from_anchor=False, block_size=7))),
    "dflash 2": ("dflash", wide(SECOND)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("target")
    fields = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = tiny_llama_config() | fields | {"num_hidden_layers": 5, "vocab_size": VOCAB}
    config["tie_word_embeddings"] = False
    weights = random_weights(llama_shapes(config))
    write_checkpoint(folder, config, weights)
    return folder, weights


def maker(
    backend: FlashInferBackend,
) -> Callable[[BlockRunner, HiddenStates, Decoder, KvShape], BlockGraphs]:
    def make(runner: BlockRunner, ring: HiddenStates, decoder: Decoder, kv: KvShape) -> BlockGraphs:
        return BlockGraphs(
            runner.head,
            runner.cache,
            ring.ring,
            backend,
            backend.graph_capture,
            backend.device_sampling_kernels(NUM_SLOTS, VOCAB),
            sizes=SIZES,
            max_sequences=NUM_SLOTS,
            kv=kv,
            max_blocks_each=-(-MAX_PLACES // kv.block_size),
            logits=decoder.logit_rows,
            report=lambda *_: None,
        )

    return make


def driven(
    folder: Path,
    target: tuple[Path, dict[str, torch.Tensor]],
    name: str,
    *,
    graphs: bool,
    coupled: bool = False,
    accelerator: FakeAccelerator | None = None,
) -> Driven:
    backend, (layout, shape) = fake_backend(accelerator), SHAPES[name]
    state = SamplingState(NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        sampling = SamplingParams(temperature=0.9 * (slot % 2), top_p=0.95)
        state.start(SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(1,)))
    kernels = backend.sampling_kernels
    return Driven(
        folder,
        target,
        backend,
        layout,
        shape,
        sampler=SampleAndMatchDraftSampler(state, kernels=kernels) if coupled else GreedyDraftSampler(kernels),
        dtype=torch.bfloat16,
        make_graphs=maker(backend) if graphs else None,
    )


def conversation(side: Driven) -> list[dict[int, tuple[list[int], list[float]]]]:
    """The drafts of some rounds, in which drafts have other lengths, and parts of them are accepted."""
    rng, found = random.Random(5), []
    for slot in range(NUM_SLOTS):
        side.start(slot, prompt(3 + 5 * slot, seed=slot))
    for _ in range(8):
        slots = sorted(rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)))
        drafts = side.propose({slot: rng.randint(1, 4) for slot in slots})
        found.append(drafts)
        for slot, (draft, _) in drafts.items():
            side.commit(slot, draft, rng.randint(0, len(draft)), rng.randrange(VOCAB))
    return found


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.full(
    but=(
        "dspark-True",
        "dflash-True",
        "dflash 2-False",
        "causal-True",
        "windows-False",
        "few tokens, own mask-True",
        "fill in, corrected-False",
    )
)
def test_graphs_draft_what_single_operations_draft(
    name: str, coupled: bool, target: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    ours, theirs = (
        conversation(driven(tmp_path / str(graphs), target, name, graphs=graphs, coupled=coupled))
        for graphs in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert {slot: tokens for slot, (tokens, _) in one.items()} == {
            slot: tokens for slot, (tokens, _) in other.items()
        }
        for slot, (_, confidences) in one.items():
            assert confidences == pytest.approx(other[slot][1], abs=2.0**-4)


def test_a_draft_is_three_replays_and_nothing_is_sent_for_single_operations(
    target: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    replays: list[object] = []
    accelerator = FakeAccelerator()
    side = driven(tmp_path, target, "dspark", graphs=True, accelerator=accelerator)
    for slot in range(2):
        side.start(slot, prompt(5, seed=slot))
    accelerator.on_replay = replays.append
    uploads = accelerator.uploads
    found = side.propose({0: 4, 1: 3})
    assert [len(draft) for draft, _ in found.values()] == [4, 3]
    assert len(replays) == 3
    assert accelerator.uploads == uploads


def test_passes_that_are_timed_are_replayed(target: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    replays: list[object] = []
    accelerator = FakeAccelerator()
    side = driven(tmp_path, target, "dspark", graphs=True, accelerator=accelerator)
    side.table.append(0, (1,))
    token_ids = np.array([3, 4, 5])
    batch = side.table.lay_out([0], np.array([4], np.int32), np.array([3], np.int32), token_ids)
    accelerator.on_replay = replays.append
    side.runner.forward(batch)
    assert len(replays) == 1
    assert side.runner.logits([0, 2]).isfinite().all()
