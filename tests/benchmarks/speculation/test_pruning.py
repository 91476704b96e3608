"""The table of early pruning: ratios to off, and answers that differ from those of the same round."""

from benchmarks.cells import Cell
from benchmarks.speculation.pruning import OFF, ON, Run, records, table


def run(seconds: float, *answers: tuple[int, ...]) -> Run:
    return Run(answers=answers, seconds=seconds, drafted=10, pruned=1, flagged=2, wrong=1)


def test_a_mode_is_compared_with_off_in_the_same_round() -> None:
    off = [run(1.0, (1, 2), (3, 4)), run(2.0, (5, 6), (7, 8))]
    on = [run(2.0, (1, 2), (3, 4)), run(4.0, (5, 6), (7, 9))]
    cell = Cell(labels={"drafter": "d", "requests": 2}, runs={OFF: off, ON: on})

    found = {each["mode"]: each for each in records([cell])}

    assert (found[OFF]["ratio"], found[ON]["ratio"]) == (1.0, 0.5)
    assert (found[OFF]["other_answers"], found[ON]["other_answers"]) == (0, 1)
    assert (found[ON]["dropped_share"], found[ON]["false_share"]) == (0.1, 0.5)
    assert "| d | 2 | on | 1.5 | 0.500 | 10.0% of 20 | 4 | 50.0% | 1 |" in table([cell])
