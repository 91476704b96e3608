"""The states of sequences beside the KV cache: one a slot, and how far each is.

A slot's state begins anew with a sequence whose first row is at position 0, be it a new one or one that was
preempted; nothing is cleared when a sequence ends. Refused drafts need no message either: the next step's first
row says how many were accepted. Knows no arithmetic: kernels/interface/delta_net.py says what a backend keeps.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.delta_net import CHUNK, StateShape, StateStep, row_counts
from faser.kernels.interface.shapes import RowLayout

Ints = NDArray[np.int64]

_NOTHING = -1  # of a slot whose state is no sequence's


class StateCache:
    """Owns the states, and of each slot the rows that its last step computed."""

    def __init__(self, backend: Backend, shape: StateShape) -> None:
        self.states = backend.allocate_states(shape)
        self._num_slots = shape.num_slots
        self._most_drafts = shape.most_drafts
        self._known = np.full(shape.num_slots, _NOTHING, dtype=np.int64)  # tokens that no later step takes back
        self._computed = np.full(shape.num_slots, _NOTHING, dtype=np.int64)  # with those that it may

    def begin(self, layout: RowLayout) -> StateStep:
        """The step of these rows, which must be computed.

        Each sequence goes on where it is: its first row is at position 0, or behind the accepted rows of its last
        step. A layout without slots is a dummy one, whose states are arbitrary, and so are those slots afterwards.
        """
        first_rows, starts, counts = row_counts(layout)
        if not layout.slots:
            slots = np.arange(len(starts)) % self._num_slots
            self._known[slots] = self._computed[slots] = _NOTHING
            known, num_drafts = starts, np.zeros_like(counts)
        else:
            slots, num_drafts, known = self._go_on(layout, starts, counts)
        return StateStep(
            states=self.states,
            slots=slots,
            ends=known // CHUNK * CHUNK,
            starts=starts,
            counts=counts,
            num_drafts=num_drafts,
            first_rows=first_rows,
        )

    def _go_on(self, layout: RowLayout, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Of each sequence its slot, its drafted rows, and the tokens that its last step knew; 0: it begins."""
        slots = np.array(layout.slots, dtype=np.int64)
        num_drafts = np.array(layout.num_drafts, dtype=np.int64)
        known, begins = self._known[slots], starts == 0
        assert (begins | ((known >= 0) & (known <= starts) & (starts <= self._computed[slots]))).all(), (
            f"states are {known.tolist()} to {self._computed[slots].tolist()} tokens far, rows begin at "
            f"{starts.tolist()}"
        )
        assert num_drafts.max() <= self._most_drafts, f"{num_drafts.max()} drafts, room for {self._most_drafts}"
        self._known[slots] = starts + counts - num_drafts
        self._computed[slots] = starts + counts
        return slots, num_drafts, np.where(begins, 0, known)

    def compact(self, step: StateStep, layout: RowLayout) -> StateStep:
        """The same step without the drafts that the layout does not have any more."""
        first_rows, _, counts = row_counts(layout)
        if layout.slots:
            self._computed[step.slots] = step.starts + counts
        num_drafts = np.maximum(step.num_drafts - (step.counts - counts), 0)
        return replace(step, counts=counts, num_drafts=num_drafts, first_rows=first_rows)
