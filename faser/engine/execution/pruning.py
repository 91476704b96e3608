"""The forward of a step that may verify drafts: plain, or with early pruning.

Plain, all rows go through all layers. Early pruning stops after a sixth of them, looks at the drafted tokens, and
lets those leave that the target will clearly reject. There the hidden state of the row before a drafted token is a
noisy preview of the logits that will verify it; a token is flagged where too many others beat it.

    row          |  pending   x1    x2    x3    x4  |    row r verifies the token of row r + 1
    x3 flagged   |  stays   stays stays   -     -   |    the row of x2 yields the bonus token in the place of x3

For drafts that are point masses this equals cutting the draft to x1, x2 before the step: tokens are the same
whatever leaves. Source: FASER, arXiv 2604.20503.

The executor knows VerificationForward only. EarlyPruning is the way through the forward; PruneGate decides by
measurements alone when it looks, when rows leave, and from which rank on a token is flagged.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import StepRows
from faser.engine.contract.step_times import CostTable
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import StepTokens
from faser.errors import ConfigError
from faser.kernels.interface.sampling import NO_TOKEN
from faser.types import PruneStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

AUTO, ON, OFF = MODES = ("auto", "on", "off")
LOOK_AFTER = 1 / 6  # of the layers; later looks know more and save less (benchmarks/results/prune)
LOOK_EVERY = 20  # steps with drafts, while pruning pays or might
LOOK_OFTEN = 4  # the same in mode `on` before any rank is known to be too low
_LOOK_SELDOM = 640  # the same where even the best pruning would save nothing
_FOLLOW = 0.1  # weight of the newest step in running means
_LEAST_GAIN = 0.01  # of the step's time: a smaller gain is noise
_PROMISING = 0.5  # share of the drafted rows that leaves at best
_MOST_FALSE = 0.02  # share of the flagged tokens that may have been right
_Z = 2.326  # 99 %, one-sided: the smallest of many ranks is taken, after every step anew
_KEPT = 0.5 ** (1 / 20_000)  # weight that counted tokens keep when one more is counted
_NUM_BUCKETS = 32  # of ranks 0, 1, 2 … 3, 4 … 7, …


class VerificationForward(Protocol):
    """Called as run, then learn, for every synchronous step.

    saved_s: seconds that the last step took less because drafts were cut in it, as far as can be predicted.
    stats: counters since the start of the engine; None where drafts are never cut.
    """

    @property
    def saved_s(self) -> float: ...

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

    saved_s = 0.0
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
        self.saved_s = 0.0
        self.stats = PruneStats()

    def use(self, mode: str | None) -> None:
        """Prune as in another mode (auto, on, off) from the next step on; None: as configured. For measurements.

        What was learned stays. Raises ConfigError for an unknown mode.
        """
        self._gate.use(mode)

    def run(self, runner: Runner, rows: StepRows, batch: RowBatch, /) -> tuple[StepRows, RowBatch]:
        self._drafted, self._num_stayed, self.saved_s = None, 0, 0.0
        num_drafts = sum(rows.num_drafts)
        action = self._gate.decide(batch.num_rows, num_drafts) if num_drafts else Action.RUN_WHOLE
        if action is Action.RUN_WHOLE:
            runner.forward(batch)
            return rows, batch
        runner.begin(batch)
        runner.advance(self._layer)
        began_s = time.perf_counter()
        prunes = action is Action.PRUNE
        staying = self._look(runner, PreviewRows.of(rows, batch))
        num_leaving = num_drafts - int(staying.sum())
        if prunes:
            self._num_stayed = num_drafts - num_leaving
            self.saved_s = self._gate.saving_s(batch.num_rows, num_leaving)
            rows, batch = _cut_drafts(runner, rows, batch, staying)
        seconds = time.perf_counter() - began_s
        self._gate.looked(num_drafts, num_leaving, seconds)
        before = self.stats
        self.stats = replace(
            before,
            shadow_steps=before.shadow_steps + (not prunes),
            pruned_steps=before.pruned_steps + prunes,
            drafted_rows=before.drafted_rows + num_drafts,
            pruned_rows=before.pruned_rows + (num_leaving if prunes else 0),
            seconds=before.seconds + seconds,
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
        self._gate.learn(self._ranks[verified], accepted[verified], int(num_tokens.sum()))
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
    """One for an engine. mode: `auto` prunes where it expects a gain, `on` wherever a rank is known to be too low.

    steps: measured seconds of target steps. max_rows: of a step, at most. share_after: of the layers, those after
    the look.

    gain: share of the step's time that pruning is expected to save, as a running mean. active: whether the gate
    believes in a gain. Both are only to be read.
    """

    def __init__(self, mode: str, steps: CostTable, *, max_rows: int, share_after: float) -> None:
        assert mode in (AUTO, ON), f"early pruning that is {mode} has no gate"
        self._configured_mode = mode
        self.use(None)
        self._seconds = steps.dense(max_rows)
        self._share_after = share_after
        self._seen = np.zeros((_NUM_BUCKETS, 2))  # verified tokens by rank, rejected and accepted
        self._least = _NUM_BUCKETS  # the bucket of ranks from which on a token is flagged
        self._false_share = 1.0  # bound on the share of flagged tokens that are right
        self._leaving_share = 0.0  # of the drafted rows
        self._look_s = 0.0
        self._num_looks = 0
        self._step_tokens = 1.0  # of a step, as a running mean
        self._since_look = 0
        self.gain = 0.0
        self.active = False

    def use(self, mode: str | None) -> None:
        """Work in this mode from the next step on, `off` included; None: in the configured mode.

        What it has learned stays. Raises ConfigError for an unknown mode.
        """
        mode = mode or self._configured_mode
        _check_mode(mode)
        self._mode = mode

    def decide(self, num_rows: int, num_drafts: int) -> Action:
        """Choose the action of a step of num_rows rows, num_drafts of them drafted."""
        if self._mode == OFF:
            return Action.RUN_WHOLE
        self._since_look += 1
        if not self._num_looks or self._since_look >= self._interval(num_rows, num_drafts):
            self._since_look = 0
            return Action.LOOK
        if not self._can_flag:
            return Action.RUN_WHOLE
        self._follow_gain(self._gain_s(num_rows, num_drafts) / max(self._seconds[num_rows], 1e-9))
        return Action.PRUNE if self.active or self._mode == ON else Action.RUN_WHOLE

    def flags(self, ranks: Ints) -> Bools:
        """Return whether tokens of these ranks will clearly be rejected: [T]."""
        flagged: Bools = _buckets(ranks) >= self._least
        return flagged

    def saving_s(self, num_rows: int, num_leaving: float) -> float:
        """Seconds that a step of num_rows rows takes less without num_leaving of them, which may be a fraction.

        Step times are a staircase: rows that cross no edge of it save nothing.
        """
        whole = int(num_leaving)
        here_s, below_s = self._seconds[[max(num_rows - whole, 1), max(num_rows - whole - 1, 1)]]
        shorter_s = here_s + (num_leaving - whole) * (below_s - here_s)
        return float(self._seconds[num_rows] - shorter_s) * self._share_after

    def looked(self, num_drafts: int, num_leaving: int, seconds: float) -> None:
        """num_leaving of num_drafts rows leave after a look, or would. seconds: of looking and of leaving."""
        weight = max(_FOLLOW, 1 / (self._num_looks + 1))
        self._num_looks += 1
        self._look_s += weight * (seconds - self._look_s)
        self._leaving_share += weight * (num_leaving / max(num_drafts, 1) - self._leaving_share)

    def learn(self, ranks: Ints, accepted: Bools, num_tokens: int) -> None:
        """Learn from ranks [T] of tokens that were looked at and then verified. num_tokens: of the whole step.

        The least rank that is flagged is the smallest of at least 1 from which on no more than 2 % of the tokens
        were accepted, by Wilson's upper confidence bound. That takes at least 266 rejected tokens.
        """
        self._step_tokens += _FOLLOW * (num_tokens - self._step_tokens)
        if not len(ranks):
            return
        self._seen *= _KEPT ** len(ranks)
        np.add.at(self._seen, (_buckets(ranks), accepted.astype(np.int64)), 1.0)
        beaten = self._seen[::-1].cumsum(0)[::-1]  # of at least this rank
        bounds = upper_share(beaten[:, 1], beaten.sum(1))
        low = bounds <= _MOST_FALSE
        low[0] = False  # a token that nothing beats is never flagged
        self._least = int(low.argmax()) if low.any() else _NUM_BUCKETS
        self._false_share = float(bounds[self._least]) if low.any() else 1.0

    @property
    def _can_flag(self) -> bool:
        return self._least < _NUM_BUCKETS

    def _interval(self, num_rows: int, num_drafts: int) -> int:
        """Steps from one look to the next."""
        if self._mode == ON and not self._can_flag:
            return LOOK_OFTEN
        if self._mode == ON or self.active:
            return LOOK_EVERY
        best_s = self.saving_s(num_rows, _PROMISING * num_drafts) - self._look_s
        return LOOK_EVERY if best_s > _LEAST_GAIN * self._seconds[num_rows] else _LOOK_SELDOM

    def _gain_s(self, num_rows: int, num_drafts: int) -> float:
        """Seconds saved, less the look, less the tokens that false prunes lose.

        Counts every row that leaves as a false prune with the bound's share.
        """
        leaving = self._leaving_share * num_drafts
        token_s = self._seconds[num_rows] / max(self._step_tokens, 1.0)
        return float(self.saving_s(num_rows, leaving) - self._look_s - leaving * self._false_share * token_s)

    def _follow_gain(self, gain: float) -> None:
        """Hysteresis: active from a gain that is more than noise, inactive at a loss, both as running means."""
        self.gain += _FOLLOW * (gain - self.gain)
        if self.gain > _LEAST_GAIN:
            self.active = True
        elif self.gain < 0:
            self.active = False


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


def make_early_pruning(
    mode: str, config: SpeculationConfig, steps: CostTable, *, num_layers: int, max_rows: int
) -> EarlyPruning | None:
    """None where the engine never prunes. steps, max_rows: as in PruneGate. num_layers: of the target.

    Raises ConfigError for an unknown mode, for `on` where drafts cannot be pruned exactly, and for a target of one
    layer.
    """
    _check_mode(mode)
    obstacle = _obstacle(config)
    if mode == ON and obstacle is not None:
        raise ConfigError(f"early pruning cannot be on: {obstacle}")
    if mode == OFF or obstacle is not None:
        return None
    if num_layers < 2:
        raise ConfigError(f"early pruning needs a target of at least 2 layers; this one has {num_layers}")
    layer = max(1, round(num_layers * LOOK_AFTER))
    gate = PruneGate(mode, steps, max_rows=max_rows, share_after=1 - layer / num_layers)
    return EarlyPruning(gate, layer=layer)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"early pruning is {mode!r}; it must be one of {', '.join(MODES)}")


def _obstacle(config: SpeculationConfig) -> str | None:
    if config.policy == "off":
        return "policy off never drafts"
    if config.synthetic:
        return "synthetic rejection accepts drafts without looking at them"
    if config.draft_sample_method == "probabilistic":
        return "drafts that are drawn (draft_sample_method probabilistic) are verified with their probabilities"
    return None
