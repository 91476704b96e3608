"""A runner that replays recordings instead of calling kernel after kernel, where the sizes of a step allow it.

A step is three recordings, one behind the other and without a wait in between: trunk, head, choice (see
step_recordings), so that their number is the sum of these sizes, not the product. A step in between is padded to
the next size. The same trunks serve steps with and without drafts: who never drafts replays the same recordings.
What no recording fits is computed by the eager runner, on the same buffers.

On a GPU that two lanes share there is a set of recordings for every part of it that the runner may run on, because
a recording stays on the processors that it was recorded for. The backend's place says which set it is; at a place
that has none, everything is computed by the eager runner.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.cuda_graphs.batch_sizes import DraftGraphs, GraphSizes
from faser.engine.execution.cuda_graphs.step_graphs import BackboneGraph, GraphInputs, GraphParts, StepGraphs
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.token_samplers import DeviceTokenSampler, PendingTokens
from faser.kernels.interface.backend import Backend, KvShape
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.processors import DeviceLane
from faser.kernels.interface.sampling_metadata import SamplingMetadata

STAGE, LANES_STAGE = "recording steps", "recording steps on lanes"
_NO_GUESSES = DraftGraphs()


class GraphRunner(Runner):
    """See Runner. Records at construction; report is called with (stage, done, total).

    max_logit_rows: most rows whose logits are taken at once. on_lanes: what records at the places that the runner
    may share the device on.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        kv: KvShape,
        chooser: DeviceTokenSampler,
        capture: GraphCapture,
        *,
        sizes: GraphSizes,
        max_logit_rows: int,
        guessing: DraftGraphs = _NO_GUESSES,
        on_lanes: Mapping[DeviceLane, GraphCapture] | None = None,
        report: Callable[[str, int, int], None],
    ) -> None:
        super().__init__(decoder, backend, kv, chooser)
        self._device_chooser = chooser
        self._inputs = GraphInputs(capture, sizes.rows[-1])
        self._head_rows = capture.stage(max_logit_rows, torch.int64)
        recorded = GraphParts(
            decoder=decoder,
            cache=self._cache,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            chooser=chooser,
            inputs=self._inputs,
            head_rows=self._head_rows,
        )
        everything = StepGraphs(recorded, capture, sizes, max_logit_rows=max_logit_rows)
        lanes: dict[DeviceLane | None, StepGraphs] = {
            place: StepGraphs(recorded, each, sizes.for_lanes(), max_logit_rows=max_logit_rows)
            for place, each in (on_lanes or {}).items()
        }
        _record([everything], guessing, STAGE, report)
        _record(list(lanes.values()), guessing, LANES_STAGE, report)
        self._sets = {None: everything, **lanes}

    @property
    def num_recordings(self) -> int:
        return sum(each.num_recordings for each in self._sets.values())

    def forward(self, batch: RowBatch, num_layers: int | None = None) -> None:
        depth = self.num_layers if num_layers is None else num_layers
        here = self._here
        trunk = None if here is None else here.trunk(batch, depth)
        if here is None or trunk is None:
            super().forward(batch, num_layers)
            return
        self._replay(here, trunk, batch)
        self._next_layer = depth

    def _replay(self, here: StepGraphs, trunk: BackboneGraph, batch: RowBatch) -> None:
        self._inputs.send(batch, self._device_chooser)
        here.run(trunk, batch.layout)
        self._batch, self._plan = batch, None
        self._hidden = self._decoder.hidden[: batch.num_rows]

    @torch.inference_mode()
    def advance(self, num_layers: int | None = None) -> None:
        """See Runner. Behind a replayed part too, whose plan has padded rows and is of no use to the others."""
        assert self._batch is not None, "advance before begin"
        if self._plan is None:
            self._plan = self._backend.plan(self._batch.layout, self._block_size)
        super().advance(num_layers)

    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """See Runner. Valid until the next call."""
        assert self._hidden is not None, "logits before forward"
        here = self._here
        recording = None if here is None else here.head(len(rows))
        if recording is None:
            return super().logits(rows)
        wanted = self._head_rows.host()
        wanted[: len(rows)], wanted[len(rows) :] = rows, 0
        self._head_rows.send()
        recording.replay()
        return self._decoder.logit_rows[: len(rows)]

    def choose(self, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
        logits, here = self.logits(rows), self._here
        cuts = requests.truncation_flags
        recording = None if here is None else here.take(len(rows), cuts)
        if recording is None:
            return self._device_chooser.take(logits, requests)
        self._device_chooser.send(requests, cuts)
        recording.replay()
        return self._device_chooser.taken(len(rows))

    def guess(self, rows: NDArray[np.int64], requests: SamplingMetadata, window: float) -> PendingTokens:
        logits, here = self.logits(rows), self._here
        cuts = requests.truncation_flags
        recording = None if here is None else here.guess(len(rows), cuts, window)
        if recording is None:
            return self._device_chooser.draft(logits, requests, window)
        self._device_chooser.send(requests, cuts)
        recording.replay()
        return self._device_chooser.drafted(len(rows))

    @property
    def _here(self) -> StepGraphs | None:
        """Those of the place that the backend is told to use."""
        return self._sets.get(self._backend.place)


def _record(
    sets: list[StepGraphs], guessing: DraftGraphs, stage: str, report: Callable[[str, int, int], None]
) -> None:
    """One after the other: torch tells cuBLAS of a lane's processors for the whole process."""
    total = sum(each.num_wanted(guessing) for each in sets)

    def progress() -> None:
        report(stage, sum(each.num_recordings for each in sets), total)

    for each in sets:
        each.record(guessing, progress)
