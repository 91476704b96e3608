"""A runner that replays CUDA graphs, where a step fits one, instead of launching kernel after kernel.

A step replays three graphs in a row without a wait: backbone, LM head, sampler (graphs.py). Their sizes vary
independently, so the number of graphs is the sum of the sizes, not the product. A step is padded to the next graph
batch size. Steps with and without drafts replay the same backbones. A step that fits no graph runs eagerly, on the
same buffers.

On a GPU that two lanes share, the runner has a set of graphs for every lane that it may run on, because a graph
stays on the processors that it was captured for. The backend's current lane selects the set; on a lane without
graphs every step runs eagerly.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.runner.batch import BlockTable, ContinuedDrafts, RowBatch
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.graphs import GraphInputs, GraphParts, StateInputs, StepGraphs
from faser.engine.execution.runner.model import RunnableModel
from faser.engine.execution.runner.passes_ahead import FollowedDrafts, PassesAhead, StepMatcher
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.runner.state_cache import StateCache
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.execution.sampling.tokens import DeviceTokenSampler, PendingTokens
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.drafting import StepMatch
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.mixers import StateShape
from faser.kernels.interface.sampling import SamplingMetadata, TruncationFlags
from faser.kernels.interface.shapes import DeviceLane, LaneError
from faser.types.engine import ProgressCallback

STAGE, LANES_STAGE = "capturing CUDA graphs", "capturing CUDA graphs on lanes"


class GraphRunner(Runner):
    """Runner that replays CUDA graphs. Captures them when constructed; calls report with (stage, done, total).

    max_logit_rows: most rows whose logits are computed at once. drafts: whether the model drafts, so that
    draft samplers are captured too. samples: None is captured where another rank samples. lane_captures: for each
    lane that the runner may run on. before_capture: is given the name of what is captured next.
    """

    def __init__(
        self,
        decoder: RunnableModel,
        backend: Backend,
        kv: KvShape,
        token_sampler: DeviceTokenSampler,
        capture: GraphCapture,
        *,
        sizes: GraphSizes,
        max_logit_rows: int,
        drafts: bool = False,
        samples: bool = True,
        lane_captures: Mapping[DeviceLane, GraphCapture] | None = None,
        states: StateShape | None = None,
        report: ProgressCallback,
        before_capture: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(decoder, backend, kv, token_sampler, states)
        self._state_inputs = None
        if isinstance(self._states, StateCache):
            self._state_inputs = StateInputs(capture, self._states.states, sizes.max_sequences)
        self._most_graph_rows = sizes.rows[-1]
        self._device_sampler = token_sampler
        self._inputs = GraphInputs(capture, sizes.most_rows, adapts=decoder.adapts)
        self._logit_rows = capture.staging_buffer(max_logit_rows, torch.int64)
        self._matcher = StepMatcher(capture, token_sampler)
        self._passes = PassesAhead(capture, self._inputs, token_sampler, max_logit_rows)
        self._followed: tuple[int, TruncationFlags]  # drafts of the passes ahead, and their flags
        parts = GraphParts(
            decoder=decoder,
            cache=self._cache,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            token_sampler=token_sampler,
            inputs=self._inputs,
            logit_rows=self._logit_rows,
            state_inputs=self._state_inputs,
            adapters=backend.adapters if decoder.adapts else None,
        )
        whole = StepGraphs(parts, capture, sizes, max_logit_rows=max_logit_rows, samples=samples)
        lanes: dict[DeviceLane | None, StepGraphs] = {
            lane: StepGraphs(parts, each, sizes, max_logit_rows=max_logit_rows)
            for lane, each in (lane_captures or {}).items()
        }
        _capture([(None, whole)], drafts, STAGE, report, before_capture)
        _capture([*lanes.items()], drafts, LANES_STAGE, report, before_capture)
        self._graphs_by_lane = {None: whole, **lanes}
        self._no_graphs = StepGraphs(parts, capture, sizes, max_logit_rows=max_logit_rows)  # of another lane
        if drafts and (plan := whole.smallest_plan) is not None:
            nothing = np.zeros(1, dtype=np.int64)
            self._passes.rehearse(plan, self.match(DraftLayout.plain(nothing, nothing), nothing - 1, nothing))

    @property
    def most_graph_rows(self) -> int:
        """See Runner. Smaller steps have graphs too, unless `StepGraphs.backbone` names a reason."""
        return self._most_graph_rows

    @property
    def num_graphs(self) -> int:
        return sum(each.num_graphs for each in self._graphs_by_lane.values())

    def rows_replayed(self, batch: RowBatch) -> int | None:
        """The rows of the graph that a forward would replay; None: it would run eagerly."""
        backbone = self._graphs.backbone(batch)
        return None if backbone is None else backbone.batch_size.rows

    def forward(self, batch: RowBatch) -> None:
        graphs = self._graphs
        backbone = graphs.backbone(batch)
        if backbone is None:
            super().forward(batch)
            return
        self._inputs.send(batch, self._device_sampler)
        state_step = self._states.begin(batch.layout)
        if self._state_inputs is not None and state_step is not None:
            self._state_inputs.send(state_step)
        graphs.run(backbone, batch.layout)
        self._replayed(batch.num_rows)

    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        graph = self._graphs.lm_head(len(rows))
        if graph is None:
            return super().logits(rows)
        numbers = self._logit_rows.host()
        numbers[: len(rows)], numbers[len(rows) :] = rows, 0
        self._logit_rows.send()
        graph.replay()
        return self._decoder.logit_rows[: len(rows)]

    def sample_from(self, logits: torch.Tensor, requests: SamplingMetadata) -> PendingTokens:
        flags = requests.truncation_flags
        graph = self._graphs.sampler(len(logits), flags)
        if graph is None:
            return self._device_sampler.take(logits, requests)
        self._device_sampler.send(requests, flags)
        graph.replay()
        return self._device_sampler.taken(len(logits))

    def sample_drafts(self, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
        flags = requests.truncation_flags
        if self._graphs.draft_sampler(len(rows), flags) is None:
            return self._device_sampler.draft(self.logits(rows), requests)
        self._device_sampler.send(requests, flags)
        return self._sample_sent(rows, flags)

    @property
    def fed(self) -> torch.Tensor:
        """Room for tokens [N] int64 that others have sampled, from which rows may be fed."""
        return self._device_sampler.fed

    def match(
        self,
        layout: DraftLayout,
        drafted: NDArray[np.int64],
        known: NDArray[np.int64],
        decided: NDArray[np.bool_] | None = None,
    ) -> StepMatch:
        """Find on the device what the step accepts whose rows were sampled last. See StepMatch.

        decided: [R] whether each row's draft token is accepted; None: the sampled tokens say so.
        """
        return self._matcher.find(layout, drafted, known, decided)

    def follow(self, drafts: FollowedDrafts, table: BlockTable) -> PendingTokens | None:
        """Launch a first pass of drafts behind a step that need not have ended, and sample their first tokens.

        None: only replayed steps can be followed, and there is no graph for this one.
        """
        flags, count = drafts.requests.truncation_flags, len(drafts.slots)
        if not self._may_follow(count, flags):
            return None
        self._device_sampler.send(drafts.requests, flags)
        rows = self._passes.begin(drafts, table, self._graphs)
        if rows is None:
            return None
        self._followed = count, flags
        self._replayed(2 * count)
        return self._sample_sent(rows, flags)

    def continue_drafts(self, drafts: ContinuedDrafts, table: BlockTable) -> bool:
        flags, count = drafts.requests.truncation_flags, len(drafts.slots)
        if not self._may_follow(count, flags) or not self._passes.continue_from(drafts, table, self._graphs):
            return False
        self._followed = count, flags
        return True

    def _may_follow(self, count: int, flags: TruncationFlags) -> bool:
        """Return whether passes ahead can run: a graph samples their drafts, and there are no states to move."""
        return self._state_inputs is None and self._graphs.draft_sampler(count, flags) is not None

    def follow_on(self) -> PendingTokens:
        """Launch the next pass of these drafts."""
        count, flags = self._followed
        self._passes.go_on()
        self._replayed(count)
        return self._sample_sent(np.arange(count), flags)

    def _replayed(self, num_rows: int) -> None:
        self._hidden = self._decoder.hidden[:num_rows]
        self._next_layer = self.num_layers

    def _sample_sent(self, rows: NDArray[np.int64], flags: TruncationFlags) -> PendingTokens:
        """Sample drafts by a graph, as the requests ask that were sent last."""
        self.logits(rows)
        graph = self._graphs.draft_sampler(len(rows), flags)
        assert graph is not None, f"no graph samples {len(rows)} drafts"
        graph.replay()
        return self._device_sampler.drafted(len(rows))

    @property
    def _graphs(self) -> StepGraphs:
        """The graphs of the backend's current lane."""
        return self._graphs_by_lane.get(self._backend.lane, self._no_graphs)


def _capture(
    sets: Sequence[tuple[DeviceLane | None, StepGraphs]],
    drafts: bool,
    stage: str,
    report: ProgressCallback,
    before: Callable[[str], None],
) -> None:
    """Capture one set after the other: torch sets cuBLAS's processor count of a lane for the whole process.

    Raises LaneError where a lane's processors cannot run a kernel: those that a split leaves over promise no
    thread block clusters, which kernels of libraries may need.
    """
    total = sum(each.num_expected(drafts) for _, each in sets)

    def progress() -> None:
        report(stage, sum(each.num_graphs for _, each in sets), total)

    for lane, each in sets:
        try:
            each.capture_all(drafts, progress, before)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if lane is None:
                raise
            raise LaneError(
                f"the {lane.num_processors} processors of the {lane.name} lane cannot run this model: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
