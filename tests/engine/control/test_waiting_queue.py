"""The queue's order against a scan of everything that waits. Oracle: the rule itself, written as one minimum."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import SequenceBlocks
from faser.engine.control.sequence import Sequence
from faser.engine.control.waiting_queue import DEBT_KEPT_S, WaitingQueue
from tests.engine.driving import request


def kind_of(sequence: Sequence) -> int:
    return int(sequence.request.request_id) % 3


def is_of(kind: int) -> Callable[[Sequence], bool]:
    return lambda each: kind_of(each) == kind


@dataclass
class Driver:
    """A queue, and what waits in it and runs outside of it."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    queue: WaitingQueue = field(init=False)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_made: int = 0

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.clock, kind_of)

    def arrive(self, tenant: str, *, priority: int = 0, prompt: int = 4, at_s: float = 0.0) -> Sequence:
        self.num_made += 1
        asked = replace(request(str(self.num_made), [1] * prompt), tenant=tenant)
        sequence = Sequence(
            asked,
            0,
            priority_key=(priority, at_s, self.num_made),
            tenant=self.queue.join(tenant, 1),
            seed=0,
            table=SequenceBlocks(b""),
            max_total=100,
            eos_token_ids=frozenset(),
        )
        self.queue.add(sequence)
        self.waiting.append(sequence)
        return sequence

    def admit(self) -> Sequence:
        first = self.queue.first()
        self.queue.admit(first, num_uncached=first.num_tokens)
        first.first_scheduled_s = 0.0
        self.waiting.remove(first)
        self.running.append(first)
        return first

    def preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.queue.add(sequence)
        self.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.queue.remove(sequence)
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self.queue.leave(sequence)

    def expected_first(self) -> Sequence:
        def rank(each: Sequence) -> tuple[object, ...]:
            preempted = each.first_scheduled_s is not None
            service = -1 if preempted else each.tenant.service
            return each.priority_key[0], service, each.priority_key

        return min(self.waiting, key=rank)

    def expected_first_of(self, kind: int) -> Sequence | None:
        """Tenants keep the turns that they have by all their sequences."""
        newcomers = [each for each in self.waiting if each.first_scheduled_s is None]

        def rank(each: Sequence) -> tuple[object, ...]:
            if each.first_scheduled_s is not None:
                return each.priority_key[0], -1, each.priority_key, each.priority_key
            line = [
                other.priority_key
                for other in newcomers
                if other.tenant is each.tenant and other.priority_key[0] == each.priority_key[0]
            ]
            return each.priority_key[0], each.tenant.service, min(line), each.priority_key

        return min((each for each in self.waiting if kind_of(each) == kind), key=rank, default=None)

    def check(self) -> None:
        self.queue.check_invariants()
        for kind in range(3):
            assert self.queue.first_of(is_of(kind)) is self.expected_first_of(kind)
        assert set(self.queue) == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        if self.waiting:
            assert self.queue.first() is self.expected_first()


@pytest.mark.parametrize("seed", range(20))
def test_the_first_is_the_one_that_a_scan_of_all_finds(seed: int) -> None:
    rng, driver = random.Random(seed), Driver()
    for _ in range(400):
        match rng.choice(("arrive", "arrive", "admit", "generate", "generate", "preempt", "end")):
            case "arrive":
                tenant, priority = rng.choice("abcde"), rng.choice((0, 0, 0, -1, 5))
                driver.arrive(tenant, priority=priority, prompt=rng.randint(1, 30), at_s=rng.random())
            case "admit" if driver.waiting:
                driver.admit()
            case "generate" if driver.running:
                rng.choice(driver.running).tenant.generated(rng.randint(1, 9))
            case "preempt" if driver.running:
                driver.preempt(rng.choice(driver.running))
            case "end" if driver.waiting or driver.running:
                driver.end(rng.choice(driver.waiting + driver.running))
        driver.check()


def test_tenants_take_turns_by_the_tokens_they_were_given() -> None:
    """A sends prompts of 30 tokens, B of 10: B has three turns for one of A."""
    driver = Driver()
    for _ in range(40):
        driver.arrive("a", prompt=30)
        driver.arrive("b", prompt=10)
    admitted = [driver.admit().tenant.name for _ in range(40)]
    assert (admitted.count("a"), admitted.count("b")) == (10, 30)


