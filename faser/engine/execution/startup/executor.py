"""The data plane of an engine: its models loaded and started, and the executor over them.

Knows in which order the parts are made, since each one's memory depends on those before it; not how the engine
uses them.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir, flashinfer_workspace, may_compile_kernels
from faser.config.speculation import NONE, SpeculationConfig
from faser.engine.checkpoints.embedder import read_embedder
from faser.engine.checkpoints.families import find_family
from faser.engine.checkpoints.files import read_config
from faser.engine.checkpoints.ngram_model import NgramModel, load
from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.head_memory import NoHiddenStates
from faser.engine.execution.drafting.registry import (
    DrafterParts,
    DraftModelParts,
    load_index,
    make_drafter,
)
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.models.headers import check_sizes
from faser.engine.execution.models.tensors import num_parameters
from faser.engine.execution.overlap.lanes import DeviceLanes, Lanes, device_lanes_of, make_lanes, make_on_lanes
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.overlap.streams import plain_streams
from faser.engine.execution.pruning import PlainForward, make_early_pruning
from faser.engine.execution.ranks.adapters import LeadingAdapters
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.processors import make_logits_processors
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.engine.execution.startup.device import check_kernels
from faser.engine.execution.startup.files import HeadFiles, ModelFiles, find_models
from faser.engine.execution.startup.leader import NoRanks, make_ranks
from faser.engine.execution.startup.memory import (
    check_context,
    kv_shapes,
    state_bytes,
    state_shape,
    text_index_bytes,
)
from faser.engine.execution.startup.models import (
    EngineHead,
    EngineModel,
    LoadedHead,
    LoadedModel,
    Sources,
    load_models,
    start_models,
)
from faser.engine.execution.startup.ngram_text import counted_ngram_model
from faser.engine.execution.startup.warm_up import prepare_kernels, profile_memory
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaMemory
from faser.kernels.cuda.flashinfer.build import arch_of
from faser.kernels.cuda.lanes import CudaLaneDevice
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.mixers import CHUNK
from faser.types.engine import ModelInfo, ProgressCallback

WrapDrafter = Callable[[Drafter], Drafter]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of an engine after loading.

    drafting: the draft model or the head; empty where drafts come from text. lanes:
    None without overlapped drafting. grammars: compiles what answers are asked to match. ngram_model: None where
    none drafts. text_index_bytes: what drafting from text may hold. ranks: that hold the rest of the target; None:
    there are no others.
    """

    config: EngineConfig
    grammars: GrammarCompiler
    target: EngineModel
    drafting: tuple[EngineModel | EngineHead, ...]
    lanes: Lanes | None
    ngram_model: NgramModel | None
    text_index_bytes: int
    ranks: NoRanks

    @property
    def models(self) -> tuple[EngineModel | EngineHead, ...]:
        return (self.target, *self.drafting)

    @property
    def draft_models(self) -> tuple[EngineModel, ...]:
        return tuple(each for each in self.drafting if isinstance(each, EngineModel))

    @property
    def heads(self) -> tuple[EngineHead, ...]:
        return tuple(each for each in self.drafting if isinstance(each, EngineHead))

    @property
    def speculates(self) -> bool:
        return self.config.speculation.policy != "off"

    @property
    def num_snapshots(self) -> int:
        """Return the number of snapshots of recurrent states; 0: none, or the target has no such states."""
        shape = state_shape(self.config, self.target.files)
        return 0 if shape is None else shape.num_snapshots

    def info(self) -> ModelInfo:
        files, decoder, backend, kv = self.target.files, self.target.decoder, self.target.backend, self.target.kv
        return ModelInfo(
            max_model_len=files.max_positions,
            vocab_size=decoder.spec.vocab_size,
            eos_token_ids=files.config.eos_token_ids,
            dtype=str(decoder.dtype).removeprefix("torch."),
            device=str(backend.device),
            backend=backend.name,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            kv_cache_bytes=sum(each.kv.total_bytes for each in self.models)
            + state_bytes(self.config, self.target.files),
            kv_cache_dtype=str(kv.dtype).removeprefix("torch."),
            weight_bytes=sum(each.weight_bytes for each in self.models),
            num_parameters=num_parameters(files.spec),
            separate_layers=decoder.separate_layers,
            hidden_size=files.spec.hidden_size,
            embedder=read_embedder(files.directory),
        )


def load_parts(
    config: EngineConfig,
    directory: Path,
    report: ProgressCallback,
    partition: Partition | None,
    sources: Sources | None,
) -> EngineParts:
    """Load the model in directory and what drafts for it by the config. Arguments as in build."""
    with contextlib.ExitStack() as undo:
        parts = _load_parts(config, directory, report, partition, sources, undo)
        undo.pop_all()
        return parts


