"""`faser plan`: what it says of a pace, what it measures on an engine, and what it refuses before a model is
loaded."""

import json
import re
from pathlib import Path

import pytest

from faser.cli.main import main
from faser.cli.plan import SHARES, Crossovers, busy_line, held, sentences, table
from faser.engine.contract.latency_model import Forecast, Lengths, Pace, capacity, highest_rate
from faser.types.request import NO_TARGETS, Slo

PACE = Pace(
    sequences=(1, 16),
    step_s=(0.01, 0.02),
    tokens=(1.0, 1.0),
    rows=(1, 256),
    rows_s=(0.01, 0.1),
    most_rows=256,
)
LENGTHS = Lengths.of([(100, 50)])
SLO = Slo(ttft_ms=200, tpot_ms=15)


class Own:
    prompt, answer, rate = 100, 50, 2.0


def test_what_is_held_is_what_the_latency_model_says() -> None:
    found = held("without drafts", PACE, LENGTHS, SLO, 2.0)
    assert found.capacity == capacity(PACE, LENGTHS)
    assert found.within == {share: highest_rate(PACE, LENGTHS, SLO, share) for share in SHARES}
    assert found.at_rate is not None
    assert found.at_rate["ttft_ms"] == 1000 * Forecast(PACE, LENGTHS, 2.0).ttft_s
    assert found.within[0.99] < found.within[0.9] < found.capacity


def test_a_rate_near_the_capacity_is_not_known() -> None:
    found = held("with drafts", PACE, LENGTHS, SLO, 0.95 * capacity(PACE, LENGTHS))
    assert found.at_rate is None
    text = table(Own, SLO, [found])  # type: ignore[arg-type]
    assert "with drafts: 95% of the capacity, no estimate" in text


def test_the_table_names_rates_targets_and_times() -> None:
    text = table(Own, SLO, [held("without drafts", PACE, LENGTHS, SLO, 2.0)])  # type: ignore[arg-type]
    assert re.search(
        r"without drafts: max \d+\.\d\d req/s; \d+\.\d\d req/s at 90% attainment \(TTFT 200 ms, TPOT", text
    )
    assert re.search(r"At 2 requests a second:\n  without drafts: TTFT mean \d+ ms, p99 \d+ ms; TPOT", text)


def test_it_says_up_to_which_load_each_length_of_drafts_is_best() -> None:
    crossed = Crossovers(by_sequences=((1, 4), (3, 2), (12, 0)), by_rate=((0.0, 2),))
    assert sentences(crossed) == [
        "Best length of drafts by sequences at a time: 4 tokens below 3, 2 tokens below 12, none from there on.",
        "Best length of drafts by requests a second: 2 tokens at every load.",
    ]


def test_it_asks_for_a_quiet_machine_where_others_took_its_cores() -> None:
    assert busy_line(0.05) == []
    assert busy_line(0.45) == [
        "Other processes took 45% of the cores meanwhile: run this again on a quiet machine."
    ]


def test_without_targets_only_the_capacity_is_said() -> None:
    found = held("without drafts", PACE, LENGTHS, NO_TARGETS, None)
    assert (found.within, found.at_rate) == ({}, None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--answer", "9"], "--prompt is missing; it is a number of tokens"),
        (["--prompt", "9"], "--answer is missing; it is a number of tokens"),
        (["--prompt", "0", "--answer", "9"], "--prompt"),
        (["--prompt", "9", "--answer", "9", "--rate", "0"], "a number of requests a second above 0"),
        (["--prompt", "9", "--answer", "9", "--speculative-policy", "off"], "leave it out"),
        (["--prompt", "9", "--answer", "9", "--no-such-flag"], "no-such-flag"),
    ],
)
def test_what_it_cannot_plan_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_is_measured_with_and_without_drafts(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--prompt", "20", "--answer", "10", "--rate", "0.05", "--seconds", "0.1", "--json"]
    engine = ["--max-num-seqs", "2", "--kv-cache-memory", "8MiB", "--max-model-len", "256", "--backend", "torch"]
    targets = ["--slo-ttft-ms", "10000", "--slo-tpot-ms", "5000"]
    assert main(["plan", str(tiny_checkpoint), *lengths, *engine, *targets, "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [way["name"] for way in found["ways"]] == ["without drafts", "with drafts"]
    assert all(way["capacity"] > way["within"]["0.9"] > 0 for way in found["ways"])
    assert all(way["at_rate"]["attainment"] > 0.9 for way in found["ways"])
    best = found["best_draft_length"]
    assert best["by_sequences"][0]["from"] == 1
    assert best["by_rate"][0]["from"] == 0
    assert {each["tokens"] for loads in best.values() for each in loads} <= {0, 1, 2, 4, 8, 16}