def test_a_generated_token_counts_as_two_of_a_prompt() -> None:
    driver = Driver()
    for _ in range(20):
        driver.arrive("reader", prompt=20)
        driver.arrive("writer", prompt=1)
    admitted = []
    for _ in range(20):
        sequence = driver.admit()
        admitted.append(sequence.tenant.name)
        if sequence.tenant.name == "writer":
            sequence.tenant.generated(9)
            sequence.tenant.generated(1)  # with the prompt's token 21, a little more than the reader's 20
    assert admitted.count("writer") == 10


def test_cached_prompt_tokens_count_as_nothing() -> None:
    driver = Driver()
    first = driver.arrive("a", prompt=30)
    driver.queue.admit(first, num_uncached=2)
    assert first.tenant.service == 2


def test_nobody_saves_up_turns_while_idle() -> None:
    """B comes after A was given 1000 tokens, and gets every second turn from then on, not the next 100."""
    driver = Driver()
    for _ in range(200):
        driver.arrive("a", prompt=10)
    for _ in range(100):
        driver.admit()
    for _ in range(20):
        driver.arrive("b", prompt=10)
    admitted = [driver.admit().tenant.name for _ in range(20)]
    assert abs(admitted.count("a") - admitted.count("b")) <= 1


def test_nobody_is_made_to_pay_for_what_was_given_when_nobody_else_waited() -> None:
    """A was alone and generated much. B floods the queue; A's next request waits for one of B's, not for all."""
    driver = Driver()
    driver.arrive("a")
    long = driver.admit()
    long.tenant.generated(10_000)
    for _ in range(300):
        driver.arrive("b")
    driver.admit()
    mine = driver.arrive("a")
    assert [driver.admit() for _ in range(2)].index(mine) <= 1


def test_a_preempted_sequence_returns_before_newcomers_and_is_not_counted_twice() -> None:
    driver = Driver()
    driver.arrive("a", prompt=50)
    preempted = driver.admit()
    driver.arrive("b", prompt=1)
    before = preempted.tenant.service
    driver.preempt(preempted)
    driver.check()
    assert driver.admit() is preempted
    assert preempted.tenant.service == before


def test_priorities_come_first_whatever_was_given_before() -> None:
    driver = Driver()
    driver.arrive("a", priority=0)
    driver.admit().tenant.generated(1000)
    driver.arrive("b", priority=1)
    urgent = driver.arrive("a", priority=0)
    assert driver.admit() is urgent


def test_a_tenant_owes_for_a_minute_after_its_last_sequence() -> None:
    """A's bursts drain before B's queue does: without its debt A would be put before B each time."""
    driver = Driver()
    driver.arrive("a", prompt=10)
    burst = driver.admit()
    burst.tenant.generated(500)
    driver.arrive("b", prompt=10)
    driver.admit().tenant.service = 0  # of a tenant that has had less, as it came before A's burst
    for _ in range(2):
        driver.arrive("b", prompt=10)
    driver.end(burst)
    driver.clock.advance(DEBT_KEPT_S - 1)
    back = driver.arrive("a", prompt=10)
    driver.check()
    assert back.tenant is burst.tenant
    assert back.tenant.service == 1010
    assert [driver.admit().tenant.name for _ in range(3)] == ["b", "b", "a"]
    driver.end(back)
    driver.clock.advance(DEBT_KEPT_S + 1)
    assert driver.queue.join("a", 1).service == 0


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
@pytest.mark.full(but=("1.0",))
def test_tenants_that_do_not_come_back_are_forgotten(pause_s: float) -> None:
    driver = Driver()
    for _ in range(11_000):
        driver.end(driver.arrive(str(driver.num_made)))
        driver.clock.advance(pause_s)
    driver.check()
    assert len(driver.queue._tenants) == (10_000 if not pause_s else 60)


def test_the_heap_stays_small_while_priorities_come_and_go() -> None:
    """Each round puts an earlier arrival in front of a tenant's line, whose old entry is then no longer valid."""
    driver = Driver()
    driver.arrive("other", at_s=5000.0)
    for round_ in range(1000):
        driver.end(driver.arrive("a", at_s=4000.0 - round_))
        driver.check()
    (level,) = driver.queue._levels.values()
    assert len(level._turns) <= 16
