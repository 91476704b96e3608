"""The Policy seam: how many tokens each sequence drafts in a step, and how many of them are verified.

Control plane: arrays of numbers, no torch. The same policies decide live and in the simulator. A policy is asked
before drafting, and once the drafts' own confidences are known; where drafts come from text and from a model, also
in between. It reads the results of its decisions from Acceptance and CostModel, which it never writes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import StopRule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The S sequences that could draft in this step, in order of priority. K is the engine's cap on γ.

    slots: [S]. limit: [S] most tokens that each may draft, 0 … K: by its own cap, its end and the rows of the
    step. survival: [S, K + 1]; survival[s, k] is the expected probability that s gets a draft of k tokens or more
    and that the first k are all accepted; column 0 is 1; rows never increase. weight: [S] what a token of the
    sequence is worth: 1 unless its latency target says otherwise. missing_kv: [S] known tokens that the draft KV
    cache lacks. remaining: [S] tokens that each sequence is expected to generate yet; None: more than enough to
    pay for its missing KV. other_rows: rows of the step except one per candidate and the drafts: prompts, and
    sequences that cannot draft. other_sequences: how many of those rows bring a sequence its next token.
    kv_tokens: tokens in the cache, of all candidates or of kv_sequences sequences where these are more: the
    candidates were chosen among them. launches_ahead: without drafts the step would be launched before the one in
    flight has ended, which hides the host's work. since: steps since the policy was last asked. Read only; not
    frozen, as several are made in every step and freezing costs more than the rest of it.
    """

    slots: Ints
    limit: Ints
    survival: Floats
    weight: Floats
    missing_kv: Ints
    other_rows: int
    kv_tokens: int
    other_sequences: int = 0
    kv_sequences: int | None = None
    launches_ahead: bool = False
    since: int = 1
    remaining: Ints | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a sequence."""
        return self.kv_tokens / max(self.kv_sequences or len(self.slots), 1)

    def among(self, chosen: Ints) -> "Candidates":
        """Those at these positions; the others' pending tokens become other rows."""
        others = len(self.slots) - len(chosen)
        return Candidates(
            slots=self.slots[chosen],
            limit=self.limit[chosen],
            survival=self.survival[chosen],
            weight=self.weight[chosen],
            missing_kv=self.missing_kv[chosen],
            remaining=None if self.remaining is None else self.remaining[chosen],
            other_rows=self.other_rows + others,
            other_sequences=self.other_sequences + others,
            kv_tokens=self.kv_tokens,
            kv_sequences=self.kv_sequences or len(self.slots),
            launches_ahead=self.launches_ahead,
            since=self.since,
        )

    def drafted(self, lengths: Ints, survival: Floats) -> "Candidates":
        """The same sequences with their drafts: lengths: [S] tokens each, survival: [S, K + 1] of these tokens."""
        return Candidates(
            slots=self.slots,
            limit=lengths,
            survival=survival,
            weight=self.weight,
            missing_kv=self.missing_kv,
            remaining=self.remaining,
            other_rows=self.other_rows,
            other_sequences=self.other_sequences,
            kv_tokens=self.kv_tokens,
            kv_sequences=self.kv_sequences,
            launches_ahead=self.launches_ahead,
            since=self.since,
        )


class Policy(Protocol):
    """Decides draft lengths; owns at most its own hysteresis. A subclass must define name and lengths.

    never_drafts: it never wants a draft, so it need not be asked.
    """

    never_drafts: bool = False

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
        by_model = np.add.reduce(candidates.survival[:, 1:] * within, axis=1)
        return np.where(by_model > np.add.reduce(by_text.survival[:, 1:], axis=1), candidates.limit, 0)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        """When a drafter that needs a pass per token stops short of lengths; None: never."""
        return None

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        """γ to verify, [S], 0 … lengths. candidates.survival is that of the drafted tokens.

        Called for drafts without random choices only: to cut sampled drafts here would bias the output.
        """
        return lengths
