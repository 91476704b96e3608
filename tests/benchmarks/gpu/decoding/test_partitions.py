"""Phase overlap of the bench programs for a GPU: their parts, and that they run on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import report as lane_report
from benchmarks.gpu.decoding import overlap
from benchmarks.gpu.decoding.overlap import ARMS, pictures, rows_of
from benchmarks.gpu.engines import Wanted, close, made_up_costs, open_engine
from benchmarks.gpu.models import Walk, Walking, write_shape
from benchmarks.gpu.phases import phases_named, run_here
from benchmarks.gpu.plan import ON_CPU, Plan
from benchmarks.gpu.steps import answers
from faser.engine.execution.overlap.partition import core_numbers
from faser.types.sampling import SamplingParams


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SAID = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


def test_a_walk_is_one_cycle_for_each_acceptance_and_guesses_are_right_as_often_as_wanted() -> None:
    """Planted: wrong guesses that are right by chance; a cycle that leaves its tokens."""
    walk = Walk.drawn(1000, (0.9, 0.6))
    for place, acceptance in enumerate((0.9, 0.6)):
        token, seen = place, set()
        while token not in seen:
            seen.add(token)
            token = int(walk.successor[token])
        assert seen == set(range(place, 1000, 2))
        right = np.mean([walk.guess[each] == walk.successor[each] for each in seen])
        assert right == pytest.approx(acceptance)
    assert sorted(walk.guess) == list(range(1000))


def test_prompts_of_cycles_differ_in_their_last_tokens_alone() -> None:
    walk = Walk.drawn(100, (0.9, 0.8, 0.6))
    one, other = walk.prompts(0, 3, 20), walk.prompts(2, 3, 20)
    assert [each[:-1] for each in one] == [each[:-1] for each in other]
    assert {each[-1] % 3 for each in one} == {0}
    assert {each[-1] % 3 for each in other} == {2}
    assert len({each[:5] for each in one}) == 3


@pytest.mark.parametrize("acceptance", [1.5, -0.1])
def test_an_acceptance_that_is_no_share_is_refused(acceptance: float) -> None:
    with pytest.raises(ValueError, match=f"an acceptance is {acceptance}; it must lie between 0 and 1"):
        Walk.drawn(10, (acceptance,))


def test_a_model_with_a_tied_head_cannot_walk(tmp_path: Path) -> None:
    directory = write_shape(tmp_path, ON_CPU.draft)
    with pytest.raises(ValueError, match="a vocabulary of 512 and a tied head; a walk over 512 tokens"):
        Walking.of(directory, Walk.drawn(512, (0.5,)).guess, "cpu")


@pytest.mark.slow
@pytest.mark.full
def test_models_walk_whoever_drafts_and_drafts_are_accepted_as_often_as_wanted(tmp_path: Path) -> None:
    """Planted: the drafter's guesses for the target's successors, and the inverse of the walk."""
    plan = Plan(out=tmp_path, dry_run=True)
    walk = Walk.drawn(512, (0.9, 0.5))
    target = write_shape(tmp_path / "target", ON_CPU.target)
    draft = write_shape(tmp_path / "draft", ON_CPU.draft | {"tie_word_embeddings": False})
    opened = open_engine(
        plan,
        Wanted(
            target=target,
            draft=draft,
            sequences=4,
            context=32,
            rows=128,
            sources=lambda directory: Walking.of(
                directory, walk.successor if directory == target else walk.guess, "cpu"
            ),
            speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 1},
            costs=made_up_costs(),
            overlap="auto",
        ),
    )
    engine, shares = opened.engine, []
    for policy in ("off", "fixed"):
        engine.use_policy(policy, None if policy == "off" else 1, overlap="off")
        for place in (0, 1):
            before = engine.stats().speculation
            prompts = walk.prompts(place, 4, 32)
            said = answers(
                engine, prompts, lambda _: SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
            )
            for prompt, answer in zip(prompts, said, strict=True):
                line = (prompt[-1], *answer)
                assert [int(walk.successor[each]) for each in line[:-1]] == list(answer)
            after = engine.stats().speculation
            assert before is not None
            assert after is not None
            verified = sum(each.verified for each in after.methods) - sum(each.verified for each in before.methods)
            accepted = sum(each.accepted for each in after.methods) - sum(each.accepted for each in before.methods)
            shares.append(accepted / max(verified, 1))
    close(opened)
    assert shares[:2] == [0.0, 0.0]
    assert shares[2] == pytest.approx(0.9, abs=0.1)
    assert shares[3] == pytest.approx(0.5, abs=0.15)


def turns_of(rates: dict[str, float], round_: int) -> list[dict[str, object]]:
    cell = {"drafter": "1B", "partition": "sm", "acceptance": 0.8, "sequences": 4}
    return [
        {
            **cell,
            "round": round_,
            "policy": arm.name,
            "tokens_per_s": rates[arm.name],
            "ahead": 0.5,
            "accepted": 0.8,
        }
        for arm in ARMS
    ]


def test_ratios_are_to_serial_of_the_same_round_and_gains_to_the_best_other_way() -> None:
    """Planted: medians of rates before ratios; the gain over serial where plain steps were faster."""
    turns = [
        *turns_of({"off": 50.0, "serial": 100.0, "ahead": 120.0, "auto": 115.0}, 0),
        *turns_of({"off": 15.0, "serial": 10.0, "ahead": 18.0, "auto": 10.0}, 1),
        *turns_of({"off": 5.0, "serial": 10.0, "ahead": 11.0, "auto": 11.0}, 2),
        *turns_of({"off": 5.0, "serial": 10.0, "ahead": 11.0, "auto": 11.0}, 3)[:2],
    ]
    (row,) = rows_of(turns)
    assert row["rounds"] == 3
    assert row["ahead"] == 1.2
    assert row["gain"] == 1.2
    assert row["off"] == 0.5
    drawn = pictures([row])
    assert set(drawn) == {"overlap-1B-sm.svg"}
    assert "1.2" in lane_report.overlap({"rows": [row]})


@pytest.mark.slow
@pytest.mark.skipif(len(core_numbers()) < 2, reason="two lanes take two cores")
@pytest.mark.full
def test_overlap_compares_all_ways_in_every_cell_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "LEAST_AHEAD", 0.0)  # how fast a tiny model is here decides nothing
    (phase,) = phases_named(["overlap"])
    record = run_here(Plan(out=tmp_path, dry_run=True), phase, 200.0, lambda _: None)
    assert record.error is None
    assert len(record.result["rows"]) == len(ON_CPU.overlap_acceptances) * len(ON_CPU.overlap_batches)
    assert record.result["lanes"][0]["came"] == "cores"
    assert len(record.result["gaps"]) == len(record.result["rows"])
    serial = [turn for turn in record.result["turns"] if turn["policy"] in ("off", "serial")]
    assert {(turn["ahead"], turn["pairs"]) for turn in serial} == {(0.0, 0)}
    forced = [turn for turn in record.result["turns"] if turn["policy"] == "ahead"]
    assert sum(turn["ahead"] for turn in forced) > 0
