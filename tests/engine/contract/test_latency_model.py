"""The latency model against queues whose answers are known, and against a simulation of its own assumptions."""

import math
from itertools import pairwise

import numpy as np
import pytest

from faser.engine.contract.latency_model import (
    Forecast,
    Lengths,
    Pace,
    capacity,
    crossovers,
    crossovers_by_sequences,
    highest_rate,
)
from faser.types.request import Slo

SLOTS = 32


def pace(
    *, first_s: float = 0.01, sequence_s: float = 0.0, row_s: float = 0.0, slots: int = SLOTS, tokens: float = 1.0
) -> Pace:
    """Steps that take first_s, sequence_s more for each sequence, and row_s for each row of a prompt."""
    sequences = (1, slots) if slots > 1 else (1,)
    rows = (1, 4096)
    return Pace(
        sequences=sequences,
        step_s=tuple(first_s + sequence_s * each for each in sequences),
        tokens=(tokens,) * len(sequences),
        rows=rows,
        rows_s=tuple(first_s + row_s * each for each in rows),
        most_rows=4096,
    )


def lengths(prompt: int = 1, answer: int = 51) -> Lengths:
    return Lengths.of([(prompt, answer)])


def test_an_idle_engine_takes_a_step_for_the_prompt_and_one_for_each_further_token() -> None:
    forecast = Forecast(pace(row_s=0.001), lengths(prompt=11), 1e-6)
    assert forecast.ttft_s == pytest.approx(0.01 + 0.011, rel=0.06)
    assert forecast.tpot_s == pytest.approx(0.01, rel=1e-3)
    assert forecast.latency_s == pytest.approx(forecast.ttft_s + 50 * 0.01, rel=1e-3)
    assert forecast.attainment(Slo(ttft_ms=30, tpot_ms=11)) == pytest.approx(1, abs=1e-3)
    assert forecast.attainment(Slo(ttft_ms=15)) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("utilisation", [0.2, 0.5, 0.8])
def test_where_steps_take_as_long_as_they_have_sequences_it_is_processor_sharing(utilisation: float) -> None:
    """Oracle: M/G/1 processor sharing, where a request takes its own time over 1 - utilisation."""
    slots = 400
    sharing = pace(first_s=0.0, sequence_s=0.001, slots=slots)
    alone_s = 0.001 * 51  # 50 tokens after the first, and the prompt's step
    rate = utilisation / alone_s
    forecast = Forecast(sharing, lengths(), rate)
    assert forecast.utilisation == pytest.approx(utilisation, rel=0.03)  # a prompt's row has a price of its own
    assert forecast.mean_sequences == pytest.approx(utilisation / (1 - utilisation), rel=0.01)
    assert forecast.tpot_s == pytest.approx(0.001 / (1 - utilisation), rel=0.03)


def test_where_sequences_do_not_slow_each_other_down_their_number_is_poisson() -> None:
    """Oracle: M/G/∞: the mean is rate times stay, and so is the variance."""
    forecast = Forecast(pace(slots=200), lengths(), 40.0)
    stay_s = 0.01 * 51
    counts = np.arange(len(forecast.chances))
    mean = float(forecast.chances @ counts)
    assert mean == pytest.approx(40 * stay_s, rel=1e-3)
    assert float(forecast.chances @ (counts - mean) ** 2) == pytest.approx(mean, rel=1e-3)


def test_with_one_slot_newcomers_wait_as_in_a_queue_with_one_server() -> None:
    """Oracle: M/M/1, whose number of requests the model has; the mean wait follows by Little's law."""
    forecast = Forecast(pace(slots=1), lengths(), 0.5 / 0.51)
    counts = np.arange(len(forecast.chances))
    assert float(forecast.chances @ counts) == pytest.approx(1.0, rel=0.01)
    assert forecast.ttft_s > 0.51 / 2


