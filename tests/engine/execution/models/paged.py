"""Drives a Decoder through a paged cache with shuffled blocks, as an engine would, for these tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.layers import mixer_shapes
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.weights import WeightSource
from faser.engine.execution.runner.state_cache import StateCache
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.mixers import StateShape
from faser.kernels.interface.shapes import RowLayout
from faser.kernels.torch_backend import TorchBackend

BLOCK_SIZE = 8
MAX_POSITIONS = 256
MOST_DRAFTS = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """token_ids of one sequence from position start on. num_drafts: the last ones, which may be refused.

    adapter: its slot.
    """

    sequence: int
    start: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    adapter: int = -1


class PagedModel:
    """A decoder, its cache, and one shuffled block table per sequence."""

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        *,
        num_sequences: int = 1,
        block_size: int = BLOCK_SIZE,
        max_positions: int = MAX_POSITIONS,
        kv_dtype: torch.dtype | None = None,
        num_snapshots: int = 0,
    ) -> None:
        """kv_dtype: of keys and values; None: the decoder's. num_snapshots: of recurrent states."""
        self.decoder = decoder
        self.backend, self._block_size = backend, block_size
        blocks_each = -(-max_positions // block_size)
        self._cache = backend.allocate_kv(
            KvShape(
                heads=decoder.spec.kv_heads,
                num_blocks=num_sequences * blocks_each,
                block_size=block_size,
                dtype=kv_dtype or decoder.dtype,
            )
        )
        self._states = self._state_cache(num_sequences, num_snapshots)
        shuffled = torch.randperm(num_sequences * blocks_each, generator=torch.Generator().manual_seed(7))
        self._tables = shuffled.int().view(num_sequences, blocks_each)

    @property
    def states(self) -> StateCache:
        assert self._states is not None, "the model has no states"
        return self._states

    def _state_cache(self, num_sequences: int, num_snapshots: int) -> StateCache | None:
        """Sequence s has slot num_sequences - 1 - s."""
        spec = self.decoder.spec
        if not spec.has_states:
            return None
        shape = StateShape(
            layers=mixer_shapes(spec),
            num_slots=num_sequences,
            most_drafts=MOST_DRAFTS,
            dtype=self.decoder.dtype,
            num_snapshots=num_snapshots,
        )
        return StateCache(self.backend, shape)

    @torch.inference_mode()
    def step(self, batch: Sequence[Rows]) -> Tensor:
        """Run the rows of one step. Returns a copy of the logits of all of them, [R, V]."""
        adapters = [rows.adapter for rows in batch]
        starts = torch.tensor([rows.start for rows in batch], dtype=torch.int32)
        counts = torch.tensor([len(rows.token_ids) for rows in batch], dtype=torch.int32)
        layout = RowLayout(
            query_start=torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int())),
            seq_len=starts + counts,
            positions=torch.cat([torch.arange(r.start, r.start + len(r.token_ids)).int() for r in batch]),
            block_table=self._tables[[rows.sequence for rows in batch]],
            slots=[len(self._tables) - 1 - rows.sequence for rows in batch],
            num_drafts=[rows.num_drafts for rows in batch],
            adapters=torch.tensor(adapters, dtype=torch.int32) if max(adapters) >= 0 else None,
        )
        plan = self.backend.plan(layout, self._block_size)
        hidden = self.decoder.embed(torch.tensor([token for rows in batch for token in rows.token_ids]))
        state_step = None if self._states is None else self._states.begin(layout)
        hidden = self.decoder.run_layers(
            hidden,
            0,
            self.decoder.spec.num_layers,
            self._cache,
            plan,
            state_step=state_step,
            adapted=self.decoder.adapter_rows(layout),
        )
        return self.decoder.logits(hidden).clone()

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[int], *, sequence: int = 0) -> Tensor:
        """Run a prompt in chunks of these sizes, the rest in one. Returns the logits of all rows, [len, V]."""
        parts, start = [], 0
        for size in (*chunks, len(token_ids)):
            part = token_ids[start : start + size]
            if part:
                parts.append(self.step([Rows(sequence, start, part)]))
            start += len(part)
        return torch.cat(parts)

    def greedy(self, token_ids: Sequence[int], count: int, *, sequence: int = 0) -> list[int]:
        """The next `count` tokens after a prompt of uneven chunks, one row a step."""
        logits = self.prefill(token_ids, (1, 13, 5), sequence=sequence)[-1:]
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(int(logits[-1].argmax()))
            logits = self.step([Rows(sequence, len(token_ids) + len(tokens) - 1, tokens[-1:])])
        return tokens


def load(
    directory: Path,
    *,
    num_sequences: int = 1,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    quantization: str | None = None,
    num_snapshots: int = 0,
    source: WeightSource | None = None,
    adapters: AdapterSizes | None = None,
) -> PagedModel:
    """The checkpoint on a backend; None: the reference. quantization, source, adapters: see load_decoder."""
    backend = backend or TorchBackend()
    decoder = load_decoder(
        directory,
        backend,
        dtype,
        max_model_len=MAX_POSITIONS,
        max_rows=MAX_POSITIONS,
        quantization=quantization,
        source=source,
        progress=lambda *_: None,
        adapters=adapters,
    )
    size = 16 if backend.name == "native" else BLOCK_SIZE
    return PagedModel(decoder, backend, num_sequences=num_sequences, block_size=size, num_snapshots=num_snapshots)


def decoder(path: Path, backend: Backend, **options: Any) -> Decoder:
    """The checkpoint's decoder in float32; options: of load_decoder."""
    return load_decoder(
        path,
        backend,
        torch.float32,
        max_model_len=MAX_POSITIONS,
        max_rows=64,
        progress=lambda *_: None,
        **options,
    )


def prompt(length: int, vocab_size: int, seed: int = 3) -> list[int]:
    """Seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
