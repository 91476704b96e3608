"""Adapters of two ranks are those of one process: the same rows have the same ones, and a load is all or nothing.

Oracle: the whole model in one process, in float64.

Planted bugs that these tests have caught: an adapter that the other rank does not place, or does not drop; one
that either rank keeps though the other cannot load it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.ranks.adapters import LeadingAdapters, follow_loads
from faser.engine.execution.ranks.group import RankGroup
from faser.engine.execution.ranks.relay import LeadingRunner, follow
from faser.engine.execution.runner.runner import Runner
from faser.errors import RequestError
from faser.kernels.torch_backend import TorchBackend
from faser.types.adapter import Adapter
from tests.engine.checkpoints.adapter_files import tiny_modules, write_adapter
from tests.engine.execution.models.test_shard import ThreadRanks
from tests.engine.execution.ranks.test_relay import QueueGroup, decoder_of, drive, runner_over, whole
from tests.waiting import PATIENCE_S

SIZES = AdapterSizes(slots=2, max_rank=8)
SLOTS_OF_ROWS = (1, -1, 0)


def store_of(decoder: Decoder, path: Path, max_rank: int = SIZES.max_rank) -> AdapterStore:
    return AdapterStore(
        decoder.adapted,
        TorchBackend().adapters,
        spec=read_model_config(path).spec,
        dtype=decoder.dtype,
        architectures=(),
        max_rank=max_rank,
    )


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """Rank 0's runner and adapters, and the parts of them that either rank has. Rank 1 follows."""

    runner: Runner
    adapters: LeadingAdapters
    parts: list[AdapterStore]


@contextmanager
def two_ranks(directory: Path, max_ranks: tuple[int, int] = (8, 8)) -> Iterator[TwoRanks]:
    """max_ranks: of the adapters that each of the two takes."""
    exchange, told, notes = ThreadRanks(2), SimpleQueue[bytes](), dict[str, str]()
    leading, following = (cast(RankGroup, QueueGroup(rank, exchange, told, notes)) for rank in range(2))
    decoders = [decoder_of(directory, group, SIZES) for group in (leading, following)]
    parts = [store_of(decoder, directory, most) for decoder, most in zip(decoders, max_ranks, strict=True)]
    loads = follow_loads(parts[1], following)
    thread = threading.Thread(
        target=follow, args=(runner_over(decoders[1], following), following, parts[1]), daemon=True
    )
    thread.start()
    runner = runner_over(decoders[0], leading)
    assert isinstance(runner, LeadingRunner)
    try:
        yield TwoRanks(runner, LeadingAdapters(parts[0], leading), parts)
    finally:
        runner.close()
        notes["end"] = ""
        for each in (thread, loads):
            each.join(PATIENCE_S)
            assert not each.is_alive()


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    """One of all products, one of few, and a third."""
    modules = (tiny_modules(), tiny_modules("v_proj", "down_proj"), tiny_modules("o_proj", "gate_proj"))
    folders = [write_adapter(tmp_path / str(seed), each, seed=seed) for seed, each in enumerate(modules)]
    return [read_adapter(folder.name, folder, max_rank=8) for folder in folders]


def logits_of_a_life(
    runner: Runner, store: AdapterStore | LeadingAdapters, adapters: list[Adapter]
) -> list[Tensor]:
    """Two adapters beside none; then the third in the place of the second, and the first one is dropped."""
    for adapter in adapters:
        store.load_adapter(adapter)
    for slot, adapter in enumerate(adapters[:2]):
        store.place(slot, adapter.digest)
    found = drive(runner, 4, SLOTS_OF_ROWS)
    store.place(1, adapters[2].digest)
    store.drop_adapter(adapters[0].digest)
    return found + drive(runner, 2, SLOTS_OF_ROWS)


def test_rows_have_the_logits_of_one_process(adapters: list[Adapter], tiny_checkpoint: Path) -> None:
    runner, decoder = whole(tiny_checkpoint, SIZES)
    wanted = logits_of_a_life(runner, store_of(decoder, tiny_checkpoint), adapters)
    with two_ranks(tiny_checkpoint) as ranks:
        found = logits_of_a_life(ranks.runner, ranks.adapters, adapters)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    plain = drive(runner, 4)
    assert not any(torch.allclose(each, other) for each, other in zip(plain, wanted[: len(plain)], strict=True))


@pytest.mark.parametrize("max_ranks", [(3, 8), (8, 3)])
def test_an_adapter_that_one_rank_cannot_load_is_kept_by_none(
    max_ranks: tuple[int, int], adapters: list[Adapter], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    small = read_adapter("small", write_adapter(tmp_path / "small", rank=2, seed=7), max_rank=8)
    with two_ranks(tiny_checkpoint, max_ranks) as ranks:
        with pytest.raises(RequestError, match=r"cannot be used: .* rank 4") as caught:
            ranks.adapters.load_adapter(adapters[0])
        assert ("(on rank 1)" in str(caught.value)) == (max_ranks[1] == 3)
        for _ in range(2):  # the second time it is there
            ranks.adapters.load_adapter(small)
        assert [each.holds(adapters[0].digest) for each in ranks.parts] == [False, False]
        assert [each.holds(small.digest) for each in ranks.parts] == [True, True]
