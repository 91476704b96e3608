"""Fair shares: how long one tenant waits next to another's flood, in steps of a real scheduler."""

from dataclasses import replace

import pytest

from faser.types.request import Request
from tests.engine.driving import Driver, request

ANSWER = 8  # tokens
SLOTS = 4


def flood(num_prompts: int, tenant: str) -> list[Request]:
    """One client's request of many prompts, which the front-end has split up."""
    return [
        replace(request(f"flood-{i}", [i + 100] * 6, max_tokens=ANSWER, at_s=i * 1e-6), tenant=tenant)
        for i in range(num_prompts)
    ]


def asked_by(tenant: str, name: str, *, at_s: float = 1.0, priority: int = 0) -> Request:
    return replace(request(name, [7, 8, 9], max_tokens=ANSWER, at_s=at_s, priority=priority), tenant=tenant)


def steps_until_finished(driver: Driver, name: str) -> int:
    for steps in range(1, 3000):
        driver.step()
        last = driver.samples[name, 0].last
        if last is not None and last.finish_reason is not None:
            return steps
    raise AssertionError(f"{name} has not come to its end")


def test_one_request_of_300_prompts_delays_another_tenant_by_one_answer_not_by_300() -> None:
    driver = Driver(max_num_seqs=SLOTS, max_model_len=32)
    driver.add(*flood(300, "many"))
    driver.step()
    driver.add(asked_by("one", "mine"))

    assert steps_until_finished(driver, "mine") <= 2 * ANSWER + 2


def test_of_the_same_tenant_it_waits_its_turn() -> None:
    """The control of the test above: arrival decides within a tenant, so the flood comes first."""
    driver = Driver(max_num_seqs=SLOTS, max_model_len=32)
    driver.add(*flood(300, "many"))
    driver.step()
    driver.add(asked_by("many", "mine"))

    assert steps_until_finished(driver, "mine") >= 300 // SLOTS * ANSWER


def test_a_client_that_asks_one_thing_at_a_time_never_waits_for_more_than_an_answer() -> None:
    driver = Driver(max_num_seqs=SLOTS, max_model_len=32)
    driver.add(*flood(300, "many"))
    driver.step()
    for turn in range(10):
        driver.add(asked_by("one", f"mine-{turn}"))
        assert steps_until_finished(driver, f"mine-{turn}") <= 2 * ANSWER + 2


@pytest.mark.parametrize("num_tenants", [2, 3, 7])
@pytest.mark.full(but=("3",))
def test_tenants_that_always_wait_are_given_equal_tokens(num_tenants: int) -> None:
    """The bound of the paper: twice what one admission, or the answers of a full batch, can bring at once."""
    driver = Driver(max_num_seqs=SLOTS, max_model_len=64, num_blocks=128)
    names = [f"t{i}" for i in range(num_tenants)]
    for i, name in enumerate(names):
        length = 4 + 5 * i  # some want much more than others with each of their requests
        driver.add(
            *(
                replace(request(f"{name}-{j}", [i + 50, j + 100] * 3, max_tokens=length, at_s=i), tenant=name)
                for j in range(200 // length * 4)
            )
        )
    bound = 2 * max(6, 2 * SLOTS * (4 + 5 * (num_tenants - 1)))
    given = dict.fromkeys(names, 0)
    for _ in range(250):
        driver.step()
    for (request_id, _), sample in driver.samples.items():
        given[request_id.partition("-")[0]] += 2 * len(sample.token_ids) + (6 if sample.token_ids else 0)
    assert min(given.values()) > 0
    assert max(given.values()) - min(given.values()) <= bound, given


def test_a_better_priority_goes_before_fair_shares() -> None:
    driver = Driver(max_num_seqs=1, policy="priority", max_model_len=32)
    driver.add(*flood(20, "many"))
    driver.step()
    driver.add(asked_by("one", "fair"), replace(asked_by("many", "urgent"), priority=-1))

    assert steps_until_finished(driver, "urgent") <= 2 * ANSWER
    assert driver.samples["fair", 0].last is None


def test_a_preempted_sequence_keeps_its_place_before_another_tenants_newcomers() -> None:
    """Two sequences outgrow the pool. The one that gives way runs again before anybody else is admitted."""
    driver = Driver(num_blocks=6, max_model_len=24, max_num_seqs=2)
    a = replace(request("a", list(range(100, 107)), max_tokens=16, at_s=1.0), tenant="one")
    b = replace(request("b", list(range(50, 57)), max_tokens=16, at_s=2.0), tenant="two")
    driver.add(a, b)
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step()
    newcomers = [replace(each, tenant="three") for each in flood(5, "three")]
    driver.add(*newcomers)
    driver.run()

    starts = [start.token_ids for plan in driver.executor.steps for start in plan.started]
    again = next(i for i, token_ids in enumerate(starts) if token_ids[:7] == b.prompt_token_ids and i > 1)
    assert again == 2
    driver.check(a, b, *newcomers)
