"""The forward of a step that may verify drafts: plain, or with early pruning.

Plain, all rows go through all layers. Early pruning stops after a sixth of them, looks at the drafted tokens, and
lets those leave that the target will clearly reject. There the hidden state of the row before a drafted token is a
noisy preview of the logits that will verify it; a token is flagged where too many others beat it.

    row          |  pending   x1    x2    x3    x4  |    row r verifies the token of row r + 1
    x3 flagged   |  stays   stays stays   -     -   |    the row of x2 yields the bonus token in the place of x3

For drafts that are point masses this equals cutting the draft to x1, x2 before the step: tokens are the same
whatever leaves. Source: FASER, arXiv 2604.20503.

The executor knows VerificationForward only. EarlyPruning is the way through the forward; PruneGate decides by
verified tokens alone when it looks, when rows leave, and from which rank on a token is flagged. It saves nothing
on the models measured so far (docs/measurements.md), so it is off by default.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

import numpy as np
import torch

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import StepRows
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import StepTokens
from faser.errors import ConfigError
from faser.types.arrays import NO_TOKEN, Bools, Floats, Ints
from faser.types.statistics import PruneStats

LOOK_AFTER = 1 / 6  # of the layers; later looks know more and save less (benchmarks/results/prune)
LOOK_EVERY = 20  # steps with drafts, of which one cuts nothing, so that every rank is verified now and then
LOOK_OFTEN = 4  # the same before any rank is known to be too low
_MOST_FALSE = 0.02  # share of the flagged tokens that may have been right
_Z = 2.326  # 99 %, one-sided: the smallest of many ranks is taken, after every step anew
_KEPT = 0.5 ** (1 / 20_000)  # weight that counted tokens keep when one more is counted
_NUM_BUCKETS = 32  # of ranks 0, 1, 2 … 3, 4 … 7, …


class VerificationForward(Protocol):
    """Called as run, then learn, for every synchronous step.

    stats: counters since the start of the engine; None where drafts are never cut.
    """

    @property
    def stats(self) -> PruneStats | None: ...

    def run(self, runner: Runner, rows: StepRows, batch: RowBatch, /) -> tuple[StepRows, RowBatch]:
        """Run all layers. Returns the rows and the batch that came out: drafts may have lost their last tokens."""
        ...

    def learn(self, tokens: StepTokens) -> None:
        """The step is over. tokens: of its sequences."""
        ...


class PlainForward:
    """All rows go through all layers."""

    stats: PruneStats | None = None

    def run(self, runner: Runner, rows: StepRows, batch: RowBatch, /) -> tuple[StepRows, RowBatch]:
        runner.forward(batch)
        return rows, batch

    def learn(self, tokens: StepTokens) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRows:
    """The T drafted tokens of a step of S sequences, sequence after sequence.

    num_drafts: [S] γ.
    sequence: [T] the sequence of each token, 0 … S - 1.
    depth: [T] drafted tokens before it.
    verified_by: [T] the row whose logits verify it.
    token_ids: [T].
    """

    num_drafts: Ints
    sequence: Ints
    depth: Ints
    verified_by: Ints
    token_ids: Ints

    @classmethod
    def of(cls, rows: StepRows, batch: RowBatch) -> "PreviewRows":
        num_drafts = np.array(rows.num_drafts, dtype=np.int64)
        sequence = np.repeat(np.arange(len(rows)), num_drafts)
        depth = np.arange(len(sequence)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
        verified_by = batch.last_rows[sequence] - num_drafts[sequence] + depth
        return cls(
            num_drafts=num_drafts,
            sequence=sequence,
            depth=depth,
            verified_by=verified_by,
            token_ids=batch.token_ids.numpy()[verified_by + 1],
        )


@torch.inference_mode()
def previewed_ranks(runner: Runner, drafted: PreviewRows) -> Ints:
    """Return how many tokens would beat each drafted one if the model ended at the current layer: [T].

    A logit that is not a number beats nothing. Leaves the forward as it is.
    """
    logits = runner.logits(drafted.verified_by)
    own = torch.from_numpy(drafted.token_ids).to(logits.device)
    ranks: Ints = (logits > logits.gather(-1, own[:, None])).sum(-1).numpy(force=True)
    return ranks


class EarlyPruning:
    """Forward that cuts drafts at an early layer; for drafts that are point masses only.

    layer: how many layers run before a look. stats: since the start.
    """

    def __init__(
        self,
        gate: "PruneGate",
        *,
        layer: int,
        ranks: Callable[[Runner, PreviewRows], Ints] = previewed_ranks,
    ) -> None:
        self._gate = gate
        self._layer = layer
        self._ranks_of = ranks
        self._drafted: PreviewRows | None = None  # of the step in progress; None: no look was taken
        self._ranks: Ints = np.zeros(0, dtype=np.int64)
        self._flagged: Bools = np.zeros(0, dtype=np.bool_)
        self._num_stayed = 0  # drafted rows that went through all layers in a step that prunes
        self.stats = PruneStats()

    def run(self, runner: Runner, rows: StepRows, batch: RowBatch, /) -> tuple[StepRows, RowBatch]:
        self._drafted, self._num_stayed = None, 0
        num_drafts = sum(rows.num_drafts)
        action = self._gate.decide() if num_drafts else Action.RUN_WHOLE
        if action is Action.RUN_WHOLE:
            runner.forward(batch)
            return rows, batch
        runner.begin(batch)
        runner.advance(self._layer)
        prunes = action is Action.PRUNE
        staying = self._look(runner, PreviewRows.of(rows, batch))
        num_leaving = num_drafts - int(staying.sum())
        if prunes:
            self._num_stayed = num_drafts - num_leaving
            rows, batch = _cut_drafts(runner, rows, batch, staying)
        before = self.stats
        self.stats = replace(
            before,
            shadow_steps=before.shadow_steps + (not prunes),
            pruned_steps=before.pruned_steps + prunes,
            drafted_rows=before.drafted_rows + num_drafts,
            pruned_rows=before.pruned_rows + (num_leaving if prunes else 0),
        )
        runner.advance()
        return rows, batch

    def learn(self, tokens: StepTokens) -> None:
        drafted = self._drafted
        if drafted is None:
            return
        num_tokens = np.array(tokens.counts, dtype=np.int64)
        last_ids = np.array([*tokens.token_ids, NO_TOKEN])[np.where(num_tokens, num_tokens.cumsum() - 1, -1)]
        # The bonus token is the last one; it verifies the drafted token in its place all the same.
        verified = drafted.depth < num_tokens[drafted.sequence]
        accepted = drafted.depth < num_tokens[drafted.sequence] - 1
        accepted |= drafted.token_ids == last_ids[drafted.sequence]
        failed = np.isin(np.arange(len(num_tokens)), [*tokens.errors])
        num_accepted = int((num_tokens - ~failed)[drafted.num_drafts > 0].sum())
        before, flagged = self.stats, self._flagged & verified
        self.stats = replace(
            before,
            wasted_rows=before.wasted_rows + (self._num_stayed - num_accepted if self._num_stayed else 0),
            verified=before.verified + int(verified.sum()),
            flagged=before.flagged + int(flagged.sum()),
            false_prunes=before.false_prunes + int((flagged & accepted).sum()),
        )
        self._gate.learn(self._ranks[verified], accepted[verified])
        self._drafted = None

    def _look(self, runner: Runner, drafted: PreviewRows) -> Ints:
        """Return how many drafted tokens [S] of each sequence stay if flagged ones leave, and the ones behind."""
        self._drafted, self._ranks = drafted, self._ranks_of(runner, drafted)
        self._flagged = self._gate.flags(self._ranks)
        staying = drafted.num_drafts.copy()
        np.minimum.at(staying, drafted.sequence[self._flagged], drafted.depth[self._flagged])
        return staying


def _cut_drafts(runner: Runner, rows: StepRows, batch: RowBatch, staying: Ints) -> tuple[StepRows, RowBatch]:
    """Let drafted rows leave the forward. staying: [S] drafted tokens that each sequence keeps, its first ones."""
    num_left = np.array(rows.num_drafts, dtype=np.int64) - staying
    if not num_left.any():
        return rows, batch
    before = np.array(rows.counts)
    counts = before - num_left
    places = np.arange(before.sum()) - (before.cumsum() - before).repeat(before)  # of each row in its sequence
    shorter = replace(
        rows,
        counts=counts.tolist(),
        num_drafts=staying.tolist(),
        token_ids=np.array(rows.token_ids)[places < counts.repeat(before)].tolist(),
    )
    return shorter, runner.compact(counts.astype(np.int32))


class Action(Enum):
    """Action of a forward after a few layers. LOOK: learn from what it sees. PRUNE: let flagged rows leave too."""

    RUN_WHOLE = auto()
    LOOK = auto()
    PRUNE = auto()


class PruneGate:
    """The rank from which on drafted tokens are flagged, learned from verified tokens."""

    def __init__(self) -> None:
        self._seen = np.zeros((_NUM_BUCKETS, 2))  # verified tokens by rank, rejected and accepted
        self._least = _NUM_BUCKETS  # the bucket of ranks from which on a token is flagged
        self._since_look = LOOK_EVERY

    def decide(self) -> Action:
        """Choose the action of a step that has drafts."""
        can_flag = self._least < _NUM_BUCKETS
        self._since_look += 1
        if self._since_look >= (LOOK_EVERY if can_flag else LOOK_OFTEN):
            self._since_look = 0
            return Action.LOOK
        return Action.PRUNE if can_flag else Action.RUN_WHOLE

    def flags(self, ranks: Ints) -> Bools:
        """Return whether tokens of these ranks will clearly be rejected: [T]."""
        flagged: Bools = _buckets(ranks) >= self._least
        return flagged

    def learn(self, ranks: Ints, accepted: Bools) -> None:
        """Learn from ranks [T] of tokens that were looked at and then verified.

        The least rank that is flagged is the smallest of at least 1 from which on no more than 2 % of the tokens
        were accepted, by Wilson's upper confidence bound. That takes at least 266 rejected tokens.
        """
        if not len(ranks):
            return
        self._seen *= _KEPT ** len(ranks)
        np.add.at(self._seen, (_buckets(ranks), accepted.astype(np.int64)), 1.0)
        beaten = self._seen[::-1].cumsum(0)[::-1]  # of at least this rank
        low = upper_share(beaten[:, 1], beaten.sum(1)) <= _MOST_FALSE
        low[0] = False  # a token that nothing beats is never flagged
        self._least = int(low.argmax()) if low.any() else _NUM_BUCKETS


def _buckets(ranks: Ints) -> Ints:
    """Return the index [T] of each rank's bucket: the number of its binary digits."""
    digits: Ints = np.frexp(ranks)[1].astype(np.int64)
    return digits


