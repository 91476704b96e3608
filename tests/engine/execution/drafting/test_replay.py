"""Drafts of a given acceptance: right as often as asked at each position, and answers stay the model's."""

from pathlib import Path

import numpy as np
import pytest

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.replay import ReplayDrafter
from faser.types.sampling import SamplingParams
from tests.engine.losslessness.equality import answers, build, requests, write_pair

PROMPT = (5, 6)


def started(drafter: ReplayDrafter, answer: tuple[int, ...], *, known: tuple[int, ...] = ()) -> ReplayDrafter:
    drafter.expect({(3, PROMPT): answer})
    drafter.start(
        SequenceStart(
            slot=1, sampling=SamplingParams(seed=3), seed=99, prompt_len=len(PROMPT), token_ids=(*PROMPT, *known)
        )
    )
    return drafter


def draft(drafter: ReplayDrafter, most: int = 8, width: int = 8) -> tuple[tuple[int, ...], list[float]]:
    table = drafter.propose(
        DraftPlan(step=0, width=width, requests=(DraftRequest(slot=1, max_tokens=most),))
    ).table
    return table.tokens(0), table.confidences[0, : table.lengths[0]].round(6).tolist()


def test_with_rates_of_one_a_draft_is_the_answer_from_where_the_sequence_is() -> None:
    drafter = started(ReplayDrafter([1.0, 1.0, 1.0]), (7, 8, 9, 10, 11))
    assert draft(drafter)[0] == (7, 8, 9)
    drafter.commit([1], [3], [7, 8, 9])
    assert draft(drafter) == ((10, 11), [1.0, 1.0])
    drafter.commit([1], [2], [10, 11])
    assert draft(drafter) == ((), [])


def test_a_draft_is_no_longer_than_asked() -> None:
    assert draft(started(ReplayDrafter([1.0, 1.0, 1.0]), (7, 8, 9)), most=2)[0] == (7, 8)


def test_a_sequence_that_was_preempted_is_drafted_for_where_it_is() -> None:
    assert draft(started(ReplayDrafter([1.0]), (7, 8, 9), known=(7, 8)))[0] == (9,)


def test_with_rates_of_zero_the_first_token_is_wrong_and_never_negative() -> None:
    drafter = started(ReplayDrafter([0.0, 0.0]), (0, 5))
    assert draft(drafter) == ((1, 5), [0.0, 0.0])
    drafter.commit([1], [1], [0])
    assert draft(drafter)[0] == (4,)


def test_as_many_drafts_are_right_up_to_a_position_as_its_rate_says() -> None:
    rates, answer = (0.8, 0.5, 0.1), tuple(range(10, 4010))
    drafter, right = started(ReplayDrafter(rates), answer), np.zeros(3)
    for at in range(4000 - 3):
        tokens, confidences = draft(drafter)
        right += np.logical_and.accumulate(np.array(tokens) == answer[at : at + 3])
        assert confidences == [0.8, 0.625, 0.2]
        drafter.commit([1], [1], [answer[at]])
    assert right / (4000 - 3) == pytest.approx(rates, abs=0.03)


def test_every_run_has_the_same_mistakes() -> None:
    found = [draft(started(ReplayDrafter([0.5] * 8), tuple(range(20, 40)))) for _ in range(2)]
    assert found[0] == found[1]


def test_drafting_takes_its_time_once_a_step_and_none_without_requests() -> None:
    pauses: list[float] = []
    drafter = started(ReplayDrafter([1.0], draft_s=0.004, pause=pauses.append), (7, 8))
    drafter.propose(DraftPlan(step=0, width=1, requests=()))
    assert pauses == []
    draft(drafter)
    assert pauses == [0.004]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_token_for_token_those_without_drafts_and_acceptance_is_as_given(
    checkpoints: tuple[Path, Path], temperature: float
) -> None:
    rates, asked = (0.9, 0.6, 0.3), requests(temperature=temperature)
    expected = answers(build(checkpoints, None), asked)
    drafter = ReplayDrafter(rates)
    drafter.expect(
        {(int(each.request_id), each.prompt_token_ids): expected[each.request_id, 0][0] for each in asked}
    )
    engine = build(checkpoints, {"method": "suffix"}, wrap_drafter=lambda _drafter: drafter)
    engine.use_policy("fixed", 3)
    assert answers(engine, asked) == expected
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_drafts > 300
    shares = [count / stats.num_drafts for count in stats.accepted_per_position[:3]]
    assert shares == pytest.approx(rates, abs=0.1)  # the last drafts of an answer are shorter
