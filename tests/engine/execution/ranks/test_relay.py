"""What rank 0's runner does, the others do: calls as bytes, over a group that a queue stands in for.

Planted bugs that these tests have caught: sums that differ between ranks by a bit, uncompared; rows that the other
rank does not drop; logits of other rows there.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import NO_ADAPTER
from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.shard import Shard
from faser.engine.execution.ranks import relay
from faser.engine.execution.ranks.group import RankGroup
from faser.engine.execution.ranks.relay import LeadingRunner, follow
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.tokens import HostTokenSampler
from faser.errors import EngineError
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.models.test_shard import ThreadRanks
from tests.waiting import PATIENCE_S

SLOTS, BLOCKS, MOST = 3, 8, 64


class QueueGroup:
    """Both ranks of a group in one process. notes: what they leave for each other; "end": nothing follows."""

    def __init__(
        self, rank: int, ranks: ThreadRanks, told: "SimpleQueue[bytes]", notes: dict[str, str] | None = None
    ) -> None:
        self.rank, self.size = rank, 2
        self.notes = {} if notes is None else notes
        own = ranks.of(rank)
        self.all_reduce: Callable[[Tensor], Tensor] = own.all_reduce
        self.gather: Callable[[Tensor], list[Tensor] | None] = own.gather
        self.tell, self.hear = told.put, told.get
        self.leave = self.notes.__setitem__

    def find(self, name: str) -> str:
        until_s = time.monotonic() + PATIENCE_S
        while name not in self.notes:
            if "end" in self.notes or time.monotonic() > until_s:
                raise EngineError(f"nobody leaves {name}")
            time.sleep(0.001)
        return self.notes[name]


def decoder_of(directory: Path, group: RankGroup, adapters: AdapterSizes | None = None) -> Decoder:
    return load_decoder(
        directory,
        TorchBackend(),
        torch.float64,
        max_model_len=128,
        max_rows=MOST,
        progress=lambda *_: None,
        shard=Shard(rank=group.rank, size=2),
        ranks=group,
        adapters=adapters,
    )


def runner_over(decoder: Decoder, group: RankGroup) -> Runner:
    backend = TorchBackend()
    kv = KvShape(heads=decoder.spec.kv_heads, num_blocks=SLOTS * BLOCKS, block_size=16, dtype=torch.float64)
    if group.rank:
        return Runner(decoder, backend, kv)
    return LeadingRunner(decoder, backend, kv, HostTokenSampler(TorchSamplingKernels()), group)


def drive(runner: Runner, steps: int, adapters: Sequence[int] = (NO_ADAPTER,) * SLOTS) -> list[Tensor]:
    """Whole forwards, and forwards in two parts with rows that are dropped in between; logits of some rows."""
    table = BlockTable(SLOTS, BLOCKS)
    for slot, adapter in enumerate(adapters):
        table.append(slot, tuple(range(slot * BLOCKS, (slot + 1) * BLOCKS)))
        table.set_adapter(slot, adapter)
    found = []
    for step in range(steps):
        counts = np.array([3, 1, 2], dtype=np.int32)
        starts = np.full(SLOTS, step, dtype=np.int32)
        token_ids = (np.arange(6, dtype=np.int64) * 37 + step) % 512
        batch = table.lay_out([0, 1, 2], starts, counts, token_ids)
        if step % 3 == 0:
            runner.begin(batch)
            runner.advance(1)
            found.append(runner.logits([0, 5]).clone())
            batch = runner.compact(np.array([2, 1, 1], dtype=np.int32))
            runner.advance()
        else:
            runner.forward(batch)
        found.append(runner.logits(batch.last_rows).clone())
    return found


def on_two_ranks(directory: Path, work: Callable[[Runner], list[Tensor]]) -> list[Tensor]:
    ranks, told = ThreadRanks(2), SimpleQueue[bytes]()
    leading, following = (cast(RankGroup, QueueGroup(rank, ranks, told)) for rank in range(2))
    other = runner_over(decoder_of(directory, following), following)
    thread = threading.Thread(target=follow, args=(other, following), daemon=True)
    thread.start()
    runner = runner_over(decoder_of(directory, leading), leading)
    assert isinstance(runner, LeadingRunner)
    try:
        found = work(runner)
        runner.beat()
        return found
    finally:
        runner.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def whole(directory: Path, adapters: AdapterSizes | None = None) -> tuple[Runner, Decoder]:
    backend = TorchBackend()
    decoder = load_decoder(
        directory,
        backend,
        torch.float64,
        max_model_len=128,
        max_rows=MOST,
        progress=lambda *_: None,
        adapters=adapters,
    )
    kv = KvShape(heads=decoder.spec.kv_heads, num_blocks=SLOTS * BLOCKS, block_size=16, dtype=torch.float64)
    return Runner(decoder, backend, kv), decoder


def test_the_other_rank_does_what_the_first_does(tiny_checkpoint: Path) -> None:
    wanted = drive(whole(tiny_checkpoint)[0], 20)
    found = on_two_ranks(tiny_checkpoint, lambda runner: drive(runner, 20))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_rank_that_computes_other_numbers_is_found(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_COMPARED_EVERY", 8)
    on_two_ranks(tiny_checkpoint, lambda runner: drive(runner, 20))

    class WrongSums(ThreadRanks):
        """The second rank gets a sum that is off by a bit."""

        def exchange(self, rank: int, given: Tensor) -> list[Tensor]:
            found = super().exchange(rank, given)
            if rank and found[0].dtype is torch.float64:
                found[0] = found[0] * (1 + 2.0**-52)
            return found

    monkeypatch.setattr("tests.engine.execution.ranks.test_relay.ThreadRanks", WrongSums)
    with pytest.raises(EngineError, match="rank 1 of the tensor-parallel model computes other numbers"):
        on_two_ranks(tiny_checkpoint, lambda runner: drive(runner, 20))
