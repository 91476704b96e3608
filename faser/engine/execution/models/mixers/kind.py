"""MixerKind: what is said of a kind of mixer once, for checkpoints, states and kernels.

A kind's module has its sizes, the names and shapes of its tensors, and how they are packed; its arithmetic is the
Mixer that it packs. Products before and behind the mixer belong to the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec, MixerSpec
from faser.kernels.interface.mixers import Mixer, MixerShape
from faser.kernels.interface.shapes import PackedLinear
from faser.types.arrays import Ints

Shape = tuple[int, ...]
Spec = TypeVar("Spec", bound=MixerSpec)


class MixerPacker(Protocol):
    """The parts of Packer (execution/models/weights.py) that mixers need. Names are whole names of tensors."""

    def layer_product(self, *names: str, orders: Sequence[Ints | None] = ()) -> PackedLinear: ...
    def floats(self, *names: str, orders: Sequence[Ints | None] = ()) -> PackedLinear: ...
    def convolution(self, name: str) -> Tensor: ...
    def norm(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerWeights:
    """A mixer, packed. product: of the layer's normalised inputs. rates: the second, unquantised; None: none."""

    product: PackedLinear
    mixer: Mixer
    rates: PackedLinear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerKind(Generic[Spec]):
    """Functions of a mixer's spec and of the decoder that has it. out: name of the product behind the mixer.

    shapes: of its tensors, that product included, without the layer's prefix, which pack gets.
    """

    out: str
    shape: Callable[[Spec, DecoderSpec], MixerShape]
    shapes: Callable[[Spec, DecoderSpec], dict[str, Shape]]
    pack: Callable[[Spec, DecoderSpec, str, MixerPacker], MixerWeights]
