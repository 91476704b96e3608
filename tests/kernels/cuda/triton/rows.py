"""Rows of logits as kernels and references take them. On the GPU where there is one, else in the interpreter.

The interpreter takes about a millisecond for a call of a function within a kernel: vocabularies here are of some
dozens of tokens, and blocks are small, so that rows have several chunks all the same.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace
from faser.kernels.interface.sampling import DeviceSamplingMetadata, SamplingMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Cut = tuple[float, int, float]  # min_p, top_k, top_p
NO_CUT: Cut = (0.0, 0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """R rows, and what is asked of them. logits: [R, V] float32, on the CPU; a temperature of 0 is greedy."""

    logits: Tensor
    temperature: NDArray[np.float32]
    cuts: list[Cut]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    @property
    def metadata(self) -> SamplingMetadata:
        """For the reference, which samples the rows that have a temperature."""
        return SamplingMetadata(
            temperature=self.temperature,
            min_p=np.array([min_p for min_p, _, _ in self.cuts]),
            top_k=np.array([top_k for _, top_k, _ in self.cuts], dtype=np.int64),
            top_p=np.array([top_p for _, _, top_p in self.cuts]),
            seeds=self.seeds,
            positions=self.positions,
        )

    @property
    def rows(self) -> DeviceSamplingMetadata:
        metadata = self.metadata
        with np.errstate(divide="ignore"):
            log_min_p = np.log(metadata.min_p).astype(np.float32)
        return DeviceSamplingMetadata(
            temperature=on_device(self.temperature),
            log_min_p=on_device(log_min_p),
            top_k=on_device(metadata.top_k),
            top_p=on_device(metadata.top_p),
            seeds=on_device(self.seeds.view(np.int64)),
            positions=on_device(self.positions),
        )

    def shaped(self) -> SamplingInputs:
        """With a copy of the logits."""
        return SamplingInputs(logits=self.logits.clone().to(DEVICE), rows=self.rows)

    def kernels(self, *, block: int = 16) -> TokenKernels:
        num_rows, width = self.logits.shape
        return TokenKernels(SamplingWorkspace(num_rows, width, DEVICE, block=block))

    @property
    def asks(self) -> dict[str, bool]:
        return {"top_k": any(top_k for _, top_k, _ in self.cuts), "top_p": any(cut[2] < 1 for cut in self.cuts)}


def make_case(seed: int, width: int, cuts: list[Cut], *, temperature: float = 0.8, spread: float = 3.0) -> Case:
    """Normal logits from a seed, as many rows as there are cuts."""
    rng = np.random.default_rng(seed)
    return Case(
        logits=torch.from_numpy((spread * rng.standard_normal((len(cuts), width))).astype(np.float32)),
        temperature=np.full(len(cuts), temperature, dtype=np.float32),
        cuts=cuts,
        seeds=rng.integers(0, 2**64, len(cuts), dtype=np.uint64),
        positions=rng.integers(0, 2**40, len(cuts)),
    )


def on_device(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE)


def zeros(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype, device=DEVICE)