def _load_parts(
    config: EngineConfig,
    directory: Path,
    report: ProgressCallback,
    partition: Partition | None,
    sources: Sources | None,
    undo: contextlib.ExitStack,
) -> EngineParts:
    """Load the parts as load_parts does. undo: called if that fails."""
    torch.set_num_threads(config.threads)
    config, files = find_models(config, directory, report)
    _check_sizes(config, files, sources)
    grammars = _grammars(config, files[0])
    ngram_model = find_ngram_model(
        config.speculation,
        files[0].spec.vocab_size,
        tokenizer=Path(config.tokenizer or directory),
        kept_in=cache_dir() / "ngrams",
        report=report,
    )
    backend = engine_backend(config, report)
    ranks = make_ranks(config, directory)
    undo.callback(ranks.close)
    memory = CudaMemory(backend.device) if backend.device.type == "cuda" else None
    free_bytes = 0 if memory is None else memory.free_bytes()
    target, drafting = load_models(config, files, backend, report, sources, ranks.group)
    _check_kernels(files, backend, report)
    draft_models = [each for each in drafting if isinstance(each, LoadedModel)]
    lanes = make_lanes(config, backend, next((each.backend for each in draft_models), None), partition)
    on = DeviceLanes() if lanes is None or memory is None else device_lanes_of(lanes.partition)
    budget = None
    if memory is not None:
        prepare_kernels(config, [target, *draft_models], report)
        report("measuring memory", 0, 0)
        heads = [each for each in drafting if isinstance(each, LoadedHead)]
        budget = profile_memory(config, [target, *draft_models], memory, free_bytes, on, heads)
    text_bytes = text_index_bytes(config, target.files.max_positions)
    shapes = kv_shapes(config, files, target.files.max_positions, budget, text_bytes)
    ranks.meet(shapes[0].num_blocks)
    start = partial(start_models, config, target, drafting, shapes, report, group=ranks.group)
    if lanes is None or memory is None:
        started, started_drafting = start(on=on)
    else:
        plain = None if partition is not None else lambda: _plain_streams(backend.device)
        lanes, (started, started_drafting) = make_on_lanes(lanes, lambda on: start(on=on), plain)
    ranks.lead(started.runner)
    return EngineParts(
        config=config,
        grammars=grammars,
        target=started,
        drafting=tuple(started_drafting),
        lanes=lanes,
        ngram_model=ngram_model,
        text_index_bytes=text_bytes,
        ranks=ranks,
    )


def _check_sizes(config: EngineConfig, files: Sequence[ModelFiles | HeadFiles], sources: Sources | None) -> None:
    """Raises ModelError for tensors of other sizes than config.json says, ConfigError for too long a context."""
    for each in files:
        if sources is None and not isinstance(each, HeadFiles):  # a head has its sizes from the target
            check_sizes(each.directory, each.config)
        check_context(config, each, each.max_positions)


def _grammars(config: EngineConfig, target: ModelFiles) -> GrammarCompiler:
    """A compiler that gets its tokenizer ready while the model is loaded."""
    found = GrammarCompiler(
        lambda: load_tokenizer(Path(config.tokenizer or target.directory)),
        vocab_size=target.spec.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        any_whitespace=config.structured_outputs.any_whitespace,
    )
    found.prepare()
    return found


def find_ngram_model(
    speculation: SpeculationConfig,
    vocab_size: int,
    *,
    tokenizer: Path,
    kept_in: Path,
    report: ProgressCallback,
) -> NgramModel | None:
    """The n-gram model that the configuration names, else the one that is counted with the target's tokenizer.

    tokenizer, kept_in, report: as for counted_ngram_model. None: there is none, or no drafter asks for it. Raises
    ConfigError where the method is ngram_model and there is none, and as load does.
    """
    named = speculation.ngram_model
    if not any(each.name == "ngram_model" for each in speculation.drafters):
        return None
    if named not in (None, NONE):
        return load(Path(named), vocab_size=vocab_size)
    found = None if named == NONE else counted_ngram_model(tokenizer, vocab_size, kept_in, report)
    if found is None and speculation.method == "ngram_model":
        raise ConfigError(
            "method is ngram_model; it needs 'ngram_model', a file: none is counted with the tokenizer of "
            f"{tokenizer}"
        )
    return found


