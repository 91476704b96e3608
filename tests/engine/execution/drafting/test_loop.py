"""The drafting loop: who goes on to the next pass, what is kept, and what the distributions belong to.

Planted bugs that these tests have caught: the price of a pass is looked up for those that drafted, not for those
that would go on; a token below the price of its row is kept; distributions in the order of the passes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faser.engine.contract.plan import SequenceStart, StopRule
from faser.engine.execution.drafting.loop import DraftInput, ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import DraftRows, DraftTokens
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.types.arrays import Ints
from tests.engine.execution.draft_lines import margins_of, tokens_of
from tests.engine.execution.drafting.driving import BLOCK_SIZE, MAX_ROWS, NUM_BLOCKS, make_runner

KNOWN = 3  # tokens of every sequence
DEPTH = 5


@dataclass
class ScriptedChoice:
    """Samples token `position` with the scripted margin of (slot, position). Records its calls."""

    margins: Mapping[tuple[int, int], float]
    draws: bool = True
    calls: list[list[int]] = field(default_factory=list)
    draft_starts: set[tuple[int, int]] = field(default_factory=set)

    def start(self, start: SequenceStart) -> None:
        raise AssertionError(f"slot {start.slot} is started")

    def choose(self, logits: Tensor, rows: DraftRows, _ids: Ints | None = None) -> DraftTokens:
        slots, positions = rows.slots, rows.positions
        assert len(logits) == len(slots)
        self.draft_starts.update(zip(slots.tolist(), rows.draft_starts.tolist(), strict=True))
        self.calls.append(slots.tolist())
        margins = [self.margins[key] for key in zip(slots.tolist(), positions.tolist(), strict=True)]
        probs = torch.zeros(len(slots), 1000, dtype=torch.float64)
        probs[torch.arange(len(slots)), torch.from_numpy(100 * slots + positions)] = 1.0
        return DraftTokens(token_ids=positions.copy(), margins=np.array(margins), probs=probs)


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> Runner:
    return make_runner(tiny_checkpoint)


def make_loop(runner: Runner, choice: ScriptedChoice, num_slots: int) -> PassLoop:
    table = BlockTable(num_slots, 16)
    each = NUM_BLOCKS // num_slots
    for slot in range(num_slots):
        table.append(slot, tuple(range(slot * each, slot * each + min(each, 16))))
    return PassLoop(ModelPasses(runner, table, max_rows=MAX_ROWS), choice)


def inputs_of(limits: list[int]) -> list[DraftInput]:
    return [
        DraftInput(slot=slot, start=0, token_ids=tuple(range(KNOWN)), max_tokens=limit)
        for slot, limit in enumerate(limits)
    ]


def expected_lengths(margins: Mapping[tuple[int, int], float], limits: list[int], stop: StopRule) -> list[int]:
    """Oracle: the rule's words, sequence by sequence."""
    lengths = [0] * len(limits)
    survival = [1.0] * len(limits)
    going = list(range(len(limits)))
    while going:
        on = []
        for s in going:
            margin = margins[s, KNOWN + lengths[s]]
            survival[s] *= 1 / (1 + math.exp(-(stop.intercept + stop.slope * margin)))
            if survival[s] > stop.row_price:
                lengths[s] += 1
                if lengths[s] < limits[s]:
                    on.append(s)
        excess = sum(survival[s] - stop.row_price for s in on)
        going = on if on and excess > stop.pass_prices[len(on) - 1] else []
    return lengths


@given(
    st.lists(st.integers(1, DEPTH), min_size=1, max_size=4),
    st.lists(st.floats(0, 4), min_size=4 * DEPTH, max_size=4 * DEPTH),
    st.floats(0, 0.6),
    st.lists(st.floats(0, 1.5), min_size=4, max_size=4),
)
def test_drafts_end_where_the_stop_rule_says(
    runner: Runner, limits: list[int], drawn: list[float], row_price: float, pass_prices: list[float]
) -> None:
    """Oracle: the plain loop. Its sums may differ by rounding, so the prices lie off every attainable sum."""
    stop = StopRule(row_price=row_price, pass_prices=tuple(pass_prices), intercept=-0.5, slope=1.1)
    margins = {(s, KNOWN + k): drawn[s * DEPTH + k] for s in range(4) for k in range(DEPTH)}
    choice = ScriptedChoice(margins)
    found = make_loop(runner, choice, len(limits)).draft(inputs_of(limits), stop)
    lengths = found.lengths.tolist()
    assert lengths == expected_lengths(margins, limits, stop)
    for s, length in enumerate(lengths):
        assert tokens_of(found)[s] == tuple(range(KNOWN, KNOWN + length))
        assert margins_of(found)[s] == tuple(margins[s, KNOWN + k] for k in range(length))
        assert found.num_fed[s] in (length, length - 1)
    assert found.passes == len(choice.calls)
    assert found.probs is not None
    expected = [100 * s + KNOWN + k for s, length in enumerate(lengths) for k in range(length)]
    assert found.probs.argmax(-1).tolist() == expected


def test_without_a_rule_every_sequence_drafts_max_tokens(runner: Runner) -> None:
    margins = {(s, KNOWN + k): 0.0 for s in range(3) for k in range(DEPTH)}
    choice = ScriptedChoice(margins)
    found = make_loop(runner, choice, 3).draft(inputs_of([2, 5, 1]), None)
    assert found.lengths.tolist() == [2, 5, 1]
    assert found.num_fed.tolist() == [1, 4, 0]
    assert choice.calls == [[0, 1, 2], [0, 1], [1], [1], [1]]
    assert choice.draft_starts == {(slot, KNOWN) for slot in range(3)}


def test_until_ends_all_drafts_where_they_are(runner: Runner) -> None:
    """The passes over the inputs, here two, are always made: the first tokens come from them."""
    margins = {
        (s, position): 1.0 for s, length in enumerate([3, MAX_ROWS]) for position in range(length, length + 5)
    }
    asked = [
        DraftInput(slot=s, start=0, token_ids=tuple(range(length)), max_tokens=5)
        for s, length in enumerate([3, MAX_ROWS])
    ]
    for allowed in range(4):
        choice = ScriptedChoice(margins)
        answers = iter([False] * allowed + [True])
        found = make_loop(runner, choice, 2).draft(asked, None, lambda answers=answers: next(answers))  # type: ignore[misc]
        assert found.passes == 2 + allowed
        assert found.lengths.tolist() == [1 + allowed] * 2
        assert found.num_fed.tolist() == [allowed] * 2
        assert found.probs is not None
        assert len(found.probs) == 2 * (1 + allowed)


def test_inputs_are_computed_in_pieces_of_at_most_max_rows(runner: Runner) -> None:
    lengths = [5, 2 * MAX_ROWS + 3, 1, MAX_ROWS]
    margins = dict.fromkeys(enumerate(lengths), 1.0)
    choice = ScriptedChoice(margins)
    asked = [
        DraftInput(slot=s, start=0, token_ids=tuple(range(length)), max_tokens=1)
        for s, length in enumerate(lengths)
    ]
    found = make_loop(runner, choice, 4).draft(asked, None)
    assert tokens_of(found) == [(length,) for length in lengths]
    assert found.passes == -(-sum(lengths) // MAX_ROWS)
    assert [slot for call in choice.calls for slot in call] == [0, 1, 2, 3]
    assert 4 * -(-max(lengths) // BLOCK_SIZE) <= NUM_BLOCKS


def test_no_input_costs_no_pass(runner: Runner) -> None:
    found = make_loop(runner, ScriptedChoice({}), 1).draft([], None)
    assert not len(found.lengths)
