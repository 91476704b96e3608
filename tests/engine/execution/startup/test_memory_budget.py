"""How a GPU's memory is divided.

Oracle: a simulated device on which everything is then really taken. Bugs that these tests have caught: memory in
the allocator's cache counted as needed, kernels that bypass the allocator forgotten, weights hidden by memory that
another process freed, the share taken of the free memory, more granted than is free, a step counted from zero,
workspaces forgotten.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.config.engine import EngineConfig
from faser.engine.execution.startup.memory import MemoryBudget
from faser.engine.execution.startup.warm_up import measure_budget
from faser.errors import ConfigError
from tests.kernels.cuda.fake_memory import FakeMemory

SIZES = st.integers(min_value=0, max_value=100)


def config(share: float = 0.9) -> EngineConfig:
    return EngineConfig(device="cuda", gpu_memory_utilization=share)


class Machine:
    """A device on which a step takes `step` bytes while it runs, and the first leaves a workspace and kernels."""

    def __init__(self, memory: FakeMemory, step: int, workspace: int, kernels: int) -> None:
        self.memory = memory
        self._step = step
        self._workspace, self._kernels = workspace, kernels

    def step(self) -> None:
        self.memory.allocate(self._workspace)
        self.memory.past += self._kernels
        self._workspace = self._kernels = 0
        self.memory.allocate(self._step)
        self.memory.free(self._step)


def test_every_part_has_its_own_bytes() -> None:
    memory = FakeMemory(total_bytes=200, others=10)
    start = memory.free_bytes()
    memory.allocate(70)
    memory.free(30)  # needed only while loading
    machine = Machine(memory, step=7, workspace=3, kernels=2)
    found = measure_budget(config(0.5), memory, start, machine.step, graph_bytes=5, workspaces_bytes=1)
    assert found == MemoryBudget(
        device="cuda:0",
        total_bytes=200,
        share=0.5,
        free_bytes=190,
        loaded_bytes=45,
        step_bytes=7,
        step_rows=256,
        graph_bytes=5,
        workspaces_bytes=1,
    )
    assert (found.granted_bytes, found.left_bytes, found.most_bytes) == (100, 42, 132)


@given(
    others=SIZES,
    weights=SIZES,
    rest=SIZES,
    step=SIZES,
    workspace=SIZES,
    kernels=SIZES,
    graphs=SIZES,
    share=st.floats(min_value=0.01, max_value=1),
)
def test_what_is_left_can_be_taken_and_no_more_would_be_within_the_share(
    others: int, weights: int, rest: int, step: int, workspace: int, kernels: int, graphs: int, share: float
) -> None:
    memory = FakeMemory(total_bytes=1000, others=others)
    start = memory.free_bytes()
    memory.allocate(weights + rest)
    memory.free(rest)
    machine = Machine(memory, step, workspace, kernels)
    budget = measure_budget(config(share), memory, start, machine.step, graph_bytes=graphs, workspaces_bytes=0)
    memory.allocate(budget.left_bytes)
    memory.allocate(graphs)
    memory.reset_peak()
    machine.step()
    ours = memory.peak_bytes() + memory.past
    granted = min(int(1000 * share), 1000 - others)
    assert ours == granted or (budget.left_bytes == 0 and ours > granted)


def test_no_more_is_granted_than_was_free() -> None:
    memory = FakeMemory(total_bytes=100, others=60)
    found = measure_budget(config(), memory, 40, lambda: None, graph_bytes=0, workspaces_bytes=0)
    assert (found.granted_bytes, found.left_bytes) == (40, 40)


def test_memory_that_another_process_frees_does_not_hide_weights() -> None:
    memory = FakeMemory(total_bytes=100, others=50)
    start = memory.free_bytes()
    memory.allocate(20)
    memory.others = 0
    found = measure_budget(config(), memory, start, lambda: None, graph_bytes=0, workspaces_bytes=0)
    assert found.loaded_bytes == 20


def test_nothing_is_left_where_more_is_taken_than_granted() -> None:
    memory = FakeMemory(total_bytes=100)
    memory.allocate(95)
    found = measure_budget(config(), memory, 100, lambda: None, graph_bytes=2, workspaces_bytes=1)
    assert (found.left_bytes, found.most_bytes) == (0, 2)


def test_a_step_without_room_is_refused_with_its_rows() -> None:
    memory = FakeMemory(total_bytes=100 << 30)
    memory.allocate(98 << 30)
    machine = Machine(memory, step=3 << 30, workspace=0, kernels=0)
    with pytest.raises(ConfigError) as caught:
        measure_budget(config(), memory, 100 << 30, machine.step, graph_bytes=0, workspaces_bytes=0)
    assert str(caught.value) == (
        "--max-num-batched-tokens is 256; cuda:0 has no room for a step of 256 rows in addition to "
        "the models, which take 98GiB; 100GiB were free"
    )


def test_the_description_names_every_part_with_its_unit() -> None:
    memory = FakeMemory(total_bytes=140 << 30, others=1 << 30)
    memory.allocate(15 << 30)
    machine = Machine(memory, step=1 << 30, workspace=0, kernels=0)
    found = measure_budget(
        config(), memory, 139 << 30, machine.step, graph_bytes=1 << 29, workspaces_bytes=128 << 20
    )
    assert found.describe() == (
        "cuda:0 has 140GiB, of which 139GiB were free; --gpu-memory-utilization 0.9 grants 126GiB; loaded 15GiB, "
        "a step of 256 rows 1GiB, CUDA graphs 512MiB, workspaces 128MiB; left for the KV cache: 109.4GiB"
    )
