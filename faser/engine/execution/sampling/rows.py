"""The rows of a step that sample, from processed logits to tokens, probabilities and results.

A sequence with γ draft tokens has γ + 1 rows; a plain step is γ = 0. The row before a draft token verifies it, and
the row after the last accepted one yields the bonus token, or the recovered token after a rejection.

    sequence          |      s = 0      | s = 1 |    s = 2     |
    row r             |  0    1    2    |   3   |   4     5    |
    drafted           |  x_1  x_2  none | none  |  x_1  none   |   the last row of a sequence verifies no token
    accepted          |  yes  no   no   | no    |  yes  no     |
    last row reached  |       1         |   3   |         5    |   the bonus or recovered token is sampled there

Knows no rule of acceptance.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import PROB_ONE
from faser.engine.execution.sampling.edits import LogitsEdit, to_device
from faser.engine.execution.sampling.kernels import race
from faser.engine.execution.sampling.logprobs import numbers_of, parts, position_logprobs, reports_of
from faser.engine.execution.sampling.parameters import Purpose, SamplingState, noise_words, uniforms
from faser.engine.execution.sampling.tokens import sample_on_host
from faser.kernels.interface.graph_capture import Readback
from faser.kernels.interface.sampling import SamplingKernels
from faser.types.answer import PositionLogprobs, SequenceError
from faser.types.arrays import NO_TOKEN, Bools, Ints


@dataclass(slots=True, kw_only=True)
class StepTokens:
    """Tokens of S sequences from a step, as columns. Read only, and not frozen: every step makes one.

    counts: [S] tokens of each: the accepted draft tokens, then the bonus or recovered token; 0: none.
    token_ids: sequence after sequence.
    errors: by position, why the last row that was reached has no token; then the sequence gets the accepted draft
        tokens before that row, and ends.
    logprobs: by position, one per token where the request asks for them.
    """

    counts: list[int]
    token_ids: list[int]
    errors: dict[int, SequenceError] = field(default_factory=dict)
    logprobs: dict[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)

    @classmethod
    def none(cls, num_sequences: int) -> "StepTokens":
        return cls(counts=[0] * num_sequences, token_ids=[])

    def among(self, at: Sequence[int], num_sequences: int) -> "StepTokens":
        """The same, where the sequences are at these positions of more of them."""
        if len(at) == num_sequences:
            return self
        counts = [0] * num_sequences
        for position, count in zip(at, self.counts, strict=True):
            counts[position] = count
        return StepTokens(
            counts=counts,
            token_ids=self.token_ids,
            errors={at[i]: error for i, error in self.errors.items()},
            logprobs={at[i]: scores for i, scores in self.logprobs.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayout:
    """S sequences, R rows, T = R - S draft tokens.

    slots: [R] the slot of the row's sequence.
    positions: [R] of the tokens that the rows sample.
    first: [S] first row of each sequence.
    num_drafts: [S] γ.
    drafted: [R] draft token that each row verifies, NO_TOKEN in the last row of a sequence.
    sequence: [R] index of the row's sequence.
    depth: [R] how many draft tokens come before each row.
    """

    slots: Ints
    positions: Ints
    first: Ints
    num_drafts: Ints
    drafted: Ints
    sequence: Ints
    depth: Ints

    @classmethod
    def plain(cls, slots: Ints, positions: Ints) -> "DraftLayout":
        """One row for each of these slots."""
        rows, zeros = np.arange(len(slots)), np.zeros(len(slots), dtype=np.int64)
        return cls(
            slots=slots,
            positions=positions,
            first=rows,
            num_drafts=zeros,
            drafted=zeros + NO_TOKEN,
            sequence=rows,
            depth=zeros,
        )

    @classmethod
    def of(cls, slots: Ints, positions: Ints, num_drafts: Ints, token_ids: Ints) -> "DraftLayout":
        """The rows of these sequences, one after the other.

        positions: [S] of the tokens that their first rows sample. num_drafts: [S] γ. token_ids: [T] draft tokens.
        """
        if not len(token_ids):
            return cls.plain(slots, positions)
        counts = num_drafts + 1
        first = counts.cumsum() - counts
        sequence = np.arange(len(slots)).repeat(counts)
        depth = np.arange(len(sequence)) - first[sequence]
        drafted = np.empty(len(sequence), dtype=np.int64)
        drafted.fill(NO_TOKEN)
        drafted[depth < num_drafts[sequence]] = token_ids
        return cls(
            slots=slots[sequence],
            positions=positions[sequence] + depth,
            first=first,
            num_drafts=num_drafts,
            drafted=drafted,
            sequence=sequence,
            depth=depth,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def verifying(self) -> Ints:
        """Return the rows [T] that verify a draft token, in the order of the drafts."""
        return np.flatnonzero(self.drafted != NO_TOKEN)

    def last_reached(self, accepted: Bools) -> Ints:
        """Return each sequence's first row [S] whose draft token is not accepted. accepted: [R]."""
        rejected = np.flatnonzero(~accepted | (self.drafted == NO_TOKEN))
        return rejected[np.searchsorted(rejected, self.first)]


