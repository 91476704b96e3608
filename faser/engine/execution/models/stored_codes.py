"""A checkpoint that stores products as integers with scales: gives them as they are, or dequantised tensors.

The integers of AWQ, GPTQ and compressed-tensors lie in 32-bit words, 8 of 4 bits or 4 of 8 bits, from the lowest
bits on. K inputs, N outputs, G groups of a row; w words an axis:

    layout           integers                zero points                    scales
    awq              qweight [K, N w]        qzeros [G, N w]                scales [G, N]
    gptq             qweight [K w, N]        qzeros [G, N w]                scales [G, N]
    pack-quantized   weight_packed [N, K w]  weight_zero_point [N w, G]     weight_scale [N, G]
    int-quantized    weight [N, K] int8      weight_zero_point [N, G] int8  weight_scale [N, G]

In a word of AWQ, integer i is that of column _AWQ_ORDER[i] of eight. A weight is (integer - zero point) * scale,
all of them unsigned; compressed-tensors adds half of the range to both before packing. GPTQ (checkpoint_format
gptq) stores a zero point less one, modulo the range. Knows neither configs nor backends.

Sources: the packing of AutoAWQ (WQLinear_GEMM), AutoGPTQ (QuantLinear) and compressed-tensors (pack_to_int32).
"""

from collections.abc import Container

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.engine.checkpoints.quantized import Layout, StoredLowBit
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.low_bit.rows import LowBitRows, group_rows

_Order = npt.NDArray[np.int32]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The tensor with a product's integers, and those next to it: zero points, scales, groups of columns, shape.
_ENDINGS = {
    Layout.AWQ: ("qweight", "qzeros", "scales", "g_idx", ""),
    Layout.GPTQ: ("qweight", "qzeros", "scales", "g_idx", ""),
    Layout.PACKED: ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape"),
    Layout.INTEGERS: ("weight", "weight_zero_point", "weight_scale", "weight_g_idx", ""),
}
# Scales of activations and caches, which FASER does not use.
_UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")


