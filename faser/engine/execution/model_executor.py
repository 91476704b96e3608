"""The executor over a real model. See executor for what it promises.

Owns what the data plane must remember between steps: the block table, the sampling state, the drafter, and what
was launched last. Decides nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.executor import LaunchedStep
from faser.engine.contract.plan import (
    PLACEHOLDER,
    DraftPlan,
    Drafts,
    SequenceResult,
    SequenceRows,
    StepPlan,
    StepResult,
)
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.overlap.lane_work import given_on_lane, on_lane
from faser.engine.execution.overlap.partition import Partition, PendingResult
from faser.engine.execution.prompt_logprobs import PromptLogprobs
from faser.engine.execution.pruning.early_pruning import EarlyPruning, lines_of
from faser.engine.execution.runner.batch import BlockTable, RowBatch, TokenFeedback
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.token_samplers import PendingTokens
from faser.engine.execution.verifiers.sample_and_match import acceptance_of_tokens
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows, Verifier
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.sampling_metadata import SamplingMetadata
from faser.types import PositionLogprobs

# Rows and batch as pruning left them, drafts may have become shorter; and what became of the drafts, by slot.
_Verified = tuple[tuple[SequenceRows, ...], RowBatch, dict[int, AcceptanceResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choosing(LaunchedStep):
    """chosen: rows of the plan that bring a token. pending: these tokens; None: there are none."""

    chosen: list[SequenceRows]
    pending: PendingTokens | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Who computes in a step that drafts ahead. target, draft: on the lanes; draft: None where no model drafts.

    fallback: why the partition is not the one that was asked for; empty: it is.
    """

    partition: Partition
    target: Backend
    draft: Backend | None
    fallback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeExecution:
    """What an engine that speculates has beside the model: who proposes tokens, and who judges them.

    by_tokens: verdicts follow from the tokens that the target chooses at every row (verifiers.coupled). pruning:
    None where all rows go through all layers. lanes: None where nobody drafts ahead.
    """

    drafter: Drafter
    verifier: Verifier
    by_tokens: bool = False
    pruning: EarlyPruning | None = None
    lanes: Lanes | None = None


