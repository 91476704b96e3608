"""What is kept of the traffic, for how long, and what of it is held out.

Planted bugs that these tests have caught: answers to one prompt on both sides; an old answer in a round.
"""

import time

from faser.engine.client.traffic import FinishedAnswer, TrafficMemory, is_held_out
from faser.types import FinishReason, Request, SamplingParams


def finished(prompt: int, *, tokens: int = 4, length: int = 2) -> FinishedAnswer:
    request = Request(
        request_id="a", prompt_token_ids=(prompt,) * length, sampling=SamplingParams(temperature=0.5)
    )
    return FinishedAnswer(
        request=request,
        token_ids=(7,) * tokens,
        finish_reason=FinishReason.STOP,
        stop_reason=None,
        ended_at=int(time.time()),
    )


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_answers_of_the_last_hour_are_kept() -> None:
    clock = Time()
    memory = TrafficMemory(window_s=60, clock=clock)
    for at in range(4):
        clock.now_s = 20.0 * at
        memory.put(finished(at))
    assert [each.prompt[0] for each in memory.begin_round()] == [1, 2, 3]
    clock.now_s = 119.0
    memory.forget_old()
    assert [each.prompt[0] for each in memory.begin_round()] == [3]
    clock.now_s = 120.0
    memory.forget_old()
    assert memory.is_empty


def test_of_too_many_tokens_the_oldest_go() -> None:
    memory = TrafficMemory(most_tokens=18)
    for at in range(9):
        memory.put(finished(at))
    kept = memory.begin_round()
    assert [each.prompt[0] for each in kept] == [6, 7, 8]
    assert (kept[0].answer, kept[0].temperature) == ((7,) * 4, 0.5)


def test_new_are_tokens_to_learn_from_that_no_round_has_had() -> None:
    memory = TrafficMemory()
    for at in range(40):
        memory.put(finished(at))
    learned = [each for each in memory.begin_round() if not each.held_out]
    assert 25 <= len(learned) < 40
    assert memory.new_tokens == 0
    apart = next(at for at in range(40, 90) if is_held_out((at,) * 2))
    memory.put(finished(apart))
    assert memory.new_tokens == 0
    memory.put(finished(learned[0].prompt[0], tokens=9))
    assert memory.new_tokens == 9


def test_all_answers_to_a_prompt_are_on_one_side() -> None:
    memory = TrafficMemory()
    for at in range(200):
        memory.put(finished(at % 50, tokens=1 + at))
    sides: dict[int, set[bool]] = {}
    for each in memory.begin_round():
        sides.setdefault(each.prompt[0], set()).add(each.held_out)
    assert all(len(each) == 1 for each in sides.values())
    assert 2 <= sum(each == {True} for each in sides.values()) <= 20
