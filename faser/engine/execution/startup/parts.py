"""EngineParts: what an engine has after loading. Models, backends, KV caches and runners.

Knows in which order these are made, since each one's memory depends on those before it; not how the engine uses
them.
"""

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir, flashinfer_workspace, may_compile_kernels
from faser.engine.checkpoints.config_json import read_model_config
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.execution.drafting.registry import HeadParts
from faser.engine.execution.overlap.factory import make_lanes
from faser.engine.execution.overlap.lanes import DeviceLanes, Lanes, device_lanes_of, make_on_lanes
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.overlap.streams import Streams
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.head_loading import (
    check_refreshable,
    find_draft_files,
    load_drafting_head,
    make_head_parts,
)
from faser.engine.execution.startup.kernel_check import check_kernels
from faser.engine.execution.startup.memory_profile import profile_memory
from faser.engine.execution.startup.model_loading import (
    LoadedModel,
    Sources,
    check_models,
    load_draft_model,
    load_target,
)
from faser.engine.execution.startup.ngram_model import find_ngram_model
from faser.engine.execution.startup.runner_factory import ModelRole, make_runner
from faser.engine.execution.startup.sizing import CachedModel, cached_model, kv_shapes, text_index_bytes
from faser.engine.execution.startup.step_times.step_profiler import TimedRunner
from faser.engine.execution.startup.warm_up import ResidentModel, prepare_kernels
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.text.tokenizer import load_tokenizer
from faser.kernels.cuda.flashinfer.build import arch_of
from faser.kernels.cuda.memory import CudaMemory
from faser.kernels.cuda.streams import CudaLaneDevice
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import KvShape
from faser.types import ModelInfo, ProgressCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Each model with its runner. draft, draft_runner: None without a draft model.

    kv: the shape of the target's cache; the draft model's and the head's have as many blocks of the same size.
    head: None where no head drafts. lanes: None without overlapped drafting. grammars: compiles what answers are
    asked to match. ngram_model: None where none drafts. text_index_bytes: what drafting from text may hold.
    """

    config: EngineConfig
    grammars: GrammarCompiler
    backend: Backend
    target: LoadedModel
    runner: Runner
    kv: KvShape
    draft: LoadedModel | None = None
    draft_runner: Runner | None = None
    head: HeadParts | None = None
    lanes: Lanes | None = None
    ngram_model: NgramModel | None = None
    kv_cache_bytes: int
    text_index_bytes: int = 0

    @property
    def pass_runner(self) -> TimedRunner | None:
        """What a drafter runs for each token; None: drafts come from text, or from layers of the target."""
        return self.draft_runner if self.head is None else self.head.runner

    @property
    def speculates(self) -> bool:
        return self.config.speculation.policy != "off"

    def info(self) -> ModelInfo:
        decoder = self.target.decoder
        return ModelInfo(
            max_model_len=self.target.max_positions,
            vocab_size=decoder.spec.vocab_size,
            eos_token_ids=self.target.config.eos_token_ids,
            dtype=str(decoder.dtype).removeprefix("torch."),
            device=str(self.backend.device),
            backend=self.backend.name,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            kv_cache_dtype=str(self.kv.dtype).removeprefix("torch."),
            weight_bytes=decoder.weight_bytes
            + (0 if self.draft is None else self.draft.decoder.weight_bytes)
            + (0 if self.head is None else self.head.runner.head.weight_bytes),
            num_parameters=decoder.num_parameters,
        )


def load_parts(
    config: EngineConfig,
    directory: Path,
    report: ProgressCallback,
    partition: Partition | None,
    sources: Sources | None,
    *,
    refreshes_head: bool = False,
) -> EngineParts:
    """Load the model in directory and the draft model that config names. Arguments as in build."""
    torch.set_num_threads(config.threads)
    target_spec = read_model_config(directory).spec
    files = find_draft_files(config, target_spec, report)
    config, draft_directory, head_directory, head_spec = files.config, files.model, files.head, files.head_spec
    if refreshes_head:
        check_refreshable(files)
    check_models(config, directory, draft_directory, head_spec)
    grammars = _grammars(config, directory)
    ngram_model = find_ngram_model(config.speculation, directory, target_spec.vocab_size)
    report("preparing kernels", 0, 0)
    kernels = cache_dir() / "kernels"
    backend = make_backend(
        config.backend,
        config.device,
        num_threads=config.threads,
        cache_dir=kernels,
        progress=report,
        few_row_kernels=config.few_row_kernels,
    )
    if backend.name == "native":
        # The native backend's own threads pack and compute. Torch's would only copy and sample, and wait for each
        # other at barriers while another process holds a core: on two busy cores a greedy step took 18 ms, not
        # 0.4 ms, and loading the default model 4 s, not 0.4 s.
        torch.set_num_threads(1)
    memory = CudaMemory(backend.device) if backend.device.type == "cuda" else None
    free_bytes = 0 if memory is None else memory.free_bytes()
    state_layers = () if head_spec is None else head_spec.state_layers
    target = load_target(config, directory, backend, report, sources, state_layers)
    draft = None
    head = None
    if head_directory is not None:
        head = load_drafting_head(config, head_directory, target, backend, report)
    draft_backend = backend.concurrent_instance()  # so that both models may run at the same time
    if draft_directory is not None:
        draft = load_draft_model(config, draft_directory, target, draft_backend, report, sources)
    models = [target] if draft is None else [target, draft]
    cached = [cached_model(config, each.decoder.spec, each.decoder.dtype) for each in models]
    if head is not None:
        cached.append(cached_model(config, head.head.spec.decoder, target.decoder.dtype))
    if backend.name == "flashinfer":
        _check_kernels(cached, backend, report)
    lanes = make_lanes(config, backend, None if draft is None else draft_backend, partition)
    device_lanes = DeviceLanes() if lanes is None or memory is None else device_lanes_of(lanes.partition)
    budget = None
    if memory is not None:
        residents = [
            ResidentModel(
                model=target, backend=backend, role=ModelRole.TARGET, num_device_lanes=len(device_lanes.verify)
            )
        ]
        if draft is not None:
            num_device_lanes = len(device_lanes.draft)
            residents.append(
                ResidentModel(
                    model=draft, backend=draft_backend, role=ModelRole.DRAFTER, num_device_lanes=num_device_lanes
                )
            )
        prepare_kernels(config, residents, report)
        report("measuring memory", 0, 0)
        budget = profile_memory(config, residents, memory, free_bytes)
    text_bytes = text_index_bytes(config, target.max_positions)
    shapes = kv_shapes(config, cached, target.max_positions, budget, text_bytes)

    def runners(on: DeviceLanes) -> tuple[Runner, Runner | None]:
        """The draft model's first: its lane may have processors that cannot run it."""
        drafter = None
        if draft is not None:
            drafter = make_runner(config, draft_backend, draft, shapes[1], ModelRole.DRAFTER, report, on.draft)
        return make_runner(config, backend, target, shapes[0], ModelRole.TARGET, report, on.verify), drafter

    if lanes is None or memory is None:
        runner, draft_runner = runners(device_lanes)
    else:
        streams = None if partition is not None else partial(_streams, backend.device)
        lanes, (runner, draft_runner) = make_on_lanes(lanes, runners, streams)
    return EngineParts(
        config=config,
        grammars=grammars,
        backend=backend,
        target=target,
        runner=runner,
        kv=shapes[0],
        draft=draft,
        draft_runner=draft_runner,
        head=None
        if head is None
        else make_head_parts(config, head, target, backend, shapes[-1], refreshes=refreshes_head),
        lanes=lanes,
        ngram_model=ngram_model,
        kv_cache_bytes=sum(shape.total_bytes for shape in shapes),
        text_index_bytes=text_bytes,
    )


def _streams(device: torch.device) -> Partition:
    """Lanes without processors of their own, once the memory of graphs and caches for other lanes is free."""
    gc.collect()
    torch.cuda.empty_cache()
    return Streams(CudaLaneDevice(device))


def _check_kernels(models: list[CachedModel], backend: Backend, report: ProgressCallback) -> None:
    """Say which kernels are missing before they are compiled, which takes minutes."""
    arch = arch_of(torch.cuda.get_device_capability(backend.device))
    kernels, workspace = cache_dir() / "kernels", flashinfer_workspace()
    check_kernels(models, arch, report, kernels=kernels, workspace=workspace, may_compile=may_compile_kernels())


def _grammars(config: EngineConfig, directory: Path) -> GrammarCompiler:
    """A compiler that gets its tokenizer ready while the model is loaded."""
    model = read_model_config(directory)
    found = GrammarCompiler(
        lambda: load_tokenizer(Path(config.tokenizer or directory)),
        vocab_size=model.spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        any_whitespace=config.structured_outputs.any_whitespace,
    )
    found.prepare()
    return found
