"""The decoder's own promises: rows do not see each other's sequence, layers can be run in parts, nothing grows.

Planted bugs that these tests have caught: a layer's keys written to the cache of the first layer; the final
norm applied in place; a segment that starts from layer 0.
"""

from pathlib import Path

import pytest
import torch

from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.models.paged import BLOCK_SIZE, MAX_POSITIONS, Rows, load, prompt


def test_sequences_in_one_batch_get_what_each_gets_alone(tiny_checkpoint: Path) -> None:
    """Prompts of 50 and 33 tokens in uneven chunks, one prefilling while the other decodes."""
    first, second = prompt(50, VOCAB_SIZE, seed=1), prompt(33, VOCAB_SIZE, seed=2)
    alone = [load(tiny_checkpoint).prefill(token_ids, ()) for token_ids in (first, second)]
    model = load(tiny_checkpoint, num_sequences=2)
    steps = [
        [Rows(0, 0, first[:17])],
        [Rows(1, 0, second[:20]), Rows(0, 17, first[17:18])],
        [Rows(0, 18, first[18:49]), Rows(1, 20, second[20:21])],
        [Rows(1, 21, second[21:]), Rows(0, 49, first[49:])],
    ]
    together: list[list[torch.Tensor]] = [[], []]
    for batch in steps:
        logits = model.step(batch)
        for rows in batch:
            together[rows.sequence].append(logits[: len(rows.token_ids)])
            logits = logits[len(rows.token_ids) :]
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.cat(ours), expected, atol=1e-4, rtol=0)


def _decoder(directory: Path, *, max_rows: int = 64, max_logit_rows: int | None = None) -> Decoder:
    return load_decoder(
        directory,
        TorchBackend(),
        torch.float32,
        max_model_len=MAX_POSITIONS,
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
        progress=lambda *_: None,
    )


@torch.inference_mode()
def _hidden(decoder: Decoder, token_ids: list[int], cuts: tuple[int, ...]) -> torch.Tensor:
    """Hidden states after all layers, run in segments that end at the cuts."""
    backend, spec, rows = TorchBackend(), decoder.spec, len(token_ids)
    num_blocks = -(-rows // BLOCK_SIZE)
    cache = backend.allocate_kv(
        KvShape(
            heads=spec.kv_heads,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )
    )
    layout = RowLayout(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        seq_len=torch.tensor([rows], dtype=torch.int32),
        positions=torch.arange(rows, dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
    )
    plan = backend.plan(layout, BLOCK_SIZE)
    hidden = decoder.embed(torch.tensor(token_ids))
    for first, last in zip((0, *cuts), (*cuts, spec.num_layers), strict=True):
        hidden = decoder.run_layers(hidden, first, last, cache, plan)
    return hidden


@pytest.mark.parametrize("cuts", [(1,), (0,), (2,), (1, 1)])
def test_layers_run_in_parts_give_the_same_bits(cuts: tuple[int, ...], tiny_checkpoint: Path) -> None:
    token_ids = prompt(30, VOCAB_SIZE)
    decoder = _decoder(tiny_checkpoint)
    whole = _hidden(decoder, token_ids, ()).clone()
    assert torch.equal(_hidden(decoder, token_ids, cuts), whole)


def test_logits_of_some_rows_are_those_rows_of_all_logits(tiny_checkpoint: Path) -> None:
    decoder = _decoder(tiny_checkpoint)
    hidden = _hidden(decoder, prompt(30, VOCAB_SIZE), ())
    before = hidden.clone()
    everything = decoder.logits(hidden).clone()
    torch.testing.assert_close(decoder.logits(hidden[[29, 3]]), everything[[29, 3]], atol=1e-5, rtol=0)
    assert torch.equal(hidden, before)


def test_steps_reuse_the_memory_they_started_with(tiny_checkpoint: Path) -> None:
    decoder = _decoder(tiny_checkpoint)
    places = set()
    for rows in (5, 30, 1):
        hidden = _hidden(decoder, prompt(rows, VOCAB_SIZE), ())
        places.add((hidden.data_ptr(), decoder.logits(hidden).data_ptr()))
    assert len(places) == 1


def test_more_rows_than_the_buffers_hold_are_our_own_mistake(tiny_checkpoint: Path) -> None:
    decoder = _decoder(tiny_checkpoint, max_rows=8, max_logit_rows=4)
    with pytest.raises(AssertionError, match="more rows"):
        decoder.embed(torch.zeros(9, dtype=torch.int64))
    hidden = _hidden(decoder, prompt(8, VOCAB_SIZE), ())
    with pytest.raises(AssertionError, match="logits buffer"):
        decoder.logits(hidden)


def test_bfloat16_stays_near_float32(tiny_checkpoint: Path) -> None:
    token_ids = prompt(40, VOCAB_SIZE)
    exact = load(tiny_checkpoint).prefill(token_ids, ())
    rounded = load(tiny_checkpoint, dtype=torch.bfloat16).prefill(token_ids, (7,))
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.03


def test_sizes_are_those_of_the_checkpoint(tiny_checkpoint: Path) -> None:
    decoder = _decoder(tiny_checkpoint)
    assert decoder.num_parameters == 64 * 512 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) + 64
    assert decoder.weight_bytes == 4 * decoder.num_parameters