class CodeSource:
    """A WeightSource over a quantised checkpoint: `get` dequantises, and `names` are those of plain weights.

    expected: names of the model's tensors. Old GPTQ checkpoints have a bias of zeros for every product; those that
    the model lacks are left out.
    """

    def __init__(self, source: WeightSource, stored: StoredLowBit, expected: Container[str]) -> None:
        self._source = source
        self._stored = stored
        self._ending, self._zeros, self._scales, self._groups, self._shape = _ENDINGS[stored.layout]
        known = set(source.names())
        self._products = {
            _product(name)
            for name in known
            if name.endswith(f".{self._ending}") and f"{_product(name)}.{self._scales}" in known
        }
        own = (self._ending, self._zeros, self._scales, self._groups, self._shape)
        hidden = {f"{product}.{ending}" for product in self._products for ending in own}
        self._known = known
        self._names = [f"{product}.weight" for product in sorted(self._products)]
        for name in source.names():
            is_unused = name.endswith(_UNUSED) or self._is_empty_bias(name, expected)
            if name not in hidden and not is_unused:
                self._names.append(name)

    def names(self) -> list[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        """The tensor: float32 if it is quantised, else in the stored dtype."""
        quantised = self.rows(name)
        return self._source.get(name) if quantised is None else torch.from_numpy(quantised.dequantised())

    def rows(self, name: str) -> LowBitRows | None:
        """A product's integers and scales; None: it is not quantised.

        Raises ModelError that names a tensor whose type, shape or values do not fit.
        """
        product = _product(name)
        if product not in self._products or not name.endswith(".weight"):
            return None
        scales = self._scales_of(product)
        codes, bits = self._codes(product)
        num_rows, depth = codes.shape
        if scales.numel() == 1 and self._stored.layout is Layout.INTEGERS:  # one scale for the tensor
            scales = scales.expand(num_rows, 1)
        num_groups = scales.shape[1]
        if len(scales) != num_rows or num_groups == 0 or depth % num_groups:
            raise ModelError(
                f"{product} has integers of {[num_rows, depth]} and scales of {list(scales.shape)}; each row must "
                "have one, or one for each of its groups, which are of one size"
            )
        zero_point = 1 << bits - 1
        zeros = self._zero_points(product, bits, num_rows, num_groups)
        minimums = None
        if zeros is not None and bool((zeros != zero_point).any()):
            minimums = ((zero_point - zeros.int()).float() * scales).numpy()
        order = self._order(product, depth, num_groups)
        if order is not None:
            codes = codes[:, torch.from_numpy(order.astype(np.int64))]
        try:
            part = group_rows(
                codes.numpy(), bits=bits, zero_point=zero_point, scales=scales.numpy(), minimums=minimums
            )
        except ConfigError as error:
            raise ModelError(f"{product}: {error}") from None
        return LowBitRows(parts=(part,), order=order)

    def _codes(self, product: str) -> tuple[Tensor, int]:
        """Return the codes [N, K] uint8 of a product, and their number of bits."""
        name = f"{product}.{self._ending}"
        if self._stored.layout is Layout.INTEGERS:
            return codes_of_bytes(self._typed(name, torch.int8)), 8
        words = self._typed(name, torch.int32)
        if self._stored.layout is Layout.AWQ:
            return awq_codes(words), 4
        if self._stored.layout is Layout.GPTQ:
            (bits,) = self._stored.bits
            return codes_of_words(words.t(), bits), bits
        stored_shape = self._source.get(f"{product}.{self._shape}")
        if stored_shape.numel() != 2 or stored_shape.is_floating_point():
            raise ModelError(
                f"tensor {product}.{self._shape} is {_described(stored_shape)}; it must be two integers"
            )
        shape = stored_shape.flatten().tolist()
        fitting = [bits for bits in (4, 8) if -(-shape[1] * bits // 32) == words.shape[1]]
        if shape[0] != len(words) or not fitting or fitting[0] not in self._stored.bits:
            raise ModelError(
                f"tensor {name} has {list(words.shape)} words for {shape} integers, which are not of "
                f"{' or '.join(map(str, self._stored.bits))} bits"
            )
        return codes_of_words(words, fitting[0])[:, : shape[1]], fitting[0]

    def _scales_of(self, product: str) -> Tensor:
        """Return the scales [N, G] float32 of a product, finite."""
        name = f"{product}.{self._scales}"
        scales = self._source.get(name)
        if not scales.dtype.is_floating_point or scales.dim() > 2 or scales.numel() == 0:
            raise ModelError(f"tensor {name} is {_described(scales)}; scales are a matrix of floats")
        wide = scales.float()
        if wide.dim() < 2:
            wide = wide.reshape(-1, 1)
        if self._stored.layout in (Layout.AWQ, Layout.GPTQ):
            wide = wide.t()
        if not bool(wide.isfinite().all()):
            raise ModelError(f"tensor {name} has scales that are not finite")
        return wide.contiguous()

    def _zero_points(self, product: str, bits: int, num_rows: int, num_groups: int) -> Tensor | None:
        """Return the zero points [N, G] uint8 of a product; None: they are all half of the range."""
        name = f"{product}.{self._zeros}"
        if name not in self._known:
            return None
        stored = self._source.get(name)
        layout = self._stored.layout
        if layout in (Layout.AWQ, Layout.GPTQ):
            stored = self._typed(name, torch.int32)
        elif stored.dtype not in (torch.int8, torch.int32) or not 1 <= stored.dim() <= 2 or not stored.numel():
            raise ModelError(f"tensor {name} is {_described(stored)}; it must be a matrix of int8 or int32")
        if layout is Layout.AWQ:
            zeros = awq_codes(stored)
        elif layout is Layout.GPTQ:
            zeros = codes_of_words(stored, bits).t()[:num_rows] + self._stored.zero_offset & (1 << bits) - 1
        elif stored.dtype is torch.int32:
            zeros = codes_of_words(self._typed(name, torch.int32).t(), bits).t()[:num_rows]
        else:
            zeros = (stored.int() + (1 << bits - 1)).to(torch.uint8).reshape(len(stored), -1)
            zeros = zeros.expand(num_rows, -1) if len(zeros) == 1 else zeros
        if zeros.shape != (num_rows, num_groups):
            raise ModelError(
                f"tensor {name} is {_described(stored)}; {product} has {num_rows} rows of {num_groups} groups"
            )
        return zeros

    def _order(self, product: str, depth: int, num_groups: int) -> _Order | None:
        """The columns by their groups; None: groups are consecutive columns."""
        name = f"{product}.{self._groups}"
        if name not in self._known:
            return None
        groups = self._source.get(name)
        if groups.dim() != 1 or groups.is_floating_point():
            raise ModelError(f"tensor {name} is {_described(groups)}; it must be a list of integers")
        groups = groups.long()
        size = depth // num_groups
        if len(groups) == depth and bool((groups == -1).all()):
            return None
        if len(groups) != depth or not bool((groups.sort().values == torch.arange(depth) // size).all()):
            raise ModelError(f"tensor {name} must give each of {num_groups} groups {size} of the {depth} columns")
        if bool((groups == torch.arange(depth) // size).all()):
            return None
        return groups.argsort(stable=True).numpy().astype(np.int32)

    def _typed(self, name: str, dtype: torch.dtype) -> Tensor:
        found = self._source.get(name)
        if found.dtype is not dtype or found.dim() != 2:
            wanted = str(dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} is {_described(found)}; it must be a matrix of {wanted}")
        return found

    def _is_empty_bias(self, name: str, expected: Container[str]) -> bool:
        if self._stored.layout is not Layout.GPTQ or not name.endswith(".bias") or name in expected:
            return False
        return name.removesuffix(".bias") in self._products and not bool(self._source.get(name).any())


def _product(name: str) -> str:
    return name.rpartition(".")[0]


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def awq_codes(words: Tensor) -> Tensor:
    """Unpack words [K, N / 8] int32 into codes [N, K] uint8."""
    across = words.t().contiguous()
    width, depth = across.shape
    codes = torch.empty((width, 8, depth), dtype=torch.uint8)
    for place, column in enumerate(_AWQ_ORDER):
        codes[:, column] = (across >> 4 * place & 15).to(torch.uint8)
    return codes.view(8 * width, depth)


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """Unpack words [R, C] int32 into their integers in order: [R, C * 32 / bits] uint8."""
    rows, width = words.shape
    octets = words.contiguous().flatten().view(torch.uint8).view(rows, 4 * width)
    if bits == 8:
        return octets
    codes = torch.empty((rows, 4 * width, 2), dtype=torch.uint8)
    torch.bitwise_and(octets, 15, out=codes[..., 0])
    torch.bitwise_right_shift(octets, 4, out=codes[..., 1])
    return codes.view(rows, 8 * width)


def codes_of_bytes(values: Tensor) -> Tensor:
    """Return signed bytes plus 128: [N, K] uint8."""
    return values.contiguous().view(torch.uint8) ^ 128
