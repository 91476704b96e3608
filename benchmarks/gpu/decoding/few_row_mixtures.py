"""Phase `few_row_mixtures`: mixtures of up to 8 rows in three launches, against the separate ones; padded steps.

    layers   one layer, norm and router included, each way, in 16 bits and in codes of 4: its time with weights in
             no cache, how far its result is from the separate launches', whether a row has the same bits alone,
             and experts read
    cells    whole steps by the runner, with what was predicted: the way is the one that was faster at start

Steps of five rows run in a graph of eight. Where `experts_read` of a padded layer is not that of its valid rows,
padding reads experts.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.gpu.decoding.mixtures import cell_of, wanted_for
from benchmarks.gpu.engines import Opened, with_engine
from benchmarks.gpu.families import cut_to_fit, experts_of
from benchmarks.gpu.models import Config
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import ExpertsSpec
from faser.kernels.cuda.choices import GraphClock, KernelClock, Way
from faser.kernels.cuda.flashinfer.few_row_mixtures import SEPARATE
from faser.kernels.cuda.low_bit import pack_low_bit
from faser.kernels.cuda.triton.expert_weights import ExpertProduct, ExpertWeights
from faser.kernels.cuda.triton.experts import experts
from faser.kernels.cuda.triton.few_row_experts import FEW_ROW_TILES, FewRowExperts
from faser.kernels.cuda.triton.layer_ops import rms_norm
from faser.kernels.interface.low_bit.rows import INT4, FloatRows, LowBitRows

# Before the day. A step of Qwen3-30B-A3B took 3.87 ms at one sequence, 8.69 at eight, and about 8.5 with five rows
# of one, of which three were padding that read experts. Three launches instead of seven save 16 us a layer.
PREDICTED_MS = {(1, 1): 3.1, (1, 5): 6.9, (8, 1): 7.9}
_SHAPES = ((1, 1), (2, 2), (4, 4), (8, 8), (8, 5))  # rows, and those that are no padding
_DRY_SHAPES = ((1, 1), (2, 1))
_EPS = 1e-6
_WEIGHTS_STD, _BIAS_STD = 0.02, 0.01
_LOADING_S = 25.0


def run(plan: Plan, desk: Desk) -> None:
    clock: KernelClock = GraphClock(torch.device(plan.device)) if plan.device == "cuda" else HostClock()
    for config in plan.sizes.mixtures:
        for bits in (16, 4) if _has_codes(config) else (16,):
            if not desk.may_begin(f"{config['model_type']}: layers in {bits} bits"):
                continue
            layer = Layer.made(config, plan.device, bits)
            for rows, valid in _DRY_SHAPES if plan.dry_run else _SHAPES:
                for row in measured(layer, rows, valid, clock):
                    desk.append("layers", {"model": str(config["model_type"]), "bits": bits, **row})
    config = plan.sizes.mixtures[0]
    if desk.may_begin("loading", needs_s=0.0 if plan.dry_run else _LOADING_S):
        cut = cut_to_fit(config, plan.memory_bytes, sequences=8, context=plan.sizes.context)
        with_engine(
            plan, wanted_for(plan, cut, list(PREDICTED_MS), graph_rows=(1, 8)), partial(_cells, plan, desk)
        )


def _cells(plan: Plan, desk: Desk, opened: Opened) -> None:
    for (sequences, rows_each), predicted in PREDICTED_MS.items():
        if desk.may_begin(f"{sequences} sequences, {rows_each} rows each"):
            desk.append("cells", cell_of(plan, desk, opened, sequences, rows_each) | {"predicted_ms": predicted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One mixture with its norm and router. read: counts its experts."""

    network: ExpertsSpec
    kernels: FewRowExperts
    norm: Tensor
    read: Tensor

    @classmethod
    def made(cls, config: Config, device: str, bits: int = 16) -> "Layer":
        """bits: of the experts' weights, 16 or 4."""
        spec = decoder_spec(config)
        network, hidden = experts_of(spec), spec.hidden_size
        random = torch.Generator(device).manual_seed(1)
        router = torch.randn((network.num_experts, hidden), generator=random, device=device) / math.sqrt(hidden)
        kernels = FewRowExperts(
            networks=_weights(network, hidden, device, bits),
            router=router.to(torch.bfloat16),
            router_bias=None,
            top_k=network.top_k,
            renormalise=network.renormalise,
            activation=network.activation.value,
            scales=None,
            shares=False,
        )
        read = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(network=network, kernels=kernels, norm=torch.ones(hidden, device=device), read=read)

    def separate(self, x: Tensor, slots: Tensor) -> Tensor:
        kernels, into = self.kernels, torch.zeros_like(x)
        normed = rms_norm(x, self.norm, _EPS, torch.empty_like(x))
        experts(
            kernels.networks,
            normed,
            torch.mm(normed, kernels.router.t()).float(),
            into,
            self.read,
            slots=slots,
            top_k=kernels.top_k,
            renormalise=kernels.renormalise,
            activation=kernels.activation,
        )
        return into

    def in_three(self, tiles: str, x: Tensor, slots: Tensor) -> Tensor:
        into = torch.zeros_like(x)
        self.kernels(x, self.norm, _EPS, into, self.read, slots, tiles=FEW_ROW_TILES[tiles])
        return into

    @property
    def ways(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        return {SEPARATE: self.separate} | {name: partial(self.in_three, name) for name in FEW_ROW_TILES}


def _has_codes(config: Config) -> bool:
    """Return whether there are kernels: rows of codes are multiples of 32, which those of a dry run may not be."""
    spec = decoder_spec(config)
    return spec.hidden_size % 32 == 0 and experts_of(spec).size % 32 == 0


def _weights(network: ExpertsSpec, hidden: int, device: str, bits: int) -> ExpertWeights:
    random = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, std: float) -> tuple[Tensor, ...]:
        made = torch.empty((network.num_experts, *shape), dtype=torch.bfloat16, device=device)
        return made.normal_(0.0, std, generator=random).unbind()

    def product(name: str, outputs: int, inputs: int) -> ExpertProduct:
        weights = drawn(outputs, inputs, std=_WEIGHTS_STD)
        biases = drawn(outputs, std=_BIAS_STD) if network.bias else None
        if bits == 16:
            return ExpertProduct.of(name, weights, biases)
        packed = tuple(
            pack_low_bit(LowBitRows(parts=(FloatRows(weight=each, scheme=INT4),)), None, each.device)
            for each in weights
        )
        return ExpertProduct.of_codes(name, packed, biases)

    return ExpertWeights(
        gate_up=product("gate_up", 2 * network.size, hidden), down=product("down", hidden, network.size)
    )