class LogitRows:
    """The rows of one step. `tokens`, `tokens_of` and `probabilities` overwrite logits: ask one of them for a row.

    layout: which row is whose. slots, positions: as there.
    logits: [R, V] float32 after the logits processors, which work in place. A row without a finite maximum keeps
        that mark: no mask can hide it.
    """

    def __init__(
        self,
        layout: DraftLayout,
        logits: Tensor,
        state: SamplingState,
        kernels: SamplingKernels,
    ) -> None:
        self.layout = layout
        self.slots = layout.slots
        self.positions = layout.positions
        self.logits = logits
        self._state = state
        self._kernels = kernels
        self._found: Ints | None = None  # [R] tokens; NO_TOKEN where a row has none
        self.without_token: dict[int, SequenceError | None] = {}  # by slot, as processors say
        self._was_sound: Tensor | None = None  # [R] whether edited rows had a finite maximum before
        asking = state.num_top
        self._scored = [row for row, slot in enumerate(self.slots.tolist()) if slot in asking] if asking else []
        self._raw = self._copied(logits, self._scored) if self._scored else None  # as the model gave them
        self._numbers: Readback | None = None  # of the reports of these rows, where they are on their way already

    @property
    def drafts(self) -> list[tuple[int, ...]]:
        """Per row, the draft tokens before it."""
        drafted = self.layout.drafted.tolist()
        return [tuple(drafted[row - depth : row]) for row, depth in enumerate(self.layout.depth.tolist())]

    @property
    def is_random(self) -> Bools:
        """Return whether each row's token is drawn at random: [R]."""
        return self._state.is_random(self.slots)

    def edit(self, edits: Sequence[LogitsEdit]) -> None:
        """Apply the edits in order; waits for no device.

        Which rows are no numbers stays on the device until a result has to say why a row has no token.
        """
        if not edits:
            return
        self._was_sound = self.logits.amax(-1).isfinite()  # a NaN is the largest of its row
        for edit in edits:
            edit(self.logits)
        self.logits[:, 0] = torch.where(self._was_sound, self.logits[:, 0], torch.nan)

    def tokens(self) -> Ints:
        """Return each row's token [R], NO_TOKEN where it has none. Waits for the device once."""
        if self._state.any_random(self.slots):
            metadata = self._state.metadata(self.slots, self.positions)
            self._found = sample_on_host(self._kernels, self.logits, metadata)
        else:
            self._found = self._kernels.best(self.logits)
        return self._found

    def best(self) -> Ints:
        """Return each row's most likely token [R], NO_TOKEN where it has none."""
        if self._found is None:
            self._found = self._kernels.best(self.logits)
        return self._found

    def tokens_of(self, rows: Ints) -> Ints:
        """A token for each of these rows, ascending and distinct; NO_TOKEN where it has none."""
        best = self.best()
        token_ids: Ints = best[rows]
        at = np.flatnonzero(self._state.is_random(self.slots[rows]) & (token_ids != NO_TOKEN))
        if len(at):
            drawn = rows[at]
            metadata = self._state.metadata(self.slots[drawn], self.positions[drawn])
            words = noise_words(metadata.seeds, metadata.positions, Purpose.TOKEN, generate=self._kernels.philox)
            token_ids[at] = self._kernels.draw(self.logits, drawn, best[drawn], metadata, words)
        return token_ids

    def probabilities(self) -> Tensor:
        """Return whole numbers [R, V] float32, in place of the logits, from which each row's token is drawn.

        They are proportional to the probabilities. A greedy row has a single nonzero one, a row without a token
        none.
        """
        best, logits = self.best(), self.logits
        random = self.is_random & (best != NO_TOKEN)
        fixed, drawn = np.flatnonzero(~random), np.flatnonzero(random)
        if len(fixed):
            at, token_ids = to_device(fixed, logits.device), best[fixed]
            masses = np.where(token_ids == NO_TOKEN, 0.0, PROB_ONE).astype(np.float32)
            logits[at] = 0.0
            logits[at, to_device(np.maximum(token_ids, 0), logits.device)] = to_device(masses, logits.device)
        if len(drawn):
            metadata = self._state.metadata(self.slots[drawn], self.positions[drawn])
            self._kernels.fixed_point_probs(logits, drawn, best[drawn], metadata)
        return logits

    def arrivals(self, rows: Ints, purpose: Purpose, draft_starts: Ints | None = None) -> Tensor:
        """Random numbers by which a token of these rows is drawn from probabilities, [N, ...]; see `draw`."""
        seeds, positions = self._state.seed[self.slots[rows]], self.positions[rows]
        words = noise_words(seeds, positions, purpose, draft_starts, self._kernels.philox)
        return race(words, self.logits.shape[-1], self.logits.device)

    def accept_noise(self) -> Tensor:
        """Return the random numbers [R] that accept or reject the rows' draft tokens, float64 in [0, 1)."""
        seeds, starts = self._state.seed[self.slots], self.positions[self.layout.first][self.layout.sequence]
        words = noise_words(seeds, self.positions, Purpose.ACCEPT, starts, self._kernels.philox)
        return to_device(uniforms(words), self.logits.device)

    def score(self, tokens: Tensor, read_back: Callable[[Tensor], Readback]) -> None:
        """Start the reports of tokens [R] that are being sampled on the device, so that nothing later delays them.

        Where a row turns out to have no token, its report means nothing.
        """
        if self._raw is not None:
            chosen = self._copied(tokens, self._scored).clamp_min(0)
            width = max(self._num_top(self._scored))
            numbers = [numbers_of(self._raw[part], chosen[part], width) for part in parts(self._raw)]
            self._numbers = read_back(torch.cat(numbers))

    def given(self, token_ids: Ints) -> StepTokens:
        """Return the results for tokens [S] that were sampled from these logits elsewhere, one a sequence."""
        self._found = token_ids
        return self.results(self.layout.first, token_ids)

    def results(self, last: Ints, final_ids: Ints) -> StepTokens:
        """last: [S] the last row that each sequence reaches. final_ids: [S] the token sampled there."""
        layout = self.layout
        token_ids = layout.drafted.copy()
        token_ids[last] = final_ids
        by_row = self._errors(last)
        failed = {at: by_row[row] for at, row in enumerate(last.tolist()) if row in by_row} if by_row else {}
        counts = last - layout.first + 1
        if failed:
            counts[list(failed)] -= 1
        errors = {at: error for at, error in failed.items() if error is not None}
        reports = {} if self._raw is None else self._reports(self._raw, last, by_row, token_ids)
        return StepTokens(
            counts=counts.tolist(),
            token_ids=token_ids[layout.depth < counts[layout.sequence]].tolist(),
            errors=errors,
            logprobs={
                at: tuple([reports[row] for row in range(first, first + count)])
                for at, (first, count) in enumerate(zip(layout.first.tolist(), counts.tolist(), strict=True))
                if count and first in reports
            }
            if reports
            else {},
        )

    @property
    def lacking(self) -> Bools:
        """Return whether each row has no token: [R]."""
        lacking: Bools = self.best() == NO_TOKEN
        return lacking

    def _errors(self, last: Ints) -> dict[int, SequenceError | None]:
        """Return by row the errors where a sequence ends without a token; None: it goes on in a later step.

        Waits for the device only for these.
        """
        without = last[self.lacking[last]].tolist()
        if not without:
            return {}
        found = {row: self.without_token.get(int(self.slots[row]), SequenceError.NONE_ALLOWED) for row in without}
        if any(each is not None for each in found.values()):
            sound = None if self._was_sound is None else self._was_sound.tolist()
            for row, error in found.items():
                if error is not None and (sound is None or not sound[row]):
                    found[row] = SequenceError.NOT_FINITE
        return found

    def _reports(
        self, raw: Tensor, last: Ints, errors: Container[int], token_ids: Ints
    ) -> dict[int, PositionLogprobs]:
        """Return by row the log probabilities of the rows that are reached and report them. raw: all of these."""
        reaching = last[self.layout.sequence].tolist()
        at = [i for i, row in enumerate(self._scored) if row <= reaching[row] and row not in errors]
        if not at:
            return {}
        rows = [self._scored[i] for i in at]
        raw = raw if len(at) == len(raw) else self._copied(raw, at)
        if self._numbers is None:
            found = position_logprobs(raw, token_ids[rows].tolist(), self._num_top(rows))
        else:
            found = reports_of(self._numbers.wait()[0][at], raw, token_ids[rows], self._num_top(rows))
        return dict(zip(rows, found, strict=True))

    def _num_top(self, rows: Sequence[int]) -> list[int]:
        """Return how many alternatives these rows report."""
        return [self._state.num_top[int(self.slots[row])] for row in rows]

    def _copied(self, values: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == len(values):
            return values.clone()
        return values.index_select(0, to_device(np.array(rows, dtype=np.int64), values.device))
