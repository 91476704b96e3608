"""Log probabilities of prompt tokens, for the sequences that ask for them, as their rows are computed.

Owns which sequences ask for them. Of a plan it reads the rows of a sequence only.
"""

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceRows, SequenceStart
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.logprobs import position_logprobs
from faser.types import PositionLogprobs


class PromptLogprobs:
    """max_logit_rows: most rows whose logits are computed at once, which bounds memory."""

    def __init__(self, runner: Runner, *, max_logit_rows: int) -> None:
        self._runner = runner
        self._max_logit_rows = max_logit_rows
        self._asking: dict[int, SequenceStart] = {}

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        if start.sampling.prompt_logprobs is not None:
            self._asking[start.slot] = start

    def release(self, slot: int) -> None:
        self._asking.pop(slot, None)

    def of_step(
        self, rows: tuple[SequenceRows, ...], last_rows: NDArray[np.int64]
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        """By position, of the prompt tokens that rows of the last forward predict, from position start + 1 on.

        Only for sequences that ask for them. last_rows: [S] index of each sequence's last row in the forward.
        """
        if not self._asking:
            return {}
        found = {
            at: self._of(each, last_row, self._asking[each.slot])
            for at, (each, last_row) in enumerate(zip(rows, last_rows.tolist(), strict=True))
            if each.slot in self._asking
        }
        return {at: scores for at, scores in found.items() if scores}

    def _of(self, rows: SequenceRows, last_row: int, start: SequenceStart) -> tuple[PositionLogprobs, ...]:
        num_top = start.sampling.prompt_logprobs
        assert num_top is not None
        targets = start.token_ids[rows.start + 1 : min(rows.start + len(rows.token_ids) + 1, start.prompt_len)]
        first_row = last_row + 1 - len(rows.token_ids)
        scored: list[PositionLogprobs] = []
        for at in range(0, len(targets), self._max_logit_rows):
            part = list(targets[at : at + self._max_logit_rows])
            logits = self._runner.logits(range(first_row + at, first_row + at + len(part)))
            scored += position_logprobs(logits, part, [num_top] * len(part))
        return tuple(scored)
