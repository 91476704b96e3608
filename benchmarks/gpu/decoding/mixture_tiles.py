"""Phase `mixture_tiles`: what each product of a mixture takes by how it is divided, and which bits it gives.

A product is launched over several layers in turn, as one CUDA graph: their experts together are many times what
the L2 cache holds, so weights come from memory as in a step. The floor is the weights of the experts that were
read, at the bandwidth of a copy. Routers choose for each row by itself.

A row must have the same bits however many rows there are, and tiles change with these. So tiles have to be of one
kind: `bits` has for each of them the first one that gives the same bits, and whether a row has them alone too.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from operator import methodcaller

import torch
from torch import Tensor

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.families import experts_of
from benchmarks.gpu.models import Config
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import clock_of
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import ExpertsSpec
from faser.kernels.cuda.triton.experts import (
    ExpertWeights,
    Routes,
    Tiles,
    add,
    down,
    experts,
    gate_up,
    route,
    tiles_for,
)
from faser.machine import usable_cores

_WEIGHTS_STD, _BIAS_STD = 0.02, 0.2
_VALUE_BYTES = 2
_MOST_SAID = 300  # characters of an error
_TURNS = {"cuda": 2, "cpu": 1}  # over all layers, of a graph
_TIMED_S, _FEWEST, _MOST = 0.02, {"cuda": 3, "cpu": 1}, 20  # for one variant, and how often a graph is replayed
_MOST_WORKERS = 8  # each has a context of the device, and memory there for what a kernel spills; 16 had too little
_EVERY = 11  # of the variants, in a dry run
_MOST_BLOCKS, _MOST_EMPTY = 4, 16  # full ones that an expert has on average, and times that a block is too large

# (outputs, depth, warps, stages) by rows and by which factor of a product the weights are.
_ROWS_FIRST: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: (
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (32, 64, 4, 6),
        (32, 128, 4, 4),
        (32, 256, 4, 3),
        (128, 64, 4, 4),
    ),
    32: ((64, 64, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4)),
    64: ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)),
    128: ((64, 64, 8, 4), (128, 64, 8, 3)),
}
_WEIGHTS_FIRST: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: (
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 4),
    ),
    32: ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4)),
    64: ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 3)),
    128: ((64, 64, 4, 3), (128, 64, 8, 3)),
}
VARIANTS = tuple(
    Tiles(rows=rows, outputs=outputs, depth=depth, warps=warps, stages=stages, weights_first=weights_first)
    for weights_first, by_rows in ((False, _ROWS_FIRST), (True, _WEIGHTS_FIRST))
    for rows, others in by_rows.items()
    for outputs, depth, warps, stages in others
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights, and what its kernels get. x, hidden: [R, H]; inner: [R K, F], as gate_up gives it."""

    networks: ExpertWeights
    x: Tensor
    hidden: Tensor
    logits: Tensor
    read: Tensor
    routes: Routes
    inner: Tensor
    activation: str

    def product(self, name: str, tiles: Tiles) -> Tensor:
        if name == "gate_up":
            return gate_up(self.networks, self.x, self.routes, self.activation, tiles)
        return down(self.networks, self.inner, self.routes, tiles)


PRODUCTS = ("gate_up", "down")


@torch.inference_mode()
def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    if plan.device == "cuda":
        desk.say(f"compiling {len(sizes.mixtures) * len(VARIANTS)} times both products")
        compile_ahead(sizes.mixtures, VARIANTS, plan.device)
    models = [_made(config, plan) for config in sizes.mixtures]
    for model in models:
        if desk.may_begin(f"{model.name}: bits"):
            _compare(plan, desk, model)
    for rows in sizes.tile_rows:
        for model in models:
            if desk.may_begin(f"{model.name}: {rows} rows"):
                _time(plan, desk, model, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """networks: of several layers."""

    name: str
    network: ExpertsSpec
    networks: tuple[ExpertWeights, ...]


def _made(config: Config, plan: Plan) -> Model:
    network, hidden = _shape(config)
    seeds = range(plan.sizes.tile_layers)
    return Model(
        name=str(config["model_type"]),
        network=network,
        networks=tuple(weights(network, hidden, plan.device, seed) for seed in seeds),
    )


def compile_ahead(configs: Sequence[Config], variants: Sequence[Tiles], device: str) -> None:
    """Triton's cache then has all of them. One after the other they would take minutes."""
    tasks = [(config, tiles, device) for config in configs for tiles in variants]
    workers = min(usable_cores(), _MOST_WORKERS)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_launched, tasks))


