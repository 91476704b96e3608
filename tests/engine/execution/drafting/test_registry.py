"""Which drafter a configuration gets, and whether a model must be loaded for it."""

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.config.speculation import DRAFTERS, PASS_METHODS, TEXT_METHODS, SpeculationConfig
from faser.engine.checkpoints.ngram_model import count
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.registry import (
    MODEL_DRAFTERS,
    TEXT_DRAFTERS,
    DrafterParts,
    DraftModelParts,
    make_drafter,
    text_drafters,
)
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import SamplingState
from faser.errors import ConfigError
from faser.kernels.torch_backend import TorchBackend
from faser.types.arrays import Floats, Ints
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.driving import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    World,
    kv_shape,
    make_runner,
)
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter
from tests.engine.execution.drafting.oracle.ngram_model import NgramModelDrafter
from tests.engine.execution.drafting.oracle.suffix import SuffixDrafter

NGRAMS = count([(0, 1, 1, 0, 1, 0, 0, 1)])
NATIVE = ("suffix", "ngram", "ngram_model")


def parts(directory: Path, *, with_model: bool = False) -> DrafterParts:
    table = BlockTable(NUM_SLOTS, 8)
    model = DraftModelParts(
        runner=make_runner(directory),
        kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        max_positions=MAX_LEN,
    )
    return DrafterParts(
        table=table,
        sampling=SamplingState(NUM_SLOTS),
        max_rows=MAX_ROWS,
        model=model if with_model else None,
        ngram_model=NGRAMS,
    )


def test_every_drafter_has_one_constructor() -> None:
    assert tuple(MODEL_DRAFTERS) == PASS_METHODS
    assert tuple(method for each in TEXT_DRAFTERS for method in each.methods) == TEXT_METHODS
    assert {*MODEL_DRAFTERS, *TEXT_METHODS} == {*DRAFTERS}


@pytest.mark.parametrize(
    "method, model, kind",
    [
        ("draft_model", "some/model", DraftModel),
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


def test_without_an_n_gram_model_the_others_look_up_alone(tiny_checkpoint: Path) -> None:
    own = parts(tiny_checkpoint)
    for ngram_model, methods in ((NGRAMS, NATIVE), (None, NATIVE[:-1])):
        (lookup,) = text_drafters(SpeculationConfig(), TEXT_METHODS, replace(own, ngram_model=ngram_model))
        assert isinstance(lookup, LookupDrafter)
        assert lookup.methods == methods


@pytest.mark.parametrize("methods", [NATIVE[:1], NATIVE[1:2], NATIVE[2:], NATIVE[:2], NATIVE])
def test_what_is_looked_up_is_what_the_drafters_in_python_propose(
    tiny_checkpoint: Path, methods: tuple[str, ...]
) -> None:
    config = SpeculationConfig(
        num_speculative_tokens=7,
        suffix_max_cached_requests=2,
        prompt_lookup_min=3,
        prompt_lookup_max=4,
    )
    (lookup,) = text_drafters(config, methods, parts(tiny_checkpoint))
    oracles: dict[str, Drafter] = {
        "suffix": SuffixDrafter(cap=7, max_cached_requests=2),
        "ngram": NgramDrafter(min_n=3, max_n=4, cap=7),
        "ngram_model": NgramModelDrafter(NGRAMS, cap=7),
    }
    oracle = TextAndModel([oracles[method] for method in methods])

    rng = random.Random(8)
    plan = DraftPlan(
        step=0, width=16, from_text=True, requests=(DraftRequest(slot=0, max_tokens=20, new_blocks=()),)
    )
    drafted = [0] * len(methods)
    for _ in range(100):
        token_ids = tuple(rng.randrange(2) for _ in range(rng.randrange(5, 40)))
        start = SequenceStart(slot=0, sampling=SamplingParams(), seed=0, prompt_len=5, token_ids=token_ids)
        for each in (lookup, oracle):
            each.start(start)
        drafts = lines_of(lookup.propose(plan).table)
        assert drafts == lines_of(oracle.propose(plan).table)
        drafted = [most + len(draft.token_ids) for most, draft in zip(drafted, drafts, strict=True)]
        for each in (lookup, oracle):
            each.release(0)
    assert min(drafted) > 100


def no_index() -> ctypes.CDLL:
    raise ConfigError("no C++ compiler found; install g++")


@pytest.mark.parametrize("method", [*NATIVE, "auto"])
def test_without_the_index_a_method_that_needs_it_is_refused(tiny_checkpoint: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method {method} needs the native index of texts: .* install g\+\+"):
        make_drafter(SpeculationConfig(method=method), replace(parts(tiny_checkpoint), load_index=no_index))


def test_nothing_is_loaded_for_a_policy_that_never_drafts() -> None:
    assert not SpeculationConfig(method="draft_model", model="some/model", policy="off").needs_draft_model


class CountingChoice(TorchSamplingKernels):
    """Counts the questions."""

    num_asked = 0

    def best_and_margin(self, logits: torch.Tensor) -> tuple[Ints, Floats]:
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


@pytest.mark.parametrize("sampled", ["greedy", "coupled", "probabilistic"])
def test_tokens_are_chosen_on_the_backend_of_the_model_that_drafts(tiny_checkpoint: Path, sampled: str) -> None:
    runner, kernels = counted_runner(tiny_checkpoint)
    own = parts(tiny_checkpoint, with_model=True)
    assert own.model is not None
    own = replace(own, model=replace(own.model, runner=runner))
    config = SpeculationConfig(method="draft_model", model="some/model", draft_sample_method=sampled)
    drafter = make_drafter(config, own)
    world = World(drafter=drafter, table=own.table, rng=random.Random(0))
    world.start(0, [1, 2, 3], temperature=1.0)
    assert len(lines_of(world.propose({0: 3}).table)[0].token_ids) == 3
    assert kernels.num_asked == 3
