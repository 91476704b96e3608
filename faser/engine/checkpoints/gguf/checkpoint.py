"""A GGUF file as a Hugging Face checkpoint: its metadata as a config.json, its weights under the hub's names.

Knows the metadata keys and tensor names of the supported architectures, and undoes llama.cpp's row order of q and
k. Refuses metadata without a counterpart in config.json; the model families check everything else. Imports torch
only in GgufSource.get, so that installing the embedded model needs no torch.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from faser.engine.checkpoints.families import FAMILIES
from faser.engine.checkpoints.gguf.file import Bytes, FloatArray, GgufFile
from faser.errors import ModelError

if TYPE_CHECKING:
    import torch


Number = TypeVar("Number", bound=np.generic)
# By general.architecture. Of two families with the same one, the first: a window then makes a llama a Mistral.
_FAMILIES = {each.gguf: each for each in reversed(FAMILIES) if each.gguf is not None}
_ENDS = ("eos", "eot", "eom")
_SMOLLM3_ROPE_INTERVAL = 4
# llama.cpp stores Llama 3's rope scaling as factors. All published checkpoints compute them from these values.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp reorders the rows of q and k for the rotary embedding it uses for these, and for these only.
_PERMUTED = ("llama", "smollm3")


def gguf_config(path: Path) -> dict[str, Any]:
    """Config dict of a GGUF file. eos_token_id is a list: end of sequence, of turn, of message.

    Raises ModelError that names the key and the value if they cannot be expressed or are not supported.
    """
    return config_of(GgufFile(path))


def config_of(file: GgufFile) -> dict[str, Any]:
    """Config dict of an open GGUF file; see gguf_config."""
    architecture = file.require("general.architecture", str)
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{file.path} is of architecture {architecture}; supported are {known}")
    if experts := file.get(f"{architecture}.expert_count", int, 0):
        raise ModelError(f"{file.path} is a mixture of {experts} experts; only dense models are supported")
    family = _FAMILIES[architecture]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": not file.has_tensor("output.weight"),
        "attention_bias": file.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": file.has_tensor("blk.0.ffn_gate.bias"),
        "torch_dtype": "bfloat16",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": eos_token_ids(file),
    }
    config |= _sizes(file, architecture) | _rope(file, architecture)
    if window := file.get(f"{architecture}.attention.sliding_window", int):
        config |= _window(file, architecture, window)
    if architecture == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layers"] = [int(layer % _SMOLLM3_ROPE_INTERVAL != 0) for layer in layers]
    return config


def eos_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end generation, without duplicates; the end of sequence first.

    Raises ModelError for one that is no token of the file.
    """
    ids: dict[int, None] = {}
    for end in _ENDS:
        key = f"tokenizer.ggml.{end}_token_id"
        if (token_id := file.get(key, int)) is None:
            continue
        vocab_size = _vocab_size(file)
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"{file.path}: {key} is {token_id}, of {vocab_size} tokens")
        ids[token_id] = None
    return list(ids)


def _vocab_size(file: GgufFile) -> int:
    if not file.has_tensor("token_embd.weight"):
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    return file.shape("token_embd.weight")[0]


