"""Delta nets and short convolutions on the native backend: memory of the states, and what kernels take."""

import ctypes
import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.library import DeltaNetStruct, ShortConvStruct, StatesStruct, StateStepStruct
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.kernels.interface.mixers import LayerStates, StateShape, StateStep
from faser.kernels.interface.short_conv import ConvShape, ShortConv

_MULTIPLE = 16  # the kernels handle channels of a head in groups of this size
_ALIGNED = 64
_CPU = torch.device("cpu")
_PARTS = ("state", "keys", "changes", "decays", "inputs")


class NativeStates:
    """States of all slots. address: of their FaserStates, one for each layer. allocate: gives zeroed bytes.

    layers: tensors by the names of FaserStates; states in torch of a mixer without native kernels; None: the layer
    has no state. Raises ConfigError for heads whose channels are no multiple of 16.
    """

    def __init__(self, shape: StateShape, allocate: Callable[[int], Tensor]) -> None:
        self.layers: list[dict[str, Tensor] | LayerStates | None] = []
        self._structs = (StatesStruct * len(shape.layers))()
        for struct, layer in zip(self._structs, shape.layers, strict=True):
            if not isinstance(layer, DeltaShape | ConvShape):
                self.layers.append(None if layer is None else LayerStates.allocate(shape, layer, _CPU))
                continue
            _check(layer)
            tensors = _parts(shape, layer, allocate)
            self.layers.append(tensors)
            for name, tensor in tensors.items():
                setattr(struct, name, tensor.data_ptr())
            struct.rows, struct.inputs_kept = shape.kept_rows, shape.kept_inputs(layer)
        self.address = ctypes.addressof(self._structs)

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return the state and inputs of each layer that has them. See KeptStates."""
        found = []
        for each in self.layers:
            if isinstance(each, LayerStates):
                found.append((each.state, each.inputs))
            elif each:
                found.append((each["state"], each["inputs"]))
        return found

    def layer(self, number: int) -> int:
        """Address of the FaserStates of a layer."""
        assert isinstance(self.layers[number], dict), number
        return self.address + number * ctypes.sizeof(StatesStruct)


def _check(layer: DeltaShape | ConvShape) -> None:
    if isinstance(layer, ConvShape):
        sizes = {"hidden_size": layer.channels}
    else:
        sizes = {"linear_key_head_dim": layer.k_head_dim, "linear_value_head_dim": layer.v_head_dim}
    for name, value in sizes.items():
        if value % _MULTIPLE:
            raise ConfigError(
                f"the native backend needs a {name} that is a multiple of {_MULTIPLE}, not {value}; "
                "--backend torch computes it"
            )


def _parts(
    shape: StateShape, layer: DeltaShape | ConvShape, allocate: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    slots, rows = shape.num_slots, shape.kept_rows
    inputs = (slots, shape.kept_inputs(layer), layer.channels)
    if isinstance(layer, ConvShape):
        memory = allocate(math.prod(inputs) * shape.dtype.itemsize)
        return {"state": torch.zeros(slots, 0), "inputs": memory.view(shape.dtype).view(inputs)}
    heads = layer.num_v_heads
    sizes = (
        (slots, heads, layer.k_head_dim, layer.v_head_dim),
        (slots, layer.num_k_heads, rows, layer.k_head_dim),
        (slots, heads, rows, layer.v_head_dim),
        (slots, heads, rows),
        inputs,
    )
    dtypes = (*(torch.float32,) * 4, shape.dtype)
    counts = [torch.Size(size).numel() * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    memory, first, found = allocate(sum(-(-each // _ALIGNED) * _ALIGNED for each in counts)), 0, {}
    for name, size, dtype, count in zip(_PARTS, sizes, dtypes, counts, strict=True):
        found[name] = memory[first : first + count].view(dtype).view(size)
        first += -(-count // _ALIGNED) * _ALIGNED
    return found


_NETS: WeakKeyDictionary[DeltaNet, DeltaNetStruct] = WeakKeyDictionary()  # as long as the weights live


def delta_net_struct(net: DeltaNet) -> DeltaNetStruct:
    """Points to the weights."""
    found, shape = _NETS.get(net), net.shape
    if found is None:
        for each in (net.conv, net.decay, net.dt_bias, net.norm):
            assert each.dtype is torch.float32, each.dtype
            assert each.is_contiguous()
        assert net.conv.shape == (shape.kernel, shape.channels), net.conv.shape
        found = _NETS[net] = DeltaNetStruct(
            shape.num_k_heads,
            shape.num_v_heads,
            shape.k_head_dim,
            shape.v_head_dim,
            shape.kernel,
            *(each.data_ptr() for each in (net.conv, net.decay, net.dt_bias, net.norm)),
            net.eps,
            shape.tiled,
        )
    return found


_CONVS: WeakKeyDictionary[ShortConv, ShortConvStruct] = WeakKeyDictionary()  # as long as the weights live


def short_conv_struct(net: ShortConv) -> ShortConvStruct:
    """Points to the weights."""
    found, shape = _CONVS.get(net), net.shape
    if found is None:
        assert net.conv.dtype is torch.float32, net.conv.dtype
        assert net.conv.is_contiguous()
        assert net.conv.shape == (shape.kernel, shape.channels), net.conv.shape
        found = _CONVS[net] = ShortConvStruct(shape.channels, shape.kernel, net.conv.data_ptr())
    return found


class StepStructs:
    """The FaserStateStep of the step that was asked for last: all layers of a step ask for the same one."""

    def __init__(self) -> None:
        self._step: StateStep | None = None
        self._struct = StateStepStruct()

    def address(self, step: StateStep) -> int:
        if step is not self._step:
            columns = (step.slots, step.ends, step.starts, step.counts, step.num_drafts, step.first_rows)
            self._step = step
            self._struct = StateStepStruct(len(step.slots), *(each.ctypes.data for each in columns))
        return ctypes.addressof(self._struct)
