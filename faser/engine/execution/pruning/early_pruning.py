"""A forward that stops between layers, looks at the drafted tokens, and lets clearly refused ones leave.

After a few layers, the hidden state of the row before a drafted token is a noisy preview of the logits that will
verify it. A drafted token is flagged where many of the drafter's own likely tokens beat it there:

    row          |  pending   x1    x2    x3    x4  |    row r verifies the token of row r + 1
    x3 flagged   |  stays   stays stays   -     -   |    the row of x2 yields the bonus token in the place of x3

For drafts that are point masses this equals cutting the draft to x1, x2 before the step: tokens are the same
whatever leaves. Source: FASER, arXiv 2604.20503.

Owns the way through the forward and what is learned from it. The gate decides where to stop and what to flag.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceRows, SequenceStart
from faser.engine.execution.drafting.drafter import NO_TOP
from faser.engine.execution.pruning.counters import PruneCounters
from faser.engine.execution.pruning.gate import UNSPLIT, Lesson, Look, Split
from faser.engine.execution.pruning.rank_judge import UNKNOWN, DraftedTokens, Judge, drafted_tokens
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.verifiers.verifier import AcceptanceResult
from faser.types import PruneStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NOT_SAMPLED = AcceptanceResult()


class Gate(Protocol):
    """Decides when to look, and what to flag. Layers are named by their index among the gate's candidates."""

    def use(self, mode: str | None) -> None:
        """Prune in another mode from the next step on; None: the mode it was made with."""
        ...

    def may_look(self) -> bool:
        """Whether the drafts that are made next may be looked at, so that they should name likely tokens."""
        ...

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        """Where the forward of a step stops. num_drafts: drafted rows among num_rows.

        named: the drafter named likely tokens; without them the forward stops nowhere.
        """
        ...

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged."""
        ...

    def looked(self, look: Look) -> None:
        """Take in what a look found, and what it cost."""
        ...

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        """Take in what became of the tokens that a step looked at. num_tokens: what the step brought in all."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountsOfLook:
    """[T] each. layer: among the candidates; num_layers: run before the look."""

    layer: int
    num_layers: int
    counts: Ints
    thresholds: Ints


