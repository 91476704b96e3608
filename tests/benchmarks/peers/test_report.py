"""Numbers made of times: against hand-computed examples."""

import pytest

from benchmarks.peers.load import Exchange
from benchmarks.peers.report import Measurement, bar_outcomes, check_same_work, measure, ratios, same_file, speeds


def _exchange(sent_s: float, *token_times_s: float) -> Exchange:
    return Exchange(
        sent_s=sent_s,
        token_times_s=token_times_s,
        prompt_tokens=10,
        output_tokens=len(token_times_s),
    )


def _measurement(
    system: str, round: int, rate: float, *, concurrency: int = 1, prompt_tokens: tuple[int, ...] = (5,)
) -> Measurement:
    return Measurement(
        system=system,
        round=round,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=128,
        wall_s=128 / rate,
        output_tokens_per_s=rate,
        ttft_s=0.1,
        tpot_s=0.02,
        itl_s=0.02,
        foreign_cores=0.0,
    )


def test_a_measurement_counts_all_tokens_from_the_first_request_to_the_last_token() -> None:
    exchanges = [
        _exchange(100.0, 101.0, 101.5, 103.0),
        _exchange(100.5, 102.5, 104.0),
        _exchange(101.0, 101.5, 105.0),
    ]

    found = measure(exchanges, system="faser", round=2, concurrency=3, foreign_s=1.0)

    assert found.wall_s == 5.0
    assert found.output_tokens == 7
    assert found.output_tokens_per_s == pytest.approx(1.4)
    assert found.ttft_s == 1.0  # of 1.0, 2.0, 0.5
    assert found.tpot_s == 1.5  # of 1.0, 1.5, 3.5
    assert found.itl_s == 1.5  # of 0.5, 1.5, 1.5, 3.5
    assert found.foreign_cores == pytest.approx(0.2)


def test_ratios_are_taken_within_a_round_and_concurrency_and_then_their_median() -> None:
    rates = {("faser", 0): 20.0, ("vllm", 0): 10.0, ("faser", 1): 60.0, ("vllm", 1): 20.0, ("faser", 2): 9.0}
    rates |= {("vllm", 2): 10.0}
    measurements = [_measurement(system, round, rate) for (system, round), rate in rates.items()]
    measurements += [_measurement("faser", 0, 8.0, concurrency=4), _measurement("vllm", 0, 4.0, concurrency=4)]

    found = ratios(measurements)

    assert set(found) == {("vllm", 1), ("vllm", 4)}
    assert (found["vllm", 1].low, found["vllm", 1].median, found["vllm", 1].high) == pytest.approx((0.9, 2.0, 3.0))
    assert found["vllm", 4].median == 2.0
    assert speeds(measurements)["faser", 1].median == 20.0


def test_a_bar_is_met_from_its_factor_on_and_only_measured_bars_count() -> None:
    measurements = [
        _measurement("faser", 0, 129.9),
        _measurement("transformers", 0, 100.0),
        _measurement("vllm", 0, 129.9),
    ]

    outcomes = {(bar.system, bar.concurrency): met for bar, _, met in bar_outcomes(measurements)}

    assert outcomes == {("transformers", 1): False, ("vllm", 1): True}


def test_the_same_file_is_compared_with_llamacpps_speed_and_has_bars_of_its_own() -> None:
    rates = {"faser-off-q4_0": 119.0, "faser-q4_0": 150.0, "llamacpp-q4_0": 100.0, "llamacpp-q8_0": 10.0}
    measurements = [_measurement(name, 0, rate) for name, rate in rates.items()]

    found = {name: ratio.median for (name, _), ratio in same_file(measurements).items()}

    assert found == pytest.approx({"faser-off-q4_0": 1.19, "faser-q4_0": 1.5})
    assert [(bar.system, bar.factor, met) for bar, _, met in bar_outcomes(measurements)] == [
        ("llamacpp-q4_0", 1.2, False)
    ]


def test_systems_that_read_different_prompts_are_not_compared() -> None:
    same = [_measurement("faser", 0, 9.0), _measurement("vllm", 0, 9.0)]
    check_same_work(same)

    with pytest.raises(ValueError, match=r"vllm read \(6,\) prompt tokens"):
        check_same_work([*same, _measurement("faser", 1, 9.0), _measurement("vllm", 1, 9.0, prompt_tokens=(6,))])
