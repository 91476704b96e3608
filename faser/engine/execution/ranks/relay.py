"""Messages in which rank 0 tells the other ranks what to run, and the loop in which they do.

A call of rank 0's runner goes out as a message before it runs there. All ranks then meet in the sums of the layers
and where the parts of the logits come together. The messages hold what a runner gets: rows, places, blocks. Those
between forwards say which adapter is in which slot (adapters.py).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.ranks.group import RankGroup
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import TokenSampler
from faser.errors import EngineError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout

_COMPARED_EVERY = 64  # forwards


class _Numbers(msgspec.Struct, frozen=True, array_like=True):
    """An array. kind: its dtype, as numpy names it."""

    kind: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "_Numbers":
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> NDArray[Any]:
        """A new one."""
        return np.frombuffer(bytearray(self.content), self.kind).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.array())


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    query_start: _Numbers
    seq_len: _Numbers
    positions: _Numbers
    block_table: _Numbers
    adapters: _Numbers | None

    @classmethod
    def of(cls, layout: RowLayout) -> "_Layout":
        parts = (layout.query_start, layout.seq_len, layout.positions, layout.block_table)
        query_start, seq_len, positions, block_table = (_Numbers.of(each.numpy()) for each in parts)
        adapters = None if layout.adapters is None else _Numbers.of(layout.adapters.numpy())
        return cls(query_start, seq_len, positions, block_table, adapters)

    def layout(self) -> RowLayout:
        return RowLayout(
            query_start=self.query_start.tensor(),
            seq_len=self.seq_len.tensor(),
            positions=self.positions.tensor(),
            block_table=self.block_table.tensor(),
            adapters=None if self.adapters is None else self.adapters.tensor(),
        )


class _Begin(msgspec.Struct, frozen=True, tag=True):
    """runs: all layers at once, and not only the embedding."""

    token_ids: _Numbers
    layout: _Layout
    last_rows: _Numbers
    runs: bool

    @classmethod
    def of(cls, batch: RowBatch, *, runs: bool) -> "_Begin":
        assert batch.feedback is None, "ranks get tokens that are known"
        return cls(
            token_ids=_Numbers.of(batch.token_ids.numpy()),
            layout=_Layout.of(batch.layout),
            last_rows=_Numbers.of(batch.last_rows),
            runs=runs,
        )

    def batch(self) -> RowBatch:
        return RowBatch(
            token_ids=self.token_ids.tensor(), layout=self.layout.layout(), last_rows=self.last_rows.array()
        )


class _Advance(msgspec.Struct, frozen=True, tag=True):
    num_layers: int | None


class _Compact(msgspec.Struct, frozen=True, tag=True):
    counts: _Numbers


class _Logits(msgspec.Struct, frozen=True, tag=True):
    rows: _Numbers


class _FillCache(msgspec.Struct, frozen=True, tag=True):
    layout: _Layout


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True):
    """An adapter that all ranks have loaded goes into a slot."""

    slot: int
    digest: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    digest: str


class _Compare(msgspec.Struct, frozen=True, tag=True):
    """All ranks say what hidden states they have."""


class _Beat(msgspec.Struct, frozen=True, tag=True):
    """Nothing is to be run; all ranks show that they live."""


class _End(msgspec.Struct, frozen=True, tag=True): ...


_Call = _Begin | _Advance | _Compact | _Logits | _FillCache | PlaceAdapter | DropAdapter | _Compare | _Beat | _End
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Call)


class LeadingRunner(Runner):
    """Rank 0's runner. Raises EngineError where another rank is gone, does not answer, or has other numbers."""

    def __init__(
        self, decoder: Decoder, backend: Backend, kv: KvShape, token_sampler: TokenSampler, group: RankGroup
    ) -> None:
        super().__init__(decoder, backend, kv, token_sampler)
        self._group = group
        self._num_forwards = 0

    def forward(self, batch: RowBatch) -> None:
        self._tell(_Begin.of(batch, runs=True))
        super().begin(batch)
        super().advance()
        self._num_forwards += 1
        if self._num_forwards % _COMPARED_EVERY == 0:
            self._compare()

    def begin(self, batch: RowBatch) -> None:
        self._tell(_Begin.of(batch, runs=False))
        super().begin(batch)

    def advance(self, num_layers: int | None = None) -> None:
        self._tell(_Advance(num_layers))
        super().advance(num_layers)

    def compact(self, counts: NDArray[np.int32]) -> RowBatch:
        self._tell(_Compact(_Numbers.of(counts)))
        return super().compact(counts)

    def fill_cache(self, layout: RowLayout) -> None:
        self._tell(_FillCache(_Layout.of(layout)))
        super().fill_cache(layout)

    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        numbers = np.asarray(rows, dtype=np.int64)
        self._tell(_Logits(_Numbers.of(numbers)))
        return super().logits(numbers)

    def beat(self) -> None:
        """Find out whether all ranks live, while there is nothing to run."""
        self._tell(_Beat())
        self._group.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Let the other ranks end."""
        self._tell(_End())

    def _compare(self) -> None:
        """Sums have the same bits on every rank, so all hidden states are equal, unless something is broken."""
        self._tell(_Compare())
        found = self._group.gather(self.checksum())
        assert found is not None, "rank 0 gathers"
        for rank, checksum in enumerate(found):
            if not torch.equal(checksum, found[0]):
                raise EngineError(f"rank {rank} of the tensor-parallel model computes other numbers than rank 0")

    def _tell(self, call: _Call) -> None:
        tell(self._group, call)


def tell(group: RankGroup, call: _Call) -> None:
    """Send a call of rank 0 to all other ranks."""
    group.tell(_encoder.encode(call))


def follow(runner: Runner, group: RankGroup, adapters: AdapterStore | None = None) -> None:
    """Do what rank 0's runner does, until it ends. adapters: this rank's parts; None: requests have none."""
    while True:
        call: _Call = _decoder.decode(group.hear())
        match call:
            case _Begin():
                runner.begin(call.batch())
                if call.runs:
                    runner.advance()
            case _Advance(num_layers):
                runner.advance(num_layers)
            case _Compact(counts):
                runner.compact(counts.array())
            case _Logits(rows):
                runner.logits(rows.array())
            case _FillCache(layout):
                runner.fill_cache(layout.layout())
            case PlaceAdapter(slot, digest):
                assert adapters is not None, "adapters are placed where requests have some"
                adapters.place(slot, digest)
            case DropAdapter(digest):
                assert adapters is not None, "adapters are dropped where requests have some"
                adapters.drop_adapter(digest)
            case _Compare():
                group.gather(runner.checksum())
            case _Beat():
                group.all_reduce(torch.zeros(1))
            case _End():
                return
