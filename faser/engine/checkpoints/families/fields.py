"""Fields: reads the fields of a config.json with their types, and refuses features that no family supports.

Knows the fields that families share; each family's module reads its own. rope_spec reads the rotary embedding, in
both formats in use: rope_theta and rope_scaling as separate fields, or both in rope_parameters. attention, dense
and decoder make parts of a DecoderSpec of the usual fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from faser.errors import ModelError
from faser.types.activation import Activation

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_MOST_LAYERS = 4096
_MOST_INTEGER = 1 << 53  # a float holds it
_LEAST, _MOST = 1e-30, 1e30  # of a number that is not an integer: no product of several overflows
_DEFAULT_THETA = 10_000.0
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


class Fields:
    """A config.json whose fields are checked when they are read. null is the same as absent.

    Raises ModelError that names the field. The constructor raises it for attention that is not causal.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.expect("is_causal", (True,), "only causal attention is supported")
        self.expect("use_bidirectional_attention", (False,), "only causal attention is supported")

    def positive_int(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; required if there is no default."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {name} is {value!r}; it must be an integer of at least 1")
        if value > _MOST_INTEGER:
            raise ModelError(f"config.json: {name} is {value}; it must be at most {_MOST_INTEGER}")
        return value

    def num_layers(self) -> int:
        value = self.positive_int("num_hidden_layers")
        if value > _MOST_LAYERS:
            raise ModelError(f"config.json: num_hidden_layers is {value}; at most {_MOST_LAYERS} are supported")
        return value

    def non_negative_int(self, name: str, default: int) -> int:
        return 0 if self._config.get(name) == 0 else self.positive_int(name, default)

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST <= value <= _MOST:
            raise ModelError(
                f"config.json: {name} is {value!r}; it must be a number above 0, from {_LEAST:g} to {_MOST:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value!r}; it must be true or false")
        return value

    def optional_int(self, name: str) -> int | None:
        return None if self._config.get(name) is None else self.positive_int(name)

    def optional_float(self, name: str) -> float | None:
        """A number of at least 0, or None."""
        value = self._config.get(name)
        return value if value is None or value == 0 else self.positive_float(name)

    def optional_list(self, name: str, length: int) -> list[Any] | None:
        """A list of at least `length` entries, cut to that length, or None."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise ModelError(
                f"config.json: {name} is {value!r}; it must be a list with one entry per layer, {length}"
            )
        return value[:length]

    def optional_dict(self, name: str) -> dict[str, Any] | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"config.json: {name} is {value!r}; it must be an object")
        return value or None

    def floats(self, name: str, length: int) -> tuple[float, ...]:
        """A list of that many numbers above 0."""
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length:
            raise ModelError(f"config.json: {name} is {value!r}; it must be a list of {length} numbers")
        return tuple(Fields({name: each}).positive_float(name) for each in value)

    def activation(self) -> Activation:
        name = self._config.get("hidden_activation") or self._config.get("hidden_act") or "silu"
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise ModelError(f"config.json: hidden_act is {name!r}; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def head_dim(self) -> int:
        """The stated head_dim, or the hidden size divided by the number of attention heads."""
        stated = self.optional_int("head_dim")
        if stated is not None:
            return stated
        hidden, heads = self.positive_int("hidden_size"), self.positive_int("num_attention_heads")
        if hidden % heads:
            raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        return hidden // heads

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return the listed type of each layer, full_attention or sliding_attention; None: they are not listed."""
        listed = self.optional_list("layer_types", num_layers)
        for layer, layer_type in enumerate(listed or ()):
            if layer_type not in (_FULL, _SLIDING):
                raise ModelError(f"config.json: layer_types[{layer}] is {layer_type!r}; only {_FULL}, {_SLIDING}")
            if layer_type == _SLIDING and self.optional_int("sliding_window") is None:
                raise ModelError(f"config.json: layer_types[{layer}] is {_SLIDING}, but sliding_window is not set")
        return listed

    def windows(self, default: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The window of each layer: from layer_types if stated, else the default."""
        listed = self.layer_types(len(default))
        if listed is None:
            return default
        window = self.optional_int("sliding_window")
        return tuple(window if layer_type == _SLIDING else None for layer_type in listed)

    def _value(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default

    def expect(self, name: str, supported: tuple[Any, ...], why: str) -> None:
        """Refuse a field with another value than those in `supported`. Raises ModelError that ends with why."""
        value = self._config.get(name)
        if value is not None and value not in supported:
            shown = value.get("quant_method", value) if isinstance(value, dict) else value
            raise ModelError(f"config.json: {name} is {shown!r}; {why}")


def attention(fields: Fields, rope: RopeSpec | None, **options: Any) -> AttentionSpec:
    """Attention of the usual fields. options: of AttentionSpec, in place of what the fields say."""
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = options.pop("head_dim", None) or fields.head_dim()
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope=rope,
        **options,
    )


def dense(fields: Fields, *, bias: bool = False) -> DenseSpec:
    """The network of the usual fields, of a family without mixtures of experts. Raises ModelError for experts."""
    for name in ("num_experts", "num_local_experts"):
        fields.expect(name, (0,), "mixtures of experts are not supported")
    return DenseSpec(size=fields.positive_int("intermediate_size"), activation=fields.activation(), bias=bias)


def windowed(layer: LayerSpec, windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """A layer for each window."""
    attention = layer.attention
    assert isinstance(attention, AttentionSpec), "a window is one of attention"
    return tuple(replace(layer, attention=replace(attention, window=window)) for window in windows)


def decoder(fields: Fields, layers: Sequence[LayerSpec], *, tied: bool = False, **options: Any) -> DecoderSpec:
    """A decoder of the usual fields. tied: whether embedding and head are one where the config does not say.

    options: of DecoderSpec, in place of what the fields say.
    """
    return DecoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        layers=tuple(layers),
        rms_norm_eps=options.pop("rms_norm_eps", None) or fields.positive_float("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        **options,
    )


def rope_spec(
    fields: Fields,
    *,
    default_theta: float = _DEFAULT_THETA,
    layer_type: str | None = None,
    interleaved: bool = False,
    head_dim: int | None = None,
) -> RopeSpec:
    """layer_type: whose parameters are meant where they differ by type; None: there must be one set of them.

    head_dim: where the fields do not say it. Raises ModelError that names the unsupported kind of scaling or
    parameter.
    """
    given = fields.optional_dict("rope_scaling") or fields.optional_dict("rope_parameters") or {}
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        if layer_type is None:
            raise ModelError(
                f"config.json: rope_parameters differ by layer type ({', '.join(nested)}); not supported"
            )
        given = Fields(given).optional_dict(layer_type) or {}
    rope = Fields(given)
    fraction = rope.positive_float("partial_rotary_factor", fields.positive_float("partial_rotary_factor", 1.0))
    width = head_dim or fields.head_dim()
    theta = rope.positive_float("rope_theta", fields.positive_float("rope_theta", default_theta))
    if (rotated := int(width * fraction)) > width:
        raise ModelError(
            f"{rotated} channels of a head of {width} rotate; partial_rotary_factor {fraction} must be at most 1"
        )
    scaling = _scaling(given.get("rope_type", given.get("type")), rope, fields, rotated)
    if isinstance(scaling, YarnScaling) and theta == 1:
        raise ModelError("config.json: rope_theta is 1; yarn needs another one")
    return RopeSpec(
        theta=theta,
        scaling=scaling,
        rotated=None if rotated == width or isinstance(scaling, ProportionalScaling) else rotated,
        interleaved=interleaved,
    )


def _scaling(kind: object, rope: Fields, fields: Fields, rotated: int) -> RopeScaling | None:
    match kind:
        case None | "default" | "mrope":  # mrope: in sections, an axis of the position each; all equal for text
            return None
        case "linear":
            return LinearScaling(factor=rope.positive_float("factor"))
        case "llama3":
            return _llama3(rope, _original_positions(rope, fields))
        case "yarn":
            return _yarn(rope, fields)
        case "longrope":
            return _longrope(rope, fields, rotated)
        case "proportional":
            return ProportionalScaling(turning=rotated // 2, factor=rope.positive_float("factor", 1.0))
        case _:
            raise ModelError(
                f"config.json: rope_type {kind!r} is not supported; supported are default, linear, llama3, yarn, "
                "longrope, proportional"
            )


def _llama3(rope: Fields, original_positions: int) -> Llama3Scaling:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if not low < high:
        raise ModelError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Scaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original_positions,
    )


def _yarn(rope: Fields, fields: Fields) -> YarnScaling:
    original = _original_positions(rope, fields)
    factor = rope.positive_float("factor", fields.positive_int("max_position_embeddings") / original)
    return YarnScaling(
        factor=factor,
        beta_fast=rope.positive_float("beta_fast", 32.0),
        beta_slow=rope.positive_float("beta_slow", 1.0),
        attention_factor=rope.positive_float("attention_factor", _yarn_attention_factor(rope, factor)),
        original_positions=original,
        truncate=rope.flag("truncate", True),
    )


def _longrope(rope: Fields, fields: Fields, rotated: int) -> LongRopeScaling:
    """The attention factor is √(1 + ln(growth) / ln(original positions)) unless it is stated."""
    original = _original_positions(rope, fields)
    if original < 2:
        raise ModelError(f"config.json: original_max_position_embeddings is {original}; longrope needs at least 2")
    growth = fields.positive_int("max_position_embeddings") / original
    usual = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return LongRopeScaling(
        short=rope.floats("short_factor", rotated // 2),
        long=rope.floats("long_factor", rotated // 2),
        attention_factor=rope.positive_float("attention_factor", usual),
        original_positions=original,
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), or the ratio of two such terms if the config has mscale."""
    if factor <= 1.0:
        return 1.0
    growth = 0.1 * math.log(factor)
    above, below = (rope.optional_float(name) for name in ("mscale", "mscale_all_dim"))
    if above and below:
        return (above * growth + 1.0) / (below * growth + 1.0)
    return growth + 1.0


def _original_positions(rope: Fields, fields: Fields) -> int:
    """The context length of the pretraining: stated at the top level, in the scaling, or the whole context."""
    name = "original_max_position_embeddings"
    return fields.optional_int(name) or rope.positive_int(name, fields.positive_int("max_position_embeddings"))
