"""Makes the drafter that a configuration names: one row for each of config/speculation.py, with its constructor.

A row of TEXT_DRAFTERS may answer for several methods, as the native index does with one call. To add a drafter,
write its file, its row in config/speculation.py and its row here, and describe it in docs/speculation.md.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from faser.config.environment import cache_dir
from faser.config.speculation import AUTO, TEXT_METHODS, SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.execution.drafting.ahead import AheadLoop
from faser.engine.execution.drafting.blocks.loop import BlockLoop, BlockRunner
from faser.engine.execution.drafting.blocks.model import BlockModel
from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.fed_loop import FedPassLoop
from faser.engine.execution.drafting.grammar import GrammarDrafter
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates
from faser.engine.execution.drafting.heads.assistant import AssistantDrafter, AssistantHead
from faser.engine.execution.drafting.heads.decoder import HeadModelLoop, HeadModelPasses, StateReader
from faser.engine.execution.drafting.heads.head import Head, HeadDrafter, HeadLoop, HeadRunner
from faser.engine.execution.drafting.heads.vocabulary import WHOLE
from faser.engine.execution.drafting.loop import DraftLoop, ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import (
    DraftSampler,
    DraftVocabularySampler,
    GreedyDraftSampler,
    PointMassSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel, ngram_table, text_rules
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.errors import ConfigError
from faser.kernels.cpu.text_index import UNLIMITED, text_library
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.sampling import SamplingKernels
from faser.types.engine import ProgressCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelParts:
    """A loaded draft model. runner: its KV cache has the target's blocks. kv: what that cache holds.

    max_positions: its context length.
    """

    runner: Runner
    kv: DraftKvCache
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """A loaded head. states: where the target's steps leave theirs. kv: its own cache, of the target's blocks.

    reader: of the states, for a head that has the runner of a draft model; None: its runner reads them.
    """

    head: Head | BlockModel
    runner: Runner | HeadRunner | BlockRunner
    states: HiddenStates
    kv: KvShape
    reader: StateReader | None = None


def load_index(progress: ProgressCallback | None = None) -> ctypes.CDLL:
    """The library with the native index of texts. progress: called while it is compiled.

    Raises ConfigError where it did not come with the package and cannot be compiled.
    """
    return text_library(cache_dir() / "kernels", progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """Parts that drafters are made of.

    table: the target's blocks. sampling, matchers: the parameters and grammars of every slot, of the target's
    sampler. max_rows: the most rows of a pass. model, head: None where none is loaded.  samples_in_runner: the
    runner samples drafts that are point masses, and feeds them to the next pass without a wait. load_index: asked
    where a method needs it. ngram_model: None where there is none for the target. text_index_bytes: what the index
    may hold.
    """

    table: BlockTable
    sampling: SamplingState
    max_rows: int
    matchers: SequenceMatchers | None = None
    model: DraftModelParts | None = None
    head: HeadParts | None = None
    samples_in_runner: bool = False
    load_index: Callable[[], ctypes.CDLL] = load_index
    ngram_model: NgramModel | None = None
    text_index_bytes: int = UNLIMITED


def make_drafter(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    """The drafter of config.method. Raises ConfigError where that method cannot be had on this machine."""
    model = None if config.pass_method is None else MODEL_DRAFTERS[config.pass_method](config, parts)
    if config.method == AUTO:
        return TextAndModel(text_drafters(config, TEXT_METHODS, parts), model)
    return text_drafters(config, (config.method,), parts)[0] if model is None else model


def text_drafters(config: SpeculationConfig, methods: Sequence[str], parts: DrafterParts) -> list[Drafter]:
    """Return the drafters of these methods; a grammar's and an n-gram model's may be missing."""
    found: list[Drafter] = []
    for row in TEXT_DRAFTERS:
        own = [method for method in row.methods if method in methods]
        if own and (drafter := row.make(config, own, parts)) is not None:
            found.append(drafter)
    return found


def _draft_model(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    model = parts.model
    assert model is not None, f"method {config.method} without a loaded draft model"
    sampler = _draft_sampler(config, parts.sampling, model.runner.sampling_kernels)
    passes = ModelPasses(model.runner, parts.table, max_rows=parts.max_rows)
    loop = _loop_of(passes, sampler, parts)
    ahead, point_masses = None, _point_masses(sampler)
    if parts.samples_in_runner and point_masses is not None and isinstance(model.runner, GraphRunner):
        ahead = AheadLoop(model.runner, parts.table, point_masses)
    return DraftModel(loop, passes, model.kv, sampler, max_positions=model.max_positions, ahead=ahead)


def _loop_of(passes: ModelPasses, sampler: DraftSampler, parts: DrafterParts) -> DraftLoop:
    if parts.samples_in_runner and (point_masses := _point_masses(sampler)) is not None:
        return FedPassLoop(passes, point_masses)
    return PassLoop(passes, sampler)


def _head(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    found, method = parts.head, config.pass_method
    assert found is not None, f"method {config.method} without a loaded head"
    assert method is not None
    head, runner, states, max_rows = found.head, found.runner, found.states, parts.max_rows
    sampler = _draft_sampler(config, parts.sampling, runner.sampling_kernels)
    if isinstance(head, AssistantHead):
        assert isinstance(runner, HeadRunner), "an assistant has no other runner"
        return AssistantDrafter(runner, parts.table, states, sampler, method)
    cache = HeadCache(parts.table, num_blocks=found.kv.num_blocks, block_size=found.kv.block_size)
    predicts = _point_masses(sampler)
    vocabulary = WHOLE
    loop: BlockLoop | HeadLoop | HeadModelLoop
    if isinstance(runner, BlockRunner):
        loop = BlockLoop(runner, cache.table, states, sampler, max_rows=max_rows, predicts=predicts)
    elif isinstance(runner, HeadRunner):
        if (draft_ids := runner.head.draft_ids) is not None:
            sampler = DraftVocabularySampler(sampler, draft_ids, runner.vocab_size)
            predicts = predicts if sampler.in_order else None
        vocabulary = runner.head.vocabulary
        loop = HeadLoop(runner, cache.table, states, sampler, max_rows=max_rows, predicts=predicts)
    else:
        assert found.reader is not None, "a head with the runner of a draft model has a reader of states"
        passes = HeadModelPasses(runner, cache.table, states, found.reader, max_rows=max_rows)
        loop = HeadModelLoop(passes, _loop_of(passes, sampler, parts))
    trained = head.spec.decoder.max_position_embeddings
    return HeadDrafter(loop, states, cache, method, trained=trained, vocabulary=vocabulary)


def _lookup(config: SpeculationConfig, methods: Sequence[str], parts: DrafterParts) -> Drafter | None:
    """Return the look-up, or None where there is nothing to look up. ConfigError: there is no native index."""
    if parts.ngram_model is None:
        methods = [method for method in methods if method != "ngram_model"]
    if not methods:
        return None
    try:
        library = parts.load_index()
    except ConfigError as error:
        raise ConfigError(f"method {config.method} needs the native index of texts: {error}") from error
    ngrams = None
    if parts.ngram_model is not None and "ngram_model" in methods:
        ngrams = ngram_table(library, parts.ngram_model)
    return LookupDrafter(library, text_rules(config, methods, ngrams, max_bytes=parts.text_index_bytes))


def _grammar(config: SpeculationConfig, _methods: Sequence[str], parts: DrafterParts) -> Drafter | None:
    """Return None where no answer has a structure. With method auto the look-up drafts for every request."""
    if parts.matchers is None:
        return None
    return GrammarDrafter(parts.matchers, cap=config.cap, alone=config.method != AUTO)


MODEL_DRAFTERS: dict[str, Callable[[SpeculationConfig, DrafterParts], Drafter]] = {
    "draft_model": _draft_model,
    "eagle3": _head,
    "mtp": _head,
    "dflash": _head,
    "dspark": _head,
}


class TextDrafter(NamedTuple):
    """A drafter from text. methods: it answers for all of these. make: given those of them that are wanted."""

    methods: tuple[str, ...]
    make: Callable[[SpeculationConfig, Sequence[str], DrafterParts], Drafter | None]


# In the order of their drafts.
TEXT_DRAFTERS = (
    TextDrafter(("suffix", "ngram", "ngram_model"), _lookup),
    TextDrafter(("grammar",), _grammar),
)


def _draft_sampler(
    config: SpeculationConfig, sampling: SamplingState, kernels: SamplingKernels | None
) -> DraftSampler:
    """Choose the sampler of drafts. kernels: of the backend that drafts; None: tensor operations."""
    match config.draft_sample_method:
        case "greedy":
            return GreedyDraftSampler(kernels)
        case "coupled":
            return SampleAndMatchDraftSampler(sampling, kernels=kernels)
        case "probabilistic":
            return ProbabilisticDraftSampler(sampling, kernels=kernels)
        case _:
            raise AssertionError(f"draft_sample_method {config.draft_sample_method!r} was let through")


def _point_masses(sampler: DraftSampler) -> PointMassSampler | None:
    return sampler if isinstance(sampler, GreedyDraftSampler | SampleAndMatchDraftSampler) else None
