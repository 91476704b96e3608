"""The speed of a queue against queues whose speed is known. All times are made up."""

import pytest

from faser.engine.client.queue import QueueSpeed


def after(num_ends: int, *, each_s: float, together: int = 1) -> QueueSpeed:
    """A queue that was never empty, in which so many samples ended at once, every so many seconds."""
    speed = QueueSpeed()
    for _ in range(num_ends // together):
        speed.pass_time(each_s * together)
        speed.end(together)
    return speed


@pytest.mark.parametrize("each_s", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("together", [1, 16])
def test_the_wait_is_the_number_of_samples_times_what_each_takes(each_s: float, together: int) -> None:
    """Batches end together; what one of their samples takes is still a share of the batch's time."""
    speed = after(2000, each_s=each_s, together=together)
    assert speed.wait_s(300) == pytest.approx(300 * each_s, rel=0.1)


def test_time_without_work_does_not_make_it_slower() -> None:
    speed = after(1000, each_s=0.1)
    before = speed.wait_s(50)  # an idle hour goes by here, of which it is not told
    speed.pass_time(0.1)
    speed.end(1)
    assert speed.wait_s(50) == pytest.approx(before, rel=0.01)


def test_it_follows_a_change_within_a_minute() -> None:
    speed = after(1000, each_s=0.1)
    for _ in range(60):
        speed.pass_time(1.0)
        speed.end(1)
    assert speed.wait_s(10) == pytest.approx(10.0, rel=0.2)


def test_before_anything_has_ended_each_takes_as_long_as_all_so_far() -> None:
    speed = QueueSpeed()
    assert speed.wait_s(5) == 0.0
    speed.pass_time(2.0)
    assert speed.wait_s(5) == 10.0


def test_a_queue_that_has_stopped_waits_longer_and_longer() -> None:
    speed = after(1000, each_s=0.1)
    waits = []
    for _ in range(6):
        waits.append(speed.wait_s(10))
        speed.pass_time(10.0)
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]
