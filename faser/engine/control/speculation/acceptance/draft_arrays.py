"""DraftArrays: the drafts of one step, from the moment they come until the target has verified them.

Turns drafts into arrays, and arrays with accepted counts into Outcomes. Decides and estimates nothing.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS, PASS_METHODS
from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.acceptance.estimator import Outcomes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

METHOD_IDS = {method: i for i, method in enumerate(DRAFT_METHODS)}
FIRST_TEXT = np.array(len(PASS_METHODS))  # ids of drafters that run a model come before those of text look-ups


@dataclass(slots=True, kw_only=True)
class DraftArrays:
    """What a step verifies of its drafts: [S] each; confidences: [S, K], survival: [S, K + 1].

    lengths: tokens that were drafted. kept: tokens that are verified. border: 1 for the chunks of overlapped
    drafts, whose first tokens the last step accepted: these are among the confidences, but not in lengths, kept
    and survival.
    """

    slots: Ints
    methods: Ints
    lengths: Ints
    kept: Ints
    confidences: Floats
    survival: Floats
    border: int = 0

    def among(self, chosen: Ints) -> "DraftArrays":
        """Those at these positions."""
        return DraftArrays(
            slots=self.slots[chosen],
            methods=self.methods[chosen],
            lengths=self.lengths[chosen],
            kept=self.kept[chosen],
            confidences=self.confidences[chosen],
            survival=self.survival[chosen],
            border=self.border,
        )

    def outcomes(self, accepted: Ints, *, border: int = 0) -> Outcomes:
        """accepted: [S], of the kept tokens. border: 1 counts the first tokens of overlapped drafts too."""
        if border:
            accepted = accepted + border
        return Outcomes(
            slots=self.slots,
            methods=self.methods,
            drafted=self.lengths + border if border else self.lengths,
            verified=self.kept + border if border else self.kept,
            accepted=accepted,
            confidences=self.confidences,
        )


class DraftReader:
    """Reads drafts of at most cap tokens, K."""

    def __init__(self, cap: int) -> None:
        self._upto = np.tri(cap + 1, cap, -1, dtype=np.bool_)  # line n: the first n depths

    def read(self, drafts: Many[Draft]) -> tuple[Ints, Ints, Floats]:
        """Methods and lengths, [S]; confidences, [S, K], 0 beyond lengths."""
        lengths = np.array([len(each.token_ids) for each in drafts], dtype=np.int64)
        mask = self._upto.take(lengths, axis=0)
        confidences = np.zeros(mask.shape)
        if np.count_nonzero(lengths):
            values = chain.from_iterable([each.confidences for each in drafts])
            confidences[mask] = np.fromiter(values, np.float64)
        return _methods([each.method for each in drafts]), lengths, confidences


def _methods(names: list[str]) -> Ints:
    """[S] ids; mostly all drafts have the same method."""
    if names and names.count(names[0]) == len(names):
        return np.full(len(names), METHOD_IDS[names[0]], dtype=np.int64)
    return np.array([METHOD_IDS[name] for name in names], dtype=np.int64)