@torch.inference_mode()
def measured(layer: Layer, rows: int, valid: int, clock: KernelClock) -> Iterator[Json]:
    """Each way over rows, of which the first `valid` ones are no padding."""
    device = layer.norm.device
    x = torch.randn((rows, len(layer.norm)), generator=torch.Generator(device).manual_seed(rows), device=device)
    x, slots = x.to(torch.bfloat16), torch.arange(rows, device=device)
    slots[valid:] = -1
    wanted = layer.separate(x, slots)
    for name, way in layer.ways.items():
        before = int(layer.read)
        found = way(x, slots)
        read = int(layer.read) - before
        alone = torch.cat([way(x[at : at + 1], slots[at : at + 1]) for at in range(rows)])
        yield {
            "rows": rows,
            "valid": valid,
            "way": name,
            "us": round(1e6 * clock.seconds(partial(way, x, slots)), 2),
            "difference": round(float((found - wanted).abs().max() / wanted.abs().max()), 6),
            "same_bits_alone": bool(torch.equal(found, alone)),
            "padding_unchanged": not bool(found[valid:].any()),
            "experts_read": read,
        }


class HostClock:
    """Times work on a CPU."""

    def seconds(self, work: Way) -> float:
        taken = []
        for _ in range(2):
            began_s = perf_counter()
            work()
            taken.append(perf_counter() - began_s)
        return statistics.median(taken)
