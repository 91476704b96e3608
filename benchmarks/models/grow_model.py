"""Writes a checkpoint that says what another one says, at several times its cost; or a noisy copy to draft with.

    python -m benchmarks models.grow_model OUT_DIR [--source MODEL] [--hidden 1728] [--noise 0]
    python -m benchmarks models.grow_model OUT_DIR --drafter [--noise 0.05]

Without a large model at hand this makes a target and a drafter out of one small model: real text, real cost,
and an acceptance that depends on the tokens. With x the residual stream (h wide) and Q orthogonal (H by H), the
grown model carries s Q [x; 0] with s = sqrt(H / h), so that the mean square which RMSNorm takes stays the same.

    reads the stream   W'  = [W diag(g), R] Qᵀ / s    g: the norm before it, now all ones; R: random, meets zeros
    writes the stream  W'  = s Q [W; 0]
    further units      in pairs that read alike and write opposite values; a unit without a partner writes zeros

Embedding and head part, because the last norm can be folded into one of them only; a step costs the same.
Owns the arithmetic and the files; knows no engine. Tensors are made a layer at a time: memory peaks below 2 GiB.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engines import model_directory
from benchmarks.runner import command_line, write_json
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors
from faser.engine.execution.models.loader import open_source
from faser.engine.execution.models.weights import WeightSource

_SEED = 20260423
_ALONGSIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATES = ("chat_template.jinja",)
_NORMS = ("input_layernorm", "post_attention_layernorm")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", help="checkpoint directory to start from (default: the embedded model)")
    parser.add_argument(
        "--hidden", type=int, default=1728, help="width of the grown model (default 1728); the source's: rotated"
    )
    parser.add_argument("--noise", type=float, help="Gaussian noise on the source's matrices, in their own std")
    parser.add_argument("--drafter", action="store_true", help="do not grow: write the noisy source (noise 0.05)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    directory = model_directory(options.source)
    noise = options.noise if options.noise is not None else (0.05 if options.drafter else 0.0)
    source = NoisySource(open_source(directory), noise)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    if options.drafter:
        copy_model(directory, source, options.out, dtype)
    else:
        grow_model(directory, source, options.out, options.hidden, dtype)
    spec = read_model_config(options.out).spec
    print(f"{options.out}: {tensors.num_parameters(spec) / 1e6:,.0f} M parameters, hidden {spec.hidden_size}")


def grow_model(directory: Path, source: WeightSource, out: Path, hidden: int, dtype: torch.dtype) -> None:
    """Write the grown checkpoint. Raises ValueError for a width or a model that cannot be grown."""
    spec = read_model_config(directory).spec
    growth = Growth(spec, grown_spec(spec, hidden))
    _write(directory, out, growth.wide, dtype, growth.shards(source))


def copy_model(directory: Path, source: WeightSource, out: Path, dtype: torch.dtype) -> None:
    """Write source's tensors as they are, with all that lies next to them."""
    spec = read_model_config(directory).spec
    copied = {name: source.get(name).to(dtype) for name in tensors.tensor_shapes(spec)}
    _write(directory, out, spec, dtype, iter((copied,)))


def grown_spec(spec: DecoderSpec, hidden: int) -> DecoderSpec:
    """The sizes at another width: heads and units grow with it, their own size and grouping stay."""
    attention = spec.attention
    if (
        attention.qk_norm
        or attention.wide_qk_norm
        or attention.bias
        or attention.out_bias
        or spec.feed_forward.bias
    ):
        raise ValueError("only models without biases and without norms of queries and keys can be grown")
    if hidden < spec.hidden_size:
        raise ValueError(f"hidden is {hidden}; it must be at least the source's, {spec.hidden_size}")
    num_kv_heads = max(spec.num_kv_heads, round(spec.num_kv_heads * hidden / spec.hidden_size))
    inner = max(spec.feed_forward.size, round(spec.feed_forward.size * hidden / spec.hidden_size))
    return resized(spec, hidden, inner, num_kv_heads)


def resized(spec: DecoderSpec, hidden: int, inner: int, num_kv_heads: int) -> DecoderSpec:
    """Other sizes, the same number of query heads a key-value head, a head of its own."""
    num_heads = num_kv_heads * (spec.attention.num_heads // spec.num_kv_heads)
    layers = tuple(
        replace(
            each,
            attention=replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads),
            feed_forward=replace(each.feed_forward, size=inner),
        )
        for each, attention in zip(spec.layers, spec.attentions, strict=True)
    )
    return replace(spec, hidden_size=hidden, layers=layers, tie_word_embeddings=False)


