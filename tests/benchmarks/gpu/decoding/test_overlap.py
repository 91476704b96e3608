"""Phase `overlap` of the bench programs for a GPU: what it counts and compares, and what it notes of the host."""

import re
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from benchmarks.gpu import report as lane_report
from benchmarks.gpu.decoding.overlap import (
    AHEAD,
    ARMS,
    AUTO,
    OFF,
    SERIAL,
    decision_of,
    gaps_of,
    pictures,
    rows_of,
    sources_of,
    turns_of,
)
from benchmarks.gpu.decoding.partitions import TimedPartition
from benchmarks.gpu.models import Walk, Walking, write_shape
from benchmarks.gpu.plan import ON_CPU, Plan
from benchmarks.gpu.record import Json
from faser.engine.execution.models import tensors
from faser.engine.execution.overlap.partition import EVERYTHING, Draft, OverlapResult, Serial, Verify, synchronous

D = TypeVar("D")
V = TypeVar("V")

CELL = {"drafter": "1B", "partition": "sm", "acceptance": 0.8, "sequences": 4}


def turn(policy: str, rate: float, *, round_: int = 0, ahead: float = 0.0, **more: object) -> Json:
    return {
        **CELL,
        "round": round_,
        "policy": policy,
        "tokens_per_s": rate,
        "ahead": ahead,
        "accepted": 0.5,
        **more,
    }


def test_where_plain_steps_are_the_best_way_they_are_what_is_compared_with() -> None:
    """Planted: gains over serial alone, the best way without plain steps, and what another arm accepted or did."""
    (row,) = rows_of(
        [
            turn(OFF, 20.0),
            turn(SERIAL, 10.0, accepted=0.75),
            turn(AHEAD, 18.0, ahead=1.0),
            turn(AUTO, 17.0, ahead=0.25),
        ]
    )
    assert (row["gain"], row["auto_of_best"]) == (0.9, 0.85)
    assert (row["auto_ahead"], row["accepted"]) == (0.25, 0.75)


def cell(gain: float, **more: object) -> Json:
    return {**CELL, "gain": gain, "auto_of_best": 1.0, **more}