def engine_backend(config: EngineConfig, report: ProgressCallback) -> Backend:
    report("preparing kernels", 0, 0)
    backend = make_backend(
        config.backend,
        config.device,
        num_threads=config.threads,
        cache_dir=cache_dir() / "kernels",
        progress=report,
    )
    if backend.name == "native":
        # The native backend's own threads pack and compute. Torch's would only copy and sample, and wait for each
        # other at barriers while another process holds a core: on two busy cores a greedy step took 18 ms, not
        # 0.4 ms, and loading the default model 4 s, not 0.4 s.
        torch.set_num_threads(1)
    return backend


def _check_kernels(models: Sequence[ModelFiles], backend: Backend, report: ProgressCallback) -> None:
    """Say which of FlashInfer's kernels are missing before they are compiled, which takes minutes."""
    if backend.name != "flashinfer":
        return
    arch = arch_of(torch.cuda.get_device_capability(backend.device))
    kernels, workspace = cache_dir() / "kernels", flashinfer_workspace()
    check_kernels(models, arch, report, kernels=kernels, workspace=workspace, may_compile=may_compile_kernels())


def _plain_streams(device: torch.device) -> Partition:
    """Lanes without processors of their own, once the memory of graphs and caches for other lanes is free."""
    gc.collect()
    torch.cuda.empty_cache()
    return plain_streams(CudaLaneDevice(device))


def make_executor(parts: EngineParts, wrap_drafter: WrapDrafter, report: ProgressCallback) -> ModelExecutor:
    """wrap_drafter: given the drafter, returns the one to use. report: as in build."""
    config, target, backend = parts.config, parts.target, parts.target.backend
    vocab_size, eos_token_ids = target.files.spec.vocab_size, target.files.config.eos_token_ids
    matchers = SequenceMatchers(
        parts.grammars,
        num_threads=config.threads,
        state_chunk=CHUNK if target.files.spec.has_states else None,
    )
    sampler = Sampler(
        config.max_num_seqs,
        vocab_size,
        eos_token_ids,
        backend.sampling_kernels,
        make_logits_processors(vocab_size, eos_token_ids, matchers, backend.mask_kernel),
    )
    table = BlockTable(config.max_num_seqs, -(-target.files.max_positions // target.kv.block_size))
    return ModelExecutor(
        target.runner,
        sampler,
        table,
        max_logit_rows=config.max_num_seqs,
        matchers=matchers,
        speculation=_speculation(parts, sampler, matchers, table, wrap_drafter, report)
        if parts.speculates
        else None,
        adapters=_shared(make_adapters(config, target), parts.ranks) if config.enable_lora else None,
        samples_in_runner=config.schedules_async,
    )


def make_adapters(config: EngineConfig, target: LoadedModel) -> AdapterStore:
    """Make room for the adapters of a target, or of this rank's part of one."""
    files, decoder = target.files, target.decoder
    return AdapterStore(
        decoder.adapted,
        target.backend.adapters,
        spec=files.spec,
        dtype=decoder.dtype,
        architectures=find_family(read_config(files.directory)).gguf,
        max_rank=config.max_lora_rank,
    )


def _shared(adapters: AdapterStore, ranks: NoRanks) -> AdapterStore | LeadingAdapters:
    return adapters if ranks.group is None else LeadingAdapters(adapters, ranks.group)


def _speculation(
    parts: EngineParts,
    sampler: Sampler,
    matchers: SequenceMatchers,
    table: BlockTable,
    wrap_drafter: WrapDrafter,
    report: ProgressCallback,
) -> SpeculativeExecution:
    config, kv = parts.config, parts.target.kv
    models = [
        DraftModelParts(
            runner=each.runner,
            kv=DraftKvCache(table, num_blocks=kv.num_blocks, block_size=kv.block_size),
            max_positions=each.files.max_positions,
        )
        for each in parts.draft_models
    ]
    model = next(iter(models), None)
    head = next((each.parts for each in parts.heads), None)
    drafter_parts = DrafterParts(
        table=table,
        sampling=sampler.state,
        matchers=matchers,
        max_rows=config.max_num_batched_tokens,
        model=model,
        head=head,
        samples_in_runner=config.schedules_async,
        load_index=partial(load_index, report),
        ngram_model=parts.ngram_model,
        text_index_bytes=parts.text_index_bytes,
    )
    drafter = wrap_drafter(make_drafter(config.speculation, drafter_parts))
    return SpeculativeExecution(
        drafter=drafter,
        verifier=make_verifier(config.speculation, sampler),
        forward=make_early_pruning(config.speculation, num_layers=parts.target.runner.num_layers)
        if config.early_prune == "on"
        else PlainForward(),
        lanes=parts.lanes if drafter.drafts_overlapped else None,
        draft_kv=None if model is None else model.kv,
        states=NoHiddenStates() if head is None else head.states,
    )
