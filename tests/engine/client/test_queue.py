"""Room in the queue: against its rule said in another way, and against floods of tenants that never stop.

The speed of a queue against queues whose speed is known. All times are made up.

When frequent preemption is logged. The counts and the times are made up.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from faser.engine.client.queue import NO_TENANT, PreemptionLog, QueueRoom, QueueSpeed


def filled(room: QueueRoom, tenant: str, num_samples: int = 1) -> int:
    """How many samples a tenant can send, num_samples at a time, until it is refused."""
    count = 0
    while not room.missing(tenant, num_samples):
        room.take(tenant, num_samples)
        count += num_samples
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_tenant_holds_at_most_eight_for_each_that_it_leaves_free(seed: int) -> None:
    """Oracle: the rule as the source says it, looked up in a list of all samples."""
    rng = random.Random(seed)
    slots, waiting = rng.randint(1, 12), rng.choice([0, 1, 5, 30, 200])
    room, held = QueueRoom(num_slots=slots, num_waiting=waiting), list[str]()
    accepted = Counter[bool]()
    for _ in range(600):
        tenant, asked = rng.choice("aaaab"), rng.choice([1, 1, 2, 9])
        own, together = held.count(tenant) + asked, len(held) + asked
        free = slots + waiting - together
        expected = together <= slots or (free >= 0 and own <= 8 * (free + 1))
        assert (room.missing(tenant, asked) == 0) is expected
        accepted[expected] += 1
        if expected:
            room.take(tenant, asked)
            held += [tenant] * asked
        elif rng.random() < 0.5 and held:
            leaving = held.pop(rng.randrange(len(held)))
            room.give_back(leaving, 1)
        assert room.num_samples == len(held)
    assert accepted[True]
    assert accepted[False]


@pytest.mark.parametrize("seed", range(20))
def test_after_as_many_ends_as_were_missing_there_is_room_whoever_they_were(seed: int) -> None:
    rng = random.Random(seed)
    room, held = QueueRoom(num_slots=4, num_waiting=150), list[str]()
    for tenant in "abc":
        held += [tenant] * filled(room, tenant)
    for _ in range(30):
        tenant, asked = rng.choice("abcd"), rng.randint(1, 20)
        missing = room.missing(tenant, asked)
        for _ in range(missing):
            room.give_back(held.pop(rng.randrange(len(held))), 1)
        assert room.missing(tenant, asked) == 0
        room.take(tenant, asked)
        held += [tenant] * asked


@pytest.mark.parametrize("num_samples", [1, 7, 300])
def test_a_flood_leaves_room_that_others_find(num_samples: int) -> None:
    room = QueueRoom(num_slots=64, num_waiting=1024)
    filled(room, "flood", num_samples)
    assert 0.7 * 1088 <= room.num_samples <= 8 / 9 * 1089
    for tenant in ("one", "another", "a third"):
        assert not room.missing(tenant, 1)
        filled(room, tenant)


def test_tenants_that_never_stop_come_to_equal_parts() -> None:
    """They are served in turn, and each sends again at once, the first one more eagerly than the others."""
    room, held = QueueRoom(num_slots=4, num_waiting=300), Counter[str]()
    held["a"] = filled(room, "a")
    for _ in range(2000):
        for tenant in "abc":
            if held[tenant]:
                room.give_back(tenant, 1)
                held[tenant] -= 1
            for eager in "aaabc":
                if not room.missing(eager, 1):
                    room.take(eager, 1)
                    held[eager] += 1
    assert max(held.values()) - min(held.values()) <= 9
    assert min(held.values()) >= 304 * 8 // 25 - 9


@pytest.mark.parametrize("slots, waiting", [(1, 0), (4, 0), (64, 0), (1, 1), (4, 4), (64, 1024), (3, 17)])
def test_the_most_of_one_tenant_is_accepted_at_once_and_one_more_never(slots: int, waiting: int) -> None:
    room = QueueRoom(num_slots=slots, num_waiting=waiting)
    most = room.most_of_one
    assert most >= slots
    assert not room.missing("a", most)
    assert room.missing("a", most + 1)


def test_samples_that_do_not_have_to_wait_are_always_accepted() -> None:
    room = QueueRoom(num_slots=64, num_waiting=0)
    assert filled(room, "a") == 64


def test_an_engine_that_nobody_shares_may_be_filled() -> None:
    room = QueueRoom(num_slots=64, num_waiting=1024)
    assert filled(room, NO_TENANT) == room.most_of(NO_TENANT) == 1088


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
    before = speed.wait_s(50)  # an idle hour goes by here, of which it is not informed
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


def warnings(counts: Sequence[tuple[float, int]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that are logged. counts: (seconds, preemptions since the engine started)."""
    log = PreemptionLog(max_num_seqs=64)
    for at_s, count in counts:
        log.note(count, at_s, 1 << 20)
    return caplog.messages


def test_a_storm_is_one_line_with_the_settings_that_help(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warnings([(5000 + i / 100, i) for i in range(5000)], caplog)
    assert line == (
        "the KV cache is too small for this load: 20 sequences were preempted within a minute, and what they had "
        "computed is computed again; raise --kv-cache-memory, which is 1MiB, or lower --max-num-seqs, which is 64"
    )


def test_a_storm_that_lasts_is_reported_every_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    assert len(warnings([(5000 + i, i) for i in range(1500)], caplog)) == 3


def test_a_preemption_now_and_then_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings([(5000 + 4 * i, i) for i in range(1000)], caplog) == []


def test_an_engine_that_was_started_again_counts_from_zero(caplog: pytest.LogCaptureFixture) -> None:
    counts = [(5000 + i, i) for i in range(15)] + [(5020 + i, i) for i in range(15)]
    assert warnings(counts, caplog) == []
    counts += [(5040 + i, 15 + i) for i in range(15)]
    assert len(warnings(counts, caplog)) == 1
