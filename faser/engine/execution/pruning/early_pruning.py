"""Early pruning: drafted tokens that the target will clearly refuse leave the forward before its last layers.

After a few layers, the hidden state of the row before a drafted token is a noisy preview of the logits that will
judge it. Where many of the drafter's own likely tokens beat the drafted one, it is flagged:

    row          |  pending   x1    x2    x3    x4  |    row r judges the token of row r + 1
    x3 flagged   |  stays   stays stays   -     -   |    the row that would judge x3 chooses the target's own token

For drafts that are point masses this is the draft cut to x1, x2 after the fact: the tokens are the same whatever
is pruned. Source: FASER, arXiv 2604.20503. Owns the way through the forward and its lessons; what is worth a look
is prune_gate's to say.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import Draft, SequenceRows, SequenceStart
from faser.engine.execution.drafters.drafter import NO_TOP
from faser.engine.execution.pruning.gate import Lesson, Look, Split
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.types import PrunedLayer, PruneStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_TOP = 32  # likely tokens that a drafted one is compared with
UNKNOWN = -1  # in place of a count: there was nothing to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTokens:
    """The T drafted tokens of a step of S sequences, sequence after sequence.

    num_drafts: [S] γ. sequence: [T] whose; depth: [T] drafted tokens before it. judged_by: [T] row of the step.
    token_ids: [T] int64; top_ids: [T, M] int64, as in Proposals. slots: [T].
    """

    num_drafts: Ints
    sequence: Ints
    depth: Ints
    judged_by: Ints
    slots: Ints
    token_ids: Tensor
    top_ids: Tensor


class Gate(Protocol):
    """Says when to look and what is bad. Layers are named by their index among the gate's candidates."""

    def may_look(self) -> bool:
        """Whether drafts that are about to be made may be looked at, so that their likely tokens are of use."""
        ...

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        """Where the forward of such a step stops for a look. num_drafts: so many of its rows are drafted.

        named: likely tokens are there; nowhere, if not.
        """
        ...

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged."""
        ...

    def looked(self, look: Look) -> None:
        """What a look found, and took."""
        ...

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        """What became of the tokens of a step that was looked at; num_tokens: that the step brought."""
        ...


class Judge(Protocol):
    """How bad drafted tokens look in the middle of a forward."""

    def counts(self, runner: Runner, drafted: DraftedTokens) -> Ints:
        """[T] how many tokens beat each drafted one, UNKNOWN where nobody can say. Leaves the forward as it is."""
        ...


class RankJudge:
    """Compares with the drafter's own likely tokens, by what the layers so far would score them.

    A count over some tokens is never above the rank in the whole vocabulary, so it flags nothing that the rank
    would not; and it costs M + 1 products of a hidden state, not V. Scores that are no numbers beat nothing.
    """

    @torch.inference_mode()
    def counts(self, runner: Runner, drafted: DraftedTokens) -> Ints:
        own, others = drafted.token_ids[:, None], drafted.top_ids
        scores = runner.preview(drafted.judged_by, torch.cat((own, others), 1).clamp_(min=0))
        beaten = (scores[:, 1:] > scores[:, :1]) & (others != own) & (others != NO_TOP)
        counts = beaten.sum(-1).masked_fill_((others == NO_TOP).all(-1), UNKNOWN)
        return counts.cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What was counted at one layer, [T] each. layer: among the candidates; num_layers: run before it."""

    layer: int
    num_layers: int
    counts: Ints
    thresholds: Ints


