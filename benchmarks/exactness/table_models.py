"""Answers of many sequences, by the engine's drafters, verifiers, sampler and noise over small tables.

A batch of sequences goes through steps as in the engine: draft, cut, verify, accept; a sequence that is long
enough leaves. Owns the course of a step and the draft model that is a table. What is drafted and how long is a
Scenario's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.exactness.distributions import Ints, Tables
from faser.engine.contract.drafts import DraftTable, empty_table
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot
from faser.engine.execution.drafting.loop import DraftInput, ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import DraftSampler
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.rows import DraftLayout, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import Verifier
from faser.types.sampling import SamplingParams

NUM_SLOTS = 2048

Lengths = Callable[[NDArray[np.int64], int], Ints]  # slots [S], step -> γ [S]
CAP = 8  # the longest draft
Cut = Callable[[Proposals], Proposals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scenario in which sequences over tables are answered.

    lengths: γ to ask for. cut: what becomes of drafts before they are verified; None: nothing. stop: of drafting.
    """

    tables: Tables
    sampling: SamplingParams
    make_sampler: Callable[[Tables], Sampler]
    make_drafter: Callable[[Tables], Drafter]
    make_verifier: Callable[[Sampler], Verifier]
    lengths: Lengths
    cut: Cut | None = None
    stop: StopRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """answers: [N, length]. Counts of drafted tokens, over all of them."""

    answers: Ints
    verified: int
    accepted: int


class TableRunner:
    """A Runner whose model is a table: the logits after a token are its row. [V, V] float32."""

    def __init__(self, logits: Tensor) -> None:
        self._table = logits
        self._fed: Tensor | None = None

    def forward(self, batch: RowBatch) -> None:
        self._fed = batch.token_ids

    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        assert self._fed is not None, "logits before forward"
        return self._table[self._fed[torch.as_tensor(rows)]]


class TableModel:
    """A Drafter: the tables' draft model in the engine's drafting loop."""

    drafts_overlapped = False

    def __init__(self, tables: Tables, make_sampler: Callable[[SamplingState], DraftSampler]) -> None:
        table = BlockTable(NUM_SLOTS, 1)
        runner = cast(Runner, TableRunner(tables.draft_logits))
        self._sampling = SamplingState(NUM_SLOTS)
        passes = ModelPasses(runner, table, max_rows=4 * NUM_SLOTS)
        self._loop = PassLoop(passes, make_sampler(self._sampling))
        self._num_known = [0] * NUM_SLOTS
        self._last = [0] * NUM_SLOTS

    def start(self, start: SequenceStart) -> None:
        self._num_known[start.slot], self._last[start.slot] = len(start.token_ids), start.token_ids[-1]
        self._sampling.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        inputs = [
            DraftInput(
                slot=wish.slot,
                start=self._num_known[wish.slot] - 1,
                token_ids=(self._last[wish.slot],),
                max_tokens=wish.max_tokens,
            )
            for wish in plan.requests
        ]
        found = self._loop.draft(inputs, plan.stop, until)
        table = found.table(plan, "draft_model", range(len(inputs)))
        return Proposals(table=table, passes=found.passes, probs=found.probs)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._num_known[slot] += len(tokens)
            self._last[slot] = tokens[-1]

    def release(self, slot: int) -> None:
        pass


def play(scenario: Scenario, num_samples: int, seed: int) -> Played:
    """So many answers. seed: of the requests' seeds, which all differ."""
    seeds = np.random.default_rng(seed).integers(0, 2**63, num_samples, dtype=np.int64)
    assert len(np.unique(seeds)) == num_samples, "two requests have one seed"
    parts = [
        _Batch(scenario, seeds[at : at + NUM_SLOTS].tolist()).play() for at in range(0, num_samples, NUM_SLOTS)
    ]
    return Played(
        answers=np.concatenate([part.answers for part in parts]),
        verified=sum(part.verified for part in parts),
        accepted=sum(part.accepted for part in parts),
    )


