"""Adapters from files in the rows of a decoder, and what the data plane refuses.

Oracle: PEFT over transformers, in float32.

Planted bugs that these tests have caught: a scale left out; an adapter put into the slot of its neighbour; the
factors of a module taken from the layer below; an adapter that is dropped stays in its slot; value heads
in the order of another format.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.families import find_family
from faser.engine.checkpoints.files import read_config
from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.models.adapted import AdapterSizes
from faser.errors import RequestError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from faser.types.adapter import Adapter
from tests.checkpoints import write_tiny_checkpoint
from tests.engine.checkpoints.adapter_files import (
    adapt_by_peft,
    random_factors,
    tiny_modules,
    write_adapter,
    write_gguf_adapter,
)
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.test_families import CASES
from tests.engine.execution.models.paged import PagedModel, Rows, load, prompt

SIZES = AdapterSizes(slots=4, max_rank=64)
LENGTH = 20
FAMILIES = ["llama-biases", "qwen2", "qwen3.5", "phi3-partial", "gemma3"]
# Of four adapters; the last two leave products as they are.
ADAPTERS: Sequence[dict[str, Any]] = (
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 64, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
    {"r": 8, "lora_alpha": 30, "target_modules": r".*\.(q|v|qkv)_proj", "alpha_pattern": {"v_proj": 3}},
    {"r": 5, "lora_alpha": 9, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
)


def store_of(model: PagedModel, path: Path) -> AdapterStore:
    return AdapterStore(
        model.decoder.adapted,
        model.backend.adapters,
        spec=model.decoder.spec,
        dtype=model.decoder.dtype,
        architectures=find_family(read_config(path)).gguf,
        max_rank=SIZES.max_rank,
    )


def loaded(store: AdapterStore, path: Path, name: str = "tuned") -> Adapter:
    """Load an adapter as the engine does once the front-end has read it."""
    adapter = read_adapter(name, path, max_rank=SIZES.max_rank)
    store.load_adapter(adapter)
    return adapter


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model and its adapters on disk. prompts, logits: of PEFT with each adapter, then of the model alone."""

    base: Path
    adapters: list[Path]
    prompts: list[list[int]]
    logits: Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    case = next(each for each in CASES if each.name == request.param)
    folder = tmp_path_factory.mktemp("tuned")
    base = write_family_model(folder / "base", case.model_type, case.fields)
    prompts = [prompt(LENGTH, base.config.vocab_size, seed=seed) for seed in range(len(ADAPTERS) + 1)]
    adapters, logits = [], []
    for number, config in enumerate(ADAPTERS):
        adapters.append(folder / f"adapter-{number}")
        peft = adapt_by_peft(base, adapters[-1], seed=number, **config)
        logits.append(logits_of(peft, prompts[number]))
        base = peft.unload()
    logits.append(logits_of(base, prompts[-1]))
    return Tuned(folder / "base", adapters, prompts, torch.stack(logits))


def test_rows_have_the_logits_of_peft(tuned: Tuned, backend: Backend) -> None:
    """Five sequences in each step, four adapters and none, in chunks of a prompt."""
    model = load(tuned.base, num_sequences=5, backend=backend, adapters=SIZES)
    store = store_of(model, tuned.base)
    for slot, folder in enumerate(tuned.adapters):
        store.place(slot, loaded(store, folder).digest)
    found, order = [], (3, 1, 4, 0, 2)
    for first, last in ((0, 7), (7, 8), (8, LENGTH)):
        rows = [Rows(i, first, tuned.prompts[i][first:last], adapter=i if i < 4 else -1) for i in order]
        by_sequence = dict(zip(order, model.step(rows).view(len(order), last - first, -1), strict=True))
        found.append(torch.stack([by_sequence[i] for i in range(5)]))
    torch.testing.assert_close(torch.cat(found, 1), tuned.logits, rtol=0, atol=5e-4)


@torch.no_grad()
def logits_of(model: Any, token_ids: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([token_ids])).logits[0]
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[PagedModel, AdapterStore]:
    path = write_tiny_checkpoint(tmp_path / "tiny")
    model = load(path, adapters=SIZES)
    return model, store_of(model, path)


