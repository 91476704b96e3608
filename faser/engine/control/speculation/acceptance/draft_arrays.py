"""DraftArrays: the drafts of one step, from the moment they come until the target has verified them.

Turns drafts into arrays, and what a step brought into verdicts. Decides and estimates nothing.

    draft          x1      x2      x3      x4      x5      x3, x4, x5 are cut, by the policy or by the step itself
    verified by    row 0   row 1   row 2   -       -       row 2, of x2, is computed anyway
    came           x1      x2      y                       y is the bonus token
    judged         yes     yes     yes     no      no      x3 was right if it equals y

A draft token that is a point mass is right if it equals the token that came at its place, whether it was verified
or not. So the first token that is cut is judged for nothing, and so is a draft of which no token is verified.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import DRAFT_METHODS, PASS_METHODS
from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.acceptance.estimator import Verdicts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

METHOD_IDS = {method: i for i, method in enumerate(DRAFT_METHODS)}
FIRST_TEXT = np.array(len(PASS_METHODS))  # ids of drafters that run a model come before those of text look-ups
_ONE = np.array(1)
_NO_TOKEN, _NOTHING_CAME = -1, -2  # no token ids, and unequal


@dataclass(slots=True, kw_only=True)
class ReadDrafts:
    """Drafts of up to K tokens as arrays. slots, methods, lengths: [S]; token_ids, confidences: [S, K].

    methods: index DRAFT_METHODS. Beyond lengths confidences are 0 and token_ids are no tokens.
    """

    slots: Ints
    methods: Ints
    lengths: Ints
    token_ids: Ints
    confidences: Floats

    def among(self, chosen: Ints) -> "ReadDrafts":
        """Those at these positions."""
        return ReadDrafts(
            slots=self.slots[chosen],
            methods=self.methods[chosen],
            lengths=self.lengths[chosen],
            token_ids=self.token_ids[chosen],
            confidences=self.confidences[chosen],
        )

    def verdicts(self, came: Ints) -> Verdicts:
        """What the tokens that came, as of came_tokens, say about point masses of which no token was verified."""
        accepted = np.add.reduce(np.logical_and.accumulate(self.token_ids == came, axis=1), axis=1)
        judged = np.minimum(accepted + 1, self.lengths)
        return self.judged(np.minimum(judged, np.count_nonzero(came != _NOTHING_CAME, axis=1)), accepted)

    def judged(self, judged: Ints, accepted: Ints) -> Verdicts:
        return Verdicts(
            slots=self.slots,
            methods=self.methods,
            judged=judged,
            accepted=accepted,
            confidences=self.confidences,
        )


@dataclass(slots=True, kw_only=True)
class DraftArrays:
    """What a step verifies of its drafts.

    kept: [S] tokens that are verified. survival: [S, K + 1], of the tokens that could be verified. border: 1 for
    the chunks of overlapped drafts, whose first tokens the last step accepted: these are among the drafts, but not
    in kept and survival. drawn: the tokens are not point masses.
    """

    drafts: ReadDrafts
    kept: Ints
    survival: Floats
    border: int = 0
    drawn: bool = False

    def among(self, chosen: Ints) -> "DraftArrays":
        """Those at these positions."""
        return DraftArrays(
            drafts=self.drafts.among(chosen),
            kept=self.kept[chosen],
            survival=self.survival[chosen],
            border=self.border,
            drawn=self.drawn,
        )

    def verdicts(self, accepted: Ints, last_ids: Ints) -> Verdicts:
        """accepted: [S], of the kept tokens. last_ids: [S] the last token that the step brought each sequence."""
        drafts, kept = self.drafts, self.kept
        if self.drawn:
            return drafts.judged(np.minimum(accepted + _ONE, kept), accepted)
        if self.border:
            accepted, kept = accepted + self.border, kept + self.border
        most = drafts.token_ids.shape[1]
        first_cut = drafts.token_ids[np.arange(len(kept)), np.minimum(kept, most - 1)]
        right = first_cut == last_ids
        right &= accepted == kept
        right &= kept < drafts.lengths
        return drafts.judged(np.minimum(accepted + _ONE, drafts.lengths), accepted + right)


class DraftReader:
    """Reads drafts of at most cap tokens, K."""

    def __init__(self, cap: int) -> None:
        self._upto = np.tri(cap + 1, cap, -1, dtype=np.bool_)  # line n: the first n depths

    def read(self, drafts: Many[Draft], slots: Ints | None = None) -> ReadDrafts:
        """slots: of the drafts, where an array of them is there already."""
        lengths = np.array([len(each.token_ids) for each in drafts], dtype=np.int64)
        mask = self._upto.take(lengths, axis=0)
        confidences, token_ids = np.zeros(mask.shape), np.full(mask.shape, _NO_TOKEN, dtype=np.int64)
        if np.count_nonzero(lengths):
            confidences[mask] = np.fromiter(chain.from_iterable([each.confidences for each in drafts]), np.float64)
            token_ids[mask] = np.fromiter(chain.from_iterable([each.token_ids for each in drafts]), np.int64)
        return ReadDrafts(
            slots=np.array([each.slot for each in drafts], dtype=np.int64) if slots is None else slots,
            methods=_methods([each.method for each in drafts]),
            lengths=lengths,
            token_ids=token_ids,
            confidences=confidences,
        )


def came_tokens(came: Many[tuple[int, ...]], width: int) -> Ints:
    """[S, width] the first tokens that a step brought each sequence; no token ids beyond them."""
    found = np.full((len(came), width), _NOTHING_CAME, dtype=np.int64)
    lengths = np.array([len(each) for each in came], dtype=np.int64)
    if lengths.max() > width:
        came, lengths = [each[:width] for each in came], np.minimum(lengths, width)
    found[np.arange(width) < lengths[:, None]] = np.fromiter(chain.from_iterable(came), np.int64)
    return found


def with_dropped(
    lengths: Ints, requested: Ints, survival: Floats, *, passes: int, row_price: float
) -> tuple[Ints, Floats]:
    """Lengths and survival of a model's drafts, with the token that a StopRule dropped from the end of each.

    lengths, requested: [S]. survival: [S, K + 1], of drafted_survival. A draft shorter than the passes that were
    made has lost its last token. All that is known of this token is that its survival did not exceed row_price, so
    it gets this price. Without it a model of which every token is dropped would never be seen to be bad.
    """
    tried = np.minimum(np.minimum(lengths + 1, requested), passes)
    dropped = (tried > lengths).nonzero()[0]
    if not len(dropped):
        return lengths, survival
    ends, survival = lengths[dropped], survival.copy()
    survival[dropped, ends + 1] = np.minimum(survival[dropped, ends], row_price)
    return np.maximum(tried, lengths), survival


def _methods(names: list[str]) -> Ints:
    """[S] ids; mostly all drafts have the same method."""
    if names and names.count(names[0]) == len(names):
        return np.full(len(names), METHOD_IDS[names[0]], dtype=np.int64)
    return np.array([METHOD_IDS[name] for name in names], dtype=np.int64)
