"""The executor seam, and the real one: a StepPlan goes in, the model runs, a StepResult comes out.

Owns what the data plane must remember between steps: the block table, the sampling state, the drafter, and the
prompts whose log probabilities were asked for. Decides nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.batch import BlockTable, RowBatch
from faser.engine.partition import Lane, Partition
from faser.engine.plan import (
    DraftPlan,
    Drafts,
    SequenceResult,
    SequenceRows,
    SequenceStart,
    StepPlan,
    StepResult,
)
from faser.engine.runner import Runner
from faser.engine.sampler import Sampler
from faser.engine.spec.drafter import Continuation, Drafter, Proposals
from faser.engine.spec.pruning import EarlyPruning, lines_of
from faser.engine.spec.verify import DraftedRows, Verdict, Verifier
from faser.kernels.backend import Backend
from faser.types import PositionLogprobs

T = TypeVar("T")


class Executor(Protocol):
    """Runs plans, one at a time, in the order of their step numbers."""

    def draft(self, plan: DraftPlan) -> Drafts:
        """Propose tokens for the step to come; drafts come in the order of plan.wishes. Changes no sequence."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's releases and starts, run its rows; results come in the order of plan.rows."""
        ...

    def run_beside(self, plan: StepPlan, ahead: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the plan, and meanwhile draft what continues its own drafts; both are done at the return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Who computes in a step that drafts ahead. target, draft: on the lanes; draft: None where no model drafts."""

    partition: Partition
    target: Backend
    draft: Backend | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What an engine that speculates has beside the model: who proposes tokens, and who judges them.

    pruning: None where all rows go through all layers. lanes: None where nobody drafts ahead.
    """

    drafter: Drafter
    verifier: Verifier
    pruning: EarlyPruning | None = None
    lanes: Lanes | None = None


class ModelExecutor:
    """The executor over a real model.

    max_logit_rows: prompt log probabilities are taken in groups of this many rows, which bounds memory.
    speculation: None in an engine that never drafts.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        table: BlockTable,
        *,
        max_logit_rows: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._table = table
        self._max_logit_rows = max_logit_rows
        self._speculation = speculation
        self._proposals: Proposals | None = None  # what the step that is being made may verify
        self._num_passed = 0  # leading tokens of each of its drafts that are known by now
        self._scored: dict[int, SequenceStart] = {}  # slots whose prompt log probabilities are wanted

    def draft(self, plan: DraftPlan) -> Drafts:
        assert self._speculation is not None, "this engine has no drafter"
        began = time.perf_counter()
        self._release(plan.released)
        self._extend(plan)
        self._proposals = proposals = self._speculation.drafter.propose(self._naming(plan))
        self._num_passed = 0
        return _drafts(plan, proposals, began, time.perf_counter())

    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._apply(plan)
        batch = self._table.gather(plan.rows)
        rows, batch, verdicts = self._verify(plan.rows, batch)
        self._go_on(verdicts)
        self._proposals = None
        results = self._results(plan.rows, rows, batch, verdicts)
        return self._report(plan, results, began, time.perf_counter())

    def run_beside(self, plan: StepPlan, ahead: DraftPlan) -> tuple[StepResult, Drafts]:
        assert self._speculation is not None, "this engine has no drafter"
        assert self._speculation.lanes is not None, "this engine has no lanes"
        assert ahead.share is not None, "who drafts ahead has a share of the processors"
        drafter, lanes = self._speculation.drafter, self._speculation.lanes
        self._apply(plan)
        self._extend(ahead)
        batch, naming = self._table.gather(plan.rows), self._naming(ahead)
        lanes.partition.resize(ahead.share)
        joined = lanes.partition.both(
            lambda lane, until: _on(lanes.draft, lane, lambda: drafter.propose(naming, until)),
            lambda lane: _on(lanes.target, lane, lambda: self._verify(plan.rows, batch)),
        )
        rows, batch, verdicts = joined.verified
        self._go_on(verdicts)
        self._proposals, self._num_passed = joined.drafted, 1  # a chunk begins behind the border
        results = self._results(plan.rows, rows, batch, verdicts)
        result = self._report(plan, results, joined.verify_began_s, joined.verify_ended_s)
        return result, _drafts(ahead, joined.drafted, joined.draft_began_s, joined.draft_ended_s)

    def _extend(self, plan: DraftPlan) -> None:
        for wish in plan.wishes:
            if wish.new_blocks:
                self._table.append(wish.slot, wish.new_blocks)

    @property
    def _pruning(self) -> EarlyPruning | None:
        return None if self._speculation is None else self._speculation.pruning

    def _naming(self, plan: DraftPlan) -> DraftPlan:
        """With likely tokens named, if anybody may look at them when the drafts are verified."""
        pruning = self._pruning
        return replace(plan, names_likely=True) if pruning is not None and pruning.may_look() else plan

    def _verify(
        self, rows: tuple[SequenceRows, ...], batch: RowBatch
    ) -> tuple[tuple[SequenceRows, ...], RowBatch, dict[int, Verdict]]:
        """The forward, and what becomes of the drafts in it, by slot. Changes nothing but the KV cache.

        Returns rows and batch as pruning left them: drafts may have become shorter.
        """
        pruning = self._pruning
        if pruning is None:
            self._runner.forward(batch)
        else:
            rows, batch = pruning.forward(self._runner, rows, batch, self._top_ids(rows))
        verdicts = self._choose([each for each in rows if each.samples], rows, batch)
        if pruning is not None:
            nothing = Verdict()
            pruning.learn([verdicts.get(each.slot, nothing).token_ids for each in rows])
        return rows, batch, verdicts

    def _results(
        self,
        planned: tuple[SequenceRows, ...],
        run: tuple[SequenceRows, ...],
        batch: RowBatch,
        verdicts: Mapping[int, Verdict],
    ) -> tuple[SequenceResult, ...]:
        return tuple(
            self._result(
                rows, verdicts.get(rows.slot), int(batch.last_rows[i]), before.num_drafts - rows.num_drafts
            )
            for i, (before, rows) in enumerate(zip(planned, run, strict=True))
        )

    def _report(
        self, plan: StepPlan, results: tuple[SequenceResult, ...], began_s: float, ended_s: float
    ) -> StepResult:
        pruning = self._pruning
        return StepResult(
            step=plan.step,
            sequences=results,
            run_s=ended_s - began_s,
            began_s=began_s,
            pruned_after=1.0 if pruning is None else pruning.pruned_after,
            pruning=None if pruning is None else pruning.stats,
        )

    def _apply(self, plan: StepPlan) -> None:
        self._release(plan.released)
        for start in plan.started:
            self._table.clear(start.slot)
            self._sampler.start(start)
            if self._speculation is not None:
                self._speculation.drafter.start(start)
                if self._speculation.pruning is not None:
                    self._speculation.pruning.start(start)
            if start.sampling.prompt_logprobs is not None:
                self._scored[start.slot] = start
        for rows in plan.rows:
            if rows.new_blocks:
                self._table.append(rows.slot, rows.new_blocks)

    def _go_on(self, verdicts: Mapping[int, Verdict]) -> None:
        """Every sequence goes on with its tokens."""
        going_on = [(slot, verdict) for slot, verdict in verdicts.items() if verdict.error is None]
        if not going_on:
            return
        self._sampler.accept(
            [slot for slot, verdict in going_on for _ in verdict.token_ids],
            [token_id for _, verdict in going_on for token_id in verdict.token_ids],
        )
        if self._speculation is not None:
            self._speculation.drafter.commit(
                [
                    Continuation(slot=slot, token_ids=each.token_ids, num_accepted=len(each.token_ids) - 1)
                    for slot, each in going_on
                ]
            )

    def _release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._sampler.release(slot)
            self._scored.pop(slot, None)
            if self._speculation is not None:
                self._speculation.drafter.release(slot)

    def _choose(
        self, chosen: list[SequenceRows], plan_rows: tuple[SequenceRows, ...], batch: RowBatch
    ) -> dict[int, Verdict]:
        """The next tokens of every sequence whose rows reach the end of its known tokens, by slot."""
        if not chosen:
            return {}
        last_rows = batch.last_rows[[i for i, rows in enumerate(plan_rows) if rows.samples]]
        if any(rows.num_drafts for rows in chosen):
            verdicts = self._judge(chosen, last_rows)
        else:
            verdicts = self._sample(chosen, self._runner.logits(last_rows))
        return {rows.slot: verdict for rows, verdict in zip(chosen, verdicts, strict=True)}

    def _sample(self, chosen: list[SequenceRows], logits: Tensor) -> list[Verdict]:
        """The plain way: nobody drafted, one token each. logits: [len(chosen), V]."""
        slots = [rows.slot for rows in chosen]
        sampled = self._sampler.sample(logits, slots, [rows.start + len(rows.token_ids) for rows in chosen])
        return [
            Verdict(
                token_ids=() if each.error else (each.token_id,),
                logprobs=None if each.logprobs is None else (each.logprobs,),
                error=each.error,
            )
            for each in sampled
        ]

    def _judge(self, chosen: list[SequenceRows], last_rows: NDArray[np.int64]) -> list[Verdict]:
        """The drafted way: the last γ + 1 rows of each sequence at once. last_rows: [len(chosen)]."""
        assert self._speculation is not None, "drafts in an engine that has no drafter"
        counts = np.fromiter((rows.num_drafts + 1 for rows in chosen), np.int64, len(chosen))
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        logits = self._runner.logits(np.repeat(last_rows - counts + 1, counts) + offsets)
        sequences = [
            DraftedRows(
                slot=rows.slot,
                position=rows.start + len(rows.token_ids) - rows.num_drafts,
                draft=rows.token_ids[len(rows.token_ids) - rows.num_drafts :],
            )
            for rows in chosen
        ]
        return self._speculation.verifier.judge(logits, sequences, self._draft_probs(chosen))

    def _draft_probs(self, chosen: list[SequenceRows]) -> Tensor | None:
        """What kept tokens were drawn from, [T, V] in the order of chosen; None where they are point masses."""
        if self._proposals is None or self._proposals.probs is None:
            return None
        first: dict[int, int] = {}
        total = 0
        for draft in self._proposals.drafts:
            first[draft.slot] = total
            total += len(draft.token_ids)
        kept = [first[rows.slot] + i for rows in chosen for i in range(rows.num_drafts)]
        return self._proposals.probs[torch.tensor(kept, dtype=torch.int64)]

    def _top_ids(self, rows: tuple[SequenceRows, ...]) -> Tensor | None:
        """Likely tokens beside each drafted one of the step, [T, M]; None where nobody named any."""
        if self._proposals is None or self._proposals.top_ids is None:
            return None
        lines = lines_of(rows, self._proposals.drafts, skipped=self._num_passed)
        return self._proposals.top_ids[torch.from_numpy(lines)]

    def _result(
        self, rows: SequenceRows, verdict: Verdict | None, last_row: int, num_pruned: int
    ) -> SequenceResult:
        scored = self._scored.get(rows.slot)
        prompt = None if scored is None else self._score_prompt(rows, scored, last_row)
        if verdict is None:
            return SequenceResult(slot=rows.slot, prompt_logprobs=prompt)
        return SequenceResult(
            slot=rows.slot,
            token_ids=verdict.token_ids,
            num_pruned=num_pruned,
            logprobs=verdict.logprobs,
            prompt_logprobs=prompt,
            error=verdict.error,
        )

    def _score_prompt(
        self, rows: SequenceRows, start: SequenceStart, last_row: int
    ) -> tuple[PositionLogprobs, ...] | None:
        """Log probabilities of the prompt tokens that this step's rows predict: positions start + 1 and on."""
        num_top = start.sampling.prompt_logprobs
        assert num_top is not None
        targets = start.token_ids[rows.start + 1 : min(rows.start + len(rows.token_ids) + 1, start.prompt_len)]
        if not targets:
            return None
        first_row = last_row + 1 - len(rows.token_ids)
        scored: list[PositionLogprobs] = []
        for at in range(0, len(targets), self._max_logit_rows):
            part = list(targets[at : at + self._max_logit_rows])
            logits = self._runner.logits(range(first_row + at, first_row + at + len(part)))
            scored += self._sampler.prompt_logprobs(logits, part, num_top)
        return tuple(scored)


def _drafts(plan: DraftPlan, proposals: Proposals, began_s: float, ended_s: float) -> Drafts:
    return Drafts(
        step=plan.step,
        drafts=proposals.drafts,
        run_s=ended_s - began_s,
        began_s=began_s,
        passes=proposals.passes,
        catchup_tokens=proposals.catchup_tokens,
    )


def _on(backend: Backend | None, lane: Lane, call: Callable[[], T]) -> T:
    """Call with a backend that computes on the lane's processors only."""
    if backend is None:
        return call()
    backend.use(lane.cores)
    try:
        return call()
    finally:
        backend.use(None)
