"""What lies between the samples of one runner and the first pass of another is marked, and nothing else."""

from typing import cast

from benchmarks.gpu.decoding.cycle_gap import GapMarks
from benchmarks.gpu.steps import DeviceClock
from faser.engine.execution.runner.runner import Runner


class Counting:
    """A clock that counts what was given to the device, and a runner that gives it that."""

    def __init__(self) -> None:
        self.given = 0

    def mark(self) -> int:
        return self.given

    def between_s(self, marks: tuple[int, int]) -> list[float]:
        return [float(marks[1] - marks[0])]

    def give(self, count: int) -> None:
        self.given += count


class Giving:
    def __init__(self, clock: Counting) -> None:
        self._clock = clock

    def sample(self, count: int) -> int:
        self._clock.give(count)
        return count

    forward = follow = sample


def test_gaps_are_between_samples_and_the_first_pass_that_follows() -> None:
    """Planted: the mark before the samples; every pass of a draft counted."""
    clock = Counting()
    target, drafter = Giving(clock), Giving(clock)
    marks = GapMarks(cast(DeviceClock, clock), cast(Runner, target), cast(Runner, drafter))
    drafter.forward(3)
    for gap in (2, 0):
        assert target.sample(7) == 7
        clock.give(gap)
        drafter.follow(5)
        drafter.forward(5)
    assert marks.seconds() == [2.0, 0.0]
    marks.forget()
    assert marks.seconds() == []
