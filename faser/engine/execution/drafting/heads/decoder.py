"""A head as a decoder, so that the runner of draft models runs it: with CUDA graphs, and tokens fed on the device.

Everything that a pass reads is in place on the device before it is launched: the tokens, as for a draft model, and
the features of the rows.

    first pass     numbers of states in the ring --> states --> features --.
                                                                           |--> layers --> hidden
    further pass   features of the row that drafted the token -------------'                 |
                          ^                                                                  v
                          `--------------- the rows that are sampled, before their logits ---'

So the only work between two passes is the sampler's. Logits are those of the target's whole vocabulary, minus
infinity where the head's has no token: then ties, the race for random tokens and the fed tokens are the target's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafting.head_memory import UNKNOWN, HiddenStates
from faser.engine.execution.drafting.heads.head import Head
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput, DraftLoop, ModelPasses, Piece
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.graph_sizes import next_size
from faser.engine.execution.runner.runner import Runner, StagedNumbers
from faser.kernels.interface.adapters import AdapterRows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import CapturedGraph, GraphCapture, StagingBuffer
from faser.kernels.interface.mixers import StateStep
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout
from faser.types.arrays import Ints


class HeadDecoder:
    """RunnableModel that is a head. logits: [max_logit_rows, V] float32 of the target's vocabulary.

    A pass takes its features from the head's own room. `logits` leaves there the hidden states of the rows that
    it is given: row i of the next pass continues row i of the last logits.
    """

    def __init__(self, head: Head, *, max_rows: int, logits: Tensor) -> None:
        room = head.draft_room(max_rows)
        self.head = head
        self.features = room.features
        self.hidden = room.hidden
        self.states = room.hidden[:, :0]
        self.logit_rows = room.logits if head.draft_ids is None else logits
        self._token_ids = torch.empty(0)

    @property
    def spec(self) -> DecoderSpec:
        return self.head.spec.decoder

    def embed(self, token_ids: Tensor) -> Tensor:
        """Start a pass over these tokens, [R] int64, and the features of its rows."""
        self._token_ids = token_ids
        return self.hidden[: len(token_ids)]

    @property
    def adapts(self) -> bool:
        return False

    def adapter_rows(self, _layout: RowLayout, /) -> None:
        """Return None: a head drafts as it does without adapters."""

    def run_layers(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        cache: KvCache,
        plan: AttentionPlan,
        *,
        captures: bool = False,
        state_step: StateStep | None = None,
        adapted: AdapterRows | None = None,
    ) -> Tensor:
        """Run the whole pass; a head does not pause, captures nothing and has no states of its own."""
        del captures, state_step
        assert adapted is None, "a head has no adapters"
        assert (first, last) == (0, self.spec.num_layers), f"a head runs all of its layers, not {first} to {last}"
        return self.head.run(self._token_ids, self.features[: len(hidden)], cache, plan)

    def keep_rows(self, rows: Tensor) -> None:
        raise AssertionError(f"a pass of a head keeps all of its rows, not {len(rows)}")

    def fill_cache(self, num_rows: int, cache: KvCache, plan: AttentionPlan) -> None:
        """Store some keys and values for the rows of a pass."""
        token_ids = torch.arange(num_rows, device=self.hidden.device) % self.spec.vocab_size
        self.head.run(token_ids, self.features[:num_rows].zero_(), cache, plan)

    def normed(self, _hidden: Tensor, /) -> Tensor:
        raise AssertionError("embeddings are made of the target's states, not of a head's")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] float32 of rows of hidden, [N, H], which become the next pass's features."""
        count, draft_ids = len(hidden), self.head.draft_ids
        self.features[:count].copy_(hidden)
        found = self.head.logits(hidden)
        if draft_ids is None:
            return found
        return self.logit_rows[:count].fill_(-torch.inf).index_copy_(1, draft_ids, found)


