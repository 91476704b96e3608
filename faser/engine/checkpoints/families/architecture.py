"""DecoderSpec: the architecture of a decoder as plain values: sizes, options of each layer, rotary embedding.

One DecoderSpec covers every supported family. Knows no tensors and no files.
"""

from dataclasses import dataclass

from faser.errors import ModelError


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


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of whole heads. theta: base of the wavelengths. scaling: None: unscaled."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with gated SiLU feed-forward and grouped-query attention. Checked when built.

    qk_norm: RMS norm of each query and key head before the rotation.
    attention_bias: on queries, keys and values; attention_out_bias: on the output product.
    windows: per layer, how many positions a token attends to, itself included; None: all.
    rotary: per layer, whether queries and keys are rotated.

    Raises ModelError that names the value and the limit.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number")
        for name, per_layer in (("windows", self.windows), ("rotary", self.rotary)):
            if len(per_layer) != self.num_layers:
                raise ModelError(f"{name} describes {len(per_layer)} layers; the model has {self.num_layers}")
        for window in self.windows:
            if window is not None and window < 1:
                raise ModelError(f"sliding_window is {window}; it must be at least 1")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
