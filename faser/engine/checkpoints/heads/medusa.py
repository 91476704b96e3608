"""Directories of Medusa heads, as the authors of Medusa and as vLLM write them.

    the authors   medusa_num_heads, medusa_num_layers; sizes are those of the target
    vLLM          architectures MedusaModel or model_type medusa; num_heads, num_hidden_layers, hidden_size,
                  vocab_size, truncated_vocab_size; the tensors say what medusa_fc_bias and original_lm_head do

The names of the tensors are in execution/heads/tensors.py.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.heads import layers
from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.engine.checkpoints.quantized import stored_quantization
from faser.errors import ModelError

_OF_AUTHORS = "medusa_num_heads"
_HEAD_DIM = 64  # every backend has kernels for it


def is_medusa(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or []
    return _OF_AUTHORS in config or config.get("model_type") == "medusa" or "MedusaModel" in architectures


def head_spec(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """Raises ModelError that names an unusable field, or both values where the heads do not fit the target."""
    fields = Fields(config)
    layers.refuse_logit_scale(fields)
    layers.refuse_truncated_vocabulary(fields, target)
    num_heads = fields.positive_int("num_heads", fields.positive_int(_OF_AUTHORS, 5))
    num_blocks = fields.positive_int("num_hidden_layers", fields.positive_int("medusa_num_layers", 1))
    for name, of_target in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        stated = fields.positive_int(name, of_target)
        if stated != of_target:
            raise ModelError(f"config.json: {name} of the heads is {stated}; that of the model is {of_target}")
    return HeadSpec(
        kind=HeadKind.MEDUSA,
        decoder=_least_layers(target),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        state_layers=(target.num_layers,),
        states_are_normed=True,
        num_draft_tokens=num_heads,
        max_draft_tokens=num_heads,
        medusa_blocks=num_blocks,
        quantization=stored_quantization(config),
    )


def _least_layers(target: DecoderSpec) -> DecoderSpec:
    """One attention head, for the size of a cache that nothing is written to."""
    return DecoderSpec(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=_HEAD_DIM,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=target.rope,
        windows=(None,),
        rotary=(True,),
        tie_word_embeddings=False,
    )
