"""Sources of weights: safetensors files as they are, the text half of a vision-language model, 8-bit floats,
GGUF blocks, or rounding while loading.

A WeightSource (weights.py) gives tensors under the hub's names. Quantised ones also give rows as they are stored,
for backends that multiply them so; stored_codes.py has the integers of AWQ, GPTQ and compressed-tensors. Knows
neither configs nor backends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from faser.engine.checkpoints.families.wrappers import text_name
from faser.engine.checkpoints.gguf_weights import GgufSource
from faser.engine.execution.models import tensors
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ModelError
from faser.files import parse_json
from faser.kernels.interface.fp8 import FP8, Fp8Rows
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import INT4, INT8, FloatRows, LowBitRows, Scheme, block_rows

QUANTIZATIONS = {"int8": INT8, "int4": INT4}
_LENGTH_BYTES = 8  # the first bytes of a file: the length of its header
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_INTEGERS = (torch.int32, torch.int8, torch.uint8, torch.int64)  # of quantised weights
_DTYPES = (*_FLOATS, *_INTEGERS, torch.bool)  # booleans: the vocabulary of a head
_LARGEST = 2.0**15  # half floats hold the scales and minimums of smaller weights
# Scales that FASER does not use. Activations get a scale per row in every step, finer than one fixed scale for all
# rows; keys and values are stored with a scale of one.
_OF_CACHE = (".k_scale", ".v_scale", ".kv_scale")
_UNUSED = (".input_scale", ".output_scale", ".q_scale", *_OF_CACHE)
_WITHIN, _BARE = "model.", "embed_tokens.weight"
# Of multimodal models: prefixes of what is not of the text half.
_NOT_TEXT = tuple(
    within + part
    for within in ("", "model.")
    for part in (
        "visual.",
        "vision_tower.",
        "vision_adapter.",
        "vision_projection.",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "vision_embedder.",
    )
)


class SafetensorsSource:
    """A WeightSource over a checkpoint directory. The files stay mapped as long as this object lives.

    Raises ModelError that names a missing, truncated or damaged file.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of = _files_by_tensor(directory)
        self._open = {path: _open(path) for path in sorted(set(self._file_of.values()))}
        held = {path: set(file.keys()) for path, file in self._open.items()}
        for name, path in self._file_of.items():
            if name not in held[path]:
                raise ModelError(f"{path} has no tensor {name}, which {_INDEX} places there")

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the header of the tensor's file."""
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """A view of the mapped file, on the CPU, in the stored dtype. Raises ModelError for unsupported dtypes."""
        path = self._file_of[name]
        try:
            tensor: Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: its tensor {name} cannot be read") from error
        if tensor.dtype not in _DTYPES:
            stored = str(tensor.dtype).removeprefix("torch.")
            read = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ModelError(f"{path}: {name} is stored as {stored}; supported are {read}")
        return tensor


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    """The file of every tensor. A single file takes precedence over an index."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        raise ModelError(f"{directory} holds neither {_SINGLE} nor {_INDEX}; only safetensors weights are read")
    try:
        weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): directory / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error
    for path in set(found.values()):
        if path.parent != directory or path.suffix != ".safetensors":
            raise ModelError(f"{index} names {path}; weights are .safetensors files in the folder of their index")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(_damage(path)) from error


def _damage(path: Path) -> str:
    """Describe the fault of a file that the library cannot open, by its format: a header, then tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
        return f"{path} is damaged or cut short: its {size} bytes are too few for the header of a safetensors file"
    return f"{path} is damaged or cut short: its {size} bytes are not those that its header describes"


class RenamedSource:
    """A WeightSource over a checkpoint that stores a text model under other names. names: the stored ones by ours.

    Tensors without a name of ours are left out.
    """

    def __init__(self, source: SafetensorsSource, names: Mapping[str, str]) -> None:
        self._source = source
        self._stored_names = names

    def names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the header of the tensor's file."""
        return self._source.shape(self._stored_names[name])

    def get(self, name: str) -> Tensor:
        return self._source.get(self._stored_names[name])


def with_text_names(source: SafetensorsSource) -> RenamedSource:
    """Return the tensors of the text half of a vision-language model, under the names of a text model.

    The tensors of the vision half and of the projector are left out; a name of neither half stays as it is.
    """
    names = {text_name(name): name for name in source.names() if not name.startswith(_NOT_TEXT)}
    return RenamedSource(source, names)


def with_model_prefix(source: SafetensorsSource) -> SafetensorsSource | RenamedSource:
    """Return the tensors of a model that was stored without its head, named as within a whole one.

    Models of embeddings are stored so: transformers then leaves the prefix out.
    """
    names = source.names()
    if _BARE not in names:
        return source
    return RenamedSource(source, {f"{_WITHIN}{name}": name for name in names})


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


def gguf_rows(source: GgufSource, name: str) -> LowBitRows | None:
    """A weight of a GGUF file in its blocks; None: it is not stored in a format of low-bit products."""
    if source.format(name) not in FORMATS:
        return None
    name_of_format, blocks = source.blocks(name)
    return block_rows(name_of_format, blocks, source.shape(name)[-1])


def block_formats(source: GgufSource) -> str:
    """The formats in which a GGUF file stores weights of low-bit products, each with its memory form."""
    found = sorted({source.format(name) for name in source.names()} & FORMATS.keys())
    return ", ".join(f"{name} ({FORMATS[name].form.description})" for name in found)


def rounded_rows(source: WeightSource, quantization: str, name: str) -> LowBitRows | None:
    """A matrix of a checkpoint in 16 or 32 bits, as rows that are rounded when they are packed; None: no matrix.

    Raises ModelError for weights that are no numbers, or too large for the scales.
    """
    weight = source.get(name)
    if weight.dim() != 2:
        return None
    low, high = (float(end) for end in torch.aminmax(weight))
    if not (low > -_LARGEST and high < _LARGEST):
        raise ModelError(
            f"tensor {name} has values from {low:g} to {high:g}; --quantization {quantization} rounds those "
            f"between -{_LARGEST:g} and {_LARGEST:g}"
        )
    return LowBitRows(parts=(FloatRows(weight=weight, scheme=rounding_scheme(quantization, name)),))


def rounding_scheme(quantization: str, name: str) -> Scheme:
    """quantization: int8; or int4, under which embeddings, head and the weights of values have 8 bits.

    In SmolLM2-135M the last are a hundredth of the bytes and cost half of the quality (docs/quantization.md).
    """
    has_8_bits = name in (tensors.EMBEDDING, tensors.HEAD, tensors.TOKEN_EMBEDDING) or tensors.is_of_values(name)
    return INT8 if has_8_bits else QUANTIZATIONS[quantization]
