"""Two checkouts that take turns. Oracle: programs that write down who ran when; sums by hand.

Planted bugs that these tests have caught: one checkout always goes first; a failed program counts as an ended one;
the ratio of medians instead of the median of ratios.
"""

import argparse
import subprocess
from pathlib import Path

import pytest

from benchmarks.speed.checkouts import compare, options_of, summary

NOTES = """
import os, pathlib
said, name = pathlib.Path(ARGUMENTS[0]), pathlib.Path.cwd().name
def step():
    with said.open("a") as file:
        file.write("b" if name == "base" else "t")
measure("first", step)
measure("second", step)
"""


def options(directory: Path, *arguments: str) -> argparse.Namespace:
    base = directory / "base"
    base.mkdir()
    parser = options_of("", rounds=1, blocks=4, steps=3)
    return parser.parse_args([str(base), "out.json", *arguments])


def test_blocks_of_the_two_take_turns_and_each_goes_first_as_often(tmp_path: Path) -> None:
    said = tmp_path / "said"

    found = compare(NOTES, options(tmp_path, "--rounds", "2", "--steps", "2"), str(said))

    one_kind = 3 * ("ttbb" + "bbtt")  # of which the first two blocks are not counted
    assert said.read_text() == 4 * one_kind
    assert list(found) == ["first", "second"]
    assert found["first"]["geometric_mean"]["rounds"] == 8


def test_a_program_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compare("measure('one', lambda: None)\nraise SystemExit(3)", options(tmp_path))


def test_a_summary_of_pairs_is_made_of_ratios_within_the_pairs() -> None:
    found = summary([{"base": base, "this": this} for base, this in ((1.0, 3.0), (10.0, 15.0), (4.0, 2.0))])

    assert (found["base"], found["this"]) == (4.0, 3.0)
    assert (found["least"], found["ratio"], found["most"]) == (0.5, 1.5, 3.0)
    assert found["geometric_mean"]["mean"] == pytest.approx(2.25 ** (1 / 3), abs=1e-4)
