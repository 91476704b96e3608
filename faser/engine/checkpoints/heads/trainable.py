"""untrainable: why a head cannot be trained further. `faser distill` makes heads that can."""

from pathlib import Path

from faser.engine.checkpoints.files import tensor_names
from faser.engine.checkpoints.heads.head_spec import FeatureNorm, HeadKind, HeadSpec
from faser.engine.checkpoints.quantized import StoredFp8


def untrainable(spec: HeadSpec, directory: Path) -> str | None:
    """What the head in directory has that a head in training has not; None: it can be trained."""
    decoder = spec.decoder
    has_biases = decoder.attention_bias or decoder.attention_out_bias or decoder.mlp_bias
    has_windows = any(window is not None for window in decoder.windows)
    reasons = {
        f"it is of the kind {spec.kind}, not {HeadKind.EAGLE3}": spec.kind is not HeadKind.EAGLE3,
        f"it has {decoder.num_layers} layers, not 1": decoder.num_layers != 1,
        f"it is {spec.hidden_size} values wide, its model {spec.target_hidden_size}": spec.hidden_size
        != spec.target_hidden_size,
        "its states have no norms of their own (fc_norm)": spec.feature_norm is not FeatureNorm.EACH,
        "norm_before_residual is false": not spec.norm_before_residual,
        "norm_output is true": spec.norm_output,
        "its layer has biases": has_biases,
        "its layer normalises queries and keys": decoder.qk_norm,
        "its layer has a sliding window": has_windows,
        "its layer has no rotary embedding": not all(decoder.rotary),
        "its weights are stored in fp8": isinstance(spec.quantization, StoredFp8),
        "it has an embedding of its own": any(
            name.endswith("embed_tokens.weight") for name in tensor_names(directory)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
