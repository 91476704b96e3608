"""The Policy seam: how many tokens each sequence drafts in a step, and how many of them are verified.

Control plane: arrays of numbers, no torch. The same objects decide live and in the simulator. A policy is asked
twice a step: before drafting, and once the drafts' own confidences are known. It is told what came of it through
the Acceptance and the CostModel, which it reads and never writes.
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
    """The sequences that could draft in this step, best rank first; S of them, K is the engine's cap on γ.

    slots: [S]. limit: [S] most tokens each may draft, 0 … K (its own cap, its end, its blocks).
    survival: [S, K + 1]; survival[s, k] is the expected probability that the first k drafted tokens of s are all
    accepted; column 0 is 1; rows never increase. It counts on a draft that long being there.
    weight: [S] what a token of the sequence is worth; 1 unless its SLO says otherwise.
    lag: [S] tokens whose KV a draft model would have to refill first. left: [S] tokens that each is expected to
    bring yet; None: enough for whatever that costs.
    other_rows: rows that the step has besides one per candidate and the drafts (prompts, sequences that cannot
    draft). other_sequences: so many of those rows bring a token each: decodes that cannot draft.
    kv_tokens: tokens in the cache of all who could draft. since: steps since the policy was last asked.
    Read only; not frozen, as several are made in every step and freezing costs more than all the rest of it.
    """

    slots: Ints
    limit: Ints
    survival: Floats
    weight: Floats
    lag: Ints
    other_rows: int
    kv_tokens: int
    other_sequences: int = 0
    since: int = 1
    left: Ints | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    def among(self, chosen: Ints) -> "Candidates":
        """Those at these positions; the others' pending tokens become other rows."""
        others = len(self.slots) - len(chosen)
        return Candidates(
            slots=self.slots[chosen],
            limit=self.limit[chosen],
            survival=self.survival[chosen],
            weight=self.weight[chosen],
            lag=self.lag[chosen],
            left=None if self.left is None else self.left[chosen],
            other_rows=self.other_rows + others,
            other_sequences=self.other_sequences + others,
            kv_tokens=self.kv_tokens,
            since=self.since,
        )

    def drafted(self, lengths: Ints, survival: Floats) -> "Candidates":
        """The same ones once their drafts have come: so many tokens each, [S], of this survival, [S, K + 1]."""
        return Candidates(
            slots=self.slots,
            limit=lengths,
            survival=survival,
            weight=self.weight,
            lag=self.lag,
            left=self.left,
            other_rows=self.other_rows,
            other_sequences=self.other_sequences,
            kv_tokens=self.kv_tokens,
            since=self.since,
        )


class Policy(Protocol):
    """Decides; owns nothing but its own hysteresis."""

    @property
    def name(self) -> str: ...

    def lengths(self, candidates: Candidates) -> Ints:
        """γ to draft, [S], 0 … limit. All zeros: nobody drafts and the step is the plain one."""
        ...

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:
        """When a drafter that needs a pass a token stops short of lengths; None: never."""
        ...

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        """γ to verify, [S], 0 … lengths. candidates.survival is now that of the tokens really drafted.

        Called for point-mass drafts only. A cut made here with sampled drafts would bias the output.
        """
        ...
