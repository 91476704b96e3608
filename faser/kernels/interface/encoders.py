"""Operations that only encoders need: LayerNorm, and networks without a gate. Torch's are the reference."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from faser.types.activation import Activation

ONE_INPUT: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.GELU: functional.gelu,
}


class EncoderKernels(Protocol):
    """Kernels of a backend. Rows are independent as those of Backend are."""

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        wide: Tensor | None,
        out: Tensor | None,
    ) -> None:
        """Write (x[r] - mean) / sqrt(variance + eps) * weight (+ bias) to wide, to out, or to both.

        x, wide: [R, D] float32; wide may be x. out: [R, D], rounded to its dtype. weight, bias: [D] float32.
        """
        ...

    def activate(self, x: Tensor, activation: Activation) -> None:
        """Replace x by activation(x). x: [R, D], of the backend's types. Only for those of ONE_INPUT."""
        ...


class TorchEncoderKernels:
    """EncoderKernels of torch operators, on any device."""

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        wide: Tensor | None,
        out: Tensor | None,
    ) -> None:
        normed = functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        for each in (wide, out):
            if each is not None:
                each.copy_(normed)

    def activate(self, x: Tensor, activation: Activation) -> None:
        x.copy_(ONE_INPUT[activation](x))
