"""Interface of native code to the control plane: estimates of acceptance, and the choice of what to verify.

The control plane owns the arrays and their meaning (control/speculation/acceptance.py), and computes the same in
Python where it is given no NativeAcceptance. Tables are as wide as the arrays.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from faser.engine.contract.drafts import DraftTable
from faser.types.arrays import Floats, Ints


class SampledStep(NamedTuple):
    """Tokens sampled by a step. slots: [R], -1 for a sequence that teaches nothing. counts: [R] tokens of each."""

    slots: Many[int]
    counts: Many[int]
    token_ids: Many[int]

    def by_slot(self) -> dict[int, tuple[int, ...]]:
        """The tokens of the sequences that teach and got any."""
        pairs = zip(self.slots, self.counts, accumulate(self.counts), strict=True)
        return {slot: tuple(self.token_ids[end - n : end]) for slot, n, end in pairs if n and slot >= 0}


class Texts(Protocol):
    """The texts of the sequences, by slot, that drafts are looked up in.

    address: of the native index (native/lookup.cpp). method_ids: of the methods that it asks, in order.
    """

    address: int
    method_ids: Ints

    def are_all(self) -> bool:
        """Return whether all drafts come from text now, and nothing but the model has a say about them."""
        ...


class NativeAcceptance(Protocol):
    """Computes with the arrays that it was made for; see the functions of Acceptance by these names."""

    def survival(self, drafts: DraftTable) -> Floats:
        """Return the survival [D, K + 1] of these drafts."""
        ...

    def choose(
        self, drafts: DraftTable, count: int, requested: Ints | None, row_price: float
    ) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints, Floats], Floats]:
        """The second of these are the columns of a DraftTable."""
        ...

    def look(
        self, texts: Texts, slots: Ints, limits: Ints, row_price: float
    ) -> tuple[tuple[Ints, Ints, Ints, Ints, Floats], Floats, int]:
        """Look up drafts of at most limits[i] tokens, [S], and choose among them.

        Returns as `choose` the drafts and their survival, then how many have a first token whose survival exceeds
        row_price.
        """
        ...

    def judge_look(self, sampled: SampledStep, drafts: DraftTable, kept: Ints) -> Ints:
        """Judge the drafts that `look` has found last, taken or not: see StepDrafts.judge."""
        ...

    def note(self, slots: Ints, reached: Ints, survival: Floats, *, from_text: bool) -> None: ...

    def hold(self, drafts: DraftTable, decided: Ints, accepted: Ints) -> None: ...

    def judge(
        self,
        sampled: SampledStep,
        drafts: DraftTable,
        kept: Ints,
        looked: DraftTable,
        taken: Ints,
        by_model: Ints,
        *,
        num_decided: int,
        is_drawn: bool,
    ) -> Ints:
        """Judge drafts as StepDrafts.judge does."""
        ...

    def drop(self, slot: int) -> None: ...

    def learn(self) -> None: ...

    def best_prefixes(
        self, survival: Floats, least: Ints | None, lengths: Ints, seconds: Floats, worth: float
    ) -> tuple[Ints, float]: ...


# Of the arrays and constants of the formulas, by the names that native/acceptance.cpp has for them.
MakeNativeAcceptance = Callable[[Mapping[str, NDArray[Any]], Mapping[str, float]], NativeAcceptance]
