"""Drafts that are launched before the host has read what the step before them has accepted.

    device   | verify k | match | pass 1 | pass 2 | ...     | verify k + 1 | match | pass 1 | ...
    host     launch verify k + 1, and drafts behind it | read k, commit it, plan k + 1 | launch verify k + 1 ...

The device finds what the step has accepted (StepMatch), and the passes begin behind it, so nothing waits between a
verification and the drafts after it. The host reads the tokens of a draft with those of the step that verifies
them; until then it knows how many there are. Where a rule may end drafts early, the host reads pass after pass,
one behind, once it has committed the step; then all but the last tokens are known.

A first pass has the last two tokens of every sequence: the cache lacks the last one, and if the whole of the last
draft was accepted, the one before it as well. Where it was there, it is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from faser.engine.contract.plan import DraftPlan, StopRule
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput, DraftProgress
from faser.engine.execution.drafting.samplers import PointMassSampler, drafted_by_runner
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.passes_ahead import FollowedDrafts
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.kernels.interface.drafting import StepMatch
from faser.types.arrays import Ints

_PASSES_TO_STOP = 2  # that are launched where a rule may end drafts: one runs while the host reads the other


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStep:
    """A step in flight that drafts follow.

    match: what it brings. numbers: of its sequences, by slot. known: [S] tokens before it. most: [S] tokens that
    it may bring. fed: where the target is fed from.
    """

    match: StepMatch
    numbers: dict[int, int]
    known: Ints
    most: Ints
    fed: torch.Tensor


class DraftsAhead:
    """Drafts in flight. slots: of their sequences; one that ends leaves `live`. plan: that asked for them."""

    def __init__(self, runner: GraphRunner, fed: torch.Tensor, plan: DraftPlan, first: PendingTokens) -> None:
        self.plan = plan
        self.slots = [request.slot for request in plan.requests]
        self.live = set(self.slots)
        self._runner = runner
        self._fed = fed
        self._passes = [first]
        self._num_read = 0
        self._progress = DraftProgress(
            [DraftInput(slot=slot, start=0, token_ids=(0,), max_tokens=most) for slot, most, *_ in plan.requests]
        )
        self._active: Ints = np.arange(len(self.slots))
        self._depth = depth_of(plan)
        self._feed()
        self._launch(self._depth if plan.stop is None else min(self._depth, _PASSES_TO_STOP))

    def end(self) -> Ints:
        """Launch the passes that are left, as far as the rule allows; returns how long each draft is, [D].

        The tokens of the last pass are not read: their rows are verified whatever the rule would say.
        """
        if self.plan.stop is not None:
            while self._num_read < len(self._passes) - 1 and len(self._active):
                self._read(self.plan.stop)
                if len(self._active):
                    self._launch(min(len(self._passes) + 1, self._depth))
        left = np.zeros(len(self.slots), dtype=np.int64)
        left[self._active] = len(self._passes) - self._num_read
        lengths: Ints = np.minimum(self._progress.counts + left, self._progress.max_tokens)
        return lengths

    def sources(self, slots: Sequence[int], counts: Ints) -> Ints:
        """Return where the first tokens of drafts are in the room that the target is fed from, draft after draft.

        counts: how many of each of these slots.
        """
        column_of = {slot: at for at, slot in enumerate(self.slots)}
        columns = np.array([column_of[slot] for slot in slots], dtype=np.int64).repeat(counts)
        depths = np.arange(len(columns)) - (counts.cumsum() - counts).repeat(counts)
        return depths * len(self.slots) + columns

    def read(self) -> DraftBatch:
        """Wait for all tokens."""
        while self._num_read < len(self._passes):
            self._read(None)
        return self._progress.batch(len(self._passes))

    def _read(self, stop: StopRule | None) -> None:
        tokens = drafted_by_runner(self._passes[self._num_read].wait())
        self._num_read += 1
        self._active = self._progress.take(self._active, tokens.among(self._active), stop)

    def _launch(self, num_passes: int) -> None:
        """Launch passes until num_passes have been launched in all."""
        while len(self._passes) < num_passes:
            self._passes.append(self._runner.follow_on())
            self._progress.count_fed(_ALL)
            self._feed()

    def _feed(self) -> None:
        """Copy the tokens of the last pass to where the target is fed from."""
        count, at = len(self.slots), len(self._passes) - 1
        self._fed[at * count : (at + 1) * count].copy_(self._passes[-1].tokens)


_ALL = slice(None)


class AheadLoop:
    """Launches drafts behind steps. runner: of the draft model."""

    def __init__(self, runner: GraphRunner, table: BlockTable, sampler: PointMassSampler) -> None:
        self._runner = runner
        self._table = table
        self._sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: DraftPlan, step: FollowedStep) -> DraftsAhead | None:
        """None: there are no graphs for them, and nothing was launched."""
        slots, depth = [request.slot for request in plan.requests], depth_of(plan)
        sources = np.array([step.numbers[slot] for slot in slots], dtype=np.int64)
        known = step.known[sources]
        if depth * len(slots) > len(step.fed):
            return None
        drafts = FollowedDrafts(
            step=step.match,
            slots=slots,
            sources=sources,
            known=known,
            most=step.most[sources],
            depth=depth,
            requests=self._sampler.metadata(np.array(slots, dtype=np.int64), known),
        )
        first = self._runner.follow(drafts, self._table)
        return None if first is None else DraftsAhead(self._runner, step.fed, plan, first)


def depth_of(plan: DraftPlan) -> int:
    """The most passes that the drafts of a plan can take."""
    return max([request.max_tokens for request in plan.requests])
