"""Stands for the measurements that choose between ways of computing the same."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cuda.choices import Choices


class Chosen(Choices):
    """Names that one of `ways` which is among those of a key. keys: asked for.

    computes: how the keys begin of which all ways are computed, and must agree.
    """

    def __init__(self, *ways: str, computes: str = "") -> None:
        super().__init__()
        self.ways = ways
        self.keys: list[str] = []
        self._computes = computes

    @property
    def can_measure(self) -> bool:
        return True

    def fastest(
        self,
        key: str,
        ways: Mapping[str, Callable[[], Tensor]],
        *,
        tolerance: float,
        expected: Callable[[], Tensor] | None = None,
    ) -> str:
        self.keys.append(key)
        if key.startswith(self._computes):
            wanted, *others = (way().float() for way in ways.values())
            wanted = wanted if expected is None else expected().float()
            for each in others:
                assert_close(each, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
        return next(each for each in self.ways if each in ways)
