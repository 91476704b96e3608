"""The rows that kernels sample, and the buffers for intermediate results between launches.

The buffers are allocated once, so that a CUDA graph finds them at the same addresses and nothing is allocated
while lanes run. One workspace serves one lane.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import expect, expect_lines, next_power_of_2
from faser.kernels.interface.sampling import RACE_BLOCK, DeviceSamplingMetadata

DIGIT_BITS, NUM_LEVELS = 4, 3  # of the search for the last token that top_k or top_p keeps, see truncation.py
MOST_GATHERED = 4096  # tokens that a program of that search keeps in registers
BLOCK = 2048  # columns of a program: 63 programs a row of 128k; each thread of four warps has 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWithNoise:
    """DeviceSamplingMetadata with random words in place of seeds and positions. noise: [R] int64, their bits."""

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    noise: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """logits: [R, V] float32, each row contiguous, after the logits processors."""

    logits: Tensor
    rows: DeviceSamplingMetadata | RowsWithNoise

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    @property
    def stride(self) -> int:
        return self.logits.stride(0)

    @property
    def has_noise(self) -> bool:
        """Return whether the random words are given."""
        return isinstance(self.rows, RowsWithNoise)

    @property
    def noise(self) -> tuple[Tensor, Tensor]:
        """Return what noise.row_word reads; it ignores the second tensor where words are given."""
        rows = self.rows
        return (rows.noise, rows.noise) if isinstance(rows, RowsWithNoise) else (rows.seeds, rows.positions)

    def check(self) -> None:
        """Raises EngineError unless kernels can read all of it."""
        logits, rows = self.logits, self.rows
        expect_lines("logits", logits, tuple(logits.shape), torch.float32, like=logits)
        shape = (self.num_rows,)
        expect("temperature", rows.temperature, shape, torch.float32, like=logits)
        expect("log_min_p", rows.log_min_p, shape, torch.float32, like=logits)
        expect("top_k", rows.top_k, shape, torch.int64, like=logits)
        expect("top_p", rows.top_p, shape, torch.float64, like=logits)
        if isinstance(rows, RowsWithNoise):
            expect("noise", rows.noise, shape, torch.int64, like=logits)
        else:
            expect("seeds", rows.seeds, shape, torch.int64, like=logits)
            expect("positions", rows.positions, shape, torch.int64, like=logits)


class SamplingWorkspace:
    """For up to max_rows rows of a vocabulary of `width`. block: columns of a program, a power of 2.

    most_gathered: tokens that truncation compares in registers, a power of 2.

    best: [R] int64 and largest: [R] float32, the most likely tokens and their logits; NO_TOKEN without one.
    margin: [R] float32, of best over all others. chunk_weight, chunk_prob: [R, C] int64. part_prob: [R, P] int64,
    of parts of chunks that are no longer than a block of the race. edge_key: [R] int32, edge_id: [R] int32, see
    truncation.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        device: torch.device | str,
        *,
        block: int = BLOCK,
        most_gathered: int = MOST_GATHERED,
    ) -> None:
        if max_rows < 1 or width < 1:
            raise EngineError(f"a workspace of {max_rows} rows of {width} tokens; the least is 1 of 1")
        if block < 16 or block != next_power_of_2(block):
            raise EngineError(f"block is {block}; it must be a power of 2 from 16 up")
        self.max_rows, self.width, self.block = max_rows, width, block
        self.num_chunks = -(-width // block)
        self.span = next_power_of_2(self.num_chunks)
        chunked = (max_rows, self.num_chunks)
        self.chunk_best = torch.empty(chunked, dtype=torch.int64, device=device)
        self.chunk_largest, self.chunk_next = (
            torch.empty(chunked, dtype=torch.float32, device=device) for _ in range(2)
        )
        self.chunk_weight, self.chunk_prob = (
            torch.empty(chunked, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.part = min(block, RACE_BLOCK)
        self._num_parts = self.num_chunks * (block // self.part)
        self.part_prob = torch.empty((max_rows, self._num_parts), dtype=torch.int64, device=device)
        self.best = torch.empty(max_rows, dtype=torch.int64, device=device)
        self.largest, self.margin = (torch.empty(max_rows, dtype=torch.float32, device=device) for _ in range(2))
        self.edge_key, self.edge_id = (torch.empty(max_rows, dtype=torch.int32, device=device) for _ in range(2))
        digits = (2, max_rows, self.num_chunks, 1 << DIGIT_BITS)
        self.digit_sums = torch.empty(digits, dtype=torch.int64, device=device)
        self.prefixes = torch.empty((NUM_LEVELS + 1, max_rows), dtype=torch.int32, device=device)
        self.rests = torch.empty((NUM_LEVELS + 1, max_rows), dtype=torch.int64, device=device)
        self.most_gathered = min(most_gathered, next_power_of_2(width))
        self.num_gathered = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.gathered = torch.empty((max_rows, self.most_gathered), dtype=torch.int32, device=device)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that kernels which walk over chunks are compiled for."""
        return {"NUM_CHUNKS": self.num_chunks, "SPAN": self.span, "BLOCK": self.block}

    @property
    def race_sizes(self) -> dict[str, int]:
        """The sizes that kernels which draw are compiled for."""
        each = RACE_BLOCK // self.part
        return {
            "NUM_CHUNKS": self.num_chunks,
            "SPAN": self.span,
            "NUM_PARTS": self._num_parts,
            "EACH": each,
            "RACE_SPAN": next_power_of_2(-(-self._num_parts // each)),
        }

    def prob_arguments(self, shaped: SamplingInputs) -> tuple[object, ...]:
        """Return the arguments of fixed_point.kept_probs, and of `best`."""
        return (
            shaped.logits, shaped.stride, shaped.width, self.largest, self.best, shaped.rows.temperature,
            shaped.rows.log_min_p, self.chunk_weight, self.edge_key, self.edge_id,
        )  # fmt: skip

    def expect_room(self, num_rows: int, width: int) -> None:
        """Raises EngineError."""
        if num_rows > self.max_rows:
            raise EngineError(f"{num_rows} rows; the workspace holds {self.max_rows}")
        if width != self.width:
            raise EngineError(f"the vocabulary has {width} tokens; the workspace was made for {self.width}")
