"""When a drafter's state is compared with a cold one, why, and what follows.

Traffic is simulated: answers of all lengths that are easy or hard as a whole, some of whose prompts begin with
cached blocks, some of which are long; acceptance falls with the position and after prefix hits, as it may.

Planted bugs that these tests have caught: drafts that were cut whole count; refused first tokens count as
accepted; one answer may add any amount; after a comparison without a difference the old record is still expected;
a slot that was left is asked about; no condition for prefix hits; requests that edit their logits count;
positions without the prompt.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.plan import DrafterCheck
from faser.engine.control.speculation.drafter_watch import DrafterWatch
from faser.types.arrays import Floats
from tests.engine.control.speculation.building import ints

NUM_SLOTS = 8
MODEL, SUFFIX = (DRAFT_METHODS.index(name) for name in ("draft_model", "suffix"))
DAMAGED = 0.03  # chance of a draft by a damaged drafter


@dataclass
class Answer:
    """A running one. ease: log odds of its drafts. wanted: tokens."""

    prompt: int
    wanted: int
    ease: float
    has_hit: bool
    num_new: int = 0


@dataclass
class Traffic:
    """Slots that are always taken. damaged: which answers have a drafter with a damaged state."""

    seed: int
    most_tokens: int = 1500
    method: int = MODEL
    damaged: Callable[[Answer], bool] = lambda _: False
    differs: Callable[[DrafterCheck], bool] = lambda _: False
    watch: DrafterWatch = field(default_factory=lambda: DrafterWatch(NUM_SLOTS))
    running: dict[int, Answer] = field(default_factory=dict)
    shift: float = 0.0  # of all log odds
    checks: list[DrafterCheck] = field(default_factory=list)
    num_answers: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def serve(self, num_tokens: int) -> None:
        """Steps, 16 of which are handed over together, until that many tokens more have been answered."""
        while num_tokens > 0:
            for slot in range(NUM_SLOTS):
                if slot not in self.running:
                    self._start(slot)
            slots = np.repeat(np.arange(NUM_SLOTS), 16)
            known = np.array([each.num_new for each in self.running.values()]).repeat(16)
            right = self.random.random(len(slots)) < self._chances().repeat(16)
            new = known + np.tile(np.arange(1, 17), NUM_SLOTS)
            kept = (self.random.random(len(slots)) < 0.6).astype(np.int64)
            self.watch.take(slots, np.full_like(slots, self.method), kept, right * kept, new)
            while (check := self.watch.next_check()) is not None:
                self.checks.append(check)
                self.watch.checked(check, differed=self.differs(check))
            for slot, answer in [*self.running.items()]:
                answer.num_new += 16 + int((right * kept)[slots == slot].sum())
                if answer.num_new >= answer.wanted:
                    num_tokens -= answer.num_new
                    self.num_answers += 1
                    self.watch.release(slot)
                    del self.running[slot]

    def _start(self, slot: int) -> None:
        lengths = np.exp(self.random.uniform(np.log([20, 20]), np.log([2000, self.most_tokens]))).astype(int)
        prompt, wanted = lengths.tolist()
        ease, has_hit = 0.8 * self.random.normal(), bool(self.random.random() < 0.5)
        answer = Answer(prompt=prompt, wanted=wanted, ease=ease, has_hit=has_hit)
        self.running[slot] = answer
        self.running = dict(sorted(self.running.items()))
        self.watch.start(slot, answer.prompt, has_hit=answer.has_hit)

    def _chances(self) -> Floats:
        odds = [
            0.8 + self.shift + each.ease - 0.1 * math.log2((each.prompt + each.num_new) / 500) - 0.2 * each.has_hit
            for each in self.running.values()
        ]
        damaged = [self.damaged(each) for each in self.running.values()]
        return np.where(damaged, DAMAGED, 1 / (1 + np.exp(-np.array(odds))))


@pytest.mark.parametrize("most_tokens", [60, 1500, 4000])
def test_unchanged_traffic_raises_no_more_than_an_alarm_in_a_million_tokens(most_tokens: int) -> None:
    traffic = Traffic(seed=3, most_tokens=most_tokens)
    traffic.serve(400_000)
    assert traffic.watch.num_alarms == 0


@pytest.mark.full
@pytest.mark.parametrize("most_tokens", [60, 1500, 4000])
def test_alarms_in_ten_million_tokens_of_unchanged_traffic(most_tokens: int) -> None:
    alarms = 0
    for seed in range(5):
        traffic = Traffic(seed=seed, most_tokens=most_tokens)
        traffic.serve(2_000_000)
        alarms += traffic.watch.num_alarms
    assert alarms <= 5


CONDITIONS: dict[str, Callable[[Answer], bool]] = {
    "uptime": lambda _: True,
    "position": lambda each: each.prompt + each.num_new >= 1024,
    "prefix_hit": lambda each: each.has_hit,
}


@pytest.mark.parametrize("cause", CONDITIONS)
def test_damage_is_found_under_its_condition_and_counted(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(seed=5)
    traffic.serve(150_000)
    assert not traffic.checks
    traffic.damaged = CONDITIONS[cause]

    def differs(check: DrafterCheck) -> bool:
        assert check.slot is not None
        traffic.damaged = lambda _: False
        return CONDITIONS[cause](traffic.running[check.slot])

    traffic.differs = differs
    with caplog.at_level(logging.INFO, "faser.drafters"):
        traffic.serve(30_000)
        assert list(traffic.watch.rebuilds) == [("draft_model", cause)]
        assert {each.method for each in traffic.checks} == {"draft_model"}
        (message,) = caplog.messages
        assert f"({cause}): rebuilt {traffic.watch.rebuilds['draft_model', cause]} of" in message
        traffic.serve(100_000)
    assert len(caplog.messages) == 1, "the record is the one before the damage"


def test_a_change_of_text_is_compared_a_few_times_and_counts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(seed=7)
    traffic.serve(150_000)
    traffic.shift = -2.5
    with caplog.at_level(logging.INFO, "faser.drafters"):
        traffic.serve(400_000)
    assert 1 <= traffic.watch.num_alarms == len(caplog.messages) <= 3
    assert all("no damaged state was found" in message for message in caplog.messages)
    assert not traffic.watch.rebuilds
    traffic.damaged = CONDITIONS["uptime"]
    before = traffic.watch.num_alarms
    traffic.serve(60_000)
    assert traffic.watch.num_alarms > before, "the lower record is watched as well"


def test_what_slots_share_is_compared_too_where_drafts_come_from_text() -> None:
    traffic = Traffic(seed=5, method=SUFFIX, differs=lambda check: check.slot is None)
    traffic.serve(150_000)
    traffic.damaged = CONDITIONS["uptime"]
    while not traffic.checks:
        traffic.serve(100)
    assert {each.slot for each in traffic.checks} == {None, *range(NUM_SLOTS)}
    assert traffic.watch.rebuilds == {("suffix", "uptime"): 1}


def fed(watch: DrafterWatch, slot: int, right: int, *, of: int = 32, known: int = 40) -> None:
    """A slot verifies drafts, one token each."""
    accepted = (np.arange(of) < right).astype(np.int64)
    watch.take(np.full(of, slot), np.full(of, MODEL), np.full(of, 1), accepted, np.full(of, known))


def known_drafter(watch: DrafterWatch) -> None:
    """Twenty answers after prefix hits, of which 24 drafts of 32 are right."""
    for _ in range(20):
        watch.start(0, 10, has_hit=True)
        fed(watch, 0, 24)
        watch.release(0)


def test_a_suspicion_waits_for_a_sequence_that_it_is_about() -> None:
    """The answers that raised it are over; the next one has no prefix hit, the one after it has."""
    watch = DrafterWatch(2)
    known_drafter(watch)
    while not watch.num_alarms:
        for has_hit in (False, True):
            watch.start(0, 10, has_hit=has_hit)
            fed(watch, 0, 1 if has_hit else 26)
            watch.release(0)
    assert watch.next_check() is None
    watch.start(0, 10, has_hit=False)
    fed(watch, 0, 1, of=2)
    assert watch.next_check() is None
    watch.start(1, 10, has_hit=True)
    fed(watch, 1, 1, of=2)
    check = watch.next_check()
    assert check is not None
    watch.release(check.slot or 0)
    assert watch.next_check() != check, "its slot is another sequence's"


def test_positions_count_from_the_beginning_of_the_prompt() -> None:
    watch = DrafterWatch(1)
    known_drafter(watch)
    while not watch.num_alarms:
        for prompt in (10, 3000):
            watch.start(0, prompt, has_hit=True)
            fed(watch, 0, 1 if prompt == 3000 else 26)
            watch.release(0)
    watch.start(0, 3000, has_hit=True)
    fed(watch, 0, 1, of=2)
    check = watch.next_check()
    assert check is not None
    watch.checked(check, differed=True)
    assert watch.rebuilds == {("draft_model", "position"): 1}


def test_one_answer_raises_no_alarm_and_neither_do_requests_that_edit_their_logits() -> None:
    watch = DrafterWatch(1)
    known_drafter(watch)
    watch.start(0, 10, has_hit=False)
    for _ in range(100):
        fed(watch, 0, 0)
    watch.release(0)
    for _ in range(50):
        watch.start(0, 10, has_hit=True, is_watched=False)
        fed(watch, 0, 0)
        watch.release(0)
    assert watch.num_alarms == 0


def test_only_first_tokens_of_verified_drafts_count() -> None:
    """A draft that was cut whole says nothing, nor does what came after a first token."""
    watch = DrafterWatch(1)
    known_drafter(watch)
    for _ in range(40):
        watch.start(0, 10, has_hit=True)
        watch.take(ints(*[0] * 64), ints(*[MODEL] * 64), ints(*[0] * 64), ints(*[0] * 64), ints(*[50] * 64))
        watch.take(ints(*[0] * 32), ints(*[MODEL] * 32), ints(*[8] * 32), ints(*[1] * 32), ints(*[50] * 32))
        watch.release(0)
    assert watch.num_alarms == 0
