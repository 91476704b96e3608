"""Builds the drafter that a configuration names and imports only what it needs."""

import ctypes
from dataclasses import dataclass

from faser.config.environment import cache_dir
from faser.config.speculation import SpeculationConfig
from faser.engine.execution.drafters.draft_samplers import (
    DraftSampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
    WithTopIds,
)
from faser.engine.execution.drafters.drafter import Drafter
from faser.engine.execution.drafters.passes import DraftLoop, PassLoop
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.text_lookup.lookup import CORPUS_TOKENS, LookupDrafter, SeparateLookups, TextLookup
from faser.kernels.interface.sampling_kernels import SamplingKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelParts:
    """A loaded draft model. runner: its cache has the target's blocks. max_positions: its context."""

    runner: Runner
    num_blocks: int
    block_size: int
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """What an engine has that drafters work on. max_rows: most rows of a pass. model: None: none was loaded.

    sampling: the parameters of every slot, of the target's sampler. num_top: how many likely tokens a model names
    beside each that it drafts; 0: none. samples_in_runner: drafts that are point masses are chosen by the runner,
    and go from pass to pass without a wait.
    """

    target: Runner
    table: BlockTable
    sampling: SamplingState
    max_rows: int
    model: DraftModelParts | None = None
    num_top: int = 0
    samples_in_runner: bool = False


def names_model(config: SpeculationConfig) -> bool:
    """Whether the drafter is built on a draft model, which then has to be loaded."""
    return config.policy != "off" and (
        config.method == "draft_model" or (config.method == "auto" and config.model is not None)
    )


def make_drafter(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    """The drafter of config.method. Raises ConfigError for draft_layers that the target does not have."""
    match config.method:
        case "draft_model":
            return _draft_model(config, parts)
        case "layer_skip":
            return _layer_skip(config, parts)
        case "ngram" | "suffix":
            return LookupDrafter(make_lookup(config, (config.method,), _library()))
        case "auto":
            from faser.engine.execution.drafters.selector import DrafterSelector

            model = _draft_model(config, parts) if config.model is not None else None
            lookup = make_lookup(config, ("suffix", "ngram"), _library())
            return DrafterSelector(lookup, model, model_cap=config.model_cap)
        case _:
            raise AssertionError(f"speculation method {config.method!r} was let through")


def _draft_model(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    from faser.engine.execution.drafters.draft_kv_cache import DraftKv
    from faser.engine.execution.drafters.draft_model import DraftModel

    model = parts.model
    assert model is not None, f"method {config.method} without a loaded draft model"
    choice = _choice(config, parts.sampling, model.runner.sampling_kernels)
    return DraftModel(
        _loop(parts, model.runner, choice),
        DraftKv(parts.table, num_blocks=model.num_blocks, block_size=model.block_size),
        choice,
        max_positions=model.max_positions,
    )


def _layer_skip(config: SpeculationConfig, parts: DrafterParts) -> Drafter:
    from faser.engine.execution.drafters.layer_skip import LayerSkip, draft_layers

    choice = _choice(config, parts.sampling, parts.target.sampling_kernels)
    num_layers = draft_layers(config.draft_layers, parts.target.num_layers)
    return LayerSkip(_loop(parts, parts.target, choice, num_layers), choice)


def _loop(parts: DrafterParts, runner: Runner, choice: DraftSampler, num_layers: int | None = None) -> DraftLoop:
    """A loop whose passes wait for each other, unless the runner can make this choice."""
    from faser.engine.execution.drafters.device_fed_passes import DeviceFedPassLoop

    named = WithTopIds(choice, parts.num_top) if parts.num_top else choice
    waiting = PassLoop(runner, parts.table, named, max_rows=parts.max_rows, num_layers=num_layers)
    if not (parts.samples_in_runner and isinstance(choice, GreedyDraftSampler | SampleAndMatchDraftSampler)):
        return waiting
    return DeviceFedPassLoop(
        runner, parts.table, choice, max_rows=parts.max_rows, waiting=waiting, num_layers=num_layers
    )


def make_lookup(config: SpeculationConfig, methods: tuple[str, ...], library: ctypes.CDLL | None) -> TextLookup:
    """Suffix, n-gram or both, in this order. library: what looks up; None: it is done in Python."""
    if library is None:
        makers = {"suffix": _suffix, "ngram": _ngram}
        return SeparateLookups([makers[method](config) for method in methods])
    from faser.engine.execution.text_lookup.native_lookup import NativeLookup
    from faser.kernels.cpu.text_index import TextRules

    suffix, ngram = "suffix" in methods, "ngram" in methods
    rules = TextRules(
        cap=config.cap,
        depth=config.suffix_max_tree_depth if suffix else 0,
        max_outputs=config.suffix_max_cached_requests,
        max_tokens=CORPUS_TOKENS,
        max_spec_factor=config.suffix_max_spec_factor,
        min_token_prob=config.suffix_min_token_prob,
        min_n=config.prompt_lookup_min if ngram else 0,
        max_n=config.prompt_lookup_max if ngram else 0,
    )
    return NativeLookup(library, rules)


def _library() -> ctypes.CDLL | None:
    from faser.kernels.cpu.text_index import text_library

    return text_library(cache_dir() / "kernels")


def _ngram(config: SpeculationConfig) -> Drafter:
    from faser.engine.execution.text_lookup.ngram import NgramDrafter

    return NgramDrafter(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max, cap=config.cap)


def _suffix(config: SpeculationConfig) -> Drafter:
    from faser.engine.execution.text_lookup.suffix import SuffixDrafter

    return SuffixDrafter(
        cap=config.cap,
        max_tree_depth=config.suffix_max_tree_depth,
        max_cached_requests=config.suffix_max_cached_requests,
        max_spec_factor=config.suffix_max_spec_factor,
        min_token_prob=config.suffix_min_token_prob,
        corpus_tokens=CORPUS_TOKENS,
    )


def _choice(config: SpeculationConfig, sampling: SamplingState, kernels: SamplingKernels | None) -> DraftSampler:
    """How tokens are sampled from logits. kernels: those of the drafting model; None: tensor operations."""
    match config.draft_sample_method:
        case "greedy":
            return GreedyDraftSampler(kernels)
        case "coupled":
            return SampleAndMatchDraftSampler(sampling, kernels=kernels)
        case "probabilistic":
            return ProbabilisticDraftSampler(sampling, kernels=kernels)
        case _:
            raise AssertionError(f"draft_sample_method {config.draft_sample_method!r} was let through")