class EarlyPruning:
    """Implements VerificationForward, for drafts that are point masses only."""

    def __init__(self, gate: Gate, judge: Judge, step_seconds: StepSeconds, *, num_slots: int) -> None:
        self._gate = gate
        self._judge = judge
        self._step_seconds = step_seconds
        self._counters = PruneCounters()
        self._temperatures = np.zeros(num_slots)
        self._began_s = self._predicted_s = 0.0  # of the step in progress
        self._drafted: DraftedTokens | None = None  # of the step in progress; None: no look was taken
        self._looks: list[_CountsOfLook] = []
        self._num_stayed = 0  # drafted rows that went through all layers in a step that prunes
        self.saved_s = 0.0

    @property
    def stats(self) -> PruneStats:
        return self._counters.stats

    @property
    def wants_top_ids(self) -> bool:
        return self._gate.may_look()

    def use(self, mode: str | None) -> None:
        """Prune as in another mode (auto, on, off) from the next step on; None: as configured. For measurements.

        What was learned stays. Raises ConfigError for an unknown mode.
        """
        self._gate.use(mode)

    def start(self, start: SequenceStart) -> None:
        self._temperatures[start.slot] = 0.0 if start.sampling.greedy else start.sampling.temperature

    def run(
        self, runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, top_ids: Tensor | None, /
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        self._began_s = time.perf_counter()
        self._predicted_s = self._step_seconds.of(batch.num_rows, sum([each.start for each in rows]))
        self._drafted, self._looks, self.saved_s = None, [], 0.0
        num_drafts = sum([each.num_drafts for each in rows])
        split = self._gate.ask(batch.num_rows, num_drafts, named=top_ids is not None) if num_drafts else UNSPLIT
        if not split.layers or top_ids is None:
            runner.forward(batch)
            return rows, batch
        self._drafted = drafted_tokens(rows, batch, top_ids)
        return self._run_split(runner, rows, batch, self._drafted, split)

    def learn(
        self, rows: tuple[SequenceRows, ...], acceptance: Mapping[int, AcceptanceResult], *, overlapped: bool
    ) -> None:
        if not overlapped:
            self._step_seconds.observe(self._predicted_s - self.saved_s, time.perf_counter() - self._began_s)
        drafted = self._drafted
        if drafted is None:
            return
        token_ids = [acceptance.get(each.slot, _NOT_SAMPLED).token_ids for each in rows]
        num_tokens = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        last_ids = np.fromiter((each[-1] if each else NO_TOP for each in token_ids), np.int64, len(token_ids))
        accepted_before = drafted.depth < num_tokens[drafted.sequence] - 1
        # The bonus token is the last one that came. It judges the drafted token in its place all the same.
        judged = drafted.depth < num_tokens[drafted.sequence]
        accepted = accepted_before | (drafted.token_ids.cpu().numpy() == last_ids[drafted.sequence])
        lessons = [
            self._lesson(each, drafted, judged & (each.counts != UNKNOWN), accepted) for each in self._looks
        ]
        if self._num_stayed:
            num_accepted = int(np.maximum(num_tokens - 1, 0)[drafted.num_drafts > 0].sum())
            self._counters.add(self._looks[0].num_layers, wasted=self._num_stayed - num_accepted)
        self._counters.close_step()
        self._gate.learn(lessons, int(num_tokens.sum()))
        self._drafted, self._looks, self._num_stayed = None, [], 0

    def _run_split(
        self,
        runner: Runner,
        rows: tuple[SequenceRows, ...],
        batch: RowBatch,
        drafted: DraftedTokens,
        split: Split,
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        assert not split.prunes or len(split.layers) == 1, "rows are numbered anew after some have left"
        num_drafts = len(drafted.depth)
        runner.begin(batch)
        for layer, num_layers in split.layers:
            runner.advance(num_layers)
            began_s = time.perf_counter()
            staying = self._look(runner, drafted, layer, num_layers)
            num_staying = int(staying.sum())
            if split.prunes:
                rows, batch = _cut_drafts(runner, rows, batch, staying)
                self._num_stayed = num_staying
                self._counters.add(num_layers, rows=num_drafts - num_staying)
                self.saved_s = self._saving_s(drafted, num_staying, num_layers / runner.num_layers, batch)
            seconds = time.perf_counter() - began_s
            flagged_rows = num_drafts - num_staying
            self._gate.looked(Look(layer=layer, num_drafts=num_drafts, flagged_rows=flagged_rows, seconds=seconds))
            self._counters.looked(seconds)
        runner.advance()
        self._counters.ran(pruning=split.prunes, num_drafts=num_drafts)
        return rows, batch

    def _look(self, runner: Runner, drafted: DraftedTokens, layer: int, num_layers: int) -> Ints:
        """[S] drafted tokens of each sequence that stay if flagged ones leave, with those that follow them."""
        counts = self._judge.counts(runner, drafted)
        thresholds = self._gate.thresholds(layer, self._temperatures[drafted.slots])
        flagged = np.flatnonzero((counts >= thresholds) & (counts != UNKNOWN))
        staying = drafted.num_drafts.copy()
        np.minimum.at(staying, drafted.sequence[flagged], drafted.depth[flagged])
        self._looks.append(_CountsOfLook(layer=layer, num_layers=num_layers, counts=counts, thresholds=thresholds))
        return staying

    def _saving_s(self, drafted: DraftedTokens, num_staying: int, share_run: float, batch: RowBatch) -> float:
        """Of the rows that left. share_run: of the layers, those they had been through. batch: without them."""
        num_left = len(drafted.depth) - num_staying
        whole_s, shorter_s = (self._step_seconds.of(batch.num_rows + each) for each in (num_left, 0))
        return (whole_s - shorter_s) * (1 - share_run)

    def _lesson(self, look: _CountsOfLook, drafted: DraftedTokens, judged: Bools, accepted: Bools) -> Lesson:
        flagged = judged & (look.counts >= look.thresholds)
        self._counters.add(
            look.num_layers,
            judged=int(judged.sum()),
            flagged=int(flagged.sum()),
            false_prunes=int((flagged & accepted).sum()),
        )
        return Lesson(
            layer=look.layer,
            temperatures=self._temperatures[drafted.slots[judged]],
            counts=look.counts[judged],
            accepted=accepted[judged],
        )


def _cut_drafts(
    runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, staying: Ints
) -> tuple[tuple[SequenceRows, ...], RowBatch]:
    """Let drafted rows leave the forward. staying: [S] drafted tokens that each sequence keeps, its first ones."""
    shorter = tuple(cut(each, count) for each, count in zip(rows, staying.tolist(), strict=True))
    if shorter == rows:
        return rows, batch
    return shorter, runner.compact(np.fromiter((len(each.token_ids) for each in shorter), np.int32, len(rows)))


def cut(rows: SequenceRows, num_drafts: int) -> SequenceRows:
    """The rows with their draft cut to its first num_drafts tokens."""
    if num_drafts == rows.num_drafts:
        return rows
    staying = len(rows.token_ids) - rows.num_drafts + num_drafts
    return replace(rows, token_ids=rows.token_ids[:staying], num_drafts=num_drafts)
