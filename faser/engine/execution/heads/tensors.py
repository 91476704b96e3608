"""The tensors of a head's checkpoint: names as in the `speculators` format, shapes from the spec.

The one module that spells these names. Opens no file and holds no tensor.
"""

from collections.abc import Collection

from faser.engine.checkpoints.heads.head_spec import FeatureNorm, HeadKind, HeadSpec
from faser.engine.execution.models.tensors import Shape, layer_shapes

EMBEDDING = "embed_tokens.weight"
FC = "fc.weight"
FC_BIAS = "fc.bias"
FEATURE_NORM = "input_norm.weight"
HIDDEN_NORM = "layers.0.hidden_norm.weight"
NORM = "norm.weight"
HEAD = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"
_FIRST = "layers.0."
_BY_FIRST_LAYER = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def layer_prefix(layer: int) -> str:
    return f"layers.{layer}."


def feature_norms(spec: HeadSpec) -> tuple[str, ...]:
    """The norms of the states before they are projected, in the order of the layers that the head reads."""
    if spec.feature_norm is FeatureNorm.EACH:
        return tuple(f"fc_norm.{index}.weight" for index in range(len(spec.state_layers)))
    return (FEATURE_NORM,) if spec.feature_norm is FeatureNorm.TOGETHER else ()


def tensor_shapes(spec: HeadSpec, names: Collection[str]) -> dict[str, Shape]:
    """Every tensor of a head, of any kind. names: of the checkpoint, which may have biases."""
    match spec.kind:
        case HeadKind.EAGLE3:
            return eagle3_shapes(spec)
        case HeadKind.EAGLE:
            return eagle_shapes(spec, fc_bias=FC_BIAS in names)
        case HeadKind.MEDUSA:
            return medusa_shapes(spec, bias=medusa_bias(0, 0) in names, own_heads=medusa_head(0) in names)


def medusa_block(head: int, block: int) -> str:
    return f"blocks.{head}.layers.{block}.weight"


def medusa_bias(head: int, block: int) -> str:
    return f"blocks.{head}.layers.{block}.bias"


def medusa_head(head: int) -> str:
    """The product of one head's logits; lm_head.weight where one product is of all heads."""
    return f"lm_heads.{head}.weight"


def medusa_shapes(spec: HeadSpec, *, bias: bool, own_heads: bool) -> dict[str, Shape]:
    """Every tensor of Medusa heads, under vLLM's names."""
    assert spec.max_draft_tokens is not None, "as many as there are heads"
    hidden, heads = spec.hidden_size, range(spec.max_draft_tokens)
    shapes: dict[str, Shape] = {}
    for head in heads:
        for block in range(spec.medusa_blocks):
            shapes[medusa_block(head, block)] = (hidden, hidden)
            if bias:
                shapes[medusa_bias(head, block)] = (hidden,)
    names = map(medusa_head, heads) if own_heads else [HEAD]
    return shapes | dict.fromkeys(names, (spec.draft_vocab_size, hidden))


def eagle_shapes(spec: HeadSpec, *, fc_bias: bool = False) -> dict[str, Shape]:
    """Every tensor of an EAGLE head. The first layer has no input norm."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (spec.decoder.vocab_size, hidden), FC: (hidden, 2 * hidden)}
    if fc_bias:
        shapes[FC_BIAS] = (hidden,)
    shapes |= _layers(spec)
    del shapes[f"{_FIRST}input_layernorm.weight"]
    shapes[HEAD] = (spec.draft_vocab_size, hidden)
    return shapes


def eagle3_shapes(spec: HeadSpec) -> dict[str, Shape]:
    """Every tensor of an EAGLE-3 head but the map of its vocabulary; products are [out, in].

    The first layer's queries, keys and values are products of the embedding and the features, side by side.
    """
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (spec.decoder.vocab_size, hidden)}
    width = spec.states_size if spec.feature_norm is FeatureNorm.TOGETHER else spec.target_hidden_size
    shapes |= dict.fromkeys(feature_norms(spec), (width,))
    shapes[FC] = (hidden, spec.states_size)
    shapes |= _layers(spec)
    shapes |= {_FIRST + name: (shapes[_FIRST + name][0], 2 * hidden) for name in _BY_FIRST_LAYER}
    shapes[HIDDEN_NORM] = (hidden,)
    shapes[NORM] = (hidden,)
    shapes[HEAD] = (spec.draft_vocab_size, hidden)
    return shapes


def ignorable(name: str) -> bool:
    """Whether a checkpoint may hold this tensor too: the vocabulary, or what is redundant or for training."""
    return (
        name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT)
        or name.startswith("verifier_")
        or name.endswith(".rotary_emb.inv_freq")
    )


def _layers(spec: HeadSpec) -> dict[str, Shape]:
    """The tensors of plain decoder layers."""
    each = layer_shapes(spec.decoder)
    return {
        layer_prefix(layer) + name: shape
        for layer in range(spec.decoder.num_layers)
        for name, shape in each.items()
    }
