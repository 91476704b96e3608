"""Which drafter a configuration gets, and whether a model must be loaded for it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.config.drafters import DRAFTERS, PASS_METHODS, TEXT_METHODS
from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.ngram_model import count
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafter_registry import (
    GRAMMAR_DRAFTERS,
    MODEL_DRAFTERS,
    NATIVE_METHODS,
    TEXT_DRAFTERS,
    DrafterParts,
    DraftModelParts,
    make_drafter,
    make_lookup,
)
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.drafters.draft_model import DraftModel
from faser.engine.execution.drafters.layer_skip import LayerSkip
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.text_lookup.lookup import CombinedLookup, LookupDrafter
from faser.engine.execution.text_lookup.native_lookup import NativeLookup
from faser.engine.execution.text_lookup.text_and_model import TextAndModel
from faser.errors import ConfigError
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.sampling import Ints, Reals
from faser.kernels.torch.backend import TorchBackend
from faser.types import SamplingParams
from tests.engine.execution.drafters.drafting import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    World,
    kv_shape,
    make_runner,
)

NGRAMS = count([(0, 1, 1, 0, 1, 0, 0, 1)])


def parts(directory: Path, *, with_model: bool = False) -> DrafterParts:
    table = BlockTable(NUM_SLOTS, 8)
    model = DraftModelParts(
        runner=make_runner(directory),
        kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        max_positions=MAX_LEN,
    )
    return DrafterParts(
        target=make_runner(directory),
        table=table,
        sampling=SamplingState(NUM_SLOTS),
        max_rows=MAX_ROWS,
        model=model if with_model else None,
        ngram_model=NGRAMS,
    )


def test_every_drafter_has_one_constructor() -> None:
    assert sorted((*MODEL_DRAFTERS, *TEXT_DRAFTERS, *GRAMMAR_DRAFTERS)) == sorted(DRAFTERS)
    assert tuple(MODEL_DRAFTERS) == PASS_METHODS
    assert TEXT_METHODS[: len(NATIVE_METHODS)] == NATIVE_METHODS


@pytest.mark.parametrize(
    "method, model, kind",
    [
        ("draft_model", "some/model", DraftModel),
        ("layer_skip", None, LayerSkip),
        ("ngram", None, LookupDrafter),
        ("suffix", None, LookupDrafter),
        ("ngram_model", None, LookupDrafter),
        ("auto", None, TextAndModel),
        ("auto", "some/model", TextAndModel),
    ],
)
@pytest.mark.parametrize("sampled", ["greedy", "probabilistic"])
def test_every_method_has_its_drafter(
    tiny_checkpoint: Path, method: str, model: str | None, kind: type, sampled: str
) -> None:
    config = SpeculationConfig(method=method, model=model, draft_sample_method=sampled)
    assert config.needs_draft_model == (model is not None)
    drafter = make_drafter(config, parts(tiny_checkpoint, with_model=model is not None))
    assert isinstance(drafter, kind)


def test_without_an_n_gram_model_the_others_look_up_alone(kernel_cache: Path) -> None:
    for library in (None, native_library.load(library_path(cache_dir=kernel_cache))):
        assert make_lookup(SpeculationConfig(), TEXT_METHODS, library).num_methods == 2
        assert make_lookup(SpeculationConfig(), TEXT_METHODS, library, None, NGRAMS).num_methods == 3


@pytest.mark.parametrize(
    "methods", [("suffix",), ("ngram",), ("ngram_model",), ("suffix", "ngram"), ("suffix", "ngram", "ngram_model")]
)
def test_the_native_look_up_and_the_one_in_python_draft_the_same(
    kernel_cache: Path, methods: tuple[str, ...]
) -> None:
    config = SpeculationConfig(
        num_speculative_tokens=7,
        suffix_max_cached_requests=2,
        prompt_lookup_min=3,
        prompt_lookup_max=4,
    )
    library = native_library.load(library_path(cache_dir=kernel_cache))
    native = make_lookup(config, methods, library, None, NGRAMS)
    plain = make_lookup(config, methods, None, None, NGRAMS)
    assert (type(native), type(plain)) == (NativeLookup, CombinedLookup)

    rng = random.Random(8)
    plan = DraftPlan(step=0, requests=(DraftRequest(slot=0, max_tokens=20, new_blocks=()),))
    drafted = [0] * len(methods)
    for _ in range(100):
        token_ids = tuple(rng.randrange(2) for _ in range(rng.randrange(5, 40)))
        start = SequenceStart(slot=0, sampling=SamplingParams(), seed=0, prompt_len=5, token_ids=token_ids)
        for lookup in (native, plain):
            lookup.start(start)
        columns = native.look_up(plan)
        assert columns == plain.look_up(plan)
        drafted = [most + len(draft.token_ids) for most, (draft,) in zip(drafted, columns, strict=True)]
        for lookup in (native, plain):
            lookup.release(0)
    assert min(drafted) > 100


def test_nothing_is_loaded_for_a_policy_that_never_drafts() -> None:
    assert not SpeculationConfig(method="draft_model", model="some/model", policy="off").needs_draft_model


def test_layers_that_the_target_does_not_have_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="draft_layers is 2; the target has 2 layers"):
        make_drafter(SpeculationConfig(method="layer_skip", draft_layers=2), parts(tiny_checkpoint))


class CountingChoice(TorchSamplingKernels):
    """Counts the questions."""

    num_asked = 0

    def best_and_margin(self, logits: torch.Tensor) -> tuple[Ints, Reals]:
        self.num_asked += 1
        return super().best_and_margin(logits)


class CountedBackend(TorchBackend):
    """Has kernels of its own to choose tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.sampling_kernels = self.counting = CountingChoice()


def counted_runner(directory: Path) -> tuple[Runner, CountingChoice]:
    backend = CountedBackend()
    decoder = load_decoder(
        directory, backend, torch.float32, max_model_len=MAX_LEN, max_rows=MAX_ROWS, progress=lambda *_: None
    )
    return Runner(decoder, backend, kv_shape(decoder)), backend.counting


@pytest.mark.parametrize("method", ["draft_model", "layer_skip"])
@pytest.mark.parametrize("sampled", ["greedy", "coupled", "probabilistic"])
def test_tokens_are_chosen_on_the_backend_of_the_model_that_drafts(
    tiny_checkpoint: Path, method: str, sampled: str
) -> None:
    """Not on the target's where a second model drafts: the two may run at the same time on other threads."""
    (target, of_target), (model, of_model) = (counted_runner(tiny_checkpoint) for _ in range(2))
    own = parts(tiny_checkpoint, with_model=True)
    assert own.model is not None
    own = replace(own, target=target, model=replace(own.model, runner=model))
    name = "some/model" if method == "draft_model" else None
    config = SpeculationConfig(method=method, model=name, draft_layers=1, draft_sample_method=sampled)
    drafter = make_drafter(config, own)
    world = World(drafter=drafter, table=own.table, rng=random.Random(0))
    world.start(0, [1, 2, 3], temperature=1.0)
    assert len(world.propose({0: 3}).drafts[0].token_ids) == 3

    assert (of_model.num_asked, of_target.num_asked) == ((3, 0) if method == "draft_model" else (0, 3))
