"""Wrappers put one number into the call of the planner, and change nothing else.

The wrapper here does what FlashInfer's do: it looks its module up in every plan, and finds the same one as all the
others. The real ones, over the real planner, are in test_planner.

Bugs these tests have been seen to catch: the number one place further; a negative number taken for none; a
module's own plan replaced, for all wrappers; what was planned not returned; other attributes of a module not
found.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from faser.kernels.cuda.flashinfer.library import planning_wrapper

PLANNED: list[tuple[Any, ...]] = []
ARGUMENTS: tuple[Any, ...] = (*range(100, 116), -1, False, 0, 0, False)


def planned(*arguments: Any) -> list[Any]:
    PLANNED.append(arguments)
    return [arguments[18]]


MODULE = SimpleNamespace(plan=planned, paged_run=lambda q: f"attention of {q}")


class Wrapper:
    """Like FlashInfer's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cached_module: Any = None
        self.is_ready = self._cached_module is not None

    def plan(self, *arguments: Any) -> list[Any]:
        self._cached_module = MODULE
        found: list[Any] = self._cached_module.plan(*arguments)
        return found

    def run(self, q: str) -> str:
        found: str = self._cached_module.paged_run(q)
        return found


def wrapper_without(left_out_blocks: int, name: str = "draft") -> Any:
    found = planning_wrapper(Wrapper)(name)
    found.left_out_blocks = left_out_blocks
    return found


def test_plans_leave_out_a_wrappers_number_of_blocks_which_may_be_negative() -> None:
    PLANNED.clear()
    own, whole = Wrapper("whole"), planning_wrapper(Wrapper)("whole")
    draft, many = wrapper_without(224), wrapper_without(-384)
    assert not draft.is_ready
    for wrapper, blocks in ((draft, 224), (own, 0), (whole, 0), (many, -384), (draft, 224), (own, 0)):
        assert wrapper.plan(*ARGUMENTS) == [blocks]
        assert PLANNED[-1] == (*ARGUMENTS[:18], blocks, *ARGUMENTS[19:])
    assert len(PLANNED) == 6


def test_all_else_is_as_without_a_lane() -> None:
    wrapper = wrapper_without(224)
    wrapper.plan(*ARGUMENTS)
    assert isinstance(wrapper, Wrapper)
    assert (type(wrapper).__name__, wrapper.name, wrapper.run("q")) == ("Wrapper", "draft", "attention of q")


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (ARGUMENTS[:16], "plans with 16 arguments"),
        ((*ARGUMENTS, 0), "plans with 22 arguments"),
        ((*ARGUMENTS[:17], 0, False, 0, False), r"plans with \(0, False\)"),
        ((*ARGUMENTS[:18], 64, 0, False), "leaves out 64 blocks by itself"),
    ],
)
def test_another_planner_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        wrapper_without(224).plan(*arguments)