class EarlyPruning:
    """The forwards of steps that verify drafts. For drafts that are point masses only.

    Calls come in this order: start for every sequence, then (forward, learn) for each step with drafts.
    """

    def __init__(self, gate: Gate, judge: Judge, *, num_slots: int) -> None:
        self._gate = gate
        self._judge = judge
        self._temperatures = np.zeros(num_slots)
        self._drafted: DraftedTokens | None = None  # of the step in progress, if it was looked at
        self._seen: list[_Seen] = []
        self._layers: dict[int, PrunedLayer] = {}
        self._num_left = 0  # drafted rows that went through all layers, in the step in progress
        self.pruned_after = 1.0  # share of the layers that the rows which left the last step had been through
        self.stats = PruneStats()

    def may_look(self) -> bool:
        """Whether likely tokens beside those that are about to be drafted are of use."""
        return self._gate.may_look()

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        self._temperatures[start.slot] = 0.0 if start.sampling.greedy else start.sampling.temperature

    def forward(
        self, runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, top_ids: Tensor | None
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        """Run all layers over the rows, and let the clearly refused ones leave on the way.

        top_ids: [T, M] of the rows' drafted tokens, in their order; None: nobody named any, so nothing is pruned.
        Returns the rows and the batch as they came out; drafts may have become shorter.
        """
        self._drafted, self._seen, self.pruned_after = None, [], 1.0
        num_drafts = sum(each.num_drafts for each in rows)
        split = Split()
        if num_drafts:
            split = self._gate.ask(len(batch.token_ids), num_drafts, named=top_ids is not None)
        if not split.layers or top_ids is None:
            runner.forward(batch)
            return rows, batch
        self._drafted = drafted = drafted_tokens(rows, batch, top_ids)
        runner.begin(batch)
        assert not split.prunes or len(split.layers) == 1, "rows are numbered anew after they leave"
        for layer, num_layers in split.layers:
            runner.advance(num_layers)
            began_s = time.perf_counter()
            kept = self._look(runner, drafted, layer, num_layers)
            if split.prunes:
                rows, batch = self._narrow(runner, rows, batch, kept)
                self._leave(num_layers, num_drafts, int(kept.sum()), runner)
            self._note(layer, drafted.num_drafts, kept, time.perf_counter() - began_s)
        runner.advance()
        self._count(split.prunes, num_drafts)
        return rows, batch

    def learn(self, token_ids: Sequence[tuple[int, ...]]) -> None:
        """What every sequence of the step's rows got, accepted drafts and its own token; () where nothing."""
        drafted = self._drafted
        if drafted is None:
            return
        came = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        last = np.fromiter((each[-1] if each else NO_TOP for each in token_ids), np.int64, len(token_ids))
        ids = drafted.token_ids.cpu().numpy()
        # The last token that came is the target's own: the drafted one in its place was judged by it all the same.
        judged = drafted.depth < came[drafted.sequence]
        accepted = (drafted.depth < came[drafted.sequence] - 1) | (ids == last[drafted.sequence])
        lessons = [self._lesson(seen, drafted, judged & (seen.counts != UNKNOWN), accepted) for seen in self._seen]
        if self._num_left:
            num_accepted = int(np.maximum(came - 1, 0)[drafted.num_drafts > 0].sum())
            self._add(self._seen[0].num_layers, wasted=self._num_left - num_accepted)
        self.stats = replace(self.stats, layers=tuple(self._layers[each] for each in sorted(self._layers)))
        self._gate.learn(lessons, int(came.sum()))
        self._drafted, self._seen, self._num_left = None, [], 0

    def _look(self, runner: Runner, drafted: DraftedTokens, layer: int, num_layers: int) -> Ints:
        """[S] so many drafted tokens of each sequence are left, if flagged ones and those behind them leave."""
        counts = self._judge.counts(runner, drafted)
        thresholds = self._gate.thresholds(layer, self._temperatures[drafted.slots])
        flagged = np.flatnonzero((counts >= thresholds) & (counts != UNKNOWN))
        kept = drafted.num_drafts.copy()
        np.minimum.at(kept, drafted.sequence[flagged], drafted.depth[flagged])
        self._seen.append(_Seen(layer=layer, num_layers=num_layers, counts=counts, thresholds=thresholds))
        return kept

    def _note(self, layer: int, num_drafts: Ints, kept: Ints, seconds: float) -> None:
        total = int(num_drafts.sum())
        flagged = total - int(kept.sum())
        self._gate.looked(Look(layer=layer, num_drafts=total, flagged_rows=flagged, seconds=seconds))
        self.stats = replace(self.stats, seconds=self.stats.seconds + seconds)

    def _narrow(
        self, runner: Runner, rows: tuple[SequenceRows, ...], batch: RowBatch, kept: Ints
    ) -> tuple[tuple[SequenceRows, ...], RowBatch]:
        shorter = tuple(cut(each, left) for each, left in zip(rows, kept.tolist(), strict=True))
        if shorter == rows:
            return rows, batch
        return shorter, runner.compact(np.fromiter((len(each.token_ids) for each in shorter), np.int32, len(rows)))

    def _lesson(
        self, seen: _Seen, drafted: DraftedTokens, judged: NDArray[np.bool_], accepted: NDArray[np.bool_]
    ) -> Lesson:
        flagged = judged & (seen.counts >= seen.thresholds)
        self._add(
            seen.num_layers,
            judged=int(judged.sum()),
            flagged=int(flagged.sum()),
            false_prunes=int((flagged & accepted).sum()),
        )
        return Lesson(
            layer=seen.layer,
            temperatures=self._temperatures[drafted.slots[judged]],
            counts=seen.counts[judged],
            accepted=accepted[judged],
        )

    def _leave(self, num_layers: int, num_drafts: int, num_left: int, runner: Runner) -> None:
        """Rows left after so many layers, or none did."""
        self._num_left = num_left
        self._add(num_layers, rows=num_drafts - num_left)
        if num_left < num_drafts:
            self.pruned_after = num_layers / runner.num_layers

    def _add(
        self,
        num_layers: int,
        *,
        rows: int = 0,
        wasted: int = 0,
        judged: int = 0,
        flagged: int = 0,
        false_prunes: int = 0,
    ) -> None:
        before = self._layers.get(num_layers, PrunedLayer(layer=num_layers))
        self._layers[num_layers] = PrunedLayer(
            layer=num_layers,
            rows=before.rows + rows,
            wasted=before.wasted + wasted,
            judged=before.judged + judged,
            flagged=before.flagged + flagged,
            false_prunes=before.false_prunes + false_prunes,
        )

    def _count(self, pruned: bool, num_drafts: int) -> None:
        before = self.stats
        self.stats = replace(
            before,
            shadow_steps=before.shadow_steps + (not pruned),
            pruned_steps=before.pruned_steps + pruned,
            drafted_rows=before.drafted_rows + num_drafts,
        )


def cut(rows: SequenceRows, num_drafts: int) -> SequenceRows:
    """The rows with their draft cut to its first num_drafts tokens."""
    if num_drafts == rows.num_drafts:
        return rows
    left = len(rows.token_ids) - rows.num_drafts + num_drafts
    return replace(rows, token_ids=rows.token_ids[:left], num_drafts=num_drafts)


def drafted_tokens(rows: tuple[SequenceRows, ...], batch: RowBatch, top_ids: Tensor) -> DraftedTokens:
    """Where the drafted tokens of a step lie. top_ids: [T, M] in the same order."""
    num_drafts = np.fromiter((each.num_drafts for each in rows), np.int64, len(rows))
    slots = np.fromiter((each.slot for each in rows), np.int64, len(rows))
    sequence = np.repeat(np.arange(len(rows)), num_drafts)
    depth = np.arange(len(sequence)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
    judged_by = batch.last_rows[sequence] - num_drafts[sequence] + depth
    return DraftedTokens(
        num_drafts=num_drafts,
        sequence=sequence,
        depth=depth,
        judged_by=judged_by,
        slots=slots[sequence],
        token_ids=batch.token_ids[torch.from_numpy(judged_by + 1)].to(top_ids.device),
        top_ids=top_ids,
    )


def lines_of(rows: Sequence[SequenceRows], drafts: Sequence[Draft], *, skipped: int = 0) -> Ints:
    """[T] for each drafted token of a step, which of the tokens of drafts, laid one after the other, it is.

    rows: those with drafted tokens have a draft of their slot. skipped: so many leading tokens of every draft are
    known by now and no longer drafted.
    """
    lengths = np.fromiter((len(each.token_ids) for each in drafts), np.int64, len(drafts))
    firsts = dict(zip((each.slot for each in drafts), (np.cumsum(lengths) - lengths).tolist(), strict=True))
    drafting = [each for each in rows if each.num_drafts]
    counts = np.fromiter((each.num_drafts for each in drafting), np.int64, len(drafting))
    starts = np.fromiter((firsts[each.slot] + skipped for each in drafting), np.int64, len(drafting))
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
