"""EncoderSpec: what a family says of its encoders, and the shapes of their tensors that follow from it.

    x = norm(word + position + token type)
    each layer      post-norm: x = norm(x + attention(x));  x = norm(x + network(x))     BERT
                    pre-norm:  x = x + attention(norm(x));  x = x + network(norm(x))     ModernBERT; last a norm

Knows no torch. The forward is execution/models/encoder.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faser.engine.checkpoints.families.architecture import RopeSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.errors import ModelError
from faser.types.activation import Activation
from faser.types.pooling import PoolingKind

Shape = tuple[int, ...]
_BIDIRECTIONAL = ("is_causal", "use_bidirectional_attention")  # where a decoder's fields refuse them
# By their names in hidden_act. GELU by tanh has several.
ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    """Attention of one layer. rope: None: positions are learned. reach: how far a row sees in both directions;
    None: everything. has_norm: of attention's own; the first layer may go without.
    """

    rope: RopeSpec | None = None
    reach: int | None = None
    has_norm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of tensors without .weight and .bias; those of a layer behind its prefix, in which {} is its number.

    position, types, last_norm: None: there are none. qkv, up: are stacked; of a gated network up is the gate, then
    the other half, unless gate_last.
    """

    word: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    attention_out: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    network_norm: str
    position: str | None = None
    types: str | None = None
    last_norm: str | None = None
    gate_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """Head of a cross-encoder: dense, activation (and norm) of the pooled state, then out, which gives the logit.

    activation: None: tanh. norm: None: there is none. dense_bias: dense has one, as out does.
    """

    kind: PoolingKind
    dense: str
    activation: Activation | None
    out: str
    norm: str | None = None
    dense_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder. max_position_embeddings: tokens of the longest text. first_position: row of the position table
    that the first token has. num_types: of tokens; 0: they have none. gated: the network multiplies
    activation(gate) by its other half. ignored: beginnings of names of tensors that are not read. classifier:
    None: the model makes embeddings.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    layers: tuple[EncoderLayer, ...]
    activation: Activation
    norm_eps: float
    names: EncoderNames
    first_position: int = 0
    num_types: int = 0
    gated: bool = False
    pre_norm: bool = False
    norm_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    ignored: tuple[str, ...] = ()
    classifier: ClassifierSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """Encoders of one model_type. prefix: before the names of tensors where a model for a task is around them.

    architecture: of models that make embeddings. classifier: of cross-encoders; None: none are served. masked: of
    models that guess words, of which the encoder is served. examples, files, note: as in Family.
    """

    name: str
    model_type: str
    architecture: str
    to_spec: Callable[[Mapping[str, Any]], EncoderSpec]
    prefix: str
    classifier: str | None = None
    masked: str | None = None
    examples: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    note: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(each for each in (self.architecture, self.classifier, self.masked) if each is not None)


def encoder_fields(config: Mapping[str, Any]) -> Fields:
    """Return the fields of an encoder's config.json. Raises ModelError for what no encoder here has."""
    fields = Fields({name: value for name, value in config.items() if name not in _BIDIRECTIONAL})
    fields.expect("is_decoder", (False,), "an encoder attends in both directions")
    if config.get("is_causal"):
        raise ModelError("config.json: is_causal is true; an encoder attends in both directions")
    fields.expect("pruned_heads", ({},), "pruned heads are not supported")
    fields.expect("quantization_config", (), "quantised encoders are not supported")
    return fields


def activation_of(config: Mapping[str, Any], name: str, default: str) -> Activation:
    """Return the activation that a field of config.json names. Raises ModelError for another one."""
    stated = config.get(name) or default
    if not isinstance(stated, str) or stated not in ACTIVATIONS:
        raise ModelError(f"config.json: {name} is {stated!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[stated]


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raise ModelError unless the heads of a layer divide the hidden size."""
    if hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )


def tensor_shapes(spec: EncoderSpec) -> dict[str, Shape]:
    """Return the shape of every tensor that the model has."""
    return dict(_shapes(spec))


def _shapes(spec: EncoderSpec) -> Iterator[tuple[str, Shape]]:
    names, size, inner = spec.names, spec.hidden_size, spec.intermediate_size

    def product(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (outputs, inputs)
        if bias:
            yield f"{name}.bias", (outputs,)

    def norm(name: str) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (size,)
        if spec.norm_bias:
            yield f"{name}.bias", (size,)

    yield f"{names.word}.weight", (spec.vocab_size, size)
    if names.position is not None:
        yield f"{names.position}.weight", (spec.first_position + spec.max_position_embeddings, size)
    if names.types is not None:
        yield f"{names.types}.weight", (spec.num_types, size)
    yield from norm(names.embedding_norm)
    for number, layer in enumerate(spec.layers):
        at = names.layer.format(number)
        for each in names.qkv:
            yield from product(at + each, 3 * size // len(names.qkv), size, bias=spec.qkv_bias)
        yield from product(at + names.attention_out, size, size, bias=spec.out_bias)
        if layer.has_norm:
            yield from norm(at + names.attention_norm)
        for each in names.up:
            rows = (1 + spec.gated) * inner // len(names.up)
            yield from product(at + each, rows, size, bias=spec.up_bias)
        yield from product(at + names.down, size, inner, bias=spec.down_bias)
        yield from norm(at + names.network_norm)
    if names.last_norm is not None:
        yield from norm(names.last_norm)
    if (head := spec.classifier) is not None:
        yield from product(head.dense, size, size, bias=head.dense_bias)
        if head.norm is not None:
            yield from norm(head.norm)
        yield from product(head.out, 1, size, bias=True)
