"""LoRA adapters as files (arXiv:2106.09685): a folder in PEFT's format here, a GGUF file in gguf_adapter.py.

What is read is checked as far as that is possible without the model. Knows no model and no kernels; torch is
imported only where values are asked for.
"""

import logging
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.adapter_parts import (
    LAYERS,
    AdapterFile,
    Factors,
    Shape,
    checked_part,
    checked_parts,
    read_whole,
)
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.wrappers import text_name
from faser.engine.checkpoints.gguf_adapter import open_gguf_adapter
from faser.errors import ModelError
from faser.files import parse_json
from faser.types.adapter import Adapter

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG, WEIGHTS)  # of a repository on the hub
_PICKLED = "adapter_model.bin"
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8  # the first bytes of safetensors: the length of their header
_FLOATS = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_PLAIN_KEY = re.compile(r"\^?[\w.]+")
# Fields of adapter_config.json that ask for more than low-rank products, and for what.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of lora_B",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "trained embeddings of tokens",
    "target_parameters": "low-rank additions to parameters",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal factors",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
_SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # init_lora_weights; others change the base's
# Fields that say how an adapter was trained, or what its tensors show.
_OF_TRAINING = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias"),
        *("fan_in_fan_out", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config"),
        *("ensure_weight_tying",),
    }
)

_log = logging.getLogger("faser")


def read_adapter(name: str, path: Path, *, max_rank: int) -> Adapter:
    """Digest and check the adapter at path; name: of the model of requests that want it. See open_adapter."""
    file = open_adapter(path, max_rank=max_rank)
    file.close()
    return Adapter(name=name, path=str(path), digest=file.digest)


def open_adapter(path: Path, *, max_rank: int) -> AdapterFile:
    """Read an adapter: a folder with adapter_config.json and adapter_model.safetensors, or a .gguf file.

    Raises ModelError that names the file and the field or the tensor: files that are missing or damaged, a rank
    above max_rank, half a part, a part outside the layers, a feature beyond low-rank products.
    """
    if path.suffix == ".gguf":
        digest = blake2b(digest_size=_DIGEST_BYTES)
        content = read_whole(path, digest)
        return open_gguf_adapter(path, content, digest.hexdigest(), max_rank=max_rank)
    if not path.is_dir():
        raise ModelError(f"{path} is no adapter; name a folder with {CONFIG} and {WEIGHTS}, or a .gguf file")
    if (path / _PICKLED).is_file() and not (path / WEIGHTS).is_file():
        raise ModelError(
            f"{path / _PICKLED} is a pickle, which may run code when it is read; save the adapter as {WEIGHTS}"
        )
    return _open_peft(path, max_rank)


def _open_peft(folder: Path, max_rank: int) -> AdapterFile:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    stated = read_whole(folder / CONFIG, digest)
    digest.update(len(stated).to_bytes(_LENGTH_BYTES, "little"))
    content = read_whole(folder / WEIGHTS, digest)
    config = _PeftConfig(folder / CONFIG, _parsed(folder / CONFIG, stated[:]))
    places = _places(folder / WEIGHTS, content)
    stored: dict[str, dict[str, str]] = {}
    for name in places:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{folder / WEIGHTS} has a tensor {name}; FASER reads lora_A and lora_B of linear layers alone"
            )
        module = match["module"]
        factors = stored.setdefault(module if module.startswith(LAYERS) else _hub_name(module), {})
        if factors.setdefault(match["factor"], name) != name:
            raise ModelError(f"{folder / WEIGHTS} has lora_{match['factor']} of {module} twice")
    parts, names = {}, {}
    for module, factors in stored.items():
        down, up = (places[factors[each]].shape if each in factors else None for each in "AB")
        part = checked_part(folder / WEIGHTS, module, down, up, partial(config.scale, module), max_rank)
        parts[module], names[module] = part, (factors["A"], factors["B"])

    def factors_of(module: str, _spec: DecoderSpec) -> Factors:
        down, up = (places[each].tensor(content) for each in names[module])
        return down, up

    return AdapterFile(
        path=folder,
        digest=digest.hexdigest(),
        parts=checked_parts(folder / WEIGHTS, parts),
        base=config.base,
        architecture=None,
        factors=factors_of,
        content=content,
    )


