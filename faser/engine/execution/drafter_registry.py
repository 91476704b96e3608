"""Makes the drafter that a configuration names, and imports only that one.

Owns one constructor for each row of config/drafters.py: of drafters that run a model in MODEL_DRAFTERS, of those
that copy text in TEXT_DRAFTERS, of those that follow a grammar in GRAMMAR_DRAFTERS. The native index answers
several text methods with one call; make_lookup prefers it and puts every other text drafter next to it.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faser.config.drafters import HEAD_METHODS, TEXT_METHODS
from faser.config.environment import cache_dir
from faser.config.speculation import AUTO, SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.drafters.draft_samplers import (
    DraftSampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.drafters.drafter import Drafter
from faser.engine.execution.drafters.head_cache import HeadCache
from faser.engine.execution.drafters.head_runner import HeadRunner
from faser.engine.execution.drafters.head_versions import HeadVersions
from faser.engine.execution.drafters.passes import DraftLoop, PassLoop
from faser.engine.execution.drafters.states import HiddenStates
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.text_lookup.lookup import CombinedLookup, LookupDrafter, TextLookup
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.kernels.cpu.text_index import UNLIMITED
from faser.kernels.interface.sampling import SamplingKernels
from faser.types import ProgressCallback


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
    """A loaded head. states: where the target's steps leave theirs. cache: what the head's KV cache holds.

    load_version: a runner of the head in a directory, on the same cache; None: the head stays as it is.
    """

    runner: HeadRunner
    states: HiddenStates
    cache: HeadCache
    load_version: Callable[[Path], HeadRunner] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """What drafters work on. max_rows: the most rows of a pass. model, head: None where none is loaded.

    sampling, matchers: the parameters and grammars of every slot, of the target's sampler. samples_in_runner: the
    runner samples drafts that are point masses, and feeds them to the next pass without a wait. progress: called
    while the native text look-up is compiled. ngram_model: None where there is none for the target.
    text_index_bytes: what the native index of texts may hold.
    """

    target: Runner
    table: BlockTable
    sampling: SamplingState
    max_rows: int
    matchers: SequenceMatchers | None = None
    model: DraftModelParts | None = None
    head: HeadParts | None = None
    samples_in_runner: bool = False
    progress: ProgressCallback | None = None
    ngram_model: NgramModel | None = None
    text_index_bytes: int = UNLIMITED


def make_drafter(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    """The drafter of config.method. Raises ConfigError for draft_layers that the target does not have."""
    if config.method in MODEL_DRAFTERS:
        return MODEL_DRAFTERS[config.method](config, parts)
    if config.method != AUTO:
        return LookupDrafter(_lookup(config, (config.method,), parts))
    from faser.engine.execution.text_lookup.text_and_model import TextAndModel

    make = None if config.pass_method is None else MODEL_DRAFTERS[config.pass_method]
    return TextAndModel(_lookup(config, TEXT_METHODS, parts), None if make is None else make(config, parts))


def head_versions(drafter: Drafter) -> HeadVersions | None:
    """The part of a drafter of make_drafter that takes refreshed heads; None: it has none."""
    from faser.engine.execution.text_lookup.text_and_model import TextAndModel

    own = drafter.model if isinstance(drafter, TextAndModel) else drafter
    return own if isinstance(own, HeadVersions) else None


def _lookup(config: SpeculationConfig, methods: tuple[str, ...], parts: DrafterParts) -> TextLookup:
    library = _text_library(parts.progress)
    return make_lookup(
        config, methods, library, parts.matchers, parts.ngram_model, max_bytes=parts.text_index_bytes
    )


def make_lookup(
    config: SpeculationConfig,
    methods: tuple[str, ...],
    library: ctypes.CDLL | None,
    matchers: SequenceMatchers | None = None,
    ngram_model: NgramModel | None = None,
    *,
    max_bytes: int = UNLIMITED,
) -> TextLookup:
    """Looks drafts up in text by each of the methods, of which those of the native index come first.

    library: holds the native index; None: every method is done in Python. matchers: None: no answer has a
    structure, so that grammars draft nothing. ngram_model: None leaves out the method of that name. max_bytes:
    what the native index may hold.
    """
    copying = [
        method
        for method in methods
        if method not in GRAMMAR_DRAFTERS and (method != "ngram_model" or ngram_model is not None)
    ]
    num_native = 0 if library is None else sum(method in NATIVE_METHODS for method in copying)
    drafters = tuple(TEXT_DRAFTERS[method](config, ngram_model) for method in copying[num_native:])
    occasional: tuple[Drafter, ...] = ()
    if matchers is not None:
        occasional = tuple(make(config, matchers) for name, make in GRAMMAR_DRAFTERS.items() if name in methods)
    if library is None or not num_native:
        return CombinedLookup(drafters, None, occasional)
    native = _native_lookup(config, tuple(copying[:num_native]), library, ngram_model, max_bytes)
    return CombinedLookup(drafters, native, occasional) if drafters or occasional else native


def _draft_model(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    from faser.engine.execution.drafters.draft_model import DraftModel

    model = parts.model
    assert model is not None, f"method {config.method} without a loaded draft model"
    sampler = _draft_sampler(config, parts.sampling, model.runner.sampling_kernels)
    return DraftModel(
        _draft_loop(parts, model.runner, sampler),
        model.kv,
        sampler,
        max_positions=model.max_positions,
    )


def _layer_skip(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    from faser.engine.execution.drafters.layer_skip import LayerSkip, draft_layers

    sampler = _draft_sampler(config, parts.sampling, parts.target.sampling_kernels)
    num_layers = draft_layers(config.draft_layers, parts.target.num_layers)
    return LayerSkip(_draft_loop(parts, parts.target, sampler, num_layers))


def _head(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    head = parts.head
    assert head is not None, f"method {config.method} without a loaded head"
    first, load_version = _head_drafter(config, parts, head, head.runner), head.load_version
    if load_version is None:
        return first
    return HeadVersions(first, lambda path: _head_drafter(config, parts, head, load_version(path)))


def _head_drafter(config: SpeculationConfig, parts: DrafterParts, head: HeadParts, runner: HeadRunner) -> Drafter:
    """runner: of this version of the head."""
    from faser.engine.execution.drafters.draft_vocabulary import DraftVocabularySampler
    from faser.engine.execution.drafters.head_drafter import HeadDrafter
    from faser.engine.execution.drafters.head_passes import HeadPassLoop

    method = config.pass_method
    assert method is not None, "a head takes passes"
    sampler = _draft_sampler(config, parts.sampling, runner.sampling_kernels)
    predicts = sampler if isinstance(sampler, GreedyDraftSampler | SampleAndMatchDraftSampler) else None
    if (draft_ids := runner.head.draft_ids) is not None:
        sampler = DraftVocabularySampler(sampler, draft_ids, runner.vocab_size)
        predicts = predicts if sampler.in_order else None
    loop = HeadPassLoop(runner, head.cache.table, head.states, sampler, max_rows=parts.max_rows, predicts=predicts)
    most = runner.head.spec.max_draft_tokens
    return HeadDrafter(method, loop, head.states, head.cache, max_tokens=most)


MODEL_DRAFTERS: dict[str, Callable[[SpeculationConfig, DrafterParts], Drafter]] = {
    "draft_model": _draft_model,
    "layer_skip": _layer_skip,
    **dict.fromkeys(HEAD_METHODS, _head),
}


def _suffix(config: SpeculationConfig, _model: NgramModel | None) -> Drafter:
    from faser.engine.execution.text_lookup.python.suffix import SuffixDrafter

    return SuffixDrafter(cap=config.cap, max_cached_requests=config.suffix_max_cached_requests)


def _ngram(config: SpeculationConfig, _model: NgramModel | None) -> Drafter:
    from faser.engine.execution.text_lookup.python.ngram import NgramDrafter

    return NgramDrafter(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max, cap=config.cap)


def _ngram_model(config: SpeculationConfig, model: NgramModel | None) -> Drafter:
    from faser.engine.execution.text_lookup.python.ngram_model import NgramModelDrafter

    assert model is not None, "method ngram_model without an n-gram model"
    return NgramModelDrafter(model, cap=config.cap)


def _grammar(config: SpeculationConfig, matchers: SequenceMatchers) -> Drafter:
    from faser.engine.execution.text_lookup.grammar import GrammarDrafter

    return GrammarDrafter(matchers, cap=config.cap)


GRAMMAR_DRAFTERS: dict[str, Callable[[SpeculationConfig, SequenceMatchers], Drafter]] = {"grammar": _grammar}
TEXT_DRAFTERS: dict[str, Callable[[SpeculationConfig, NgramModel | None], Drafter]] = {
    "suffix": _suffix,
    "ngram": _ngram,
    "ngram_model": _ngram_model,
}
NATIVE_METHODS = ("suffix", "ngram", "ngram_model")  # in the order in which the native index answers


def _native_lookup(
    config: SpeculationConfig,
    methods: tuple[str, ...],
    library: ctypes.CDLL,
    model: NgramModel | None,
    max_bytes: int,
) -> TextLookup:
    from faser.engine.execution.text_lookup.native_lookup import NativeLookup, ngram_table, text_rules

    table = None if model is None or "ngram_model" not in methods else ngram_table(library, model)
    return NativeLookup(library, text_rules(config, methods, table, max_bytes=max_bytes))


def _text_library(progress: ProgressCallback | None) -> ctypes.CDLL | None:
    from faser.kernels.cpu.text_index import text_library

    return text_library(cache_dir() / "kernels", progress=progress)


def _draft_loop(
    parts: DrafterParts, runner: Runner, sampler: DraftSampler, num_layers: int | None = None
) -> DraftLoop:
    """A loop that waits after each pass, unless the runner can choose the tokens of this sampler itself."""
    from faser.engine.execution.drafters.device_fed_passes import DeviceFedPassLoop

    if parts.samples_in_runner and isinstance(sampler, GreedyDraftSampler | SampleAndMatchDraftSampler):
        return DeviceFedPassLoop(runner, parts.table, sampler, max_rows=parts.max_rows, num_layers=num_layers)
    return PassLoop(runner, parts.table, sampler, max_rows=parts.max_rows, num_layers=num_layers)


def _draft_sampler(
    config: SpeculationConfig, sampling: SamplingState, kernels: SamplingKernels | None
) -> DraftSampler:
    """How tokens are sampled from logits. kernels: of the backend that drafts; None: tensor operations."""
    match config.draft_sample_method:
        case "greedy":
            return GreedyDraftSampler(kernels)
        case "coupled":
            return SampleAndMatchDraftSampler(sampling, kernels=kernels)
        case "probabilistic":
            return ProbabilisticDraftSampler(sampling, kernels=kernels)
        case _:
            raise AssertionError(f"draft_sample_method {config.draft_sample_method!r} was let through")
