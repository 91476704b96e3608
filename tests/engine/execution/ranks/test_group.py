"""Ranks meet where no other user reads or writes, listen on loopback alone, and name the rank that hangs.

Ranks are threads here, each with its own connection to the others.

Planted bugs that these tests have caught: gloo on the default device; proofs that are not compared, or not of the
pair; a verdict on all ranks that wait, and one without the silent ones; gloo's words in the error; a roll call
that waits for the store.
"""

import fcntl
import logging
import threading
from collections.abc import Callable

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from faser.config.environment import RankPlace
from faser.engine.execution.ranks.group import RankGroup, group_here, torchrun_group
from faser.engine.execution.ranks.meeting import open_meeting, store_of
from faser.errors import EngineError

Work = Callable[[RankGroup], object]


def on_ranks(size: int, work: Work, *, secrets: dict[int, bytes] | None = None) -> list[object]:
    """Do the work on connected ranks at once; what each returned or raised."""
    meeting = open_meeting()
    found: list[object] = [None] * size

    def run(rank: int) -> None:
        group = group_here(rank, size, meeting, answer_s=1.0)
        if secrets and rank in secrets:
            group = RankGroup(rank, size, store_of(meeting), secret=secrets[rank], answer_s=1.0)
        try:
            group.connect()
            group.begin()
            found[rank] = work(group)
        except EngineError as error:
            found[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def listening() -> set[str]:
    """The addresses at which this process and its children listen."""
    ours = psutil.Process()
    return {
        each.laddr.ip
        for process in (ours, *ours.children(recursive=True))
        for each in process.net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    }


def test_ranks_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says: GLOO_SOCKET_IFNAME is for ranks on several machines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such interface")
    before, met = listening(), threading.Barrier(3)
    assert before <= {"127.0.0.1"}

    def look(_: RankGroup) -> set[str]:
        met.wait(30)
        found = listening()
        met.wait(30)
        return found

    assert on_ranks(3, look) == [{"127.0.0.1"}] * 3


def test_a_program_that_knows_no_secret_is_no_rank() -> None:
    """It has connected in place of rank 1: what it would be told, or would add to sums, never comes to that."""
    first, stranger, third = on_ranks(3, lambda group: group.all_reduce(torch.ones(1)), secrets={1: b"guessed"})
    refused = "another program of this machine has connected in place of a rank of the model"
    assert str(first) == str(third) == refused
    assert isinstance(stranger, EngineError)


def test_all_collectives_give_every_rank_its_part() -> None:
    message = bytes(range(256)) * 40  # more than one broadcast carries

    def work(group: RankGroup) -> tuple[object, ...]:
        total = group.all_reduce(torch.full((5,), float(group.rank + 1)))
        parts = group.gather(torch.tensor([group.rank]))
        if group.rank:
            return total.tolist(), parts, group.hear(), group.hear()
        group.tell(b"short")
        group.tell(message)
        assert parts is not None
        return total.tolist(), [each.item() for each in parts]

    first, *others = on_ranks(3, work)
    assert first == ([6.0] * 5, [0, 1, 2])
    assert others == [([6.0] * 5, None, b"short", message)] * 2


def test_ranks_agree_on_what_is_next_and_on_the_least_number() -> None:
    """Bugs seen caught: a rank that cannot is not counted; the largest number; what is next is not compared."""

    def work(group: RankGroup) -> object:
        fed = torch.full((3,), group.rank)
        group.broadcast(fed)
        found: list[object] = [fed.tolist(), group.least(7 - group.rank)]
        group.agree("the graph of 8 rows")
        for what, problem in (
            ("the graph of 4 rows", "no memory" if group.rank == 1 else ""),
            (str(group.rank), ""),
        ):
            try:
                group.agree(what, problem)
            except EngineError as error:
                found.append(str(error))
        return found

    for rank, found in enumerate(on_ranks(3, work)):
        assert found == [
            [0, 0, 0],
            5,
            "rank 1 of the tensor-parallel model has failed at its start; see the log",
            f"the ranks of the tensor-parallel model do not start alike; here {rank} was next",
        ]


def test_the_rank_that_does_not_come_to_a_sum_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its process answers, its computation does not go on. Gloo's words are for the log alone."""
    over = threading.Event()

    def work(group: RankGroup) -> object:
        group.all_reduce(torch.ones(4))
        try:
            if group.rank == 2:
                return over.wait(30)
            return group.all_reduce(torch.ones(4))
        finally:
            if group.rank == 0:
                over.set()

    with caplog.at_level(logging.ERROR, "faser.engine"):
        first, second, _ = on_ranks(3, work)
    assert str(first) == ("rank 2 of the tensor-parallel model hangs: the other ranks have waited for it for 1 s")
    assert isinstance(second, EngineError), "rank 0 has gone, whom it waited for"
    assert "gloo" in caplog.text
    assert "gloo" not in f"{first} {second}"


def test_a_rank_that_was_stopped_while_it_held_the_store_is_named_all_the_same() -> None:
    meeting = open_meeting()
    group, other = group_here(0, 2, meeting, answer_s=0.5), group_here(1, 2, meeting)
    thread = threading.Thread(target=other.connect)
    thread.start()
    group.connect()
    group.begin()
    thread.join(30)
    with open(f"/proc/self/fd/{meeting}", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match=r"^rank 1 of the tensor-parallel model does not answer: "):
            group.all_reduce(torch.ones(1))
    assert group.is_broken
    other.close()
    group.close()


def test_a_rank_that_has_ended_is_named_while_another_waits_for_it() -> None:
    def check() -> None:
        raise EngineError("rank 1 has ended (signal 9)")

    group = RankGroup(0, 2, store_of(open_meeting()), check)
    with pytest.raises(EngineError, match=r"rank 1 has ended \(signal 9\)"):
        group.find("loaded/1")


def test_ranks_of_torchrun_meet_at_its_store_and_notice_that_it_is_gone() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [RankPlace(rank=rank, size=2, host="127.0.0.1", port=store.port, life="3") for rank in range(2)]
    first, second = map(torchrun_group, places)
    first.leave("blocks", "7")
    assert second.find("blocks") == "7"
    assert store.check(["faser/3/blocks"]), "each life has its own part"
    del store
    with pytest.raises(EngineError, match=r"^the store where the ranks .* meet is gone$"):
        second.has("loaded/1")