def _launched(task: tuple[Config, Tiles, str]) -> None:
    """Both products once, over one row and one expert's weights. What a device refuses is seen again later."""
    config, tiles, device = task
    network, hidden = _shape(config)
    with contextlib.suppress(Exception):
        layer = _layer(weights(network, hidden, device, 0, one=True), network, 1, 0)
        for product in PRODUCTS:
            with contextlib.suppress(Exception):
                layer.product(product, tiles)


def _shape(config: Config) -> tuple[ExpertsSpec, int]:
    spec = decoder_spec(config)
    return experts_of(spec), spec.hidden_size


def _variants(plan: Plan) -> tuple[Tiles, ...]:
    return VARIANTS[::_EVERY] if plan.dry_run else VARIANTS


def weights(network: ExpertsSpec, hidden: int, device: str, seed: int, *, one: bool = False) -> ExpertWeights:
    """Made up. one: all experts have the same, which lie there once."""
    random = torch.Generator(device).manual_seed(seed)
    count = network.num_experts

    def drawn(*shape: int, std: float = _WEIGHTS_STD) -> tuple[Tensor, ...]:
        made = torch.empty((1 if one else count, *shape), dtype=torch.bfloat16, device=device)
        each = made.normal_(0.0, std, generator=random).unbind()
        return each * count if one else each

    return ExpertWeights.of(
        drawn(2 * network.size, hidden),
        drawn(hidden, network.size),
        drawn(2 * network.size, std=_BIAS_STD) if network.bias else None,
        drawn(hidden, std=_BIAS_STD) if network.bias else None,
    )


def _layer(networks: ExpertWeights, network: ExpertsSpec, rows: int, seed: int) -> Layer:
    """The first rows of more rows are those of fewer."""
    like = networks.down[0]
    hidden, device = len(like), like.device
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(hidden + network.num_experts, generator=random) for _ in range(rows)]
    both = torch.stack(drawn).to(device)
    x, logits = both[:, :hidden].to(like.dtype).contiguous(), both[:, hidden:].contiguous()
    read = torch.zeros(1, dtype=torch.int64, device=device)
    routes = route(logits, read, top_k=network.top_k, renormalise=network.renormalise)
    activation = network.activation.value
    tiles = tiles_for(routes.num_pairs, networks.count)
    inner = gate_up(networks, x, routes, activation, tiles)
    return Layer(
        networks=networks,
        x=x,
        hidden=torch.zeros_like(x),
        logits=logits,
        read=read,
        routes=routes,
        inner=inner,
        activation=activation,
    )


def _compare(plan: Plan, desk: Desk, model: Model) -> None:
    network, networks = model.network, model.networks[0]
    alone, most = (_layer(networks, network, rows, 0) for rows in (1, plan.sizes.bits_rows))
    alone = replace(alone, inner=most.inner[: network.top_k])
    for product in PRODUCTS:
        rows = bits(product, _variants(plan), alone, most)
        _add_rows(desk, "bits", [{"model": model.name, "product": product, **row} for row in rows])


def _add_rows(desk: Desk, name: str, rows: Sequence[Json]) -> None:
    desk.keep(name, [*desk.result.get(name, []), *rows])


def _time(plan: Plan, desk: Desk, model: Model, rows: int) -> None:
    network = model.network
    layers = [_layer(each, network, rows, seed) for seed, each in enumerate(model.networks)]
    read = statistics.mean(int((each.routes.counts > 0).sum()) for each in layers)
    about: Json = {"model": model.name, "rows": rows, "experts": round(read, 2)}
    for product in PRODUCTS:
        matrix = getattr(layers[0].networks, product)[0]
        floor_s = read * matrix.numel() * _VALUE_BYTES / environment.bytes_s(desk.folder)
        row = about | {"product": product, "floor_us": round(1e6 * floor_s, 2)}
        cells = [row | each for each in _cells(plan, layers, product, rows * network.top_k / network.num_experts)]
        for each in cells:
            each["times_floor"] = round(1e-6 * each["us"] / floor_s, 3) if "us" in each else None
        _add_rows(desk, "cells", cells)
        best = _best(cells, tiles_for(rows * network.top_k, network.num_experts))
        _add_rows(desk, "best", best)
    parts = _parts(network).items()
    taken = [{"part": part, "us": round(1e6 * _seconds(plan, layers, work), 2)} for part, work in parts]
    _add_rows(desk, "parts", [about | each for each in taken])


