"""Kernels are prepared and the largest step is run, on the emulated device, with a model's real steps.

Bugs that these tests have caught: a warm-up of one sequence in place of the largest step, no warm-up at all, one
model left out.
"""

from pathlib import Path

import pytest
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.config_json import read_model_config
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.startup.memory_profile import profile_memory
from faser.engine.execution.startup.model_loading import LoadedModel
from faser.engine.execution.startup.runner_factory import ModelRole
from faser.engine.execution.startup.warm_up import STAGE, ResidentModel, prepare_kernels
from faser.kernels.interface.sampling import Ints, Reals, SamplingMetadata
from tests.engine.execution.cuda_graphs.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    WIDTH,
    Side,
    write_heads_of_64,
)
from tests.kernels.cuda.fake_memory import FakeMemory

SEQUENCES, DRAFTS = 3, 1
CONFIG = EngineConfig(
    device="cuda:0",
    backend="flashinfer",
    block_size=BLOCK_SIZE,
    max_num_seqs=SEQUENCES,
    max_num_batched_tokens=8,  # more would share blocks, to which the emulated kernel objects
    speculative_config={"method": "draft_model", "model": "m", "num_speculative_tokens": DRAFTS},
    speculative_policy="fixed",
)


class Counted(TorchSamplingKernels):
    """rows: the number of rows of each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def take(self, logits: Tensor, shaping: SamplingMetadata, uniforms: Reals) -> Ints:
        self.rows.append(len(logits))
        return super().take(logits, shaping, uniforms)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


def resident(checkpoint: Path, role: ModelRole) -> tuple[ResidentModel, Counted]:
    side, counted = Side(checkpoint), Counted()
    side.backend.sampling_kernels = counted
    config = read_model_config(checkpoint)
    model = LoadedModel(config=config, decoder=side.decoder, max_positions=BLOCK_SIZE * WIDTH)
    return ResidentModel(model=model, backend=side.backend, role=role), counted


def test_the_largest_step_samples_all_rows_of_sequences_and_drafts(checkpoint: Path) -> None:
    target, counted = resident(checkpoint, ModelRole.TARGET)
    memory = FakeMemory(total_bytes=1 << 30)
    profile_memory(CONFIG, [target], memory, memory.free_bytes())
    assert counted.rows == [SEQUENCES * (DRAFTS + 1)]
    assert max(counted.rows) <= MAX_LOGIT_ROWS


def test_kernels_of_every_model_are_prepared_and_each_part_is_reported(checkpoint: Path) -> None:
    (target, of_target), (draft, _) = (
        resident(checkpoint, ModelRole.TARGET),
        resident(checkpoint, ModelRole.DRAFTER),
    )
    reports: list[tuple[str, int, int]] = []
    prepare_kernels(CONFIG, [target, draft], lambda *stage: reports.append(stage))
    assert of_target.rows == [DRAFTS + 1]
    assert reports == [(STAGE, done, 4) for done in range(5)]
