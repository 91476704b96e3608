"""An engine on a graph runner with asynchronous scheduling, on the emulated device of test_graph_runner.

Oracle: the same requests on an eager runner, a step at a time. Products of other numbers of rows may round another
way, and a token may then be another one, as on a real device. So nearly all of the answers have to be the same: a
wrong step would change nearly all of them.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from faser.engine.contract.plan import LaunchedStep, StepPlan, StepResult
from faser.engine.control.clock import WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.engine import Engine
from faser.engine.execution.model_executor import ModelExecutor
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    MAX_ROWS,
    NUM_BLOCKS,
    WIDTH,
    Side,
    write_heads_of_64,
    write_recurrent,
)
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

SLOTS, NUM_TOKENS = 4, 14
SIZES = GraphSizes(rows=(2, 4, 8), max_sequences=SLOTS, max_blocks_each=WIDTH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with gated delta nets."""
    return write_recurrent(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps read more of its experts the more rows they have."""
    directory = tmp_path_factory.mktemp("mixture")
    fields = {"vocab_size": VOCAB_SIZE, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 31}
    fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    write_family_model(directory, "qwen3_moe", fields)
    return directory


class RecordingExecutor(ModelExecutor):
    """Keeps the results of its steps, in their order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.results: list[StepResult] = []
        self.num_collected = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.results.append(super().run(plan))
        return self.results[-1]

    def collect(self, launched: LaunchedStep) -> StepResult:
        self.num_collected += 1
        self.results.append(super().collect(launched))
        return self.results[-1]


def executor_over(side: Side, runner: Runner, *, samples_in_runner: bool = True) -> RecordingExecutor:
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), side.backend.sampling_kernels)
    return RecordingExecutor(
        runner,
        sampler,
        BlockTable(SLOTS, WIDTH),
        max_logit_rows=MAX_LOGIT_ROWS,
        samples_in_runner=samples_in_runner,
    )


def engine_over(side: Side, runner: Runner, *, schedules_async: bool) -> Engine:
    executor = executor_over(side, runner, samples_in_runner=schedules_async)
    return engine_with(side, executor, schedules_async=schedules_async)


def engine_with(side: Side, executor: ModelExecutor, *, schedules_async: bool) -> Engine:
    scheduler = Scheduler(
        kv=KvManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=not side.decoder.spec.has_states),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=(2,),
        clock=WallClock(),
    )
    return Engine(scheduler, executor, schedules_async=schedules_async)


def answers(engine: Engine, count: int = 9, num_tokens: int = NUM_TOKENS) -> dict[str, list[int]]:
    """Of more requests than there are slots; every third one draws, every fourth is penalised and has to wait."""
    for i in range(count):
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(range(5 + i, 12 + 2 * i)),
                sampling=SamplingParams(
                    temperature=0.7 * (i % 3 == 0),
                    top_k=20 * (i % 2),
                    presence_penalty=0.5 * (i % 4 == 3),
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    seed=i,
                ),
                arrival_s=float(i),
            )
        )
    said: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert engine.stats().kv_usage == 0.0
    return said


@pytest.mark.parametrize("model", ["checkpoint", "recurrent"])
def test_answers_are_those_of_an_engine_that_calls_kernel_after_kernel(
    model: str, request: pytest.FixtureRequest
) -> None:
    checkpoint: Path = request.getfixturevalue(model)
    eager, replayed = Side(checkpoint), Side(checkpoint)
    wanted = answers(engine_over(eager, eager.eager(), schedules_async=False))

    found = answers(engine_over(replayed, replayed.graph_runner(SIZES), schedules_async=True))

    assert {name: len(token_ids) for name, token_ids in found.items()} == dict.fromkeys(wanted, NUM_TOKENS)
    assert sum(found[name] == wanted[name] for name in wanted) >= len(wanted) - 2


class OtherCounts:
    """A runner of a mixture that keeps what each forward has read, or whose experts are not counted."""

    def __init__(self, runner: Runner, *, counts: bool) -> None:
        self._runner = runner
        self.read: list[int] = []
        if counts:
            self.forward = self._counted
        else:
            self.count_experts = lambda: lambda: 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _counted(self, batch: RowBatch) -> None:
        before = self._runner.experts_read
        self._runner.forward(batch)
        self.read.append(self._runner.experts_read - before)


@pytest.mark.parametrize("schedules_async", [False, True])
def test_a_step_counts_the_experts_that_its_own_forward_has_read(schedules_async: bool, mixture: Path) -> None:
    """Oracle: the count as it stands before and after each forward. Planted: the count of the step before."""
    side = Side(mixture)
    runner = OtherCounts(side.graph_runner(SIZES), counts=True)
    executor = executor_over(side, cast("Runner", runner))
    answers(engine_with(side, executor, schedules_async=schedules_async), 3)
    found = [each.experts for each in executor.results]
    assert len(set(runner.read)) > 3
    assert executor.num_collected == (len(found) if schedules_async else 0)
    sampled = [any(each.counts) for each in executor.results]
    assert found == [count if counts else 0 for count, counts in zip(runner.read, sampled, strict=True)]


@pytest.mark.parametrize("schedules_async", [False, True])
def test_counting_experts_adds_no_wait(schedules_async: bool, mixture: Path) -> None:
    """Oracle: the same steps where nothing is counted; no request is penalised, whose logits the host reads."""

    def waits(*, counts: bool) -> int:
        device = FakeAccelerator()
        side = Side(mixture, fake_backend(device))
        runner = side.graph_runner(SIZES)
        uncounted = cast("Runner", OtherCounts(runner, counts=False))
        executor = executor_over(side, runner if counts else uncounted)
        before = device.waits
        with NoNumbersRead():
            answers(engine_with(side, executor, schedules_async=schedules_async), 3, num_tokens=6)
        assert any(each.experts for each in executor.results) == counts
        return device.waits - before

    assert waits(counts=True) == waits(counts=False) > 0


class NoNumbersRead(TorchFunctionMode):
    """Fails where a 64-bit number is read from a tensor: on a device the host waits for all its work then.

    Numbers of 32 bits are those of layouts on the host.
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = func in (Tensor.item, Tensor.__int__) and args[0].dtype is torch.int64
        assert not reads, f"{func.__name__} within a step"
        return func(*args, **(kwargs or {}))
