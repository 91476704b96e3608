"""The states of sequences beside the KV cache: one a slot, and how far each is.

A slot's state begins anew with a sequence whose first row is at position 0, be it a new one or one that was
preempted; nothing is cleared when a sequence ends. Refused drafts need no message either: the next step's first
row says how many were accepted. Knows no arithmetic: kernels/interface/delta_net.py says what a backend keeps.

A snapshot is a copy of the state that a slot keeps, which refused rows are never in, so it can be taken between
any two steps. Which sequence goes on from which snapshot, the control plane decides (control/state_snapshots.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.mixers import CHUNK, MixerShape, StateShape, StateStep, row_counts
from faser.kernels.interface.shapes import RowLayout
from faser.types.arrays import Ints

_NOTHING = -1  # of a slot whose state is no sequence's


class NoStates:
    """Stands in for the states of a model that keeps all of a sequence in the KV cache."""

    def __init__(self) -> None:
        self.snapshots = Snapshots((), (), 0)

    def begin(self, _layout: RowLayout) -> StateStep | None:
        """Return the step of these rows. See StateCache."""
        return None

    def compact(self, _layout: RowLayout) -> StateStep | None:
        """Return the last step for these rows, which are fewer. See StateCache."""
        return None

    def save(self, _slot: int, _snapshot: int, _num_tokens: int) -> None:
        """Fail: there is nothing to save. See StateCache."""
        raise AssertionError("the model has no states")

    def restore(self, _slot: int, _snapshot: int) -> None:
        """Fail: there is nothing to restore. See StateCache."""
        raise AssertionError("the model has no states")


class StateCache(NoStates):
    """Owns the states, of each slot the rows that its last step computed, and the snapshots."""

    _step: StateStep  # that began last

    def __init__(self, backend: Backend, shape: StateShape) -> None:
        self.states = backend.allocate_states(shape)
        self.snapshots = Snapshots(self.states.kept(), shape.shapes, shape.num_snapshots)
        self._num_slots = shape.num_slots
        self._most_drafts = shape.most_drafts
        self._known = np.full(shape.num_slots, _NOTHING, dtype=np.int64)  # tokens that no later step takes back
        self._computed = np.full(shape.num_slots, _NOTHING, dtype=np.int64)  # with those that it may

    def begin(self, layout: RowLayout) -> StateStep:
        """The step of these rows, which must be computed.

        Each sequence goes on where it is: its first row is at position 0, behind the accepted rows of its last
        step, or at an earlier one of the same chunk, which is computed again. A layout without slots is a dummy
        one, whose states are arbitrary, and so are those slots afterwards.
        """
        first_rows, starts, counts = row_counts(layout)
        if not layout.slots:
            slots = np.arange(len(starts)) % self._num_slots
            self._known[slots] = self._computed[slots] = _NOTHING
            known, num_drafts = starts, np.zeros_like(counts)
        else:
            slots, num_drafts, known = self._go_on(layout, starts, counts)
        self._step = StateStep(
            states=self.states,
            slots=slots,
            ends=known // CHUNK * CHUNK,
            starts=starts,
            counts=counts,
            num_drafts=num_drafts,
            first_rows=first_rows,
        )
        return self._step

    def _go_on(self, layout: RowLayout, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Return each sequence's slot, drafted rows, and the tokens that its last step knew; 0: it begins."""
        slots = np.array(layout.slots, dtype=np.int64)
        num_drafts = np.array(layout.num_drafts, dtype=np.int64)
        known, begins = self._known[slots], starts == 0
        assert (
            begins | ((known >= 0) & (known // CHUNK * CHUNK <= starts) & (starts <= self._computed[slots]))
        ).all(), (
            f"states are {known.tolist()} to {self._computed[slots].tolist()} tokens far, rows begin at "
            f"{starts.tolist()}"
        )
        assert num_drafts.max() <= self._most_drafts, f"{num_drafts.max()} drafts, room for {self._most_drafts}"
        self._known[slots] = starts + counts - num_drafts
        self._computed[slots] = starts + counts
        return slots, num_drafts, np.where(begins, 0, known)

    def save(self, slot: int, snapshot: int, num_tokens: int) -> None:
        """Copy the state that the slot keeps, which is after num_tokens tokens, into a snapshot."""
        end = self._known[slot] // CHUNK * CHUNK
        assert end == num_tokens > 0, f"slot {slot} keeps the state after {end} tokens, not after {num_tokens}"
        self.snapshots.save(slot, snapshot, num_tokens)

    def restore(self, slot: int, snapshot: int) -> None:
        """The slot goes on behind the tokens of a snapshot."""
        self._known[slot] = self._computed[slot] = self.snapshots.restore(slot, snapshot)

    def compact(self, layout: RowLayout) -> StateStep:
        """The last step without the drafts that the layout does not have any more."""
        first_rows, _, counts = row_counts(layout)
        step = self._step
        if layout.slots:
            self._computed[step.slots] = step.starts + counts
        num_drafts = np.maximum(step.num_drafts - (step.counts - counts), 0)
        return replace(step, counts=counts, num_drafts=num_drafts, first_rows=first_rows)


class Snapshots:
    """Copies of what slots keep. A snapshot holds what was saved to it last. kept, shapes: of each layer."""

    def __init__(
        self, kept: Sequence[tuple[Tensor, Tensor]], shapes: Sequence[MixerShape], num_snapshots: int
    ) -> None:
        self._num_tokens = [0] * num_snapshots
        self._layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of slots, then of snapshots
        for (state, inputs), layer in zip(kept, shapes, strict=True):
            saved_state = state.new_empty(num_snapshots, *state.shape[1:])
            saved_inputs = inputs.new_empty(num_snapshots, layer.kernel - 1, layer.channels)
            self._layers.append((state, inputs, saved_state, saved_inputs))

    def parts(self) -> list[Tensor]:
        """Contiguous tensors whose row i belongs to snapshot i."""
        return [part for _, _, *saved in self._layers for part in saved]

    def set_tokens(self, snapshot: int, num_tokens: int) -> None:
        """Note that the rows of a snapshot were filled with the state after num_tokens tokens."""
        self._num_tokens[snapshot] = num_tokens

    def save(self, slot: int, snapshot: int, num_tokens: int) -> None:
        """num_tokens: that the slot's state has."""
        self._num_tokens[snapshot] = num_tokens
        for state, inputs, saved_state, saved_inputs in self._layers:
            saved_state[snapshot].copy_(state[slot])
            saved_inputs[snapshot].copy_(inputs[slot, _last(num_tokens, saved_inputs, inputs)])

    def restore(self, slot: int, snapshot: int) -> int:
        """Restore a slot's state from a snapshot; return how many tokens it has read."""
        num_tokens = self._num_tokens[snapshot]
        for state, inputs, saved_state, saved_inputs in self._layers:
            state[slot].copy_(saved_state[snapshot])
            inputs[slot, _last(num_tokens, saved_inputs, inputs)] = saved_inputs[snapshot]
        return num_tokens


def _last(num_tokens: int, saved_inputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the places of the inputs of the last of num_tokens tokens among those that a slot keeps."""
    past = saved_inputs.shape[1]
    return torch.arange(num_tokens - past, num_tokens, device=inputs.device) % inputs.shape[1]
