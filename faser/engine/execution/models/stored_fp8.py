"""A checkpoint that stores products as 8-bit floats: gives their values and scales, or dequantised tensors.

A product is quantised if the checkpoint has its scales, in a tensor of its name plus `_scale`: one for the whole
tensor, or one for each output channel. Knows neither configs nor backends.
"""

from torch import Tensor

from faser.engine.execution.models.weights import WeightSource
from faser.errors import ModelError
from faser.kernels.interface.fp8 import FP8, Fp8Rows

# Scales that FASER does not use. Activations get a scale per row in every step, finer than one fixed scale for all
# rows; keys and values are stored with a scale of one.
_OF_CACHE = (".k_scale", ".v_scale", ".kv_scale")
_UNUSED = (".input_scale", ".output_scale", ".q_scale", *_OF_CACHE)


class Fp8Source:
    """A WeightSource over a quantised checkpoint: `get` dequantises, and `names` leaves the scales out.

    has_cache_scales: whether the checkpoint has scales of keys and values, which FASER does not use.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        stored = source.names()
        known = set(stored)
        self._quantised = {name for name in stored if _scale_name(name) in known}
        scales = {_scale_name(name) for name in self._quantised}
        self.has_cache_scales = any(name.endswith(_OF_CACHE) for name in stored)
        self._names = [name for name in stored if name not in scales and not name.endswith(_UNUSED)]

    def names(self) -> list[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        """The tensor: float32 if it is quantised, else in the stored dtype."""
        quantised = self.fp8(name)
        return self._source.get(name) if quantised is None else quantised.dequantised()

    def fp8(self, name: str) -> Fp8Rows | None:
        """A quantised tensor as it is stored, with one scale per row; None: it is not quantised.

        Raises ModelError that names a tensor of another dtype, or scales whose shape does not fit.
        """
        if name not in self._quantised:
            return None
        values, scales = self._source.get(name), self._source.get(_scale_name(name))
        if values.dtype is not FP8 or values.dim() != 2:
            stored = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
            raise ModelError(f"tensor {name} has scales but is {stored}; it must be a float8_e4m3fn matrix")
        rows = len(values)
        if scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
            raise ModelError(
                f"tensor {_scale_name(name)} has shape {list(scales.shape)}; for {name} of {list(values.shape)} "
                f"it must be one scale, [1], or one a row, [{rows}] or [{rows}, 1]"
            )
        return Fp8Rows(values=values, scales=scales.float().reshape(-1).expand(rows).contiguous())


def _scale_name(name: str) -> str:
    return f"{name}_scale"
