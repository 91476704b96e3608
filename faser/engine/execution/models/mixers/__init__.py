"""Mixers: what layers have in place of attention, by the spec that a family's module gives them.

To add one: a MixerSpec in the family's module, a module here with its MixerKind and its Mixer (arithmetic in
torch, see kernels/interface/mixers.py), and its line in _KINDS. CPUs compute it in torch, until there are kernels.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import MixerSpec
from faser.engine.checkpoints.families.lfm2 import ShortConvSpec
from faser.engine.checkpoints.families.qwen3_5 import DeltaNetSpec
from faser.engine.execution.models.mixers import delta_net, short_conv
from faser.engine.execution.models.mixers.kind import MixerKind

_KINDS: Mapping[type[MixerSpec], MixerKind[Any]] = {DeltaNetSpec: delta_net.KIND, ShortConvSpec: short_conv.KIND}


def mixer_kind(spec: MixerSpec) -> MixerKind[Any]:
    return _KINDS[type(spec)]
