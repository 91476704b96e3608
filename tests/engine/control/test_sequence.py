"""A sequence takes several tokens of a step as it would take them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import Sequence, Tenant
from faser.types.request import Request
from faser.types.sampling import SamplingParams

EOS, STOP = 2, 3
PROMPT = (10, 11, 12)


def sequence(sampling: SamplingParams, max_total: int) -> Sequence:
    request = Request(request_id="a", prompt_token_ids=PROMPT, sampling=sampling)
    return Sequence(
        request,
        0,
        priority_key=(0, 0.0, 0),
        tenant=Tenant(""),
        seed=1,
        table=KvManager(4, 16).new_table(),
        max_total=max_total,
        eos_token_ids=frozenset({EOS}),
    )


@given(
    steps=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6),
    min_tokens=st.integers(0, 8),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from(((), (STOP,), (STOP, 4))),
    max_total=st.integers(len(PROMPT) + 1, 24),
)
def test_tokens_are_taken_until_one_ends_the_sequence(
    steps: list[tuple[int, ...]],
    min_tokens: int,
    ignore_eos: bool,
    stop_token_ids: tuple[int, ...],
    max_total: int,
) -> None:
    """Oracle: one token a step. Planted bugs: a stop token in the middle and the length are overlooked."""
    sampling = SamplingParams(min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    at_once, one_by_one = sequence(sampling, max_total), sequence(sampling, max_total)
    for tokens in steps:
        taken = at_once.advance(at_once.num_tokens + len(tokens) - 1, tokens)
        expected = 0
        for token_id in tokens:
            if one_by_one.finish_reason is None:
                expected += one_by_one.advance(one_by_one.num_tokens, (token_id,))
        assert taken == expected
        assert at_once.token_ids == one_by_one.token_ids
        assert (at_once.finish_reason, at_once.stop_reason) == (one_by_one.finish_reason, one_by_one.stop_reason)
        if at_once.finish_reason is not None:
            return
        assert at_once.num_computed == one_by_one.num_computed


@pytest.mark.parametrize("tokens, reason", [((5, EOS, 5), "stop"), ((5, 5, 5, 5, 5), "length")])
def test_tokens_after_the_end_are_dropped(tokens: tuple[int, ...], reason: str) -> None:
    one = sequence(SamplingParams(), len(PROMPT) + 4)
    taken = one.advance(one.num_tokens, tokens)
    assert one.finish_reason is not None
    assert one.finish_reason.value == reason
    assert one.token_ids == [*PROMPT, *tokens[:taken]]
    assert taken == (2 if reason == "stop" else 4)
