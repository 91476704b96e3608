"""KvDisk beside a scheduler: what comes from the disk is what was computed, whatever happens meanwhile.

The scripted executor fails where a sequence finds anything but its own prefix in blocks and states. Its cells
are written and read as bytes here. Bugs seen to be caught: content that is not checked again after it was copied;
a block that is published before it is filled; a load that does not stop at the first record that is missing.
"""

import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from faser.engine.contract.plan import StateSave
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.kv_disk import KvDisk
from faser.engine.control.kv_file import KvFile
from faser.engine.control.state_snapshots import StateSnapshots
from faser.types.statistics import KvDiskStats
from tests.engine.driving import BLOCK_SIZE, Driver, MakeDisk, request
from tests.fakes import ScriptedExecutor

CELL = struct.Struct("<qqq")
MOST_TOKENS = 64
STATE = struct.Struct(f"<q{MOST_TOKENS + 1}q")
PROMPT = list(range(30, 50)) + list(range(10, 27))


class ScriptedMemory:
    """KvMemory over a scripted executor. before_read: called before a copy, in the thread."""

    block_bytes = BLOCK_SIZE * CELL.size

    def __init__(self, executor: ScriptedExecutor, *, has_states: bool, before_read: Callable[[], object]) -> None:
        self.state_bytes = STATE.size if has_states else 0
        self._executor = executor
        self._before_read = before_read

    def read_block(self, block: int, into: memoryview) -> None:
        self._before_read()
        for offset in range(BLOCK_SIZE):
            CELL.pack_into(into, offset * CELL.size, *self._executor.cell(block, offset))

    def write_block(self, block: int, content: memoryview) -> None:
        for offset in range(BLOCK_SIZE):
            self._executor.set_cell(block, offset, CELL.unpack_from(content, offset * CELL.size))

    def read_state(self, snapshot: int, into: memoryview) -> None:
        self._before_read()
        histories = self._executor.states.snapshots[snapshot]
        STATE.pack_into(into, 0, len(histories), *histories, *[0] * (MOST_TOKENS + 1 - len(histories)))

    def write_state(self, snapshot: int, content: memoryview, num_tokens: int) -> None:
        count, *histories = STATE.unpack_from(content)
        assert count == num_tokens + 1, f"a state after {count - 1} tokens is taken for one after {num_tokens}"
        self._executor.states.snapshots[snapshot] = histories[:count]

    def save_state(self, slot: int, snapshot: int, num_tokens: int) -> None:
        self._executor.states.save(StateSave(slot, snapshot, num_tokens))


def disk_in(
    folder: Path, *, num_records: int = 1000, before_read: Callable[[], object] = lambda: None
) -> MakeDisk:
    def make(executor: ScriptedExecutor, kv: KvManager, snapshots: StateSnapshots | None) -> KvDisk:
        memory = ScriptedMemory(executor, has_states=snapshots is not None, before_read=before_read)
        file = KvFile(
            folder, num_records * (memory.block_bytes + 72), key=bytes(32), record_bytes=memory.block_bytes
        )
        return KvDisk(file, memory, kv, snapshots, least_gain=BLOCK_SIZE)

    return make


def ended(driver: Driver) -> KvDiskStats:
    """Its statistics, once all that waited is written."""
    assert driver.disk is not None
    driver.disk.close()
    return driver.disk.stats()


@pytest.mark.parametrize("num_snapshots", [None, 4])
def test_a_prompt_goes_on_behind_what_the_disk_has(tmp_path: Path, num_snapshots: int | None) -> None:
    first = Driver(disk=disk_in(tmp_path), num_snapshots=num_snapshots)
    asked = request("a", PROMPT, max_tokens=8)
    first.add(asked)
    first.run()
    assert ended(first).written_bytes > 0
    second = Driver(disk=disk_in(tmp_path), num_snapshots=num_snapshots)
    longer = request("b", [*PROMPT, 9, 9], max_tokens=8)
    second.add(longer)
    plans = second.run()
    second.check(longer)
    # A state is kept near the end of a prompt, a little before it.
    reach = 36 if num_snapshots is None else 32
    assert plans[0].rows.starts == [reach]
    stats = ended(second)
    assert (stats.queries, stats.hits) == (len(PROMPT) + 2, reach)
    assert second.scheduler.stats().prefix_cache_hits == reach


def test_sequences_that_begin_alike_wait_for_one_reading(tmp_path: Path) -> None:
    first = Driver(disk=disk_in(tmp_path))
    first.add(request("a", PROMPT))
    first.run()
    ended(first)
    second = Driver(disk=disk_in(tmp_path), max_num_batched_tokens=64)
    asked = [request("b", PROMPT), request("c", [*PROMPT, 1, 2, 3]), request("d", PROMPT, n=2)]
    second.add(*asked)
    assert second.plan() is None, "all wait"
    assert second.scheduler.stats().num_waiting == 4
    second.run()
    second.check(*asked)
    assert ended(second).read_bytes == 9 * ScriptedMemory.block_bytes