class NoisySource:
    """The tensors of another source, matrices with Gaussian noise of `noise` times the std of their entries.

    A tensor's noise depends on its place among the names alone, so it is the same whenever it is read.
    """

    def __init__(self, source: WeightSource, noise: float) -> None:
        self._source = source
        self._noise = noise
        self._seeds = {name: _SEED + i for i, name in enumerate(sorted(source.names()))}

    def names(self) -> list[str]:
        return list(self._source.names())

    def get(self, name: str) -> Tensor:
        values = self._source.get(name).float()
        if self._noise == 0 or values.ndim < 2:
            return values
        generator = torch.Generator().manual_seed(self._seeds[name])
        return values + self._noise * values.std() * torch.randn(values.shape, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units (rows of what reads, columns of what writes) that are added: pairs of them, and single ones."""

    pairs: int
    singles: int

    @classmethod
    def between(cls, old: int, new: int, width: int = 1) -> "Units":
        """old and new: groups of width units; whole groups are paired."""
        return cls(pairs=(new - old) // 2 * width, singles=(new - old) % 2 * width)


class Growth:
    """From one spec to a wider one. Random parts are seeded and drawn in a fixed order.

    device: where tensors are made; another one draws other random parts.
    """

    def __init__(self, spec: DecoderSpec, wide: DecoderSpec, device: torch.device | str = "cpu") -> None:
        self.spec, self.wide = spec, wide
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(_SEED)
        self._scale = math.sqrt(wide.hidden_size / spec.hidden_size)
        self._rotation = self._orthogonal(wide.hidden_size)  # Q, [H, H]
        groups = spec.num_kv_heads, wide.num_kv_heads
        self._kv_units = Units.between(*groups, spec.head_dim)
        self._query_units = Units.between(*groups, spec.head_dim * (spec.attention.num_heads // spec.num_kv_heads))
        self._inner_units = Units.between(spec.feed_forward.size, wide.feed_forward.size)

    def shards(self, source: WeightSource) -> Iterator[dict[str, Tensor]]:
        """All tensors of the wide spec, float32, in a few groups."""
        head = self._read(source, tensors.EMBEDDING if self.spec.tie_word_embeddings else tensors.HEAD)
        yield {tensors.EMBEDDING: self._written(self._read(source, tensors.EMBEDDING).T, NO_UNITS).T}
        for layer in range(self.spec.num_layers):
            yield self._layer(source, tensors.layer_prefix(layer))
        yield {
            tensors.FINAL_NORM: self._ones(),
            tensors.HEAD: self._reading(head, self._read(source, tensors.FINAL_NORM), NO_UNITS),
        }

    def _layer(self, source: WeightSource, prefix: str) -> dict[str, Tensor]:
        input_norm, post_norm = (self._read(source, f"{prefix}{name}.weight") for name in _NORMS)
        reading = {
            "self_attn.q_proj": (input_norm, self._query_units),
            "self_attn.k_proj": (input_norm, self._kv_units),
            "self_attn.v_proj": (input_norm, self._kv_units),
            "mlp.gate_proj": (post_norm, self._inner_units),
            "mlp.up_proj": (post_norm, self._inner_units),
        }
        writing = {"self_attn.o_proj": self._query_units, "mlp.down_proj": self._inner_units}
        made = {name: self._ones() for name in _NORMS}
        for name, (norm, units) in reading.items():
            made[name] = self._reading(self._read(source, f"{prefix}{name}.weight"), norm, units)
        for name, units in writing.items():
            made[name] = self._written(self._read(source, f"{prefix}{name}.weight"), units)
        return {f"{prefix}{name}.weight": value for name, value in made.items()}

    def _reading(self, weight: Tensor, norm: Tensor, units: Units) -> Tensor:
        """Widen a weight that reads: [out, h] and the [h] norm before it → [out + units, H]."""
        folded = weight * norm
        extra = self._random(len(folded), self.wide.hidden_size - self.spec.hidden_size, std=folded.std())
        kept = torch.cat((folded, extra), dim=1) @ (self._rotation.T / self._scale)
        paired = self._random(units.pairs, kept.shape[1], std=kept.std())
        single = self._random(units.singles, kept.shape[1], std=kept.std())
        return torch.cat((kept, paired, paired, single))

    def _written(self, weight: Tensor, units: Units) -> Tensor:
        """Widen a weight that writes: [h, in] → [H, in + units]."""
        kept = self._scale * self._rotation[:, : self.spec.hidden_size] @ weight
        paired = self._random(len(kept), units.pairs, std=kept.std())
        return torch.cat((kept, paired, -paired, kept.new_zeros(len(kept), units.singles)), dim=1)

    def _read(self, source: WeightSource, name: str) -> Tensor:
        return source.get(name).to(self._device).float()

    def _ones(self) -> Tensor:
        return torch.ones(self.wide.hidden_size, device=self._device)

    def _random(self, rows: int, columns: int, *, std: Tensor) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator, device=self._device) * std

    def _orthogonal(self, size: int) -> Tensor:
        drawn = torch.randn(size, size, generator=self._generator, dtype=torch.float64, device=self._device)
        rotation: Tensor = torch.linalg.qr(drawn)[0].float()
        return rotation


NO_UNITS = Units(pairs=0, singles=0)


def _write(
    directory: Path, out: Path, spec: DecoderSpec, dtype: torch.dtype, shards: Iterator[dict[str, Tensor]]
) -> None:
    """A checkpoint directory like `directory`, with spec's sizes and the tensors of shards, a file for each."""
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(track(shards, "writing shards")):
        file = f"model-{number:05d}.safetensors"
        stored = {name: value.to(dtype).contiguous() for name, value in shard.items()}
        save_file(stored, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
        total_bytes += sum(value.nbytes for value in stored.values())
    _write_json(
        out / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.feed_forward.size,
        "num_attention_heads": spec.attention.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("dtype", None)  # newer files' name of torch_dtype
    _write_json(out / "config.json", config)
    for name in (*_ALONGSIDE, *_TEMPLATES):
        if (directory / name).is_file():
            shutil.copyfile(directory / name, out / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_json(path, content)
