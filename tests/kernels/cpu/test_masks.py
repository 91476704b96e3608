"""Masks by the native kernel give the bits of the tensor operations."""

import numpy as np
import pytest
import torch

from faser.engine.execution.sampling.edits import mask
from faser.kernels.cpu.backend import NativeBackend


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("rows", [[0], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_logits_are_masked_as_by_tensor_operations(width: int, rows: list[int], native: NativeBackend) -> None:
    """Rows of a wider tensor; other rows and what is beside them keep their bits."""
    rng = np.random.default_rng(width)
    words = rng.integers(-(2**63), 2**63, (len(rows), -(-width // 64) + 2), dtype=np.int64)
    words[0, 0], words[-1, -3] = -1, 0
    logits = torch.randn(5, width + 9, generator=torch.Generator().manual_seed(width))
    found, wanted = logits.clone(), logits.clone()
    native.mask_kernel(found[:, :width], np.array(rows), words)
    mask(wanted[:, :width], np.array(rows), words)
    assert torch.equal(found, wanted)
    for row, bits in zip(rows, words, strict=True):
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:width].astype(bool)
        assert torch.equal(found[row, :width].isfinite(), torch.from_numpy(allowed))
    assert torch.equal(found[:, width:], logits[:, width:])
