"""The executor seam, and the real one: a StepPlan goes in, the model runs, a StepResult comes out.

Owns what the data plane must remember between steps: the block table, the sampling state, and the prompts
whose log probabilities were asked for. Decides nothing.
"""

import time
from typing import Protocol

from faser.engine.batch import BlockTable, RowBatch
from faser.engine.plan import SequenceResult, SequenceRows, SequenceStart, StepPlan, StepResult
from faser.engine.runner import Runner
from faser.engine.sampler import SampledRow, Sampler
from faser.types import PositionLogprobs


class Executor(Protocol):
    """Runs plans, one at a time, in the order of their step numbers."""

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's releases and starts, run its rows; results come in the order of plan.rows."""
        ...


class ModelExecutor:
    """The executor over a real model.

    max_logit_rows: prompt log probabilities are taken in groups of this many rows, which bounds memory.
    """

    def __init__(self, runner: Runner, sampler: Sampler, table: BlockTable, *, max_logit_rows: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._table = table
        self._max_logit_rows = max_logit_rows
        self._scored: dict[int, SequenceStart] = {}  # slots whose prompt log probabilities are wanted

    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._apply(plan)
        batch = self._table.gather(plan.rows)
        self._runner.forward(batch)
        sampled = self._sample(plan.rows, batch)
        results = tuple(
            self._result(rows, sampled.get(rows.slot), int(batch.last_rows[i])) for i, rows in enumerate(plan.rows)
        )
        return StepResult(step=plan.step, sequences=results, run_s=time.perf_counter() - began)

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._sampler.release(slot)
            self._scored.pop(slot, None)
        for start in plan.started:
            self._table.clear(start.slot)
            self._sampler.start(start)
            if start.sampling.prompt_logprobs is not None:
                self._scored[start.slot] = start
        for rows in plan.rows:
            if rows.new_blocks:
                self._table.append(rows.slot, rows.new_blocks)

    def _sample(self, plan_rows: tuple[SequenceRows, ...], batch: RowBatch) -> dict[int, SampledRow]:
        """Choose the next token of every sequence whose rows reach the end of its known tokens."""
        chosen = [(i, rows) for i, rows in enumerate(plan_rows) if rows.samples]
        if not chosen:
            return {}
        slots = [rows.slot for _, rows in chosen]
        positions = [rows.start + len(rows.token_ids) for _, rows in chosen]
        logits = self._runner.logits(batch.last_rows[[i for i, _ in chosen]])
        sampled = self._sampler.sample(logits, slots, positions)
        sound = [(slot, row.token_id) for slot, row in zip(slots, sampled, strict=True) if row.error is None]
        self._sampler.accept([slot for slot, _ in sound], [token_id for _, token_id in sound])
        return dict(zip(slots, sampled, strict=True))

    def _result(self, rows: SequenceRows, sampled: SampledRow | None, last_row: int) -> SequenceResult:
        scored = self._scored.get(rows.slot)
        prompt = None if scored is None else self._score_prompt(rows, scored, last_row)
        if sampled is None:
            return SequenceResult(slot=rows.slot, prompt_logprobs=prompt)
        if sampled.error is not None:
            return SequenceResult(slot=rows.slot, prompt_logprobs=prompt, error=sampled.error)
        return SequenceResult(
            slot=rows.slot,
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            prompt_logprobs=prompt,
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
