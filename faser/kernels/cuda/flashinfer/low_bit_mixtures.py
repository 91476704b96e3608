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
        self._pieces: dict[str, int | None] = {}  # of how many bytes; None: codes are read

    def measured(self, run: RunExperts, block: Experts) -> RunExperts:
        """Return the mixture in the faster way for as many rows as it is given."""
        return partial(self._run, run, block)

    def _run(
        self,
        run: RunExperts,
        block: Experts,
        x: Tensor,
        logits: Tensor,
        hidden: Tensor,
        read: Tensor,
        shared: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
    ) -> None:
        piece_bytes = None
        if len(x) * block.top_k > MOST_TOGETHER * len(block.gate_up):
            kinds = (block.gate_up[0].parts, block.down[0].parts)
            parts = [
                f"low-bit mixture of {len(block.gate_up)}",
                f"{block.top_k} each",
                str(block.gate_up[0].shape),
            ]
            key = ", ".join([*parts, *(str(each.kind) for some in kinds for each in some), str(x.dtype)])
            if key not in self._pieces:
                self._pieces[key] = self._fastest(key.replace("torch.", ""), run, x, logits)
            piece_bytes = self._pieces[key]
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

        ways = {_AS_STORED: None, _DEQUANTISED: _PIECE_BYTES}
        return ways[
            self._choices.fastest(
                key, {name: partial(way, each) for name, each in ways.items()}, tolerance=_TOLERANCE
            )
        ]
