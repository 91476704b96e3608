"""RunnerMemory: a runner's blocks and snapshots as bytes. Implements KvMemory, for models on a CPU."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.types.arrays import Bytes


class RunnerMemory:
    """blocks: tensors whose row i belongs to block i. states: the same for snapshots.

    save_state: see KvMemory. set_tokens: is told how many tokens are in a snapshot that was filled.
    """

    def __init__(
        self,
        blocks: Iterable[Tensor],
        states: Iterable[Tensor],
        *,
        save_state: Callable[[int, int, int], None],
        set_tokens: Callable[[int, int], None],
    ) -> None:
        self._blocks = [_rows(each) for each in blocks]
        self._states = [_rows(each) for each in states]
        self._set_tokens = set_tokens
        self.save_state = save_state
        self.block_bytes = sum(each.shape[1] for each in self._blocks)
        self.state_bytes = sum(each.shape[1] for each in self._states)

    def read_block(self, block: int, into: memoryview) -> None:
        _read(self._blocks, block, into)

    def write_block(self, block: int, content: memoryview) -> None:
        _write(self._blocks, block, content)

    def read_state(self, snapshot: int, into: memoryview) -> None:
        _read(self._states, snapshot, into)

    def write_state(self, snapshot: int, content: memoryview, num_tokens: int) -> None:
        _write(self._states, snapshot, content)
        self._set_tokens(snapshot, num_tokens)


def _rows(tensor: Tensor) -> Bytes:
    """View a tensor as rows of bytes: [N, bytes]."""
    assert tensor.is_contiguous(), "a copy would not be the cache"
    rows: Bytes = tensor.view(len(tensor), -1).view(torch.uint8).numpy()
    return rows


def _read(parts: Sequence[Bytes], row: int, into: memoryview) -> None:
    target, at = np.frombuffer(into, dtype=np.uint8), 0
    for part in parts:
        target[at : at + part.shape[1]] = part[row]
        at += part.shape[1]


def _write(parts: Sequence[Bytes], row: int, content: memoryview) -> None:
    source, at = np.frombuffer(content, dtype=np.uint8), 0
    for part in parts:
        part[row] = source[at : at + part.shape[1]]
        at += part.shape[1]