def test_its_own_assumptions_played_out_give_its_means_and_its_tail() -> None:
    """Oracle: requests that share a server whose speed depends on how many there are, event by event."""
    served = pace(first_s=0.004, sequence_s=0.001, slots=64)
    asked = lengths(answer=41)
    rate = 0.6 * capacity(served, asked)
    forecast = Forecast(served, asked, rate)
    stays = _shared(served, rate, tokens=41, count=12_000, seed=3)
    assert float(np.mean(stays)) == pytest.approx(
        forecast.latency_s - 0.5 * _mean_step_s(forecast, served), rel=0.05
    )
    assert float(np.quantile(stays, 0.99)) == pytest.approx(forecast.latency_quantile_s(0.99), rel=0.12)


def _mean_step_s(forecast: Forecast, served: Pace) -> float:
    """The rest of a step for which a newcomer waits, twice: events know no steps."""
    busy = forecast.chances[1:]
    return float(busy @ served.decoding_s(np.arange(1.0, len(busy) + 1)))


def _shared(served: Pace, rate: float, *, tokens: int, count: int, seed: int) -> list[float]:
    """Seconds from arrival to end of each request that needs so many steps."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, count)).tolist()
    left: list[float] = []
    began: list[float] = []
    stays, now, at = [], 0.0, 0
    while at < count or left:
        step_s = float(served.decoding_s(max(len(left), 1)))
        until_end = min(left) * step_s if left else math.inf
        until_arrival = arrivals[at] - now if at < count else math.inf
        elapsed = min(until_end, until_arrival)
        left = [each - elapsed / step_s for each in left]
        now += elapsed
        if until_arrival <= until_end:
            left.append(float(tokens))
            began.append(now)
            at += 1
        else:
            place = left.index(min(left))
            stays.append(now - began.pop(place))
            left.pop(place)
    return stays


def test_more_requests_are_never_faster() -> None:
    served, asked = pace(sequence_s=0.001, row_s=0.0002), lengths(prompt=200)
    most = capacity(served, asked)
    found = [Forecast(served, asked, share * most) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    for before, after in pairwise(found):
        assert before.ttft_s < after.ttft_s
        assert before.tpot_s < after.tpot_s
        assert before.latency_quantile_s(0.99) < after.latency_quantile_s(0.99)
        assert before.ttft_quantile_s(0.99) < after.ttft_quantile_s(0.99)
        slo = Slo(ttft_ms=200, tpot_ms=25)
        assert before.attainment(slo) >= after.attainment(slo)


def test_beyond_the_capacity_nothing_ends_and_beyond_four_fifths_it_does_not_know() -> None:
    served, asked = pace(sequence_s=0.001), lengths()
    most = capacity(served, asked)
    over = Forecast(served, asked, 1.01 * most)
    assert not over.is_known
    assert math.isinf(over.ttft_s)
    assert math.isinf(over.latency_quantile_s(0.5))
    assert over.attainment(Slo(ttft_ms=1e6)) == 0
    assert Forecast(served, asked, 0.79 * most).is_known
    assert not Forecast(served, asked, 0.81 * most).is_known


def test_the_highest_rate_is_where_the_attainment_is_the_one_asked_for() -> None:
    served, asked, slo = pace(sequence_s=0.001), lengths(), Slo(tpot_ms=20)
    for share in (0.9, 0.99):
        rate = highest_rate(served, asked, slo, share)
        assert Forecast(served, asked, 0.99 * rate).attainment(slo) >= share
        assert Forecast(served, asked, 1.01 * rate).attainment(slo) < share
    assert highest_rate(served, asked, slo, 0.99) < highest_rate(served, asked, slo, 0.9)
    assert highest_rate(served, asked, Slo(tpot_ms=1), 0.9) == 0
    assert highest_rate(served, asked, Slo(), 0.9) == pytest.approx(capacity(served, asked), rel=1e-3)


def test_long_drafts_are_best_for_few_requests_and_none_for_many() -> None:
    """A step of drafts brings more tokens, and takes longer the more sequences have some."""
    plain, drafts = pace(sequence_s=0.0005), pace(sequence_s=0.0015, tokens=2.0)
    asked = lengths()
    found = crossovers({0: plain, 2: drafts}, drafts, asked)
    assert [gamma for _, gamma in found] == [2, 0]
    (_, _), (rate, _) = found
    below, above = 0.95 * rate, 1.05 * rate
    assert Forecast(drafts, asked, below).latency_s < Forecast(plain, asked, below).latency_s
    assert Forecast(drafts, asked, above).latency_s > Forecast(plain, asked, above).latency_s


def test_draft_lengths_cross_over_where_their_tokens_take_equally_long() -> None:
    """Oracle: .01 + .0005 n seconds a token cross (.01 + .0016 n) / 1.6 at n = 7.5, and that crosses
    (.01 + .0036 n) / 2 at n = 1.56.
    """
    paces = {
        0: pace(sequence_s=0.0005),
        2: pace(sequence_s=0.0016, tokens=1.6),
        4: pace(sequence_s=0.0036, tokens=2.0),
    }
    assert crossovers_by_sequences(paces, paces[2], lengths()) == ((1, 4), (2, 2), (8, 0))
    assert crossovers_by_sequences({0: paces[0], 1: paces[0]}, paces[0], lengths()) == ((1, 0),)


def test_no_length_is_advised_where_chosen_lengths_lose() -> None:
    """Chosen ones lose from 8 sequences on, whatever was measured of fixed ones there."""
    plain, fixed, chosen = pace(sequence_s=0.0005), pace(tokens=3.0), pace(sequence_s=0.0016, tokens=1.6)
    assert crossovers_by_sequences({0: plain, 4: fixed}, chosen, lengths()) == ((1, 4), (8, 0))
    assert crossovers_by_sequences({0: plain, 4: fixed}, pace(sequence_s=0.001), lengths()) == ((1, 0),)
    assert crossovers({0: plain, 4: fixed}, pace(sequence_s=0.001), lengths()) == ((0.0, 0),)


def test_no_length_is_advised_at_a_load_at_which_drafts_hold_fewer_requests() -> None:
    """Tokens come sooner with drafts, and prompts, of which there are many, take longer: fewer requests in all."""
    plain, chosen = pace(sequence_s=0.0005, row_s=0.001), pace(sequence_s=0.0006, row_s=0.0012, tokens=1.5)
    asked = lengths(prompt=500)
    assert chosen.token_s(float(SLOTS)) < plain.token_s(float(SLOTS))
    assert capacity(chosen, asked) < capacity(plain, asked)
    assert crossovers_by_sequences({0: plain, 4: chosen}, chosen, asked)[-1][1] == 0


def test_kinds_of_requests_keep_the_tokens_of_all_requests() -> None:
    random = np.random.default_rng(1)
    pairs = [
        (int(p), int(a)) for p, a in zip(random.lognormal(5, 1, 2000), random.lognormal(4, 1, 2000), strict=True)
    ]
    kinds = Lengths.of(pairs)
    asked = np.maximum(np.array(pairs, dtype=float), 1)
    assert len(kinds.shares) <= 48
    assert kinds.shares.sum() == pytest.approx(1)
    assert kinds.mean(kinds.prompts) == pytest.approx(asked[:, 0].mean())
    assert kinds.mean(kinds.answers) == pytest.approx(asked[:, 1].mean())
    assert kinds.mean(kinds.prompts**2) == pytest.approx((asked[:, 0] ** 2).mean(), rel=0.12)


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    served = pace(row_s=0.001)
    one, two = served.prompt_steps(1, 4000.0), served.prompt_steps(1, 4200.0)
    assert (float(one), float(two)) == (1, 2)
    assert float(served.prompt_s(1, 4200.0)) == pytest.approx(4.2, rel=1e-2)


def test_prompts_that_come_meanwhile_take_their_share_of_the_time() -> None:
    """Oracle: of every second, six prompts of .05 s leave .7 s to steps of 10 ms."""
    forecast = Forecast(pace(row_s=0.001, slots=200), lengths(prompt=50, answer=501), 6.0)
    assert forecast.tpot_s == pytest.approx(0.01 / 0.7, rel=0.03)