def test_a_dropped_adapter_leaves_its_slots(tiny: tuple[PagedModel, AdapterStore], tmp_path: Path) -> None:
    model, store = tiny
    token_ids = prompt(8, 512)

    def logits(slot: int) -> Tensor:
        return model.step([Rows(0, 0, token_ids, adapter=slot)])

    plain = logits(-1)
    first, second = (loaded(store, write_adapter(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    for slot, adapter in ((0, first), (1, first), (2, second)):
        store.place(slot, adapter.digest)
    tuned, other = logits(0), logits(2)
    assert torch.equal(logits(1), tuned)
    store.drop_adapter(first.digest)
    assert torch.equal(logits(0), plain)
    assert torch.equal(logits(1), plain)
    assert torch.equal(logits(2), other)
    store.load_adapter(first)
    store.place(2, first.digest)
    assert torch.equal(logits(2), tuned)
    store.drop_adapter(second.digest)  # another one is in its slot
    assert torch.equal(logits(2), tuned)
    assert not torch.equal(tuned, plain)


def test_products_that_an_adapter_leaves_alone_lose_the_one_before(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path
) -> None:
    model, store = tiny
    token_ids = prompt(8, 512)
    whole = loaded(store, write_adapter(tmp_path / "whole"))
    partial = loaded(store, write_adapter(tmp_path / "partial", tiny_modules("q_proj")))
    store.place(1, partial.digest)
    expected = model.step([Rows(0, 0, token_ids, adapter=1)])
    for adapter in (whole, partial):
        store.place(0, adapter.digest)
    assert torch.equal(model.step([Rows(0, 0, token_ids, adapter=0)]), expected)


def test_a_gguf_adapter_has_the_logits_of_the_same_one_of_peft(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path
) -> None:
    model, store = tiny
    modules = {name: shape for name, shape in tiny_modules("q_proj").items() if ".0." in name}
    ((down, up),) = random_factors(modules, 4, seed=0).values()
    rows = up.reshape(4, 2, 8, 4).swapaxes(1, 2).reshape(up.shape)
    path = write_gguf_adapter(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (down, rows)})
    for slot, file in enumerate((path, write_adapter(tmp_path / "peft", modules))):
        store.place(slot, loaded(store, file).digest)
    first, second = (model.step([Rows(0, 0, prompt(8, 512), adapter=slot)]) for slot in (0, 1))
    assert torch.equal(first, second)


def test_files_that_have_changed_since_they_were_read_are_refused(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path
) -> None:
    _, store = tiny
    adapter = read_adapter("tuned", write_adapter(tmp_path / "a", seed=1), max_rank=64)
    write_adapter(tmp_path / "a", seed=2)
    with pytest.raises(RequestError, match=r"adapter tuned cannot be used: .*/a has changed since it was loaded"):
        store.load_adapter(adapter)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.2.mlp.up_proj": (128, 64)}, r"adapts model\.layers\.2\.mlp\.up_proj; of this model of 2 "),
        ({"model.layers.0.mlp.gate": (128, 64)}, r"FASER adapts mlp\.down_proj, .*, self_attn\.v_proj"),
        ({"model.layers.0.mlp.up_proj": (128, 96)}, r"for a weight of \[128, 96\]; the model's has \[128, 64\]"),
        ({"model.layers.0.mlp.up_proj": (64, 64)}, r"for a weight of \[64, 64\]; the model's has \[128, 64\]"),
    ],
)
def test_adapters_of_other_models_are_refused(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path, modules: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        loaded(tiny[1], write_adapter(tmp_path / "a", modules))
    assert caught.value.param == "model"


def test_a_gguf_adapter_of_another_architecture_is_refused(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path
) -> None:
    factors = random_factors({"blk.0.attn_q.weight": (64, 64)}, 4, seed=0)
    path = write_gguf_adapter(tmp_path / "a.gguf", factors, architecture="qwen2")
    with pytest.raises(RequestError, match="is for architecture qwen2; the model's is llama"):
        loaded(tiny[1], path)


@pytest.mark.parametrize("tiled", [False, True])
def test_an_adapter_with_value_heads_in_another_order_is_refused(tmp_path: Path, tiled: bool) -> None:
    """GGUF files of Qwen3.5 have them in tiles, folders of PEFT do not; other products have one order."""
    case = next(each for each in CASES if each.name == "qwen3.5")
    write_family_model(tmp_path / "base", case.model_type, case.fields)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"linear_value_heads_tiled": tiled}))
    model = load(tmp_path / "base", adapters=SIZES)
    store = store_of(model, tmp_path / "base")
    shapes = {part.name: part.shape for product in model.decoder.adapted for part in product.parts}
    for end in ("in_proj_b", "out_proj", "mlp.up_proj"):
        module = next(name for name in shapes if name.endswith(end))
        peft = write_adapter(tmp_path / f"peft-{end}", {module: shapes[module]})
        if not tiled or end == "mlp.up_proj":
            loaded(store, peft)
        else:
            with pytest.raises(RequestError, match="both GGUF, or neither"):
                loaded(store, peft)


@pytest.mark.parametrize(
    ("config", "value", "letter"),
    [({}, float("nan"), "A"), ({}, float("inf"), "B"), ({"lora_alpha": 1e9}, 1e38, "B")],
)
def test_values_that_are_no_numbers_are_refused(
    tiny: tuple[PagedModel, AdapterStore], tmp_path: Path, config: dict[str, Any], value: float, letter: str
) -> None:
    """Also those that the scale makes infinite."""
    from safetensors.torch import load_file, save_file

    folder = write_adapter(tmp_path / "a", **config)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"base_model.model.model.layers.1.mlp.up_proj.lora_{letter}.weight"][1, 2] = value
    save_file(tensors, path)
    with pytest.raises(
        RequestError, match=rf"lora_{letter} of model\.layers\.1\.mlp\.up_proj has values that are no"
    ):
        loaded(tiny[1], folder)


def test_loading_twice_keeps_the_first(tiny: tuple[PagedModel, AdapterStore], tmp_path: Path) -> None:
    _, store = tiny
    adapter = loaded(store, write_adapter(tmp_path / "a"))
    packed = store._packed[adapter.digest]
    store.load_adapter(replace(adapter, name="another", path="/nowhere"))
    assert store._packed == {adapter.digest: packed}
    assert store._packed[adapter.digest] is packed
