"""The executor over a real model: it runs the control plane's plans, and decides nothing.

Owns what the data plane remembers between steps: the block table, the sampling state, the drafter with its drafts,
and the step in flight. `run` is the step to read first.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.native_acceptance import Texts
from faser.engine.contract.plan import (
    PLACEHOLDER,
    DrafterCheck,
    DraftPlan,
    LaunchedStep,
    StepPlan,
    StepResult,
    StepRows,
)
from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.async_steps import AsyncSteps, StepInFlight
from faser.engine.execution.drafting.ahead import DraftsAhead
from faser.engine.execution.drafting.cold_state import Rebuilds
from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.drafter import (
    Drafter,
    NoDrafter,
    Proposals,
    ProposedDrafts,
    drafts_of,
    without_forbidden,
)
from faser.engine.execution.drafting.head_memory import HiddenStates, NoHiddenStates
from faser.engine.execution.drafting.loop import DraftBatch
from faser.engine.execution.drafting.text import texts_of
from faser.engine.execution.next_tokens import NextTokens
from faser.engine.execution.overlap.lanes import Lanes, enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.pooling import Pooler
from faser.engine.execution.prompt_logprobs import PromptLogprobs
from faser.engine.execution.pruning import PlainForward, VerificationForward
from faser.engine.execution.ranks.adapters import LeadingAdapters
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.runner import Runner, with_experts_counted
from faser.engine.execution.sampling.rows import StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch, Verifier, needs_only_samples
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.types.answer import PositionLogprobs
from faser.types.arrays import Ints

# Rows and batch as the forward returned them (it may cut drafts), the tokens of each sequence, and experts read.
_VerifiedRows = tuple[StepRows, RowBatch, StepTokens, int]

_NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeExecution:
    """Parts of an engine that speculates, in addition to the model.

    forward: how the rows of a step go through the layers. lanes: None where drafting never overlaps with a step.
    draft_kv: what the draft model's cache holds; None without a draft model. states: where steps leave the hidden
    states that the drafter reads.
    """

    drafter: Drafter
    verifier: Verifier
    forward: VerificationForward = field(default_factory=PlainForward)
    lanes: Lanes | None = None
    draft_kv: DraftKvCache | None = None
    states: HiddenStates | NoHiddenStates = field(default_factory=NoHiddenStates)


class ModelExecutor:
    """Implements Executor.

    max_logit_rows: prompt log probabilities take logits of this many rows at a time, which bounds memory.
    matchers: of the sampler, where answers may have a structure; drafts are cut where their grammar forbids them.
    adapters: None: requests have none. speculation: None in an engine that never drafts. samples_in_runner: the
    runner samples tokens that depend on nothing but their logits right after the forward; else the sampler does,
    stage by stage, with the same tokens.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        table: BlockTable,
        *,
        max_logit_rows: int,
        matchers: SequenceMatchers | None = None,
        speculation: SpeculativeExecution | None = None,
        adapters: AdapterStore | LeadingAdapters | None = None,
        samples_in_runner: bool = False,
    ) -> None:
        self._runner = runner
        self.adapters = adapters
        self._sampler = sampler
        self._table = table
        self._matchers = matchers
        self._speculation = speculation or SpeculativeExecution(
            drafter=NoDrafter(), verifier=SampleAndMatch(sampler)
        )
        self._drafter, self._forward = self._speculation.drafter, self._speculation.forward
        self._states = self._speculation.states
        self._drafts = ProposedDrafts()
        self._applied: StepPlan | None = None  # the plan that looking up overlapped drafts has applied already
        verifier = self._speculation.verifier
        self._next_tokens = NextTokens(
            runner, sampler, self._drafts, verifier=verifier, samples_in_runner=samples_in_runner
        )
        self._pooler = Pooler(runner, max_logit_rows=max_logit_rows)
        self._async_steps = AsyncSteps(runner, sampler, verifier, self._pooler)
        self._follower = _follower(runner, self._speculation) if samples_in_runner else None
        self._ahead: DraftsAhead | None = None  # for the next step
        self._device_computes = samples_in_runner
        self._forwarded_s = 0.0  # when the forward of the last step was done, or on its way to the device
        self._prompt_logprobs = PromptLogprobs(runner, max_logit_rows=max_logit_rows)

    def without_drafter(self) -> "ModelExecutor":
        """An executor over the same model and slots, of whose steps no drafter hears; for slots of its own."""
        return ModelExecutor(
            self._runner,
            self._sampler,
            self._table,
            max_logit_rows=self._prompt_logprobs.max_logit_rows,
            adapters=self.adapters,
        )

    @property
    def lanes(self) -> Lanes | None:
        """Return the lanes of overlapped drafting; None where drafting always precedes the step."""
        return self._speculation.lanes

    @property
    def texts(self) -> Texts | None:
        """Texts in which the control plane may look up drafts by itself; None: plans ask for all drafts."""
        return texts_of(self._drafter, self._matchers)

    @property
    def drafts_ahead(self) -> bool:
        return self._follower is not None

    def draft_ahead(self, plan: DraftPlan) -> bool:
        assert self._follower is not None, "drafts are made before steps"
        self._append_blocks(plan)
        self._ahead = self._follower.follow(plan, self._async_steps.followed())
        return self._ahead is not None

    def end_drafts(self) -> Ints:
        assert self._ahead is not None, "nothing was launched ahead"
        return self._ahead.end()

    def _known(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """Read drafts that were launched ahead, for a step that is not launched; return it with their tokens."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return plan, None
        batch, drafts = self._read(ahead)
        rows, counts = plan.rows, np.array(plan.rows.num_drafts, dtype=np.int64)
        drafting = counts.nonzero()[0]
        sources = ahead.sources([rows.slots[at] for at in drafting.tolist()], counts[drafting])
        tokens = iter(batch.token_ids.T.ravel()[sources].tolist())
        known = [next(tokens) if token_id == PLACEHOLDER else token_id for token_id in rows.token_ids]
        return replace(plan, rows=replace(rows, token_ids=known)), drafts

    def _read(self, ahead: DraftsAhead) -> tuple[DraftBatch, Drafts]:
        """Wait for drafts that were launched ahead."""
        assert self._follower is not None
        began_s = self._async_steps.collected_s
        batch, found = self._follower.read(ahead)
        return batch, drafts_of(ahead.plan, found, began_s, time.perf_counter())

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:
        began_s = time.perf_counter()
        if self._ahead is not None:  # the sequences that it was for have ended
            self._read(self._ahead)
            self._ahead = None
        if during is not None:
            self._apply(during)
            self._applied = during
        self._release(plan.released)
        self._append_blocks(plan)
        proposals = self._drafter.propose(plan)
        if during is None:
            self._drafts.hold(proposals)
        return drafts_of(plan, self._allowed(plan, proposals), began_s, time.perf_counter())

    def rebuild(self, check: DrafterCheck) -> bool:
        return isinstance(self._drafter, Rebuilds) and self._drafter.rebuild(check.method, check.slot)

    def run(self, plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        self._apply(plan)
        plan, drafts = self._known(plan)
        verified = self._verify(plan.rows, self._gather(plan)).wait()
        self._drafts.drop()
        result = self._finish(plan, verified, began_s, prepares=self._device_computes)
        return result if drafts is None else replace(result, drafts=drafts)

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        lanes = self._speculation.lanes
        assert lanes is not None, "this engine has no lanes"
        assert draft_plan.share is not None, "overlapped drafting needs a share of the processors"
        if self._applied is not plan:
            self._apply(plan)
        self._applied = None
        self._append_blocks(draft_plan)
        batch = self._gather(plan)
        lanes.partition.resize(draft_plan.share)
        joined = lanes.partition.run_both(
            lambda lane, until: run_on_lane(lanes.draft, lane, lambda: self._drafter.propose(draft_plan, until)),
            lambda lane: enqueue_on_lane(lanes.target, lane, lambda: self._verify(plan.rows, batch)),
        )
        # This step decided the first token of every new draft: it equals the bonus token, or the draft is void.
        self._drafts.hold(joined.drafted, num_decided=1)
        drafted = self._allowed(draft_plan, joined.drafted)
        result = self._finish(plan, joined.verified, joined.verify_began_s, joined.verify_ended_s)
        return result, drafts_of(draft_plan, drafted, joined.draft_began_s, joined.draft_ended_s)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        began_s = time.perf_counter()
        self._apply(plan)
        batch = self._gather(plan)
        drafts, self._ahead = self._ahead, None
        launched = self._async_steps.launch(plan, batch, began_s, drafts)
        self._keep_states(plan.rows, batch, [0] * len(plan.rows))
        return launched

    def collect(self, launched: LaunchedStep) -> StepResult:
        assert isinstance(launched, StepInFlight), "launched by another executor"
        batch = drafts = None
        if launched.drafts is not None:
            batch, drafts = self._read(launched.drafts)
        collected, plan = self._async_steps.collect(launched, batch), launched.plan
        self._commit(plan.rows.slots, collected.tokens)
        self._async_steps.choose_next()
        return self._result(
            plan,
            collected.tokens,
            drafts=drafts,
            began_s=collected.began_s,
            ended_s=collected.ended_s,
            prepared_s=collected.prepared_s,
            experts=collected.experts,
            pooled=collected.pooled,
        )

    def _gather(self, plan: StepPlan) -> RowBatch:
        batch = self._table.gather(plan.rows)
        return replace(batch, captures=True) if self._states.wants(plan.rows.slots) else batch

    def _verify(self, rows: StepRows, batch: RowBatch) -> PendingResult[_VerifiedRows]:
        """Run the forward and find the next tokens. Writes to the KV cache and to no sequence's state."""
        runner = self._runner
        (rows, batch), experts = with_experts_counted(
            runner, rows.samples, lambda: self._forward.run(runner, rows, batch)
        )
        self._forwarded_s = time.perf_counter()
        finding = self._next_tokens.of(rows, batch)
        return PendingResult(lambda: (rows, batch, finding.wait(), experts()), launches_more=finding.launches_more)

    def _finish(
        self,
        plan: StepPlan,
        verified: _VerifiedRows,
        began_s: float,
        ended_s: float | None = None,
        *,
        prepares: bool = False,
    ) -> StepResult:
        """Take in what a step sampled, and read prompt log probabilities and vectors off its forward.

        ended_s: None: now. prepares: the device had no work until the forward was on its way.
        """
        rows, batch, tokens, experts = verified
        self._forward.learn(tokens)
        self._keep_states(rows, batch, tokens.counts)
        self._commit(plan.rows.slots, tokens)
        prompt_logprobs = self._prompt_logprobs.of_step(rows, batch.last_rows)
        pooled = self._pooler.of_step(rows, batch.last_rows)()
        cut = [before - after for before, after in zip(plan.rows.num_drafts, rows.num_drafts, strict=True)]
        return self._result(
            plan,
            tokens,
            began_s=began_s,
            ended_s=time.perf_counter() if ended_s is None else ended_s,
            prepared_s=self._forwarded_s - began_s if prepares else 0.0,
            experts=experts,
            num_cut={at: count for at, count in enumerate(cut) if count},
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
        )

    def _result(
        self,
        plan: StepPlan,
        tokens: StepTokens,
        *,
        began_s: float,
        ended_s: float,
        prepared_s: float,
        drafts: Drafts | None = None,
        experts: int = 0,
        num_cut: Mapping[int, int] = _NOTHING,
        prompt_logprobs: Mapping[int, tuple[PositionLogprobs, ...]] = _NOTHING,
        pooled: Mapping[int, bytes] = _NOTHING,
    ) -> StepResult:
        return StepResult(
            step=plan.step,
            counts=tokens.counts,
            token_ids=tokens.token_ids,
            errors=tokens.errors,
            logprobs=tokens.logprobs,
            drafts=drafts,
            run_s=ended_s - began_s,
            began_s=began_s,
            prepared_s=prepared_s,
            experts=experts,
            pruning=self._forward.stats,
            draft_kv=self._held_by_drafter(plan),
            num_cut=num_cut,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
        )

    def _keep_states(self, rows: StepRows, batch: RowBatch, num_tokens: Sequence[int]) -> None:
        """Before the next forward overwrites them."""
        if batch.captures:
            states = self._runner.states(batch.num_rows)
            self._states.take_in(rows, batch.layout.query_start.tolist(), states, num_tokens)

    def _held_by_drafter(self, plan: StepPlan) -> tuple[int, ...]:
        """Return draft_kv as StepResult has it."""
        if not plan.started:
            return ()
        if isinstance(self._states, HiddenStates):
            first = dict(zip(plan.rows.slots, plan.rows.starts, strict=True))
            return tuple([first.get(start.slot, 0) for start in plan.started])
        draft_kv = self._speculation.draft_kv
        return () if draft_kv is None else tuple([draft_kv.num_held(start.slot) for start in plan.started])

    def _allowed(self, plan: DraftPlan, proposals: Proposals) -> Proposals:
        """Return the proposals without tokens that the structure of an answer forbids."""
        if self._matchers is None or not self._matchers.slots:
            return proposals
        return without_forbidden(plan, proposals, self._matchers)

    def _append_blocks(self, plan: DraftPlan) -> None:
        for request in plan.requests:
            if request.new_blocks:
                self._table.append(request.slot, request.new_blocks)

    def _apply(self, plan: StepPlan) -> None:
        """Saves, releases, adapters, starts and new blocks of the plan, in this order."""
        for each in plan.saves:
            self._runner.save_state(each.slot, each.snapshot, each.num_tokens)
        self._release(plan.released)
        for slot, digest in plan.adapters:
            assert self.adapters is not None, "adapters are placed where requests have some"
            self.adapters.place(slot, digest)
        for start in plan.started:
            self._table.clear(start.slot)
            self._table.set_adapter(start.slot, start.adapter)
            if start.snapshot is not None:
                self._runner.restore_state(start.slot, start.snapshot)
            self._sampler.start(start)
            self._drafter.start(start)
            self._prompt_logprobs.start(start)
            self._pooler.start(start)
        for slot, new_blocks in plan.rows.new_blocks.items():
            self._table.append(slot, new_blocks)

    def _commit(self, slots: list[int], tokens: StepTokens) -> None:
        """Sampler and drafter take in the new tokens of every sequence."""
        counts, token_ids = tokens.counts, tokens.token_ids
        if token_ids:
            self._sampler.accept(repeated(slots, counts), token_ids)
        if 0 in counts:
            slots, counts = list(compress(slots, counts)), list(compress(counts, counts))
        self._drafter.commit(slots, counts, token_ids)

    def _release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._sampler.release(slot)
            self._prompt_logprobs.release(slot)
            self._pooler.release(slot)
            self._drafter.release(slot)


def _follower(runner: Runner, speculation: SpeculativeExecution) -> DraftModel | None:
    """The drafter, if its drafts can be launched behind steps in flight: point masses, all of a draft model.

    What a step accepts must follow from its tokens alone, and the runner of the target must find it.
    """
    if (
        not isinstance(runner, GraphRunner)
        or not isinstance(speculation.drafter, DraftModel)
        or not needs_only_samples(speculation.verifier)
        or not isinstance(speculation.forward, PlainForward)
    ):
        return None
    return speculation.drafter if speculation.drafter.follows else None


def repeated(slots: Sequence[int], counts: Sequence[int]) -> Iterator[int]:
    """The slot of each token. counts: tokens of each slot."""
    return chain.from_iterable(map(repeat, slots, counts))
