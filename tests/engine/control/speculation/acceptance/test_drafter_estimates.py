"""Open drafts and acceptance estimates. Oracles: all tokens at once; counts that fade step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.control.speculation.acceptance.drafter_estimates import (
    KEPT_PER_STEP,
    MOST_TOKENS,
    PRIOR_TOKENS,
    AcceptanceEstimates,
    OpenDraft,
)

few_tokens = st.lists(st.integers(0, 1), max_size=4).map(tuple)


@given(few_tokens, few_tokens, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=6))
def test_an_open_draft_is_settled_alike_however_the_tokens_come(
    unverified: tuple[int, ...], token_ids: tuple[int, ...], pieces: list[list[int]]
) -> None:
    """Oracle: all tokens at once. Leading right tokens are accepted; the first wrong one is judged as well."""
    draft: OpenDraft | None = OpenDraft(keys=("key",), unverified=unverified, token_ids=token_ids)
    counts = [0, 0]
    came: list[int] = []
    for piece in pieces:
        came += piece
        if draft is not None:
            accepted, judged, draft = draft.meet(tuple(piece))
            counts = [counts[0] + accepted, counts[1] + judged]

    after = came[len(unverified) :] if tuple(came[: len(unverified)]) == unverified else []
    right = next(
        (i for i, (said, came) in enumerate(zip(token_ids, after, strict=False)) if said != came),
        min(len(token_ids), len(after)),
    )
    assert counts == [right, right + (right < min(len(token_ids), len(after)))]


def test_a_drawn_token_that_was_not_verified_was_not_judged() -> None:
    """It equals the target's token by chance; verification would have drawn whether to accept it."""
    draft = OpenDraft(keys=(), unverified=(), token_ids=(1, 2, 3), drawn=True)
    assert draft.meet((1, 2)) == (1, 1, None)
    assert draft.meet((1, 5)) == (1, 2, None)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 16), st.integers(0, 3), st.integers(0, 20)), max_size=20
    )
)
def test_a_rate_is_the_share_of_accepted_tokens_weighted_by_age(events: list[tuple[str, int, int, int]]) -> None:
    """Oracle: all counts are made lighter at every step. The rate of a is the prior of b."""
    estimates = AcceptanceEstimates()
    counts = {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    for key, accepted, refused, wait in events:
        estimates.add((key,), accepted, accepted + refused)
        total = counts[key][1] + accepted + refused
        shrink = min(1.0, MOST_TOKENS / total) if total else 1.0
        counts[key] = [(counts[key][0] + accepted) * shrink, total * shrink]
        for _ in range(wait):
            estimates.fade()
            counts = {each: [KEPT_PER_STEP * value for value in pair] for each, pair in counts.items()}

    def rate(key: str, prior: float) -> float:
        accepted, judged = counts[key]
        return (accepted + PRIOR_TOKENS * prior) / (judged + PRIOR_TOKENS)

    assert estimates.rate(("a", "b"), 0.6) == pytest.approx(rate("b", rate("a", 0.6)))
