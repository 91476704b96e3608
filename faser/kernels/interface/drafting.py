"""Numbers that stay on the device, so that drafting goes on before the host knows what a step has accepted.

    matched     what a step that verifies drafts brings its sequences: how many tokens, and the last two
    followed    rows of passes that begin behind these tokens, wherever they are; each pass is one token further

The host plans such rows for the longest sequences that there can be; where they are, the device finds out.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMatch:
    """R sampled rows of S sequences, and what comes of them. All int64, at fixed addresses.

    sampled: [R] tokens. drafted: [R] the draft token that each row verifies, -1 in the last row of a sequence;
    below that -2 - i, for fed[i]. decided: [R] 1 where it is accepted and 0 where it is not, whatever is sampled;
    -1: if it is the sampled one. first: [S + 1] the first row of each sequence, and R. known: [S] the last token
    before the drafts. Results:
    counts: [S] tokens that the step brings. last: [S, 2] the last two tokens of each sequence then.
    """

    sampled: Tensor
    drafted: Tensor
    decided: Tensor
    fed: Tensor
    first: Tensor
    known: Tensor
    counts: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRows:
    """Rows of D drafts, each a sequence of its own for attention. All int64, at fixed addresses.

    numbers: [1 + 3 W] D, then for each draft the tokens known before the step and its number in the step, at 1
    and at 1 + W, and at 1 + 2 W by how much positions of its tokens exceed the places of their rows. Written to
    by every pass:
    lengths: [W] known tokens of each draft's sequence, draft tokens before the pass included.
    fed: [2 W] of a first pass: the tokens of its rows.
    positions: [W] of the tokens that the pass samples, where the sampler reads them.
    """

    numbers: Tensor
    lengths: Tensor
    fed: Tensor
    positions: Tensor