class _Batch:
    """Sequences that start together, one a slot."""

    def __init__(self, scenario: Scenario, seeds: Sequence[int]) -> None:
        tables = scenario.tables
        self._scenario = scenario
        self._sampler = scenario.make_sampler(tables)
        self._verifier = scenario.make_verifier(self._sampler)
        self._drafter = scenario.make_drafter(tables)
        self._tokens = [list(tables.prompt) for _ in seeds]
        self._full = len(tables.prompt) + tables.length
        self._verified = self._accepted = 0
        for slot, seed in enumerate(seeds):
            start = SequenceStart(
                slot=slot,
                sampling=scenario.sampling,
                seed=seed,
                prompt_len=len(tables.prompt),
                token_ids=tables.prompt,
            )
            self._sampler.start(start)
            self._drafter.start(start)

    def play(self) -> Played:
        step, going = 0, list(range(len(self._tokens)))
        while going:
            proposals = self._propose(going, step)
            results = self._verify(going, proposals)
            self._commit(going, results)
            self._verified += int(proposals.table.lengths.sum())
            going = self._leave(going)
            step += 1
        begin = len(self._scenario.tables.prompt)
        answers = np.array([tokens[begin : self._full] for tokens in self._tokens])
        return Played(answers=answers, verified=self._verified, accepted=self._accepted)

    def _propose(self, going: list[int], step: int) -> Proposals:
        """A draft for each of going, some of them empty."""
        lengths = self._scenario.lengths(np.array(going), step).tolist()
        asked = {slot: length for slot, length in zip(going, lengths, strict=True) if length}
        requests = tuple(
            DraftRequest(slot=slot, max_tokens=length, new_blocks=()) for slot, length in asked.items()
        )
        found = Proposals(table=empty_table((), "draft_model", CAP))
        if requests:
            found = self._drafter.propose(
                DraftPlan(step=step, width=CAP, requests=requests, stop=self._scenario.stop)
            )
        if self._scenario.cut is not None:
            found = self._scenario.cut(found)
        table = empty_table(going, "draft_model", CAP)
        at = np.searchsorted(table.slots, found.table.slots)
        for column, drafted in zip(table, found.table, strict=True):
            column[at] = drafted
        return Proposals(table=table, probs=found.probs)

    def _verify(self, going: list[int], proposals: Proposals) -> StepTokens:
        table = proposals.table
        positions = np.array([len(self._tokens[slot]) for slot in going])
        drafted = table.token_ids[np.arange(table.width) < table.lengths[:, None]]
        layout = DraftLayout.of(table.slots, positions, table.lengths, drafted)
        return self._verifier.verify(self._logits(table), layout, proposals.probs)

    def _logits(self, table: DraftTable) -> Tensor:
        """Return the logits [R, V] of the rows of all sequences."""
        vocab, deepest = self._scenario.tables.vocab, int(table.lengths.max())
        last_two = np.array([self._tokens[slot][-2:] for slot in table.slots.tolist()])
        before = np.concatenate((last_two, table.token_ids[:, :deepest]), axis=1)
        rows = (before[:, :-1] * vocab + before[:, 1:])[np.arange(deepest + 1) <= table.lengths[:, None]]
        return self._scenario.tables.target_logits[rows]

    def _commit(self, going: list[int], found: StepTokens) -> None:
        assert not found.errors, found.errors
        self._sampler.accept(np.repeat(going, found.counts).tolist(), found.token_ids)
        for slot, tokens in by_slot(going, found.counts, found.token_ids):
            self._tokens[slot] += tokens
            self._accepted += len(tokens) - 1
        self._drafter.commit(going, found.counts, found.token_ids)

    def _leave(self, going: list[int]) -> list[int]:
        """Release the sequences that are full; return those that go on."""
        for slot in (slot for slot in going if len(self._tokens[slot]) >= self._full):
            self._sampler.release(slot)
            self._drafter.release(slot)
        return [slot for slot in going if len(self._tokens[slot]) < self._full]