def upper_share(good: Floats, total: Floats) -> Floats:
    """Upper end of Wilson's interval for the share good / total; 1 where total is 0. Any shape."""
    number = np.maximum(total, 1e-9)
    share = np.clip(good / number, 0.0, 1.0)
    spread = _Z * np.sqrt(share * (1 - share) / number + (_Z / (2 * number)) ** 2)
    upper = (share + _Z**2 / (2 * number) + spread) / (1 + _Z**2 / number)
    return np.where(total > 0, np.minimum(upper, 1.0), 1.0)


def make_early_pruning(config: SpeculationConfig, *, num_layers: int) -> EarlyPruning:
    """Return the forward of an engine that prunes. num_layers: of the target.

    Raises ConfigError where drafts cannot be pruned exactly, and for a target of one layer.
    """
    obstacle = _obstacle(config, num_layers)
    if obstacle is not None:
        raise ConfigError(f"early pruning cannot be on: {obstacle}")
    return EarlyPruning(PruneGate(), layer=max(1, round(num_layers * LOOK_AFTER)))


def _obstacle(config: SpeculationConfig, num_layers: int) -> str | None:
    if config.policy == "off":
        return "policy off never drafts"
    if config.synthetic:
        return "synthetic rejection accepts drafts without looking at them"
    if config.draft_sample_method == "probabilistic":
        return "drafts that are drawn (draft_sample_method probabilistic) are verified with their probabilities"
    if num_layers < 2:
        return f"it needs a target of at least 2 layers, and this one has {num_layers}"
    return None
