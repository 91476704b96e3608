"""Low-bit weights made while a checkpoint in 16 or 32 bits is loaded."""

import torch

from faser.engine.execution.models import tensors
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ModelError
from faser.kernels.interface.low_bit.quantise import INT4, INT8, FloatRows, Scheme
from faser.kernels.interface.low_bit.rows import LowBitRows

QUANTIZATIONS = {"int8": INT8, "int4": INT4}
_LARGEST = 2.0**15  # half floats hold the scales and minimums of smaller weights


class RoundedSource:
    """Gives the matrices of a checkpoint as rows that are quantised when they are packed.

    quantization: int8; or int4, under which embedding, head and the weights of values have 8 bits: in SmolLM2-135M
    the last are a hundredth of the bytes and cost half of the quality (docs/quantization.md).
    """

    def __init__(self, source: WeightSource, quantization: str) -> None:
        self._source = source
        self._quantization = quantization

    def rows(self, name: str) -> LowBitRows | None:
        """None: not a matrix. Raises ModelError for weights that are no numbers, or too large for the scales."""
        weight = self._source.get(name)
        if weight.dim() != 2:
            return None
        low, high = (float(end) for end in torch.aminmax(weight))
        if not (low > -_LARGEST and high < _LARGEST):
            raise ModelError(
                f"tensor {name} has values from {low:g} to {high:g}; --quantization {self._quantization} rounds "
                f"those between -{_LARGEST:g} and {_LARGEST:g}"
            )
        return LowBitRows(parts=(FloatRows(weight=weight, scheme=self.scheme(name)),))

    def scheme(self, name: str) -> Scheme:
        has_8_bits = name in (tensors.EMBEDDING, tensors.HEAD) or tensors.is_of_values(name)
        return INT8 if has_8_bits else QUANTIZATIONS[self._quantization]
