"""Log probabilities of prompt tokens, for the sequences that ask for them, as their rows are computed.

Owns which sequences ask for them. Of a plan it reads the rows of a sequence only.
"""

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart, StepRows
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.logprobs import position_logprobs
from faser.types.answer import PositionLogprobs


class PromptLogprobs:
    """max_logit_rows: most rows whose logits are computed at once, which bounds memory."""

    def __init__(self, runner: Runner, *, max_logit_rows: int) -> None:
        self._runner = runner
        self.max_logit_rows = max_logit_rows
        self._asking: dict[int, SequenceStart] = {}

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        if start.sampling.prompt_logprobs is not None:
            self._asking[start.slot] = start

    def release(self, slot: int) -> None:
        self._asking.pop(slot, None)

    def of_step(self, rows: StepRows, last_rows: NDArray[np.int64]) -> dict[int, tuple[PositionLogprobs, ...]]:
        """Return, by position, the log probabilities of the prompt tokens that the last forward predicts.

        Only for sequences that ask for them. last_rows: [S] index of each sequence's last row in the forward.
        """
        asking = self._asking
        if not asking:
            return {}
        columns = enumerate(zip(rows.slots, rows.starts, rows.counts, last_rows.tolist(), strict=True))
        found = {
            at: self._of(start, count, last_row, asking[slot])
            for at, (slot, start, count, last_row) in columns
            if slot in asking
        }
        return {at: scores for at, scores in found.items() if scores}

    def _of(self, first: int, count: int, last_row: int, asked: SequenceStart) -> tuple[PositionLogprobs, ...]:
        """Return the log probabilities of count rows from position first on."""
        num_top = asked.sampling.prompt_logprobs
        assert num_top is not None
        targets = asked.token_ids[first + 1 : min(first + count + 1, asked.prompt_len)]
        first_row = last_row + 1 - count
        scored: list[PositionLogprobs] = []
        for at in range(0, len(targets), self.max_logit_rows):
            part = list(targets[at : at + self.max_logit_rows])
            logits = self._runner.logits(range(first_row + at, first_row + at + len(part)))
            scored += position_logprobs(logits, part, [num_top] * len(part))
        return tuple(scored)
