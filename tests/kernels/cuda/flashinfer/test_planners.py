"""A lane's wrappers put one number into the call of the planner, and change nothing else.

The wrapper here does what FlashInfer's do: it looks its module up in every plan, and finds the same one as all the
others. The real ones, over the real planner, are in test_planner.

Bugs these tests have been seen to catch: one block for a processor; the number one place further; a module's own
plan replaced, for all wrappers; what was planned not returned; other attributes of a module not found.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from faser.kernels.cuda.flashinfer.planners import planning_wrapper

PLANNED: list[tuple[Any, ...]] = []
ARGUMENTS: tuple[Any, ...] = (*range(100, 116), -1, False, 0, 0)


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


def test_a_lanes_plans_leave_out_two_blocks_for_every_processor_that_it_does_not_have() -> None:
    PLANNED.clear()
    whole, draft, verify = (
        Wrapper("whole"),
        planning_wrapper(Wrapper, 112)("draft"),
        planning_wrapper(Wrapper, 20)("verify"),
    )
    assert not draft.is_ready
    for wrapper, idle_blocks in ((draft, 224), (whole, 0), (verify, 40), (draft, 224), (whole, 0)):
        assert wrapper.plan(*ARGUMENTS) == [idle_blocks]
        assert PLANNED[-1] == (*ARGUMENTS[:18], idle_blocks, *ARGUMENTS[19:])
    assert len(PLANNED) == 5


def test_all_else_is_as_without_a_lane() -> None:
    wrapper = planning_wrapper(Wrapper, 112)("draft")
    wrapper.plan(*ARGUMENTS)
    assert isinstance(wrapper, Wrapper)
    assert (type(wrapper).__name__, wrapper.name, wrapper.run("q")) == ("Wrapper", "draft", "attention of q")


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (ARGUMENTS[:16], "plans with 16 arguments"),
        ((*ARGUMENTS, 0), "plans with 21 arguments"),
        ((*ARGUMENTS[:17], 0, False, 0), r"plans with \(0, False\)"),
        ((*ARGUMENTS[:18], 64, 0), "leaves out 64 blocks by itself"),
    ],
)
def test_another_planner_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        planning_wrapper(Wrapper, 112)("draft").plan(*arguments)