class ModelExecutor:
    """The executor over a real model.

    max_logit_rows: prompt log probabilities are taken in groups of this many rows, which bounds memory.
    speculation: None in an engine that never drafts. samples_in_runner: tokens that need no more than their logits
    are chosen where the runner has these, in one go; else by the sampler, stage by stage. The tokens are the same.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        table: BlockTable,
        *,
        max_logit_rows: int,
        speculation: SpeculativeExecution | None = None,
        samples_in_runner: bool = False,
    ) -> None:
        self._runner = runner
        self._chooses_in_runner = samples_in_runner
        self._sampler = sampler
        self._table = table
        self._prompt_scores = PromptLogprobs(runner, max_logit_rows=max_logit_rows)
        self._speculation = speculation
        self._proposals: Proposals | None = None  # what the step that is being made may verify
        self._num_passed = 0  # leading tokens of each of its drafts that are known by now
        self._last: _Choosing | None = None
        self._collected_s = 0.0

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
        rows, batch, verdicts = self._verify(plan.rows, batch).wait()
        self._go_on(verdicts)
        self._proposals = None
        results = _results(plan.rows, rows, verdicts, self._prompt_scores.of_step(rows, batch.last_rows))
        return self._report(plan, results, began, time.perf_counter())

    def run_overlapped(self, plan: StepPlan, ahead: DraftPlan) -> tuple[StepResult, Drafts]:
        assert self._speculation is not None, "this engine has no drafter"
        assert self._speculation.lanes is not None, "this engine has no lanes"
        assert ahead.share is not None, "who drafts ahead has a share of the processors"
        drafter, lanes = self._speculation.drafter, self._speculation.lanes
        self._apply(plan)
        self._extend(ahead)
        batch, naming = self._table.gather(plan.rows), self._naming(ahead)
        lanes.partition.resize(ahead.share)
        joined = lanes.partition.both(
            lambda lane, until: on_lane(lanes.draft, lane, lambda: drafter.propose(naming, until)),
            lambda lane: given_on_lane(lanes.target, lane, lambda: self._verify(plan.rows, batch)),
        )
        rows, batch, verdicts = joined.verified
        self._go_on(verdicts)
        self._proposals, self._num_passed = joined.drafted, 1  # a chunk begins behind the border
        results = _results(plan.rows, rows, verdicts, self._prompt_scores.of_step(rows, batch.last_rows))
        result = self._report(plan, results, joined.verify_began_s, joined.verify_ended_s)
        return result, _drafts(ahead, joined.drafted, joined.draft_began_s, joined.draft_ended_s)

    def launch(self, plan: StepPlan) -> _Choosing:
        began_s = time.perf_counter()
        self._apply(plan)
        batch = self._table.gather(plan.rows)
        self._runner.forward(replace(batch, feed=self._feed(plan.rows)))
        chosen = [rows for rows in plan.rows if rows.samples]
        pending = None
        if chosen:
            pending = self._runner.choose(_last_rows(chosen, plan.rows, batch), self._requests(chosen))
        self._last = _Choosing(plan=plan, chosen=chosen, pending=pending, began_s=began_s)
        return self._last

    def collect(self, launched: LaunchedStep) -> StepResult:
        assert isinstance(launched, _Choosing), "launched by another executor"
        began_s = max(launched.began_s, self._collected_s)
        verdicts: dict[int, AcceptanceResult] = {}
        if launched.pending is not None:
            found = acceptance_of_tokens(launched.chosen, launched.pending.wait().token_ids)
            verdicts = {rows.slot: verdict for rows, verdict in zip(launched.chosen, found, strict=True)}
        self._collected_s = time.perf_counter()
        self._go_on(verdicts)
        results = _results(launched.plan.rows, launched.plan.rows, verdicts, {})
        return replace(self._report(launched.plan, results, began_s, self._collected_s), pruned_after=1.0)

    def _feed(self, rows: tuple[SequenceRows, ...]) -> TokenFeedback | None:
        """Where inputs come from that nobody knew when the plan was made: then each sequence has one row."""
        if rows[0].token_ids[0] != PLACEHOLDER:
            return None
        assert self._last is not None, "nothing was launched before"
        assert self._last.pending is not None, "nothing was chosen before"
        source_of = {each.slot: i for i, each in enumerate(self._last.chosen)}
        return TokenFeedback(
            pending=self._last.pending,
            rows=np.arange(len(rows)),
            sources=np.array([source_of[each.slot] for each in rows], dtype=np.int64),
        )

    def _requests(self, chosen: list[SequenceRows]) -> SamplingMetadata:
        """Of the last row of each."""
        ends = [rows.start + len(rows.token_ids) for rows in chosen]
        return self._sampler.metadata([rows.slot for rows in chosen], ends)

    def _extend(self, plan: DraftPlan) -> None:
        for request in plan.requests:
            if request.new_blocks:
                self._table.append(request.slot, request.new_blocks)

    @property
    def _pruning(self) -> EarlyPruning | None:
        return None if self._speculation is None else self._speculation.pruning

    def _naming(self, plan: DraftPlan) -> DraftPlan:
        """With likely tokens named, if anybody may look at them when the drafts are verified."""
        pruning = self._pruning
        return replace(plan, wants_top_ids=True) if pruning is not None and pruning.may_look() else plan

    def _verify(self, rows: tuple[SequenceRows, ...], batch: RowBatch) -> PendingResult[_Verified]:
        """The forward, and what becomes of the drafts in it. Changes nothing but the KV cache."""
        pruning = self._pruning
        if pruning is None:
            self._runner.forward(batch)
        else:
            rows, batch = pruning.forward(self._runner, rows, batch, self._top_ids(rows))
        choosing = self._choose([each for each in rows if each.samples], rows, batch)

        def verified() -> _Verified:
            verdicts = choosing.wait()
            if pruning is not None:
                nothing = AcceptanceResult()
                pruning.learn([verdicts.get(each.slot, nothing).token_ids for each in rows])
            return rows, batch, verdicts

        return PendingResult(verified, launches_more=choosing.launches_more)

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
            self._prompt_scores.start(start)
        for rows in plan.rows:
            if rows.new_blocks:
                self._table.append(rows.slot, rows.new_blocks)

    def _go_on(self, verdicts: Mapping[int, AcceptanceResult]) -> None:
        """Every sequence goes on with its tokens."""
        going_on = [(slot, verdict) for slot, verdict in verdicts.items() if verdict.error is None]
        if not going_on:
            return
        self._sampler.accept(
            (slot for slot, verdict in going_on for _ in verdict.token_ids),
            (token_id for _, verdict in going_on for token_id in verdict.token_ids),
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
            self._prompt_scores.release(slot)
            if self._speculation is not None:
                self._speculation.drafter.release(slot)

    def _choose(
        self, chosen: list[SequenceRows], plan_rows: tuple[SequenceRows, ...], batch: RowBatch
    ) -> PendingResult[dict[int, AcceptanceResult]]:
        """The next tokens of every sequence whose rows reach the end of its known tokens, by slot."""
        if not chosen:
            return PendingResult(dict)
        last_rows, drafted = _last_rows(chosen, plan_rows, batch), any(rows.num_drafts for rows in chosen)
        if self._chooses_in_runner and self._follow_from_tokens(chosen, drafted=drafted):
            judging, launches_more = self._take(chosen, last_rows), False
        elif drafted:
            judging, launches_more = partial(self._judge, chosen, last_rows), True
        else:
            judging, launches_more = partial(self._sample, chosen, last_rows), True
        return PendingResult(
            lambda: {rows.slot: verdict for rows, verdict in zip(chosen, judging(), strict=True)},
            launches_more=launches_more,
        )

    def _follow_from_tokens(self, chosen: list[SequenceRows], *, drafted: bool) -> bool:
        """Nobody's token takes more than its logits, and no verdict more than tokens. drafted: somebody has."""
        by_tokens = not drafted or (self._speculation is not None and self._speculation.by_tokens)
        return by_tokens and self._sampler.needs_only_logits([rows.slot for rows in chosen])

    def _take(
        self, chosen: list[SequenceRows], last_rows: NDArray[np.int64]
    ) -> Callable[[], list[AcceptanceResult]]:
        """All tokens in one go, given here, and then the drafts as far as they are the same.

        last_rows: [len(chosen)].
        """
        counts, behind = _judging(chosen)
        slots = np.array([rows.slot for rows in chosen]).repeat(counts)
        ends = np.array([rows.start + len(rows.token_ids) for rows in chosen]).repeat(counts)
        requests = self._sampler.metadata(slots, ends - behind)
        pending = self._runner.choose(last_rows.repeat(counts) - behind, requests)
        return lambda: acceptance_of_tokens(chosen, pending.wait().token_ids)

    def _sample(self, chosen: list[SequenceRows], last_rows: NDArray[np.int64]) -> list[AcceptanceResult]:
        """The plain way: nobody drafted, one token each. last_rows: [len(chosen)]."""
        logits = self._runner.logits(last_rows)
        slots = [rows.slot for rows in chosen]
        sampled = self._sampler.sample(logits, slots, [rows.start + len(rows.token_ids) for rows in chosen])
        return [
            AcceptanceResult(
                token_ids=() if each.error else (each.token_id,),
                logprobs=None if each.logprobs is None else (each.logprobs,),
                error=each.error,
            )
            for each in sampled
        ]

    def _judge(self, chosen: list[SequenceRows], last_rows: NDArray[np.int64]) -> list[AcceptanceResult]:
        """The drafted way: the last γ + 1 rows of each sequence at once. last_rows: [len(chosen)]."""
        assert self._speculation is not None, "drafts in an engine that has no drafter"
        counts, behind = _judging(chosen)
        logits = self._runner.logits(last_rows.repeat(counts) - behind)
        return self._speculation.verifier.judge(logits, _drafted_rows(chosen), self._draft_probs(chosen))

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


