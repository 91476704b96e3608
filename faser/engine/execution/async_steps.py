"""Asynchronous scheduling in the data plane: a step starts before the host has the tokens of the step before.

    step         |  launch 1   launch 2   collect 1   launch 3   collect 2
    input of     |  known      token of 1             token of 2             fed back on the device

Rows of prompts have inputs that are known. Owns the step launched last, whose tokens are inputs of the next one. A
step with drafts has known inputs but for draft tokens that were launched ahead (drafting/ahead.py); those that
follow it begin behind what the device finds it to accept.

Where a request edits its logits by its output, as penalties and grammars do, the host needs the tokens of the step
before. Then the forward is launched ahead alone, and the choice of tokens follows while it runs:

    step         |  forward 2   collect 1   choose 2   forward 3   collect 2   choose 3

A sequence whose mask is late gets no token in the step, and has no rows in later ones until the mask is there: its
last known token is computed again then. So no row is fed by a token that was never chosen.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from faser.engine.contract.plan import PLACEHOLDER, LaunchedStep, StepPlan, StepRows
from faser.engine.execution.drafting.ahead import DraftsAhead, FollowedStep
from faser.engine.execution.drafting.loop import DraftBatch
from faser.engine.execution.next_tokens import sampling_rows
from faser.engine.execution.pooling import Pooler, Vectors
from faser.engine.execution.runner.batch import RowBatch, TokenFeedback
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.runner import Runner, with_experts_counted
from faser.engine.execution.sampling.rows import DraftLayout, LogitRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.engine.execution.sampling.verify import Verifier, decided_by, matched
from faser.types.arrays import Bools, Ints

_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Choice:
    """Choice of the tokens of a step. is_made: it is on its way; the rest is known from then on.

    pending: the tokens; None where no row gets one. rows: what requests did to their logits; None: nothing.
    missing: slots that have had no row since their mask was not there; those of this choice too.
    """

    is_made: bool = False
    pending: PendingTokens | None = None
    rows: LogitRows | None = None
    missing: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight(LaunchedStep):
    """sampling: the rows that get a token, and numbers: which these are. choice: of these tokens.

    forwarded_s: when the forward was on its way to the device. experts: gives how many experts it reads. known:
    [S] the last known token of each sequence of sampling. drafts: that were launched ahead for it; None: there are
    none. sources: [T] where the target is fed the draft tokens of its rows from, which are theirs then.
    decided: as `matched` takes it. pooled: of the prompts that it completes.
    """

    sampler: Sampler
    sampling: DraftLayout
    numbers: Ints
    forwarded_s: float
    experts: Callable[[], int]
    known: Ints
    drafts: DraftsAhead | None
    sources: Ints
    decided: Bools | None
    pooled: Vectors
    choice: _Choice = field(default_factory=_Choice)

    @property
    def late(self) -> Sequence[int]:
        choice = self.choice
        assert choice.is_made, "the step before has not been collected"
        if not choice.missing:
            return ()
        without = () if choice.rows is None else choice.rows.without_token
        return [slot for slot in choice.missing if slot in without or self.sampler.is_late(slot)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedStep:
    """tokens: of the plan's sequences.
    began_s, ended_s: when the step ran; one that was launched while another one ran begins when that one was
        collected, and one behind drafts when these were there.
    prepared_s, experts, pooled: as in StepResult.
    """

    tokens: StepTokens
    began_s: float
    ended_s: float
    prepared_s: float
    experts: int
    pooled: Mapping[int, bytes]


class AsyncSteps:
    """Steps are collected in the order of their launches; at most one more is launched before that.

    verifier: of steps with drafts; it needs only the tokens that are sampled.
    """

    _last: StepInFlight  # launched last

    def __init__(self, runner: Runner, sampler: Sampler, verifier: Verifier, pooler: Pooler) -> None:
        self._verifier = verifier
        self._pooler = pooler
        self._runner = runner
        self._sampler = sampler
        self._num_in_flight = 0
        self._missing: Sequence[int] = ()  # of the choice made last
        self.collected_s = 0.0  # when the last step was collected

    def launch(
        self, plan: StepPlan, batch: RowBatch, began_s: float, drafts: DraftsAhead | None = None
    ) -> StepInFlight:
        """Start the forward, and the choice of tokens unless that follows tokens of a step in flight.

        drafts: launched ahead for the plan.
        """
        sources, feedback = _NONE, None
        if drafts is None:
            feedback = self._feedback(plan.rows, batch)
        elif plan.num_drafts:
            sources, feedback = self._drafted(plan.rows, batch, drafts)
        fed = replace(batch, feedback=feedback)
        _, experts = with_experts_counted(self._runner, plan.rows.samples, lambda: self._runner.forward(fed))
        forwarded_s = time.perf_counter()
        pooled = self._pooler.of_step(plan.rows, batch.last_rows)
        sampling, numbers = sampling_rows(plan.rows, _sampling(plan.rows), batch)
        self._last = StepInFlight(
            plan=plan,
            sampler=self._sampler,
            sampling=sampling,
            numbers=numbers,
            began_s=began_s,
            forwarded_s=forwarded_s,
            experts=experts,
            known=batch.token_ids.numpy()[numbers[sampling.first]],
            drafts=drafts,
            sources=sources,
            decided=decided_by(self._verifier, sampling) if plan.num_drafts else None,
            pooled=pooled,
        )
        if not self._num_in_flight or not self._sampler.follows_output(sampling.slots.tolist()):
            self._choose(self._last)
        self._num_in_flight += 1
        return self._last

    def followed(self) -> FollowedStep:
        """The step launched last, for drafts that go on behind it. Finds on the device what it accepts."""
        step, runner = self._last, self._runner
        assert isinstance(runner, GraphRunner), "a runner that cannot be followed"
        layout = step.sampling
        drafted = layout.drafted.copy()
        if len(step.sources):
            drafted[_verifying(layout)] = -2 - step.sources
        slots = layout.slots[layout.first].tolist()
        return FollowedStep(
            match=runner.match(layout, drafted, step.known, step.decided),
            numbers={slot: at for at, slot in enumerate(slots)},
            known=layout.positions[layout.first],
            most=layout.num_drafts + 1,
            fed=runner.fed,
        )

    def collect(self, launched: LaunchedStep, drafts: DraftBatch | None = None) -> CollectedStep:
        """Wait for the tokens. drafts: those that were launched ahead for the step, once they are there."""
        assert isinstance(launched, StepInFlight), "launched by another executor"
        began_s = max(launched.began_s, self.collected_s) if drafts is None else time.perf_counter()
        rows, layout, choice = launched.plan.rows, launched.sampling, launched.choice
        tokens = StepTokens.none(len(rows))
        if drafts is not None and len(launched.sources):
            drafted = layout.drafted.copy()
            drafted[_verifying(layout)] = drafts.token_ids.T.ravel()[launched.sources]
            layout = replace(layout, drafted=drafted)
        if choice.pending is not None:
            token_ids = choice.pending.wait().token_ids
            if choice.rows is None:
                found = matched(layout, token_ids, launched.decided)
            else:
                found = choice.rows.given(token_ids)
            tokens = found.among(_sampling(rows), len(rows))
        self._num_in_flight -= 1
        self.collected_s = time.perf_counter()
        return CollectedStep(
            tokens=tokens,
            began_s=began_s,
            ended_s=self.collected_s,
            prepared_s=max(launched.forwarded_s - began_s, 0.0),
            experts=launched.experts(),
            pooled=launched.pooled(),
        )

    def choose_next(self) -> None:
        """Start the choice of the step in flight, if it has waited for the sampler to accept the tokens before."""
        if self._num_in_flight and not self._last.choice.is_made:
            self._choose(self._last)

    @torch.inference_mode()
    def _choose(self, launched: StepInFlight) -> None:
        sampling, choice, sampler = launched.sampling, launched.choice, self._sampler
        choice.is_made = True
        if sampling.num_rows:
            metadata = sampler.metadata(sampling.slots, sampling.positions)
            if sampler.needs_only_logits(sampling.slots.tolist()):
                choice.pending = self._runner.sample(launched.numbers, metadata)
            else:
                logits = self._runner.logits(launched.numbers)
                choice.rows = sampler.rows(logits, sampling)
                choice.pending = self._runner.sample_from(logits, metadata)
                choice.rows.score(choice.pending.tokens, self._runner.read_back)
        here = launched.plan.rows.slots
        still = [slot for slot in self._missing if slot not in here]
        self._missing = choice.missing = still if choice.rows is None else [*still, *choice.rows.without_token]

    def _drafted(self, rows: StepRows, batch: RowBatch, drafts: DraftsAhead) -> tuple[Ints, TokenFeedback]:
        """Return where the draft tokens of the rows come from, [T], and that as input."""
        assert isinstance(self._runner, GraphRunner), "a runner that is fed by no other one"
        counts = np.array(rows.num_drafts, dtype=np.int64)
        at = counts.nonzero()[0]
        counts = counts[at]
        sources = drafts.sources([rows.slots[i] for i in at.tolist()], counts)
        numbers = (batch.last_rows[at] - counts + 1).repeat(counts)
        numbers += np.arange(len(numbers)) - (counts.cumsum() - counts).repeat(counts)
        return sources, TokenFeedback(tokens=self._runner.fed, rows=numbers, sources=sources)

    def _feedback(self, rows: StepRows, batch: RowBatch) -> TokenFeedback | None:
        """Inputs that the step in flight still chooses; None: all are known."""
        if PLACEHOLDER not in rows.token_ids:
            return None
        last_rows = batch.last_rows.tolist()  # a placeholder is its sequence's only row
        fed = [i for i, row in enumerate(last_rows) if rows.token_ids[row] == PLACEHOLDER]
        pending = self._last.choice.pending
        assert pending is not None, "nothing was chosen before"
        source_of = {slot: i for i, slot in enumerate(self._last.sampling.slots.tolist())}
        return TokenFeedback(
            tokens=pending.tokens,
            rows=batch.last_rows[fed],
            sources=np.array([source_of[rows.slots[i]] for i in fed], dtype=np.int64),
        )


def _verifying(layout: DraftLayout) -> Ints:
    """The rows [T] that verify a draft token, whether or not it is known."""
    return np.flatnonzero(layout.depth < layout.num_drafts[layout.sequence])


def _sampling(rows: StepRows) -> list[int]:
    """Positions of the sequences that get a token."""
    return [at for at, samples in enumerate(rows.samples) if samples]
