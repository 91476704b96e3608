"""All ranks add up the same way, the one that all of their devices can.

Oracle: sums of small whole numbers. Ranks are threads; what they have instead of NCCL and symmetric memory says
which of both has added. The kernel itself needs two processes on a GPU: phase `ranks` of benchmarks/gpu.

Planted bugs that these tests have caught: a rank that does not ask the others; sums above the limit in one kernel;
a rank whose memory could not be opened, alone with NCCL.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ReduceOp

from faser.errors import ConfigError
from faser.kernels.cuda.collectives import (
    ONE_SHOT_BYTES,
    CudaCollectives,
    cuda_collectives,
    is_small,
    why_no_peers,
)

SIZE = 2
Work = Callable[[CudaCollectives, list[str], int], object]


class ThreadTransport:
    """Stands for NCCL, or for peers' memory. used: the name is added for each collective."""

    def __init__(self, name: str, rank: int, shared: "Shared", used: list[str]) -> None:
        self._name, self._rank, self._shared, self._used = name, rank, shared, used

    def all_reduce(self, x: Tensor, op: object = ReduceOp.SUM) -> None:
        self._used.append(self._name)
        parts = torch.stack(self._shared.exchange(self._rank, x))
        x.copy_(parts.amin(0) if op == ReduceOp.MIN else parts.sum(0))

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        whole.copy_(torch.stack(self._shared.exchange(self._rank, part)))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._shared.exchange(self._rank, x)[0])

    def close(self) -> None:
        self._used.append("closed")


class Shared:
    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE)
        self._given: list[Tensor] = [torch.empty(0)] * SIZE

    def exchange(self, rank: int, given: Tensor) -> list[Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait(30)
        found = [*self._given]
        self._barrier.wait(30)
        return found


def on_ranks(
    work: Work, *, reason: tuple[str | None, str | None] = (None, None), fails: int | None = None
) -> list[object]:
    """What work returns on each rank. reason: of each rank, why there are no peers. fails: opens no memory."""
    shared = Shared()

    def run(rank: int) -> object:
        used: list[str] = []

        def open_peers() -> ThreadTransport:
            if rank == fails:
                raise RuntimeError("no handles\nC++ stack")
            return ThreadTransport("peers", rank, shared, used)

        ranks = CudaCollectives(
            rank,
            SIZE,
            torch.device("cpu"),
            lambda: ThreadTransport("nccl", rank, shared, used),
            open_peers,
            lambda: reason[rank],
        )
        ranks.connect()
        used.clear()
        return work(ranks, used, rank)

    with ThreadPoolExecutor(SIZE) as threads:
        return [each.result(30) for each in [threads.submit(run, rank) for rank in range(SIZE)]]


def sums(ranks: CudaCollectives, used: list[str], _rank: int) -> list[str]:
    most = ONE_SHOT_BYTES // 4
    for count, dtype in ((16, torch.float32), (most, torch.float32), (most + 4, torch.float32)):
        x = torch.full((count,), 3, dtype=dtype)
        assert ranks.all_reduce(x) is x
        assert x.eq(6).all()
    for x in (torch.ones(8, dtype=torch.float16), torch.ones(9), torch.ones(9)[1:]):
        assert ranks.all_reduce(x).eq(2).all()
    return used


def test_small_sums_are_one_kernel_and_all_others_nccls(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "faser.engine"):
        found = on_ranks(sums)
    assert found == [["peers", "peers", "nccl", "nccl", "nccl", "nccl"]] * SIZE
    assert {each.getMessage() for each in caplog.records} == {
        "sums of ranks: one kernel up to 512 KiB, NCCL above"
    }


@pytest.mark.parametrize("rank", range(SIZE))
def test_nccl_adds_up_everything_where_a_device_cannot_read_the_others(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "faser.engine"):
        found = on_ranks(sums, reason=("cuda:0 is far", None) if rank == 0 else (None, "cuda:1 is far"))
    assert found == [["nccl"] * 6] * SIZE
    assert {each.getMessage() for each in caplog.records} == {
        f"sums of ranks: NCCL for all sizes (cuda:{rank} is far)",
        "sums of ranks: NCCL for all sizes (another rank has no access to its peers)",
    }


def test_nccl_adds_up_everything_where_one_rank_opens_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "faser.engine"):
        found = on_ranks(sums, fails=1)
    assert found == [["nccl"] * 6] * SIZE
    assert {each.getMessage().rpartition(": ")[2] for each in caplog.records} == {
        "no handles",
        "another rank cannot",
    }


def test_the_first_rank_gets_all_parts_and_gives_its_tokens() -> None:
    def work(ranks: CudaCollectives, used: list[str], rank: int) -> object:
        parts = ranks.gather(torch.tensor([rank]))
        ranks.broadcast(fed := torch.tensor([5 + rank]))
        ranks.close()
        return parts if parts is None else [each.item() for each in parts], fed.item(), used

    assert on_ranks(work) == [([0, 1], 5, ["closed"]), (None, 5, ["closed"])]


def test_what_ranks_lack_is_named() -> None:
    assert why_no_peers(range(2), one_machine=False) == "the ranks are on several machines"
    assert is_small(torch.ones(8, dtype=torch.bfloat16))
    assert not is_small(torch.ones(0))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2; torch .* is built without NCCL"):
        cuda_collectives(HashStore(), 0, 2, torch.device("cuda:0"), range(2), one_machine=True)