def points(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h\.01", svg)]


def test_lanes_leave_the_gpu_unless_a_cell_exceeds_the_least_gain() -> None:
    """Planted: the first cell decides; a cell of exactly 1.03 is enough."""
    rows = [{**CELL, "gain": 0.9}, {**CELL, "gain": 1.03, "sequences": 64}]
    assert decision_of(rows) == (
        "Best gain 1.03 (sm, 64 sequences, acceptance 0.8): no cell exceeds 1.03: `sm` lanes leave the GPU."
    )
    assert decision_of([*rows, {**CELL, "gain": 1.1}]).endswith(": lanes stay.")
    assert decision_of([]) == "No cell was measured: nothing follows."


def test_pictures_have_lines_of_their_own_acceptance() -> None:
    """Planted: the cells of all acceptances in every line."""
    rows = [
        cell(gain, ahead=gain, acceptance=acceptance, sequences=sequences) | {"auto": 1.0}
        for acceptance, gain in ((0.9, 1.3), (0.6, 0.9))
        for sequences in (1, 4)
    ]
    drawn = pictures(rows)
    assert len(points(drawn["overlap-1B-sm.svg"])) == 2 * len(rows)


def test_ways_take_turns_under_the_policies_that_their_names_say() -> None:
    assert {arm.name: (arm.policy, arm.overlap) for arm in ARMS} == {
        "off": ("off", "off"),
        "serial": ("faser", "off"),
        "ahead": ("faser", "on"),
        "auto": ("faser", "auto"),
    }


def test_prompts_walk_in_the_cycle_of_the_acceptance_that_their_rows_tell(tmp_path: Path) -> None:
    """Planted: the prompts of the first acceptance for all of them."""
    plan, walk = Plan(out=tmp_path, dry_run=True), Walk.drawn(512, (0.9, 0.6))
    for place, acceptance in enumerate(walk.acceptances):
        found = turns_of(plan, walk, place, {"drafter": "1B"}, TimedPartition(Serial()))
        assert found.about == {"drafter": "1B", "acceptance": acceptance}
        assert {prompt[-1] % 2 for prompt in found.prompts} == {place}
        assert len(found.prompts) == max(found.batches)


def test_the_target_walks_and_the_drafter_guesses(tmp_path: Path) -> None:
    """Planted: one of both for the other."""
    plan, walk = Plan(out=tmp_path, dry_run=True), Walk.drawn(512, (0.5,))
    shape = ON_CPU.draft | {"tie_word_embeddings": False}
    target, draft = (write_shape(tmp_path / name, shape) for name in ("target", "draft"))
    sources = sources_of(plan, walk, target)
    for directory, step in ((target, walk.successor), (draft, walk.guess)):
        wanted = Walking.of(directory, step, "cpu").get(tensors.HEAD)
        assert torch.equal(sources(directory).get(tensors.HEAD), wanted)


def test_a_successors_logit_is_far_above_all_others_and_embeddings_are_above_what_layers_add(
    tmp_path: Path,
) -> None:
    """Planted: embeddings as long as other weights, a successor whose logit is like the others'."""
    walk = Walk.drawn(512, (0.5,))
    directory = write_shape(tmp_path, ON_CPU.target)
    source = Walking.of(directory, walk.successor, "cpu")
    embedding, head = (source.get(name).float() for name in (tensors.EMBEDDING, tensors.HEAD))
    assert float(embedding.std()) == pytest.approx(32.0, rel=0.05)
    logits = embedding / embedding.square().mean(1, keepdim=True).sqrt() @ head.T
    best, others = logits.topk(2).values.unbind(1)
    assert logits.argmax(1).tolist() == walk.successor.tolist()
    assert float(best.mean()) == pytest.approx(20.0, rel=0.05)
    assert float((best - others).min()) > 5.0


class Scripted:
    """See Partition. moments: of each pair: called, draft began, verify began, and the ends."""

    name, share = "sm", 0.25

    def __init__(self, moments: list[tuple[float, float, float, float, float]]) -> None:
        self._moments = iter(moments)
        self.is_closed = False

    def shares(self) -> tuple[float, ...]:
        return (0.25,)

    def resize(self, share: float) -> None:
        assert share == 0.25

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        called_s, draft_s, verify_s, draft_ended_s, verify_ended_s = next(self._moments)
        return OverlapResult(
            drafted=draft(EVERYTHING, lambda: False),
            verified=verify(EVERYTHING).wait(),
            began_s=called_s,
            draft_began_s=draft_s,
            draft_ended_s=draft_ended_s,
            verify_began_s=verify_s,
            verify_ended_s=verify_ended_s,
        )

    def close(self) -> None:
        self.is_closed = True


def pair_of(timed: TimedPartition) -> None:
    timed.run_both(lambda _lane, _done: None, synchronous(lambda _lane: None))


def test_the_hosts_part_in_a_pair_is_told_once() -> None:
    """Planted: lanes swapped; the earlier end for the later one; pairs that are given again."""
    inner = Scripted([(1.000, 1.002, 1.001, 1.5, 1.6), (1.610, 1.616, 1.613, 1.9, 1.8), (2.0, 2.1, 2.2, 2.3, 2.4)])
    given = iter((1.003, 1.604, 1.611, 1.902, 2.2, 2.5))  # when verification was given, when both had returned
    timed = TimedPartition(inner, lambda: next(given))
    assert timed.taken() == {"pairs": 0}
    pair_of(timed)
    pair_of(timed)
    assert timed.taken() == {
        "pairs": 2,
        "draft_gap_ms": pytest.approx(4.0),
        "verify_gap_ms": pytest.approx(2.0),
        "given_ms": pytest.approx(2.0),
        "join_ms": pytest.approx(3.0),
        "between_ms": pytest.approx(13.0),
    }
    pair_of(timed)
    assert timed.taken()["between_ms"] is None
    timed.close()
    assert inner.is_closed


def test_gaps_are_those_of_turns_that_draft_ahead_by_cell() -> None:
    """Planted: turns of all policies; a cell's first turn for its median."""
    noted = {"draft_gap_ms": 1.0, "verify_gap_ms": 2.0, "given_ms": 1.5, "join_ms": 0.5, "between_ms": None}
    turns = [
        turn(AHEAD, 1.0) | noted | {"pairs": 2},
        turn(AHEAD, 1.0, round_=1) | noted | {"pairs": 3, "draft_gap_ms": 3.0, "between_ms": 4.0},
        turn(AUTO, 1.0) | noted | {"pairs": 9, "draft_gap_ms": 99.0},
        turn(OFF, 1.0) | {"pairs": 0},
        turn(AHEAD, 1.0) | {"pairs": 0, "sequences": 1},
    ]
    (row,) = gaps_of(turns)
    assert {name: row[name] for name in ("pairs", *noted)} == {
        "pairs": 5,
        "draft_gap_ms": 2.0,
        "verify_gap_ms": 2.0,
        "given_ms": 1.5,
        "join_ms": 0.5,
        "between_ms": 4.0,
    }
    text = lane_report.overlap({"gaps": [row]})
    assert "between_ms" in text