def test_others_run_while_a_sequence_waits_for_the_disk(tmp_path: Path) -> None:
    first = Driver(disk=disk_in(tmp_path))
    first.add(request("a", PROMPT))
    first.run()
    ended(first)
    held, gate = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert gate.wait(30)

    second = Driver(disk=disk_in(tmp_path, before_read=hold))
    other = request("b", [5] * 11, max_tokens=20)
    second.add(other)
    while not second.scheduler.stats().prompt_tokens:
        second.step()
    for _ in range(3):
        second.step()
    assert held.wait(30)  # the thread stops at the first block that it has to write
    asked = request("c", PROMPT)
    second.add(asked)
    for _ in range(5):
        second.step()
    assert second.scheduler.stats().num_waiting == 1
    gate.set()
    second.run()
    second.check(other, asked)
    assert ended(second).hits == 36


def test_content_that_is_forgotten_while_it_is_copied_is_not_written(tmp_path: Path) -> None:
    """The thread is held before it copies a block; meanwhile other sequences take all blocks."""
    held, gate = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert gate.wait(30)

    first = Driver(num_blocks=16, disk=disk_in(tmp_path, before_read=hold))
    first.add(request("a", PROMPT, max_tokens=2))
    first.run()
    assert held.wait(30)
    first.add(request("b", [3] * 55, max_tokens=9))
    first.run()
    gate.set()
    ended(first)
    second = Driver(disk=disk_in(tmp_path))
    asked = request("c", PROMPT)
    second.add(asked)
    second.run()
    second.check(asked)
    assert ended(second).hits == 0


def test_a_snapshot_that_is_given_away_while_it_is_copied_is_not_written(tmp_path: Path) -> None:
    """There is one, and the prompts are too short for another snapshot but the one near their ends."""
    held, gate, reads = threading.Event(), threading.Event(), []

    def hold_at_the_state() -> None:
        reads.append(1)
        if len(reads) == 4:  # behind three blocks
            held.set()
            assert gate.wait(30)

    first = Driver(num_snapshots=1, disk=disk_in(tmp_path, before_read=hold_at_the_state))
    first.add(request("a", PROMPT[:13], max_tokens=1))
    first.run()
    assert first.disk is not None
    first.disk.rest()
    assert held.wait(30)
    first.add(request("b", [3] * 13, max_tokens=1))
    first.run()
    gate.set()
    ended(first)
    second = Driver(num_snapshots=1, disk=disk_in(tmp_path))
    asked = request("c", [*PROMPT[:13], 7, 7], max_tokens=4)
    second.add(asked)
    second.run()
    second.check(asked)
    assert ended(second).hits == 0


def test_a_prompt_that_has_no_room_beside_others_waits_for_it(tmp_path: Path) -> None:
    first = Driver(disk=disk_in(tmp_path))
    first.add(request("a", PROMPT))
    first.run()
    ended(first)
    second = Driver(num_blocks=16, disk=disk_in(tmp_path))
    asked = [request("b", [3] * 30, max_tokens=20), request("c", PROMPT, max_tokens=20)]
    second.add(asked[0])
    second.step()
    second.add(asked[1])
    second.run()
    second.check(*asked)
    assert ended(second).hits == 36


@pytest.mark.parametrize("num_snapshots", [None, 3])
def test_random_lives_read_nothing_but_what_was_computed(num_snapshots: int | None, tmp_path: Path) -> None:
    """Few blocks, a small file, aborts, three restarts; prompts are beginnings of few texts, in two namespaces."""
    assert sum(_hits_of_a_life(seed, num_snapshots, tmp_path / str(seed)) for seed in range(6)) > 0


def _hits_of_a_life(seed: int, num_snapshots: int | None, folder: Path) -> int:
    choose = random.Random(seed)
    texts = [[choose.randrange(8, 50) for _ in range(44)] for _ in range(3)]
    hits = count = 0
    for _ in range(4):
        driver = Driver(num_blocks=20, num_snapshots=num_snapshots, disk=disk_in(folder, num_records=40))
        checked = []
        for _ in range(8):
            text = choose.choice(texts)[: choose.randrange(20, 45)]
            count += 1
            asked = request(f"{count}", text + [choose.randrange(8)] * choose.randrange(3), max_tokens=6)
            driver.add(asked)
            if choose.random() < 0.2:
                driver.abort(asked.request_id)
                continue
            checked.append(asked)
            for _ in range(choose.randrange(4)):
                if (plan := driver.plan()) is not None:
                    driver.commit(plan)
        driver.run(max_steps=2000)
        driver.check(*checked)
        hits += ended(driver).hits
    return hits
