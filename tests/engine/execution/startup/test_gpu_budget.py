"""What is done before a GPU's memory is divided: on the emulated device, with a model's real steps.

Bugs these tests have been seen to catch: a rehearsal of one sequence where the largest step is asked for, none at
all, one tenant left out of what is prepared.
"""

from pathlib import Path

import pytest
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.config_json import read_model_config
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.engine.execution.startup.gpu_budget import STAGE, ResidentModel, gpu_budget, prepare_kernels
from faser.engine.execution.startup.model_loading import LoadedModel
from faser.engine.execution.startup.runner_factory import Use
from faser.kernels.interface.sampling_kernels import Ints, Reals
from faser.kernels.interface.sampling_metadata import SamplingMetadata
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
    """rows: how many were chosen for at a time."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def take(self, logits: Tensor, shaping: SamplingMetadata, uniforms: Reals) -> Ints:
        self.rows.append(len(logits))
        return super().take(logits, shaping, uniforms)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


def tenant(checkpoint: Path, use: Use) -> tuple[ResidentModel, Counted]:
    side, counted = Side(checkpoint), Counted()
    side.backend.sampling_kernels = counted
    config = read_model_config(checkpoint)
    model = LoadedModel(config=config, decoder=side.decoder, max_positions=BLOCK_SIZE * WIDTH)
    return ResidentModel(model=model, backend=side.backend, use=use), counted


def test_the_largest_step_chooses_for_all_rows_that_sequences_and_drafts_have(checkpoint: Path) -> None:
    target, counted = tenant(checkpoint, Use.TARGET)
    memory = FakeMemory(total_bytes=1 << 30)
    gpu_budget(CONFIG, [target], memory, memory.free_bytes())
    assert counted.rows == [SEQUENCES * (DRAFTS + 1)]
    assert max(counted.rows) <= MAX_LOGIT_ROWS


def test_kernels_of_every_model_are_prepared_and_each_part_is_told(checkpoint: Path) -> None:
    (target, of_target), (draft, _) = tenant(checkpoint, Use.TARGET), tenant(checkpoint, Use.DRAFTER)
    told: list[tuple[str, int, int]] = []
    prepare_kernels(CONFIG, [target, draft], lambda *stage: told.append(stage))
    assert of_target.rows == [DRAFTS + 1]
    assert told == [(STAGE, done, 4) for done in range(5)]
