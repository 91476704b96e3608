"""Writes EAGLE-3 heads and block drafters as directories in the format of the `speculators` library.

Matrices may be rounded to 8 bits, in the layout of compressed-tensors: signed bytes and a half float for each 32
of them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from faser.distill.block import drafter_shapes
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.families.architecture import (
    DecoderSpec,
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    YarnScaling,
)
from faser.engine.checkpoints.heads import EAGLE3, FeatureNorm, HeadSpec
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.models.tensors import Shape
from faser.files import replacing, write_atomically
from faser.kernels.interface.low_bit.rows import INT8, quantise

_DEFAULT_DRAFT_TOKENS = 5  # that of the library
_WRITTEN_AS = "0.5.0"  # the version of the library whose fields these are


def write_speculators(
    directory: Path,
    spec: HeadSpec,
    weights: Mapping[str, Tensor],
    *,
    draft_ids: Tensor | None,
    target_architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    int8: bool = False,
) -> None:
    """Write an EAGLE-3 head: config.json and model.safetensors.

    weights: with the names and shapes of heads/tensors.py; without embed_tokens and lm_head the target's are
    meant. draft_ids: [Vd], ascending, the target's token of each row of the logits; None: all of them. dtype: of
    what is stored as floats. int8: round the matrices whose rows are whole groups of 32.
    """
    shapes = tensors.eagle3_shapes(spec)
    lent = {tensors.EMBEDDING, tensors.HEAD}
    assert weights.keys() | lent == shapes.keys() | lent, sorted(weights.keys() ^ shapes.keys())
    config = speculators_config(spec, target_architectures)
    _write(directory, config, weights, shapes, draft_ids, spec.decoder.vocab_size, dtype, int8=int8)


def write_block(
    directory: Path,
    spec: BlockSpec,
    weights: Mapping[str, Tensor],
    *,
    draft_ids: Tensor | None,
    target_name: str,
    target_architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    int8: bool = False,
) -> None:
    """Write a block drafter; see write_speculators. weights: with the names and shapes of drafter_shapes."""
    shapes = drafter_shapes(spec)
    assert weights.keys() == shapes.keys(), sorted(weights.keys() ^ shapes.keys())
    config = block_config(spec, target_name, target_architectures)
    _write(directory, config, weights, shapes, draft_ids, spec.decoder.vocab_size, dtype, int8=int8)


def _write(
    directory: Path,
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    draft_ids: Tensor | None,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    int8: bool,
) -> None:
    """Write the config last: a directory that has one is whole."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        assert tuple(weight.shape) == shapes[name], (name, tuple(weight.shape), shapes[name])
        if int8 and weight.dim() == 2 and len(weight) > 1 and weight.shape[1] % INT8.group_size == 0:
            stored |= _rounded(name, weight)
        else:
            stored[name] = weight.detach().to("cpu", dtype).contiguous()
    if draft_ids is not None:
        assert draft_ids.shape == (config["draft_vocab_size"],), (draft_ids.shape, config["draft_vocab_size"])
        stored |= _vocabulary(draft_ids.cpu(), vocab_size)
    config |= {"torch_dtype": str(dtype).removeprefix("torch.")}
    config |= {"quantization_config": _quantization_config()} if int8 else {}
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / "model.safetensors") as path:
        save_file(stored, path, metadata={"format": "pt"})
    write_atomically(directory / "config.json", json.dumps(config, indent=2) + "\n")


def speculators_config(spec: HeadSpec, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head, but how its tensors are stored."""
    draft_tokens = spec.num_draft_tokens or _DEFAULT_DRAFT_TOKENS
    return _common(EAGLE3, spec, spec.target_name, target_architectures, draft_tokens) | {
        "architectures": ["Eagle3Speculator"],
        "target_hidden_size": spec.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.state_layers),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.feature_norm is FeatureNorm.TOGETHER,
        "fc_norm": spec.feature_norm is FeatureNorm.EACH,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
    }


def block_config(spec: BlockSpec, target_name: str, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json of a block drafter, but how its tensors are stored.

    aux_hidden_state_layer_ids count the inputs of layers, as an EAGLE-3 head's do, and unlike DFlash's own
    target_layer_ids. Layers without a window are bidirectional within a block.
    """
    return _common(spec.method, spec, target_name, target_architectures, spec.most_tokens) | {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": list(spec.state_layers),
        "block_size": spec.block_size,
        "sample_from_anchor": spec.predicts_from_anchor,
        "mask_token_id": spec.mask_token_id,
        "markov_rank": spec.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": spec.confidence,
        "confidence_head_with_markov": spec.confidence_reads_markov,
    }


def _common(
    algorithm: str,
    spec: HeadSpec | BlockSpec,
    target_name: str | None,
    target_architectures: Sequence[str],
    draft_tokens: int,
) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": _WRITTEN_AS,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": _layer_config(spec.decoder),
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
    }


def _layer_config(decoder: DecoderSpec) -> dict[str, Any]:
    windows, attention = set(decoder.windows) - {None}, decoder.attention
    ropes = {each.rope for each in decoder.attentions}
    assert len(ropes) == 1, "layers with several rotary embeddings have no field in the format"
    assert attention.rope is not None, "layers without a rotary embedding have no field in the format"
    assert len(windows) <= 1, windows
    assert attention.out_bias == attention.bias, "one field for both biases"
    return {
        "model_type": "qwen3" if attention.qk_norm else "llama",
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.feed_forward.size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_position_embeddings,
        "attention_bias": attention.bias,
        "mlp_bias": decoder.feed_forward.bias,
        "tie_word_embeddings": False,
        **_rope(attention.rope),
        "sliding_window": windows.pop() if windows else None,
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in decoder.windows],
    }


def _rope(rope: RopeSpec) -> dict[str, Any]:
    scaling: dict[str, Any] | None
    match rope.scaling:
        case None:
            scaling = None
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as llama3:
            scaling = {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low_freq_factor,
                "high_freq_factor": llama3.high_freq_factor,
                "original_max_position_embeddings": llama3.original_positions,
            }
        case YarnScaling() as yarn:
            scaling = {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "attention_factor": yarn.attention_factor,
                "original_max_position_embeddings": yarn.original_positions,
                "truncate": yarn.truncate,
            }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _quantization_config() -> dict[str, Any]:
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": INT8.group_size,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear", "Embedding"], "weights": weights}},
    }


def _rounded(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The bytes of a matrix [N, K], and its scales [N, K / 32]: what `--quantization int8` computes with."""
    rows = quantise(weight.detach().float().cpu().numpy(), INT8)
    codes = torch.from_numpy(rows.codes ^ 128).view(torch.int8)
    return {name: codes, f"{name}_scale": torch.from_numpy(rows.scales).half()}


def _vocabulary(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t, as offsets, and t2d (see heads/tensors.py)."""
    assert bool((draft_ids.diff() > 0).all()), "t2d has the tokens in ascending order"
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[draft_ids] = True
    return {
        tensors.DRAFT_TO_TARGET: draft_ids.long() - torch.arange(len(draft_ids)),
        tensors.TARGET_TO_DRAFT: marked,
    }
