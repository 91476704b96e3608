"""Gated short convolutions (kernels/interface/short_conv.py): their sizes and tensors."""

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.lfm2 import ShortConvSpec
from faser.engine.execution.models.mixers.kind import MixerKind, MixerPacker, MixerWeights, Shape
from faser.kernels.interface.short_conv import ConvShape, ShortConv


def _shape(net: ShortConvSpec, decoder: DecoderSpec) -> ConvShape:
    return ConvShape(channels=decoder.hidden_size, kernel=net.kernel)


def _shapes(net: ShortConvSpec, decoder: DecoderSpec) -> dict[str, Shape]:
    hidden = decoder.hidden_size
    return {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.out_proj.weight": (hidden, hidden),
        "conv.conv.weight": (hidden, 1, net.kernel),
    }


def _pack(net: ShortConvSpec, decoder: DecoderSpec, prefix: str, packer: MixerPacker) -> MixerWeights:
    return MixerWeights(
        product=packer.layer_product(f"{prefix}conv.in_proj.weight"),
        mixer=ShortConv(shape=_shape(net, decoder), conv=packer.convolution(f"{prefix}conv.conv.weight")),
    )


KIND = MixerKind(out="conv.out_proj", shape=_shape, shapes=_shapes, pack=_pack)
