"""DecoderSpec: the architecture of a decoder as plain values, layer by layer.

One DecoderSpec covers every supported family; a family's module makes one from a config.json. Knows no tensors and
no files.
"""

from dataclasses import dataclass
from enum import StrEnum

from faser.errors import ModelError
from faser.types.activation import Activation

MOST_EXPERTS = 4096  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by factor, short ones kept, a ramp between them.

    A wavelength is short below original_positions / high_freq_factor tokens, long above
    original_positions / low_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies blended by how often they turn within original_positions (arXiv 2309.00071, section 3.2).

    beta_fast, beta_slow: turns above which a frequency is kept, and below which it is divided by factor.
    attention_factor: multiplies cosines and sines. truncate: round the ends of the ramp to whole pairs.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    original_positions: int
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Every pair's frequency divided by a factor of its own (arXiv 2402.13753).

    short: factors, [rotated channels / 2], of a context of at most original_positions; long: of a longer one.
    Which of them holds is fixed by the longest context that is served: keys in the cache keep their angles.
    attention_factor: multiplies cosines and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    attention_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """The first `turning` pairs of a head turn, their frequencies divided by factor; the others keep still."""

    turning: int
    factor: float = 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Rotated queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_positions))."""

    beta: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of a layer's heads. theta: base of the wavelengths. scaling: None: unscaled.

    rotated: leading channels of a head that turn; None: all of them. interleaved: a pair is two adjacent channels
    in the checkpoint, else the channels i and i + rotated / 2.
    """

    theta: float
    scaling: RopeScaling | None = None
    rotated: int | None = None
    interleaved: bool = False
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of a layer. Checked when built.

    scale: of the scores; None: 1 / √head_dim. rope: None: queries and keys are not rotated. window: how many
    positions a token attends to, itself included; None: all. qk_norm: RMS norm of each query and key head before
    the rotation. bias: on queries, keys and values; out_bias: on the output product. score_cap: c: a score s
    becomes c tanh(s / c); None: it stays. sinks: one learned score a head counts in the sum that weights are
    divided by, and has no value. wide_qk_norm: in place of qk_norm, RMS norm of all query heads together, and of
    all key heads. bare_qk_norm: in place of qk_norm, the same without weights. gated: what a head gives is
    multiplied by σ of a gate, which is a product as the queries are. v_norm: RMS norm of each value head, without
    a weight. k_eq_v: the product of keys gives the values too, before norms and rotation. kv_layer: the earlier
    layer whose keys and values are read; None: the layer has its own.

    Raises ModelError that names the value and the limit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float | None = None
    window: int | None = None
    qk_norm: bool = False
    wide_qk_norm: bool = False
    bias: bool = False
    out_bias: bool = False
    score_cap: float | None = None
    sinks: bool = False
    bare_qk_norm: bool = False
    gated: bool = False
    v_norm: bool = False
    k_eq_v: bool = False
    kv_layer: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number")
        if self.window is not None and self.window < 1:
            raise ModelError(f"sliding_window is {self.window}; it must be at least 1")
        rotated = None if self.rope is None else self.rope.rotated
        if rotated is not None and (rotated % 2 or not 0 < rotated <= self.head_dim):
            raise ModelError(
                f"{rotated} channels of a head of {self.head_dim} rotate; it must be an even number of them"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Gated delta net of a layer, in place of attention: a state, no keys and values. Checked when built.

    What it computes: kernels/interface/delta_net.py. A key head serves num_v_heads // num_k_heads value heads,
    which follow each other or, where they are tiled, come num_k_heads apart. kernel: tokens that the convolution
    sees, the row's own included.

    Raises ModelError that names the value and the limit.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    kernel: int
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ModelError(
                f"{self.num_v_heads} value heads of linear attention do not share {self.num_k_heads} key heads "
                "evenly"
            )
        if self.kernel < 2:
            raise ModelError(f"linear_conv_kernel_dim is {self.kernel}; it must be at least 2")

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Gated short convolution of a layer, in place of attention. Checked when built.

    What it computes: kernels/interface/short_conv.py. kernel: tokens that it sees, the row's own included. Raises
    ModelError that names the value and the limit.
    """

    kernel: int

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ModelError(f"a convolution of {self.kernel} tokens; it must be at least 2")


MixerSpec = DeltaNetSpec | ShortConvSpec  # of a layer that has a recurrent state in place of keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward network: down(activation(gate x) * up x). size: of gate and up. bias: on all three."""

    size: int
    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of gated networks: a row passes the top_k that a router likes most. Checked when built.

    The router is a product without activation; its softmax over all experts weighs what the chosen ones give.
    size: of gate and up of each. renormalise: the weights of the chosen ones are divided by their sum. bias: on
    the router and on all three products of an expert. shared_size: of an expert more, which every row passes,
    weighed by σ of a product of its own; 0: there is none. sigmoid: each weight is σ of its logit, in place of the
    softmax. choice_bias: numbers added to these for the choice alone. scale: what weights are multiplied by.

    Raises ModelError that names the value and the limit.
    """

    num_experts: int
    top_k: int
    size: int
    renormalise: bool
    activation: Activation = Activation.SILU
    bias: bool = False
    shared_size: int = 0
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts > MOST_EXPERTS:
            raise ModelError(f"num_experts is {self.num_experts}; at most {MOST_EXPERTS} are supported")
        if self.top_k > self.num_experts:
            raise ModelError(f"{self.top_k} experts are chosen for a token; the model has {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: x += attention(norm(x)); x += feed_forward(norm(x)).

    norms_after: each of the two results is normalised, by a norm of its own, before it is added. experts: a
    mixture beside the dense network; what the two give is normalised, each by a norm of its own, and added up.
    scaled: the layer ends with x *= a number of its weights.
    """

    attention: AttentionSpec | MixerSpec
    feed_forward: DenseSpec | ExpertsSpec
    norms_after: bool = False
    experts: ExpertsSpec | None = None
    scaled: bool = False

    @property
    def mixture(self) -> ExpertsSpec | None:
        """In place of a dense network, or beside it."""
        return self.feed_forward if isinstance(self.feed_forward, ExpertsSpec) else self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputsSpec:
    """Inputs that each token adds to each layer (per-layer embeddings), of `size` channels a layer.

    p = norm(product(x)) + embedding(token), of the scaled embedding x, in parts for the layers; each layer then
    adds norm(out(activation(gate(x)) * p)) to the residual stream x. vocab_size: rows of the embedding.
    """

    size: int
    vocab_size: int


class StackedExperts(StrEnum):
    """Layouts of safetensors with the parts of all E experts of a layer in one tensor.

    Gate and up are one part, of F channels each. HALVES: [E, 2 F, H], gate first; down: [E, H, F]. ALTERNATING:
    [E, H, 2 F], a channel of gate, then one of up; down: [E, F, H].
    """

    HALVES = "halves"
    ALTERNATING = "alternating"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names on the hub of a layer's tensors, where families differ.

    norm_after_attention, norm_after_feed_forward: of layers with norms_after. q_norm, k_norm: of heads, or of all
    of them. final_norm: behind the layers. attention_gate: product of the gates of gated attention; none: it is
    one with that of queries. convolution: a short one's products and weights begin so. fused_qkv: queries, keys
    and values are one tensor, qkv_proj. fused_qkvz: queries, keys, values and z of a delta net are one tensor,
    in_proj_qkvz, that has them key head by key head; fused_rates: so are b and a, in_proj_ba. gate_up, down: of a
    dense network; gate and up may be one tensor. router, choice_bias, expert: of a mixture; {} is the number of an
    expert, whose expert_parts are gate, up and down. shared_expert, shared_gate: an expert that every row passes,
    and what weighs it. stacked_experts: how safetensors may have these parts of all experts of a layer in one
    tensor (execution/models/stacked_experts.py); None: they do not. not_read: how the names of tensors begin that
    checkpoints have for something else.
    """

    norm_before_attention: str = "input_layernorm"
    norm_before_feed_forward: str = "post_attention_layernorm"
    norm_after_attention: str = ""
    norm_after_feed_forward: str = ""
    final_norm: str = "model.norm.weight"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    attention_gate: str = ""
    convolution: str = ""
    fused_qkv: bool = False
    fused_qkvz: bool = False
    fused_rates: bool = False
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = ""
    expert: str = "mlp.experts.{}."
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    stacked_experts: StackedExperts | None = None
    not_read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder. At least one layer has grouped-query attention, others may have another mixer instead.

    embedding_scale: multiplies embeddings, rounded to the type of the activations first. logit_scale: multiplies
    the logits. logit_cap: c: a logit l, scaled, becomes c tanh(l / c); None: it stays. plus_one: a norm multiplies
    by one plus its weight; plus_one_last: so does the last one. norm_after_eps: of norms behind attention and
    network; None: rms_norm_eps. normed_embedding: embeddings pass an RMS norm without weights. token_inputs: None:
    tokens add nothing to layers.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    plus_one: bool = False
    plus_one_last: bool = True
    norm_after_eps: float | None = None
    normed_embedding: bool = False
    token_inputs: TokenInputsSpec | None = None
    names: TensorNames = TensorNames()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """Return how many key-value heads each layer stores, and the channels of one."""

        def stored(layer: AttentionSpec | MixerSpec) -> tuple[int, int]:
            if not isinstance(layer, AttentionSpec):
                return 0, self.head_dim
            return layer.num_kv_heads if layer.kv_layer is None else 0, layer.head_dim

        return tuple(stored(each.attention) for each in self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of the layers that have keys and values."""
        found = (each.attention for each in self.layers)
        return tuple(each for each in found if isinstance(each, AttentionSpec))

    @property
    def mixers(self) -> tuple[MixerSpec | None, ...]:
        """Return the delta net or the short convolution of each layer; None: it has attention."""
        found = (each.attention for each in self.layers)
        return tuple(None if isinstance(each, AttentionSpec) else each for each in found)

    @property
    def has_states(self) -> bool:
        """Return whether a sequence has a recurrent state beside its keys and values."""
        return any(self.mixers)

    @property
    def has_short_convs(self) -> bool:
        return any(isinstance(each, ShortConvSpec) for each in self.mixers)

    @property
    def normalises_values(self) -> bool:
        return any(each.v_norm for each in self.attentions)

    @property
    def attention(self) -> AttentionSpec:
        """Return the attention of the first layer that has keys and values."""
        return self.attentions[0]

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def feed_forward(self) -> DenseSpec:
        """Return the network of the first layer, in a model without mixtures."""
        found = self.layers[0].feed_forward
        assert isinstance(found, DenseSpec), "a mixture of experts has no one network"
        return found

    @property
    def inner_size(self) -> int:
        """Return the size of the widest dense network; 0: there is none."""
        networks = (each.feed_forward for each in self.layers)
        return max((each.size for each in networks if isinstance(each, DenseSpec)), default=0)

    @property
    def mixtures(self) -> tuple[ExpertsSpec, ...]:
        """Return the mixtures of the layers that have one."""
        return tuple(each.mixture for each in self.layers if each.mixture is not None)

    @property
    def has_experts(self) -> bool:
        return bool(self.mixtures)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        attentions = (each.attention for each in self.layers)
        return tuple(each.window if isinstance(each, AttentionSpec) else None for each in attentions)