def _sizes(file: GgufFile, architecture: str) -> dict[str, Any]:
    num_heads = file.size(f"{architecture}.attention.head_count")  # a list, where layers differ, is refused
    num_kv_heads = file.size(f"{architecture}.attention.head_count_kv", num_heads)
    hidden_size = file.size(f"{architecture}.embedding_length")
    intermediate_size = file.size(f"{architecture}.feed_forward_length")
    num_layers, num_tensors = file.size(f"{architecture}.block_count"), len(file.tensor_names())
    if num_layers > num_tensors:
        raise ModelError(f"{file.path}: {architecture}.block_count is {num_layers}, with {num_tensors} tensors")
    head_dim = file.size(f"{architecture}.attention.key_length", hidden_size // num_heads)
    value_dim = file.size(f"{architecture}.attention.value_length", head_dim)
    rotated = file.size(f"{architecture}.rope.dimension_count", head_dim)
    if value_dim != head_dim or rotated != head_dim:
        raise ModelError(
            f"{file.path}: a head has {head_dim} key channels, rotates {rotated}, and has {value_dim} for values; "
            "all three must be equal"
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        # stored as float32; 7 digits recover the original decimal number
        "rms_norm_eps": float(f"{file.require(f'{architecture}.attention.layer_norm_rms_epsilon', float):.7g}"),
        "max_position_embeddings": file.size(f"{architecture}.context_length"),
    }


def _window(file: GgufFile, architecture: str, window: int) -> dict[str, Any]:
    """Sliding window attention. A llama file with a window was converted from a Mistral checkpoint."""
    if architecture == "llama":
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    raise ModelError(
        f"{file.path}: {architecture}.attention.sliding_window is {window}; only llama files may have one"
    )


def _rope(file: GgufFile, architecture: str) -> dict[str, Any]:
    """rope_theta and rope_scaling, as in transformers 4."""
    theta = float(f"{file.get(f'{architecture}.rope.freq_base', float, 10000.0):.7g}")
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    factor = file.get(f"{prefix}.factor", float, 1.0)
    scaling: dict[str, Any] | None = None
    if file.has_tensor("rope_freqs.weight"):
        scaling = _llama3_scaling(file, theta)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = file.size(f"{prefix}.original_context_length")
    elif kind != "none":
        raise ModelError(f"{file.path}: {prefix}.type is {kind}; supported are none, linear and yarn")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3_scaling(file: GgufFile, theta: float) -> dict[str, Any]:
    """The parameters of stored rope factors. Raises ModelError if Llama 3's rule does not yield the factors."""
    factors = file.array("rope_freqs.weight")
    factor = float(f"{factors.max():.7g}")
    if not np.allclose(_llama3_factors(len(factors), theta, factor), factors, rtol=1e-4):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling by {factor:g}; it is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(num_pairs: int, theta: float, factor: float) -> FloatArray:
    """[num_pairs] float32: the divisor of each rotary frequency.

    A wavelength that fits the original context at least _LLAMA3_HIGH times keeps its frequency; one that fits at
    most _LLAMA3_LOW times is divided by factor; in between the two are blended.

    Source: Llama 3.1's reference code, meta-llama/llama-models, apply_scaling.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(num_pairs) / num_pairs)
    fits = _LLAMA3_CONTEXT / wavelengths
    keep = np.clip((fits - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1 / ((1 - keep) / factor + keep), np.float32)


class GgufSource:
    """The weights under Hugging Face names, in float32, with the rows of q and k in Hugging Face's order."""

    def __init__(self, file: GgufFile) -> None:
        """Raises ModelError that names a tensor without a Hugging Face name."""
        self._file = file
        self._stored_names = {
            _hf_name(name, file.path): name for name in file.tensor_names() if name != _ROPE_FACTORS
        }
        architecture = file.require("general.architecture", str)
        self._heads: dict[str, int] = {}
        if architecture in _PERMUTED:
            num_heads = file.size(f"{architecture}.attention.head_count")
            num_kv_heads = file.size(f"{architecture}.attention.head_count_kv", num_heads)
            self._heads = {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}

    def names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._stored_names[name])

    def array(self, name: str) -> FloatArray:
        """One tensor, dequantised."""
        return self._in_order(name, self._file.array(self._stored_names[name]))

    def format(self, name: str) -> str:
        """The name of the type that a tensor is stored in, such as Q4_K or F32."""
        return self._file.format(self._stored_names[name])

    def blocks(self, name: str) -> tuple[str, Bytes]:
        """The format of a quantised tensor, and its rows as they are stored: [N, bytes of a row]."""
        return self.format(name), self._in_order(name, self._file.blocks(self._stored_names[name]))

    def _in_order(self, name: str, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        num_heads = next((heads for part, heads in self._heads.items() if part in name), None)
        if num_heads is None:
            return rows
        if len(rows) % (2 * num_heads):
            raise ModelError(f"{self._file.path}: {name} has {len(rows)} rows, which are not {num_heads} heads")
        return _unpermute(rows, num_heads)

    def get(self, name: str) -> "torch.Tensor":
        """One tensor, dequantised: float32 on the CPU, in memory of its own."""
        import torch

        # An unquantised tensor is a view of the mapped file, which must not be written; W makes a copy.
        return torch.from_numpy(np.require(self.array(name), np.float32, ["C", "W"]))


def open_gguf(path: Path) -> GgufSource:
    """The weights of a GGUF file. Raises ModelError as GgufFile and GgufSource do."""
    return GgufSource(GgufFile(path))


def _hf_name(name: str, path: Path) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"{path} has a tensor {name}, which no supported architecture has")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _unpermute(rows: npt.NDArray[Number], num_heads: int) -> npt.NDArray[Number]:
    """Undo llama.cpp's row order, in which a rotated pair is two adjacent rows; here it is rows d and d + D/2.

    rows: [heads * D, ...] or a bias [heads * D]. One head of D = 4, as stored → as returned:

        stored     a0 b0 a1 b1
        returned   a0 a1 b0 b1
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
