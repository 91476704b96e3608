"""Verdicts that follow from tokens alone are those of the rule, whoever else is in the step."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.sampling.sampler import NO_TOKEN
from faser.engine.execution.verifiers.judged_rows import lay_out
from faser.engine.execution.verifiers.sample_and_match import acceptance_of_tokens, accepted
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows
from faser.types import SequenceError

# Of one sequence: drafted tokens, and what its rows choose.
OneSequence = tuple[tuple[int, ...], tuple[int, ...]]


def by_arrays(sequences: Sequence[SequenceRows], chosen: np.ndarray) -> list[AcceptanceResult]:
    """The rule as verifiers with a sampler have it: masks over the rows of all sequences."""
    drafted = [
        DraftedRows(
            slot=each.slot, position=position, draft=each.token_ids[len(each.token_ids) - each.num_drafts :]
        )
        for each in sequences
        for position in (each.start + len(each.token_ids) - each.num_drafts,)
    ]
    rows = lay_out(drafted)
    last = rows.last_reached(accepted(chosen, rows.drafted, chosen != NO_TOKEN)).tolist()
    return [
        AcceptanceResult(error=SequenceError.NOT_FINITE)
        if chosen[end] == NO_TOKEN
        else AcceptanceResult(token_ids=(*each.draft[: end - begin], int(chosen[end])))
        for each, begin, end in zip(drafted, rows.first.tolist(), last, strict=True)
    ]


@st.composite
def one_sequence(draw: st.DrawFn) -> OneSequence:
    draft = tuple(draw(st.lists(st.integers(0, 1), max_size=4)))
    size = len(draft) + 1
    return draft, tuple(draw(st.lists(st.sampled_from([NO_TOKEN, 0, 1]), min_size=size, max_size=size)))


@given(st.lists(one_sequence(), min_size=1, max_size=5), st.integers(1, 3))
def test_verdicts_of_chosen_tokens_are_those_of_masks_over_rows(steps: list[OneSequence], num_known: int) -> None:
    sequences = [
        SequenceRows(
            slot=slot,
            start=10 * slot,
            token_ids=(*range(90, 90 + num_known), *draft),
            new_blocks=(),
            samples=True,
            num_drafts=len(draft),
        )
        for slot, (draft, _) in enumerate(steps)
    ]
    chosen = np.array([token_id for _, tokens in steps for token_id in tokens], dtype=np.int64)
    assert acceptance_of_tokens(sequences, chosen) == by_arrays(sequences, chosen)


def test_tokens_behind_the_first_one_that_nobody_drafted_are_dropped() -> None:
    rows = SequenceRows(slot=0, start=5, token_ids=(1, 7, 8, 9), new_blocks=(), samples=True, num_drafts=3)
    (verdict,) = acceptance_of_tokens([rows], np.array([7, 4, 9, 3]))
    assert verdict == AcceptanceResult(token_ids=(7, 4))
