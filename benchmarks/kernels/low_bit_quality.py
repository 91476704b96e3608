"""Loss of quality by low-bit weights and by keys and values in int8, on this project's own documents.

    python -m benchmarks kernels.low_bit_quality MODEL.gguf OUT.json [--windows 60] [--tokens 256]

The base is MODEL.gguf dequantised, in float32. Beside it: the same in bfloat16, which is what is served without a
flag; the file with --quantization gguf, whose only further error is that of 8-bit activations; and its weights
quantised once more, by --quantization int8 and int4 and to each of --formats.

A file that is low-bit itself would lose nothing when it is rounded to its own blocks. So before weights are
rounded the channels of the model are shuffled: of the residual stream, between gate and down, and of the values
of a head. The model computes the same, and a block holds weights of many of the file's blocks.

The arms "KV int8" store keys and values with --kv-cache-dtype int8. --formats without a format leaves out the arms
whose weights are quantised once more.

Documents are cut into windows of --tokens tokens; of each the first 32 are context and not counted.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from rich.progress import track

from benchmarks.runner import CHECKOUT, command_line, write_json
from faser.config.environment import cache_dir
from faser.engine.execution.models.loader import load_decoder
from faser.engine.text.tokenizer import load_tokenizer
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from tests.engine.execution.models.paged import PagedModel

_ROOT = CHECKOUT
_CONTEXT = 32
_CHUNK = 256  # rows a step


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--windows", type=int, default=60, help="how many")
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--formats", nargs="*", default=["Q8_0", "Q5_1", "Q4_1", "Q4_0"])
    arguments = parser.parse_args()
    texts = list(windows(arguments.model, arguments.windows, arguments.tokens))
    base = paged_model(arguments.model, arguments.tokens, "none", torch.float32)
    arms = {"float32, KV int8": paged_model(arguments.model, arguments.tokens, "none", torch.float32, torch.int8)}
    for name, quantization in (("bfloat16", "none"), ("as stored", "gguf")):
        for suffix, kv_dtype in (("", None), (", KV int8", torch.int8)):
            arms[name + suffix] = paged_model(
                arguments.model, arguments.tokens, quantization, torch.bfloat16, kv_dtype
            )
    with tempfile.TemporaryDirectory() as folder:
        if arguments.formats:
            arms |= _rounded_once_more(arguments, Path(folder))
        found = compare(base, arms, texts)
    report = {
        "model": arguments.model.name,
        "stored": sorted({tensor.tensor_type.name for tensor in GGUFReader(arguments.model).tensors}),
        "tokens": len(texts) * (arguments.tokens - _CONTEXT - 1),
        "arms": found,
    }
    write_json(arguments.out, report)
    for name, each in found.items():
        print(f"{name:19}", *(f"{key} {value:.4f}" for key, value in each.items()), sep="  ")


def _rounded_once_more(arguments: argparse.Namespace, folder: Path) -> dict[str, PagedModel]:
    """The arms of --quantization and --formats."""
    shuffled = folder / "shuffled.gguf"
    shuffle(arguments.model, shuffled)
    arms = {name: paged_model(shuffled, arguments.tokens, name, torch.bfloat16) for name in ("int8", "int4")}
    for name in track(arguments.formats, description="quantising"):
        path = folder / f"{name}.gguf"
        _quantise(shuffled, path, GGMLQuantizationType[name])
        arms[name] = paged_model(path, arguments.tokens, "gguf", torch.bfloat16)
    return arms


def windows(model: Path, count: int, size: int) -> Iterator[list[int]]:
    """From all over the documents, evenly."""
    tokenizer = load_tokenizer(model)
    whole: list[list[int]] = []
    for path in (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))):
        tokens = tokenizer.encode(path.read_text())
        whole += [tokens[at : at + size] for at in range(0, len(tokens) - size, size)]
    if len(whole) < count:
        raise SystemExit(f"--windows is {count}; the documents have {len(whole)}")
    for i in range(count):
        yield list(whole[i * len(whole) // count])


def paged_model(
    path: Path,
    tokens: int,
    quantization: str | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> PagedModel:
    library = library_path(cache_dir=cache_dir() / "kernels")
    backend = NativeBackend(library, num_threads=torch.get_num_threads())
    decoder = load_decoder(
        path,
        backend,
        dtype,
        max_model_len=tokens,
        max_rows=_CHUNK,
        quantization=quantization,
        progress=lambda *_: None,
    )
    return PagedModel(decoder, backend, block_size=16, max_positions=tokens, kv_dtype=kv_dtype)


def compare(
    base: PagedModel, arms: dict[str, PagedModel], windows: Sequence[Sequence[int]]
) -> dict[str, dict[str, float]]:
    """kl: from the base to an arm, nats a token. same_top: how often the likeliest token is the same."""
    sums: dict[str, dict[str, float]] = {"base": {"loss": 0.0}}
    sums |= {name: {"loss": 0.0, "kl": 0.0, "same_top": 0.0} for name in arms}
    num_tokens = 0
    for window in track(windows, description="windows"):
        wanted = torch.tensor(window[_CONTEXT + 1 :])
        exact = log_probabilities(base, window)
        sums["base"]["loss"] -= _total(exact, wanted)
        num_tokens += len(wanted)
        for name, arm in arms.items():
            found = log_probabilities(arm, window)
            sums[name]["loss"] -= _total(found, wanted)
            sums[name]["kl"] += float((exact.exp() * (exact - found)).sum())
            sums[name]["same_top"] += float((exact.argmax(1) == found.argmax(1)).sum())
    report = {}
    exact_loss = sums["base"]["loss"] / num_tokens
    for name, each in sums.items():
        loss = each.pop("loss") / num_tokens
        report[name] = {"perplexity": round(float(np.exp(loss)), 4)}
        report[name] |= {"perplexity_ratio": round(float(np.exp(loss - exact_loss)), 5)}
        report[name] |= {key: round(value / num_tokens, 5) for key, value in each.items()}
    return report


def log_probabilities(model: PagedModel, window: Sequence[int]) -> torch.Tensor:
    """Return log probabilities [W - context - 1, V], in float32."""
    return model.prefill(window, [_CHUNK] * (len(window) // _CHUNK))[_CONTEXT:-1].float().log_softmax(1)


def _total(log_probabilities: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(log_probabilities.gather(1, tokens[:, None]).double().sum())


def shuffle(source: Path, target: Path) -> None:
    """The same model with its channels in another order, in float32."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    rng = np.random.default_rng(0)
    residual = rng.permutation(shapes["token_embd.weight"][1])
    inner: dict[str, Any] = {}
    values: dict[str, Any] = {}
    num_heads = int(reader.fields[f"{architecture}.attention.head_count"].contents())
    num_kv_heads = int(reader.fields[f"{architecture}.attention.head_count_kv"].contents())
    for name in shapes:
        layer, is_down, _ = name.rpartition(".ffn_down.weight")
        if is_down:
            inner[layer] = rng.permutation(shapes[name][1])
            head_dim = shapes[f"{layer}.attn_v.weight"][0] // num_kv_heads
            values[layer] = rng.permutation(head_dim)

    def order(name: str) -> tuple[Any, Any]:
        """Rows and columns of a tensor; None: as they are."""
        layer, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        if part in ("token_embd", "output"):
            return None, residual
        if part in ("output_norm", "attn_norm", "ffn_norm"):
            return residual, None
        if part in ("attn_q", "attn_k"):
            return None, residual
        if part == "attn_v":
            return _of_heads(values[layer], num_kv_heads), residual
        if part == "attn_output":
            return residual, _of_heads(values[layer], num_heads)
        if part in ("ffn_gate", "ffn_up"):
            return inner[layer], residual
        if part == "ffn_down":
            return residual, inner[layer]
        if part in ("attn_q_norm", "attn_k_norm", "rope_freqs"):
            return None, None
        raise SystemExit(f"{source} has a tensor {name}; which of its channels to shuffle is not known")

    def change(name: str, array: Any) -> tuple[Any, GGMLQuantizationType]:
        rows, columns = order(name)
        array = array if rows is None else array[rows]
        array = array if columns is None or array.ndim == 1 else array[:, columns]
        return np.ascontiguousarray(array, np.float32), GGMLQuantizationType.F32

    _rewrite(reader, target, change)


def _of_heads(channels: Any, num_heads: int) -> Any:
    return (np.arange(num_heads)[:, None] * len(channels) + channels).reshape(-1)


def _quantise(source: Path, target: Path, wanted: GGMLQuantizationType) -> None:
    """Every matrix in one format; the rest as it is."""

    def change(_: str, array: Any) -> tuple[Any, GGMLQuantizationType]:
        if array.ndim == 2:
            return quants.quantize(array, wanted), wanted
        return array, GGMLQuantizationType.F32

    _rewrite(GGUFReader(source), target, change)


def _rewrite(
    reader: GGUFReader, target: Path, change: Callable[[str, Any], tuple[Any, GGMLQuantizationType]]
) -> None:
    """The file with other tensors. change: of a tensor's name and its values in float32."""
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        parts: list[GGUFValueType] = field.types
        inner = parts[-1] if parts[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), parts[0], inner)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        array = quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        data, kind = change(tensor.name, array)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
