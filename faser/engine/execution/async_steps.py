"""Asynchronous scheduling in the data plane: a step starts before the host has the tokens of the step before.

    step         |  launch 1   launch 2   collect 1   launch 3   collect 2
    input of     |  known      token of 1             token of 2             fed back on the device

Such steps have no drafts. Rows of prompts have inputs that are known. Owns the step launched last, whose tokens
are inputs of the next one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from faser.engine.contract.plan import PLACEHOLDER, LaunchedStep, StepPlan, StepRows
from faser.engine.execution.next_tokens import sampling_rows
from faser.engine.execution.runner.batch import RowBatch, TokenFeedback
from faser.engine.execution.runner.runner import Runner, with_experts_counted
from faser.engine.execution.sampling.rows import DraftLayout, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.engine.execution.sampling.verify import matched


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight(LaunchedStep):
    """sampling: the rows that get a token. pending: these tokens; None where no row gets one.

    forwarded_s: when the forward was on its way to the device. experts: gives how many experts it reads.
    """

    sampling: DraftLayout
    pending: PendingTokens | None
    forwarded_s: float
    experts: Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedStep:
    """tokens: of the plan's sequences.
    began_s, ended_s: when the step ran; one that was launched while another one ran begins when that one was
        collected.
    prepared_s, experts: as in StepResult.
    """

    tokens: StepTokens
    began_s: float
    ended_s: float
    prepared_s: float
    experts: int


class AsyncSteps:
    """Steps are collected in the order of their launches; at most one more is launched before that."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._last: StepInFlight | None = None
        self._collected_s = 0.0

    def launch(self, plan: StepPlan, batch: RowBatch, began_s: float) -> StepInFlight:
        """Start the forward and the choice of tokens; waits for neither."""
        fed = replace(batch, feedback=self._feedback(plan.rows, batch))
        _, experts = with_experts_counted(self._runner, plan.rows.samples, lambda: self._runner.forward(fed))
        forwarded_s = time.perf_counter()
        sampling, numbers = sampling_rows(plan.rows, _sampling(plan.rows), batch)
        pending = None
        if sampling.num_rows:
            metadata = self._sampler.metadata(sampling.slots, sampling.positions)
            pending = self._runner.sample(numbers, metadata)
        self._last = StepInFlight(
            plan=plan,
            sampling=sampling,
            pending=pending,
            began_s=began_s,
            forwarded_s=forwarded_s,
            experts=experts,
        )
        return self._last

    def collect(self, launched: LaunchedStep) -> CollectedStep:
        """Wait for the tokens."""
        assert isinstance(launched, StepInFlight), "launched by another executor"
        began_s = max(launched.began_s, self._collected_s)
        rows = launched.plan.rows
        tokens = StepTokens.none(len(rows))
        if launched.pending is not None:
            found = matched(launched.sampling, launched.pending.wait().token_ids)
            tokens = found.among(_sampling(rows), len(rows))
        self._collected_s = time.perf_counter()
        return CollectedStep(
            tokens=tokens,
            began_s=began_s,
            ended_s=self._collected_s,
            prepared_s=max(launched.forwarded_s - began_s, 0.0),
            experts=launched.experts(),
        )

    def _feedback(self, rows: StepRows, batch: RowBatch) -> TokenFeedback | None:
        """Inputs that the step in flight still chooses; None: all are known."""
        if PLACEHOLDER not in rows.token_ids:
            return None
        last_rows = batch.last_rows.tolist()  # a placeholder is its sequence's only row
        fed = [i for i, row in enumerate(last_rows) if rows.token_ids[row] == PLACEHOLDER]
        assert self._last is not None, "nothing was launched before"
        assert self._last.pending is not None, "nothing was chosen before"
        source_of = {slot: i for i, slot in enumerate(self._last.sampling.slots.tolist())}
        return TokenFeedback(
            pending=self._last.pending,
            rows=batch.last_rows[fed],
            sources=np.array([source_of[rows.slots[i]] for i in fed], dtype=np.int64),
        )


def _sampling(rows: StepRows) -> list[int]:
    """Positions of the sequences that get a token."""
    return [at for at, samples in enumerate(rows.samples) if samples]
