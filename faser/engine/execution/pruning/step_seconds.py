"""How long steps take by their rows, as early pruning believes. No torch.

Starts from the table that was measured before the first request, and follows the machine with the times of the
steps that early pruning runs itself. The control plane keeps a cost model of its own.
"""

from typing import overload

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.step_times import CostTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FIRST_ROWS = 2048
_FOLLOW = 0.1  # weight of the newest step in the factor
_OUTLIER = 3.0  # the most by which one step may count as faster or slower: a page fault is no new machine
_LARGEST_FACTOR = 20.0


class StepSeconds:
    """table: of target steps. factor: how many times slower than the table the machine is at present."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._dense = table.dense(_FIRST_ROWS)
        self.factor = 1.0

    @overload
    def of(self, rows: int, kv_tokens: int = 0) -> float: ...
    @overload
    def of(self, rows: Ints, kv_tokens: int = 0) -> Floats: ...
    def of(self, rows: int | Ints, kv_tokens: int = 0) -> float | Floats:
        """Seconds of a step with this many rows, whose sequences have kv_tokens in the KV cache together."""
        most = int(np.max(rows))
        if most >= len(self._dense):
            self._dense = self._table.dense(2 * most)
        found = (self._dense[rows] + self._table.kv_token_s * kv_tokens) * self.factor
        return found if isinstance(rows, np.ndarray) else float(found)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A step took measured_s where predicted_s was predicted: c ← c + (measured c / predicted - c) / 10."""
        if predicted_s > 0 and measured_s > 0:
            ratio = min(max(measured_s / predicted_s, 1 / _OUTLIER), _OUTLIER)
            moved = self.factor * (1 - _FOLLOW + _FOLLOW * ratio)
            self.factor = min(max(moved, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
