"""Mixtures with low-bit weights: by codes as they are stored, or dequantised first where experts have many rows.

Reading codes, a kernel widens weights once for every MOST_TOGETHER rows of an expert. So up to that many, on
average, codes are read. For more the faster way is measured once for a shape, at the first such step, which is the
largest one at the start; it serves all of them.
"""

from functools import partial

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.device_kernels import RunExperts
from faser.kernels.interface.blocks import Experts

MOST_TOGETHER = 128
_PIECE_BYTES = 128 << 20  # of weights that are dequantised at a time
_AS_STORED, _DEQUANTISED = "as stored", "dequantised"
_TOLERANCE = 2.0**-6  # of the largest value: roundings of bfloat16


class LowBitMixtures:
    """Choices of one backend, by shape. They hold for all layers of a model."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._pieces: dict[tuple[str, torch.dtype], int | None] = {}  # of how many bytes; None: codes are read

    def measured(self, run: RunExperts, block: Experts) -> RunExperts:
        """Return the mixture in the faster way for as many rows as it is given."""
        parts = [f"low-bit mixture of {len(block.gate_up)}", f"{block.top_k} each", str(block.gate_up[0].shape)]
        parts += [str(each.kind) for some in (block.gate_up, block.down) for each in some[0].parts]
        most = MOST_TOGETHER * len(block.gate_up) // block.top_k
        return partial(self._run, run, ", ".join(parts), most)

    def _run(
        self,
        run: RunExperts,
        key: str,
        most: int,
        x: Tensor,
        logits: Tensor,
        hidden: Tensor,
        read: Tensor,
        shared: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
    ) -> None:
        """most: rows with which codes are read."""
        piece_bytes, known = None, (key, x.dtype)
        if len(x) > most:
            if known not in self._pieces:
                self._pieces[known] = self._fastest(f"{key}, {x.dtype}".replace("torch.", ""), run, x, logits)
            piece_bytes = self._pieces[known]
        run(x, logits, hidden, read, shared, slots, piece_bytes=piece_bytes)

    def _fastest(self, key: str, run: RunExperts, x: Tensor, logits: Tensor) -> int | None:
        """Measure the ways on random rows: those of a step at start may all be equal, or padding."""
        generator = torch.Generator(x.device).manual_seed(0)
        rows, by_router = (
            torch.randn(each.shape, generator=generator, device=x.device).to(each.dtype) for each in (x, logits)
        )
        read = torch.zeros(1, dtype=torch.int64, device=x.device)

        def way(piece_bytes: int | None) -> Tensor:
            hidden = torch.zeros_like(rows)
            run(rows, by_router, hidden, read, None, None, piece_bytes=piece_bytes)
            return hidden

        pieces = {_AS_STORED: None, _DEQUANTISED: _PIECE_BYTES}
        ways = {name: partial(way, each) for name, each in pieces.items()}
        return pieces[self._choices.fastest(key, ways, tolerance=_TOLERANCE)]
