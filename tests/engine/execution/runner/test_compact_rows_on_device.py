"""Rows leave a forward on an emulated device; the others get the bits that they would have got with all rows.

Oracle: the forward of all rows. Planted bugs that this test has caught: row numbers of the step before; a wait for
the device; the last rows of a sequence kept instead of the first.
"""

from pathlib import Path

import numpy as np
import pytest
from torch.testing import assert_close

from faser.engine.execution.runner.batch import BlockTable
from tests.engine.execution.runner.test_graph_runner import NEAR, Side, rows_of, write_heads_of_64
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

COUNTS = [4, 1, 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


def make_table() -> BlockTable:
    table = BlockTable(3, 4)
    for slot in range(3):
        table.append(slot, (3 * slot + 2, 3 * slot + 1, 3 * slot))
    return table


def test_rows_that_stay_go_on_and_the_host_does_not_wait_for_their_numbers(checkpoint: Path) -> None:
    """Several steps after each other, so that row numbers of one are still being sent in the next."""
    device = FakeAccelerator()
    runner, table = Side(checkpoint, fake_backend(device)).eager(), make_table()
    for seed, left in enumerate(([4, 1, 5], [1, 1, 1], [2, 1, 6], [4, 1, 3])):
        batch = rows_of(table, [0, 1, 2], [0, 0, 0], COUNTS, seed)
        runner.forward(batch)
        whole = runner.logits(range(sum(COUNTS))).clone()
        runner.begin(batch)
        runner.advance(1)
        done = device.done

        compact = runner.compact(np.array(left, dtype=np.int32))

        assert device.done == done
        runner.advance()
        kept = [sum(COUNTS[:s]) + i for s, count in enumerate(left) for i in range(count)]
        assert compact.token_ids.tolist() == batch.token_ids[kept].tolist()
        assert_close(runner.logits(range(sum(left))), whole[kept], rtol=NEAR, atol=NEAR)
    device.wait()