class _PeftConfig:
    """The fields of adapter_config.json that answers depend on. Raises ModelError for those that are refused."""

    def __init__(self, path: Path, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"{path} contains {type(fields).__name__}; it must contain an object")
        self._path = path
        if (kind := fields.get("peft_type")) != "LORA":
            raise ModelError(f"{path}: peft_type is {kind!r}; FASER serves LORA")
        for name, meaning in _REFUSED.items():
            if fields.get(name):
                raise ModelError(f"{path}: {name} is {fields[name]!r}; FASER does not support {meaning}")
        if (bias := fields.get("bias", "none")) != "none":
            raise ModelError(f"{path}: bias is {bias!r}; FASER adapts no biases, it must be 'none'")
        if (made := fields.get("init_lora_weights")) not in _SAME_BASE:
            raise ModelError(
                f"{path}: init_lora_weights is {made!r}, which changes the weights of the base model; convert the "
                "adapter to a plain one (PEFT: path_initial_model_for_weight_conversion)"
            )
        if ignored := sorted(name for name, value in fields.items() if value and name not in _OF_TRAINING):
            _log.warning("%s: ignoring %s, which FASER does not know", path, ", ".join(ignored))
        base = fields.get("base_model_name_or_path")
        self.base = base if isinstance(base, str) and base else None
        self._rank = self._number("r", fields.get("r"))
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha"))
        self._stabilised = bool(fields.get("use_rslora"))
        self._ranks, self._alphas = (self._pattern(fields, name) for name in ("rank_pattern", "alpha_pattern"))

    def scale(self, module: str, rank: int) -> float:
        """Return what up @ down is multiplied by: alpha / r, or alpha / √r if it is rank-stabilised.

        Source of the latter: arXiv:2312.03732. rank: of the tensors; raises ModelError if r is another number.
        """
        if (stated := _by_pattern(self._ranks, module, self._rank)) != rank:
            raise ModelError(f"{self._path}: r of {module} is {stated:g}; its lora_A has {rank} rows")
        return _by_pattern(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._stabilised else rank)

    def _pattern(self, fields: Mapping[str, Any], name: str) -> Mapping[str, float]:
        """Return a number for each name of modules. PEFT takes regular expressions, of which names are read."""
        found = fields.get(name) or {}
        if not isinstance(found, dict):
            raise ModelError(f"{self._path}: {name} is {found!r}; it must be an object")
        for key in found:
            if not _PLAIN_KEY.fullmatch(key):
                raise ModelError(
                    f"{self._path}: {name} has the regular expression {key!r}; FASER reads names of modules alone"
                )
        return {key: self._number(f"{name} of {key}", value) for key, value in found.items()}

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1 << 32:
            raise ModelError(f"{self._path}: {name} is {value!r}; it must be a number")
        return float(value)


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the number of the first key that names a module, whole or from a dot on, as PEFT finds it."""
    for key, value in pattern.items():
        whole = key.removeprefix("^")
        if module == whole or (key == whole and module.endswith(f".{key}")):
            return value
    return default


def _hub_name(module: str) -> str:
    """Return a module's name within a text model; of one that is named without it, with the prefix model."""
    name = text_name(f"{module}.").removesuffix(".")
    return f"model.{name}" if name.startswith("layers.") else name


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a tensor in safetensors. dtype: as torch names it. start: its first byte."""

    dtype: str
    shape: Shape
    start: int
    num_bytes: int

    def tensor(self, content: mmap.mmap) -> "torch.Tensor":
        """Return the tensor, which shares the memory of content where it is aligned there."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.start % dtype.itemsize:
            aligned = bytearray(content[self.start : self.start + self.num_bytes])
            return torch.frombuffer(aligned, dtype=dtype).reshape(self.shape)
        count = self.num_bytes // dtype.itemsize
        return torch.frombuffer(content, dtype=dtype, count=count, offset=self.start).reshape(self.shape)


def _places(path: Path, content: mmap.mmap) -> dict[str, _Place]:
    """Locate the tensors of a safetensors file. Raises ModelError: damage, or a tensor of no float type."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    data = _LENGTH_BYTES + length
    if data > len(content):
        raise ModelError(f"{path} is damaged or cut short: its {len(content)} bytes are too few for its header")
    header = _parsed(path, content[_LENGTH_BYTES:data])
    if not isinstance(header, dict):
        raise ModelError(f"{path} is damaged: its header is {type(header).__name__}, and no object")
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(first), int(last)]} if all(
                isinstance(size, int) and size >= 0 for size in shape
            ):
                pass
            case _:
                raise ModelError(f"{path} is damaged: its header does not describe {name}")
        if kind not in _FLOATS:
            raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(_FLOATS)}")
        dtype, size = _FLOATS[kind]
        if not 0 <= first <= last <= len(content) - data or last - first != math.prod(shape) * size:
            raise ModelError(f"{path} is damaged or cut short: it does not hold all of {name}")
        places[name] = _Place(dtype, tuple(shape), data + first, last - first)
    return places


def _parsed(path: Path, text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}") from None
