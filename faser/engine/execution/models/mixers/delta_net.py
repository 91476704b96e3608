"""Gated delta nets (kernels/interface/delta_net.py): their sizes and tensors."""

import numpy as np

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.qwen3_5 import DeltaNetSpec
from faser.engine.execution.models.mixers.kind import MixerKind, MixerPacker, MixerWeights, Shape
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.types.arrays import Ints


def _shape(net: DeltaNetSpec, _decoder: DecoderSpec) -> DeltaShape:
    return DeltaShape(
        num_k_heads=net.num_k_heads,
        num_v_heads=net.num_v_heads,
        k_head_dim=net.k_head_dim,
        v_head_dim=net.v_head_dim,
        kernel=net.kernel,
        tiled=net.tiled,
    )


def _shapes(net: DeltaNetSpec, decoder: DecoderSpec) -> dict[str, Shape]:
    hidden, channels, heads = decoder.hidden_size, 2 * net.k_size + net.v_size, net.num_v_heads
    if net.fused_qkvz:
        products = {"in_proj_qkvz": channels + net.v_size}
    else:
        products = {"in_proj_qkv": channels, "in_proj_z": net.v_size}
    products |= {"in_proj_ba": 2 * heads} if net.fused_rates else {"in_proj_b": heads, "in_proj_a": heads}
    shapes: dict[str, Shape] = {f"{name}.weight": (width, hidden) for name, width in products.items()}
    shapes |= {"conv1d.weight": (channels, 1, net.kernel), "A_log": (heads,), "dt_bias": (heads,)}
    shapes |= {"norm.weight": (net.v_head_dim,), "out_proj.weight": (hidden, net.v_size)}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _pack(net: DeltaNetSpec, decoder: DecoderSpec, prefix: str, packer: MixerPacker) -> MixerWeights:
    prefix += "linear_attn."
    values, heads = net.v_size // net.num_k_heads, net.num_v_heads // net.num_k_heads
    if net.fused_qkvz:
        order = _parts_in_order(net, net.k_head_dim, net.k_head_dim, values, values)
        product = packer.layer_product(f"{prefix}in_proj_qkvz.weight", orders=(order,))
    else:
        product = packer.layer_product(f"{prefix}in_proj_qkv.weight", f"{prefix}in_proj_z.weight")
    if net.fused_rates:
        rates = packer.floats(f"{prefix}in_proj_ba", orders=(_parts_in_order(net, heads, heads),))
    else:
        rates = packer.floats(f"{prefix}in_proj_b", f"{prefix}in_proj_a")
    mixer = DeltaNet(
        shape=_shape(net, decoder),
        conv=packer.convolution(f"{prefix}conv1d.weight"),
        decay=-packer.norm(f"{prefix}A_log").exp(),
        dt_bias=packer.norm(f"{prefix}dt_bias"),
        norm=packer.norm(f"{prefix}norm.weight"),
        eps=decoder.rms_norm_eps,
    )
    return MixerWeights(product=product, mixer=mixer, rates=rates)


def _parts_in_order(net: DeltaNetSpec, *widths: int) -> Ints:
    """The rows of a tensor that has several parts key head by key head, part by part.

    widths: rows of a key head in each part. Two heads, two parts, as stored → as returned:

        stored     head 0: part 0, part 1; head 1: part 0, part 1
        returned   part 0: head 0, head 1; part 1: head 0, head 1
    """
    rows = np.arange(net.num_k_heads * sum(widths)).reshape(net.num_k_heads, -1)
    parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([each.reshape(-1) for each in parts])


KIND = MixerKind(out="linear_attn.out_proj", shape=_shape, shapes=_shapes, pack=_pack)
