"""The Policy seam: how many tokens each sequence drafts in a step, and how many of them are verified.

Control plane: arrays of numbers, no torch. The same policies decide live and in the simulator. A policy is asked
before drafting, and once the drafts' own confidences are known; where drafts come from text and from a model, also
in between. It reads the results of its decisions from Acceptance and CostModel, which it never writes.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.types.arrays import Floats, Ints


class DraftingSequences(NamedTuple):
    """Facts about S sequences that could draft, in order of priority; [S] each.

    slots: of the engine.
    lacking: tokens that the sequence is behind its target per token; below 0: ahead of it; -inf: it has none.
    wanted_per_s: tokens that this target asks for in a second; 0: it has none.
    missing_kv: known tokens that the draft KV cache lacks.
    remaining: tokens that the sequence is expected to generate yet, which have to pay for its missing KV.
    """

    slots: Ints
    lacking: Floats
    wanted_per_s: Floats
    missing_kv: Ints
    remaining: Ints

    def take(self, at: Ints) -> "DraftingSequences":
        return DraftingSequences._make([column[at] for column in self])

    def later(self, seconds: float) -> "DraftingSequences":
        """The same, when further `seconds` have passed without a token."""
        if not np.count_nonzero(self.wanted_per_s):
            return self
        return self._replace(lacking=self.lacking + seconds * self.wanted_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about a step before it has drafts.

    other_rows: rows except one per candidate and the drafts: prompts, and sequences that cannot draft.
    other_sequences: how many of those rows bring a sequence its next token.
    kv_tokens: tokens in the cache, of kv_sequences sequences: the candidates were chosen among them.
    since: steps since the policy was last asked.
    """

    other_rows: int
    kv_tokens: int
    kv_sequences: int
    other_sequences: int = 0
    since: int = 1

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a sequence."""
        return self.kv_tokens / max(self.kv_sequences, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """The rows of a step in addition to those of the sequences that may draft.

    rows: how many there are. sequences: how many of them bring a sequence its next token. drafts: most draft
    tokens of the step.
    """

    rows: int
    sequences: int
    drafts: int = 1 << 30

    @property
    def has_prompts(self) -> bool:
        return self.rows > self.sequences

    def leave(self, budget: int, count: int) -> int:
        """Return how many draft rows a step of `budget` rows has for each of count sequences.

        Prompts keep what they need, or half of the spare rows.
        """
        spare = budget - count - self.sequences
        spare -= min(self.rows - self.sequences, spare // 2)
        return max(min(spare, self.drafts), 0) // count


@dataclass(slots=True)
class Candidates:
    """The S sequences that could draft in a step. K is the engine's cap on γ. Read only.

    limit: [S] most tokens that each may draft, 0 … K: by its own cap, its end and the rows of the step.
    survival: [S, K + 1]; survival[s, k] is the expected probability that s gets a draft of k tokens or more and
        that the first k are all accepted; column 0 is 1; rows never increase.
    """

    sequences: DraftingSequences
    limit: Ints
    survival: Floats
    step: StepFacts

    @classmethod
    def alike(
        cls, slots: Ints, limit: Ints, survival: Floats, *, other_rows: int = 0, kv_tokens: int = 0
    ) -> "Candidates":
        """Sequences without targets whose draft KV cache lacks nothing."""
        nothing = np.zeros_like(slots)
        sequences = DraftingSequences(slots, *without_targets(len(slots)), nothing, nothing)
        step = StepFacts(other_rows=other_rows, kv_tokens=kv_tokens, kv_sequences=len(slots))
        return cls(sequences, limit, survival, step)

    @property
    def slots(self) -> Ints:
        return self.sequences.slots

    @property
    def num_sequences(self) -> int:
        return len(self.limit)

    def take(self, at: Ints) -> "Candidates":
        """Those at these positions; the others' pending tokens become other rows."""
        others = len(self.limit) - len(at)
        step = replace(
            self.step,
            other_rows=self.step.other_rows + others,
            other_sequences=self.step.other_sequences + others,
        )
        return Candidates(self.sequences.take(at), self.limit[at], self.survival[at], step)

    def drafted(self, lengths: Ints, survival: Floats, *, after_s: float = 0.0) -> "Candidates":
        """The same sequences with their drafts: lengths: [S] tokens each, survival: [S, K + 1] of these tokens.

        after_s: seconds that drafting took.
        """
        return Candidates(self.sequences.later(after_s), lengths, survival, self.step)


def without_targets(count: int) -> tuple[Floats, Floats]:
    """lacking and wanted_per_s of sequences that have no targets."""
    return np.full(count, -np.inf), np.zeros(count)


class Policy(Protocol):
    """Decides draft lengths; owns at most its own hysteresis. A subclass must define name and lengths.

    never_drafts: it never wants a draft, so it need not be asked. looks_first: every sequence is given a draft,
    and only those that may be worth a row by row_price go on to `keep`. is_guarded: it decides by what drafts
    should gain, so the guard may leave them out where they gain nothing; else it is told how much to draft.
    """

    never_drafts: bool = False
    is_guarded: bool = False
    looks_first: bool = False

    @property
    def name(self) -> str: ...

    def lengths(self, candidates: Candidates) -> Ints:
        """γ to draft, [S], 0 … limit. All zeros: no sequence drafts, and the step has no drafts."""
        ...

    def model_lengths(self, candidates: Candidates, by_text: Candidates) -> Ints:
        """γ to draft with the model where drafts from text are there already, [S]; 0: the draft from text stays.

        candidates.limit: most tokens that the model may draft. by_text: the same sequences with their drafts from
        text. The default takes the draft with the most expected tokens.
        """
        within = np.arange(candidates.survival.shape[1] - 1) < candidates.limit[:, None]
        by_model = (candidates.survival[:, 1:] * within).sum(axis=1)
        return np.where(by_model > by_text.survival[:, 1:].sum(axis=1), candidates.limit, 0)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        """When a drafter that needs a pass per token stops short of lengths; None: never."""
        return None

    def row_price(self, candidates: Candidates) -> float:  # noqa: ARG002
        """Return the least survival with which a drafted token can be worth its row, alone or with others."""
        return 0.0

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        """γ to verify, [S], 0 … lengths. candidates.survival is that of the drafted tokens.

        Called for drafts without random choices only: to cut sampled drafts here would bias the output.
        """
        return lengths