def _cells(plan: Plan, layers: Sequence[Layer], product: str, mean: float) -> Iterator[Json]:
    """mean: pairs of an expert. Tiles that are far too large or small for them are left out."""
    for tiles in _variants(plan):
        if mean > _MOST_BLOCKS * tiles.rows or tiles.rows > _MOST_EMPTY * max(mean, 1.0):
            continue
        cell: Json = {"tiles": asdict(tiles)}
        try:
            taken_s = _seconds(plan, layers, methodcaller("product", product, tiles))
        except Exception as error:  # a variant that a device has no room for; the others are wanted all the same
            yield cell | {"refused": _said(error)}
        else:
            yield cell | {"us": round(1e6 * taken_s, 2)}


def _best(cells: Sequence[Json], used: Tiles) -> list[Json]:
    """The fastest of the cells, with what the tiles take that experts() uses: us_used. None: no cell."""
    timed = [each for each in cells if "us" in each]
    found = [each["us"] for each in timed if each["tiles"] == asdict(used)]
    least = sorted(timed, key=lambda each: float(each["us"]))[:1]
    return [each | {"us_used": found[0] if found else None} for each in least]


def _parts(network: ExpertsSpec) -> dict[str, Callable[[Layer], object]]:
    """All but the products, and all of it."""

    top_k, renormalise = network.top_k, network.renormalise

    def routed(layer: Layer) -> None:
        route(layer.logits, layer.read, top_k=top_k, renormalise=renormalise)

    def added(layer: Layer) -> None:
        given = layer.x.new_empty((layer.routes.num_pairs, layer.x.shape[1]), dtype=torch.float32)
        add(given, layer.routes, layer.hidden)

    def whole(layer: Layer) -> None:
        experts(
            layer.networks,
            layer.x,
            layer.logits,
            layer.hidden,
            layer.read,
            top_k=top_k,
            renormalise=renormalise,
            activation=layer.activation,
        )

    return {"route": routed, "add": added, "whole": whole}


def _seconds(plan: Plan, layers: Sequence[Layer], work: Callable[[Layer], object]) -> float:
    """Measure the seconds of one launch, over all layers in turn."""
    clock, num_turns = clock_of(plan.device), _TURNS[plan.device]

    def turns() -> None:
        for _ in range(num_turns):
            for each in layers:
                work(each)

    again = _replayed(turns, plan.device)
    marks = [clock.mark()]
    again()
    marks.append(clock.mark())
    (first_s,) = clock.between_s(marks)  # the first replay of a graph is uploaded to the device
    marks = [clock.mark()]
    for _ in range(int(min(max(_TIMED_S / max(first_s, 1e-6), _FEWEST[plan.device]), _MOST))):
        again()
        marks.append(clock.mark())
    return statistics.median(clock.between_s(marks)) / (num_turns * len(layers))


def _replayed(work: Callable[[], None], device: str) -> Callable[[], object]:
    """Return a call that launches all of it at once; on a CPU the work itself."""
    if device == "cpu":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def bits(product: str, variants: Sequence[Tiles], alone: Layer, most: Layer) -> Iterator[Json]:
    """of_first: the first of the variants with the same bits. as_alone: the first row has them by itself too."""
    classes: list[tuple[int, Tensor]] = []
    for number, tiles in enumerate(variants):
        try:
            found, single = most.product(product, tiles), alone.product(product, tiles)
        except Exception as error:  # as in _cells
            yield {"tiles": asdict(tiles), "refused": _said(error)}
            continue
        same = [first for first, other in classes if torch.equal(found, other)]
        if not same:
            classes.append((number, found))
        yield {
            "tiles": asdict(tiles),
            "of_first": asdict(variants[same[0] if same else number]),
            "as_alone": bool(torch.equal(found[: len(single)], single)),
        }


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_SAID]
