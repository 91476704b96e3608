"""A target and a drafter, loaded once, and engines over them with the benchmark's own early pruning.

Engines are made anew for every run and run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faser.engine.execution.sampling.verify import make_verifier

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.contract.step_times import Role
from faser.engine.control.clock import WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.pruning.early_pruning import EarlyPruning
from faser.engine.execution.pruning.rank_judge import NUM_TOP
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.startup import step_times as profile
from faser.engine.execution.startup.files import draft_model_files, target_files
from faser.engine.execution.startup.memory import kv_shapes
from faser.engine.execution.startup.models import LoadedModel, load_model
from faser.engine.execution.startup.step_profiler import DummyBatchLimits, StepProfiler
from faser.engine.execution.verification_forward import PlainForward
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.machine import BusyMeter
from faser.types import Request, SamplingParams

MAX_LEN = 1024
MAX_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target without a KV cache."""

    backend: Backend
    model: LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePair:
    """Target and drafter with their KV caches. kv: the shape of the target's."""

    config: EngineConfig
    target: Target
    runner: Runner
    draft: LoadedModel
    draft_runner: Runner
    kv: KvShape


def config_of(target: Path, drafter: Path, *, gamma: int, sequences: int) -> EngineConfig:
    """Every sequence drafts gamma tokens in every step."""
    return EngineConfig(
        model=str(target),
        speculative_config={
            "method": "draft_model",
            "model": str(drafter),
            "policy": "fixed",
            "num_speculative_tokens": gamma,
        },
        max_num_seqs=sequences,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=MAX_LEN,
    )


def load_target_of(config: EngineConfig, directory: Path) -> Target:
    backend = make_backend("native", "cpu", num_threads=config.threads, cache_dir=cache_dir() / "kernels")
    return Target(backend=backend, model=load_model(config, target_files(config, directory), backend, _quiet))


def pair_of(config: EngineConfig, target: Target, drafter: Path) -> PrunePair:
    backend = target.backend.concurrent_instance()
    draft = load_model(config, draft_model_files(config, drafter, target.model.files), backend, _quiet)
    models = [target.model.files, draft.files]
    shapes = kv_shapes(config, models, target.model.files.max_positions)
    return PrunePair(
        config=config,
        target=target,
        runner=Runner(target.model.decoder, target.backend, shapes[0]),
        draft=draft,
        draft_runner=Runner(draft.decoder, backend, shapes[1]),
        kv=shapes[0],
    )


def measured_costs(pair: PrunePair, *, budget_s: float) -> CostModel:
    room = DummyBatchLimits(
        num_blocks=pair.kv.num_blocks,
        block_size=pair.kv.block_size,
        max_len=MAX_LEN,
        max_rows=MAX_ROWS,
        max_logit_rows=pair.config.max_num_seqs,
    )
    profilers = {
        Role.STEP: StepProfiler(pair.runner, room),
        Role.PASS: StepProfiler(pair.draft_runner, room, rows_each=1),
    }
    return CostModel(profile(profilers, _quiet, budget_s=budget_s, meter=BusyMeter()))


def engine_of(pair: PrunePair, pruning: EarlyPruning | None, costs: CostModel) -> Engine:
    """An engine over the pair, with empty caches. costs: changed by the engine, so no two engines share one."""
    config, kv, clock = pair.config, pair.kv, WallClock()
    decoder = pair.target.model.decoder
    sampler = Sampler(
        config.max_num_seqs,
        decoder.spec.vocab_size,
        (),
        pair.target.backend.device,
        pair.target.backend.sampling_kernels,
    )
    table = BlockTable(config.max_num_seqs, -(-MAX_LEN // kv.block_size))
    parts = DrafterParts(
        table=table,
        sampling=sampler.state,
        max_rows=MAX_ROWS,
        model=DraftModelParts(
            runner=pair.draft_runner,
            kv=DraftKvCache(table, num_blocks=kv.num_blocks, block_size=kv.block_size),
            max_positions=pair.draft.files.max_positions,
        ),
        num_top=0 if pruning is None else NUM_TOP,
    )
    speculation = SpeculativeExecution(
        drafter=make_drafter(config.speculation, parts),
        verifier=make_verifier(config.speculation, sampler),
        forward=pruning or PlainForward(),
    )
    scheduler = Scheduler(
        kv=KvManager(kv.num_blocks, kv.block_size, enable_prefix_caching=True),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=MAX_LEN,
        eos_token_ids=(),
        clock=clock,
        speculation=SpeculationControl(config.speculation, costs, num_slots=config.max_num_seqs, clock=clock),
    )
    executor = ModelExecutor(pair.runner, sampler, table, max_logit_rows=MAX_ROWS, speculation=speculation)
    return Engine(scheduler, executor)


def requests_of(
    prompts: Sequence[tuple[int, ...]], *, temperature: float, num_tokens: int, name: str
) -> list[Request]:
    """Answers of exactly num_tokens tokens. seed: the place in the list."""
    return [
        Request(
            request_id=f"{name}-{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=i, ignore_eos=True),
            arrival_s=float(i),
        )
        for i, prompt in enumerate(prompts)
    ]


def _quiet(_stage: str, _done: int, _total: int) -> None:
    pass
