"""Times of a traced generation, of which some have not come by its end."""

from faser.api.answers.generation_record import GenerationTimes
from faser.engine.client.output_stream import Timing


def timing(scheduled_s: float | None = None, first_token_s: float | None = None, last_s: float = 0.0) -> Timing:
    found = Timing(arrival_s=1.0)
    found.scheduled_s, found.first_token_s = scheduled_s, first_token_s
    if first_token_s:
        found.last_token_s[0] = last_s
    return found


def test_times_that_never_came_are_left_out_and_so_are_phases_to_them() -> None:
    assert GenerationTimes([timing()]).attributes() == {"faser.preemptions": 0}
    assert GenerationTimes([timing()]).phases() == []
    started = GenerationTimes([timing(), timing(scheduled_s=3.0)])
    assert started.attributes() == {"faser.preemptions": 0, "gen_ai.latency.time_in_queue": 2.0}
    assert [each.name for each in started.phases()] == ["queue"]


def test_times_of_several_prompts_are_of_their_first_and_last_tokens() -> None:
    times = GenerationTimes([timing(1.0, 2.0, 4.0), timing(1.5, 1.75, 3.0)])
    assert times.attributes() == {
        "faser.preemptions": 0,
        "gen_ai.latency.time_in_queue": 0.0,
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.25,
        "gen_ai.latency.time_in_model_inference": 3.0,
        "gen_ai.latency.e2e": 3.0,
    }
    assert [(each.name, each.began_s, each.ended_s) for each in times.phases()] == [
        ("queue", 1.0, 1.0),
        ("prefill", 1.0, 1.75),
        ("decode", 1.75, 4.0),
    ]
