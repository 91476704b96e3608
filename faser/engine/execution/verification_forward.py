"""The forward of a step that may verify drafts, as the model executor sees it.

The executor runs every synchronous step through one VerificationForward. The default sends all rows through all
layers. An extension may shorten drafts while the forward runs, and learns afterwards which tokens were right.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from faser.engine.contract.plan import SequenceRows, SequenceStart
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.verifiers.verifier import AcceptanceResult
from faser.types import PruneStats


class VerificationForward(Protocol):
    """Calls come in this order: start for every sequence, then (run, learn) for every step."""

    @property
    def wants_top_ids(self) -> bool:
        """Whether the drafter should name likely tokens next to those that it drafts next."""
        ...

    @property
    def saved_s(self) -> float:
        """Seconds that the last step took less because drafts were cut in it, as far as can be predicted."""
        ...

    @property
    def stats(self) -> PruneStats | None:
        """Counters since the start of the engine; None where drafts are never cut."""
        ...

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        ...

    def run(
        self, runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, top_ids: Tensor | None, /
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        """Run all layers. Returns the rows and the batch that came out: drafts may have lost their last tokens.

        top_ids: [T, M] int64, likely tokens at the place of each of the T drafted tokens; None: not named.
        """
        ...

    def learn(
        self, rows: tuple[SequenceRows, ...], acceptance: Mapping[int, AcceptanceResult], *, overlapped: bool
    ) -> None:
        """The step is over.

        rows: as `run` returned them. acceptance: by slot, of the sequences that got tokens. overlapped: a draft
        model ran concurrently, so that the step's time says nothing about the step alone.
        """
        ...


class PlainForward:
    """All rows go through all layers."""

    wants_top_ids = False
    saved_s = 0.0
    stats: PruneStats | None = None

    def start(self, start: SequenceStart) -> None:
        pass

    def run(
        self, runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, _top_ids: Tensor | None, /
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        runner.forward(batch)
        return rows, batch

    def learn(
        self, rows: tuple[SequenceRows, ...], acceptance: Mapping[int, AcceptanceResult], *, overlapped: bool
    ) -> None:
        pass