class StateReader:
    """Computes features of states in the ring, where the head's next pass reads them.

    sizes: numbers of rows that have a graph, ascending; none: all are computed eagerly.
    """

    def __init__(
        self,
        decoder: HeadDecoder,
        states: HiddenStates,
        backend: Backend,
        capture: GraphCapture,
        sizes: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder
        self._ring = states.ring
        self._eager = StagedNumbers(backend)
        self._sizes = tuple(sizes)
        self._staging: StagingBuffer = capture.staging_buffer(max(sizes, default=1), torch.int64)
        self._graphs: dict[int, CapturedGraph] = {
            size: self._captured(capture, size) for size in reversed(self._sizes)
        }

    @torch.inference_mode()
    def read(self, numbers: Ints) -> None:
        """Compute the features of these rows of the ring, [R]; UNKNOWN ones are 0. Does not wait."""
        count, size = len(numbers), next_size(self._sizes, len(numbers))
        if size is None:
            self._run(self._eager.send(numbers)[0])
            return
        sent = self._staging.host()
        sent[:count], sent[count:] = numbers, UNKNOWN
        self._staging.send()
        self._graphs[size].replay()

    @torch.inference_mode()
    def keep(self, rows: Ints) -> None:
        """Move features of these rows to the first rows. rows: [N], ascending."""
        features = self._decoder.features
        features[: len(rows)].copy_(features.index_select(0, self._eager.send(rows)[0]))

    @torch.inference_mode()
    def _captured(self, capture: GraphCapture, size: int) -> CapturedGraph:
        return capture.capture(partial(self._run, self._staging.device[:size]))

    def _run(self, numbers: Tensor) -> None:
        states = self._ring.index_select(0, numbers.clamp_min(0))
        states.masked_fill_((numbers == UNKNOWN)[:, None], 0)
        features = self._decoder.head.features(states)
        assert features.data_ptr() == self._decoder.features.data_ptr(), "features are left in the head's room"


class HeadModelPasses(ModelPasses):
    """Passes of a head whose runner is that of a draft model. reader: of the states of the first pass."""

    def __init__(
        self, runner: Runner, table: BlockTable, states: HiddenStates, reader: StateReader, *, max_rows: int
    ) -> None:
        super().__init__(runner, table, max_rows=max_rows)
        self._states = states
        self._reader = reader
        self._numbers: dict[int, tuple[int, Ints]] = {}  # by slot: place of the first row, rows of the ring

    def read(self, inputs: Sequence[DraftInput]) -> tuple[RowBatch, int]:
        self._numbers = {each.slot: (each.start, self._states.numbers(each.states)) for each in inputs}
        return super().read(inputs)

    def run(self, pieces: Sequence[DraftInput | Piece]) -> RowBatch:
        parts = []
        for each in pieces:
            start, numbers = self._numbers[each.slot]
            parts.append(numbers[each.start - start :][: len(each.token_ids)])
        self._reader.read(np.concatenate(parts))
        return super().run(pieces)

    def keep(self, sources: Ints) -> None:
        if sources[-1] >= len(sources):
            self._reader.keep(sources)


class HeadModelLoop:
    """Loop of a head whose runner is that of a draft model. loop: over these passes."""

    def __init__(self, passes: HeadModelPasses, loop: DraftLoop) -> None:
        self._passes = passes
        self._loop = loop

    @property
    def memory(self) -> Sequence[Tensor] | None:
        """Return the cache, as Runner.repeatable_memory does; None where bits of a row depend on its batch."""
        return self._passes.runner.repeatable_memory()

    def places(self, max_tokens: int) -> int:
        """Rows of the cache that a draft takes behind those of committed tokens: its last token is no row."""
        return max_tokens - 1

    def read(self, inputs: Sequence[DraftInput]) -> None:
        """Compute the rows of committed tokens, without a draft."""
        self._passes.read(inputs)

    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        return self._loop.draft(inputs, stop, until)