def _results(
    planned: tuple[SequenceRows, ...],
    run: tuple[SequenceRows, ...],
    verdicts: Mapping[int, AcceptanceResult],
    prompt_scores: Mapping[int, tuple[PositionLogprobs, ...]],
) -> tuple[SequenceResult, ...]:
    """verdicts, prompt_scores: by slot, of those that have any."""
    nothing = AcceptanceResult()
    results = []
    for before, rows in zip(planned, run, strict=True):
        slot = rows.slot
        verdict = verdicts.get(slot, nothing)
        result = SequenceResult(
            slot=slot,
            token_ids=verdict.token_ids,
            num_pruned=before.num_drafts - rows.num_drafts,
            logprobs=verdict.logprobs,
            prompt_logprobs=prompt_scores.get(slot),
            error=verdict.error,
        )
        results.append(result)
    return tuple(results)


def _drafts(plan: DraftPlan, proposals: Proposals, began_s: float, ended_s: float) -> Drafts:
    return Drafts(
        step=plan.step,
        drafts=proposals.drafts,
        run_s=ended_s - began_s,
        began_s=began_s,
        passes=proposals.passes,
        catchup_tokens=proposals.catchup_tokens,
    )


def _last_rows(
    chosen: list[SequenceRows], plan_rows: tuple[SequenceRows, ...], batch: RowBatch
) -> NDArray[np.int64]:
    """[len(chosen)]."""
    if len(chosen) == len(plan_rows):
        return batch.last_rows
    return batch.last_rows[[i for i, rows in enumerate(plan_rows) if rows.samples]]


def _judging(chosen: list[SequenceRows]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the last γ + 1 rows of each sequence: how many these are, and how many of them are behind each, [R].

    γ         |    2    | 0 | 1    |
    counts    |    3    | 1 | 2    |
    behind    | 2  1  0 | 0 | 1  0 |
    """
    counts = np.array([rows.num_drafts + 1 for rows in chosen])
    ends = counts.cumsum()
    return counts, ends.repeat(counts) - np.arange(1, ends[-1] + 1)


def _drafted_rows(chosen: list[SequenceRows]) -> list[DraftedRows]:
    return [
        DraftedRows(
            slot=rows.slot,
            position=rows.start + len(rows.token_ids) - rows.num_drafts,
            draft=rows.token_ids[len(rows.token_ids) - rows.num_drafts :],
        )
        for rows in chosen
    ]
