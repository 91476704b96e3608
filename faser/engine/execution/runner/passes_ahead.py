"""A runner's part in drafting that does not wait for what a step has accepted: see drafting/ahead.py.

    StepMatcher    of the target: the device finds what the step accepts, as it is sampled
    PassesAhead    of the draft model: passes that begin behind the accepted tokens, whichever they are; and
                   those that go on behind a pass whose rows the host has laid out

Every row is laid out as a sequence of its own that is as long as it may be, and its place is put right on the
device before each pass. Attention that is planned for longer sequences finds empty pieces, which does no harm
where a sequence has one row (GraphCapture.may_advance).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.runner.batch import BlockTable, ContinuedDrafts, RowBatch, TokenFeedback
from faser.engine.execution.runner.graphs import BackboneGraph, GraphInputs, StepGraphs
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.kernels.interface.drafting import FollowedRows, StepMatch
from faser.kernels.interface.graph_capture import GraphCapture, StagingBuffer
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import AttentionPlan
from faser.optional import or_else
from faser.types.arrays import Ints

_LINE = 2  # numbers; arrays begin at multiples of 16 bytes, so that kernels are compiled for such addresses only


class StepMatcher:
    """Steps of up to max_rows sampled rows. Works on the last tokens that the sampler has sampled."""

    def __init__(self, capture: GraphCapture, sampler: DeviceTokenSampler) -> None:
        self._capture = capture
        self._sampler = sampler
        count, device = len(sampler.tokens), sampler.tokens.device
        self._capacity = -(-count // _LINE) * _LINE + _LINE
        self._staging: StagingBuffer = capture.staging_buffer(4 * self._capacity, torch.int64)
        self._counts = torch.zeros(count, dtype=torch.int64, device=device)
        self._last = torch.zeros((count, 2), dtype=torch.int64, device=device)

    def find(
        self, layout: DraftLayout, drafted: Ints, known: Ints, decided: NDArray[np.bool_] | None
    ) -> StepMatch:
        """Launch the search. drafted, known: as StepMatch has them. decided: None: nothing is."""
        rows, sequences = layout.num_rows, len(layout.first)
        numbers, sent = self._staging.host().reshape(4, -1), self._staging.device.view(4, -1)
        numbers[0, :rows], numbers[1, :sequences], numbers[2, :sequences] = drafted, layout.first, known
        numbers[1, sequences] = rows
        numbers[3, :rows] = or_else(decided, -1)
        self._staging.send()
        step = StepMatch(
            sampled=self._sampler.tokens[:rows],
            drafted=sent[0, :rows],
            fed=self._sampler.fed,
            first=sent[1, : sequences + 1],
            known=sent[2, :sequences],
            decided=sent[3, :rows],
            counts=self._counts[:sequences],
            last=self._last[:sequences],
        )
        self._capture.match(step)
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedDrafts:
    """D drafts that follow a step.

    slots: [D]. sources: [D] the numbers of their sequences among those of the step. known: [D] tokens before the
    step. most: [D] tokens that the step may bring. depth: most tokens of a draft. requests: [D] what their
    sequences ask for; the positions do not matter.
    """

    step: StepMatch
    slots: list[int]
    sources: Ints
    known: Ints
    most: Ints
    depth: int
    requests: SamplingMetadata


class PassesAhead:
    """First begin or continue_from, then any number of further passes. width: most drafts."""

    # Of the passes that were prepared last:
    _rows: FollowedRows
    _following: BackboneGraph

    def __init__(
        self, capture: GraphCapture, inputs: GraphInputs, sampler: DeviceTokenSampler, width: int
    ) -> None:
        self._capture = capture
        self._inputs = inputs
        self._sampler = sampler
        self._width = width
        self._numbers: StagingBuffer = capture.staging_buffer(1 + 3 * width, torch.int64)
        self._lengths = torch.zeros(width, dtype=torch.int64, device=sampler.tokens.device)

    def begin(self, drafts: FollowedDrafts, table: BlockTable, graphs: StepGraphs) -> Ints | None:
        """Launch the first pass up to its hidden states; returns the rows that the drafts continue.

        None: there are no graphs for them, and nothing was launched.
        """
        slots, count = drafts.slots, len(drafts.slots)
        longest = drafts.known + drafts.most
        room = table.num_blocks(slots) * graphs.block_size
        pairs, each = np.stack((longest - 1, longest), axis=1).ravel(), np.arange(count)
        first = _rows(table, [slot for slot in slots for _ in range(2)], np.minimum(pairs, room.repeat(2)))
        later = _rows(table, slots, np.minimum(longest + drafts.depth - 1, room))
        backbone, following = graphs.backbone(first), graphs.backbone(later)
        if count > self._width or backbone is None or following is None or backbone is following:
            return None
        if not (self._capture.may_advance(backbone.plan) and self._capture.may_advance(following.plan)):
            return None
        self._send(drafts.known, drafts.sources, np.zeros(count, dtype=np.int64))
        self._rows, at = self._followed_rows(), np.arange(2 * count)
        fed = TokenFeedback(tokens=self._rows.fed, rows=at, sources=at)
        self._start(backbone, replace(first, feedback=fed), drafts.step)
        self._prepare(following, later)
        return 2 * each + 1

    def continue_from(self, drafts: ContinuedDrafts, table: BlockTable, graphs: StepGraphs) -> bool:
        """Prepare passes behind the tokens sampled last. False: there are no graphs for them."""
        slots, places, count = drafts.slots, drafts.places, len(drafts.slots)
        room = table.num_blocks(slots) * graphs.block_size
        later = _rows(table, slots, np.minimum(places + drafts.num_passes, room))
        following = graphs.backbone(later)
        if count > self._width or following is None or not self._capture.may_advance(following.plan):
            return False
        self._send(places, np.zeros(count, dtype=np.int64), drafts.shifts)
        self._lengths[:count].copy_(self._numbers.device[1 : 1 + count])
        self._rows = self._followed_rows()
        self._prepare(following, later)
        return True

    def _send(self, known: Ints, sources: Ints, shifts: Ints) -> None:
        """Send FollowedRows.numbers."""
        host, count = self._numbers.host(), len(known)
        host[0] = count
        host[1:].reshape(3, -1)[:, :count] = known, sources, shifts
        self._numbers.send()

    def _prepare(self, following: BackboneGraph, later: RowBatch) -> None:
        each = np.arange(later.num_rows)
        feedback = TokenFeedback(tokens=self._sampler.tokens, rows=each, sources=each)
        self._inputs.send(replace(later, feedback=feedback), self._sampler)
        self._capture.update_plan(following.plan, later.layout)
        self._following = following

    def rehearse(self, plan: AttentionPlan, step: StepMatch) -> None:
        """Load the kernels, with a step that no draft follows."""
        self._numbers.host()[:] = 0
        self._numbers.send()
        self._rows = self._followed_rows()
        self._capture.advance(plan, self._rows, step)
        self._capture.advance(plan, self._rows, None)

    def go_on(self) -> None:
        """Launch the next pass up to its hidden states: over the tokens that the last one has sampled."""
        self._capture.advance(self._following.plan, self._rows, None)
        self._following.graph.replay()

    def _followed_rows(self) -> FollowedRows:
        return FollowedRows(
            numbers=self._numbers.device,
            lengths=self._lengths,
            fed=self._sampler.fed[: 2 * self._width],
            positions=self._sampler.moving_positions(),
        )

    def _start(self, backbone: BackboneGraph, batch: RowBatch, step: StepMatch) -> None:
        self._inputs.send(batch, self._sampler)
        self._capture.update_plan(backbone.plan, batch.layout)
        self._capture.advance(backbone.plan, self._rows, step)
        backbone.graph.replay()


def _rows(table: BlockTable, slots: list[int], ends: Ints) -> RowBatch:
    """The last row of each of these slots, for sequences that end there; the device knows the tokens."""
    count = len(slots)
    return table.lay_out(
        slots, (ends - 1).astype(np.int32), np.ones(count, dtype=np.int32), np.zeros(count, dtype=np.int64)
    )
