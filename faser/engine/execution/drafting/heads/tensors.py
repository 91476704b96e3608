"""The tensors of a head's checkpoint: names as in the `speculators` format, shapes from the spec.

The one module that spells these names. Two of the tensors describe the vocabulary of the head's logits:

    d2t   [Vd] integers, offsets: row r of the logits is of the target's token r + d2t[r]
    t2d   [V] booleans: whether the token has a row; the rows are in the order of the tokens

Both say the same. vLLM and speculators read d2t, speculators trains with t2d.
"""

import torch
from torch import Tensor

from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.engine.execution.models.tensors import Shape, layer_shapes
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ModelError

EMBEDDING = "embed_tokens.weight"
FC = "fc.weight"
FEATURE_NORM = "input_norm.weight"
HIDDEN_NORM = "layers.0.hidden_norm.weight"
BLOCK_HIDDEN_NORM = "hidden_norm.weight"  # of a block drafter
MARKOV_BEFORE = "markov_head.markov_w1.weight"
MARKOV_CANDIDATES = "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
SELECTOR_BEFORE = "candidate_selector.predecessor_codebook"
SELECTOR_CANDIDATES = "candidate_selector.successor_codebook"
SELECTOR_HIDDEN = "candidate_selector.hidden_projection.weight"
ATTENTION_CONV, NETWORK_CONV = "attention_conv.", "mlp_conv."  # of a layer
CONV_BASE, CONV_DYNAMIC = "base_kernel", "kernel_projection.weight"
MASK = "mask_embedding"
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


def eagle3_shapes(spec: HeadSpec) -> dict[str, Shape]:
    """Every tensor of an EAGLE-3 head but the map of its vocabulary; products are [out, in].

    The first layer's queries, keys and values are products of the embedding and the features, side by side.
    """
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (spec.decoder.vocab_size, hidden)}
    width = spec.states_size if spec.feature_norm is FeatureNorm.TOGETHER else spec.target_hidden_size
    shapes |= dict.fromkeys(feature_norms(spec), (width,))
    shapes[FC] = (hidden, spec.states_size)
    for number, layer in enumerate(spec.decoder.layers):
        of_layer = layer_shapes(spec.decoder, layer)
        shapes |= {layer_prefix(number) + name: shape for name, shape in of_layer.items()}
    shapes |= {_FIRST + name: (shapes[_FIRST + name][0], 2 * hidden) for name in _BY_FIRST_LAYER}
    shapes[HIDDEN_NORM] = (hidden,)
    shapes[NORM] = (hidden,)
    shapes[HEAD] = (spec.draft_vocab_size, hidden)
    return shapes


def block_shapes(spec: BlockSpec, *, has_mask: bool) -> dict[str, Shape]:
    """Every tensor of a block drafter but the map of its vocabulary. has_mask: masks have an embedding."""
    hidden, rank = spec.hidden_size, spec.markov_rank
    shapes: dict[str, Shape] = {
        EMBEDDING: (spec.decoder.vocab_size, hidden),
        FC: (hidden, spec.states_size),
        BLOCK_HIDDEN_NORM: (hidden,),
    }
    for number, layer in enumerate(spec.decoder.layers):
        of_layer = layer_shapes(spec.decoder, layer)
        shapes |= {layer_prefix(number) + name: shape for name, shape in of_layer.items()}
        if taps := spec.conv_kernel_size:
            for name in (ATTENTION_CONV, NETWORK_CONV):
                shapes[layer_prefix(number) + name + CONV_BASE] = (2, taps, hidden)
                rows = 2 * taps * hidden // spec.conv_group_size
                shapes[layer_prefix(number) + name + CONV_DYNAMIC] = (rows, hidden)
    shapes |= {NORM: (hidden,), HEAD: (spec.draft_vocab_size, hidden)}
    if rank:
        before, candidates = corrections(spec)
        shapes |= {before: (spec.decoder.vocab_size, rank), candidates: (spec.draft_vocab_size, rank)}
    if spec.selector:
        shapes[SELECTOR_HIDDEN] = (rank, hidden)
    if spec.confidence:
        width = hidden + rank * spec.confidence_reads_markov
        shapes |= {CONFIDENCE: (1, width), CONFIDENCE_BIAS: (1,)}
    return shapes | ({MASK: (hidden,)} if has_mask else {})


