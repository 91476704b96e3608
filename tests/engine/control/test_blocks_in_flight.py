"""No block that a step touches can be had by anybody before the step is over, on both lanes, whatever happens.

While a step is in flight, sequences of it are aborted, and then somebody takes every block there is: whoever may
be given a block that a lane reads or writes, may be given it at that moment. Seen to fail: pools that open blocks
too early, each planted below.
"""

import random
from collections.abc import Callable

import pytest

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import DraftPlan, StepPlan, StepResult
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from tests.engine.driving import BLOCK_SIZE, Driver, request
from tests.fakes import RandomPolicy, ScriptedExecutor

NUM_BLOCKS = 16
NUM_SLOTS = 4
PROMPT = list(range(100, 118))


class Grasping(ScriptedExecutor):
    """While a step is in flight: calls `meanwhile`, then takes all blocks there are, and gives them back."""

    def __init__(self, kv: KvManager) -> None:
        super().__init__(block_size=BLOCK_SIZE)
        self._kv = kv
        self.meanwhile: Callable[[], None] = lambda: None
        self.num_overlapped = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.meanwhile()
        self._grasp(plan)
        return result

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """The draft lane is still busy when the verify lane is done."""
        self.num_overlapped += 1
        found = super().run_overlapped(plan, draft_plan)
        self._grasp(plan)
        return found

    def _grasp(self, plan: StepPlan) -> None:
        """Sequences with overlapped drafts have rows in the step, so these are all blocks that it touches."""
        touched = {block for rows in plan.rows for block in self.blocks(rows.slot)}
        grasped = self._kv.new_table()
        self._kv.allocate(grasped, self._kv.num_available)
        taken = touched.intersection(grasped.blocks)
        self._kv.release(grasped)
        assert not taken, f"blocks {sorted(taken)} are in use by step {plan.step}, and can be had"


class OpensAtOnce(KvManager):
    """Planted: a step in flight closes nothing."""

    def release(self, table: SequenceBlocks) -> None:
        self._num_ended, num_ended = self._num_begun, self._num_ended
        super().release(table)
        self._num_ended = num_ended


class ForgetsTheDraftLane(KvManager):
    """Planted: blocks that were given away for drafting during the step open at once, all others wait."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._for_drafts: set[int] = set()

    def allocate(self, table: SequenceBlocks, num_blocks: int) -> list[int]:
        found = super().allocate(table, num_blocks)
        if self._num_begun > self._num_ended:
            self._for_drafts.update(found)
        return found

    def release(self, table: SequenceBlocks) -> None:
        super().release(table)
        for block in self._for_drafts.intersection(self._deferred):
            del self._deferred[block]
            self._reopen(block)

    def end_step(self) -> None:
        super().end_step()
        self._for_drafts.clear()


class OpensSharedBlocks(KvManager):
    """Planted: content that others could find counts as safe, and becomes evictable in the middle of a step."""

    def release(self, table: SequenceBlocks) -> None:
        super().release(table)
        for block in [each for each in self._deferred if each in self._digest_of]:
            del self._deferred[block]
            self._reopen(block)


def lead(kv: KvManager, seed: int, *, ahead: bool) -> tuple[int, int]:
    """Random requests to their end, some of them aborted in flight; overlapped steps and aborts."""
    rng = random.Random(seed)
    executor = Grasping(kv)
    driver = Driver(
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=24,
        speculates=RandomPolicy(seed),
        ahead=ahead,
        kv=kv,
        executor=executor,
    )
    asked = [
        request(
            str(i), [*PROMPT[: rng.randint(1, 14)], i], seed=i, max_tokens=rng.randint(1, 20), n=rng.randint(1, 2)
        )
        for i in range(8)
    ]
    aborted: set[str] = set()

    def meanwhile() -> None:
        if rng.random() < 0.15:
            name = str(rng.randrange(8))
            aborted.add(name)
            driver.abort(name)

    executor.meanwhile = meanwhile
    driver.add(*asked)
    driver.run()
    driver.check(*(each for each in asked if each.request_id not in aborted))
    return executor.num_overlapped, len(aborted)


def lead_some(pool: Callable[[], KvManager], *, ahead: bool) -> tuple[int, int]:
    found = [lead(pool(), seed, ahead=ahead) for seed in range(15)]
    return sum(overlapped for overlapped, _ in found), sum(aborted for _, aborted in found)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_step_touches_cannot_be_had_before_it_is_over(ahead: bool) -> None:
    overlapped, aborted = lead_some(lambda: KvManager(NUM_BLOCKS, BLOCK_SIZE), ahead=ahead)
    assert (overlapped > 50) == ahead
    assert aborted > 15


@pytest.mark.parametrize(
    "pool, ahead",
    [(OpensAtOnce, False), (OpensAtOnce, True), (OpensSharedBlocks, True), (ForgetsTheDraftLane, True)],
)
def test_a_pool_that_opens_blocks_too_early_is_caught(pool: type[KvManager], ahead: bool) -> None:
    with pytest.raises(AssertionError, match=r"are in use by step \d+, and can be had"):
        lead_some(lambda: pool(NUM_BLOCKS, BLOCK_SIZE), ahead=ahead)
