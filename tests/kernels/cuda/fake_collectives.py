"""Collectives of emulated devices: gloo between the processes, captured by emulated CUDA graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from faser.engine.execution.ranks.group import RankGroup
from tests.kernels.cuda.fake_device import FakeAccelerator


class FakeCollectives:
    """See DeviceCollectives. group: carries the numbers. change: done to the rank's part of each sum."""

    def __init__(
        self, accelerator: FakeAccelerator, group: RankGroup, change: Callable[[Tensor], object] | None = None
    ) -> None:
        self._accelerator, self._group, self._change = accelerator, group, change

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        def work() -> None:
            if self._change is not None:
                self._change(x)
            self._group.all_reduce(x)

        assert x.is_contiguous()
        self._accelerator.launch(work)
        return x

    def gather(self, part: Tensor) -> list[Tensor] | None:
        whole = part.new_empty((self._group.size, *part.shape))

        def work() -> None:
            if (found := self._group.gather(part)) is not None:
                torch.stack(found, out=whole)

        assert part.is_contiguous()
        self._accelerator.launch(work)
        return None if self._group.rank else [*whole.unbind()]

    def broadcast(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self._accelerator.launch(lambda: self._group.broadcast(x))