def corrections(spec: BlockSpec) -> tuple[str, str]:
    """The tables of the token before and of the candidates."""
    return (SELECTOR_BEFORE, SELECTOR_CANDIDATES) if spec.selector else (MARKOV_BEFORE, MARKOV_CANDIDATES)


def ignorable(name: str) -> bool:
    """Return whether a checkpoint may hold this tensor too: the vocabulary, or redundant, or for training."""
    return (
        name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT, MASK)
        or name.startswith("verifier_")
        or name.endswith(".rotary_emb.inv_freq")
    )


def draft_token_ids(source: WeightSource, spec: HeadSpec | BlockSpec) -> Tensor | None:
    """Return the target's token of each row of the logits: [Vd] int64, on the CPU; None: each row is its own.

    Raises ModelError that names a map of another size, a token that is none, or a place where both maps differ.
    """
    names, size, vocab_size = set(source.names()), spec.draft_vocab_size, spec.decoder.vocab_size
    masked = _masked(source, size, vocab_size) if TARGET_TO_DRAFT in names else None
    if DRAFT_TO_TARGET not in names:
        if masked is None and size < vocab_size:
            raise ModelError(
                f"the head has logits of {size} of the target's {vocab_size} tokens, but no tensor "
                f"{DRAFT_TO_TARGET} that says which"
            )
        return _unless_all(masked, vocab_size)
    offsets = source.get(DRAFT_TO_TARGET)
    if offsets.shape != (size,) or offsets.dtype not in (torch.int64, torch.int32):
        dtype = str(offsets.dtype).removeprefix("torch.")
        raise ModelError(
            f"tensor {DRAFT_TO_TARGET} is {dtype} {list(offsets.shape)}; it must be {size} integers, one for each "
            "token of draft_vocab_size"
        )
    token_ids = torch.arange(size) + offsets.long()
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise ModelError(
            f"tensor {DRAFT_TO_TARGET} leads to token {int(outside[0])}; the model has tokens 0 to "
            f"{vocab_size - 1} (its values are offsets, to which the row is added)"
        )
    in_order = token_ids.sort().values
    if bool((in_order.diff() == 0).any()):
        twice = int(in_order[1:][in_order.diff() == 0][0])
        raise ModelError(f"tensor {DRAFT_TO_TARGET} leads to token {twice} from two rows of the head's logits")
    if masked is not None and not torch.equal(in_order, masked):
        place = int((in_order != masked).nonzero()[0])
        raise ModelError(
            f"tensors {DRAFT_TO_TARGET} and {TARGET_TO_DRAFT} describe different vocabularies: token "
            f"{min(int(in_order[place]), int(masked[place]))} is in one of them only"
        )
    return _unless_all(token_ids, vocab_size)


def _masked(source: WeightSource, size: int, vocab_size: int) -> Tensor:
    mask = source.get(TARGET_TO_DRAFT)
    token_ids = mask.nonzero()[:, 0] if mask.dim() == 1 else mask.new_zeros(0)
    if mask.shape != (vocab_size,) or len(token_ids) != size:
        raise ModelError(
            f"tensor {TARGET_TO_DRAFT} is {list(mask.shape)} and marks {len(token_ids)} tokens; it must mark "
            f"{size} of the target's {vocab_size}"
        )
    return token_ids


def _unless_all(token_ids: Tensor | None, vocab_size: int) -> Tensor | None:
    if token_ids is None or (len(token_ids) == vocab_size and torch.equal(token_ids, torch.arange(vocab_size))):
        return None
    return token_ids
