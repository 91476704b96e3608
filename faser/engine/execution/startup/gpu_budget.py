"""What a GPU has left for keys and values: runs the largest step of every model that will be there, and looks.

The largest step is all that one may do: the forward of most rows, and what rehearsal does with most logits, so
that copies of them count (log probabilities, masses, probabilities of drafts). How the answer is divided and told
is in memory_budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from faser.config.engine import EngineConfig
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.memory_budget import MemoryBudget, measure_budget
from faser.engine.execution.startup.model_loading import LoadedModel, Report
from faser.engine.execution.startup.profile import largest_step
from faser.engine.execution.startup.runner_factory import Use, max_logit_rows, recordings_bytes
from faser.engine.execution.startup.sizing import kv_cache_dtype
from faser.engine.execution.startup.step_profiler import DummyBatchLimits
from faser.engine.execution.startup.warm_up import WarmUp
from faser.kernels.cuda.memory import DeviceMemory
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import KvShape

STAGE = "preparing kernels"
_CHOICE_BYTES = 160  # a row and 1,024 tokens of the vocabulary: sums by chunk and digit


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """A model on the device. num_places: parts of it that the model may be on while another one is on the rest."""

    model: LoadedModel
    backend: Backend
    use: Use
    num_places: int = 0


def prepare_kernels(config: EngineConfig, tenants: Sequence[ResidentModel], report: Report) -> None:
    """Let everything be compiled that choosing tokens may need. Called when all models are loaded."""
    rehearsals = [_rehearsal(config, each) for each in tenants]
    total, played = sum(map(len, rehearsals)), 0

    def done() -> None:
        nonlocal played
        played += 1
        report(STAGE, played, total)

    report(STAGE, 0, total)
    for each in rehearsals:
        each.play(1, done)


def gpu_budget(
    config: EngineConfig, tenants: Sequence[ResidentModel], memory: DeviceMemory, free_at_start_bytes: int
) -> MemoryBudget:
    """See measure_budget. Called when all models are loaded and no cache is made."""

    def step() -> None:
        for each in tenants:
            _largest_step(config, each)
            _rehearsal(config, each).play(config.max_num_seqs)

    return measure_budget(
        config,
        memory,
        free_at_start_bytes,
        step,
        recordings_bytes=sum(recordings_bytes(config, each.model, each.use, each.num_places) for each in tenants),
        # Attention's workspaces are left by the step.
        workspaces_bytes=sum(_choice_bytes(config, each) for each in tenants),
    )


def _rehearsal(config: EngineConfig, tenant: ResidentModel) -> WarmUp:
    speculation, is_target = config.speculation, tenant.use is Use.TARGET
    return WarmUp(
        tenant.backend,
        tenant.model.decoder.logit_rows,
        speculation,
        verifies=is_target,
        drafts=not is_target or (speculation.policy != "off" and speculation.method == "layer_skip"),
    )


def _choice_bytes(config: EngineConfig, tenant: ResidentModel) -> int:
    """What a runner's own choice keeps between launches, by row and tokens of the vocabulary."""
    rows = max_logit_rows(config, tenant.use)
    return rows * tenant.model.decoder.spec.vocab_size * _CHOICE_BYTES // 1024


def _largest_step(config: EngineConfig, tenant: ResidentModel) -> None:
    """Over a cache of a few blocks, which all sequences of the step share."""
    decoder, num_blocks = tenant.model.decoder, 8
    spec = decoder.spec
    kv = KvShape(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_cache_dtype(config, decoder.dtype),
    )
    room = DummyBatchLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_len=tenant.model.max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=max_logit_rows(config, tenant.use),
    )
    largest_step(Runner(decoder, tenant.backend, kv), room)
